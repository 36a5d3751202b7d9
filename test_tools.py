"""The tests of tools/: `python -m pytest -q test_tools.py`. Golden numbers are to 1e-6, computed apart."""
import copy
import inspect
import math
import subprocess
import sys

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import nano_grpo as ng
import tiny
from tools import bench
from tools.cs336 import edition_2025, edition_2026

TOKENIZER = tiny.tiny_tokenizer(ng.R1_ZERO_PROMPT)

# --- Helpers -----------------------------------------------------------------------------------------------
def f64(values):
    return torch.tensor(values, dtype=torch.float64)

def close(got, want, tolerance=1e-6):
    """Equal to 1e-6, absolute and relative, with the same shape; both become float64."""
    got, want = (torch.as_tensor(x).detach().to(torch.float64) for x in (got, want))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)

def random_policy(vocab=len(TOKENIZER), tied=False):
    """A Qwen2 with random weights, large enough to make log-probs that differ."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                         initializer_range=0.3, tie_word_embeddings=tied)
    return Qwen2ForCausalLM(config).double().eval()

# --- The names of the course -------------------------------------------------------------------------------
@pytest.mark.parametrize("name, parameters", [
    ("compute_entropy", "logits"), ("masked_mean", "tensor mask dim"),
    ("masked_normalize", "tensor mask dim normalize_constant"),
    ("compute_naive_policy_gradient_loss", "raw_rewards_or_advantages policy_log_probs"),
    ("compute_grpo_clip_loss", "advantages policy_log_probs old_log_probs cliprange"),
    ("compute_policy_gradient_loss",
     "policy_log_probs loss_type raw_rewards advantages old_log_probs cliprange")])
def test_parameters_have_the_names_of_the_course(name, parameters):
    """Those of the other functions are the keywords of the calls below."""
    assert list(inspect.signature(getattr(edition_2025, name)).parameters) == parameters.split()

def test_tokenize_prompt_and_output_aligns_the_mask_with_the_labels():
    texts = [("What is 1 + 2 ?", " 3 </think>"), ("a", " 1 2 3 4 5")]
    prompts, outputs = zip(*texts)
    batch = edition_2026.tokenize_prompt_and_output(
        prompt_strs=prompts, output_strs=outputs, tokenizer=TOKENIZER)
    assert set(batch) == {"input_ids", "labels", "response_mask"}
    for i, (prompt_ids, output_ids) in enumerate(map(TOKENIZER.encode, pair) for pair in texts):
        whole = prompt_ids + output_ids  # no end of text is added
        assert batch["labels"][i][batch["response_mask"][i]].tolist() == output_ids
        assert batch["response_mask"][i].tolist().index(True) == len(prompt_ids) - 1
        assert batch["input_ids"][i].tolist()[:len(whole)] == whole[:batch["input_ids"].shape[1]]
        assert batch["labels"][i].tolist()[:len(whole) - 1] == whole[1:]

def test_get_response_log_probs_are_those_of_all_logits():
    policy, ids, labels = random_policy(), torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    got = edition_2025.get_response_log_probs(model=policy, input_ids=ids, labels=labels,
                                              return_token_entropy=True)
    log_probs = policy(ids).logits.log_softmax(-1)
    close(got["log_probs"], log_probs[0, range(3), [2, 3, 4]][None])
    close(got["token_entropy"], -(log_probs.exp() * log_probs).sum(-1))
    close(edition_2025.compute_entropy(policy(ids).logits), got["token_entropy"])
    assert set(edition_2025.get_response_log_probs(policy, ids, labels)) == {"log_probs"}
    half = torch.tensor([[9.0, 8.7, 8.3]]).bfloat16()
    close(edition_2025.compute_entropy(half), edition_2025.compute_entropy(half.double()))

def test_masked_sums_and_means():
    tensor, mask = f64([[1, 2, 4], [8, 16, 32]]), torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
    close(edition_2025.masked_mean(tensor, mask), 13 / 3)
    close(edition_2025.masked_mean(tensor, mask, dim=1), [2.5, 8])
    assert edition_2025.masked_mean(tensor, mask, dim=0).isnan().tolist() == [False, True, False]
    close(edition_2025.masked_normalize(tensor, mask, normalize_constant=2.0), 6.5)
    close(edition_2025.masked_normalize(tensor, mask, dim=0, normalize_constant=4.0), [2.25, 0, 1])

def reward_by_length(response, ground_truth):
    return {"reward": len(response) / 4, "format_reward": 1, "answer_reward": response == ground_truth}

@pytest.mark.parametrize("by_std, want", [(True, [-.70710478, .70710478, 0, 0]), (False, [-.25, .25, 0, 0])])
def test_rewards_of_2025_are_graded_and_compared_in_their_group(by_std, want):
    advantages, raw, metadata = edition_2025.compute_group_normalized_rewards(
        reward_fn=reward_by_length, rollout_responses=["a", "abc", "x", "y"],
        repeated_ground_truths=list("aaxx"), group_size=2, advantage_eps=1e-6, normalize_by_std=by_std)
    close(raw, [.25, .75, .25, .25])
    close(advantages, want)
    close(metadata["reward"], .375)

# Groups (1, 0, 0, 1) and (0, 0, .5, .5): means .5 and .25, unbiased deviations .57735027 and .28867513.
@pytest.mark.parametrize("baseline, normalizer, want", [
    ("mean", "std", [[.8660239, -.8660239, -.8660239, .8660239], [-.8660224, -.8660224, .8660224, .8660224]]),
    ("mean", "none", [[.5, -.5, -.5, .5], [-.25, -.25, .25, .25]]),
    ("mean", "mean", [[.999998, -.999998, -.999998, .999998], [-.999996, -.999996, .999996, .999996]]),
    ("none", "std", [[1.7320478, 0, 0, 1.7320478], [0, 0, 1.7320448, 1.7320448]]),
    ("none", "none", [[1, 0, 0, 1], [0, 0, .5, .5]]),
    ("none", "mean", [[1.999996, 0, 0, 1.999996], [0, 0, 1.999992, 1.999992]])])
def test_group_normalized_rewards_of_2026(baseline, normalizer, want):
    rewards = f64([1, 0, 0, 1, 0, 0, .5, .5])
    advantages, metadata = edition_2026.compute_group_normalized_rewards(
        raw_rewards=rewards, group_size=4, baseline=baseline, advantage_eps=1e-6,
        advantage_normalizer=normalizer)
    close(advantages, f64(want).flatten())
    assert metadata == {"mean": .375, "max": 1.0}
    close(rewards, [1, 0, 0, 1, 0, 0, .5, .5])  # they stay as they were

# Two rows: log-probs -1, -2 with advantage 2, and -.5, -3 with -1. Ratios 1.2, .5 and .8, 2; cliprange .1.
RATIOS, ADVANTAGES = f64([[1.2, .5], [.8, 2.0]]), f64([2.0, -1.0])
SQUARE_ROOTS = [math.sqrt(.6), math.sqrt(1.6)]  # geometric means of the ratios of a row

@pytest.mark.parametrize("method, loss, factors, clipped", [
    ("none", [[2, 4], [-.5, -3]], [[-2, -2], [1, 1]], [[0, 0], [0, 0]]),
    ("noclip", [[-2.4, -1], [.8, 2]], [[-2.4, -1], [.8, 2]], [[0, 0], [0, 0]]),
    ("grpo", [[-2.2, -1], [.9, 2]], [[0, -1], [0, 2]], [[1, 0], [1, 0]]),
    # the gradient of a row's ratio goes to both of its tokens, and both carry the row's loss
    ("gspo", [[-2 * SQUARE_ROOTS[0]] * 2, [SQUARE_ROOTS[1]] * 2],
     [[-2 * SQUARE_ROOTS[0]] * 2, [SQUARE_ROOTS[1]] * 2], [[0, 0], [0, 0]]),
    ("cispo", [[2.2, 2], [-.4, -3.3]], [[-2.2, -1], [.8, 1.1]], [[1, 0], [0, 1]])])
def test_policy_gradient_losses_of_2026(method, loss, factors, clipped):
    """`factors`: the gradient of the sum of the loss with respect to the log-probs."""
    log_probs = f64([[-1, -2], [-.5, -3]]).requires_grad_()
    old_log_probs = (log_probs.detach() - RATIOS.log()).requires_grad_()
    for advantages in (ADVANTAGES, ADVANTAGES[:, None]):
        got, metadata = edition_2026.compute_policy_gradient_loss(
            raw_rewards_or_advantages=advantages, policy_log_probs=log_probs,
            importance_reweighting_method=method, old_log_probs=old_log_probs, cliprange=.1,
            response_mask=torch.ones(2, 2))
        close(got, loss)
        close(torch.autograd.grad(got.sum(), log_probs)[0], factors)
        assert metadata["is_clipped"].tolist() == torch.tensor(clipped).bool().tolist()
    assert old_log_probs.grad is None

def test_gspo_takes_the_ratio_over_response_tokens_only():
    log_probs, mask = f64([[-1, -2, -9]]), torch.tensor([[1, 1, 0]]).bool()
    old_log_probs = log_probs - f64([[1.1, 1.0, 50.0]]).log()
    loss, _ = edition_2026.compute_policy_gradient_loss(f64([-1]), log_probs, "gspo", old_log_probs, .2, mask)
    close(loss[mask], [math.sqrt(1.1)] * 2)

@pytest.mark.parametrize("method, given, missing", [
    ("noclip", {}, "old_log_probs"), ("grpo", {"cliprange": .1}, "old_log_probs"),
    ("grpo", {"old_log_probs": torch.zeros(1, 1)}, "cliprange"),
    ("cispo", {"old_log_probs": torch.zeros(1, 1)}, "cliprange"),
    ("gspo", {"old_log_probs": torch.zeros(1, 1), "cliprange": .1}, "response_mask")])
def test_a_missing_argument_is_named(method, given, missing):
    with pytest.raises(ValueError, match=f"needs {missing}"):
        edition_2026.compute_policy_gradient_loss(torch.ones(1), torch.zeros(1, 1), method, **given)
    if missing != "response_mask":
        with pytest.raises(ValueError, match=f"needs {missing}"):
            edition_2026.grpo_train_step(*[None] * 10, importance_reweighting_method=method, **given)

def test_clipped_loss_of_2025_is_that_of_2026():
    log_probs, weights = f64([[-1, -2], [-.5, -3]]), ADVANTAGES[:, None]
    old_log_probs = log_probs - RATIOS.log()
    loss, _ = edition_2025.compute_grpo_clip_loss(weights, log_probs, old_log_probs, .1)
    close(loss, [[-2.2, -1], [.9, 2]])
    close(edition_2025.compute_naive_policy_gradient_loss(weights, log_probs), [[2, 4], [-.5, -3]])
    with pytest.raises(ValueError, match="needs weights"):
        edition_2025.compute_policy_gradient_loss(log_probs, "no_baseline", advantages=weights)

def test_aggregation_of_2026():
    loss = f64([[1, 2, 3, 90], [4, 90, 90, 90]]).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    mean = edition_2026.aggregate_loss_across_microbatch(
        per_token_policy_gradient_loss=loss, mask=mask.bool(), loss_normalization="sequence")
    close(mean, 3)  # of the rows' means, 2 and 4
    close(torch.autograd.grad(mean, loss)[0], [[1 / 6, 1 / 6, 1 / 6, 0], [.5, 0, 0, 0]])
    total = edition_2026.aggregate_loss_across_microbatch(loss, mask, "constant", normalization_constant=8)
    close(total, 10 / 8)
    close(torch.autograd.grad(total, loss)[0], mask / 8)

def test_sft_microbatch_step():
    log_probs = f64([[-1, -2, -3], [-4, -5, -6]]).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    loss, _ = edition_2025.sft_microbatch_train_step(
        policy_log_probs=log_probs, response_mask=mask, gradient_accumulation_steps=3, normalize_constant=2.0)
    close(loss, (3 + 15) / 2 / 2 / 3)  # summed over tokens / constant, mean over rows, / accumulation
    close(log_probs.grad, mask * -1 / 12)

@pytest.mark.parametrize("loss_type, want", [
    ("no_baseline", 1.5), ("reinforce_with_baseline", 1.5), ("grpo_clip", -.625)])
def test_grpo_microbatch_step_is_a_mean_of_row_means_scaled_by_accumulation(loss_type, want):
    """A global masked mean, or the loss returned unscaled, pass the loose tolerance of the course."""
    log_probs = f64([[-1, -2, -3, -9], [-4, -9, -9, -9]]).requires_grad_()
    mask, weights = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool(), f64([[2.0], [0.5]])
    kind = "raw_rewards" if loss_type == "no_baseline" else "advantages"
    loss, _ = edition_2025.grpo_microbatch_train_step(
        policy_log_probs=log_probs, response_mask=mask, gradient_accumulation_steps=2, loss_type=loss_type,
        old_log_probs=log_probs.detach().clone(), cliprange=0.2, **{kind: weights})
    close(loss, want)
    close(log_probs.grad, [[-2 / 3 / 4] * 3 + [0], [-.5 / 4, 0, 0, 0]])

# --- A whole step of 2026, against plain PyTorch -----------------------------------------------------------
PROMPTS = ["What is 1 + 2 ?"] * 2 + ["1 +"] * 2 + ["a"] * 2
RESPONSES = [" 3", " 4 5 6 7", " 2 </think>", " 2 3 4", " 1 2", " 9 8 7"]
REWARDS = dict(zip(RESPONSES, [1.0, 0.0, 0.5, 0.25, 1.0, 1.0]))  # the last group is all equal

def plain_step(policy, old_log_probs, baseline, normalizer, method, normalization, constant, max_norm):
    """One optimizer step, a row at a time, as the course's text has it -> (loss, norm of the gradient)."""
    grouped, total = f64(list(REWARDS.values())).view(3, 2), 0.0
    scale = {"std": grouped.std(1) + 1e-6, "mean": grouped.mean(1) + 1e-6, "none": torch.ones(3)}[normalizer]
    shift = grouped.mean(1, keepdim=True) if baseline == "mean" else 0.0
    advantages = ((grouped - shift) / scale[:, None]).flatten()
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        prompt_ids, ids = TOKENIZER.encode(prompt), TOKENIZER.encode(response)
        logits = policy(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1:-1]
        log_probs = logits.log_softmax(-1)[range(len(ids)), ids]
        log_ratio = log_probs - old_log_probs[i, len(prompt_ids) - 1:][:len(ids)]
        ratio = (log_ratio.mean() if method == "gspo" else log_ratio).exp().expand(len(ids))
        loss = -ratio * advantages[i]
        if method == "none":
            loss = -log_probs * advantages[i]
        if method in ("grpo", "gspo"):
            loss = torch.maximum(loss, -ratio.clamp(.9, 1.1) * advantages[i])
        if method == "cispo":
            loss = -ratio.clamp(max=1.1).detach() * log_probs * advantages[i]
        total = total + (loss.mean() / len(PROMPTS) if normalization == "sequence" else loss.sum() / constant)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm).item()
    torch.optim.SGD(policy.parameters(), lr=.1).step()
    return total.item(), norm

