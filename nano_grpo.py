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
  python nano_grpo.py --mode sft --model ./folder --dataset traces.jsonl --eval-dataset test.jsonl

Left out on purpose: a value network (the group is the baseline), a reward model (the grader is exact), a
replay buffer (rollouts are used once). The loss is logged but not printed: with centred advantages it is
about 0 on the first step after a rollout whatever the policy does. Watch reward and held-out accuracy.

Shapes: P prompts, G = group_size, B rows (P * G), S prompt + response, T longest response, V vocabulary.
A response_mask is 1 on response tokens and 0 elsewhere. Log-probs and entropies are in nats.
"""
import argparse
import contextlib
import inspect
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

# The prompt of the R1-Zero paper (arXiv 2501.12948). It ends with "<think>" and no newline.
R1_ZERO_PROMPT = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
    "Assistant first thinks about the reasoning process in the mind and then provides the User with the "
    "answer. The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> "
    "</answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here "
    "</answer>.\nUser: {question}\nAssistant: <think>")
# --prompt selects template, stop string and reward together, because they belong together.
PROMPTS = {"r1_zero": (R1_ZERO_PROMPT, "</answer>", "r1_zero"),
           "question_only": ("{question}", None, "question_only")}
TASKS = ("arithmetic", "sort")
# Defaults that depend on the model; a flag on the command line wins.
PRESETS = {
    "tiny": dict(dataset="arithmetic", lr=5e-4, max_steps=150, max_tokens=96, eval_size=512, eval_every=10),
    "other": dict(dataset="DigitalLearningGmbH/MATH-lighteval", lr=3e-5, max_steps=200, max_tokens=1024,
                  eval_size=1024, eval_every=10)}
CUDA_MODEL = "Qwen/Qwen2.5-Math-1.5B"  # the default model of a machine with CUDA; without it, tiny
CACHE = Path(os.environ.get("NANO_GRPO_CACHE", Path.home() / ".cache" / "nano_grpo"))

# --- Command line ------------------------------------------------------------------------------------------
def stop_run(message):
    """Ends the program with exit code 2 and one line that names the flag or file and the cure."""
    print(f"nano_grpo: error: {message}", file=sys.stderr)
    sys.exit(2)

def parse_args(argv=None):
    """Flags -> argparse.Namespace. A default that depends on other flags is None until `configure`."""
    parser = argparse.ArgumentParser(
        description="SFT, expert iteration and GRPO for mathematics in one file.", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110))
    parser.error = lambda message: stop_run(f"{message}; see --help")

    def flag(name, default, text, kind=None, **options):
        key = name[2:].replace("-", "_")
        if key in PRESETS["tiny"]:
            text += f" (default: {PRESETS['tiny'][key]} for the tiny model, else {PRESETS['other'][key]})"
        elif default not in (None, False):
            text += f" (default: {default})"
        if "choices" not in options and "action" not in options:
            options["type"] = kind or type(default)
        group.add_argument(name, default=default, help=text, **options)

    group = parser.add_argument_group("run")
    flag("--mode", "grpo", "what to do", choices=["eval", "sft", "expert_iteration", "grpo"])
    flag("--model", None, f"HF folder, hub id or `tiny` (default: {CUDA_MODEL} with CUDA, else tiny)", str)
    flag("--run-dir", None, "folder of logs, curves, checkpoint, model (default: a new one in runs/)", str)
    flag("--resume", False, "go on from the checkpoint in --run-dir, with its flags", action="store_true")
    flag("--seed", 0, "of sampling and of the order of the data")
    flag("--max-steps", None, "rollout batches (sft: batches of solutions) to train on", int)
    flag("--max-hours", None, "stop after this many hours, with the final evaluation", float)
    group = parser.add_argument_group("data")
    flag("--dataset", None, "arithmetic, sort, a .jsonl/.json/.parquet file or a hub id", str)
    flag("--eval-dataset", None, "held-out data (default: a test split, else --eval-size rows held out)", str)
    flag("--prompt", "r1_zero", "template, stop string and reward together", choices=list(PROMPTS))
    group = parser.add_argument_group("rollout")
    flag("--sampler", "auto", "who samples", choices=["auto", "vllm", "hf"])
    flag("--rollout-batch-size", 256, "responses a step, P * group_size")
    flag("--group-size", 8, "responses to one question, G")
    flag("--temperature", 1.0, "of sampling, training and evaluation")
    flag("--min-tokens", 4, "no end of a response before this many tokens")
    flag("--max-tokens", None, "generation budget of a response, in tokens", int)
    flag("--sampler-batch-size", 256, "rows that the hf sampler runs at once")
    group = parser.add_argument_group("reward and advantage")
    flag("--reward-fn", None, "name in rewards.REWARDS or module:function (default: by prompt, task)", str)
    flag("--baseline", "mean", "mean: GRPO; loo: mean of the others, RLOO (arXiv 2402.14740); none: raw "
         "reward; max: only the best of the group", choices=["mean", "loo", "none", "max"])
    flag("--std-norm", None, "divide by the group's std: GRPO yes, Dr. GRPO (arXiv 2503.20783) no (default: "
         "yes with --baseline mean)", action=argparse.BooleanOptionalAction)
    flag("--advantage-eps", 1e-6, "added to the std")
    group = parser.add_argument_group("loss")
    flag("--loss", None, "pg: -A log pi; grpo_clip: the clipped ratio of PPO (default: grpo_clip in grpo "
         "mode, pg in the others)", choices=["pg", "grpo_clip"])
    flag("--cliprange", None, "eps of the clipped ratio (default: 0.2)", float)
    flag("--cliprange-high", None, "upper eps, clip-higher of DAPO, arXiv 2503.14476 (default: equal)", float)
    flag("--loss-aggregation", None, "sequence: mean over a row's tokens, then over rows, GRPO; token: mean "
         "over all tokens, DAPO; constant: sum / (rows * max_tokens), Dr. GRPO (default: sequence)",
         choices=["sequence", "token", "constant"])
    flag("--no-length-norm", False, "the same as --loss-aggregation constant, Dr. GRPO", action="store_true")
    group = parser.add_argument_group("step")
    flag("--train-batch-size", 256, "rows of one optimizer step")
    flag("--epochs-per-rollout-batch", 1, "passes over each rollout batch")
    flag("--microbatch-tokens", 16384, "padded tokens of one forward pass; changes memory, not the result")
    flag("--lr", None, "learning rate of AdamW", float)
    flag("--max-grad-norm", 1.0, "clip the norm of the gradient to this")
    group = parser.add_argument_group("evaluation")
    flag("--eval-every", None, "steps between evaluations; a checkpoint follows each", int)
    flag("--eval-size", None, "held-out questions to evaluate on", int)
    return parser.parse_args(argv)

def configure(args, argv, has_cuda):
    """Fills what is None: from the saved run when resumed, else from the model's preset and other flags."""
    saved = (Path(args.run_dir or "") if args.resume else Path(args.model or "").parent) / "args.json"
    if args.resume and not (args.run_dir and saved.is_file()):
        stop_run(f"--resume needs --run-dir with a saved run, and {saved} is not there")
    old = json.loads(saved.read_text())["args"] if saved.is_file() else {}
    if args.resume:
        given = {word.split("=")[0].replace("--no-", "--")[2:].replace("-", "_") for word in argv}
        vars(args).update({key: old[key] for key in old if key not in given | {"resume", "run_dir"}})
    args.model = args.model or (CUDA_MODEL if has_cuda else "tiny")
    preset = PRESETS["tiny" if args.model == "tiny" else "other"]
    defaults = {key: old.get(key, preset[key]) for key in preset}  # a model of a run keeps them
    defaults |= {"std_norm": args.baseline == "mean", "loss": "grpo_clip" if args.mode == "grpo" else "pg",
                 "loss_aggregation": "constant" if args.no_length_norm else "sequence"}
    given = {key: value for key, value in vars(args).items() if value is not None}
    filled = argparse.Namespace(**vars(args) | defaults | given)
    refuse(filled)
    filled.cliprange = 0.2 if args.cliprange is None else args.cliprange
    filled.cliprange_high = filled.cliprange if args.cliprange_high is None else args.cliprange_high
    default_reward = "sort_positions" if filled.dataset == "sort" else PROMPTS[args.prompt][2]
    filled.reward_fn = args.reward_fn or default_reward
    name = f"{args.mode}-{Path(filled.dataset).stem}-seed{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    filled.run_dir = args.run_dir or f"runs/{name}"
    return filled

