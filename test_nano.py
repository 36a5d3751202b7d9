"""The tests of nano_grpo.py: `python -m pytest -q test_nano.py`. Of flags, data and tiny model: test_data.py.

Golden numbers are to 1e-6 and were computed apart from this code. Invariances go through the real train_step
on a random float64 model. Whole runs and the vLLM engine are in test_run.py, the grader in test_rewards.py.
"""
import ast
import functools
import hashlib
import inspect
import itertools
import math
import statistics
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

import data
import model
import nano_grpo as ng
import rewards
import run
import tiny

ROOT = Path(ng.__file__).resolve().parent
AGGREGATIONS = ("sequence", "token", "constant")
TOKENIZER = tiny.tiny_tokenizer(ng.R1_ZERO_PROMPT)
EOS = TOKENIZER.eos_token_id
THINK, ANSWER, CLOSE = TOKENIZER.encode("</think><answer></answer>")
GOOD = " 2+3 is 5. </think> <answer> 5 </answer>"

# --- Helpers -----------------------------------------------------------------------------------------------
def f64(values):
    return torch.tensor(values, dtype=torch.float64)

def close(got, want, tolerance=1e-6):
    """Equal to 1e-6, absolute and relative, with the same shape; both become float64."""
    got, want = (x.detach().double() if torch.is_tensor(x) else f64(x) for x in (got, want))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)

def settings(*argv):
    """Flags as a command line would give them, on a machine without CUDA."""
    args = ng.configure(ng.parse_args([word for part in argv for word in part.split()]), False)
    args.context = 1024  # of the model, in tokens
    return args

def random_policy(seed=0, tied=False, vocab=len(TOKENIZER), dtype=torch.float64, layers=2):
    """A Qwen2 with random weights, large enough to make log-probs that differ."""
    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                         initializer_range=0.3, tie_word_embeddings=tied, eos_token_id=EOS, bos_token_id=None)
    return Qwen2ForCausalLM(config).to(dtype).eval()

def chain_policy(next_id, default=EOS):
    """A Qwen2 that says next_id[token] after token, with probability 1, whatever came before."""
    size = len(TOKENIZER) // 2 * 2 + 2  # even, for the rotary embedding
    policy = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=size, hidden_size=size, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=False, eos_token_id=EOS, bos_token_id=None)).eval()
    with torch.no_grad():
        policy.model.layers[0].self_attn.o_proj.weight.zero_()
        policy.model.layers[0].mlp.down_proj.weight.zero_()
        policy.model.embed_tokens.weight.copy_(torch.eye(size))
        policy.lm_head.weight.zero_()
        for token in range(size):
            policy.lm_head.weight[next_id.get(token, default), token] = 10.0  # times sqrt(size)
    return policy

def make_sampler(policy, args, tokenizer=TOKENIZER, version=0):
    sampler = ng.HFSampler(policy, tokenizer, [EOS], ng.PROMPTS[args.prompt].stop, args.temperature,
                           args.min_tokens, args.sampler_batch_size)
    sampler.push(policy, version)
    return sampler

def make_row(prompt, response, advantage=1.0, **fields):
    return ng.Row(ng.Example("q", "a", None, prompt), response, advantage=advantage, **fields)

def make_rows():
    """Responses of 1, 2 and 4 tokens with advantages 1, -0.5 and 2, on prompts of different length."""
    return [make_row([5, 6, 7], [8], 1.0), make_row([9], [10, 11], -0.5),
            make_row([3, 4], [12, 13, 14, 15], 2.0)]

def many_rows(count):
    """Responses of 1, 2 and 3 tokens with advantages 1 and -1 in turn."""
    return [make_row([i + 1, 2], [i + 3, 4, 5][:1 + i % 3], (-1.0) ** i) for i in range(count)]

def set_ratios(policy, rows, ratios):
    """Sets old log-probs, such that these are the ratios of the tokens."""
    for row, ratio in zip(rows, ratios):
        row.old_log_probs = (plain_log_probs(policy, row) - f64(ratio).log()).tolist()
    return rows

def off_policy_rows(policy):
    """make_rows with ratios of rows of about 1.0001, 0.9 and 0.82, and of tokens on both sides."""
    ratios = [[math.exp(-shift) for shift in shifts] for shifts in ([-.0001], [.3, -.1], [.1, .2, .6, -.1])]
    return set_ratios(policy, make_rows(), ratios)

def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])

def gradient(policy, rows, args):
    """Gradient of one real optimizer step (with learning rate 0), as one vector, and its metrics."""
    policy.zero_grad()
    sums = ng.train_step(policy, torch.optim.SGD(policy.parameters(), lr=0.0), rows, args)
    return flat(weight.grad for weight in policy.parameters()), sums

def plain_logits(policy, row, temperature):
    """(tokens, V) logits of a response, of one row, without padding, tiles or masks."""
    ids = torch.tensor([row.example.prompt_ids + row.response_ids])
    return policy(ids, use_cache=False).logits[0, len(row.example.prompt_ids) - 1:-1] / temperature

def plain_log_probs(policy, row, temperature=1.0):
    log_probs = plain_logits(policy, row, temperature).log_softmax(-1)
    return log_probs[range(len(row.response_ids)), row.response_ids]

def formula_loss(policy, row, args):
    """The losses of the papers, (tokens,) of one row; that of Kimi for the row as a whole, by its tokens."""
    x, a = plain_log_probs(policy, row, args.temperature), row.advantage
    old = x.detach() if row.old_log_probs is None else f64(row.old_log_probs)
    rho, s = (x - old).exp(), (x - old).mean().exp() + 0 * x
    low, high = 1 - args.cliprange, 1 + args.cliprange_high
    loss = {"pg": -a * x, "noclip": -a * rho, "cispo": -rho.detach().clamp(max=high) * a * x,
            "gspo": -torch.min(s * a, s.clamp(low, high) * a),
            "grpo_clip": -torch.min(rho * a, rho.clamp(low, high) * a),
            "kimi": (-a * x.sum() + args.tau / 2 * (x - old).sum()**2) / len(x) + 0 * x}[args.loss]
    if args.tis_cap:
        loss = loss * (old - f64(row.sampler_log_probs)).exp().clamp(max=args.tis_cap)
    if args.kl_coef:
        d, ratio = x - f64(row.ref_log_probs), (x - x.detach()).exp()
        kl = {"k1": ratio * d, "k2": d**2 / 2, "k3": ratio * ((-d).exp() - 1 + d)}[args.kl]
        loss = loss + args.kl_coef * kl
    if args.entropy_coef:
        distribution = torch.distributions.Categorical(logits=plain_logits(policy, row, args.temperature))
        loss = loss - args.entropy_coef * distribution.entropy()
    return loss

def formula_gradient(policy, rows, args):
    """The oracle of train_step: gradient and value of the whole objective, row by row."""
    tokens = sum(len(row.response_ids) for row in rows)
    constant = 1 if args.loss == "kimi" else args.max_tokens
    divisors = {"sequence": lambda row: len(row.response_ids) * len(rows), "token": lambda row: tokens,
                "constant": lambda row: len(rows) * constant}
    divisor = divisors[args.loss_aggregation]
    total = sum(formula_loss(policy, row, args).sum() / divisor(row) for row in rows)
    policy.zero_grad()
    total.backward()
    return flat(weight.grad for weight in policy.parameters()), total.item()

def watch(monkeypatch, name):
    """Records the arguments of each call of a function of nano_grpo."""
    calls, function = [], getattr(ng, name)

    def watched(*arguments, **named):
        calls.append([list(value) if isinstance(value, list) else value for value in arguments])
        return function(*arguments, **named)
    monkeypatch.setattr(ng, name, watched)
    return calls

def one_line(capsys, action):
    """The one line with which the program ends in action(), or None if it does not."""
    try:
        action()
    except SystemExit as stop:
        lines = capsys.readouterr().err.splitlines()
        assert stop.code == 2 and len(lines) == 1 and lines[0].startswith("nano_grpo: error: ")
        return lines[0]

# --- The house ---------------------------------------------------------------------------------------------
MAY_IMPORT = {"algebra": set(), "rewards": {"algebra"}, "files": set(), "run": {"figures", "files"},
              "figures": {"run"}, "tiny": set(),
              "chat": set(), "memory": set(), "model": set(), "flags": {"chat", "run"},
              "data": {"forms", "tiny"}, "forms": {"rewards"}, "records": {"rewards", "run"},
              "nano_grpo": {"chat", "data", "flags", "forms", "memory", "model", "records", "rewards", "run",
                            "tiny"}}