@pytest.mark.parametrize("baseline, normalizer, method, normalization, max_norm, accumulation", [
    ("mean", "std", "none", "sequence", 1.0, 2), ("mean", "std", "none", "constant", None, 3),
    ("mean", "none", "none", "constant", .01, 2), ("none", "none", "none", "constant", 1.0, 6),
    ("mean", "mean", "none", "constant", 1.0, 4), ("mean", "std", "noclip", "sequence", 1.0, 2),
    ("mean", "std", "grpo", "sequence", 1.0, 1), ("none", "mean", "gspo", "sequence", None, 2),
    ("mean", "none", "cispo", "constant", .1, 5)])
def test_a_step_of_2026_is_plain_pytorch(baseline, normalizer, method, normalization, max_norm, accumulation):
    policy, plain, constant = random_policy(), random_policy(), 32 if normalization == "constant" else None
    start = policy.lm_head.weight.detach().clone()
    batch = edition_2026.tokenize_prompt_and_output(PROMPTS, RESPONSES, TOKENIZER)
    old = edition_2026.get_response_log_probs(policy, batch["input_ids"], batch["labels"])["log_probs"]
    old = old.detach() + torch.linspace(-.4, .4, old.numel(), dtype=old.dtype).reshape_as(old)
    loss, metadata = edition_2026.grpo_train_step(
        model=policy, tokenizer=TOKENIZER, optimizer=torch.optim.SGD(policy.parameters(), lr=.1),
        gradient_accumulation_steps=accumulation, max_grad_norm=max_norm,
        reward_fn=lambda response, truth: REWARDS[response], repeated_prompts=PROMPTS,
        rollout_responses=RESPONSES, repeated_ground_truths=[""] * 6, group_size=2, baseline=baseline,
        advantage_eps=1e-6, advantage_normalizer=normalizer, importance_reweighting_method=method,
        old_log_probs=None if method == "none" else old,
        cliprange=None if method in ("none", "noclip") else .1, loss_normalization=normalization,
        normalization_constant=constant)
    want, norm = plain_step(plain, old, baseline, normalizer, method, normalization, constant,
                            max_norm or math.inf)
    close(loss, want)
    close(metadata["grad_norm"], norm)
    assert norm > .1 and (plain.lm_head.weight - start).abs().max() > 1e-5
    for got, weight in zip(policy.parameters(), plain.parameters()):
        close(got, weight)
        assert got.grad is None

