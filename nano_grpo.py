"""nano_grpo: teach a language model mathematics by reinforcement learning from verifiable rewards.

GRPO (arXiv 2402.03300), one pass of the loop at the bottom of this file:
  sample        group_size responses to each of P questions, from the current policy
  reward        each response: 1 if its final answer is right and its format is kept, else 0
  advantage     A = (reward - group mean) / group std; Dr. GRPO drops the std (--no-std-norm)
  microbatches  rows of similar length, up to a token budget
  step          loss per token = -min(rho A, clip(rho) A), rho = pi(token) / pi_old(token); AdamW
  push          the new weights to the sampler
  evaluate      on a fixed held-out set, at the temperature and token budget of training

All that is trained on is a Row: prompt ids, response ids, an advantage. The modes differ only in where rows
come from: `sft` takes written solutions (A = 1), `expert_iteration` keeps the right ones of its own rollouts
(A = 1), `grpo` keeps all, with group advantages. `eval` samples and scores; `plot` draws; `bench` times.

  python nano_grpo.py --mode grpo --no-std-norm      without CUDA: a tiny model on sums; with: Qwen on MATH
  python nano_grpo.py --mode eval --model runs/x/model

Left out on purpose: a value network (the group is the baseline), a reward model (the grader is exact), a
replay buffer. The loss is logged, not printed: with centred advantages it starts at about 0 on every rollout.

Shapes: P prompts, G = group_size, B rows (P * G), S prompt + response, T longest response, V vocabulary.
A response_mask is 1 on response tokens and 0 elsewhere. Log-probs and entropies are in nats.
"""
import argparse
import contextlib
import copy
import json
import math
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import rewards
from rewards import PROMPTS, Example, PushError, hold_signals, seed_for, stop_run, stopwatch, write_lines

# Defaults that depend on the model; a flag on the command line wins.
PRESETS = {
    "tiny": dict(dataset="arithmetic", lr=5e-4, max_steps=100, max_tokens=96, eval_size=512, eval_every=10),
    "other": dict(dataset="math", lr=3e-5, max_steps=200, max_tokens=1024, eval_size=1024, eval_every=10)}
CUDA_MODEL = "Qwen/Qwen2.5-Math-1.5B"  # the default model of a machine with CUDA; without it, tiny
LEADERBOARD = dict(prompt="r1_zero", reward_fn="r1_zero", temperature=1.0, max_tokens=1024, max_hours=4.0,
                   eval_size=sys.maxsize)  # the protocol of the CS336 leaderboard

# --- Command line ------------------------------------------------------------------------------------------
# stage: (flag, type or choices, default, help). None stands for a default that `configure` derives.
ON, ON_OFF, MANY = {"action": "store_true"}, {"action": argparse.BooleanOptionalAction}, {"nargs": "+"}
FLAGS = {
    "run": [
        ("--mode", ["eval", "sft", "expert_iteration", "grpo", "plot", "bench"], "grpo", "what to do"),
        ("--model", str, None, f"HF folder, hub id or `tiny` (default: {CUDA_MODEL} with CUDA, else tiny)"),
        ("--run-dir", str, None, "folder of logs, curves, checkpoint, model (default: a new one in runs/)"),
        ("--resume", ON, False, "go on from the checkpoint in --run-dir, with its flags"),
        ("--seed", int, 0, "of sampling and of the order of the data"),
        ("--max-steps", int, None, "rollout batches (sft: batches of solutions) to train on"),
        ("--max-hours", float, None, "end within this many hours, the final evaluation included"),
        ("--keep", int, 1, "checkpoints to keep, the newest ones"),
        ("--leaderboard", ON, False, f"the protocol of the CS336 leaderboard: {LEADERBOARD}"),
        ("--report-to", ["wandb", "trackio"], None, "send the metrics there too")],
    "data": [
        ("--dataset", str, None, "arithmetic, sort, math, gsm8k, file, folder or hub id[:configuration]"),
        ("--eval-dataset", str, None, "held-out data (default: a test split, else --eval-size rows)"),
        ("--prompt", list(PROMPTS), "r1_zero", "template, stop string and reward together"),
        ("--reward-fn", str, None, "name in rewards.REWARDS or module:function (default: by prompt, task)")],
    "questions": [
        ("--curriculum", ["uniform", "easy_to_hard", "prioritized"], "uniform", "next: any; by pass rate; or "
         "drawn by 1 - success rate (Kimi k1.5)"),
        ("--difficulty-filter", int, None, "drop a question if none or all of n first responses are right"),
        ("--guessable-filter", int, None, "drop it if one of n thoughtless answers is right (Kimi k1.5)")],
    "rollout": [
        ("--sampler", ["auto", "vllm", "hf"], "auto", "auto: vllm if installed, with CUDA; else hf"),
        ("--rollout-batch-size", int, 256, "responses a step, P * group_size"),
        ("--group-size", int, 8, "responses to one question, G"),
        ("--temperature", float, 1.0, "of sampling, training and evaluation"),
        ("--min-tokens", int, 4, "no end of a response before this many tokens"),
        ("--max-tokens", int, None, "generation budget of a response, in tokens"),
        ("--sampler-batch-size", int, 256, "hf: rows that are sampled at once"),
        ("--max-model-len", int, None, "vllm: longest prompt + response (default: the model's context)"),
        ("--gpu-memory-utilization", float, None, "vllm: share of its GPU (default: 0.5 if shared or 0.85)"),
        ("--overlap", ON, False, "roll out step k + 1 while step k trains: one step off-policy, ratio to the "
         "policy that sampled"),
        ("--max-engine-gap", float, None, "stop if sampler and policy differ by more nats a token (default: "
         "0.1 with CUDA, in bfloat16, else 0.001)")],
    "advantage": [
        ("--dynamic-sampling", int, 0, "DAPO: up to n more rollouts a step in the place of dead groups"),
        ("--length-reward", float, 0.0, "weight of Kimi k1.5's length reward (arXiv 2501.12599)"),
        ("--length-reward-after", int, 0, "steps without the length reward, its warm-up"),
        ("--overlong-cache", int, 0, "DAPO's soft punishment over the last so many tokens of the budget"),
        ("--language-reward", float, 0.0, "weight of R1's language consistency: share of English words"),
        ("--truncated", ["score", "zero", "mask"], "score", "score them, reward 0, or leave them out"),
        ("--baseline", ["mean", "loo", "none", "max"], "mean", "loo: mean of the others, RLOO (2402.14740); "
         "none: raw reward; max: only the best of the group"),
        ("--std-norm", ON_OFF, None, "divide by the group's std: GRPO yes, Dr. GRPO "
         "(2503.20783) no (default: yes with --baseline mean, but for --loss kimi)")],
    "loss": [
        ("--loss", ["pg", "grpo_clip", "gspo", "cispo", "kimi"], None, "pg: -A log pi; gspo: 2507.18071; "
         "cispo: 2506.13585; kimi: 2501.12599 (default: grpo_clip in --mode grpo)"),
        ("--cliprange", float, None, "eps of the clipped ratio (default: 0.2, with gspo 0.0003)"),
        ("--cliprange-high", float, None, "upper eps, DAPO 2503.14476; cispo: TRL's epsilon_high - 1"),
        ("--tau", float, None, "kimi: weight of the squared log ratio; not in the paper (default: 0.1)"),
        ("--reset-optimizer", ON, False, "Kimi k1.5: forget Adam's moments before each rollout batch"),
        ("--tis-cap", float, None, "truncated importance sampling: weight min(pi_old / pi_sampler, cap)"),
        ("--kl-coef", float, 0.0, "weight of the KL to a frozen copy of the policy"),
        ("--kl", ["k1", "k2", "k3"], "k3", "its estimator, each with the gradient of KL(policy || copy)"),
        ("--kl-ref-every", int, None, "steps between renewals of the copy (default: never)"),
        ("--entropy-coef", float, 0.0, "weight of an entropy bonus")],
    "step": [
        ("--loss-aggregation", ["sequence", "token", "constant"], None, "mean of rows' means, GRPO; mean of "
         "tokens, DAPO; sum / (rows * max_tokens), Dr. GRPO (default: sequence)"),
        ("--no-length-norm", ON, False, "the same as --loss-aggregation constant, Dr. GRPO"),
        ("--train-batch-size", int, None, "rows of one optimizer step (default: --rollout-batch-size)"),
        ("--epochs-per-rollout-batch", int, 1, "passes over each rollout batch"),
        ("--microbatch-tokens", int, None, "padded tokens of a forward pass: memory, not the result "
         "(default: 16384 with CUDA, else 4096)"),
        ("--gradient-checkpointing", ON, False, "compute layers again in backward: less memory, more time"),
        ("--compile", ON, False, "torch.compile the update: up to 1.4 times as fast, after a minute"),
        ("--lr", float, None, "learning rate of AdamW"),
        ("--max-grad-norm", float, 1.0, "clip the norm of the gradient to this")],
    "evaluation": [
        ("--eval-every", int, None, "steps between evaluations"),
        ("--eval-size", int, None, "held-out questions to evaluate on"),
        ("--thinking-budget", int, None, "tokens of thought in an evaluation, then the answer is asked for"),
        ("--wait", int, 0, "s1 (2501.19393): so many ends of thought are replaced by ` wait`")],
    "plot": [
        ("--runs", MANY, None, "run folders; those that differ in the seed only become one line with a band"),
        ("--metrics", MANY, rewards.CURVES, "one panel each"),
        ("--output", str, "curves.png", "the figure")],
    "bench": [
        ("--shape", MANY, [], "random weights, key=value of config.json, such as hidden_size=128"),
        ("--row-lengths", {"nargs": 2, "type": int}, [32, 512], "shortest and longest row, in tokens"),
        ("--repeats", int, 3, "steps to take the median of")]}