def our_imports(path, ours):
    """The modules of this repository that a file imports, at its top or inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found & ours

def test_each_file_imports_only_the_rooms_below_it():
    rooms = {path.stem: path for path in ROOT.glob("*.py") if not path.name.startswith("test_")}
    assert rooms.keys() == MAY_IMPORT.keys()
    for path in [*rooms.values(), *ROOT.glob("tools/*.py")]:
        tool = MAY_IMPORT["nano_grpo"] | {"nano_grpo", "figures"}
        assert our_imports(path, rooms.keys()) <= MAY_IMPORT.get(path.stem, tool) | {path.stem}, path

def test_lines_files_and_functions_are_short():
    limits = {"nano_grpo": 900, "rewards": 700, "run": 320, "tiny": 140}
    too_long = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]:
        lines = path.read_text().splitlines()
        too_long += [f"{path.name}: {len(lines)}"] if len(lines) > limits.get(path.stem, math.inf) else []
        too_long += [f"{path.name}:{number}" for number, line in enumerate(lines, 1) if len(line) > 110]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                size = node.end_lineno - node.lineno + 1
                too_long += [f"{node.name}: {size}"] if size > 60 - 20 * (node.name == "train_loop") else []
    assert not too_long

@pytest.mark.parametrize("function", [
    ng.group_advantages, *(loss.compute for loss in ng.LOSSES.values()), ng.kl_estimate, ng.kl_loss,
    ng.aggregate_loss, ng.microbatches, ng.pack, ng.pad, ng.response_log_probs,
    ng.cache_log_probs, ng.sample, ng.check_push, ng.prompt_template, data.load_examples,
    *(method for sampler in (ng.HFSampler, ng.VLLMSampler)
      for method in vars(sampler).values() if inspect.isfunction(method))])
def test_what_others_copy_takes_plain_values_and_never_the_flags(function):
    assert not {"args", "flags"} & set(inspect.signature(function).parameters)

# --- Advantages --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm, values, want", [
    ("std", [[1, 0, 0, 0]], [[1.499997, -0.499999, -0.499999, -0.499999]]),
    ("std", [[1, 0, 0, 0, 0, 0, 0, 0]], [[2.4748667] + 7 * [-0.3535524]]),
    ("std", [[.2, .5, 0, .4], [.9, .7, .2, 0]], [[-0.3382392, 1.0147176, -1.2402104, 0.5637320],
                                                 [1.0706171, 0.5947873, -0.5947872, -1.0706171]]),
    ("batch-std", [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]],
     [[1.4565085] + 3 * [-0.4855028], 2 * [0.9710056] + 2 * [-0.9710056], 4 * [0]]),
    ("mean", [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]],
     [[2.9999880] + 3 * [-0.9999960], 2 * [0.9999980] + 2 * [-0.9999980], 4 * [0]]),
    ("mean", [[.2, .5, 0, .4]], [[-0.2727263, 0.8181789, -0.9999964, 0.4545438]]),
    ("none", [[1, 0, 0, 0]], [[.75, -.25, -.25, -.25]])])
def test_advantages_have_the_golden_numbers_of_each_norm_and_are_centred(norm, values, want):
    got = ng.group_advantages(f64(values), "mean", norm, 1e-6)
    close(got, want)
    assert got.sum(1).abs().max() < 1e-12

def test_batch_std_is_the_rule_of_trl_the_unbiased_std_of_all_rewards_of_the_batch():
    """TRL, scale_rewards="batch": (r - mean of the group) / (std of the batch + eps)."""
    values = [[.2, .5, 0, .4], [.9, .7, .2, 0], [1, 1, 1, 1]]
    std = statistics.stdev(sum(values, []))
    want = [[(one - statistics.mean(group)) / (std + 1e-4) for one in group] for group in values]
    close(ng.group_advantages(f64(values), "mean", "batch-std", 1e-4), want, 1e-12)

@pytest.mark.parametrize("baseline, values, want", [
    ("loo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]), ("loo", [1, 0], [1, -1]),
    ("none", [1, 0, .5, 1], [1, 0, .5, 1]), ("none", [1, 1, 1, 1], [1, 1, 1, 1]),
    ("max", [.2, .5, .5, .1], [0, .5, .5, 0]), ("max", [-1, -2, -3, -1], [-1, 0, 0, -1])])
def test_baselines_without_a_norm(baseline, values, want):
    close(ng.group_advantages(f64([values]), baseline, "none"), [want])

@pytest.mark.parametrize("baseline, norm", [("mean", "std"), ("mean", "batch-std"), ("mean", "mean"),
                                            ("mean", "none"), ("loo", "none"), ("max", "none")])
def test_a_dead_group_gets_exactly_zero(baseline, norm):
    """Twelve float32 rewards of 0.7 divided by std + eps would give 0.1 out of rounding errors."""
    values = torch.tensor([[0.7] * 12, [1.0] + [0.0] * 11])
    advantages = ng.group_advantages(values, baseline, norm)
    assert (advantages[0] == 0).all() and advantages[1].abs().sum() > 0.5
    assert (ng.group_advantages(torch.zeros(1, 8), baseline, norm, 0.0) == 0).all()
    assert ng.group_advantages(torch.zeros(0, 8), baseline, norm).shape == (0, 8)

def shaping_rows():
    """One group: 100 and 200 tokens right, 300 and 500 wrong, the last one truncated."""
    rows = [make_row([1], [2] * length) for length in (100, 200, 300, 500)]
    for row, right in zip(rows, (1.0, 1.0, 0.0, 0.0)):
        row.reward = {"reward": right, "answer_reward": right, "format_reward": 1.0}
        row.text = "all words are english </think> <answer> 5 </answer>"
    rows[3].truncated = True
    return rows

def shaped_rows_to_train_on(rows, step, args):
    for group in ng.chunks(rows, args.group_size):
        ng.shape_rewards(group, step, args)
    return ng.rows_to_train_on(rows, args)

@pytest.mark.parametrize("argv, step, want", [
    ("", 9, [1, 1, 0, 0]), ("--length-reward 1", 1, [1.5, 1.25, 0, -.5]),
    ("--length-reward 0.5 --length-reward-after 4", 4, [1, 1, 0, 0]),
    ("--length-reward 0.5 --length-reward-after 4", 5, [1.25, 1.125, 0, -.25]),
    ("--overlong-cache 256 --max-tokens 500", 1, [1, 1, -56 / 256, -1]),
    ("--length-reward 1 --truncated zero", 1, [1.5, 1.25, 0, 0]),
    ("--language-reward 0.5", 1, [1.5, 1.5, .5, .5]),
    ("--truncated mask --baseline mean --no-std-norm", 1, [.5, .5, -.5])])  # in the baseline, not in the loss
def test_shaping_terms_are_added_to_the_reward(argv, step, want):
    rows = shaped_rows_to_train_on(shaping_rows(), step, settings("--group-size 4 --baseline none", argv))
    close([row.advantage for row in rows], want)

def test_expert_iteration_trains_on_right_rows_and_maxrl_refuses_rewards_under_0(capsys):
    rows = shaped_rows_to_train_on(shaping_rows(), 1, settings("--mode expert_iteration --group-size 4"))
    assert [(row.reward["reward"], row.advantage) for row in rows] == [(1, 1)] * 2
    args = settings("--group-size 4 --advantage-norm mean --length-reward 1")
    line = one_line(capsys, lambda: shaped_rows_to_train_on(shaping_rows(), 1, args))
    assert "--advantage-norm mean" in line and "under 0" in line  # a negative mean would turn the gradient

# --- Identities of policy gradients: over all groups, exactly ----------------------------------------------
def mean_gradient(logits, values, size, advantages):
    """Expectation, over all groups of `size` actions, of the mean of A grad log pi."""
    logits, groups = f64(logits), torch.tensor(list(itertools.product(range(len(logits)), repeat=size)))
    p = logits.softmax(0)
    grad_log_pi = torch.eye(len(logits)).double() - p  # a row an action
    weighted = advantages(f64(values)[groups])[..., None] * grad_log_pi[groups]
    return (p[groups].prod(1)[:, None, None] * weighted).sum(0).mean(0)

def true_gradient(logits, values):
    p = f64(logits).softmax(0)
    return p * (f64(values) - (p * f64(values)).sum())

BANDIT = [.3, -.7, 1.1], [1.0, 0.2, -0.5]

def test_a_baseline_that_does_not_see_the_response_leaves_the_mean_gradient_as_it_is():
    want = true_gradient(*BANDIT)
    for constant in (0.0, 0.4, -3.0):
        got = mean_gradient(*BANDIT, 3, lambda r: ng.group_advantages(r - constant, "none"))
        close(got, want, 1e-10)
    for size in (2, 3, 4):
        got = mean_gradient(*BANDIT, size, lambda r: ng.group_advantages(r, "loo", "none"))
        close(got, want, 1e-10)
        got = mean_gradient(*BANDIT, size, lambda r: ng.group_advantages(r, "mean", "none"))
        close(got, want * (size - 1) / size, 1e-10)  # the mean has the response itself in it

@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("p", [.02, .3, .75])
def test_maxrl_has_the_mean_gradient_of_log_p_truncated_after_g_minus_1_terms(p, size):
    """log p = -sum over k of (1 - p)^k / k. With rewards 0 and 1, success probability p, groups of G and
    A = (r - mean) / mean, 0 where no response is right:
    E[mean of A grad log pi] = sum over k = 1 .. G - 1 of (1 - p)^(k - 1) grad p,
    the gradient of the first G - 1 terms exactly: for G = 2 that of p, for G without end that of log p."""
    logits = f64([math.log(p / 3), math.log(2 * p / 3), math.log(1 - p)]).requires_grad_()
    p = logits.softmax(0)[:2].sum()  # of three answers two are right
    (-sum((1 - p)**k / k for k in range(1, size))).backward()
    bandit = logits.tolist(), [1, 1, 0]
    got = mean_gradient(*bandit, size, lambda r: ng.group_advantages(r, "mean", "mean", 0.0))
    close(got, logits.grad, 1e-9)
    close(got, sum((1 - p)**k for k in range(size - 1)) * true_gradient(*bandit), 1e-9)

@pytest.mark.parametrize("p, want", [
    (.02, 2.4069810), (.1, 2.1773482), (.25, 1.8952534), (.5, 1.7358037), (.75, 1.8952534), (.98, 2.4069810)])
def test_the_std_weighs_a_question_by_its_difficulty(p, want):
    """Weight of the true gradient of one question with success probability p, groups of 8."""
    logits = [math.log(p), math.log(1 - p)]
    for norm, weight in (("none", 7 / 8), ("std", want)):
        got = mean_gradient(logits, [1, 0], 8, lambda r: ng.group_advantages(r, "mean", norm))
        close(got / true_gradient(logits, [1, 0]), [weight] * 2)

# --- Aggregation -------------------------------------------------------------------------------------------
TOKEN_LOSS, TOKEN_MASK = f64([[1, 2, 0, 0], [3, 4, 5, 6]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()

@pytest.mark.parametrize("aggregation, want", [("sequence", 3.0), ("token", 3.5), ("constant", 1.3125)])
def test_aggregation_golden_and_free_of_padding_and_duplication(aggregation, want):
    def loss(token_loss, mask):
        return ng.aggregate_loss(token_loss, mask, aggregation, len(mask), mask.sum().item(), 8)
    close(loss(TOKEN_LOSS, TOKEN_MASK), want)
    close(loss(TOKEN_LOSS.repeat(2, 1), TOKEN_MASK.repeat(2, 1)), want)
    wide = torch.nn.functional.pad(TOKEN_LOSS, (0, 5), value=9.0)  # "Dr. GRPO" by padded width: verl#4360
    close(loss(wide, torch.nn.functional.pad(TOKEN_MASK, (0, 5))), want)
    halves = sum(ng.aggregate_loss(TOKEN_LOSS[[i]], TOKEN_MASK[[i]], aggregation, 2, 6, 8) for i in range(2))
    close(halves, want)  # shares under one normaliser add up

# --- Losses ------------------------------------------------------------------------------------------------
SIGNATURE = "log_probs old_log_probs advantages response_mask cliprange cliprange_high tau".split()
ALL_ON = torch.ones(1, 4).bool()

def compute(loss, log_probs, old, advantages, mask, low=.2, high=.2, tau=.1):
    return ng.LOSSES[loss].compute(log_probs, old, advantages, mask, low, high, tau)

def gradient_of_loss(loss, ratios, advantage):
    """-> (gradient by token, is_clipped, loss) of one row whose tokens have these ratios."""
    log_probs, old = (f64([ratios]).log() - 2).requires_grad_(), f64([[-2] * len(ratios)]).requires_grad_()
    token_loss, is_clipped = compute(loss, log_probs, old, f64([[advantage]]), torch.ones(1, len(ratios)) > 0)
    token_loss.sum().backward()
    assert old.grad is None  # old log-probs carry no gradient
    return log_probs.grad, is_clipped, token_loss

@pytest.mark.parametrize("loss", ng.LOSSES)
def test_each_row_of_the_table_of_losses_is_true(loss):
    row, args = ng.LOSSES[loss], settings("--loss", loss)
    names = list(inspect.signature(row.compute).parameters)
    assert names in [SIGNATURE, *(SIGNATURE[:size] + ["_"] for size in (4, 5, 6))]  # _: the rest
    assert (args.cliprange, args.cliprange_high) == (row.cliprange, row.cliprange_high or row.cliprange)
    assert args.loss_aggregation == row.aggregation
    far, near = [.5, 1.0, 1.5], [1.0, 1.0, 1.0]
    assert (gradient_of_loss(loss, far, 0.0)[0] != 0).any() == row.teaches_at_0
    close(gradient_of_loss(loss, near, 2.0)[0], [[-2.0] * 3])  # on the policy's own tokens all are REINFORCE
    sides = {"low": gradient_of_loss(loss, [.5] * 3, -1.0), "high": gradient_of_loss(loss, [1.5] * 3, 1.0)}
    assert {side for side, (_, is_clipped, _) in sides.items() if is_clipped.all()} == set(row.clips.split())
    assert all(is_clipped.dtype == torch.bool for _, is_clipped, _ in sides.values())
    differs = (gradient_of_loss(loss, [1.1] * 3, 1.0)[0] - gradient_of_loss(loss, near, 1.0)[0]).norm() > .01
    assert differs == row.has_ratio

@pytest.mark.parametrize("loss", ng.LOSSES)
def test_masked_tokens_do_not_matter_and_a_fully_masked_row_is_finite(loss):
    mask, grads = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool(), {key: [] for key in AGGREGATIONS}
    for aggregation, filler in itertools.product(AGGREGATIONS, (0.0, -7.0)):
        log_probs = f64([[-1, -2, filler], [filler] * 3]).requires_grad_()
        old = f64([[-1.0001, -2.0003, 0], [0] * 3])
        token_loss, _ = compute(loss, log_probs, old, f64([[2], [3]]), mask, 3e-4, 4e-4)
        total = ng.aggregate_loss(token_loss, mask, aggregation, 2, 2, 8)
        total.backward()
        grads[aggregation].append(torch.cat([total.detach().view(1), log_probs.grad.flatten()]))
        assert total.isfinite() and (log_probs.grad[~mask] == 0).all()
    for pair in grads.values():
        close(*pair)
        assert pair[0][1:3].abs().min() > .01 and pair[0].isfinite().all()

@pytest.mark.parametrize("loss", [name for name, row in ng.LOSSES.items() if row.has_ratio])
def test_a_ratio_to_itself_teaches_only_because_the_old_log_probs_are_detached(loss):
    log_probs, advantages = f64([[-1], [-2]]).requires_grad_(), f64([[1], [-.5]])
    compute(loss, log_probs, log_probs, advantages, torch.ones(2, 1).bool())[0].sum().backward()
    close(log_probs.grad, -advantages)  # REINFORCE

def test_pg_and_noclip_have_their_golden_numbers():
    log_probs, old, advantages = f64([[-1, -2], [-3, -4]]), f64([[-1.5, -2], [-3, -3]]), f64([[2], [-1]])
    log_probs.requires_grad_()
    close(compute("pg", log_probs, old, advantages, ALL_ON)[0], [[2, 4], [-3, -4]])
    loss, is_clipped = compute("noclip", log_probs, old, advantages, ALL_ON[:, :2])
    close(loss, [[-3.2974425, -2], [1, .3678794]])
    loss.sum().backward()
    close(log_probs.grad, loss)  # the gradient of rho is rho
    assert not is_clipped.any()

@pytest.mark.parametrize("advantage, ratio, high, want, slope", [
    (1, 1.25, .2, -1.2, 0), (1, 1.25, .28, -1.25, -1.25), (1, 1.1, .2, -1.1, -1.1), (1, .5, .2, -.5, -.5),
    (-1, .5, .2, .8, 0), (-1, 1.5, .2, 1.5, 1.5), (-1, 4, .2, 4, 4), (-1, .9, .28, .9, .9),
    (2, 1.35, .28, -2.56, 0)])
def test_clip_table_of_ppo_loss_gradient_and_fraction(advantage, ratio, high, want, slope):
    log_probs, old = f64([[math.log(ratio) - 2]]).requires_grad_(), f64([[-2]])
    loss, is_clipped = compute("grpo_clip", log_probs, old, f64([[advantage]]), ALL_ON[:, :1], .2, high)
    loss.sum().backward()
    close(loss, [[want]])
    close(log_probs.grad, [[slope]])
    assert is_clipped.item() == (slope == 0)

@pytest.mark.parametrize("advantage, sign, want, slope", [
    (-1, 1, 1.1051709, 1.1051709), (1, 1, -1.0004, 0), (1, -1, -.9048374, -.9048374), (-1, -1, .9997, 0)])
def test_gspo_has_one_ratio_a_row_the_geometric_mean(advantage, sign, want, slope):
    """The product of the ratios would be 1.4918247."""
    old = f64([[-1, -2, -3, -4]])
    log_probs = (old + sign * f64([.1, -.3, .2, .4])).requires_grad_()
    loss, is_clipped = compute("gspo", log_probs, old, f64([[advantage]]), ALL_ON, 3e-4, 4e-4)
    close(loss, [[want] * 4])
    assert is_clipped.tolist() == [[slope == 0] * 4]
    ng.aggregate_loss(loss, ALL_ON, "sequence", 1, 4, 8).backward()
    close(log_probs.grad, [[slope / 4] * 4])  # d s / d log pi(token) = s / length

def test_cispo_weighs_each_token_by_its_capped_ratio_and_keeps_all_gradients():
    for advantage in (2, -1):
        grad, is_clipped, loss = gradient_of_loss("cispo", [.5, 1, 1.19, 1.21, 3], advantage)
        weight = f64([[.5, 1, 1.19, 1.2, 1.2]])
        close(grad, -advantage * weight)
        close(loss, -advantage * weight * (f64([[.5, 1, 1.19, 1.21, 3]]).log() - 2))
        assert is_clipped.tolist() == [[False, False, False, True, True]]

def test_kimi_golden_ascent_coefficients():
    log_probs, old = f64([[-10], [-12], [-9]]).requires_grad_(), f64([[-10.2], [-11.9], [-9.1]])
    advantages, mask = f64([[1 / 3], [-2 / 3], [1 / 3]]), torch.ones(3, 1).bool()
    total = ng.aggregate_loss(compute("kimi", log_probs, old, advantages, mask)[0], mask, "constant", 3, 3, 1)
    total.backward()
    close(-log_probs.grad[:, 0], [.1044444, -.2188889, .1077778])
    close(total, -.5545556)

# --- KL to a reference: over 4 tokens, exactly -------------------------------------------------------------
POLICY_LOGITS, REFERENCE = f64([.3, -.2, .5, 0]), f64([0, .4, -.3, .2]).log_softmax(0)
REVERSE = [.0239940, -.1384073, .2004306, -.0860173]  # gradient of KL(policy || reference)
FORWARD = [.0556952, -.1649813, .1759252, -.0666391]  # gradient of KL(reference || policy)

def test_kl_estimates_golden_and_finite_at_any_distance():
    log_probs, ref = f64([[-1, -1.5]]), f64([[-1.5, -1]])
    for kind, want in (("k1", [.5, -.5]), ("k2", [.125, .125]), ("k3", [.1065307, .1487213])):
        close(ng.kl_estimate(log_probs, ref, kind), [want])
        far = f64([[-1000, 0, -20.5]]).requires_grad_()
        kl = ng.kl_loss(far, far.detach(), f64([[0, -1000, 0]]), kind)
        kl.sum().backward()
        assert kl.isfinite().all() and far.grad.isfinite().all()
        edge = {"k1": -20, "k2": 200, "k3": math.exp(20) - 21}[kind]
        close(ng.kl_estimate(f64([-1000., -20, -25]), f64([0., 0, 0]), kind), [edge] * 3)

def expected_gradient(loss, weights=None):
    """Mean over the tokens of the policy, or of `weights`, of the gradient of loss(log-probs) at each."""
    logits = POLICY_LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(0)
    ((log_probs.detach().exp() if weights is None else weights) * loss(log_probs)).sum().backward()
    return logits.grad

@pytest.mark.parametrize("kind, in_the_loss", [("k1", [0, 0, 0, 0]), ("k2", REVERSE), ("k3", FORWARD)])
def test_each_kl_has_the_reverse_gradient_as_coded_and_not_when_put_straight_into_a_loss(kind, in_the_loss):
    close(expected_gradient(lambda x: ng.kl_loss(x, x, REFERENCE, kind)), REVERSE)
    close(expected_gradient(lambda x: ng.kl_estimate(x, REFERENCE, kind)), in_the_loss)
    old = f64([.1, .3, -.2, .2]).log_softmax(0)
    if kind != "k2":  # off-policy: the ratio to the policy that sampled gives the KL gradient again
        close(expected_gradient(lambda x: ng.kl_loss(x, old, REFERENCE, kind), old.exp()), REVERSE)

# --- The update --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv", [
    *(f"--loss {loss} --loss-aggregation {aggregation}" for aggregation in AGGREGATIONS
      for loss in ("pg", "noclip", "grpo_clip", "gspo", "cispo")),
    "--loss grpo_clip --cliprange-high 0.28", "--loss cispo --cliprange-high 0.05", "--loss kimi --tau 0.7",
    "--loss gspo --cliprange 0.3 --cliprange-high 0.4", "--loss kimi", "--tis-cap 1.5",
    "--kl-coef 0.3", "--kl-coef 0.3 --kl k1", "--kl-coef 0.3 --kl k2 --loss pg", "--entropy-coef 0.2",
    "--kl-coef 0.3 --entropy-coef 0.2 --loss-aggregation token", "--kl-coef 0.3 --loss kimi"])
def test_the_gradient_is_that_of_the_formula_whatever_the_microbatches_and_the_order_of_rows(argv):
    """trl#3021, open-instruct#1161: averaged microbatch means are 39 % off for lengths 1, 2, 4. A row of
    advantage 0 counts in the normalisers, and teaches under Kimi, KL and entropy."""
    policy, args = random_policy(), settings(argv, "--max-grad-norm 1e9 --max-tokens 8 --temperature 0.8")
    rows = [*off_policy_rows(policy), make_row([7, 8], [9, 10], 0.0)]
    for row, shift in zip(rows, (.3, -.2, .1, .4)):
        log_probs = plain_log_probs(policy, row, .8)
        row.ref_log_probs = (log_probs + shift).tolist()
        row.old_log_probs = row.old_log_probs or (log_probs - .1).tolist()
        row.sampler_log_probs = [old - shift for old in row.old_log_probs] if args.tis_cap else None
        row.old_log_probs = log_probs.tolist() if args.kl_coef else row.old_log_probs
    want, want_loss = formula_gradient(policy, rows, args)
    assert want.norm() > 0.05
    teaching = rows if args.kl_coef or args.entropy_coef or args.loss == "kimi" else rows[:3]
    for args.microbatch_tokens in (1000, 12, 1):
        for order in (rows, [rows[1], rows[3], rows[2], rows[0]]):
            got, sums = gradient(policy, order, args)
            close(got, want)
            close(sums["loss"], want_loss)
            assert (sums["tokens"], sums["steps"]) == (sum(len(row.response_ids) for row in teaching), 1)
    if args.kl_coef:
        kl = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(-d) - 1 + d}[args.kl]
        close(sums["kl"], kl(-.3) + 2 * kl(.2) + 4 * kl(-.1) + 2 * kl(-.4))

def test_microbatches_keep_to_the_budget_of_padded_tokens_and_hold_each_row_once():
    rows = [make_row([1] * (i % 5 + 1), [2] * (i * 7 % 11 + 1)) for i in range(40)]
    for budget in (1, 16, 50, 1000):
        parts = list(ng.microbatches(rows, budget))
        assert sorted(id(row) for part in parts for row in part) == sorted(map(id, rows))
        assert all(len(part) == 1 or len(part) * max(map(len, part)) <= budget for part in parts)
    assert len(parts) == 6  # rows of 16 tokens or 12, not of 11, stand together
    assert all(len(part) * max(map(len, part)) <= sum(map(len, part)) * 4 / 3 for part in parts)
    equal = [make_row([1], [2] * 9) for _ in range(40)]
    assert [len(part) for part in ng.microbatches(equal, 400)] == [40]
    assert list(ng.microbatches([], 400)) == []

def shared_rows():
    """Four prompts, one of another length, with three responses each, in no order."""
    asked = [ng.Example("q", "a", None, list(range(i, i + 9 + (i == 9)))) for i in (5, 7, 9, 11)]
    order = (7, 2, 0, 9, 1, 3, 11, 5, 4, 6, 10, 8)
    return [ng.Row(asked[i % 4], [i + 3, 4, 5][:1 + i % 3], advantage=(-1.0) ** i) for i in order]

def test_rows_stand_together_by_prompt_where_that_reads_fewer_tokens():
    rows = shared_rows()
    assert [len(part) for part in ng.microbatches(rows, 1000)] == [12]
    apart = [rows[i] for i in range(12) if rows[i].example.prompt_ids[0] == 9]
    parts = list(ng.microbatches(rows, 1000, True))
    assert [len(part) for part in parts] == [9, 3] and all(row in parts[1] for row in apart)
    # tokens that are read; an eighth of those whose keys and values each row gets
    want = [3 * 9 + 9 * 3 + 81 // 8, 10 + 3 * 3 + 30 // 8]
    assert [model.tokens_held(part, True) for part in parts] == want == [64, 22]
    assert model.tokens_held(parts[0], False) == 9 * 12 and model.tokens_held(rows, True) == 12 * 13
    for budget, sizes in ((64, [9, 3]), (63, [8, 1, 3]), (22, [3, 3, 3, 3]), (1, [1] * 12)):
        assert [len(part) for part in ng.microbatches(rows, budget, True)] == sizes
    assert not model.shared_prompts([ng.Row(rows[0].example, [7] * 30)] * 2)  # it saves under a third
    long = [make_row([5, 6], [7] * size) for size in (4, 40, 5, 41)]  # little to save, much to pad
    assert [len(part) for part in ng.microbatches(long, 1000, True)] == [2, 2]

@pytest.mark.parametrize("argv", ["", "--kl-coef 0.3 --loss kimi", "--entropy-coef 0.2 --loss gspo"])
def test_a_prompt_is_read_once_for_all_of_its_rows_and_the_gradient_is_that_of_the_formula(argv):
    policy, args = random_policy(), settings(argv, "--max-grad-norm 1e9 --max-tokens 8 --temperature 0.8")
    rows, read = shared_rows(), []
    for row in rows:
        log_probs = plain_log_probs(policy, row, .8)
        row.old_log_probs, row.ref_log_probs = log_probs.tolist(), (log_probs - .1).tolist()
    want, want_loss = formula_gradient(policy, rows, args)
    assert model.can_share_prompts(policy) and want.norm() > 0.05
    policy.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].numel()))
    got, sums = gradient(policy, rows, args)
    close(got, want)
    close(sums["loss"], want_loss)
    # the last token of a response is predicted, and not read
    assert read == [3 * 9, 9 * 2, 10, 3 * 2]

def test_a_batch_of_dead_rows_moves_no_weight():
    """Adam's momentum alone would."""
    policy, args = random_policy(), settings()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    ng.train_step(policy, optimizer, make_rows(), args)
    before = flat(policy.parameters())
    sums = ng.train_step(policy, optimizer, [make_row([1, 2], [3], 0.0)], args)
    assert sums["steps"] == 0 and torch.equal(before, flat(policy.parameters()))