def test_a_train_step_of_2026_that_is_not_finite_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = random_policy()
    start = copy.deepcopy(policy.state_dict())
    loss, metadata = edition_2026.grpo_train_step(
        policy, TOKENIZER, torch.optim.SGD(policy.parameters(), lr=.1), 2, 1.0, lambda text, _: REWARDS[text],
        PROMPTS, RESPONSES, [""] * 6, 2, importance_reweighting_method="noclip",
        old_log_probs=torch.full((6, 40), -torch.inf))
    assert loss.isnan() and all(weight.grad is None for weight in policy.parameters())
    assert all(value.equal(start[name]) for name, value in policy.state_dict().items())
    assert not list(tmp_path.iterdir())

# --- Bench -------------------------------------------------------------------------------------------------
def test_bench_prints_a_table_of_three_sizes_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "matmul_rate", lambda repeats, device: 1e11)
    sizes, train_step = [], ng.train_step
    monkeypatch.setattr(ng, "train_step", lambda *parts: sizes.append(len(parts[2])) or train_step(*parts))
    bench.main("--rollout-batch-size 16 --shape vocab_size=600 num_hidden_layers=1 --row-lengths 8 16"
               " --repeats 2 --loss gspo --kl-coef 1 --microbatch-tokens 99 --gradient-checkpointing".split())
    assert sizes == [16] * 3 + [32] * 3 + [64] * 3  # one optimizer step each, and one more that warms up
    lines = [line for line in capsys.readouterr().out.splitlines() if "|" in line]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [len(line) for line in table] == [8] * 5 and [line[0] for line in table[2:]] == ["16", "32", "64"]
    policy = bench.random_model("tiny", ["vocab_size=600", "num_hidden_layers=1"])
    for count, line in zip((16, 32, 64), table[2:]):
        rows, seconds = bench.ragged_rows(count, 600, 8, (8, 16)), float(line[2].split()[0])
        amounts = [count, sum(map(len, rows)), bench.step_flops(policy, rows) / 1e12]
        for cell, amount in zip(line[3:], amounts):
            assert float(cell.replace(",", "")) * seconds == pytest.approx(amount, rel=0.02)
        assert int(line[1]) == amounts[1] and line[6].endswith("% of 0.1") and 0.1 < float(line[7]) < 9
    assert not list(tmp_path.iterdir())

