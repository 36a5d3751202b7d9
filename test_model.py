"""The tests of model.py and of models that the script meets: `python -m pytest -q test_model.py`.

Ten architectures here; `python test_model.py` tries all of docs/models.md and prints its table, and
`python test_model.py vllm` compares with vLLM, each with an engine and a process of its own.
"""
import contextlib
import copy
import functools
import gc
import json
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AddedToken, AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer

import data
import model
import nano_grpo as ng
import run
import tiny
from test_nano import EOS, TOKENIZER, close, flat, make_row, plain_log_probs, random_policy, settings
from test_run import needs_vllm

HERE = Path(ng.__file__).resolve().parent
SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, n_embd=32, n_layer=2, n_head=4, n_positions=256, d_model=32, n_layers=2, n_heads=4,
    ffn_dim=64, word_embed_proj_dim=32, num_local_experts=4, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, sliding_window=16, logits_scaling=8.0, rotary_dim=4, num_layers=2,
    decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
    encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, n_inner=64, d_ff=64)
WIDTHS = """hidden_size intermediate_size head_dim n_embd d_model ffn_dim word_embed_proj_dim n_inner d_ff
moe_intermediate_size rotary_dim decoder_ffn_dim encoder_ffn_dim""".split()
TEN = "qwen3 gemma2 cohere granite gpt2 opt bloom mamba lfm2 rwkv".split()
ALL = TEN + """olmo2 llama qwen2 mistral gemma gemma3_text falcon phi phi3 gpt_neox gptj cohere2
granitemoe olmo olmo3 stablelm starcoder2 smollm3 mixtral qwen2_moe qwen3_moe qwen3_next glm glm4 exaone4
nemotron codegen mpt biogpt xglm bart ernie4_5 helium arcee seed_oss hunyuan_v1_dense persimmon
gpt_bigcode apertus diffllama doge ministral vaultgemma minimax flex_olmo jais2 olmoe phimoe
granitemoeshared ernie4_5_moe gpt_oss jetmoe hunyuan_v1_moe xlstm""".split()

def small_model(name, **more):
    """A model of that architecture with random weights, large enough to make log-probs that differ."""
    build = transformers.CONFIG_MAPPING[name]
    sizes = {key: value for key, value in (SIZES | more).items() if hasattr(build(), key)}
    if isinstance(getattr(build, "head_dim", None), property):  # it follows from the others
        del sizes["head_dim"]
    config = build(**sizes)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(2 if weight.dim() > 1 else 1)
    return policy

def gradient_of(policy, log_probs):
    policy.zero_grad()
    log_probs.sum().backward()
    return flat(weight.grad for weight in policy.parameters() if weight.grad is not None)

class Letters:
    """A tokenizer that HFSampler can be built with, where no stop string is looked for."""
    def __len__(self):
        return SIZES["vocab_size"]

