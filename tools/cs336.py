"""The names of Stanford CS336, assignment 5, for the functions of nano_grpo.py, in both editions.

The names clash, so each edition is a class that holds plain functions: edition_2026.grpo_train_step(...). An
adapter of the public tests only imports. Shapes: B rows, S prompt + response - 1, V vocabulary.
"""
import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import nano_grpo as ng
import torch
from model import log_probs_and_entropy

def encode(prompt_strs, output_strs, tokenizer):
    """-> token ids of the prompts, and of the outputs, apart; no end of text is added to an output."""
    outputs = [tokenizer.encode(output, add_special_tokens=False) for output in output_strs]
    return [tokenizer.encode(prompt) for prompt in prompt_strs], outputs

def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    """-> input_ids, labels and response_mask, (B, S) each; the mask is that of the labels."""
    batch = ng.pack(*encode(prompt_strs, output_strs, tokenizer), tokenizer.pad_token_id or 0)
    return {key: batch[key] for key in ("input_ids", "labels", "response_mask")}

def get_response_log_probs(model, input_ids, labels, return_token_entropy=False):
    """The plain form of ng.response_log_probs: all logits at once, unmasked -> dict of (B, S)."""
    log_probs, entropy = log_probs_and_entropy(model(input_ids).logits, labels)
    return {"log_probs": log_probs} | ({"token_entropy": entropy} if return_token_entropy else {})

LOSSES = {"no_baseline": "pg", "reinforce_with_baseline": "pg", "grpo_clip": "grpo_clip",  # 2025
          "none": "pg", "noclip": "noclip", "grpo": "grpo_clip", "gspo": "gspo", "cispo": "cispo"}  # 2026

def refuse_missing(name, **arguments):
    """ValueError if one of `arguments` is None and this loss of ng.LOSSES needs it."""
    loss = ng.LOSSES[name]
    is_needed = dict(old_log_probs=loss.has_ratio, cliprange=loss.clips, response_mask=name == "gspo")
    for key, value in arguments.items():
        if value is None and is_needed.get(key, True):
            raise ValueError(f"the loss {name} needs {key}")

def token_loss(name, weights, log_probs, old_log_probs=None, cliprange=None, response_mask=None):
    """Weights (B,) or (B, 1) -> (B, S) loss of ng.LOSSES, metadata."""
    refuse_missing(name, weights=weights, old_log_probs=old_log_probs, cliprange=cliprange,
                   response_mask=response_mask)
    mask = torch.ones_like(log_probs) if response_mask is None else response_mask
    loss, is_clipped = ng.LOSSES[name].compute(log_probs, old_log_probs, weights.reshape(-1, 1), mask.bool(),
                                               cliprange, cliprange, None)
    return loss, {"is_clipped": is_clipped}

def compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths):
    """-> rewards (B,), their means by kind."""
    graded = ng.rewards.grade_answers(rollout_responses, repeated_ground_truths, reward_fn)
    means = {key: ng.mean(one[key] for one in graded) for key in ("reward", "format_reward", "answer_reward")}
    return torch.tensor([one["reward"] for one in graded]), means

# --- 2025 --------------------------------------------------------------------------------------------------
class edition_2025:
    tokenize_prompt_and_output = tokenize_prompt_and_output
    get_response_log_probs = get_response_log_probs

    def masked_mean(tensor, mask, dim=None):
        return (tensor * mask).sum(dim) / mask.sum(dim)

    def compute_entropy(logits):
        return log_probs_and_entropy(logits, torch.zeros_like(logits[..., 0], dtype=torch.long))[1]

    def masked_normalize(tensor, mask, dim=None, normalize_constant=1.0):
        return (tensor * mask).sum(dim) / normalize_constant

    def compute_group_normalized_rewards(reward_fn, rollout_responses, repeated_ground_truths, group_size,
                                         advantage_eps, normalize_by_std):
        raw_rewards, metadata = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
        rewards_PG, norm = raw_rewards.view(-1, group_size), "std" if normalize_by_std else "none"
        advantages = ng.group_advantages(rewards_PG, "mean", norm, advantage_eps)
        return advantages.view(-1), raw_rewards, metadata

    def compute_naive_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs):
        return token_loss("pg", raw_rewards_or_advantages, policy_log_probs)[0]

    def compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange):
        return token_loss("grpo_clip", advantages, policy_log_probs, old_log_probs, cliprange)

    def compute_policy_gradient_loss(policy_log_probs, loss_type, raw_rewards=None, advantages=None,
                                     old_log_probs=None, cliprange=None):
        weights = raw_rewards if loss_type == "no_baseline" else advantages
        return token_loss(LOSSES[loss_type], weights, policy_log_probs, old_log_probs, cliprange)

    def sft_microbatch_train_step(policy_log_probs, response_mask, gradient_accumulation_steps,
                                  normalize_constant=1.0):
        rows = len(response_mask) * gradient_accumulation_steps
        loss = ng.aggregate_loss(-policy_log_probs, response_mask, "constant", rows, None, normalize_constant)
        loss.backward()
        return loss.detach(), {}

    def grpo_microbatch_train_step(policy_log_probs, response_mask, gradient_accumulation_steps, loss_type,
                                   raw_rewards=None, advantages=None, old_log_probs=None, cliprange=None):
        per_token, metadata = edition_2025.compute_policy_gradient_loss(
            policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange)
        rows = len(response_mask) * gradient_accumulation_steps
        loss = ng.aggregate_loss(per_token, response_mask, "sequence", rows, None, None)
        loss.backward()
        return loss.detach(), metadata