def test_ragged_rows_have_the_lengths_asked_for_and_groups_share_a_prompt():
    rows = bench.ragged_rows(400, 1000, 4, (32, 512))
    lengths = [len(row) for row in rows]
    assert 32 <= min(lengths) < 60 and 480 < max(lengths) <= 512 and all(row.advantage for row in rows)
    for group in ng.chunks(rows, 4):
        assert len({id(row.example) for row in group}) == 1
    assert bench.ragged_rows(4, 1000, 4, (32, 512)) == rows[:4]

def test_step_flops_are_counted_by_hand():
    policy = random_policy(vocab=100)  # hidden 32, inner 64, 2 layers, 4 heads and 2 for keys, of 8
    row = ng.Row(ng.Example("", "", prompt_ids=[1] * 6), [2] * 4)
    body = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)
    forward = 2 * body * 10 + 2 * 100 * 32 * 4 + 2 * (2 * 32) * 10 ** 2
    assert bench.step_flops(policy, [row, row]) == 2 * 3 * forward
    assert bench.step_flops(random_policy(vocab=100, tied=True), [row]) == 3 * forward

@pytest.mark.parametrize("shape", ["hiden=3", "hidden_size", "num_attention_heads=x", "hidden_size=-1",
                                   "num_attention_heads=3", "num_attention_heads=0", "num_hidden_layers=1.5",
                                   "hidden_size=null"])
