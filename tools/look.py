"""One page of a run, or of several side by side: what ran, how it went, and what the model wrote.

  python tools/look.py runs/A [runs/B ...] --output look.html     opens in any browser, without a network

Links into it: #answers, #step-40, #step-40-row-3 (rows from 0, as in samples.jsonl), #run-2-step-40-row-3.
Needs jinja2; the page itself is look.html.j2."""
import argparse
import base64
import contextlib
import gzip
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import figures
import flags
from run import Run, mean, read_lines, stop_run, write_atomic

PAGE_SIZE = 5_000_000  # bytes, for each run; what would be over it has its texts cut, then steps left out
GRPO = {"baseline": "mean", "advantage_norm": "std", "loss": "grpo_clip", "loss_aggregation": "sequence"}

def is_number(value):
    return math.isfinite(math.nan if value is None else value)

def read_run(folder):
    """A run folder -> SimpleNamespace of what it holds; figures.read_run refuses a folder without a run."""
    records, args = figures.read_run(folder)[1], json.loads((folder / "args.json").read_text())["args"]
    run = SimpleNamespace(name=folder.resolve().name, records=records, args=args,
                          samples=read_lines(folder / "samples.jsonl"))
    run.evaluated = [record for record in records if "eval/accuracy" in record]
    last = run.evaluated[-1]["step"] if run.evaluated else 0
    names = {0: "evaluation-first.jsonl", last: "evaluation.jsonl"}  # at first they are the same
    run.answers = {step: rows for step, name in names.items() if (rows := read_lines(folder / name))}
    run.curves = {key: [(one["step"], one[key]) for one in records if is_number(one.get(key))]
                  for key in figures.CURVES}
    run.health = health(records, args, (folder / "result.json").exists())
    return run

# --- The head of the page ----------------------------------------------------------------------------------
def recipe(args):
    """The recipe in one line: which of the four choices differ from GRPO, and what other terms there are."""
    if args["mode"] != "grpo":
        return args["mode"].replace("_", " ")
    differ = [f"{key.replace('_', ' ')} {args[key]}" for key in GRPO if args[key] != GRPO[key]]
    told = {"no_std_norm", "cliprange", "cliprange_high", *GRPO}
    terms = [flag for (_, modes), some in flags.FLAGS.items() if "grpo" in modes for flag in some]
    more = [f"{flag.key.replace('_', ' ')} {args[flag.key]}" for flag in terms
            if flag.key not in told and args.get(flag.key) not in (None, flag.default)]
    steps = args["rollout_batch_size"] // args["train_batch_size"] * args["epochs_per_rollout_batch"]
    more += [f"{steps} optimizer steps a rollout"] * (steps > 1) + ["overlap"] * args["overlap"]
    return f"GRPO{' but for ' * bool(differ)}{', '.join(differ)}{', with ' * bool(more)}{', '.join(more)}"

