"""Curves of runs: one panel a metric, one line a setting.

  python figures.py runs/A runs/B --output curves.png
"""
import argparse
import json
from pathlib import Path

from run import mean, read_lines, stop_run, write_atomic

CURVES = ["eval/accuracy", "train/reward", "train/length", "train/dead_groups", "train/entropy",
          "train/grad_norm"]

def read_run(folder):
    """-> (flags without those that no setting consists of, records) of a run folder."""
    if not (folder / "metrics.jsonl").is_file():
        stop_run(f"{folder} holds no run: give folders with args.json and metrics.jsonl")
    records = read_lines(folder / "metrics.jsonl", all_numbers=True)
    try:
        saved = json.loads((folder / "args.json").read_text())["args"]
        return {key: saved[key] for key in saved.keys() - {"seed", "run_dir", "resume", "fitted"}}, records
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        stop_run(f"{folder}: args.json is damaged ({repr(error)[:80]}): leave it out")

def distinguishing_flags(settings):
    """The flags that tell the settings apart, without those that only repeat another one."""
    differ = {}
    for key in sorted(set().union(*settings)):  # a run by tools/trl_grpo.py has a key more
        values = [str(flags.get(key)) for flags in settings]
        differ.setdefault(tuple(map(values.index, values)), key)
    return [key for pattern, key in differ.items() if any(pattern)]

def draw_curves(run_dirs, metrics, path):
    """One panel a metric, one line a setting: runs that differ in the seed only are drawn as their mean, with
    a band from the least to the most. The label says what distinguishes a setting from the others."""
    from matplotlib.figure import Figure
    runs = [read_run(Path(folder)) for folder in run_dirs]
    known = {key for _, records in runs for record in records for key in record} | set(CURVES)
    if unknown := sorted(set(metrics) - known):
        stop_run(f"--metrics: no run has {', '.join(unknown)}: give keys of metrics.jsonl")
    settings = [flags for i, (flags, _) in enumerate(runs) if flags not in [other for other, _ in runs[:i]]]
    differ, rows = distinguishing_flags(settings), -(-len(metrics) // 2)
    figure = Figure(figsize=(10, 3.2 * rows), layout="constrained")
    for axis, metric in zip(figure.subplots(rows, min(2, len(metrics)), squeeze=False).flat, metrics):
        for flags in settings:
            seeds = [{record["step"]: record[metric] for record in records if record.get(metric) is not None}
                     for other, records in runs if other == flags]
            steps = sorted(set.intersection(*map(set, seeds)))
            values = [[one[step] for one in seeds] for step in steps]
            label = ", ".join(f"{key} {flags.get(key)}" for key in differ)
            label += f" ({len(seeds)} seeds)" if len(seeds) > 1 else ""
            line, = axis.plot(steps, list(map(mean, values)), label=label)
            axis.fill_between(steps, list(map(min, values)), list(map(max, values)), alpha=0.2,
                              color=line.get_color())
        axis.set(title=metric, xlabel="step")
    if differ:
        lines = axis.get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=2, fontsize="small")
    kind, known = Path(path).suffix[1:] or "png", figure.canvas.get_supported_filetypes()
    if kind not in known:
        stop_run(f"{path}: give a name that ends in one of .{', .'.join(sorted(known))}")
    write_atomic(Path(path), lambda temporary: figure.savefig(temporary, dpi=100, format=kind))

def main():
    about = "Draws runs on shared axes; runs that differ in the seed only become one line with a band."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--metrics", nargs="+", default=CURVES, help="one panel each: keys of metrics.jsonl")
    parser.add_argument("--output", default="curves.png", help="the figure, .png, .pdf or .svg")
    given = parser.parse_args()
    draw_curves(given.runs, given.metrics, given.output)

if __name__ == "__main__":
    main()