def refuse(args):
    """Stops, with one line, on flags that would run and not mean what they say."""
    for key, value in vars(args).items():
        may_be_zero = ("seed", "min_tokens", "advantage_eps")
        if type(value) in (int, float) and value <= 0 and key not in may_be_zero:
            stop_run(f"--{key.replace('_', '-')} must be above 0, not {value}")
    clips = args.cliprange is not None or args.cliprange_high is not None
    for is_bad, message in [
        (args.no_length_norm and args.loss_aggregation != "constant",
         "--no-length-norm means --loss-aggregation constant: give one of the two"),
        (args.mode in ("sft", "expert_iteration") and args.loss != "pg",
         f"--loss {args.loss} needs a ratio to old log-probs, which --mode {args.mode} lacks: use pg"),
        (clips and args.loss != "grpo_clip", "--cliprange clips a ratio: use it with --loss grpo_clip"),
        (args.std_norm and args.baseline != "mean",
         f"--std-norm goes with --baseline mean only: with {args.baseline} it would undo its point"),
        (args.group_size == 1 and args.mode == "grpo" and args.baseline in ("mean", "loo"),
         "--group-size 1 leaves no group to compare with: take 2 or more, or --baseline none"),
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

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import rewards

# --- Data: hub, file or built-in task -> Example -> Row ----------------------------------------------------
@dataclass
class Example:
    """A question, its ground truth and, where the data has one, a written solution (trace)."""
    question: str
    ground_truth: str
    trace: str | None = None
    prompt_ids: list = field(default_factory=list)

@dataclass
class Row:
    """What is trained on. Log-probs are lists with one number a response token: of the sampler, and of the
    policy before the first step on this rollout batch."""
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

def example_from_record(record, where):
    """A record of a known form -> Example. The answer is a field, or stands after #### or in a \\boxed{}."""
    def first(*keys):
        return next((str(record[key]) for key in keys if record.get(key) not in (None, "")), None)

    question, trace = first("question", "problem"), first("trace", "response", "solution")
    answer = first("ground_truth", "answer") or rewards.last_boxed(trace or "")
    if answer and "####" in answer:  # GSM8K: solution and answer in one field
        trace, answer = (part.strip() for part in answer.rsplit("####", 1))
    if not question or not answer:
        missing = "question or problem" if not question else "answer, ground_truth or solution with \\boxed{}"
        stop_run(f"{where} has no {missing} (its fields: {', '.join(record)}): add it or drop the row")
    return Example(question, answer, trace)

def read_examples(name, flag):
    """A data file or hub id -> {split: list of Example}."""
    import datasets
    datasets.disable_progress_bars()
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(name).suffix)
    try:
        if kind and not Path(name).is_file():
            raise FileNotFoundError("no such file")
        splits = datasets.load_dataset(kind, data_files=name) if kind else datasets.load_dataset(name)
    except Exception as error:  # of many libraries, and each means that these data cannot be had
        stop_run(f"{flag} {name} cannot be read ({str(error).splitlines()[0][:120]}): give a .jsonl, .json "
                 f"or .parquet file, a hub id, or {' or '.join(TASKS)}")
    return {split: [example_from_record(record, f"{flag} {name}: row {i} of {split}")
                    for i, record in enumerate(records, 1)] for split, records in splits.items()}