def warnings_of(records):
    """What the run warned of, told again by run.py's own function -> lines."""
    watched, lines = SimpleNamespace(warned=set()), []
    records = [record | {"train/bad_steps": None} for record in records]  # they would stop this program
    for end in [*range(40, len(records), 1 + len(records) // 200), len(records)]:  # some 200 moments
        watched.records = records[:end]
        with contextlib.redirect_stdout(io.StringIO()) as told:
            Run.warn_of_collapse(watched)
        lines += [f"step {records[end - 1]['step']}: {line.removeprefix('warning: ').split('; see')[0]}"
                  for line in told.getvalue().splitlines()]
    return lines

def health(records, args, is_finished):
    """The health of a run in words -> [(is it a warning, words)]."""
    def known(key):
        return [record[key] for record in records if is_number(record.get(key))]

    lines = [(True, line) for line in warnings_of(records)] if records else []
    if known("train/tokens") and not lines:
        lines = [(False, "reward and length did not collapse, entropy did not explode")]
    accuracy = known("eval/accuracy") or [0]
    if max(accuracy) - accuracy[-1] > 0.1:  # two to four standard errors
        lines.append((True, f"held-out accuracy fell from {max(accuracy):.1%} to {accuracy[-1]:.1%}"))
    for key, limit, words in (("dead_groups", 0.5, "dead groups, which teach nothing"),
                              ("truncated", 0.1, f"cut off at {args['max_tokens']} tokens")):
        if values := known(f"train/{key}"):
            early, late = mean(values[:10]), mean(values[-10:])
            words += f": {early:.0%} in the first 10 steps, {late:.0%} in the last"
            lines.append((late > limit, words))
    if gaps := known("train/engine_gap"):
        words = f"engine gap: at most {max(gaps):.1g} nats a token, {args['max_engine_gap']} are allowed"
        lines.append((max(gaps) > args["max_engine_gap"] / 2, words))
    errors, bad = max(known("train/grader_errors"), default=0), sum(known("train/bad_steps"))
    lines += [(True, f"the grader failed {errors} times, which scores 0")] * (errors > 0)
    lines += [(True, f"{bad} steps were not applied: loss or gradient not finite")] * (bad > 0)
    step = f"at step {records[-1]['step'] if records else 0} of {args['max_steps']}"
    return [*lines, (not is_finished, f"{'' if is_finished else 'not '}finished, {step}")]

# --- The data of the page ----------------------------------------------------------------------------------
def questions_of(rows):
    """{prompt: the question in it}: without the lines that all prompts begin or end with."""
    prompts = {row["prompt"] for row in rows}
    start = os.path.commonprefix(list(prompts)).rfind("\n") + 1
    end = os.path.commonprefix([prompt[::-1] for prompt in prompts]).rfind("\n") + 1
    return {prompt: re.sub(r"^\s*(User: )?|<\|\w+\|>|\s*$", "", prompt[start:len(prompt) - end]) or prompt
            for prompt in prompts}

def page_row(row, questions, vocabulary, limit):
    """A record of samples.jsonl or evaluation.jsonl, as short as the page can read it."""
    def index(name, text):
        return vocabulary[name].setdefault(text, len(vocabulary[name]))

    tokens = row.get("tokens", [])[:limit // 4]
    same = len(os.path.commonprefix(["".join(tokens), row["response"]]))  # told by the tokens already
    rest = row["response"][same:]
    if len(rest) > limit:
        rest = f"{rest[:limit // 2]} [... left out ...] {rest[-limit // 2:]}"
    keys = "step group reward shaped answer_reward advantage length log_prob".split()
    short = {key: row[key] for key in keys if key in row} | {
        name: [round(1000 * value) if is_number(value) else 0 for value in row.get(key, [])[:len(tokens)]]
        for name, key in (("nats", "log_probs"), ("ratios", "ratios"))}
    return short | {"question": index("questions", questions[row["prompt"]]), "truth": row["ground_truth"],
                    "tokens": [index("pieces", token) for token in tokens], "same": same, "rest": rest,
                    "finish": row["finish_reason"]}

def page_data(runs, limit, every):
    """What the page shows by script, as base64 of gzip of JSON: no text of a model can end the element."""
    vocabulary, data = {"questions": {}, "pieces": {}}, {"runs": [], "sides": []}
    for number, run in enumerate(runs):
        questions = questions_of([*run.samples, *(row for rows in run.answers.values() for row in rows)])
        last = max([record["step"] for record in run.records], default=0)
        kept = [row for row in run.samples if row["step"] % every == 0 or row["step"] in (1, last)]
        samples = [page_row(row, questions, vocabulary, limit) for row in kept]
        data["runs"].append({"name": run.name, "curves": run.curves, "samples": samples})
        for step, rows in run.answers.items():
            data["sides"].append({"run": number, "step": step, "is_last": step == max(run.answers), "rows": [
                page_row(row, questions, vocabulary, limit) for row in rows]})
    data |= {name: list(texts) for name, texts in vocabulary.items()}
    text = json.dumps(json.loads(json.dumps(data), parse_constant=lambda name: None))  # browsers know no NaN
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode()

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--output", default="look.html", help="the page")
    given = parser.parse_args()
    try:
        import jinja2
    except ImportError:
        stop_run("tools/look.py needs jinja2: pip install jinja2")
    runs, source = [read_run(Path(folder)) for folder in given.runs], Path(__file__).with_suffix(".html.j2")
    template = jinja2.Environment(autoescape=True).from_string(source.read_text())
    for limit, every in ((10**6, 1), (4000, 1), (2000, 1), (1000, 1), (400, 1), (400, 5), (400, 40)):
        text = template.render(runs=runs, limit=limit, every=every, choices=GRPO, recipe=recipe,
                               data=page_data(runs, limit, every)).encode()
        if len(text) < PAGE_SIZE * len(runs):
            break
    write_atomic(Path(given.output), lambda temporary: temporary.write_bytes(text))
    print(f"{given.output}: {len(text) / 1e6:.2f} MB; open it in a browser")

if __name__ == "__main__":
    main()