def test_the_gradient_is_clipped_once_its_norm_logged_before_and_does_not_leak_into_the_next_step():
    policy, args = random_policy(), settings("--max-grad-norm 0.25 --microbatch-tokens 1 --loss pg")
    norm = formula_gradient(policy, make_rows(), args)[0].norm()
    for _ in range(2):
        policy.load_state_dict(random_policy().state_dict())
        sums = ng.train_step(policy, torch.optim.SGD(policy.parameters(), lr=1.0), make_rows(), args)
        assert norm > 0.5
        close(sums["grad_norm"], norm)
        close((flat(policy.parameters()) - flat(random_policy().parameters())).norm(), 0.25, 1e-5)

def test_the_logged_sums_of_entropy_clipped_tokens_and_ratios_outside():
    policy = random_policy()
    rows = set_ratios(policy, make_rows(), [[.75], [1.25, .5], [1.35, .5, 1.0, .85]])  # A = 1, -0.5, 2
    want = sum(torch.distributions.Categorical(logits=plain_logits(policy, row, 1.0)).entropy().sum()
               for row in rows)
    for high, outside, clipped in (("0.2", 5, 2), ("0.3", 4, 2), ("0.4", 3, 1)):
        for budget in ("1000", "1"):  # clipped: outside, and A pushes further out
            args = settings("--cliprange 0.2 --cliprange-high", high, "--microbatch-tokens", budget)
            sums = gradient(policy, rows, args)[1]
            assert (sums["ratio_outside"], sums["clip_fraction"]) == (outside, clipped)
            close(sums["entropy"], want, 1e-5)

