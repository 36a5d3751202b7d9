"""Data in their many forms -> examples to train on and held-out ones, with no question in both.

A file, a pattern of files, a folder, a hub id or a built-in task; the fields of a record tell its form.
ValueError, in one line, says what cannot be read, is missing, or is in both. Last, which question comes next.
"""
import copy
import csv
import functools
import glob
import gzip
import hashlib
import itertools
import json
import logging
import random
import re
import unicodedata
from collections import Counter
from pathlib import Path

import tiny
from forms import parse_record

FILE_KINDS = ("jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow")  # also with .gz, but the last two
SPLITS = {word: split for split, words in {
    "train": "train training", "test": "test testing eval evaluation",
    "validation": "validation valid val dev"}.items() for word in words.split()}
SUMS_QUESTION = "Add {} and {}. Answer with the number."
HUB_IDS = {"math": "DigitalLearningGmbH/MATH-lighteval", "gsm8k": "openai/gsm8k:main"}  # id:configuration

def sums_records():
    """Two numbers from 1 to 30 to add, for a model that chats, in a fixed order -> {"train": 700 records
    (dicts), "test": 200}. 3 + 5 and 5 + 3 stay in one split, since one gives the other away."""
    pairs = list(itertools.combinations_with_replacement(range(1, 31), 2))
    pairs = random.Random(1).sample(pairs, len(pairs))
    sums = dict.fromkeys(sum_ for a, b in pairs for sum_ in ((a, b), (b, a)))
    records = [dict(question=SUMS_QUESTION.format(a, b), ground_truth=str(a + b),
                    trace=f"{a} + {b} = {a + b}") for a, b in sums]
    return {"train": records[200:], "test": records[:200]}

BUILT_IN = {**{task: functools.partial(tiny.task_records, task) for task in tiny.TASKS}, "sums": sums_records}

def kind_of(path):
    """The kind of a data file by the end of its name, "csv" of DATA.CSV.gz, or ""."""
    found = re.search(rf"\.({'|'.join(FILE_KINDS)})(\.gz)?$", str(path).lower())
    return found[1] if found else ""

def split_of(*parts):
    """The split that the first of these names speaks of as a word: train, test, validation, or None."""
    words = [word for part in parts for word in re.findall("[a-z]+", str(part).lower())]
    return next((SPLITS[word] for word in words if word in SPLITS), None)

def read_file(path):
    """A data file -> {split: records}; a table is split "train"."""
    kind, packed = kind_of(path), str(path).lower().endswith(".gz")
    if kind in ("parquet", "arrow"):
        import datasets
        from pyarrow.parquet import ParquetFile
        rows = (datasets.Dataset(ParquetFile(path).read()) if kind == "parquet"
                else datasets.load_dataset(kind, data_files=str(path), split="train"))
        return {"train": shortest_decimals(rows)}
    with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        if kind not in ("csv", "tsv"):
            return read_json(file.read(), kind)
        csv.field_size_limit(2**31 - 1)
        header = file.readline()
        file.seek(0)
        return {"train": list(csv.DictReader(file, delimiter=max(",;\t", key=header.count)))}

def read_json(text, kind):
    """Records one after the other, in a list, or, in a `kind` json, in a dict -> {split: records (dicts)}.
    `datasets` would read "1.50" as 1.5 in a mixed column."""
    values, blank, decoder = [], re.compile(r"\s*"), json.JSONDecoder()
    place = blank.match(text).end()
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        values.append(value)
        place = blank.match(text, place).end()
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    if len(values) == 1 and isinstance(values[0], dict) and kind == "json":
        return read_dict(values[0])
    return {"train": [record if isinstance(record, dict) else {} for record in values]}

def is_record(value):
    try:
        return bool(parse_record(value))
    except (ValueError, AttributeError):
        return False

