"""Rows as numbers and as text: metrics of a step and of an evaluation, records of the logs."""
import functools
import json
import math

import rewards
from run import mean

SAMPLES_SIZE = 75_000  # bytes of samples.jsonl a step, at most: 15 MB in 200 steps

def chunks(items, size):
    """A list cut into lists of `size`, the last one perhaps shorter: groups, batches."""
    return [items[start:start + size] for start in range(0, len(items), size)]

# --- Metrics -----------------------------------------------------------------------------------------------
def is_dead(group):
    """True if all shaped rewards of a group of rows are equal: it teaches nothing."""
    return len({row.reward["shaped"] for row in group}) == 1

def rollout_metrics(rows, group_size):
    """Means over all rollouts of a step, before any is dropped. Lengths in tokens."""
    right = [row.reward["answer_reward"] == 1 for row in rows]
    lengths = [len(row.response_ids) for row in rows]
    return {"train/reward": mean(row.reward["reward"] for row in rows), "train/answer_reward": mean(right),
            "train/format_reward": mean(row.reward["format_reward"] for row in rows),
            "train/length": mean(lengths), "train/tokens": sum(map(len, rows)),
            "train/length_right": mean(length for length, ok in zip(lengths, right) if ok),
            "train/length_wrong": mean(length for length, ok in zip(lengths, right) if not ok),
            "train/dead_groups": mean(map(is_dead, chunks(rows, group_size))),
            "train/truncated": mean(row.truncated for row in rows),
            "train/grader_errors": rewards.STATS["errors"] + rewards.STATS["timeouts"]}

def evaluation_metrics(rows, n, reward_fn):
    """Of n graded responses to each question. The standard error is that over questions; with one response
    each it is that of a share. reward_fn: the name of the reward function, for maj@n."""
    groups = chunks(rows, n)
    right = [[row.reward["answer_reward"] for row in group] for group in groups]
    shares = list(map(mean, right))  # of each question
    accuracy = mean(shares)
    variance = mean((share - accuracy) ** 2 for share in shares)
    metrics = {"eval/accuracy": accuracy, "eval/stderr": (variance / len(shares)) ** 0.5,
               "eval/format_reward": mean(row.reward["format_reward"] for row in rows),
               "eval/length": mean(len(row.response_ids) for row in rows)}
    if n > 1:
        for k in sorted({2**i for i in range(n.bit_length())} | {n}):
            metrics[f"eval/pass@{k}"] = mean(pass_at_k(n, some.count(1), k) for some in right)
        metrics[f"eval/maj@{n}"] = mean(
            majority_is_right([row.text for row in group], [one == 1 for one in some], reward_fn)
            for group, some in zip(groups, right))
    return metrics

def pass_at_k(n, right, k):
    """The chance that one of k of n answers is right, if `right` of the n are (Chen et al. 2021, eq. 1)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)

ANSWERS = {"question_only": rewards.last_boxed, "gsm8k": rewards.gsm8k_answer,
           "last_number": rewards.last_number}

def majority_is_right(responses, is_right, name):
    """maj@n: whether the answer that most of the responses to a question give is right. Answers are the same
    where the grader says so; the first of two that are as frequent wins. name: of the reward function."""
    classes = []  # [answer, right, votes]
    answers = map(ANSWERS.get(name, rewards.r1_zero_answer), responses)
    for answer, right in zip(answers, is_right, strict=True):
        same = [one for one in classes if one[1] == right and (right or rewards.is_equal(answer, one[0]))]
        if same:
            same[0][2] += 1
        elif right or answer:
            classes.append([answer, right, 1])
    return max(classes, key=lambda one: one[2])[1] if classes else False

# --- Records -----------------------------------------------------------------------------------------------
def response_record(row, tokenizer):
    """A row as an object of samples.jsonl and evaluation.jsonl."""
    return {"prompt": tokenizer.decode(row.example.prompt_ids), "response": row.text,
            "ground_truth": row.example.ground_truth, **row.reward, "length": len(row.response_ids),
            "finish_reason": "length" if row.truncated else "stop",
            "log_prob": mean(row.sampler_log_probs or [])}  # of a token, in nats

@functools.cache
def token_text(decode, token):
    """A token id -> its text, with the blank in front that decoders drop where a text begins."""
    return decode([token, token])[len(decode([token])):]

def sample_records(rows, trained, group_size, tokenizer):
    """Records of the first groups of a step, with what the step did to them: group, advantage (0 if the row
    is not among `trained`), and of each token text, log-prob and ratio, if it has one. If they are over
    SAMPLES_SIZE, groups go until one is left; then tokens and texts are cut."""
    trained, rows = set(map(id, trained)), rows[:min(64, group_size * max(1, 32 // group_size))]
    cut = SAMPLES_SIZE // 25 // min(group_size, len(rows))  # a token takes 25 bytes or so
    records = [response_record(row, tokenizer) | {
        "group": i // group_size, "advantage": row.advantage if id(row) in trained else 0.0,
        "tokens": [token_text(tokenizer.decode, token) for token in row.response_ids[:cut]],
        "log_probs": [round(value, 3) for value in (row.sampler_log_probs or [])[:cut]],
        "ratios": [round(value, 3) for value in (row.ratios or [])[:cut]]}
        for i, row in enumerate(rows)]
    while cut and len(json.dumps(records)) > SAMPLES_SIZE:
        cut = cut if len(records) > group_size else cut * 3 // 4
        limits = {list: cut, str: 24 * cut}  # a long text stays whole where only its tokens are too many
        records = [{key: value[:limits[type(value)]] if type(value) in limits else value
                    for key, value in record.items()} for record in records[:-group_size] or records]
    return records