def load_examples(args):
    """-> (training, held-out) lists of Example, with no question in both."""
    if args.dataset in TASKS:
        return task_examples(args.dataset)
    splits = read_examples(args.dataset, "--dataset")
    train = splits.get("train") or next(iter(splits.values()))
    held_out = splits.get("test") or splits.get("validation")
    if args.eval_dataset:
        held_out = next(iter(read_examples(args.eval_dataset, "--eval-dataset").values()))
    if not held_out:  # hold out rows by a fixed shuffle, the same for every --seed
        random.Random(0).shuffle(train)
        size = len(train) if args.mode == "eval" else min(args.eval_size, len(train) // 2)
        train, held_out = train[size:], train[:size]
    known = {" ".join(example.question.lower().split()) for example in held_out}
    leaked = sum(" ".join(example.question.lower().split()) in known for example in train)
    for is_bad, message in [
        (leaked and args.mode != "eval", f"has {leaked} questions of the evaluation data in it: drop them"),
        (not held_out or not train and args.mode != "eval", "has too few rows to train and to evaluate on"),
        (args.mode == "sft" and not all(example.trace for example in train),
         "has rows without a solution, which --mode sft needs: add a field trace, response or solution")]:
        if is_bad:
            stop_run(f"--dataset {args.dataset} {message}")
    return train, held_out

def add_prompts(examples, tokenizer, args, context):
    """Fills prompt_ids; drops questions that leave no room for max_tokens in the model's context (tokens)."""
    for example in examples:  # replace, not format: questions contain braces
        text = PROMPTS[args.prompt][0].replace("{question}", example.question)
        example.prompt_ids = tokenizer.encode(text)
    kept = [example for example in examples if len(example.prompt_ids) + args.max_tokens <= context]
    if len(kept) < len(examples):
        print(f"dropped {len(examples) - len(kept)} of {len(examples)} questions: prompt + --max-tokens "
              f"{args.max_tokens} is over the model's context of {context} tokens")
    if not kept:
        stop_run(f"--max-tokens {args.max_tokens} leaves no prompt room in a context of {context}: lower it")
    return kept

def batch_of_step(examples, step, size, seed):
    """The examples of a step. Each epoch is a new order that covers every example once; there is no state."""
    batch, epoch = [], None
    for position in range((step - 1) * size, step * size):
        if epoch != position // len(examples):
            epoch = position // len(examples)
            order = random.Random(f"{seed}-{epoch}").sample(examples, len(examples))
        batch.append(order[position % len(examples)])
    return batch

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
STYLES = dict(careful=0.13, checked=0.1, guess=0.37, ramble=0.2, untagged=0.2)
TINY = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True)
TINY_ROWS, TINY_BATCH, TINY_LR = 36_000, 32, 5e-3