# --- 2026 --------------------------------------------------------------------------------------------------
class edition_2026:
    tokenize_prompt_and_output = tokenize_prompt_and_output
    get_response_log_probs = get_response_log_probs
    compute_rollout_rewards = compute_rollout_rewards

    def compute_group_normalized_rewards(raw_rewards, group_size, baseline="mean", advantage_eps=1e-6,
                                         advantage_normalizer="std"):
        rewards_PG = raw_rewards.reshape(-1, group_size)
        advantages = ng.group_advantages(rewards_PG, baseline, advantage_normalizer, advantage_eps)
        if baseline == "none" and advantage_normalizer != "none":  # the course divides raw rewards too
            advantages /= getattr(rewards_PG, advantage_normalizer)(1, keepdim=True) + advantage_eps
        return advantages.view(-1), {"mean": raw_rewards.mean().item(), "max": raw_rewards.max().item()}

    def compute_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs,
                                     importance_reweighting_method="none", old_log_probs=None, cliprange=None,
                                     response_mask=None):
        return token_loss(LOSSES[importance_reweighting_method], raw_rewards_or_advantages, policy_log_probs,
                          old_log_probs, cliprange, response_mask)

    def aggregate_loss_across_microbatch(per_token_policy_gradient_loss, mask, loss_normalization="sequence",
                                         normalization_constant=None):
        rows = len(mask) if loss_normalization == "sequence" else 1  # the constant divides the whole sum
        return ng.aggregate_loss(per_token_policy_gradient_loss, mask, loss_normalization, rows, None,
                                 normalization_constant)

    def grpo_train_step(model, tokenizer, optimizer, gradient_accumulation_steps, max_grad_norm, reward_fn,
                        repeated_prompts, rollout_responses, repeated_ground_truths, group_size,
                        baseline="mean", advantage_eps=1e-6, advantage_normalizer="std",
                        importance_reweighting_method="none", old_log_probs=None, cliprange=None,
                        loss_normalization="sequence", normalization_constant=None):
        """ng.train_step on these rows. Where loss or gradient is not finite: NaN, and nothing changes."""
        name = LOSSES[importance_reweighting_method]
        refuse_missing(name, old_log_probs=old_log_probs, cliprange=cliprange)
        raw_rewards, metadata = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
        advantages, _ = edition_2026.compute_group_normalized_rewards(
            raw_rewards, group_size, baseline, advantage_eps, advantage_normalizer)
        parts = zip(*encode(repeated_prompts, rollout_responses, tokenizer), advantages.tolist(), strict=True)
        rows = [ng.Row(ng.Example("", "", prompt_ids=prompt), response, advantage=advantage)
                for prompt, response, advantage in parts]
        for row, old in zip(rows, [] if old_log_probs is None else old_log_probs.tolist()):
            row.old_log_probs = old[len(row.example.prompt_ids) - 1:len(row) - 1]
        args = argparse.Namespace(**{flag.key: flag.default for flags in ng.FLAGS.values() for flag in flags})
        args.loss, args.loss_aggregation = name, loss_normalization
        args.cliprange = args.cliprange_high = float("inf") if cliprange is None else cliprange
        args.max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        args.max_tokens = normalization_constant and normalization_constant / len(rows)
        args.microbatch_tokens = -(-len(rows) // gradient_accumulation_steps) * max(map(len, rows))
        with tempfile.TemporaryDirectory() as args.run_dir:  # for the rows of a step that is not finite
            sums = ng.train_step(model, optimizer, rows, args)
        optimizer.zero_grad()
        per_token = {key: sums[key] / max(1, sums["tokens"]) for key in ("entropy", "clip_fraction")}
        loss = torch.tensor(float("nan") if sums["bad_steps"] else float(sums["loss"]))
        return loss, metadata | per_token | {"grad_norm": sums["grad_norm"]}
