"""Data in their many forms -> examples to train on and held-out ones, with no question in both.

A file, a pattern of files, a folder, a hub id or a built-in task; the fields of a record tell its form.
ValueError, in one line, says what cannot be read, is missing, or is in both. Last, the form in which
samples.jsonl keeps the rows of a step.
"""
import functools
import copy
import glob
import hashlib
import itertools
import json
import logging
import random
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import rewards
import tiny

FILE_KINDS = ("jsonl", "json", "parquet", "arrow")
SUMS_QUESTION = "Add {} and {}. Answer with the number."
HUB_IDS = {"math": "DigitalLearningGmbH/MATH-lighteval", "gsm8k": "openai/gsm8k:main"}  # id:configuration

@dataclass
class Example:
    """A question, its ground truth and, where the data has one, a written solution (trace)."""
    question: str
    ground_truth: str
    trace: str | None = None
    prompt_ids: list = field(default_factory=list)
    pass_rate: float | None = None  # of the untrained policy, with --difficulty-filter
    messages: list | None = None  # chat turns (dicts with role and content), the last of them the user's

def sums_records():
    """Two numbers from 1 to 30 to add, for a model that chats, in a fixed order -> {"train": 700 records
    (dicts), "test": 200}. 3 + 5 and 5 + 3 are two questions of the same split, or one gave the other away."""
    pairs = list(itertools.combinations_with_replacement(range(1, 31), 2))
    pairs = random.Random(1).sample(pairs, len(pairs))
    sums = dict.fromkeys(sum_ for a, b in pairs for sum_ in ((a, b), (b, a)))
    records = [dict(question=SUMS_QUESTION.format(a, b), ground_truth=str(a + b),
                    trace=f"{a} + {b} = {a + b}") for a, b in sums]
    return {"train": records[200:], "test": records[:200]}

BUILT_IN = {**{task: functools.partial(tiny.task_records, task) for task in tiny.TASKS}, "sums": sums_records}

def parse_record(record):
    """A record (dict) of a known form -> Example, or ValueError. The answer is a field, or stands behind ####
    or in a \\boxed{}; the question is a field, or stands in the R1-Zero prompt of a trace."""
    def first(*keys):  # text or a number: a list, True, NaN or blanks are no question and no answer
        texts = [str(record[key]) for key in keys if type(record.get(key)) in (str, int, float)]
        return next((text for text in texts if text.strip() not in ("", "nan")), None)

    asked = re.search(r"User: (.*)\nAssistant:", first("prompt") or "", re.DOTALL)
    question = first("question", "problem") or (asked[1].strip() if asked else None)
    trace = first("trace", "response", "solution")
    answer = first("ground_truth", "answer") or (rewards.last_boxed(trace or "") or "").strip()
    if "####" in answer:  # GSM8K: solution and answer in one field
        trace, answer = (part.strip() for part in answer.rsplit("####", 1))
    if not question or not answer:
        missing = "question or problem" if not question else "answer, ground_truth or solution with \\boxed{}"
        raise ValueError(f"has no {missing} (its fields: {', '.join(record)}): add it or drop the row")
    f"{question}{answer}{trace}".encode()  # half an emoji is a ValueError too: no tokenizer takes it
    trace = trace and re.sub(r"</think>\s*<answer>", "</think> <answer>", trace)
    return Example(question, answer, trace)

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

def shortest_decimals(splits):
    """Splits whose 16 and 32 bit numbers are text: 2.3, not the 2.299999952316284 that it is in 64 bits."""
    import datasets
    for split, rows in splits.items():
        for name, kind in (getattr(rows, "features", None) or {}).items():
            if getattr(kind, "dtype", "") in ("float16", "float32"):
                rows = rows.cast_column(name, datasets.Value("string"))
        splits[split] = rows
    return splits

def read_examples(name, flag, ungradable=None):
    """Data of that name -> {split: list of Example}, without empty splits. Rows without question or answer
    are dropped and counted."""
    logging.disable(logging.CRITICAL)  # pages of retries; what they come to is told below, in one line
    try:
        splits = BUILT_IN[name]() if name in BUILT_IN else shortest_decimals(read_splits(name))
    except Exception as error:  # of many libraries, and each means that these data cannot be had
        cause = " ".join(str(error.__cause__ or error).split())[:200] or "it is empty"
        kinds, names = ", ".join(FILE_KINDS), ", ".join([*HUB_IDS, *BUILT_IN])
        raise ValueError(f"{flag} {name} cannot be read ({cause}): give a {kinds} file, a folder, a hub id "
                         f"or id:configuration, or one of {names}") from error
    finally:
        logging.disable(logging.NOTSET)
    examples, dropped = {}, []
    for split, records in splits.items():
        for row, record in enumerate(records, 1):
            try:
                example = parse_record(record)
                if kind := ungradable and ungradable(example.ground_truth):
                    raise ValueError(f"has an answer that nobody can be right about ({kind})")
                examples.setdefault(split, []).append(example)
            except ValueError as error:
                dropped.append((f"row {row} of {split}", error))
    if not examples:
        raise ValueError(f"{flag} {name}: {' '.join(map(str, dropped[0])) if dropped else 'it has no rows'}")
    if dropped:
        rows = sum(map(len, splits.values()))
        print(f"note: {flag} {name}: {len(dropped)} of {rows} rows dropped: no question, or no answer "
              f"to judge by (first: {dropped[0][0]})")
    return examples