def task_chain(task, digits, rng=None, slip=0.0):
    """-> (worked steps, answer). A step puts the next digit into the result so far, by adding it or by
    inserting it in order, and goes wrong with probability `slip`."""
    state, steps = digits[:1], []
    for digit in digits[1:]:
        slips = rng is not None and rng.random() < slip
        if task == "arithmetic":
            after = [str(max(0, int(state[0]) + int(digit) + (rng.choice([-2, -1, 1, 2]) if slips else 0)))]
        else:
            after = rng.sample([*state, digit], len(state) + 1) if slips else sorted([*state, digit])
        steps.append(f"{' '.join(state)} + {digit} = {' '.join(after)}")
        state = after
    return " , ".join(steps), " ".join(state)

def task_trace(task, digits, style, rng=None):
    """A response in one of STYLES."""
    chain, answer = task_chain(task, digits)
    if style == "untagged":
        return f" {chain} . the answer is {answer}"
    if style == "checked":
        chain = f"{chain} . check : {chain}"
    if style == "guess":
        near = str(max(0, sum(map(int, digits)) + rng.randint(-6, 6)))
        chain, answer = "", near if task == "arithmetic" else " ".join(rng.sample(digits, len(digits)))
    if style == "ramble":
        (first, _), (second, answer) = (task_chain(task, digits, rng, slip=0.3) for _ in range(2))
        chain = f"hmm , {first} . wait , {second}".replace("=", "is")
    return f" {chain}".rstrip() + f" </think> <answer> {answer} </answer>"

def task_examples(task):
    """All 2,401 questions of four digits from 0 to 6, in a fixed order -> 1,801 to train on, 600 held out."""
    questions = random.Random(0).sample(list(itertools.product("0123456", repeat=4)), 7**4)
    text = "What is {} ?" if task == "arithmetic" else "Sort {} ."
    join = " + " if task == "arithmetic" else " "
    examples = [Example(text.format(join.join(digits)), task_chain(task, digits)[1],
                        task_trace(task, digits, "careful")) for digits in map(list, questions)]
    return examples[600:], examples[:600]