def parse_args(argv=None):
    """Flags -> argparse.Namespace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: stop_run(f"{message}; see --help")
    for stage, flags in FLAGS.items():
        group = parser.add_argument_group(stage)
        for name, kind, default, text in flags:
            options = {"choices": kind} if isinstance(kind, list) else {"type": kind}
            options = kind if isinstance(kind, dict) else options
            key = name[2:].replace("-", "_")
            if key in PRESETS["tiny"]:
                text += f" (default: {PRESETS['tiny'][key]} for tiny, else {PRESETS['other'][key]})"
            elif default:
                text += f" (default: {default})"
            group.add_argument(name, default=default, help=text, **options)
    return parser.parse_args(argv)

MAY_CHANGE = {"max_steps", "max_hours", "eval_every", "sampler", "sampler_batch_size", "microbatch_tokens",
              "gradient_checkpointing", "compile", "keep", "report_to"}

def configure(args, argv, has_cuda):
    """Fills what is None: from the saved run if resumed, else from the model's preset and other flags."""
    saved = Path(args.run_dir or "?") if args.resume else Path(args.model or "?") / ".."
    if args.resume and not (saved / "args.json").is_file():
        stop_run(f"--resume needs --run-dir with a saved run, and {saved / 'args.json'} is not there")
    old = json.loads((saved / "args.json").read_text())["args"] if (saved / "args.json").is_file() else {}
    words = [word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    given = {name for word in words for name in (word, word.removeprefix("no_"))}
    if args.leaderboard and not args.resume:
        vars(args).update({key: value for key, value in LEADERBOARD.items() if key not in given})
        given |= LEADERBOARD.keys()
    asked = {"prompt", "reward_fn", "temperature", "min_tokens", "eval_dataset", "seed"}  # by a run's model
    vars(args).update({key: old[key] for key in old.keys() & asked - given if "dataset" not in given})
    if args.resume:
        for key in old.keys() & given - MAY_CHANGE:
            if getattr(args, key) != old[key]:
                stop_run(f"--resume: {key} was {old[key]} in the saved run: leave the flag out or start anew")
        vars(args).update({key: old[key] for key in old if key not in given & MAY_CHANGE})
    args.model = args.model or (CUDA_MODEL if has_cuda else "tiny")
    preset = PRESETS["tiny" if args.model == "tiny" else "other"]
    defaults = {key: old.get(key, preset[key]) for key in preset}  # a model of a run keeps them
    defaults |= {"loss": "grpo_clip" if args.mode in ("grpo", "bench", "eval") else "pg", "tau": 0.1,
                 "train_batch_size": args.rollout_batch_size, "max_engine_gap": 0.1 if has_cuda else 1e-3,
                 "microbatch_tokens": 16384 if has_cuda else 4096,
                 "std_norm": args.baseline == "mean" and args.loss != "kimi",
                 "loss_aggregation": "constant" if args.no_length_norm or args.loss == "kimi" else "sequence"}
    defaults["cliprange"], defaults["cliprange_high"] = (3e-4, 4e-4) if args.loss == "gspo" else (0.2, None)
    known = {key: value for key, value in vars(args).items() if value is not None}
    filled = argparse.Namespace(**vars(args) | defaults | known)
    rewards.refuse(filled, {key for key in given if hasattr(args, key)}, FLAGS)
    filled.reward_fn = args.reward_fn or (
        "sort_positions" if filled.dataset == "sort" else PROMPTS[args.prompt][2])
    name, stamp = "".join(filter(str.isalnum, Path(filled.dataset).stem)), time.strftime("%Y%m%d-%H%M%S")
    filled.run_dir = args.run_dir or f"runs/{args.mode}-{name}-seed{args.seed}-{stamp}"
    return filled

if __name__ == "__main__":
    rewards.catch_signals()
    ARGS = parse_args()  # before the slow imports, so that --help and an unknown flag answer at once

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # or vLLM sets the trainer's threads to 1
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

# --- Data: Example -> Row ----------------------------------------------------------------------------------
@dataclass
class Row:
    """What is trained on. Log-probs: one number a response token; old: of the policy that the ratio is to."""
    example: Example
    response_ids: list
    text: str = ""
    truncated: bool = False
    sampler_log_probs: list | None = None
    reward: dict = field(default_factory=dict)
    advantage: float = 1.0
    old_log_probs: list | None = None
    ref_log_probs: list | None = None  # of the frozen copy, for --kl-coef

    def __len__(self):
        return len(self.example.prompt_ids) + len(self.response_ids)

def policy_device():
    return "cuda:1" if torch.cuda.device_count() > 1 else "cuda" if torch.cuda.is_available() else "cpu"

def load_model(args):
    """-> (policy in float32 on its device, tokenizer, sampler)."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = str(rewards.warm_start(args.dataset)) if args.model == "tiny" else args.model
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        # the engine first: it takes its share of the memory, and reseeds the global generators
        choice = rewards.choose_sampler(args, torch.cuda.is_available())
        engine = rewards.start_engine(path, args) if choice == "vllm" else None
        # float32 master weights: in bfloat16 a small update rounds back to the old value
        policy = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        stop_run(f"--model {path} cannot be loaded ({str(error)[:120]}): give an HF folder, "
                 "a hub id that this machine can reach, or `tiny`")
    policy.to(policy_device()).eval()  # no dropout, or old and new log-probs would differ by noise
    eos = policy.generation_config.eos_token_id
    eos_ids = sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None})
    build = VLLMSampler if engine else HFSampler
    model = copy.deepcopy(policy) if args.overlap and not engine else policy
    return policy, tokenizer, build(model, tokenizer, eos_ids, args, engine)

# --- Rollout -----------------------------------------------------------------------------------------------
class HFSampler:
    """Samples with the policy itself: a push only moves the stamp of the version. With a key-value cache."""
    name, version = "hf", None

    def __init__(self, policy, tokenizer, eos_ids, args, engine=None):
        self.policy, self.tokenizer, self.eos_ids, self.args = policy, tokenizer, eos_ids, args
        self.stop = PROMPTS[args.prompt][1]
        # only a token with the last character of the stop string can complete it; no other needs decoding
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))]) if self.stop else []
        self.closers = {i for i, piece in enumerate(pieces) if self.stop[-1] in piece}

    def push(self, policy, version):
        if self.policy is not policy:  # --overlap: it has a copy
            self.policy.load_state_dict(policy.state_dict())
        self.version = version

    def sleep(self):
        """Nothing to free."""

    def generate(self, prompts, n, seed, max_tokens):
        """Prompts (token ids) -> for each a list of n [response ids, log-probs, truncated]."""
        generator = torch.Generator(self.policy.device).manual_seed(seed)
        size, samples = max(1, self.args.sampler_batch_size // n), []
        for chunk in tqdm(rewards.chunks(prompts, size), desc="rollout", disable=None, leave=False):
            samples += self.generate_chunk(chunk, n, generator, max_tokens)
        return rewards.chunks(samples, n)

    @torch.no_grad()
    def generate_chunk(self, prompts, n, generator, max_tokens):
        from transformers import DynamicCache
        device, args = self.policy.device, self.args
        ids = pad(prompts, side="left").to(device)  # (P, longest prompt)
        mask = pad([[1] * len(prompt) for prompt in prompts], side="left").to(device)
        cache, alive = DynamicCache(config=self.policy.config), list(range(len(prompts) * n))
        samples = [[[], [], True] for _ in alive]
        for length in range(1, max_tokens + 1):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
            with autocast(device):
                logits = self.policy(input_ids=ids, attention_mask=mask, position_ids=positions,
                                     past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
            if length == 1:  # a prompt is read once for its n samples
                cache.batch_repeat_interleave(n)
                logits, mask = logits.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)
            if length <= args.min_tokens:
                logits[:, self.eos_ids] = -torch.inf
            log_probs = (logits / args.temperature).log_softmax(-1)
            share = log_probs.double().exp().cumsum(-1)  # inverse transform; multinomial is slow on CPUs
            point = torch.rand(len(share), 1, dtype=share.dtype, device=device, generator=generator)
            ids = torch.searchsorted(share, point * share[:, -1:], right=True)
            ids = ids.clamp(max=share.shape[1] - 1)  # of NaN weights, for check_push to tell
            for i, token, log_prob in zip(alive, ids.tolist(), log_probs.gather(1, ids).tolist()):
                samples[i][0] += token
                samples[i][1] += log_prob
                samples[i][2] = not self.is_finished(samples[i][0])
            going = torch.tensor([k for k, i in enumerate(alive) if samples[i][2]], device=device)
            if not len(going):
                break
            if len(going) < len(alive):  # finished rows leave the batch
                cache.batch_select_indices(going)
                alive, ids, mask = [alive[k] for k in going], ids[going], mask[going]
            mask = F.pad(mask, (0, 1), value=1)
        return samples

    def is_finished(self, tokens):
        if tokens[-1] in self.eos_ids:
            return True
        if tokens[-1] not in self.closers or len(tokens) <= self.args.min_tokens:
            return False
        tail = tokens[-len(self.stop):]  # long enough, since a token has at least one byte
        before, now = self.tokenizer.decode(tail[:-1]), self.tokenizer.decode(tail)
        return now.count(self.stop) > before.count(self.stop)

class VLLMSampler:
    """Samples with a vLLM engine. `version` is the step whose weights it holds."""
    name, version = "vllm", None

    def __init__(self, policy, tokenizer, eos_ids, args, engine):
        self.engine, self.eos_ids, self.args = engine, eos_ids, args
        self.names = set(policy.state_dict())  # of the model as loaded, before anything wraps it
        self.shares_gpu, self.asleep = torch.cuda.device_count() == 1, False

    def sleep(self):
        """On a shared GPU: gives up weights and cache until the next push, for the policy to train."""
        if self.shares_gpu:
            self.engine.sleep(level=2)
            self.asleep = True

    def push(self, policy, version):
        """Copies all weights, device to device, cast to the engine's dtype, and drops the cached prompts."""
        weights, self.version = policy.state_dict(), None
        if set(weights) != self.names:  # a part of the weights would be loaded without a word
            raise PushError(f"push: wrong weight names, such as {sorted(set(weights) ^ self.names)[:3]}")
        if self.asleep:  # weights first: all at once would not fit beside the trainer's
            torch.cuda.empty_cache()
            self.engine.wake_up(tags=["weights"])
        # state_dict, not named_parameters: that lacks a tied output matrix
        self.engine.apply_model(lambda model: model.load_weights(weights.items()))
        if self.asleep:
            self.engine.wake_up(tags=["kv_cache"])
        if not self.engine.reset_prefix_cache():
            raise PushError("push: vLLM did not reset its prefix cache, which holds keys of old weights")
        self.version, self.asleep = version, False

    def generate(self, prompts, n, seed, max_tokens):
        """As HFSampler.generate."""
        from vllm import SamplingParams
        stop, args = PROMPTS[self.args.prompt][1], self.args
        # every parameter is set: neutral top-p, top-k, min-p, penalties; seeds of prompts are n apart
        params = [SamplingParams(
            n=n, seed=seed + i * n, temperature=args.temperature, top_p=1.0, top_k=0, min_p=0.0,
            repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logprobs=0,
            min_tokens=min(args.min_tokens, max_tokens), max_tokens=max_tokens, stop=[stop] if stop else None,
            include_stop_str_in_output=True, stop_token_ids=self.eos_ids) for i in range(len(prompts))]
        outputs = self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [[[list(one.token_ids),
                  [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs)],
                  one.finish_reason == "length"] for one in output.outputs] for output in outputs]

