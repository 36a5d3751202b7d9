"""How fast is the update? Times `update` of nano_grpo.py alone, on random rows and random weights.

  python tools/bench.py --rollout-batch-size 32 --loss gspo --shape hidden_size=128 num_hidden_layers=4

A line of the table is one optimizer step on once, twice or four times --rollout-batch-size rows.
--against-trl times an optimizer step and a rollout here and in TRL, in turns, each in a process of its own.
"""
import argparse
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import nano_grpo as ng  # before torch: it sets the number of threads
import torch
import transformers

from tools import trl_flags

# The flags of nano_grpo.py that change what is timed. Any other would be ignored, and is refused.
USED = {"model", "rollout_batch_size", "group_size", "temperature", "max_tokens"} | {
    flag.key for (stage, _), flags in ng.FLAGS.items() for flag in flags if stage in ("loss", "step")}
USED -= {"train_batch_size", "epochs_per_rollout_batch"}  # one optimizer step takes all rows

def parse(argv=None):
    """-> (shape, row_lengths and repeats; the flags of nano_grpo.py), a Namespace each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="flags of nano_grpo.py that act here: " + ", ".join(sorted(USED)).replace("_", "-"))
    parser.error = lambda message: ng.stop_run(f"{message}; see --help")
    parser.add_argument("--shape", nargs="+", default=[], help="other values of config.json: key=value ...")
    parser.add_argument("--row-lengths", nargs=2, type=int, default=[32, 512], help="tokens (default 32 512)")
    parser.add_argument("--repeats", type=int, default=3, help="steps to take the median of (default: 3)")
    parser.add_argument("--against-trl", action="store_true", help="compare with TRL, in turns")
    parser.add_argument("--rollout-tokens", type=int, default=32, help="of a response, in that comparison")
    parser.add_argument("--side", choices=["here", "trl"], help=argparse.SUPPRESS)
    own, others = parser.parse_known_args(argv)
    given = ng.parse_args(others)
    for key in sorted(given.keys() - USED):
        ng.stop_run(f"--{key.replace('_', '-')} does nothing in tools/bench.py: leave it out")
    if own.repeats < 1 or not 4 <= own.row_lengths[0] <= own.row_lengths[1]:
        ng.stop_run("--repeats must be above 0, --row-lengths two numbers from 4 on, the shorter one first")
    args = ng.configure(given, torch.cuda.is_available())
    args.microbatch_tokens = args.microbatch_tokens or 8192  # on a GPU; a run fits it to the card
    if own.against_trl:
        trl_flags.refuse(given, args, 1)
        if args.group_size % 2:
            ng.stop_run("--against-trl needs an even --group-size: half of each group has the advantage -1")
    return own, args

def random_model(model, shape):
    """The architecture of `model` (its config.json) with the changes of `shape`, random weights, float32."""
    changes = dict(pair.split("=", 1) for pair in shape if "=" in pair)
    try:
        if model == "tiny":
            size = len(ng.tiny.tiny_tokenizer(ng.R1_ZERO_PROMPT))
            config = transformers.Qwen2Config(vocab_size=size, **ng.tiny.CONFIG)
        else:
            config = transformers.AutoConfig.from_pretrained(model)
        unknown = [pair for pair in shape if pair.split("=")[0] not in changes.keys() & config.to_dict()]
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
        ng.stop_run(f"--model {model} --shape {' '.join(shape)}: {cause}; "
                    "give a model's name or folder, and keys of its config.json such as hidden_size=128")

def with_flags(policy, args):
    """What nano_grpo.py does to a policy that it has loaded."""
    policy = policy.to(ng.policy_device()).eval()
    policy.is_compiled = args.compile
    if args.gradient_checkpointing:
        ng.checkpoint_layers(policy)
    if args.lora_rank:
        ng.add_adapters(policy, args.lora_rank, args.seed)
    return policy

def ragged_rows(count, vocab_size, group_size, row_lengths):
    """Random rows of `row_lengths` tokens, in groups with a common prompt; no advantage is 0."""
    rng, rows, (low, high) = random.Random(0), [], row_lengths
    for i in range(count):
        if i % group_size == 0:
            prompt = rng.choices(range(vocab_size), k=rng.randint(low // 2, max(low // 2, high // 4)))
            example = ng.Example("", "", prompt_ids=prompt)
        response = rng.choices(range(vocab_size), k=max(low // 4, rng.randint(low, high) - len(prompt)))
        rows.append(ng.Row(example, response, advantage=rng.choice([-1.0, 1.0]),
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

def times(action, repeats, device):
    """Seconds of each of `repeats` calls of action(), the shortest first; one more call warms up before."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[1:])