def read_dict(whole):
    """One record, or a dict of splits, of records by an id, or of columns -> {split: records}."""
    values = list(whole.values())
    lists = {name: rows for name, rows in whole.items() if isinstance(rows, list)}
    has_dicts = all(isinstance(value, dict) for value in values)
    if has_dicts and values and is_record(values[0]):
        return {"train": values}
    if is_record(whole) or not values:
        return {"train": [whole]}
    if lists and all(isinstance(row, dict) for rows in lists.values() for row in rows):
        return lists
    if has_dicts:
        values = [list(column.values()) for column in values]  # pandas writes columns with row numbers
    if all(isinstance(column, list) and len(column) == len(values[0]) for column in values):
        return {"train": [dict(zip(whole, row)) for row in zip(*values)]}
    return {"train": [whole]}

def read_files(paths, folder):
    """Data files -> {split: records}, file by file, so that their columns may differ. In a folder, the name
    of a file or of a folder around it tells its split."""
    splits = {}
    for path in paths:
        own = [path.stem, *reversed(path.parent.relative_to(folder).parts)] if folder else []
        for split, rows in read_file(path).items():
            splits.setdefault(split_of(*own, split) or "train", []).append(rows)
    return {split: tables[0] if len(tables) == 1 else list(itertools.chain(*tables))
            for split, tables in splits.items()}

def read_splits(name):
    """A data file, a pattern of files, a folder, a hub id or a key of HUB_IDS -> {split: records}."""
    import datasets
    import huggingface_hub
    datasets.disable_progress_bars()
    path = Path(name)
    if name not in HUB_IDS and (path.is_file() or kind_of(name)):
        files = [path] if path.is_file() else sorted(map(Path, glob.glob(name, recursive=True)))
        if not files or not kind_of(files[0]):
            raise FileNotFoundError("its name has no known end" if files else "no such file")
        return read_files(files, None)
    if name not in HUB_IDS and path.is_dir():
        if (path / "state.json").exists():  # one Dataset, saved by save_to_disk
            return {"train": shortest_decimals(datasets.load_from_disk(name))}
        if (path / "dataset_dict.json").exists():
            return own_splits(datasets.load_from_disk(name))
        others = re.compile(r"(^|/)([._]|(dataset_infos?|dataset_dict|state)\.json$)")  # hidden or about data
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and kind_of(file)
                 and not others.search(file.relative_to(path).as_posix())]
        if not files:
            raise FileNotFoundError("the folder holds no data file")
        return read_files(files, path)
    hub_id, _, config = HUB_IDS.get(name, name).partition(":")
    try:
        huggingface_hub.HfApi().dataset_info(hub_id, timeout=10)  # load_dataset would ask 6 times, for 23 s
    except Exception as error:  # where no hub answers, data of an earlier run can still be in the cache
        datasets.config.HF_HUB_OFFLINE = not isinstance(error, huggingface_hub.errors.HfHubHTTPError)
    return own_splits(datasets.load_dataset(hub_id, config or None))

def own_splits(splits):
    """A DatasetDict -> {split: rows}: dev is validation, test_sft is test if there is no test."""
    exact = {name: rows for name, rows in splits.items() if name in SPLITS.values()}
    others = {split_of(name) or name: rows for name, rows in reversed(splits.items())}
    return {name: shortest_decimals(rows) for name, rows in (others | exact).items()}

def shortest_decimals(rows):
    """Rows whose 16 and 32 bit numbers are text: 2.3, not the 2.299999952316284 that it is in 64 bits."""
    import datasets
    for name, kind in (getattr(rows, "features", None) or {}).items():
        if getattr(kind, "dtype", "") in ("float16", "float32"):
            rows = rows.cast_column(name, datasets.Value("string"))
    return rows

def read_examples(name, flag, ungradable=None):
    """Data of that name -> {split: list of Example}, without empty splits. Rows without question or answer
    are dropped and counted."""
    logging.disable(logging.CRITICAL)  # pages of retries; what they come to is told below, in one line
    try:
        splits = BUILT_IN[name]() if name in BUILT_IN else read_splits(name)
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
        counts = Counter(question_key(example.question) for example in train + held_out)
        (question, times), *_ = counts.most_common(1) or [("", 0)]
        again = f" in {counts.total()} rows; {question[:80]!r} stands in {times} of them" if times > 1 else ""
        raise ValueError(f"{name} has too few rows to train and to evaluate on: {len(counts)} different "
                         f"questions{again}: add others")
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