def sample(sampler, tokenizer, examples, n, seed, version, args, prefixes=None, max_tokens=None):
    """n responses to each example -> Rows, prompt-major. The ids sampled are the ids trained on: text is only
    decoded from them, for the grader. prefixes: texts that begin the response to each example; rows that have
    one are for evaluation and filters only."""
    if sampler.version != version:
        raise PushError(f"stale sampler: it has the weights of step {sampler.version}, not {version}")
    rows, stop, prefixes = [], PROMPTS[args.prompt][1], prefixes or [""] * len(examples)
    begun = [tokenizer.encode(prefix, add_special_tokens=False) if prefix else [] for prefix in prefixes]
    prompts = [example.prompt_ids + ids for example, ids in zip(examples, begun)]
    samples = sampler.generate(prompts, n, seed, max_tokens or args.max_tokens)
    if [len(one) for one in samples] != [n] * len(examples):
        raise PushError(f"the sampler returned {sum(map(len, samples))} responses, not {n * len(examples)}")
    for example, start, prefix, group in zip(examples, begun, prefixes, samples):
        for ids, log_probs, truncated in group:
            text = tokenizer.decode(ids, skip_special_tokens=True)
            if stop and stop in text:
                text = text[:text.index(stop) + len(stop)]  # the last token may reach past the stop string
            rows.append(Row(example, start + ids, prefix + text, truncated, log_probs))
    return rows