def peak_memory(device):
    """Bytes that this process took at most: on the GPU since it was reset, else since the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def matmul_rate(repeats, device):
    """Floating-point operations a second of a large matrix product, the most that the machine gives now."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (4096, torch.float32)
    square = torch.randn(size, size, dtype=dtype, device=device)
    return 2 * size**3 / statistics.median(times(lambda: square @ square, repeats, device))

def bench(policy, step, num_rows, group_size, row_lengths, repeats):
    """Times step(rows) for once, twice and four times num_rows rows; prints a table."""
    device = policy.device
    print(f"{policy.num_parameters():,} parameters, {device}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}, products in {'bfloat16' if device.type == 'cuda' else 'float32'}\n\n"
          "| rows | tokens | seconds (range) | rows/s | tokens/s | TFLOP/s | of matmul's | peak memory, GB |")
    print("|---" * 8 + "|")
    for count in (num_rows, 2 * num_rows, 4 * num_rows):
        rows = ragged_rows(count, policy.config.vocab_size, group_size, row_lengths)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        rate = matmul_rate(repeats, device)  # in the same minute: the speed of a shared machine changes
        seconds = times(lambda: step(rows), repeats, device)
        middle, tokens, flops = statistics.median(seconds), sum(map(len, rows)), step_flops(policy, rows)
        print(f"| {count} | {tokens:,} | {middle:.3g} ({seconds[0]:.3g} to {seconds[-1]:.3g}) | "
              f"{count / middle:.3g} | {tokens / middle:,.0f} | {flops / middle / 1e12:.3g} | "
              f"{flops / middle / rate:.0%} of {rate / 1e12:.3g} | {peak_memory(device) / 1e9:.2f} |")

# --- Against TRL -------------------------------------------------------------------------------------------
def sides(argv, repeats):
    """Starts both sides in turns, and prints a line of the table for each."""
    print("| | seconds (range) | peak memory, GB | loss | gradient norms of two steps | rollout, tokens/s |")
    print("|---" * 6 + "|")
    found = {"here": [], "trl": []}
    for side in list(found) * repeats:
        program = [sys.executable, __file__, *argv, "--side", side]
        done = subprocess.run(program, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.returncode)
        found[side].append(json.loads(done.stdout.splitlines()[-1]))
    for side, runs in found.items():
        seconds, peaks, rates = (sorted(run[key] for run in runs) for key in ("seconds", "peak", "rate"))
        print(f"| {side} | {statistics.median(seconds):.3g} ({seconds[0]:.3g} to {seconds[-1]:.3g}) | "
              f"{peaks[-1] / 1e9:.2f} | {runs[0]['losses'][0]:.3e} | "
              f"{', '.join(f'{norm:.7f}' for norm in runs[0]['norms'])} | "
              f"{statistics.median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f}) |")