@pytest.mark.parametrize("loss, epochs", [("grpo_clip", 3), ("grpo_clip", 1), ("pg", 3)])
def test_epochs_train_each_row_once_on_log_probs_of_the_rollout(monkeypatch, loss, epochs):
    """Old log-probs are made in one pass a rollout batch, and stay."""
    policy, rows = random_policy(), many_rows(12)
    want = [plain_log_probs(policy, row).tolist() for row in rows]
    args = settings("--train-batch-size 4 --rollout-batch-size 12 --group-size 4 --loss", loss,
                    f"--epochs-per-rollout-batch {epochs} --lr 0.01")
    passes, batches = watch(monkeypatch, "cache_log_probs"), watch(monkeypatch, "train_step")
    metrics = ng.update(policy, None, torch.optim.AdamW(policy.parameters()), rows, 1, args)
    assert len(batches) == 3 * epochs and len(passes) == (loss == "grpo_clip")
    order = [next(i for i, one in enumerate(rows) if one is row) for batch in batches for row in batch[2]]
    parts = {tuple(part) for part in ng.chunks(order, 12)}
    assert all(sorted(part) == list(range(12)) for part in parts)
    assert len(parts | {tuple(range(12))}) == epochs + 1  # each epoch in an order of its own
    if loss == "grpo_clip":  # still those of the policy that sampled, after all steps
        close(sum((row.old_log_probs for row in rows), []), sum(want, []), 1e-5)
        assert metrics["train/clip_fraction"] > 0

def test_leftover_rows_are_trained_on(monkeypatch):
    """Expert iteration keeps any number of rows: half of a rollout must not be lost."""
    policy, args = random_policy(), settings("--mode expert_iteration --train-batch-size 4")
    optimizer, batches = torch.optim.SGD(policy.parameters(), lr=.1), watch(monkeypatch, "train_step")
    ng.update(policy, None, optimizer, many_rows(6), 1, args)
    metrics = ng.update(policy, None, optimizer, [], 1, args)  # nothing was right
    assert [len(batch[2]) for batch in batches] == [4, 2]
    assert metrics["train/entropy"] is None and metrics["train/loss"] == 0  # 0 would look like a collapse

def test_update_averages_over_tokens_and_over_optimizer_steps(monkeypatch):
    sums = iter([dict(loss=1., tokens=10., entropy=5., clip_fraction=1., grad_norm=2., steps=1.),
                 dict(loss=3., tokens=30., entropy=35., clip_fraction=3., grad_norm=4., steps=1.)])
    monkeypatch.setattr(ng, "train_step", lambda *_: next(sums))
    args = settings("--train-batch-size 4 --rollout-batch-size 8 --loss pg")
    optimizer = torch.optim.SGD(random_policy().parameters(), lr=.1)
    metrics = ng.update(torch.nn.Module(), None, optimizer, [make_row([1], [2])] * 8, 1, args)
    keys = ("loss", "grad_norm", "entropy", "clip_fraction")
    close([metrics[f"train/{key}"] for key in keys], [2.0, 3.0, 1.0, 0.1])

def test_overlap_has_the_ratio_to_the_policy_that_sampled():
    policy, rows = random_policy(), make_rows()
    for row in rows:
        row.sampler_log_probs = (plain_log_probs(policy, row) - .1).tolist()
    metrics = ng.update(policy, None, torch.optim.SGD(policy.parameters(), lr=0.0), rows, 1,
                        settings("--overlap --cliprange 0.05"))
    assert metrics["train/ratio_outside"] == 1 and rows[0].old_log_probs == rows[0].sampler_log_probs

def test_the_reference_is_renewed_every_n_steps_and_never_without_the_flag():
    for argv, renewed in (("", []), ("--kl-ref-every 2", [1, 3, 5])):
        policy, reference = random_policy(), random_policy(seed=1).requires_grad_(False)
        optimizer, seen = torch.optim.SGD(policy.parameters(), lr=.1), []
        for step in range(1, 6):
            rows, before = make_rows(), flat(policy.parameters())
            metrics = ng.update(policy, reference, optimizer, rows, step, settings("--kl-coef 0.1", argv))
            seen += [step] if torch.equal(flat(reference.parameters()), before) else []
            assert (abs(metrics["train/kl"]) < 1e-12) == (step in seen)
            close(rows[2].ref_log_probs, plain_log_probs(reference, rows[2]))
        assert seen == renewed

def test_reset_optimizer_forgets_the_moments_before_each_rollout_batch():
    for argv, steps in (("", 2), ("--reset-optimizer", 1)):
        policy, args = random_policy(), settings("--loss kimi", argv)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
        for step in (1, 2):
            ng.update(policy, None, optimizer, make_rows(), step, args)
        assert {int(state["step"]) for state in optimizer.state.values()} == {steps}