def test_a_shape_that_cannot_be_is_refused_in_one_line(shape, capsys):
    with pytest.raises(SystemExit):
        bench.random_model("tiny", [shape])
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("nano_grpo: error: --model tiny") and shape in line

@pytest.mark.parametrize("flags, named", [
    ("--train-batch-size 8", "--train-batch-size does nothing"), ("--overlap", "--overlap does nothing"),
    ("--epochs-per-rollout-batch 2", "--epochs-per-rollout-batch does nothing"),
    ("--mode sft", "--mode does nothing"), ("--curriculum uniform", "--curriculum does nothing"),
    ("--baseline loo", "--baseline does nothing"), ("--eval-every 3", "--eval-every does nothing"),
    ("--row-lengths 3 8", "--row-lengths"), ("--row-lengths 8 4", "--row-lengths"),
    ("--repeats 0", "--repeats"), ("--tau 0.2", "--tau needs --loss kimi"), ("--hape x", "--hape"),
    ("--model /nope", "--model /nope"), ("--rollout-batch-size 12", "--group-size 8 does not divide")])
def test_bench_refuses_flags_that_it_would_ignore_or_cannot_take(flags, named, capsys):
    with pytest.raises(SystemExit) as stop:
        own, args = bench.parse(flags.split())
        bench.random_model(args.model, own.shape)
    line, = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and named in line

def test_bench_runs_from_any_folder(tmp_path):
    out = subprocess.check_output([sys.executable, bench.__file__, "--help"], cwd=tmp_path, text=True)
    assert "--row-lengths" in out