def tiny_tokenizer():
    """Bytes, and one token for each word of the tasks and each fixed part of the prompt: the R1-Zero prompt
    costs about 15 tokens, byte for byte the same text. pad is eos, as in many real models."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = "What is Sort + = , . : ? check hmm wait the answer".split() + [str(n) for n in range(60)]
    parts = [part.strip(" ") for part in R1_ZERO_PROMPT.split("{question}")]
    for text in parts + ["<think>", "</think>", "<answer>", "</answer>"] + [f" {word}" for word in words]:
        tokenizer.add_tokens([AddedToken(text, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0], pad_token=alphabet[0])

def warm_start(task):
    """Pre-trains the tiny model on the mixture, once -> the HF folder where it is kept. Sound solutions come
    first, then more and more of the mixture; held-out questions are never seen."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    functions = [task_chain, task_trace, task_examples, tiny_tokenizer, warm_start]
    recipe = "".join(map(inspect.getsource, functions)) + repr((STYLES, TINY, TINY_ROWS, TINY_BATCH, TINY_LR))
    folder = CACHE / f"tiny-{task}-{zlib.crc32(recipe.encode()):08x}"  # a changed recipe is a new model
    if folder.exists():
        return folder
    print(f"warm start: pre-training the tiny model on {TINY_ROWS:,} texts about {task}, once, into {folder}")
    started, rng, rows, tokenizer = time.time(), random.Random(1), [], tiny_tokenizer()
    settings = parse_args(["--loss", "pg", "--loss-aggregation", "token", "--max-tokens", "1024"])
    examples = add_prompts(task_examples(task)[0], tokenizer, settings, context=2048)
    for n in range(TINY_ROWS):
        example = rng.choice(examples)
        styles = STYLES if rng.random() < (n / TINY_ROWS - 0.5) / 0.25 else {"careful": 0.8, "untagged": 0.2}
        style = rng.choices(list(styles), list(styles.values()))[0]
        text = task_trace(task, re.findall(r"\d", example.question), style, rng)
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