@pytest.mark.parametrize("loss", ["grpo_clip", "kimi"])
def test_a_step_that_is_not_finite_is_not_applied_and_its_rows_are_kept(tmp_path, loss):
    policy, rows, args = random_policy(), make_rows(), settings("--loss", loss, "--run-dir", str(tmp_path))
    optimizer, before = torch.optim.AdamW(policy.parameters(), lr=1e-2), flat(policy.parameters())
    rows[1].advantage = math.nan
    for args.microbatch_tokens, count in ((1, 1), (1000, 2), (1000, 3)):  # those that ran together; all
        if count == 3:  # the loss is finite, the gradient is not
            rows, hook = make_rows(), policy.lm_head.weight.register_hook(lambda grad: grad * math.inf)
        assert ng.update(policy, None, optimizer, rows, 1, args)["train/bad_steps"] == 1
        kept = [row["response_ids"] for row in run.read_lines(tmp_path / "bad-rows.jsonl")]
        assert len(kept) == count and [10, 11] in kept
        assert torch.equal(before, flat(policy.parameters())) and not optimizer.state
    hook.remove()
    assert ng.update(policy, None, optimizer, rows, 2, args)["train/bad_steps"] is None
    assert not torch.equal(before, flat(policy.parameters()))

def test_gradient_checkpointing_computes_each_layer_again_and_changes_nothing_else():
    policy, args, calls, gradients = random_policy(), settings("--max-tokens 6"), [], []
    policy.config.attention_dropout = policy.model.layers[0].self_attn.attention_dropout = 0.5
    policy.model.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(args[0].training))
    policy.has_fused_head = policy.shares_prompts = True
    for times in (1, 2):
        optimizer, calls[:] = torch.optim.SGD(policy.parameters(), lr=0.0), []
        policy.zero_grad()
        ng.train_step(policy, optimizer, make_rows()[2:], args)
        assert calls == [False] * times  # no dropout
        model.checkpoint_layers(policy)
        gradients.append(flat(weight.grad for weight in policy.parameters()))
    close(*gradients, 1e-12)
    samples = make_sampler(policy, args).generate([[5, 6]], 2, 0, 6)
    assert samples == make_sampler(random_policy(), args).generate([[5, 6]], 2, 0, 6)
    close(*(gradient(one, shared_rows(), args)[0] for one in (policy, random_policy())))

def test_compiled_updates_have_the_same_gradient_and_sampling_is_not_compiled(monkeypatch, tmp_path):
    """With the graphs of torch.compile, without its minute of C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    random_policy(layers=1, dtype=torch.float32).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    counts, gradients = torch._dynamo.utils.counters["stats"], []
    for argv in ("", "--compile"):
        counts.clear()
        args = settings("--max-grad-norm 1e9 --sampler hf --model", str(tmp_path), argv)
        policy, _ = ng.load_model(args)
        gradients.append(gradient(policy, shared_rows(), args)[0])
        graphs = counts["unique_graphs"]
        make_sampler(policy, settings(argv)).generate([[5, 6]], 2, 0, 6)
        assert (graphs > 0) == bool(argv) and counts["unique_graphs"] == graphs
    close(*gradients, 1e-5)

# --- Log-probs ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tile", [1, 7, 2048])
def test_tiled_log_probs_equal_the_full_logits_gradient_included(tile, temperature, monkeypatch):
    monkeypatch.setitem(model.TILE, "cpu", tile)
    policy, rows, total = random_policy(tied=tile == 7), make_rows(), 0.0
    if tile == 1:
        policy.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, len(TOKENIZER)).double())
    log_probs, entropy, mask = ng.response_log_probs(policy, rows, temperature)
    assert mask.sum(1).tolist() == [1, 2, 4] and log_probs.shape == entropy.shape == mask.shape == (3, 4)
    weights = f64([[.3, 0, 0, 0], [-1, 2, 0, 0], [.1, .2, -.3, .4]])
    policy.zero_grad()
    ((log_probs + 0.5 * entropy) * weights).sum().backward()
    got = flat(weight.grad for weight in policy.parameters())
    for i, row in enumerate(rows):
        size, plain = len(row.response_ids), plain_log_probs(policy, row, temperature)
        close(log_probs[i, :size], plain)
        distribution = torch.distributions.Categorical(logits=plain_logits(policy, row, temperature))
        close(entropy[i, :size], distribution.entropy())
        total = total + ((plain + 0.5 * distribution.entropy()) * weights[i, :size]).sum()
    assert (log_probs[~mask] == 0).all()
    policy.zero_grad()
    total.backward()
    close(got, flat(weight.grad for weight in policy.parameters()), 1e-5)  # Qwen2 has float32 inside

class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation makes."""
    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        many = made if isinstance(made, (tuple, list)) else [made]
        self.largest = max([self.largest, *(one.numel() for one in many if torch.is_tensor(one))])
        return made

def test_full_vocabulary_logits_never_exist(monkeypatch):
    monkeypatch.setitem(model.TILE, "cpu", 256)
    policy = random_policy(vocab=8_000).requires_grad_(False)
    rows = [make_row([1, 2], list(range(3, 43))) for _ in range(50)]  # 2,000 tokens
    policy.model.norm.weight.requires_grad_()
    with Sizes() as seen:
        ng.response_log_probs(policy, rows, 1.0)[0].sum().backward()
    assert policy.lm_head.weight.numel() <= seen.largest < 2_000 * 8_000 / 25

def test_the_tiled_head_in_bfloat16_keeps_float32_sums():
    """Products in bfloat16 as on a GPU; log-sum-exp over 5,000 entries in bfloat16 would be off by 0.03."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(64, 32), torch.randn(5000, 32) / 6, torch.arange(64)
    log_probs, entropy = model.TiledHead.apply(hidden, weight, labels, torch.bfloat16)
    want = (hidden.bfloat16() @ weight.bfloat16().T).float().log_softmax(-1)
    close(log_probs, want[range(64), labels], 1e-5)
    close(entropy, -(want.exp() * want).sum(-1), 1e-5)
    assert log_probs.dtype == entropy.dtype == torch.float32

def test_masks_are_by_position_when_pad_is_eos():
    """A mask of ids != pad would never teach the model to stop: trl#4970."""
    batch = ng.pack([[1, 2], [3]], [[7, 8, EOS], [EOS]], EOS)
    assert TOKENIZER.pad_token_id == EOS and batch["response_mask"].sum(1).tolist() == [3, 1]
    assert batch["labels"][0][batch["response_mask"][0]].tolist() == [7, 8, EOS]
    assert batch["labels"][1][batch["response_mask"][1]].tolist() == [EOS]
    assert batch["input_ids"][0].tolist() == [1, 2, 7, 8] and batch["labels"][0].tolist() == [2, 7, 8, EOS]

def test_logits_and_labels_are_not_off_by_one():
    """A model that says id + 1, on a response that counts on: log-prob 0 at every position. trl#5620"""
    policy = chain_policy({token: token + 1 for token in range(50)})
    rows = [make_row([10, 11, 12], [13, 14, 15, 16]), make_row([20], [21, 22]), make_row([40, 30], [31])]
    log_probs, _, mask = ng.response_log_probs(policy, rows, 1.0)
    assert mask.sum() == 7 and log_probs.abs().max() < 1e-4
    wrong = ng.response_log_probs(policy, [make_row([10], [12, 13])], 1.0)[0][0]
    assert wrong[0] < -50 and wrong[1] > -1e-4

# --- Memory and learning rate ------------------------------------------------------------------------------
def fail_once(monkeypatch, owner, name, call):
    """The `call`-th call (from 1) of owner.name runs out of memory."""
    function, calls = getattr(owner, name), []

    def failing(*arguments, **named):
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(*arguments, **named)
    monkeypatch.setattr(owner, name, failing)

@pytest.mark.parametrize("owner, name, call", [
    (ng, "response_log_probs", 1), (ng, "response_log_probs", 3), (torch.Tensor, "backward", 1),
    (torch.Tensor, "backward", 2), (torch.optim.AdamW, "step", 1), (ng, "cache_log_probs", 1),
    (torch.nn.utils, "clip_grad_norm_", 1)])
def test_at_out_of_memory_the_budget_is_halved_and_no_number_changes(monkeypatch, capsys, owner, name, call):
    argv = ("--rollout-batch-size 12 --group-size 4 --train-batch-size 12 --kl-coef 0.1 "
            "--epochs-per-rollout-batch 2 --max-tokens 6 --microbatch-tokens")
    results = []
    for budget in (12, 24):  # the smaller one from the start, and a larger one that fails
        policy, rows, args = random_policy(), many_rows(12), settings(argv, str(budget))
        optimizer = torch.optim.AdamW(policy.parameters())
        if budget == 24:
            fail_once(monkeypatch, owner, name, call)
        metrics = ng.update(policy, random_policy(1), optimizer, rows, 1, args)
        moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
        results.append((flat(policy.parameters()), flat(moments), metrics, args.microbatch_tokens))
    assert capsys.readouterr().out.count("on with --microbatch-tokens 12") == 1
    for early, late in zip(*results):
        assert torch.equal(early, late) if torch.is_tensor(early) else early == late