def check_push(sampler, policy, examples, args):
    """The canary: do sampler and policy agree on tokens sampled now? -> mean |difference of log-probs|. Its
    prompt is long and always the same, to hit a stale prefix cache; tokens under min_tokens do not count."""
    length = args.min_tokens + 8
    prompt = sum((example.prompt_ids for example in examples), [])[:min(300, args.context - length)]
    samples = sampler.generate([prompt], 4, seed_for(args.seed, "canary"), length)[0]
    rows = [Row(Example("", "", None, prompt), ids) for ids, _, _ in samples]
    with torch.no_grad():
        log_probs, _, mask = response_log_probs(policy, rows, args.temperature)
    sampled = pad([log_probs for _, log_probs, _ in samples]).to(mask.device)
    gap = masked_mean((log_probs - sampled).abs()[:, args.min_tokens:], mask[:, args.min_tokens:]).item()
    if not gap <= args.max_engine_gap:
        raise PushError(
            f"sampler and policy differ by {gap:.2g} nats a token (--max-engine-gap {args.max_engine_gap}): "
            "weights not pushed, or only in part, stale prefix cache, dtype, logits scaled; nan: lower --lr")
    return gap

def score(rows, reward_fn):
    """Fills row.reward, and returns the rows. Only completions are graded: the prompt has the tags in it."""
    texts, truths = [row.text for row in rows], [row.example.ground_truth for row in rows]
    for row, reward in zip(rows, rewards.grade_answers(texts, truths, reward_fn)):
        row.reward = reward
    return rows