def gaps(name, **more):
    """-> (has_fused_head, shares_prompts, has_cache, largest error of log-probs, of gradients (relative), of
    the sampler). The second rows are 2 prompts of 9 tokens with 3 responses each, in no order."""
    policy, errors = small_model(name, **more), []
    rows = [make_row([5 + i, 9, 17 + i][:i + 1], [20, 31 + i, 44, 8][:4 - i]) for i in range(3)]
    asked = [ng.Example("q", "a", None, list(range(start, start + 9))) for start in (5, 12)]
    groups = [ng.Row(asked[i % 2], [20, 31 + i, 44, 8][:4 - i // 2]) for i in (3, 0, 1, 2, 5, 4)]
    assert model.shared_prompts(groups) == (9, [0, 1, 0, 1, 0, 1]) and not model.shared_prompts(rows)
    for some, temperature in ((rows, 1.0), (rows, 0.7), (groups, 0.7)):
        log_probs, _, mask = ng.response_log_probs(policy, some, temperature)
        want = torch.cat([plain_log_probs(policy, row, temperature) for row in some])
        got, truth = gradient_of(policy, log_probs[mask]), gradient_of(policy, want)
        errors.append(((log_probs[mask] - want).abs().max().item(),
                       ((got - truth).norm() / truth.norm()).item()))
    sampler = ng.HFSampler(policy, Letters(), [2], None, 0.7, 2, 64)
    samples = sampler.generate([row.example.prompt_ids for row in rows], 2, 0, 8)
    gap = 0.0
    for row, group in zip(rows, samples):
        for ids, log_probs, _ in group:
            want = plain_log_probs(policy, make_row(row.example.prompt_ids, ids), 0.7)
            gap = max(gap, (want - torch.tensor(log_probs)).abs()[2:].max().item() if len(ids) > 2 else 0.0)
    return policy.has_fused_head, policy.shares_prompts, sampler.has_cache, *map(max, zip(*errors)), gap

def engine_gaps(name):
    """-> (largest error of the engine's log-probs as loaded and after a push of other weights, and of the
    gradient of the policy beside it (relative)). vLLM's attention on a CPU needs heads of width 32."""
    before = small_model(name, **{key: 4 * SIZES[key] for key in WIDTHS}, vocab_size=len(TOKENIZER))
    row, errors = make_row([5, 9], [20, 31, 44]), []
    truth = gradient_of(before, plain_log_probs(before, row, 0.7))
    with tempfile.TemporaryDirectory() as folder:
        before.save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
        policy, sampler = ng.load_model(settings("--sampler vllm --temperature 0.7 --model", folder))
    got = gradient_of(policy, ng.response_log_probs(policy, [row], 0.7)[0])
    prompts = [[5, 80, 9], list(range(40, 90)), [7]]
    for version in range(2):
        sampler.push(policy, version)
        for prompt, group in zip(prompts, sampler.generate(prompts, 2, 0, 16)):
            for ids, log_probs, _ in group:
                want = plain_log_probs(policy, make_row(prompt, ids), 0.7).detach()
                errors.append((want - torch.tensor(log_probs))[sampler.min_tokens:].abs().max().item())
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
    return max(errors), ((got - truth).norm() / truth.norm()).item()

def engine_gaps_alone(name):
    """engine_gaps in a process of its own: an engine leaves traces that change the next one."""
    code = f"import test_model; print(*(f'{{gap:.0e}}' for gap in test_model.engine_gaps({name!r})))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE)

def test_rotary_angles_that_follow_the_length_do_not_share_a_prompt():
    """Phi 3 with long contexts: a prompt within the original length, read alone, has other angles."""
    assert model.can_share_prompts(small_model("phi3"))
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 10,
               "short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "factor": 4.0}
    policy = small_model("phi3", rope_parameters=scaling, original_max_position_embeddings=10)
    asked = ng.Example("q", "a", None, list(range(5, 14)))
    rows = [ng.Row(asked, [20, 31 + i, 44, 8]) for i in range(3)]
    assert model.shared_prompts(rows)
    log_probs, _, mask = ng.response_log_probs(policy, rows, 1.0)
    close(log_probs[mask], torch.cat([plain_log_probs(policy, row) for row in rows]), 1e-4)

def test_a_cache_with_layers_of_another_kind_is_not_shared(monkeypatch):
    """Such as a state that is changed in place, which backward would need as it was."""
    class State(DynamicLayer):
        pass
    cache, new_cache = [], model.new_cache
    monkeypatch.setattr(model, "new_cache", lambda config: cache.append(new_cache(config)) or cache[-1])
    assert model.can_share_prompts(random_policy())
    update = DynamicLayer.update
    monkeypatch.setattr(DynamicLayer, "update", lambda self, *values, **named: (
        update(self, *values, **named), setattr(self, "__class__", State))[0])
    assert not model.can_share_prompts(random_policy()) and type(cache[-1].layers[0]) is State

def test_keys_and_values_are_freed_as_soon_as_nobody_needs_them():
    """A cycle would keep them, and all that backward needs with them, until Python looks for cycles: a pass
    that is tried again for lack of memory would find none."""
    gc.collect()
    gc.disable()
    try:
        policy, cache = random_policy(), model.new_cache(random_policy().config)
        policy(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        watched = [weakref.ref(cache), weakref.ref(cache.layers[0].keys)]
        del cache
        assert [ref() for ref in watched] == [None, None]
        cache = model.new_cache(policy.config)
        cache.update(torch.ones(1, 2, 1, 8).double(), torch.ones(1, 2, 1, 8), 0)
        assert cache.layers[0].keys.dtype == torch.float32  # that of the values
    finally:
        gc.enable()

@needs_vllm
# olmo2: served through transformers' class, which vLLM changes; the others: tied, under names of their own
@pytest.mark.parametrize("name", ["olmo2", "gemma2", "biogpt"])
def test_beside_the_engine_a_policy_is_what_it_is_without(name):
    done = engine_gaps_alone(name)
    assert done.returncode == 0, done.stderr
    log_probs, gradient = map(float, done.stdout.split()[-2:])
    assert log_probs < 1e-4 and gradient < 1e-5

@needs_vllm
@pytest.mark.parametrize("name, more, word", [
    ("mixtral", {}, "mixture of experts"), ("qwen2", {"hidden_size": 32}, "head_dim=8"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "did not start")])
def test_a_model_that_the_engine_cannot_serve_is_refused_in_one_line(tmp_path, name, more, word):
    small_model(name, **{"hidden_size": 128, "head_dim": 32} | more).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    flags = ["--mode", "eval", "--sampler", "vllm", "--dataset", "arithmetic", "--model", str(tmp_path)]
    done = subprocess.run([sys.executable, ng.__file__, *flags], capture_output=True, text=True, cwd=tmp_path)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and line.startswith("nano_grpo: error") and "Traceback" not in done.stderr
    assert word in line and "--sampler hf" in line

@pytest.mark.parametrize("name", TEN)
def test_log_probs_gradients_and_samples_are_those_of_the_models_own_forward(name):
    has_fused_head, shares_prompts, has_cache, log_probs, gradients, gap = gaps(name)
    assert log_probs < 1e-4 and gradients < 1e-4 and gap < 1e-4
    assert has_fused_head == (name not in ("gemma2", "cohere", "granite"))  # those cap or scale their logits
    assert has_cache == (name not in ("mamba", "rwkv"))
    assert shares_prompts == (has_fused_head and has_cache)

@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_a_prompt_longer_than_the_sliding_window_is_shared_too(name):
    _, shares_prompts, _, *errors = gaps(name, sliding_window=4)
    assert shares_prompts and max(errors) < 1e-4

@pytest.mark.parametrize("name", ["opt", "gpt2", "qwen3"])
def test_checkpointed_layers_have_the_same_numbers_whatever_drops_out_in_training(name):
    policy = small_model(name)
    row = make_row([5, 6], [7, 8, 9])
    before = gradient_of(policy, ng.response_log_probs(policy, [row], 0.7)[0])
    for part in policy.modules():
        for key in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(part, key, None), float):
                setattr(part, key, 0.5)
    model.checkpoint_layers(policy)
    close(gradient_of(policy, ng.response_log_probs(policy, [row], 0.7)[0]), before, 1e-12)

# --- Weights -----------------------------------------------------------------------------------------------
def saved_model(folder, change):
    random_policy(tied=True, dtype=torch.float32).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return str(folder)

def load(folder):
    return ng.load_model(settings("--sampler hf --model", folder))[0]

@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_known_prefix_of_weights_is_taken_off_and_said(tmp_path, capsys, prefix):
    folder = saved_model(tmp_path, lambda weights: {prefix + name: weights[name] for name in weights})
    policy, want = load(folder), random_policy(tied=True, dtype=torch.float32)
    assert all(torch.equal(one, two) for one, two in zip(policy.parameters(), want.parameters()))
    assert prefix in capsys.readouterr().out
    policy.save_pretrained(tmp_path / "trained")  # the end of a run
    assert load_file(tmp_path / "trained" / "model.safetensors").keys() == want.state_dict().keys() - {
        "lm_head.weight"}

@pytest.mark.parametrize("change, word", [
    (lambda weights: {name: weights[name] for name in weights if "1.mlp.down" not in name}, "down_proj"),
    (lambda weights: {f"wrapped.{name}": weights[name] for name in weights}, "embed_tokens"),
    (lambda weights: weights | {"model.layers.7.mlp.down_proj.weight": torch.zeros(2)}, "layers.7"),
    (lambda weights: weights | {"model.norm.weight": torch.zeros(3)}, "")])
def test_weights_that_do_not_fit_are_refused_and_never_random(tmp_path, capsys, change, word):
    with pytest.raises(SystemExit):
        load(saved_model(tmp_path, change))
    line, = capsys.readouterr().err.splitlines()
    assert "--model" in line and word in line

def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

@pytest.mark.parametrize("change, word", [
    (lambda weights: weights, None),
    (lambda weights: {name.replace("up_proj.w", "up_proj.qw"): weights[name] for name in weights}, "qweight"),
    (lambda weights: weights | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, "weight_scale")])
@pytest.mark.parametrize("method", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "gguf"},
                                    {"quant_method": "fp8"}])
def test_whole_weights_are_taken_whatever_the_config_says_and_quantised_ones_refused(
        tmp_path, capsys, change, word, method):
    folder = saved_model(tmp_path, change)
    edit_json(tmp_path / "config.json", quantization_config=method)
    with pytest.raises(SystemExit) if word else contextlib.nullcontext():
        policy = load(folder)
    if word:
        line, = capsys.readouterr().err.splitlines()
        assert "quantised ones cannot be trained" in line and word in line
    else:
        assert policy.dtype == torch.float32
        policy.save_pretrained(tmp_path / "trained")
        assert "quantization_config" not in (tmp_path / "trained" / "config.json").read_text()

def test_a_model_that_could_not_be_saved_is_mended_or_refused_at_the_start(tmp_path, capsys, monkeypatch):
    """Llama 2 has a temperature without do_sample, which transformers reads but refuses to write."""
    folder = saved_model(tmp_path, lambda weights: weights)
    edit_json(tmp_path / "generation_config.json", temperature=0.6, top_p=0.9, do_sample=False)
    policy = load(folder)
    policy.save_pretrained(tmp_path / "trained")
    assert json.loads((tmp_path / "trained" / "generation_config.json").read_text())["top_p"] == 0.9
    def fail(self, *_, **__):
        raise ValueError("no\nway")
    monkeypatch.setattr(type(policy), "save_pretrained", fail)
    with pytest.raises(SystemExit):
        load(folder)
    line, = capsys.readouterr().err.splitlines()
    assert "--model could not be saved after training (no way): mend" in line
    ng.load_model(settings("--mode eval --sampler hf --model", folder))  # nothing is saved then

@pytest.mark.parametrize("damage", [
    lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 1\n",
    lambda content: content[:len(content) // 2], lambda content: b""])
def test_damaged_weights_are_refused_in_one_line(tmp_path, capsys, damage):
    folder = saved_model(tmp_path, lambda weights: weights)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit):
        load(folder)
    assert len(capsys.readouterr().err.splitlines()) == 1

def test_a_folder_without_tokenizer_or_with_adapters_only_is_told_what_it_lacks(tmp_path, capsys):
    policy = random_policy(dtype=torch.float32)
    policy.save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        load(str(tmp_path))
    assert "has no tokenizer: copy tokenizer.json" in capsys.readouterr().err
    TOKENIZER.save_pretrained(tmp_path)
    load(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit):
        load(str(tmp_path))
    assert "holds adapters, not a whole model" in capsys.readouterr().err

# --- What is asked, read and counted -----------------------------------------------------------------------
def test_tags_that_are_special_tokens_stay_in_the_text_and_ends_do_not():
    tokenizer = tiny.tiny_tokenizer(ng.R1_ZERO_PROMPT)
    tags = [AddedToken("</think>"), AddedToken("<answer>")]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    sampler = ng.HFSampler(random_policy(), tokenizer, [EOS], None, 1.0, 0, 8)
    ids = tokenizer.encode(" 5 </think> <answer> 5 </answer>") + [EOS]
    assert tokenizer.decode(ids, skip_special_tokens=True) == " 5   5 </answer>"
    assert ng.visible_text(sampler, ids) == " 5 </think> <answer> 5 </answer>"

def test_a_prompt_never_ends_with_the_end_of_text():
    tokenizer = tiny.tiny_tokenizer(ng.R1_ZERO_PROMPT)
    example, encode = ng.Example("What is 1 + 2 ?", "3"), tokenizer.encode
    tokenizer.encode = lambda text, **how: encode(text, **how) + [EOS]
    example, = ng.add_prompts([example], tokenizer, settings())
    assert example.prompt_ids == encode(ng.prompt_template("r1_zero").replace("{question}", example.question))

def test_small_floats_are_the_numbers_that_were_written(tmp_path):
    import datasets
    features = datasets.Features(question=datasets.Value("string"), answer=datasets.Value("float32"))
    rows = [{"question": f"q{value}", "answer": value} for value in (2.3, 0.1, 1e7, 5.0)]
    datasets.Dataset.from_list(rows, features).to_parquet(tmp_path / "data.parquet")
    examples = data.read_examples(str(tmp_path / "data.parquet"), "--dataset")["train"]
    assert [float(one.ground_truth) for one in examples] == [2.3, 0.1, 1e7, 5.0]

def test_golds_that_nobody_can_match_are_dropped_and_counted(tmp_path, capsys):
    golds = ["5", "proof", "This statement is true because every even number has a half .", r"\frac{1}{2}"]
    text = "".join(json.dumps({"question": f"q{i}", "answer": gold}) + "\n" for i, gold in enumerate(golds))
    (tmp_path / "data.jsonl").write_text(text)
    read = functools.partial(data.read_examples, str(tmp_path / "data.jsonl"), "--dataset")
    assert [one.ground_truth for one in read(ng.rewards.ungradable)["train"]] == ["5", r"\frac{1}{2}"]
    assert "2 of 4 rows dropped" in capsys.readouterr().out
    assert len(read()["train"]) == 4  # a reward function of one's own may judge proofs

def test_an_evaluation_takes_a_fixed_sample_of_a_given_test_split(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i // 50)} for i in range(100)]  # sorted, as MATH often is
    for name, some in (("train", [{"question": "t", "answer": "1"}] * 9), ("test", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    _, held_out = data.load_examples(str(tmp_path), None, 20, "grpo")
    assert 4 <= sum(one.ground_truth == "1" for one in held_out[:20]) <= 16
    assert held_out == data.load_examples(str(tmp_path), None, 20, "eval")[1]

def test_nothing_that_stands_in_the_way_of_a_file_is_deleted(tmp_path, capsys):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit):
        run.write_atomic(tmp_path / "figures", lambda path: path.write_text("new"))
    assert (tmp_path / "figures" / "mine.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["figures"] and "figures" in capsys.readouterr().err

def print_table(names):
    print("| architecture | output matrix in tiles | prompt once | cache | log-probs | gradient | sampler |"
          "\n" + "|---" * 7 + "|")
    for name in names:
        try:
            fused, shares_prompts, cache, *errors = gaps(name)
            cells = ["yes" if fused else "own forward", "yes" if shares_prompts else "whole rows",
                     "yes" if cache else "read anew", *(f"{error:.0e}" for error in errors)]
        except Exception as error:
            cells = [f"{type(error).__name__}: {' '.join(str(error).split())[:80]}", *[""] * 5]
        print("|", " | ".join([name, *cells]), "|", flush=True)

def test_the_table_of_architectures_has_a_cell_for_each_column(capsys):
    print_table(["llama", "mamba", "no_such"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in lines] == [8] * 5 and "KeyError" in lines[4]
    assert lines[2].startswith("| llama | yes | yes | yes | ") and "| whole rows |" in lines[3]

def print_engine_table(names):
    print("| architecture | vLLM: log-probs, gradient of the policy |")
    print("|---|---|")
    for name in names:
        done = engine_gaps_alone(name)
        last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:]
        print("|", name, "|", *(line.split("--sampler vllm: ")[-1] for line in last), "|", flush=True)

# --- LoRA --------------------------------------------------------------------------------------------------
def adapted_policy(seed=0, is_random=True):
    """A random policy with adapters; is_random: with some that change it."""
    policy = random_policy(seed)
    model.add_adapters(policy, 4, seed)
    if is_random:
        torch.manual_seed(seed + 1)
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.02)
    return policy

def lora_rows():
    return [ng.Row(ng.Example("q", "a", None, [5, 6, 7]), [8, 9], advantage=1.0),
            ng.Row(ng.Example("q", "a", None, [3]), [12, 13, 14], advantage=-0.5)]

def test_new_adapters_change_no_log_prob_and_only_they_are_trained():
    pytest.importorskip("peft")
    plain, policy = random_policy(), adapted_policy(is_random=False)
    want, got = (ng.response_log_probs(one, lora_rows(), 0.7)[0] for one in (plain, policy))
    assert torch.equal(got, want)
    taught = {name.rpartition(".lora_")[0] for name, weight in policy.named_parameters()
              if weight.requires_grad}
    assert taught == {f"model.layers.{i}.{name}" for i in range(2) for name in (
        *(f"self_attn.{one}_proj" for one in "qkvo"), *(f"mlp.{one}_proj" for one in ("gate", "up", "down")))}

def test_merged_weights_are_the_policy_under_the_names_of_the_model_as_loaded():
    pytest.importorskip("peft")
    policy, merged = adapted_policy(), random_policy(seed=5)
    weights = dict(model.merged_weights(policy))
    assert list(weights) == list(merged.state_dict())
    merged.load_state_dict(weights)
    want, got = (ng.response_log_probs(one, lora_rows(), 1.0)[0] for one in (policy, merged))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    plain = ng.response_log_probs(random_policy(), lora_rows(), 1.0)[0]
    assert (plain - want).abs().max() > 1e-3  # the adapters do something
    with model.without_adapters(policy):
        assert torch.equal(ng.response_log_probs(policy, lora_rows(), 1.0)[0], plain)
    assert torch.equal(ng.response_log_probs(policy, lora_rows(), 1.0)[0], want)

def test_the_gradient_of_adapters_is_that_of_the_full_model_projected_onto_them():
    """dL/dB = 32 / rank dL/dW A^T, dL/dA = 32 / rank B^T dL/dW."""
    pytest.importorskip("peft")
    policy, full, args = adapted_policy(), random_policy(), settings("--max-grad-norm 1e9")
    full.load_state_dict(dict(model.merged_weights(policy)))
    for one in (policy, full):
        taught = [weight for weight in one.parameters() if weight.requires_grad]
        ng.train_step(one, torch.optim.SGD(taught, lr=0.0), lora_rows(), args)
    for name, layer in policy.named_modules():
        if hasattr(layer, "get_delta_weight"):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            whole = full.get_submodule(name).weight.grad
            torch.testing.assert_close(b.grad, 8 * whole @ a.T, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(a.grad, 8 * b.T @ whole, rtol=1e-6, atol=1e-9)

# --- A push is compared ------------------------------------------------------------------------------------
class Engine:
    """What a VLLMSampler asks of vLLM: a model in bfloat16 with one fused matrix. `loads` copies a weight."""
    def __init__(self, policy, loads):
        self.model, self.loads = copy.deepcopy(policy).to(torch.bfloat16), loads
        self.model.load_weights = self.load_weights
        self.model.model.layers[0].self_attn.q_proj.weight.data *= 2  # stands for one that is kept otherwise

    def load_weights(self, weights):
        for name, weight in weights:
            if self.loads(name):
                self.model.get_parameter(name).data.copy_(weight)

    def apply_model(self, function):
        return [function(self.model)]

    def reset_prefix_cache(self):
        return True

@pytest.mark.parametrize("kept", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight",
                                  "model.embed_tokens.weight", "lm_head.weight"])
def test_a_push_that_is_one_step_stale_in_bfloat16_is_caught_in_every_weight(kept):
    """At small learning rates few weights change in bfloat16, and log-probs do not tell."""
    policy, stale = random_policy(), []
    engine = Engine(policy, lambda name: name not in stale)
    sampler = ng.VLLMSampler(engine, policy, None, [EOS], None, 1.0, 0)
    sampler.push(policy, 0)
    with torch.no_grad():
        policy.get_parameter(kept).view(-1)[3] *= 1.01  # a step of a hundredth in one number
    sampler.push(policy, 1)
    assert sampler.version == 1
    stale.append(kept)
    with torch.no_grad():
        policy.get_parameter(kept).view(-1)[3] *= 1.01
    with pytest.raises(ng.PushError, match="does not hold the new"):
        sampler.push(policy, 2)
    assert sampler.version is None

def test_a_weight_that_the_engine_keeps_in_another_form_is_not_compared():
    policy = random_policy()
    engine = Engine(policy, lambda name: "q_proj" not in name)
    sampler = ng.VLLMSampler(engine, policy, None, [EOS], None, 1.0, 0)
    assert "model.layers.0.self_attn.q_proj.weight" not in sampler.unfused
    assert "model.layers.1.self_attn.q_proj.weight" in sampler.unfused
    sampler.push(policy, 1)

def test_a_weight_of_one_number_tells_nothing_of_the_order_in_which_the_engine_keeps_it():
    policy = random_policy()
    engine, norm = Engine(policy, lambda name: True), policy.model.norm.weight  # all ones, as it begins
    engine.model.load_weights = lambda weights: [
        engine.model.get_parameter(name).data.copy_(weight.flip(0) if name == "model.norm.weight" else weight)
        for name, weight in weights]
    sampler = ng.VLLMSampler(engine, policy, None, [EOS], None, 1.0, 0)
    with torch.no_grad():
        norm[0] *= 1.5
    sampler.push(policy, 1)
    assert sampler.version == 1 and "model.norm.weight" not in sampler.unfused

@pytest.mark.parametrize("other", [True, False])
def test_a_tied_matrix_is_pushed_under_the_names_that_the_engine_takes(other):
    policy = random_policy(tied=True)
    engine, pushed = Engine(policy, lambda name: pushed.append(name) or True), []
    load = engine.model.load_weights

    def refuses(weights):
        for name, weight in weights:
            if name == "lm_head.weight" and not other:
                raise KeyError(name)
            load([(name, weight)])
    engine.model.load_weights = refuses
    sampler = ng.VLLMSampler(engine, policy, None, [EOS], None, 1.0, 0)
    pushed.clear()
    sampler.push(policy, 0)
    assert set(policy.state_dict()) - set(pushed) == (set() if other else {"lm_head.weight"})

if __name__ == "__main__":
    if sys.argv[1:2] == ["vllm"]:
        print_engine_table(sys.argv[2:] or sorted(ALL))
    else:
        print_table(sys.argv[1:] or sorted(ALL))