@pytest.mark.parametrize("pass_argv", ["", "--kl-coef 0.1", "--epochs-per-rollout-batch 2"])
def test_a_row_that_does_not_fit_alone_ends_the_run_which_is_saved(monkeypatch, pass_argv):
    """In each pass before the first optimizer step: the weights are whole, so the end may save them."""
    argv = "--rollout-batch-size 4 --group-size 4 --microbatch-tokens 64"
    policy, args = random_policy(), settings(argv, pass_argv)
    monkeypatch.setattr(ng, "response_log_probs", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    monkeypatch.setattr(ng.Signals, "is_held", True)
    reference, optimizer = ng.reference_and_optimizer(policy, args)
    with pytest.raises(ng.OutOfMemory, match="a row of 5 tokens"):
        ng.update(policy, reference, optimizer, many_rows(4), 1, args)
    assert args.microbatch_tokens == 4 and not ng.Signals.is_held

@pytest.mark.parametrize("argv, want", [
    ("", [2, 2, 2, 2, 2, 2, 2, 2]), ("--warmup-steps 4", [.5, 1, 1.5, 2, 2, 2, 2, 2]),
    ("--lr-decay", [2, 1.75, 1.5, 1.25, 1, .75, .5, .25]),
    ("--warmup-steps 4 --lr-decay", [.5, 1, 1.5, 2, 2, 1.5, 1, .5])])
def test_the_learning_rate_rises_over_the_warmup_and_falls_until_the_last_step(argv, want):
    args = settings("--lr 2 --max-steps 8", argv)
    close([ng.learning_rate(step, args) for step in range(1, 9)], want)
    policy = random_policy()
    optimizer = torch.optim.AdamW(policy.parameters())
    assert ng.update(policy, None, optimizer, make_rows(), 3, args)["train/lr"] == want[2]
    assert optimizer.param_groups[0]["lr"] == want[2]

def test_lora_has_ten_times_the_learning_rate_unless_one_is_given(capsys):
    pytest.importorskip("peft")
    assert settings("--lora-rank 8").lr == 10 * settings().lr == 5e-3
    assert settings("--lora-rank 8 --lr 1e-4").lr == 1e-4
    assert "--kl-ref-every" in one_line(
        capsys, lambda: settings("--lora-rank 8 --kl-coef 0.1 --kl-ref-every 5"))

def test_gradients_are_freed_after_the_update_and_the_head_never_waits_for_a_gpu():
    policy = random_policy()
    ng.update(policy, None, torch.optim.AdamW(policy.parameters()), make_rows(), 1, settings())
    assert all(weight.grad is None for weight in policy.parameters())
    from torch._subclasses import FakeTensorMode
    with FakeTensorMode():  # an operation whose shape or branch follows from data, and so waits, raises here
        hidden, weight = (torch.zeros(size, 8, requires_grad=True) for size in (5, 1300))
        labels = torch.zeros(5, dtype=torch.long)
        log_probs, entropy = model.TiledHead.apply(hidden, weight, labels, torch.float32)
        (log_probs + entropy).sum().backward()
        assert weight.grad.shape == (1300, 8)

# --- Prompts and tokens ------------------------------------------------------------------------------------
def test_prompt_is_the_r1_zero_text_byte_for_byte():
    assert hashlib.sha256(ng.R1_ZERO_PROMPT.encode()).hexdigest() == (
        "56213732da87e12ace60a2b88a16df0af18280fb0563a957cbecc938a6a2ac0e")

@pytest.mark.parametrize("question", [
    r"Find \frac{a}{b} if {a} = 1", "What does {question} mean?", "{0} {} {{x}}", "∑ 漢字 \n\t", "%s {"])
def test_prompts_hold_the_question_once_whatever_its_braces(question):
    before, after = ng.R1_ZERO_PROMPT.split("{question}")
    example = ng.add_prompts([ng.Example(question, "1")], TOKENIZER, settings())[0]
    assert TOKENIZER.decode(example.prompt_ids) == before + question + after
    ng.add_prompts([example], TOKENIZER, settings("--prompt question_only"))
    assert TOKENIZER.decode(example.prompt_ids) == question

def test_prompts_over_the_context_are_dropped_counted_and_the_others_keep_their_order(capsys):
    """Prompt + budget over the model's context stops an engine: trl#3180."""
    examples = [ng.Example("a" * length, "1") for length in (10, 60, 20, 100, 37, 38)]
    args = settings("--max-tokens 50")
    args.context = len(TOKENIZER.encode(ng.prompt_template("r1_zero").replace("{question}", ""))) + 37 + 50
    kept = ng.add_prompts(examples, TOKENIZER, args)
    assert [len(example.question) for example in kept] == [10, 20, 37]
    assert "3 of 6 rows dropped" in capsys.readouterr().out
    assert "1 of 1 rows dropped" in one_line(capsys, lambda: ng.add_prompts(examples[1:2], TOKENIZER, args))

def test_a_bos_token_comes_once_and_never_into_a_response():
    from tokenizers.processors import TemplateProcessing
    tokenizer, bos = tiny.tiny_tokenizer(ng.R1_ZERO_PROMPT), TOKENIZER.encode("~")[0]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", bos)])
    examples = ng.add_prompts([ng.Example("What is 1 + 2 ?", "3", "so 3")], tokenizer, settings())
    assert bos not in ng.solution_row(examples[0], tokenizer, "r1_zero", "</answer>", EOS).response_ids
    sampler = ScriptedSampler()
    sampler.tokenizer = tokenizer
    ng.sample(sampler, examples, 1, 0, 0, 8, [ng.END_OF_THOUGHT])
    assert examples[0].prompt_ids[0] == bos and sampler.calls[0][0][0].count(bos) == 1

def test_solutions_are_in_the_format_that_the_prompts_reward_reads_and_end_themselves():
    examples = [ng.Example("q", "12", "5 + 7 is 12"),
                ng.Example("q", "3", " so </think> <answer> 3 </answer>"),
                ng.Example("q", r"\frac{1}{2}", r"it is \boxed{\frac{1}{2}} .")]
    for example in examples:
        for form, stop in [("r1_zero", "</answer>"), ("question_only", None), ("gsm8k", None),
                           ("last_number", None), ("last_number", "</answer>")]:
            if form == "question_only" and "</think>" in example.trace or (
                    form == "last_number" and "frac" in example.ground_truth):
                continue
            row = ng.solution_row(example, TOKENIZER, form, stop, EOS)
            assert rewards.REWARDS[form](row.text, example.ground_truth)["reward"] == 1, (form, row.text)
            ended_by = CLOSE if stop else EOS
            assert row.response_ids[-1] == ended_by and row.advantage == 1.0
            assert TOKENIZER.decode(row.response_ids).removesuffix("<|endoftext|>") == row.text

@pytest.mark.parametrize("prompt, argv, end", [
    ("mine", "", "#### 12"), ("chat", "--reward-fn last_number", "5 + 7 is 12"),
    ("r1_zero", "--reward-fn random", "<answer> 12 </answer>"), ("question_only", "", r"\boxed{12}")])
def test_a_solution_ends_as_the_reward_of_its_prompt_reads_it(monkeypatch, prompt, argv, end):
    """A row of PROMPTS that someone adds has a name of its own, and the reward that it asks for."""
    monkeypatch.setitem(ng.PROMPTS, "mine", ng.Prompt("{question} End with ####.", None, "gsm8k"))
    args = settings("--mode sft --model other --prompt", prompt, argv)
    sampler = SimpleNamespace(eos_ids=[EOS], stop=args.stop, tokenizer=TOKENIZER)
    row, = ng.solution_rows([ng.Example("q", "12", "5 + 7 is 12")], sampler, args)
    assert row.text.endswith(end)

def test_nothing_is_tokenised_after_the_rollout(monkeypatch):
    """Text decoded and tokenised again changes ids, and the ratio is no longer 1: trl#5224."""
    policy, args = random_policy(), settings("--rollout-batch-size 8 --group-size 4 --max-tokens 8")
    for name in ("encode", "__call__", "_encode_plus", "tokenize"):
        monkeypatch.setattr(type(TOKENIZER), name, lambda *_, **__: pytest.fail("tokenised again"))
    rows = sample(policy, args, 4, prompts=PROMPTS[:2])
    sampled = [list(row.response_ids) for row in rows]
    ng.grade_rows(rows, lambda response, truth: float(len(response) % 2))
    rows = shaped_rows_to_train_on(rows, 1, args)
    metrics = ng.update(policy, None, torch.optim.AdamW(policy.parameters(), lr=1e-3), rows, 1, args)
    assert metrics["train/grad_norm"] > 0 and [row.response_ids for row in rows] == sampled

# --- HF sampler --------------------------------------------------------------------------------------------
PROMPTS = [[5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20], [21]]

def sample(policy, args, n=1, seed=0, prompts=PROMPTS, version=0, tokenizer=TOKENIZER):
    examples = [ng.Example("q", "a", None, prompt) for prompt in prompts]
    return ng.sample(make_sampler(policy, args, tokenizer), examples, n, seed, version, args.max_tokens)

@pytest.mark.parametrize("kind", ["rotary", "learnt positions"])
def test_hf_sampler_is_greedy_generate_at_low_temperature_and_left_padded(kind):
    """Left padding without mask or positions: logits off by 0.18."""
    policy = random_policy(1)
    if kind != "rotary":  # rotary positions are relative, a shift would not show
        config = GPT2Config(vocab_size=len(TOKENIZER), n_positions=64, n_embd=32, n_layer=2, n_head=2,
                            initializer_range=0.3, eos_token_id=EOS, bos_token_id=EOS)
        policy = GPT2LMHeadModel(config).double().eval()
    args = settings("--temperature 1e-4 --max-tokens 12 --min-tokens 0")
    rows = sample(policy, args)
    for prompt, row in zip(PROMPTS, rows):
        ids = policy.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=EOS)
        assert row.response_ids == ids[0, len(prompt):].tolist()
        assert row.truncated == (EOS not in row.response_ids)
    for args.sampler_batch_size in (1, 3):
        assert [row.response_ids for row in sample(policy, args)] == [row.response_ids for row in rows]

@pytest.mark.parametrize("temperature", ["0.7", "1.0"])
def test_sampler_log_probs_are_those_of_the_trainer(temperature):
    policy, args = random_policy(2), settings("--max-tokens 20 --min-tokens 0 --temperature", temperature)
    rows = sample(policy, args, n=4)
    log_probs, _, _ = ng.response_log_probs(policy, rows, args.temperature)
    assert len({len(row.response_ids) for row in rows}) > 0 and len(rows) == 16
    for row, got in zip(rows, log_probs):
        assert len(row.sampler_log_probs) == len(row.response_ids) <= 20
        close(row.sampler_log_probs, got[:len(row.response_ids)], 1e-5)

def test_tokens_are_drawn_with_their_probability_and_never_with_none():
    """30,000 draws of one next token; inverse transform sampling by hand could be off by one."""
    policy, args = random_policy(), settings("--max-tokens 1 --temperature 0.6 --min-tokens 1")
    with torch.no_grad():
        logits = policy(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.6
    logits[EOS] = -torch.inf
    share, count = logits.softmax(0), 30_000
    samples, = make_sampler(policy, args).generate([[5, 6, 7]], count, 3, 1)
    drawn = torch.bincount(torch.tensor([ids[0] for ids, _, _ in samples]), minlength=len(share))
    assert drawn[EOS] == 0 and drawn.sum() == count
    assert ((drawn - count * share).abs() <= 5 * (count * share).sqrt() + 1).all()
    for ids, log_probs, _ in samples[:50]:
        close(log_probs[0], share[ids[0]].log())

def test_same_seed_same_samples_and_a_group_is_not_all_equal():
    """One fixed seed with repeated prompts made a public run train on zero gradients for 50 steps."""
    policy, args = random_policy(), settings("--max-tokens 8")
    first, again, other = (sample(policy, args, n=4, seed=seed) for seed in (1, 1, 2))
    ids = [[row.response_ids for row in rows] for rows in (first, again, other)]
    assert ids[0] == ids[1] and ids[0] != ids[2]
    assert all(len({tuple(one) for one in ids[0][i:i + 4]}) > 1 for i in range(0, 16, 4))
    prompts = [row.example.prompt_ids for row in first]
    assert prompts == [prompt for prompt in PROMPTS for _ in range(4)]  # prompt-major
    args.sampler_batch_size = 1  # nor do the chunks of the sampler repeat each other
    assert len({tuple(row.response_ids) for row in sample(policy, args, prompts=[[5, 6]] * 4)}) > 1
    with pytest.raises(ng.PushError, match="stale"):  # trl#3679, trl#5312: weights not pushed, or too late
        sample(policy, args, version=1)

@pytest.mark.parametrize("last", [EOS, CLOSE])
def test_the_end_is_kept_and_ends_a_response_but_not_before_min_tokens(last):
    policy = chain_policy({}, last)
    for least, banned in (("0", False), ("3", True)):
        row = sample(policy, settings("--max-tokens 8 --min-tokens", least))[0]
        assert len(row.response_ids) == (4 if banned else 1) and not row.truncated
        assert row.response_ids[-1] == last and "<|endoftext|>" not in row.text
        assert row.response_ids.count(EOS) == (last == EOS)
    row = sample(policy, settings("--prompt question_only --max-tokens 8 --min-tokens 0"))[0]
    assert row.truncated == (last == CLOSE)  # question_only has no stop string

def test_a_response_ends_with_the_last_sampled_id_and_nothing_is_appended():
    path = [5, 200, 201, THINK, TOKENIZER.encode(" ")[0], ANSWER, 202, CLOSE, 203, 204]
    policy = chain_policy(dict(zip(path, path[1:])))
    row = sample(policy, settings("--max-tokens 20"), prompts=[[5]])[0]
    assert row.response_ids == path[1:8] and not row.truncated and row.text.endswith("</answer>")
    row = sample(policy, settings("--max-tokens 6"), prompts=[[5]])[0]
    assert row.response_ids == path[1:7] and row.truncated and len(row.sampler_log_probs) == 6

def test_a_stop_string_over_many_tokens_or_inside_one_is_found():
    """265 Qwen tokens extend `>`: the text is cut at </answer>, the ids are not."""
    tokenizer = tiny.tiny_tokenizer(ng.R1_ZERO_PROMPT)
    tokenizer.add_tokens([">\n\n"])
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "</answer>"]  # one byte each
    for last in (letters[-1], len(tokenizer) - 1):
        spelled = [*letters[:-1], last]
        row = sample(chain_policy(dict(zip([5, *spelled[:-1]], spelled))), settings("--max-tokens 30"),
                     prompts=[[5]], tokenizer=tokenizer)[0]
        assert row.response_ids == spelled and row.text == "</answer>" and not row.truncated

