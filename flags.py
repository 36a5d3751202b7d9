"""The command line: what can be set, its defaults, and what does not fit together."""
import argparse
import json
import sys
from collections import ChainMap
from importlib.util import find_spec
from pathlib import Path

import chat
from run import stop_run

PRESETS = {  # defaults that depend on the model
    "tiny": dict(dataset="arithmetic", lr=5e-4, max_steps=100, max_tokens=96, eval_size=512, eval_every=10),
    "other": dict(dataset="math", lr=3e-5, max_steps=200, max_tokens=1024, eval_size=1024, eval_every=10)}
DATA_PRESETS = {  # defaults that depend on the data, before those of the model
    "sort": dict(reward_fn="sort_positions"),
    "sums": dict(prompt="chat", reward_fn="last_number", max_tokens=24, rollout_batch_size=128, lr=2e-5,
                 lr_decay=True, max_steps=40, eval_size=200, temperature=0.8, eval_temperature=1.0)}
CUDA_MODEL = "Qwen/Qwen2.5-Math-1.5B"  # the default model of a machine with CUDA; without it, tiny
LEADERBOARD = dict(prompt="r1_zero", reward_fn="r1_zero", temperature=1.0, max_tokens=1024, max_hours=4.0,
                   eval_size=sys.maxsize)  # the protocol of the CS336 leaderboard
MAY_CHANGE = {"max_steps", "max_hours", "eval_every", "sampler", "sampler_batch_size", "microbatch_tokens",
              "gradient_checkpointing", "compile", "keep", "report_to"}  # under --resume
# Where they are not typed the machine decides, and another one again when the run is resumed there.
FITTED = {"microbatch_tokens", "gradient_checkpointing", "gpu_memory_utilization", "max_engine_gap"}
# What an evaluation of a run's model takes over from that run, unless it is asked on other data.
AS_IN_THE_RUN = {"prompt", "stop", "reward_fn", "temperature", "eval_temperature", "min_tokens",
                 "eval_dataset", "seed"}

class Flag:
    """kind: a type, a list of choices, or "on" for a switch. default None: derived from other flags. needs:
    texts "--other-flag value|value: why", without which the flag would do nothing or something else."""
    def __init__(self, name, kind, default, about, *needs):
        self.name, self.kind, self.default, self.about, self.needs = name, kind, default, about, needs
        self.key = name[2:].replace("-", "_")