def one_side(own, args):
    """A step that warms up, one that is timed, then a rollout -> what is measured, as a line of JSON."""
    policy = random_model(args.model, own.shape).to(ng.policy_device()).eval()
    policy = with_flags(policy, args) if own.side == "here" else policy
    rows = ragged_rows(args.rollout_batch_size, policy.config.vocab_size, args.group_size, own.row_lengths)
    for i, row in enumerate(rows):
        row.advantage = 1.0 - 2 * (i % 2)
    args.train_batch_size, prompts = len(rows), [row.example.prompt_ids for row in rows]
    metrics, seconds = (steps_here if own.side == "here" else steps_of_trl)(policy, rows, args)
    peak, policy, tokens = peak_memory(policy.device), policy.eval(), own.rollout_tokens
    if own.side == "here":
        sampler = ng.HFSampler(policy, None, [], None, args.temperature, 0, len(rows))
        roll_out = lambda: sampler.generate(prompts[::args.group_size], args.group_size, 0, tokens)
    else:
        ids = ng.pad(prompts, side="left").to(policy.device)
        mask = ng.pad([[1] * len(prompt) for prompt in prompts], side="left").to(policy.device)
        roll_out = lambda: policy.generate(
            ids, attention_mask=mask, do_sample=True, temperature=args.temperature, top_k=0, pad_token_id=0,
            min_new_tokens=tokens, max_new_tokens=tokens)
    rate = len(rows) * tokens / times(roll_out, 1, policy.device)[0]
    print(json.dumps({"seconds": seconds, "peak": peak, "rate": rate, "losses": [one[0] for one in metrics],
                      "norms": [one[1] for one in metrics]}))

def steps_here(policy, rows, args):
    """-> ((loss, gradient norm) of two steps, seconds of the second one)."""
    reference, optimizer = ng.reference_and_optimizer(policy, args)
    seconds, metrics = [], []
    with tempfile.TemporaryDirectory() as args.run_dir:
        for step in (1, 2):
            started = time.perf_counter()
            metrics.append(ng.update(policy, reference, optimizer, rows, step, args))
            seconds.append(time.perf_counter() - started)
    return [(one["train/loss"], one["train/grad_norm"]) for one in metrics], seconds[-1]

def steps_of_trl(policy, rows, args):
    """As steps_here: the same rows, given to TRL as its rollouts."""
    import datasets
    import trl
    metrics, begun, seconds = [], [], []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            begun.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - begun[-1])

        def on_log(self, _, state, control, logs, **__):
            metrics.extend([(logs["loss"], logs["grad_norm"])] if "loss" in logs else [])

    def rollouts(prompts, trainer):
        return {"prompt_ids": [row.example.prompt_ids for row in rows], "logprobs": None,
                "completion_ids": [row.response_ids for row in rows]}

    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(folder, **trl_flags.config_fields(args, 1) | dict(
            max_steps=2, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=policy.device.type == "cpu", bf16=policy.device.type == "cuda"))
        places = datasets.Dataset.from_dict({"prompt": ["?"] * (2 * len(rows) // args.group_size)})
        trainer = trl.GRPOTrainer(
            policy, lambda **_: [row.advantage for row in rows], config, places, callbacks=[Watch()],
            processing_class=ng.tiny.tiny_tokenizer(ng.R1_ZERO_PROMPT), rollout_func=rollouts)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return metrics, seconds[-1]

def main(argv=None):
    own, args = parse(argv)
    if own.side:
        return one_side(own, args)
    if own.against_trl:
        return sides(sys.argv[1:] if argv is None else argv, own.repeats)
    policy = with_flags(random_model(args.model, own.shape), args)
    reference, optimizer = ng.reference_and_optimizer(policy, args)

    def step(rows):
        args.train_batch_size = len(rows)
        ng.update(policy, reference, optimizer, rows, 1, args)

    with tempfile.TemporaryDirectory() as args.run_dir:  # for the rows of a step that is not finite
        bench(policy, step, args.rollout_batch_size, args.group_size, own.row_lengths, own.repeats)

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # each line of the table as soon as it is known
    ng.Signals.catch()
    with ng.Signals.end_in_one_line():
        main()