def roll_out(sampler, tokenizer, questions, reward_fn, step, version, args):
    """sample -> reward -> (all rows, rows to go on with, seconds, state of the questions), with the weights
    of step `version`. --dynamic-sampling: again, with new questions, for each group whose rewards are all
    equal, and then on with the rest, should the cap be reached."""
    wanted, size, rows, live = args.rollout_batch_size // args.group_size, args.group_size, [], []
    metrics = {}
    for turn in range(args.dynamic_sampling + 1):
        with stopwatch(metrics, "rollout"):
            seed = seed_for(args.seed, f"rollout {turn}", step)
            asked = questions.take(wanted - len(live) // size)
            more = sample(sampler, tokenizer, asked, size, seed, version, args)
        with stopwatch(metrics, "reward"):
            rewards.seed_random(seed)
            score(more, reward_fn)
            for group in rewards.chunks(more, size):
                rewards.shape(group, step, args)
                live += [] if rewards.is_dead(group) else group
            questions.record(more)
        rows += more
        if len(live) == wanted * size:
            break
    return rows, live if args.dynamic_sampling else rows, metrics, questions.state()

# --- Advantages --------------------------------------------------------------------------------------------
def group_advantages(rewards_PG, baseline="mean", std_norm=True, eps=1e-6):
    """(P, G) rewards -> (P, G) advantages. A group whose rewards are all equal gets exactly 0."""
    if baseline == "none" or not len(rewards_PG):
        return rewards_PG.clone()
    best, size = rewards_PG.amax(1, keepdim=True), rewards_PG.shape[1]
    dead = best == rewards_PG.amin(1, keepdim=True)  # decided first: a division would blow up rounding errors
    advantages = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if baseline == "max":
        advantages = torch.where(rewards_PG == best, rewards_PG, 0.0)
    if baseline == "loo":  # RLOO: the mean of the others, written with the mean of all
        advantages = advantages * size / (size - 1)
    if std_norm:  # Dr. GRPO: no division by std
        advantages = advantages / (rewards_PG.std(1, keepdim=True) + eps)
    return advantages.masked_fill(dead, 0.0)

def compute_group_normalized_rewards(reward_fn, rollout_responses, repeated_ground_truths, group_size,
                                     advantage_eps, normalize_by_std):
    """Scores responses, prompt-major -> (advantages (B,), raw_rewards (B,), metadata)."""
    graded = rewards.grade_answers(rollout_responses, repeated_ground_truths, reward_fn)
    raw = torch.tensor([reward["reward"] for reward in graded])
    advantages = group_advantages(raw.view(-1, group_size), "mean", normalize_by_std, advantage_eps)
    return advantages.view(-1), raw, {"mean": raw.mean().item(), "max": raw.max().item()}

def rows_to_train_on(rows, args):
    """Scored rollouts -> the rows to train on, with their advantages."""
    if args.mode == "expert_iteration":
        return [row for row in rows if row.reward["answer_reward"] == 1]
    rewards_PG = torch.tensor([row.reward["shaped"] for row in rows]).view(-1, args.group_size)
    advantages = group_advantages(rewards_PG, args.baseline, args.std_norm)
    for row, advantage in zip(rows, advantages.view(-1).tolist()):
        row.advantage = advantage
    return [row for row in rows if not (row.truncated and args.truncated == "mask")]

# --- Log-probs ---------------------------------------------------------------------------------------------
def pad(lists, value=0, side="right"):
    """Lists of numbers -> a tensor (len(lists), longest)."""
    return pad_sequence([torch.tensor(one) for one in lists], True, value, side)

def autocast(device):
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()

def compute_entropy(logits):
    """(..., V) logits -> (...) entropy."""
    return log_probs_and_entropy(logits, torch.zeros_like(logits[..., 0], dtype=torch.long))[1]

def log_probs_and_entropy(logits, labels, temperature=1.0):
    """(..., V) logits, (...) labels -> log-probs of labels, entropy. In float32: bfloat16 is off by 0.08."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, labels[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)

def pack(prompts, responses, pad_id=0):
    """Token ids -> right-padded tensors (B, S - 1), shifted so that position t predicts labels[t]. The masks
    are made by position, because the pad id may be a real token."""
    ids = pad([prompt + response for prompt, response in zip(prompts, responses)], pad_id)
    position = torch.arange(ids.shape[1] - 1)
    start = torch.tensor([len(prompt) - 1 for prompt in prompts])[:, None]
    end = start + torch.tensor([len(response) for response in responses])[:, None]
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "attention_mask": (position < end).long(),
            "response_mask": (position >= start) & (position < end)}

def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    """Tokenises prompts and outputs apart, then joins them -> input_ids, labels, response_mask (B, S - 1)."""
    outputs = [tokenizer.encode(output, add_special_tokens=False) for output in output_strs]
    batch = pack([tokenizer.encode(prompt) for prompt in prompt_strs], outputs, tokenizer.pad_token_id or 0)
    return {key: batch[key] for key in ("input_ids", "labels", "response_mask")}

def get_response_log_probs(model, input_ids, labels, return_token_entropy=False):
    """The plain form, at temperature 1 and unmasked -> {"log_probs", "token_entropy"}, (B, S) each."""
    log_probs, entropy = log_probs_and_entropy(model(input_ids).logits, labels)
    return {"log_probs": log_probs} | ({"token_entropy": entropy} if return_token_entropy else {})

TILE = {"cpu": 512, "cuda": 8192}  # vocabulary entries at a time; on a CPU what stays in its cache

class TiledHead(torch.autograd.Function):
    """(N, H) hidden states, (V, H) output matrix, (N) labels -> (N) log-probs of the labels, (N) entropies.
    It goes over the vocabulary in tiles, and again in backward: the (N, V) logits never exist. Products, and
    so the logits, are rounded to `dtype`; the sums are in float32 or better."""
    @staticmethod
    def forward(ctx, hidden, weight, labels, dtype):
        tile, half = TILE[hidden.device.type], hidden.to(dtype)
        parts, label_logits = weight.split(tile), torch.empty_like(hidden[:, 0])
        log_zs, means = hidden.new_empty(2, len(parts), len(hidden))  # of each tile
        for number, part in enumerate(parts):
            logits = (half @ part.to(dtype).T).to(hidden.dtype)
            here = labels // tile == number  # rows whose label is in this tile
            label_logits[here] = logits[here, labels[here] % tile]
            log_zs[number] = logits.logsumexp(1)
            means[number] = (logits.softmax(1) * logits).sum(1)
        log_z = log_zs.logsumexp(0)
        entropy = log_z - (log_zs.softmax(0) * means).sum(0)
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.dtype, ctx.tile = dtype, tile
        return label_logits - log_z, entropy

    @staticmethod
    def backward(ctx, d_log_probs, d_entropy):
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        d_hidden, d_weight, half = torch.zeros_like(hidden), torch.empty_like(weight), hidden.to(ctx.dtype)
        has_entropy = d_entropy.any()
        for number, part in enumerate(weight.split(ctx.tile)):
            half_part = part.to(ctx.dtype)
            log_p = (half @ half_part.T).to(hidden.dtype).sub_(log_z[:, None])
            here = labels // ctx.tile == number
            # d log pi(label) / d logits = [label] - p;  d entropy / d logits = -p (log p + entropy)
            factor = d_log_probs[:, None]
            if has_entropy:
                factor = factor + d_entropy[:, None] * (log_p + entropy[:, None])
            d_logits = log_p.exp_().mul_(-factor)
            d_logits[here, labels[here] % ctx.tile] += d_log_probs[here]
            d_logits = d_logits.to(ctx.dtype)
            d_hidden += d_logits @ half_part
            d_weight[number * ctx.tile:][:len(part)] = d_logits.T @ half
        return d_hidden, d_weight, None, None

def response_log_probs(policy, rows, temperature, is_compiled=False):
    """Rows -> log_probs, entropy, response_mask, (B, T) each. Only responses meet the output matrix."""
    batch = pack([row.example.prompt_ids for row in rows], [row.response_ids for row in rows])
    ids, labels, attention_mask, response_mask = (value.to(policy.device) for value in batch.values())
    head, base = policy.get_output_embeddings(), policy.base_model
    base = torch.compile(base, dynamic=True) if is_compiled else base  # torch keeps it
    with autocast(policy.device):
        hidden = base(ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    hidden, weight = hidden[response_mask].to(head.weight.dtype), head.weight
    if head.bias is not None:
        hidden, weight = F.pad(hidden, (0, 1), value=1.0), torch.cat([weight, head.bias[:, None]], 1)
    dtype = torch.bfloat16 if policy.device.type == "cuda" else weight.dtype
    log_probs, entropy = TiledHead.apply(hidden / temperature, weight, labels[response_mask], dtype)
    lengths = torch.tensor([len(row.response_ids) for row in rows], device=policy.device)
    mask = torch.arange(lengths.max(), device=policy.device) < lengths[:, None]
    empty = torch.zeros(mask.shape, dtype=log_probs.dtype, device=policy.device)
    return empty.masked_scatter(mask, log_probs), empty.masked_scatter(mask, entropy), mask

# --- Losses and aggregation --------------------------------------------------------------------------------
def masked_mean(tensor, mask, dim=None):
    """Mean over the elements whose mask is 1; NaN where there are none."""
    return (tensor * mask).sum(dim) / mask.sum(dim)

def masked_normalize(tensor, mask, dim=None, normalize_constant=1.0):
    """Sum over the elements whose mask is 1, divided by a constant."""
    return (tensor * mask).sum(dim) / normalize_constant

def compute_naive_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs):
    """REINFORCE: (B, 1) rewards or advantages, (B, T) log-probs -> (B, T) loss."""
    return -raw_rewards_or_advantages * policy_log_probs

def compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange, cliprange_high=None):
    """PPO's clipped loss (arXiv 1707.06347): (B, 1) advantages, (B, T) log-probs -> (B, T) loss, metadata."""
    # On the first step after a rollout the ratio is exactly 1. The loss is then -A, about 0 on average, yet
    # its gradient is -A grad log pi, REINFORCE's: the gradient of exp(x - stopgrad(x)) is that of x.
    ratio = (policy_log_probs - old_log_probs.detach()).exp()
    high = 1 + (cliprange if cliprange_high is None else cliprange_high)  # DAPO: clip-higher
    is_clipped = ((ratio < 1 - cliprange) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - cliprange, high) * advantages)
    return loss, {"is_clipped": is_clipped}