FLAGS = {  # (stage, modes that use it; "" is all): its flags. {names} are filled in from the table of losses
    ("run", ""): [
        Flag("--mode", ["eval", "sft", "expert_iteration", "grpo"], "grpo", "what to do"),
        Flag("--model", str, None, f"folder, hub id or `tiny` (default: {CUDA_MODEL} with CUDA, else tiny)"),
        Flag("--run-dir", str, None, "folder of logs, curves, checkpoint, model (default: new, in runs/)"),
        Flag("--resume", "on", False, "go on from the checkpoint in --run-dir, with its flags"),
        Flag("--seed", int, 0, "of sampling and of the order of the data"),
        Flag("--max-steps", int, None, "rollout batches (sft: batches of solutions) to train on"),
        Flag("--max-hours", float, None, "end within this many hours, the final evaluation included"),
        Flag("--keep", int, 1, "checkpoints to keep, the newest ones"),
        Flag("--leaderboard", "on", False, f"the protocol of the CS336 leaderboard: {LEADERBOARD}"),
        Flag("--report-to", ["wandb", "trackio"], None, "send the metrics there too")],
    ("data", ""): [
        Flag("--dataset", str, None,
             "arithmetic, sort, sums, math, gsm8k, file, folder or hub id[:configuration]"),
        Flag("--eval-dataset", str, None, "held-out data (default: a test split, else --eval-size rows)"),
        Flag("--prompt", str, "r1_zero", "{prompts}, or a file with {question} in it"),
        Flag("--stop", str, None, "text that ends a response, such as '\\n' (default: by prompt)"),
        Flag("--reward-fn", str, None, "name in rewards.REWARDS or file:function (default: by prompt)")],
    ("questions", "expert_iteration|grpo"): [
        Flag("--curriculum", ["uniform", "easy_to_hard", "prioritized"], "uniform",
             "next: any; by pass rate; or drawn by 1 - success rate (Kimi k1.5)"),
        Flag("--difficulty-filter", int, None, "drop a question if none or all of n first answers are right"),
        Flag("--guessable-filter", int, None, "drop it if one of n thoughtless answers is right (Kimi k1.5)",
             "--prompt r1_zero: other prompts have no </think>")],
    ("rollout", ""): [
        Flag("--sampler", ["auto", "vllm", "hf"], "auto", "auto: vllm if installed, with CUDA; else hf"),
        Flag("--rollout-batch-size", int, 256, "responses a step, P * group_size"),
        Flag("--group-size", int, 8, "responses to one question, G"),
        Flag("--temperature", float, 1.0, "of sampling and training"),
        Flag("--min-tokens", int, 4, "no end of a response before this many tokens"),
        Flag("--max-tokens", int, None, "generation budget of a response, in tokens"),
        Flag("--sampler-batch-size", int, 256, "hf: rows that are sampled at once"),
        Flag("--max-model-len", int, None, "vllm: longest prompt + response (default: the model's context)"),
        Flag("--gpu-memory-utilization", float, None,
             "vllm: share of its GPU (default: 0.5 if shared, or 0.85)"),
        Flag("--overlap", "on", False, "roll out step k + 1 while step k trains: one step off-policy",
             "--mode grpo: other modes have no ratio to the policy that sampled",
             "--loss {ratio}: without that ratio nothing corrects for it"),
        Flag("--max-engine-gap", float, None,
             "stop if sampler and policy differ by more nats a token (default: 0.1 with CUDA, else 0.0001)")],
    ("advantage", "grpo"): [
        Flag("--dynamic-sampling", int, 0, "DAPO: up to n more rollouts a step in the place of dead groups",
             "--baseline mean|loo|max: without a baseline equal rewards teach too"),
        Flag("--length-reward", float, 0.0, "weight of Kimi k1.5's length reward (arXiv 2501.12599)"),
        Flag("--length-reward-after", int, 0, "steps without the length reward, its warm-up",
             "--length-reward: it delays that reward"),
        Flag("--overlong-cache", int, 0, "DAPO's soft punishment over the last so many tokens of the budget"),
        Flag("--language-reward", float, 0.0, "weight of R1's language consistency: share of English words"),
        Flag("--truncated", ["score", "zero", "mask"], "score", "score them, reward 0, or leave them out"),
        Flag("--baseline", ["mean", "loo", "none", "max"], "mean",
             "loo: mean of the others, RLOO (2402.14740); none: raw reward; max: only the best of the group"),
        Flag("--advantage-norm", ["std", "batch-std", "mean", "none"], None,
             "divide by the std of the group, GRPO, or of the batch, or by the mean reward, MaxRL 2602.02710 "
             "(default: std with --baseline mean, but for kimi)",
             "--baseline mean: with another baseline the division would undo its point",
             "--loss {normalised}: kimi compares with the mean only"),
        Flag("--no-std-norm", "on", False, "the same as --advantage-norm none, Dr. GRPO (2503.20783)",
             "--advantage-norm none: it is its short name")],
    ("loss", "grpo"): [
        Flag("--loss", "losses", None, "{losses} (default: grpo_clip in --mode grpo, else pg)"),
        Flag("--cliprange", float, None, "eps of the clipped ratio (default: 0.2, with gspo 0.0003)",
             "--loss {clips_low}: no other loss clips on both sides"),
        Flag("--cliprange-high", float, None, "upper eps, DAPO 2503.14476; cispo: TRL's epsilon_high - 1",
             "--loss {clips}: no other loss clips a ratio"),
        Flag("--tau", float, 0.1, "kimi: weight of the squared log ratio; not in the paper",
             "--loss kimi: it weighs Kimi's squared log ratio"),
        Flag("--reset-optimizer", "on", False, "Kimi k1.5: forget Adam's moments before each rollout batch"),
        Flag("--tis-cap", float, None, "truncated importance sampling: weight min(pi_old / pi_sampler, cap)"),
        Flag("--kl-coef", float, 0.0, "weight of the KL to a frozen copy of the policy"),
        Flag("--kl", ["k1", "k2", "k3"], "k3", "its estimator, each with the gradient of KL(policy || copy)",
             "--kl-coef: it names the estimator of that KL"),
        Flag("--kl-ref-every", int, None, "steps between renewals of the copy (default: never)",
             "--kl-coef: it renews the copy of that KL"),
        Flag("--entropy-coef", float, 0.0, "weight of an entropy bonus")],
    ("step", ""): [
        Flag("--loss-aggregation", ["sequence", "token", "constant"], None,
             "mean of rows' means, GRPO; of tokens, DAPO; sum / (rows * max_tokens), Dr. GRPO",
             "--loss {normalised}: kimi sums without a normaliser"),
        Flag("--no-length-norm", "on", False, "the same as --loss-aggregation constant, Dr. GRPO",
             "--loss-aggregation constant: it is its short name"),
        Flag("--train-batch-size", int, None, "rows of one optimizer step (default: --rollout-batch-size)"),
        Flag("--epochs-per-rollout-batch", int, 1, "passes over each rollout batch"),
        Flag("--microbatch-tokens", int, None,
             "tokens that a pass reads: memory, not the result (default: by the GPU; else 512, tiny 4096)"),
        Flag("--gradient-checkpointing", "on", False,
             "compute layers twice: less memory, slower (on where a GPU needs it)"),
        Flag("--compile", "on", False, "torch.compile the update: up to 1.4 times as fast, after a minute"),
        Flag("--lora-rank", int, None, "train adapters of this rank only, LoRA 2106.09685: less memory"),
        Flag("--lr", float, None, "learning rate of AdamW; with --lora-rank ten times the default"),
        Flag("--warmup-steps", int, 0, "steps over which the learning rate rises"),
        Flag("--lr-decay", "on", False, "let it fall linearly until --max-steps (default: constant)"),
        Flag("--max-grad-norm", float, 1.0, "clip the norm of the gradient to this")],
    ("evaluation", ""): [
        Flag("--eval-every", int, None, "steps between evaluations"),
        Flag("--eval-size", int, None, "held-out questions to evaluate on"),
        Flag("--eval-samples", int, 1, "answers to each of them: their mean, pass@k, maj@n"),
        Flag("--eval-temperature", float, None, "of evaluation; 0: greedy (default: --temperature)"),
        Flag("--thinking-budget", int, None, "tokens of thought in an evaluation, then it has to answer",
             "--prompt r1_zero: other prompts have no </think>"),
        Flag("--wait", int, 0, "s1 (2501.19393): so many ends of thought are replaced by ` wait`",
             "--thinking-budget: else a thought could go on without end")]}