def load_policy(args):
    """-> (policy in float32 on its device, tokenizer)."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tiny_task = args.dataset if args.dataset in TASKS else "arithmetic"
    path = warm_start(tiny_task) if args.model == "tiny" else args.model
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        # float32 master weights: in bfloat16 a small update rounds back to the old value
        policy = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        stop_run(f"--model {path} cannot be loaded ({str(error).splitlines()[0][:120]}): give an HF folder, "
                 "a hub id that this machine can reach, or `tiny`")
    policy.to("cuda:1" if torch.cuda.device_count() > 1 else "cuda" if torch.cuda.is_available() else "cpu")
    policy.eval()  # no dropout, or old and new log-probs would differ by noise
    probe = torch.arange(8, device=policy.device)[None]
    with torch.no_grad():
        ours = policy.get_output_embeddings()(policy.base_model(probe).last_hidden_state)
        if not torch.allclose(policy(probe).logits, ours, atol=1e-3, rtol=1e-3):
            stop_run(f"--model {path} scales or caps its logits, response_log_probs does not: take another")
    return policy, tokenizer

# --- Rollout -----------------------------------------------------------------------------------------------
def seed_for(seed, purpose, step=0):
    """A seed for each purpose and step, so that a resumed run samples what an unbroken one would have."""
    return zlib.crc32(f"{seed}-{purpose}-{step}".encode())

class HFSampler:
    """Samples with the policy itself: a key-value cache and one forward pass a token.

    `version` is the step whose weights it holds. They are the policy's own, so a push only moves the stamp.
    """
    name, version = "hf", None

    def __init__(self, policy, tokenizer, args):
        self.policy, self.tokenizer, self.args, self.stop = policy, tokenizer, args, PROMPTS[args.prompt][1]
        eos = policy.generation_config.eos_token_id
        self.eos_ids = list({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None})
        # only a token with the last character of the stop string can complete it; no other needs decoding
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))]) if self.stop else []
        self.closers = {i for i, piece in enumerate(pieces) if self.stop[-1] in piece}

    def push(self, policy, version):
        self.version = version

    def generate(self, prompts, n, seed):
        """Prompts (token ids) -> for each a list of n [response ids, log-probs, truncated]."""
        generator = torch.Generator(self.policy.device).manual_seed(seed)
        size, samples = max(1, self.args.sampler_batch_size // n), []
        for start in tqdm(range(0, len(prompts), size), desc="rollout", disable=None, leave=False):
            samples += self.generate_chunk(prompts[start:start + size], n, generator)
        return [samples[i:i + n] for i in range(0, len(samples), n)]

    @torch.no_grad()
    def generate_chunk(self, prompts, n, generator):
        from transformers import DynamicCache
        device, args = self.policy.device, self.args
        ids = pad([torch.tensor(prompt) for prompt in prompts], side="left").to(device)  # (P, longest prompt)
        mask = pad([torch.ones(len(prompt), dtype=torch.long) for prompt in prompts], side="left").to(device)
        cache, alive = DynamicCache(config=self.policy.config), list(range(len(prompts) * n))
        samples = [[[], [], True] for _ in alive]
        for length in range(1, args.max_tokens + 1):
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
        return self.stop in self.tokenizer.decode(tokens[-len(self.stop):])  # a token has at least one byte

def sample(sampler, tokenizer, examples, n, seed, version, args):
    """n responses to each example -> Rows, prompt-major. The ids sampled are the ids trained on: the text is
    decoded from them for the grader and never tokenised again."""
    if sampler.version != version:
        raise RuntimeError(f"stale sampler: it has the weights of step {sampler.version}, not {version}")
    rows, stop = [], PROMPTS[args.prompt][1]
    for example, samples in zip(examples, sampler.generate([e.prompt_ids for e in examples], n, seed)):
        for ids, log_probs, truncated in samples:
            text = tokenizer.decode(ids, skip_special_tokens=True)
            if stop and stop in text:
                text = text[:text.index(stop) + len(stop)]  # the last token may reach past the stop string
            rows.append(Row(example, ids, text, truncated, log_probs))
    return rows

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
    metadata = {"mean": raw.mean().item(), "max": raw.max().item(), "min": raw.min().item()}
    return advantages.view(-1), raw, metadata

def rows_to_train_on(rows, args):
    """Scored rollouts -> the rows to train on, with their advantages."""
    if args.mode == "expert_iteration":
        return [row for row in rows if row.reward["answer_reward"] == 1]
    rewards_PG = torch.tensor([row.reward["reward"] for row in rows]).view(-1, args.group_size)
    advantages = group_advantages(rewards_PG, args.baseline, args.std_norm, args.advantage_eps)
    for row, advantage in zip(rows, advantages.view(-1).tolist()):
        row.advantage = advantage
    return rows

# --- Log-probs ---------------------------------------------------------------------------------------------
def pad(tensors, value=0, side="right"):
    """A list of 1-D tensors -> (len, longest)."""
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)

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
    ids = pad([torch.tensor(prompt + response) for prompt, response in zip(prompts, responses)], pad_id)
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
    """Rows -> log_probs, entropy, response_mask, (B, T) each.

    Only response positions go through the output matrix, `chunk` at a time, and each chunk is computed again
    in the backward pass: the (B, S, V) float32 logits, most of the memory of a plain step, never exist.
    """
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
    sums = dict.fromkeys(("loss", "tokens", "entropy", "clipped", "gap", "grad_norm", "steps"), 0.0)
    live = [row for row in rows if row.advantage]  # advantage 0 has gradient 0; such rows count in num_rows
    if not live:
        return sums  # nothing to learn, and Adam's momentum alone must not move the weights
    optimizer.zero_grad()
    parts = list(microbatches(live, args.microbatch_tokens))
    for microbatch in tqdm(parts, desc="update", disable=None, leave=False):
        log_probs, entropy, mask = response_log_probs(policy, microbatch, args.temperature)

        def column(values):  # a list of floats for each row -> (B, T)
            return pad([torch.tensor(value) for value in values]).to(mask.device)

        advantages = column([[row.advantage] for row in microbatch])  # (B, 1)
        old_log_probs = log_probs.detach()  # exact while the policy is the one that sampled
        if microbatch[0].old_log_probs is not None:
            old_log_probs = column([row.old_log_probs for row in microbatch])
        loss_type = "grpo_clip" if args.loss == "grpo_clip" else "reinforce_with_baseline"
        token_loss, metadata = compute_policy_gradient_loss(
            log_probs, loss_type, None, advantages, old_log_probs, args.cliprange, args.cliprange_high)
        loss = aggregate_loss(token_loss, mask, args.loss_aggregation, num_rows, num_tokens, args.max_tokens)
        loss.backward()
        sums["loss"] += loss.item()
        sums["tokens"] += mask.sum().item()
        sums["entropy"] += (entropy.detach() * mask).sum().item()
        sums["clipped"] += (metadata["is_clipped"] & mask).sum().item() if metadata else 0
        if microbatch[0].sampler_log_probs is not None:
            gap = old_log_probs - column([row.sampler_log_probs for row in microbatch])
            sums["gap"] += (gap.abs() * mask).sum().item()
    sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
    sums["steps"] = 1
    optimizer.step()
    return sums

def update(policy, optimizer, rows, args, step):
    """All optimizer steps of one loop step -> metrics, averaged over tokens or over optimizer steps."""
    size, epochs = args.train_batch_size, args.epochs_per_rollout_batch
    batches = []
    for epoch in range(epochs):
        order = random.Random(seed_for(args.seed, f"epoch {epoch}", step)).sample(rows, len(rows))
        batches += [order[start:start + size] for start in range(0, len(rows), size)]
    if args.loss == "grpo_clip" and len(batches) > 1:
        cache_old_log_probs(policy, rows, args)
    totals = dict.fromkeys(("loss", "tokens", "entropy", "clipped", "gap", "grad_norm", "steps"), 0.0)
    for batch in batches:
        sums = train_step(policy, optimizer, batch, args)
        totals = {key: totals[key] + sums[key] for key in totals}
    tokens, steps = max(1, totals["tokens"]), max(1, totals["steps"])
    return {"train/loss": totals["loss"] / steps, "train/grad_norm": totals["grad_norm"] / steps,
            "train/lr": optimizer.param_groups[0]["lr"], "train/entropy": totals["entropy"] / tokens,
            "train/clip_fraction": totals["clipped"] / tokens, "train/engine_gap": totals["gap"] / tokens}

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
    """One response to each held-out question, at the temperature and budget of training -> (metrics, rows).
    Questions and sampling seed are the same at every step, so only the policy differs."""
    rows = sample(sampler, tokenizer, held_out, 1, seed_for(args.seed, "eval"), step, args)
    score(rows, reward_fn)
    accuracy = mean(row.reward["answer_reward"] for row in rows)
    return {"eval/accuracy": accuracy, "eval/stderr": math.sqrt(accuracy * (1 - accuracy) / len(rows)),
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
    ("tokens_per_second", "| tok/s", ",.0f"),
    *((f"time/{stage}", stage, ".1f") for stage in ("rollout", "reward", "update", "push", "eval")),
    ("eval/accuracy", "| held-out accuracy", ".1%"), ("eval/stderr", "+-", ".1%")]

def log_step(run_dir, metrics, rows, args):
    """Appends to metrics.jsonl and samples.jsonl (8 rows a step); prints the health line (seconds)."""
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    with open(run_dir / "samples.jsonl", "a") as file:
        for row in rows[:8]:
            prompt = PROMPTS[args.prompt][0].replace("{question}", row.example.question)
            file.write(json.dumps({
                "step": metrics["step"], "prompt": prompt, "response": row.text,
                "ground_truth": row.example.ground_truth, **row.reward, "length": len(row.response_ids),
                "finish_reason": "length" if row.truncated else "stop"}) + "\n")
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
    state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
             "seconds": seconds}
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
        lines = log.read_text().splitlines(True)
        kept = [line for line in lines if json.loads(line)["step"] <= state["step"]]
        write_atomic(log, lambda path: path.write_text("".join(kept)))
    return state["step"], state["seconds"]

def draw_curves(run_dir):
    """metrics.jsonl -> curves.png."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    panels = {"held-out accuracy": ["eval/accuracy"], "reward": ["train/reward", "train/format_reward"],
              "response length (tokens)": ["train/length_right", "train/length_wrong"],
              "entropy (nats) and dead groups": ["train/entropy", "train/dead_groups"]}
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, (title, keys) in zip(axes.flat, panels.items()):
        for key in keys:
            known = [record for record in records if record.get(key) is not None]
            bars = [record["eval/stderr"] for record in known] if key == "eval/accuracy" else None
            steps, values = [record["step"] for record in known], [record[key] for record in known]
            axis.errorbar(steps, values, bars, label=key)
        axis.set(title=title, xlabel="step")
        axis.legend()
    write_atomic(run_dir / "curves.png", lambda path: figure.savefig(path, dpi=100))
    plt.close(figure)