def canary(sampler, policy, prompt):
    return ng.check_push(sampler, policy, [ng.Example("q", "a", None, prompt)], 1024, 0, 1e-3)

def test_the_canary_finds_a_sampler_with_other_weights():
    policy = random_policy()
    sampler = make_sampler(policy, settings())
    assert canary(sampler, policy, list(range(5, 45))) < 1e-5
    sampler.policy = random_policy()
    with torch.no_grad():
        sampler.policy.model.layers[1].mlp.down_proj.weight *= 1.1
    with pytest.raises(ng.PushError, match="--max-engine-gap"):
        canary(sampler, policy, list(range(5, 45)))
    with torch.no_grad():
        policy.lm_head.weight.fill_(math.nan)
    with pytest.raises(ng.PushError, match="nan"):
        canary(make_sampler(policy, settings()), policy, [5, 6])

def test_a_scale_behind_the_output_matrix_is_seen_and_else_the_canary_finds_it():
    """response_log_probs applies the output matrix itself: Granite and Gemma-2 do more than that."""
    from transformers import GraniteConfig, GraniteForCausalLM
    policy = GraniteForCausalLM(GraniteConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3, logits_scaling=8.0)).eval()
    assert canary(make_sampler(policy, settings()), policy, [5, 6, 7]) < 1e-5 and not policy.has_fused_head
    policy.has_fused_head = True  # as if it had not been seen
    with pytest.raises(ng.PushError, match="logits scaled"):
        canary(make_sampler(policy, settings()), policy, [5, 6, 7])

def test_a_model_is_loaded_in_float32_with_all_its_ends_and_a_copy_for_overlap(tmp_path):
    """In bfloat16 an AdamW step at lr 1e-5 moves 15 % of the weights: .02 - 1e-5 rounds back to .02."""
    policy = random_policy(dtype=torch.bfloat16)
    policy.generation_config.eos_token_id = [EOS, 7]
    policy.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    args = settings("--sampler hf --dataset arithmetic --model", str(tmp_path))
    policy, sampler = ng.load_model(args)
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32} and not policy.training
    assert set(sampler.eos_ids) == {EOS, 7} and sampler.version is None and sampler.policy is policy
    args.overlap, name = True, "model.norm.weight"  # the sampler's weights move at a push only
    policy, sampler = ng.load_model(args)
    with torch.no_grad():
        policy.model.norm.weight += 1.0
    assert (policy.state_dict()[name] - sampler.policy.state_dict()[name] == 1.0).all()
    sampler.push(policy, 3)
    assert sampler.version == 3 and torch.equal(policy.state_dict()[name], sampler.policy.state_dict()[name])

# --- Which questions ---------------------------------------------------------------------------------------
def numbered_questions(count, curriculum, seed=0, saved=None):
    """Questions whose prompt is their number, with pass rates that repeat."""
    examples = [ng.Example(str(i), "a", None, [i], (i * 7 % 5) / 4) for i in range(count)]
    return ng.Curriculum(examples, curriculum, seed, saved)

def taken(questions, *counts):
    return [example.prompt_ids[0] for count in counts for example in questions.take(count)]