def compute_gspo_loss(advantages, policy_log_probs, old_log_probs, response_mask, cliprange, cliprange_high):
    """GSPO (arXiv 2507.18071): PPO's loss with one ratio a row, the geometric mean of its tokens' ratios."""
    log_ratio = (policy_log_probs - old_log_probs.detach()) * response_mask
    log_ratio = log_ratio.sum(1, keepdim=True) / response_mask.sum(1, keepdim=True).clamp(min=1)
    zeros = torch.zeros_like(policy_log_probs)
    return compute_grpo_clip_loss(advantages, log_ratio + zeros, zeros, cliprange, cliprange_high)

def compute_cispo_loss(advantages, policy_log_probs, old_log_probs, cliprange_high):
    """CISPO (arXiv 2506.13585): REINFORCE with the ratio as weight, capped; no token loses its gradient."""
    ratio = (policy_log_probs - old_log_probs).exp().detach()
    weight = ratio.clamp(max=1 + cliprange_high)
    return -weight * advantages * policy_log_probs, {"is_clipped": ratio > weight}

def compute_kimi_loss(advantages, policy_log_probs, old_log_probs, response_mask, tau):
    """Kimi k1.5 (arXiv 2501.12599, eq. 3): -A log pi + tau / 2 (log pi / pi_old)^2 of whole rows, shared out
    among the tokens, since d^2 of a row is the sum over its tokens of d d_t."""
    log_ratio = (policy_log_probs - old_log_probs.detach()) * response_mask
    squared = log_ratio.sum(1, keepdim=True) * log_ratio
    return -advantages * policy_log_probs + tau / 2 * squared, {}

def compute_policy_gradient_loss(policy_log_probs, loss_type, raw_rewards=None, advantages=None,
                                 old_log_probs=None, cliprange=None, cliprange_high=None, response_mask=None,
                                 tau=None):
    """The loss of the course's name or of --loss -> (B, T) loss, metadata. ValueError if one lacks."""
    high = cliprange if cliprange_high is None else cliprange_high
    ratio = [advantages, policy_log_probs, old_log_probs]
    compute, *arguments = {
        "no_baseline": [compute_naive_policy_gradient_loss, raw_rewards, policy_log_probs],
        "reinforce_with_baseline": [compute_naive_policy_gradient_loss, *ratio[:2]],
        "grpo_clip": [compute_grpo_clip_loss, *ratio, cliprange, high],
        "gspo": [compute_gspo_loss, *ratio, response_mask, cliprange, high],
        "cispo": [compute_cispo_loss, *ratio, high],
        "kimi": [compute_kimi_loss, *ratio, response_mask, tau]}[loss_type]
    if any(argument is None for argument in arguments):
        raise ValueError(f"loss_type {loss_type} lacks one of its arguments")
    loss = compute(*arguments)
    return loss if isinstance(loss, tuple) else (loss, {})

def compute_kl(log_probs, ref_log_probs, kind):
    """Estimates of KL(policy || reference) from tokens of the policy (Schulman 2020): (B, T) log-probs ->
    (B, T). k1 has no bias, k2 a small one, k3 no bias and little variance."""
    d = (log_probs - ref_log_probs).clamp(-20, 20)
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[kind]

def compute_kl_loss(log_probs, old_log_probs, ref_log_probs, kind):
    """As compute_kl, with the gradient of KL(policy || reference). k2 has it. k1 in a loss has mean gradient
    0, and k3 that of the other direction: the ratio in front mends both."""
    kl = compute_kl(log_probs, ref_log_probs, kind)
    return kl if kind == "k2" else (log_probs - old_log_probs.detach()).exp() * kl

def tis_weights(old_log_probs, sampler_log_probs, cap):
    """Truncated importance sampling: min(pi_old / pi_sampler, cap), (B, T), without gradient."""
    return (old_log_probs - sampler_log_probs).exp().clamp(max=cap).detach()

def aggregate_loss(token_loss, response_mask, aggregation, num_rows, num_tokens, max_tokens):
    """(B, T) loss -> this microbatch's share of the loss of the optimizer step. num_rows and num_tokens count
    the whole step, so the sum over microbatches does not depend on the split."""
    if aggregation == "sequence":  # GRPO: each row weighs the same, so a token of a long row weighs less
        return ((token_loss * response_mask).sum(1) / response_mask.sum(1).clamp(min=1)).sum() / num_rows
    if aggregation == "token":  # DAPO: each token weighs the same
        return masked_normalize(token_loss, response_mask, None, num_tokens)
    return masked_normalize(token_loss, response_mask, None, num_rows * max_tokens)  # Dr. GRPO: no length

def sft_microbatch_train_step(policy_log_probs, response_mask, gradient_accumulation_steps,
                              normalize_constant=1.0):
    """The course's SFT step: backward of -sum of log-probs / normalize_constant, mean over rows."""
    rows = len(response_mask) * gradient_accumulation_steps
    loss = aggregate_loss(-policy_log_probs, response_mask, "constant", rows, None, normalize_constant)
    loss.backward()
    return loss.detach(), {}

def grpo_microbatch_train_step(policy_log_probs, response_mask, gradient_accumulation_steps, loss_type,
                               raw_rewards=None, advantages=None, old_log_probs=None, cliprange=None):
    """The course's GRPO step: backward of the mean over each row's tokens, then over rows."""
    token_loss, metadata = compute_policy_gradient_loss(policy_log_probs, loss_type, raw_rewards, advantages,
                                                        old_log_probs, cliprange)
    rows = len(response_mask) * gradient_accumulation_steps
    loss = aggregate_loss(token_loss, response_mask, "sequence", rows, None, None)
    loss.backward()
    return loss.detach(), metadata