def open_run(args):
    """Makes the run folder, with the flags and a copy of this script -> its path."""
    run_dir = Path(args.run_dir)
    if (run_dir / "metrics.jsonl").exists() and not args.resume:
        stop_run(f"--run-dir {run_dir} holds a run: add --resume to go on with it, or give another folder")
    versions = {name: sys.modules[name].__version__ for name in ("torch", "transformers")}
    record = json.dumps({"args": vars(args), "versions": versions}, indent=2)
    write_atomic(run_dir / "args.json", lambda path: path.write_text(record))
    write_atomic(run_dir / "nano_grpo.py", lambda path: shutil.copy(__file__, path))
    return run_dir

# --- Main loop ---------------------------------------------------------------------------------------------
def main(args):
    args = configure(args, sys.argv[1:], torch.cuda.is_available())
    reward_fn = rewards.load_reward_fn(args.reward_fn)
    train, held_out = load_examples(args)
    policy, tokenizer = load_policy(args)
    context = policy.config.max_position_embeddings
    held_out = add_prompts(held_out[:args.eval_size], tokenizer, args, context)
    train = add_prompts(train, tokenizer, args, context) if args.mode != "eval" else []
    run_dir = open_run(args)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    sampler = HFSampler(policy, tokenizer, args)
    print(f"{args.mode}: {args.model} ({policy.num_parameters():,} parameters, {policy.device}) on {args.dataset}"
          f" ({len(train)} training, {len(held_out)} held-out questions), {sampler.name} sampler, {run_dir}")
    step, seconds = load_checkpoint(policy, optimizer, run_dir) if args.resume else (0, 0.0)
    started = time.time() - seconds
    sampler.push(policy, step)
    if step == 0:
        metrics, rows = evaluate(sampler, tokenizer, held_out, reward_fn, step, args)
        log_step(run_dir, {"step": 0, **metrics}, rows, args)

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
                score(rows, reward_fn)
                metrics |= rollout_metrics(rows, args.group_size)
                trained = rows_to_train_on(rows, args)
        with stopwatch(metrics, "update"):
            metrics |= update(policy, optimizer, trained, args, step)
        with stopwatch(metrics, "push"):
            sampler.push(policy, step)
        seconds = sum(metrics[key] for key in metrics if key.startswith("time/"))
        metrics["tokens_per_second"] = sum(map(len, rows)) / seconds
        hours = (time.time() - started) / 3600
        last = step == args.max_steps or bool(args.max_hours and hours > args.max_hours)
        if last or step % args.eval_every == 0:
            with stopwatch(metrics, "eval"):
                metrics |= evaluate(sampler, tokenizer, held_out, reward_fn, step, args)[0]
        log_step(run_dir, metrics, rows, args)
        if "eval/accuracy" in metrics:
            save_checkpoint(policy, optimizer, step, time.time() - started, run_dir)
            draw_curves(run_dir)
    if args.mode != "eval":
        save_model(policy, tokenizer, run_dir / "model")
        print(f"curves.png and model/ are in {run_dir}")

if __name__ == "__main__":
    main(ARGS)