@pytest.mark.parametrize("curriculum", ["uniform", "easy_to_hard"])
def test_each_epoch_asks_each_question_once_in_a_new_order(curriculum):
    orders = taken(numbered_questions(12, curriculum), 12, 12, 12)
    epochs = [orders[start:start + 12] for start in (0, 12, 24)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({*map(tuple, epochs), tuple(range(12))}) == 4
    for counts in ((5,) * 7 + (1,), (1,) * 36, (36,), (30, 6)):  # however many a step takes
        assert taken(numbered_questions(12, curriculum), *counts) == orders
    assert taken(numbered_questions(12, curriculum, seed=1), 36) != orders
    rates = [[number * 7 % 5 for number in epoch] for epoch in epochs]
    falling = [sorted(epoch, reverse=True) for epoch in rates]
    assert (rates == falling) == (curriculum == "easy_to_hard")

def scored_row(example, right):
    return ng.Row(example, [1], reward={"answer_reward": float(right), "reward": 1.0})

def test_prioritized_draws_by_one_minus_the_success_rate():
    questions = numbered_questions(4, "prioritized")
    for example, right in zip(questions.examples, (4, 3, 2)):  # of 4; the last one was not asked yet
        questions.record([scored_row(example, i < right) for i in range(4)])
    assert (questions.right, questions.tried) == ([4, 3, 2, 0], [4, 4, 4, 0])
    draws = Counter(taken(questions, 3500))
    for number, want in enumerate((0, 500, 1000, 2000)):
        assert abs(draws[number] - want) <= 4 * math.sqrt(want)
    assert taken(questions, 40) != taken(questions, 40)  # another draw each time
    questions.right = questions.tried = [9] * 4
    draws = Counter(taken(questions, 4000))  # all solved: uniform
    assert all(abs(draws[number] - 1000) <= 4 * math.sqrt(1000) for number in range(4))

@pytest.mark.parametrize("curriculum", ["uniform", "easy_to_hard", "prioritized"])
def test_restored_questions_go_on_as_the_unbroken_ones(curriculum):
    def step(questions):
        asked = questions.take(5)
        questions.record([scored_row(example, example.prompt_ids[0] % 3 == 0) for example in asked])
        return [example.prompt_ids[0] for example in asked]
    whole, first = (numbered_questions(9, curriculum) for _ in range(2))
    want = [step(whole) for _ in range(12)]
    assert [step(first) for _ in range(5)] == want[:5]
    state = first.state()
    step(first)  # a state is a copy
    second = numbered_questions(9, curriculum, saved=state)
    assert [step(second) for _ in range(7)] == want[5:] and second.state() == whole.state()
    assert state["asked"] == sum(state["tried"]) == 25  # nor does the saved one change

def test_seeds_differ_by_purpose_step_and_seed():
    keys = [(seed, purpose, step) for seed in (0, 1) for purpose in ("rollout", "eval") for step in range(50)]
    assert len({ng.seed_for(*key) for key in keys}) == 200

def filtered(monkeypatch, argv, right, path, names="01234"):
    """filter_questions where right[prefix][question] of the n responses are right, if not said all -> (the
    questions that stay, all examples, calls)."""
    examples, calls = [ng.Example(name, "a") for name in names], []

    def fake_sample(sampler, examples, n, seed, version, max_tokens, prefixes):
        calls.append((set(prefixes), n))
        return [ng.Row(example, [1], str(i < right[prefix].get(example.question, n)))
                for example, prefix in zip(examples, prefixes) for i in range(n)]

    def reward_fn(response, truth):
        return dict.fromkeys(("reward", "format_reward", "answer_reward"), float(response == "True"))
    monkeypatch.setattr(ng, "sample", fake_sample)
    kept = ng.filter_questions(examples, None, reward_fn, path, settings(argv))
    return "".join(example.question for example in kept), examples, calls

FILTERS = "--difficulty-filter 4", "--guessable-filter 8"

def test_filters_drop_what_is_always_right_never_right_or_guessed_and_ask_once(monkeypatch, tmp_path, capsys):
    path, right = tmp_path / "pass_rates.json", {
        "": {"0": 4, "1": 0, "2": 3, "3": 1, "4": 2},
        " </think> <answer>": dict.fromkeys("0124", 0) | {"3": 1}}
    for again in range(2):  # a resumed run reads the shares
        kept, examples, calls = filtered(monkeypatch, " ".join(FILTERS), right, path)
        assert kept == "24" and [example.pass_rate for example in examples] == [1, 0, .75, .25, .5]
        assert calls == ([] if again else [({""}, 4), ({" </think> <answer>"}, 8)])
        assert "2 of 5 questions stay; always right 1, never right 1, guessed 1" in capsys.readouterr().out
    assert run.read_lines(path) == [{"difficulty_filter": [1, 0, .75, .25, .5],
                                     "guessable_filter": [0, 0, 0, .125, 0]}]
    for argv, want in ((FILTERS[0], "2"), (FILTERS[1], "012")):  # each alone
        right = {"": {"0": 4, "1": 0, "2": 3}, " </think> <answer>": dict.fromkeys("012", 0)}
        assert filtered(monkeypatch, argv, right, tmp_path / argv, "012")[0] == want
    line = one_line(capsys, lambda: filtered(monkeypatch, FILTERS[0], {"": {}}, tmp_path / "none", "0"))
    assert "--difficulty-filter" in line and "no question" in line

# --- Rollout -----------------------------------------------------------------------------------------------
class ScriptedSampler:
    """Responses by prompt: "dead" in the prompt: all alike; else the first half of a group is wrong."""
    version, tokenizer, stop, eos_ids = 0, TOKENIZER, "</answer>", [EOS]

    def __init__(self):
        self.calls = []

    def generate(self, prompts, n, seed, max_tokens):
        self.calls.append((prompts, n, seed, max_tokens))
        yes, no = TOKENIZER.encode(" 1"), TOKENIZER.encode(" 2")
        return [[[no if i < n // 2 and "dead" not in TOKENIZER.decode(prompt) else yes, [-1.0], False]
                 for i in range(n)] for prompt in prompts]

def odd_length(response, truth):
    return {"reward": -3.0, "format_reward": 0.0, "answer_reward": float(len(response) % 2)}

def right_or_wrong(response, truth):
    return dict.fromkeys(("reward", "answer_reward", "format_reward"), float(response.strip() == truth))

def rolled_out(kinds, *argv):
    """roll_out on questions of these kinds, in this order."""
    examples = [ng.Example(f"{i} {kind}", "1", None, TOKENIZER.encode(f"{i} {kind}"))
                for i, kind in enumerate(kinds)]
    questions, sampler = ng.Curriculum(examples, "uniform", 0), ScriptedSampler()
    order = iter(examples)
    questions.take = lambda count: list(itertools.islice(order, count))
    args = settings("--rollout-batch-size 16 --group-size 4 --train-batch-size 8", *argv)
    rows, chosen, metrics, asked = ng.roll_out(sampler, questions, right_or_wrong, args, 1, 0)
    assert asked == questions.state()
    return rows, chosen, metrics, sampler.calls, questions

def test_dynamic_sampling_refills_dead_groups_with_new_questions():
    kinds = ["dead", "mixed", "dead", "mixed", "mixed", "dead", "mixed", "mixed"]
    rows, chosen, metrics, calls, questions = rolled_out(kinds, "--dynamic-sampling 3")
    assert [(len(call[0]), call[1]) for call in calls] == [(4, 4), (2, 4), (1, 4)]
    assert len({call[2] for call in calls}) == 3  # another seed each time
    asked = [row.example.question for row in chosen][::4]
    assert asked == ["1 mixed", "3 mixed", "4 mixed", "6 mixed"] and (len(rows), len(chosen)) == (28, 16)
    assert questions.tried == [4] * 7 + [0] and questions.right == [4, 2, 4, 2, 2, 4, 2, 0]
    close(metrics["train/dead_groups"], 3 / 7)  # of all that was sampled
    assert metrics["train/tokens"] == sum(map(len, rows)) and {"time/rollout", "time/reward"} < metrics.keys()
    close([row.advantage for row in chosen[:4]], 2 * [-.8660239] + 2 * [.8660239])

def test_dynamic_sampling_goes_on_with_the_rest_when_the_cap_is_reached():
    kinds = ["dead", "mixed"] + ["dead"] * 20
    rows, chosen, _, calls, _ = rolled_out(kinds, "--dynamic-sampling 2")
    assert [len(call[0]) for call in calls] == [4, 3, 3] and len(rows) == 40
    assert [row.example.question for row in chosen] == ["1 mixed"] * 4
    rows, chosen, _, calls, _ = rolled_out(kinds)  # without it dead groups stay in the batch
    assert len(calls) == 1 and chosen == rows and len(rows) == 16
    assert rolled_out(["dead"] * 12, "--dynamic-sampling 2")[1] == []

def test_a_prefix_begins_the_response_for_the_model_and_in_the_text():
    sampler, begun = ScriptedSampler(), TOKENIZER.encode(ng.END_OF_THOUGHT)
    rows = ng.sample(sampler, [ng.Example("q", "1", None, [5, 6])], 2, 3, 0, 7, [ng.END_OF_THOUGHT])
    assert sampler.calls == [([[5, 6, *begun]], 2, 3, 7)]
    assert [row.text for row in rows] == [" </think> <answer> 2", " </think> <answer> 1"]

def test_only_the_completion_is_graded():
    """The prompt has the tags in it: graded with the completion, format would be 1 from step 0."""
    example = ng.Example("What is </think> <answer> 5 </answer>", "5", None, TOKENIZER.encode(GOOD))
    rows, seen = [ng.Row(example, TOKENIZER.encode(" 5"), " 5"), ng.Row(example, [1], GOOD)], []
    ng.grade_rows(rows, lambda response, truth: seen.append((response, truth)) or 1.0)
    assert seen == [(" 5", "5"), (GOOD, "5")]
    assert [row.reward["format_reward"] for row in ng.grade_rows(rows, rewards.r1_zero_reward_fn)] == [0, 1]

def test_rollout_metrics_are_over_all_rows():
    rows = [make_row([1], [2] * length, truncated=length == 8) for length in (1, 2, 3, 4, 5, 6, 7, 8)]
    for row, right, formatted in zip(rows, (1, 1, 0, 0, 0, 0, 0, 0), (1, 1, 1, 0, 0, 0, 1, 0)):
        row.reward = {"reward": right / 2, "answer_reward": float(right), "format_reward": float(formatted),
                      "shaped": right / 2}
    metrics = {key[6:]: value for key, value in ng.rollout_metrics(rows, 4).items()}
    assert (metrics["reward"], metrics["answer_reward"], metrics["format_reward"]) == (.125, .25, .5)
    assert (metrics["length"], metrics["length_right"], metrics["length_wrong"]) == (4.5, 1.5, 5.5)
    assert (metrics["dead_groups"], metrics["truncated"], metrics["tokens"]) == (.5, .125, 44)

def test_an_empty_response_and_ids_without_a_token_are_scored_counted_and_trained_on():
    args = settings("--epochs-per-rollout-batch 2")
    policy = random_policy(vocab=len(TOKENIZER) + 8)  # as Qwen's matrix, which is larger than its vocabulary
    responses, sampler = [[], [len(TOKENIZER) + 7, 5], [5, 6, EOS], [len(TOKENIZER)]], ScriptedSampler()
    sampler.generate = lambda *_: [[[ids, [-1.0] * len(ids), False] for ids in responses]]
    rows = ng.sample(sampler, [ng.Example("q", "a", None, [5, 6, 7])], 4, 0, 0, 8)
    assert [row.response_ids for row in rows] == responses and rows[0].text == rows[3].text == ""
    ng.shape_rewards(ng.grade_rows(rows, rewards.r1_zero_reward_fn), 1, args)
    assert ng.rollout_metrics(rows, 4)["train/length"] == 1.5
    for row, advantage in zip(rows, (1.0, -1.0, 2.0, 0.5)):
        row.advantage = advantage
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics = ng.update(policy, None, optimizer, rows, 1, args)
    assert metrics["train/bad_steps"] is None and metrics["train/grad_norm"] > 0
    empty = ng.train_step(policy, optimizer, [make_row([5, 6, 7], [])], args)
    assert not empty["bad_steps"] and flat(policy.parameters()).isfinite().all()

# --- Evaluation --------------------------------------------------------------------------------------------
def test_evaluation_is_at_the_training_temperature_with_its_standard_error(monkeypatch):
    policy, args = random_policy(), settings("--max-tokens 6 --temperature 0.9 --seed 3")
    held_out, calls = [ng.Example(str(i), "a", None, [i + 5, 6]) for i in range(16)], []
    generate = ng.HFSampler.generate
    monkeypatch.setattr(ng.HFSampler, "generate", lambda sampler, *values: calls.append(
        (sampler.temperature, *values[1:])) or generate(sampler, *values))
    first, again = (ng.evaluate(make_sampler(policy, args, version=step), held_out, odd_length, step, args)
                    for step in (0, 7))
    accuracy = sum(row.reward["answer_reward"] for row in first[1]) / 16
    assert 0 < accuracy < 1 and first[0]["eval/accuracy"] == accuracy and len(first[1]) == 16
    close(first[0]["eval/stderr"], math.sqrt(accuracy * (1 - accuracy) / 16))
    assert first == again and set(calls) == {(0.9, 1, ng.seed_for(3, "eval"), 6)}  # the same at every step

def test_an_evaluation_with_a_thinking_budget_asks_for_a_thought_first_and_then_for_the_answer():
    sampler, example = ScriptedSampler(), ng.Example("q", "1", None, [5])  # its thoughts have no end
    args = settings("--thinking-budget 6 --max-tokens 10")
    _, rows = ng.evaluate(sampler, [example], odd_length, 0, args)
    assert [call[3] for call in sampler.calls] == [6, 4]
    assert rows[0].text.count("</think> <answer>") == 1

class Words:
    """A sampler and tokenizer whose tokens are words."""
    eos_ids, pad_token_id, bos_token_id = [], None, None

    @property
    def tokenizer(self):
        return self

    def encode(self, text, **_):
        return text.split()

    def decode(self, ids, **_):
        return " ".join(ids)

def budgeted(texts, replies, *argv, cut=()):
    """Rows of these texts, of which `cut` are truncated, held to a budget -> (texts afterwards, calls)."""
    calls, replies = [], iter(replies)
    rows = [ng.Row(ng.Example(str(i), "a"), text.split(), text, i in cut) for i, text in enumerate(texts)]

    def ask(examples, prefixes, max_tokens):
        calls.append(([int(example.question) for example in examples], prefixes, max_tokens))
        texts = [prefix + " " + reply for prefix, reply in zip(prefixes, next(replies))]
        return [ng.Row(example, text.split(), text) for example, text in zip(examples, texts)]
    ng.keep_to_budget(rows, ask, Words(), settings("--thinking-budget 6 --max-tokens 10", *argv))
    assert [row.example.question for row in rows] == [str(i) for i in range(len(texts))]
    return [row.text for row in rows], calls

def test_an_unfinished_thought_is_closed_and_a_cut_answer_asked_again():
    done = "a </think> <answer> 5 </answer>"
    texts, calls = budgeted([done, "b b b b b b", "c c c </think> <answer> 7", "d d"],
                            [["1 </answer>", "78 </answer>", "2 </answer>"]], cut=(1, 2))
    prefixes = ["b b b b b b </think> <answer>", "c c c </think> <answer>", "d d </think> <answer>"]
    assert calls == [([1, 2, 3], prefixes, 4)]  # what the budget of the response leaves
    assert texts == [done, *(f"{prefix} {end} </answer>" for prefix, end in zip(prefixes, ("1", "78", "2")))]
    row, seen = make_row([5], [*TOKENIZER.encode(" 1 + 2"), EOS]), []  # behind EOS is another document
    ask = lambda examples, prefixes, **_: seen.extend(prefixes) or [row]
    ng.keep_to_budget([row], ask, ScriptedSampler(),
                      settings("--thinking-budget 20"))
    assert seen == [" 1 + 2 </think> <answer>"]

def test_an_early_end_of_thought_is_replaced_by_wait():
    early, cut = "a a </think> <answer> 5", "b b b b b b"
    texts, calls = budgeted([early, cut], [["a </think> <answer> 6 </answer>"], ["8 </answer>"]],
                            "--wait 1", cut=(1,))
    assert calls == [([0], ["a a wait"], 6), ([1], ["b b b b b b </think> <answer>"], 4)]
    assert texts == ["a a wait a </think> <answer> 6 </answer>", "b b b b b b </think> <answer> 8 </answer>"]
    texts, calls = budgeted([early], [["x </think> <answer> 6"], ["y y y y y </think>"], ["9 </answer>"]],
                            "--wait 2")
    assert [call[1] for call in calls] == [["a a wait"], ["a a wait x wait"],
                                           ["a a wait x wait y </think> <answer>"]]  # held to 6 tokens
    assert texts == ["a a wait x wait y </think> <answer> 9 </answer>"]