# --- Update ------------------------------------------------------------------------------------------------
def microbatches(rows, token_budget):
    """Splits rows, longest first: rows x longest is within the budget of padded tokens (or one row), and no
    row is under 3/4 of the longest, so that time goes with tokens (on a CPU 1.4 to 1.8 times as fast)."""
    rows = sorted(rows, key=len, reverse=True)
    while rows:
        near = sum(len(row) >= 0.75 * len(rows[0]) for row in rows)
        count = max(1, min(near, token_budget // len(rows[0])))
        yield rows[:count]
        rows = rows[count:]

@torch.no_grad()
def cache_log_probs(policy, rows, key, args):
    """Fills row.old_log_probs or row.ref_log_probs (`key`): once a rollout batch, before its first step."""
    for microbatch in microbatches(rows, args.microbatch_tokens):
        log_probs, _, _ = response_log_probs(policy, microbatch, args.temperature, args.compile)
        for row, values in zip(microbatch, log_probs):
            setattr(row, key, values[:len(row.response_ids)].tolist())

def microbatch_loss(policy, microbatch, num_rows, num_tokens, args):
    """-> this microbatch's share of the loss of the step, and its sums for the log."""
    log_probs, entropy, mask = response_log_probs(policy, microbatch, args.temperature, args.compile)
    cached = {key: pad([getattr(row, key) for row in microbatch]).to(mask.device)
              for key in ("old_log_probs", "ref_log_probs", "sampler_log_probs")
              if getattr(microbatch[0], key) is not None}
    advantages = pad([[row.advantage] for row in microbatch]).to(mask.device)  # (B, 1)
    old_log_probs = cached.get("old_log_probs", log_probs.detach())  # equal before the first step
    loss_type = "reinforce_with_baseline" if args.loss == "pg" else args.loss
    token_loss, metadata = compute_policy_gradient_loss(log_probs, loss_type, None, advantages, old_log_probs,
                                                        args.cliprange, args.cliprange_high, mask, args.tau)
    ratio = (log_probs - old_log_probs).detach().exp()
    outside = (ratio < 1 - args.cliprange) | (ratio > 1 + (args.cliprange_high or args.cliprange))
    sums = {"entropy": entropy.detach(), "clip_fraction": metadata.get("is_clipped", mask & False),
            "ratio_outside": outside}
    if args.tis_cap is not None:
        token_loss = token_loss * tis_weights(old_log_probs, cached["sampler_log_probs"], args.tis_cap)
    if args.kl_coef:
        kl = compute_kl_loss(log_probs, old_log_probs, cached["ref_log_probs"], args.kl)
        token_loss = token_loss + args.kl_coef * kl
        sums["kl"] = compute_kl(log_probs, cached["ref_log_probs"], args.kl).detach()
    if args.entropy_coef:
        token_loss = token_loss - args.entropy_coef * entropy
    budget = 1 if args.loss == "kimi" else args.max_tokens  # Kimi k1.5: no length in the normaliser at all
    loss = aggregate_loss(token_loss, mask, args.loss_aggregation, num_rows, num_tokens, budget)
    sums = {key: (value * mask).sum().item() for key, value in sums.items()}
    return loss, Counter(sums, loss=loss.item(), tokens=mask.sum().item())

def train_step(policy, optimizer, rows, args):
    """One optimizer step on rows, in microbatches under one normaliser -> sums and counts. A step whose loss
    or gradient is not finite is not applied; its rows go to bad-rows.jsonl."""
    num_rows, num_tokens = len(rows), sum(len(row.response_ids) for row in rows)
    # advantage 0 has gradient 0, unless another term has one; such rows count in num_rows
    live = [row for row in rows if row.advantage or args.kl_coef or args.entropy_coef or args.loss == "kimi"]
    if not live:
        return Counter()  # nothing to learn, and Adam's momentum alone must not move the weights
    sums, bad = Counter(), []
    optimizer.zero_grad()
    for microbatch in tqdm(list(microbatches(live, args.microbatch_tokens)), disable=None, leave=False):
        loss, more = microbatch_loss(policy, microbatch, num_rows, num_tokens, args)
        loss.backward()
        sums.update(more)  # adds
        bad += [] if math.isfinite(more["loss"]) else microbatch
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
    if bad or not math.isfinite(norm):
        records = [{**vars(row), "example": row.example.question} for row in bad or live]
        write_lines(Path(args.run_dir) / "bad-rows.jsonl", records)
        return Counter(bad_steps=1)
    optimizer.step()
    sums.update(grad_norm=norm, steps=1)
    return sums

def checkpoint_layers(policy, on):
    """The switch of the layers only: policy.train() would turn on dropout, and the cache of HFSampler off."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    if on:
        policy.gradient_checkpointing_enable()
    for module in policy.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = on

def update(policy, reference, optimizer, rows, step, args):
    """All optimizer steps of one loop step -> metrics, averaged over tokens or over optimizer steps."""
    size, batches, totals = args.train_batch_size, [], Counter()
    for epoch in range(args.epochs_per_rollout_batch):
        order = random.Random(seed_for(args.seed, f"epoch {epoch}", step)).sample(rows, len(rows))
        batches += rewards.chunks(order, size)
    if args.overlap:  # the policy that sampled is a step older than this one
        for row in rows:
            row.old_log_probs = row.sampler_log_probs
    elif len(batches) > 1 and (args.loss != "pg" or args.tis_cap is not None or args.kl_coef):
        cache_log_probs(policy, rows, "old_log_probs", args)
    if reference and args.kl_ref_every and (step - 1) % args.kl_ref_every == 0:
        reference.load_state_dict(policy.state_dict())
    if reference:
        cache_log_probs(reference, rows, "ref_log_probs", args)
    if args.reset_optimizer:
        optimizer.state.clear()
    checkpoint_layers(policy, args.gradient_checkpointing)
    for batch in batches:
        totals.update(train_step(policy, optimizer, batch, args))
    checkpoint_layers(policy, False)
    steps, tokens = max(1, totals["steps"]), totals["tokens"]
    per_token = {f"train/{key}": totals[key] / tokens if key in totals else None
                 for key in ("entropy", "clip_fraction", "ratio_outside", "kl")}
    return {"train/loss": totals["loss"] / steps, "train/grad_norm": totals["grad_norm"] / steps,
            "train/lr": args.lr, **per_token, "train/bad_steps": totals["bad_steps"] or None}

# --- Evaluation --------------------------------------------------------------------------------------------
def evaluate(sampler, tokenizer, held_out, reward_fn, step, run_dir, args):
    """One response to each held-out question, always with the same seed -> (metrics, rows)."""
    def ask(examples, prefixes, max_tokens):
        seed = seed_for(args.seed, "eval")
        return sample(sampler, tokenizer, examples, 1, seed, step, args, prefixes, max_tokens)

    rows = ask(held_out, None, args.thinking_budget)
    if args.thinking_budget:
        rewards.keep_to_budget(rows, ask, tokenizer, args)
    score(rows, reward_fn)
    write_lines(run_dir / "evaluation.jsonl", [rewards.response_record(row, args) for row in rows])
    return rewards.evaluation_metrics(rows, args.reward_fn), rows

# --- Main loop ---------------------------------------------------------------------------------------------
def train_loop(policy, reference, optimizer, sampler, tokenizer, questions, held_out, reward_fn, state,
               started, save, records, run_dir, args):
    """The steps. `state` is what a checkpoint says: it changes only where policy and logs are whole."""
    saved, save_seconds, warned, report = 0.0, 0.0, set(), rewards.Report(args)
    pool, ahead = ThreadPoolExecutor(1, "rollout"), None  # --overlap: the next rollout, in another thread
    last = "eval/accuracy" in records[-1] and rewards.is_last(records, state["seconds"], args)
    while state["metrics"] or not last:
        metrics = state["metrics"]
        if not metrics:  # else the run was stopped between this step's update and its log
            step = state["step"] + 1
            metrics = {"step": step, "time/rollout": 0.0}
            if args.mode == "sft":
                asked = questions.take(args.rollout_batch_size)
                rows = trained = [Row(*parts) for parts in rewards.solutions(asked, tokenizer, args)]
                taken = questions.state()
            else:
                setting = sampler, tokenizer, questions, reward_fn
                if not ahead:
                    ahead = roll_out(*setting, step, state["step"], args)
                    metrics |= ahead[2]
                rows, trained, _, taken = ahead
                metrics |= rewards.rollout_metrics(rows, args.group_size)
                trained, ahead = rows_to_train_on(trained, args), None
                if args.overlap and step < args.max_steps:
                    ahead = pool.submit(roll_out, *setting, step + 1, state["step"], args)
            metrics["train/tokens"] = sum(map(len, rows))
            with hold_signals():
                with stopwatch(metrics, "update"):
                    sampler.sleep()
                    metrics |= update(policy, reference, optimizer, trained, step, args)
                state.update(step=step, metrics=metrics, questions=taken, samples=rewards.to_log(rows, args))
            if ahead:  # before the push: a rollout has one policy
                with stopwatch(metrics, "rollout"):
                    ahead = ahead.result()
        with stopwatch(metrics, "push"):
            sampler.push(policy, state["step"])
        with stopwatch(metrics, "canary"):
            metrics["train/engine_gap"] = check_push(sampler, policy, held_out, args)
        last = rewards.is_last([*records, metrics], time.time() - started, args)
        if last or state["step"] % args.eval_every == 0:
            with stopwatch(metrics, "eval"):
                metrics |= evaluate(sampler, tokenizer, held_out, reward_fn, state["step"], run_dir, args)[0]
        with hold_signals():
            rewards.log_step(run_dir, metrics, state["samples"], args)
            records.append(metrics)
            state.update(metrics=None, seconds=time.time() - started)
            if last or time.time() - saved > 20 * save_seconds:  # costs at most 5 % of the time
                saved = time.time()
                save()
                save_seconds = time.time() - saved
        if "eval/accuracy" in metrics:
            rewards.renew_curves(run_dir, last)
        report.log(metrics)
        rewards.watch(records, warned)

def reference_and_optimizer(policy, args):
    reference = copy.deepcopy(policy).requires_grad_(False) if args.kl_coef else None
    return reference, torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0,
                                        fused=True)

def main(args):
    args = configure(args, sys.argv[1:], torch.cuda.is_available())
    if args.mode == "plot":
        return rewards.draw_curves(args.runs, args.metrics, args.output)
    if args.mode == "bench":
        policy = rewards.random_model(args).to(policy_device()).eval()
        learner = policy, *reference_and_optimizer(policy, args)
        return rewards.bench(policy, Row, lambda rows: update(*learner, rows, 1, args), args)
    reward_fn = rewards.load_reward_fn(args.reward_fn)
    train, held_out = rewards.load_examples(args)
    args.eval_size = min(args.eval_size, len(held_out))  # the size that an evaluation of the model takes
    run_dir = rewards.open_run(args, __file__)
    policy, tokenizer, sampler = load_model(args)
    args.context = min(policy.config.max_position_embeddings, args.max_model_len or sys.maxsize)
    held_out = rewards.add_prompts(held_out[:args.eval_size], tokenizer, args)
    train = rewards.add_prompts(train, tokenizer, args) if args.mode != "eval" else []
    reference, optimizer = reference_and_optimizer(policy, args)
    print(f"{args.mode}: {args.model}, {policy.num_parameters():,} parameters on {policy.device}, sampler "
          f"{sampler.name}; {args.dataset}, {len(train)} to train on, {len(held_out)} held out; {run_dir}")
    state = rewards.load_checkpoint(policy, reference, optimizer, run_dir) if args.resume else None
    state = state or {"step": 0, "seconds": 0.0, "metrics": None, "questions": {}}
    sampler.push(policy, state["step"])
    check_push(sampler, policy, held_out, args)

    def ask(examples, prefix, n):
        prefixes, seed = [prefix] * len(examples), seed_for(args.seed, prefix)
        return score(sample(sampler, tokenizer, examples, n, seed, 0, args, prefixes), reward_fn)

    kept = rewards.filter_questions(train, ask, run_dir / "pass_rates.json", args)
    questions = rewards.Questions(kept, args.curriculum, args.seed, state["questions"])
    records = rewards.read_log(run_dir / "metrics.jsonl")
    if not records:
        metrics = {"step": 0}
        with stopwatch(metrics, "eval"):
            more, rows = evaluate(sampler, tokenizer, held_out, reward_fn, 0, run_dir, args)
        records = [metrics | more]
        rewards.log_step(run_dir, records[0], rewards.to_log(rows, args), args)
    started = rewards.STARTED - state["seconds"]
    if args.mode != "eval":
        save = lambda: rewards.save_checkpoint(policy, reference, optimizer, state, run_dir, args.keep)
        with rewards.save_on_exit(save):  # what was paid for is kept
            train_loop(policy, reference, optimizer, sampler, tokenizer, questions, held_out, reward_fn,
                       state, started, save, records, run_dir, args)
        rewards.save_model(policy, tokenizer, run_dir / "model")
    rewards.write_result(run_dir, records[-1], state["seconds"], train, held_out, args)

if __name__ == "__main__":
    rewards.guard(main, ARGS)