def load_examples(dataset, eval_dataset, eval_size, mode, ungradable=None):
    """-> (training, held-out) lists of Example, with no question in both. ungradable(ground truth): why no
    answer can be right, or None; rows with such a one are dropped."""
    splits = read_examples(dataset, "--dataset", ungradable)
    train = splits.get("train") or next(iter(splits.values()))
    held_out = splits.get("test") or splits.get("validation")
    allowed = len(train) // 100  # MATH has two questions twice: few are left out, many are a wrong split
    if eval_dataset:
        splits, allowed = read_examples(eval_dataset, "--eval-dataset", ungradable), 0
        held_out = splits.get("test") or splits.get("validation") or next(iter(splits.values()))
    if not held_out or held_out is train:  # hold out rows by a fixed shuffle, the same for every --seed
        random.Random(0).shuffle(train)
        size = len(train) if mode == "eval" else min(eval_size, len(train) // 2)
        train, held_out, allowed = train[size:], train[:size], len(train)
    elif eval_size < len(held_out) and dataset not in tiny.TASKS:  # a sample, not the first rows of a file
        held_out = random.Random(0).sample(held_out, len(held_out))
    if mode != "eval":
        train = drop_leaked(train, held_out, allowed, f"--dataset {dataset}")
    if mode == "sft" and not all(example.trace for example in train):
        raise ValueError(f"--dataset {dataset} has rows without a solution, which --mode sft needs: add a "
                         "field trace, response or solution")
    return train, held_out

def question_key(text):
    """`text` without what makes no other question of it: case, blanks and Unicode forms."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())

def drop_leaked(train, held_out, allowed, name):
    """The training examples whose question is not held out. ValueError if more than `allowed` are."""
    held_out_keys = {question_key(example.question) for example in held_out}
    is_leaked = [question_key(example.question) in held_out_keys for example in train]
    clean = [example for example, leaked in zip(train, is_leaked) if not leaked]
    leaked = [example.question for example, leaked in zip(train, is_leaked) if leaked]
    if len(leaked) > allowed:
        hint = (" (12,000/500 splits of MATH contain about 4,500 of the 5,000 official validation problems: "
                "only the official 7,500/5,000 split is clean)") if len(leaked) > 4_000 else ""
        raise ValueError(f"{name} has {len(leaked)} questions of the evaluation data in it: drop them (the "
                         f"first: {leaked[0][:80]!r}){hint}")
    if not held_out or not clean:
        different = len({question_key(example.question) for example in train} | held_out_keys)
        raise ValueError(f"{name} has too few rows to train and to evaluate on: {different} questions")
    if leaked:
        print(f"note: {name}: {len(leaked)} of {len(train)} rows left out: their question is held out")
    return clean

def fingerprint(examples):
    """How many, and 16 hex digits that name their questions and ground truths in this order."""
    pairs = json.dumps([(example.question, example.ground_truth) for example in examples])
    return {"questions": len(examples), "sha256": hashlib.sha256(pairs.encode()).hexdigest()[:16]}

class Curriculum:
    """Which questions come next: that follows from the seed and what was asked before. saved: an old state().

    uniform: each once an epoch, in a new order every epoch; easy_to_hard: the same, by falling pass rate;
    prioritized: drawn with P proportional to 1 - success rate in training so far (Kimi k1.5).
    """
    def __init__(self, examples, kind, seed, saved=None):
        self.examples, self.kind, self.seed = examples, kind, seed
        self.index = {id(example): i for i, example in enumerate(examples)}
        self.asked, self.right, self.tried = 0, [0] * len(examples), [0] * len(examples)
        vars(self).update(copy.deepcopy(saved or {}))  # what the checkpoint says must not change with it

    def take(self, count):
        """The next `count` examples, as a list."""
        start, self.asked, size = self.asked, self.asked + count, len(self.examples)
        if self.kind == "prioritized":
            weights = [1 - right / max(1, tried) for right, tried in zip(self.right, self.tried)]
            weights = weights if any(weights) else [1] * size  # all solved: uniform
            return random.Random(f"{self.seed}-{start}").choices(self.examples, weights, k=count)
        orders = []
        for epoch in range(start // size, (self.asked - 1) // size + 1):
            order = random.Random(f"{self.seed}-{epoch}").sample(self.examples, size)
            if self.kind == "easy_to_hard":
                order.sort(key=lambda example: -example.pass_rate)
            orders += order
        return orders[start % size:][:count]

    def record(self, rows):
        """Counts the right ones among scored responses."""
        for row in rows:
            self.tried[self.index[id(row.example)]] += 1
            self.right[self.index[id(row.example)]] += row.reward["answer_reward"] == 1

    def state(self):
        return dict(asked=self.asked, right=self.right[:], tried=self.tried[:])