def all_flags():
    return [flag for flags in FLAGS.values() for flag in flags]

def complete_table(losses, prompts):
    """FLAGS with what the tables of losses and prompts say: their names, and which losses a flag fits."""
    fits = {"ratio": lambda loss: loss.has_ratio, "clips": lambda loss: loss.clips,
            "clips_low": lambda loss: "low" in loss.clips, "normalised": lambda loss: loss.is_normalised}
    names = {key: "|".join(name for name, loss in losses.items() if fit(loss)) for key, fit in fits.items()}
    about = "; ".join(f"{name}: {loss.about}" for name, loss in losses.items())
    for flag in all_flags():
        flag.kind = list(losses) if flag.kind == "losses" else flag.kind
        flag.about = flag.about.replace("{losses}", about).replace("{prompts}", ", ".join(prompts))
        flag.needs = [need.format(**names) for need in flag.needs]
    return FLAGS

def parse(description, argv=None):
    """-> the flags that were typed: {key: value}."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    parser.error = lambda message: stop_run(f"{message}; see --help")
    for (stage, _), flags in FLAGS.items():
        group = parser.add_argument_group(stage)
        for flag in flags:
            about = flag.about
            preset = [str(values[flag.key]) for values in PRESETS.values() if flag.key in values]
            if preset or flag.default:
                about += f" (default: {' for tiny, else '.join(preset) or flag.default})"
            how = {"choices": flag.kind} if isinstance(flag.kind, list) else {"type": flag.kind}
            group.add_argument(flag.name, help=about.replace("%", "%%"),
                               **({"action": "store_true"} if flag.kind == "on" else how))
    return vars(parser.parse_args(argv))

def saved_flags(given):
    """The flags of the run that is resumed, where only MAY_CHANGE may differ; or, for the model of a run,
    those that are taken over."""
    resume = given.get("resume")
    path = Path(given.get("run_dir", "?") if resume else given.get("model", "?") + "/..", "args.json")
    if not path.is_file():
        return stop_run(f"--resume needs --run-dir with a run, and {path} is not there") if resume else {}
    known = {flag.key for flag in all_flags()} - {"resume", "run_dir"}
    try:
        old = json.loads(path.read_text())["args"]
        old = {key: old[key] for key in old.keys() & known - set(old.get("fitted", []))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # cut short, or of another program
        return stop_run(f"--resume: {path} holds no flags ({repr(error)[:80]})") if resume else {}
    for key in sorted(old.keys() & given.keys() - MAY_CHANGE) if resume else []:
        if given[key] != old[key]:
            stop_run(f"--resume: {key} was {old[key]} in the saved run: leave the flag out or start anew")
    taken_over = PRESETS["tiny"].keys() | (AS_IN_THE_RUN if "dataset" not in given else set())
    return {key: value for key, value in old.items() if resume or key in taken_over}

def find_prompt(prompts, name):
    """--prompt -> Prompt: a row of the table `prompts`, or a file."""
    try:
        return prompts.get(name) or chat.prompt_from_file(name)
    except ValueError as error:
        stop_run(f"{error}, or one of {', '.join(prompts)}")

def configure(losses, prompts, given, has_cuda):
    """Flags as typed -> all flags, a Namespace: given > saved > leaderboard > preset > derived."""
    saved = saved_flags(given)
    model = given.get("model") or saved.get("model") or (CUDA_MODEL if has_cuda else "tiny")
    defaults = {flag.key: flag.default for flag in all_flags()} | {"model": model}
    preset = PRESETS["tiny" if model == "tiny" else "other"]
    data = given.get("dataset") or saved.get("dataset") or preset["dataset"]
    known = ChainMap(given, saved, LEADERBOARD if given.get("leaderboard") else {},
                     DATA_PRESETS.get(data, {}), preset, defaults)
    prompt = find_prompt(prompts, known["prompt"])
    loss = known["loss"] or ("pg" if known["mode"] in ("sft", "expert_iteration") else "grpo_clip")
    row, cliprange = losses[loss], known["cliprange"] or losses[loss].cliprange
    high = cliprange if known["cliprange"] else row.cliprange_high or cliprange
    has_std = known["baseline"] == "mean" and not known["no_std_norm"] and row.is_normalised
    derived = dict(
        loss=loss, cliprange=cliprange, cliprange_high=high,
        advantage_norm="std" if has_std else "none", train_batch_size=known["rollout_batch_size"],
        loss_aggregation="constant" if known["no_length_norm"] else row.aggregation,
        max_engine_gap=0.1 if has_cuda else 1e-4,
        microbatch_tokens=None if has_cuda else 4096 if model == "tiny" else 512,  # by memory with CUDA
        stop=prompt.stop, reward_fn=prompt.reward_fn, eval_temperature=known["temperature"])
    args = argparse.Namespace(**{
        key: known[key] if known[key] is not None else derived.get(key) for key in defaults})
    if args.lora_rank and not {"lr"} & (given.keys() | saved.keys()):
        args.lr *= 10  # the rate that suits adapters, of any rank ("LoRA Without Regret", Schulman 2025)
    refuse_misfits(given, args)
    refuse_sizes(args)
    if args.leaderboard:
        print("leaderboard protocol:", ", ".join(f"{key} {getattr(args, key)}" for key in LEADERBOARD))
    args.max_steps = 0 if args.mode == "eval" else args.max_steps
    args.fitted = sorted(FITTED - given.keys() - saved.keys())
    return args

def refuse_sizes(args):
    """Stops, with one line, on sizes that do not fit together."""
    size, group, budget = args.rollout_batch_size, args.group_size, args.max_tokens
    for is_bad, message in [
        (group == 1 and args.mode == "grpo" and (args.baseline != "none" or args.length_reward),
         "--group-size 1 leaves no group to compare with: take 2 or more (or --baseline none)"),
        (args.curriculum == "easy_to_hard" and not args.difficulty_filter,
         "--curriculum easy_to_hard needs pass rates: add --difficulty-filter 8"),
        ((args.model.count("/") > 1 or args.model.startswith(".")) and not Path(args.model).exists(),
         f"--model {args.model} is no folder"),
        (size % group, f"--group-size {group} does not divide --rollout-batch-size {size}"),
        (size % args.train_batch_size, f"--train-batch-size {args.train_batch_size} does not divide "
         f"--rollout-batch-size {size}: choose a divisor, so that each row counts"),
        (max(args.thinking_budget or 0, args.overlong_cache) >= budget,
         f"--thinking-budget and --overlong-cache have to be under --max-tokens {budget}: lower them"),
        (args.overlap and args.tis_cap is not None,
         "--tis-cap would do nothing with --overlap, whose ratio is to the sampler already: leave one out"),
        (args.model == "tiny" and args.prompt == "chat",
         "--prompt chat needs a --model that can chat, such as HuggingFaceTB/SmolLM2-135M-Instruct"),
        (args.reward_fn is None, f"--prompt {args.prompt} asks for neither </answer> nor \\boxed: add "
         "--reward-fn, and --stop where a text ends the answer"),
        (args.eval_samples > 1 and args.eval_temperature == 0, "--eval-samples would be equal at "
         "--eval-temperature 0: leave one out"),
        (args.eval_samples > 1 and args.thinking_budget,
         "--eval-samples and --thinking-budget do not go together: leave one out"),
        (args.lora_rank and args.kl_ref_every, "--kl-ref-every renews a copy of the policy, and with "
         "--lora-rank the model without adapters takes its place: leave one out"),
        (args.lora_rank and not find_spec("peft"), "--lora-rank: pip install peft"),
        (args.min_tokens > budget, f"--min-tokens is over --max-tokens {budget}: lower it")]:
        if is_bad:
            stop_run(message)

def refuse_misfits(given, args):
    """Stops, with one line, where a number is out of range or a flag that was typed needs another one."""
    for modes, flag in ((modes, flag) for (_, modes), flags in FLAGS.items() for flag in flags):
        value = getattr(args, flag.key)
        may_be_0 = flag.default == 0 or flag.key in ("min_tokens", "eval_temperature")
        if type(value) in (int, float) and not (value > 0 or value == 0 and may_be_0):
            stop_run(f"{flag.name} must be above 0, not {value}")
        uses = [f"--mode {modes}: other modes do nothing with it"] if modes and args.mode != "eval" else []
        for need in [*uses, *flag.needs] if flag.key in given and value and not args.resume else []:
            condition, why = need.split(": ", 1)
            other, _, values = condition.partition(" ")
            has = getattr(args, other[2:].replace("-", "_"))
            if not (has in values.split("|") if values else has):
                stop_run(f"{flag.name} needs {other} {values.replace('|', ' or ') or 'above 0'}: {why}")
