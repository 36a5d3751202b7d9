"""The tests of tools/trl_grpo.py: `python -m pytest -q test_trl_grpo.py`. They are skipped where TRL is not
installed (pip install trl==1.16.0).

A step of TRL is compared with a step of nano_grpo.py on the same weights and rollouts. Several processes are
started by accelerate, on the CPU (gloo).
"""
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import figures
import nano_grpo as ng
import tiny
from run import read_lines
from test_nano import EOS, TOKENIZER

HERE = Path(ng.__file__).resolve().parent
trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")
from tools import bench, trl_flags, trl_grpo

# What each process runs in the place of trl_grpo.py: rollouts that follow from seed and place in the batch,
# and an AdamW with a larger eps. Adam divides a gradient by its own size: where that is rounding noise only,
# the weight moves by up to lr either way, and two programs whose gradients agree to 1e-9 differ by 1e-6.
FIXED = """
import os, random, sys
sys.path.append({here!r})
import torch
import nano_grpo as ng
from tools import trl_grpo
def calm(self, *values, begin=torch.optim.AdamW.__init__, **named):
    assert named.get("eps", 1e-8) == 1e-8
    begin(self, *values, **named | dict(eps=1e-4))
def fixed(self, prompts, n, seed, max_tokens):
    if os.environ.get("KILL_AT") == str(self.step):
        os.kill(os.getpid(), 9)
    rngs = [random.Random(f"{{seed}} {{i}}") for i in range(len(prompts) * n)]
    rows = [[rng.randrange(257, 320) for _ in range(rng.randrange(4, max_tokens))] for rng in rngs]
    return ng.chunks([[row, [-3.0 - rng.random() for _ in row], False] for row, rng in zip(rows, rngs)], n)
trl_grpo.Bridge.generate, torch.optim.AdamW.__init__ = fixed, calm
if "as_if_on_gpus" in sys.argv[1]:  # on CPUs accelerate takes DDP in the place of FSDP, without a word
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    begin = AcceleratorState.__init__
    def as_if_on_gpus(self, *values, **named):
        if PartialState().distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        begin(self, *values, **named)
        print("SHARDED", PartialState._shared_state["distributed_type"] == DistributedType.FSDP)
    AcceleratorState.__init__ = as_if_on_gpus
trl_grpo.main(sys.argv[2:])
"""
REWARD = """def letters(response, ground_truth):  # fractions that binary numbers do not have
    return sum(map(ord, response)) % 11 / 11
"""

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama (no biases: the gradient of a key's is 0 but for rounding, and Adam would make steps of
    that), questions, a reward function, and the script with fixed rollouts."""
    path = tmp_path_factory.mktemp("trl")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                         initializer_range=0.3, eos_token_id=EOS, bos_token_id=None, pad_token_id=EOS)
    LlamaForCausalLM(config).save_pretrained(path / "model")
    TOKENIZER.save_pretrained(path / "model")
    for split, rows in tiny.task_records("arithmetic").items():
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:60]))
    (path / "my_reward.py").write_text(REWARD)
    (path / "fixed.py").write_text(FIXED.format(here=str(HERE)))
    return path

def flags_for(folder, run_dir, *more):
    return [*f"--model {folder}/model --dataset {folder}/train.jsonl --eval-dataset {folder}/test.jsonl "
            f"--reward-fn {folder}/my_reward.py:letters --rollout-batch-size 16 --group-size 4 "
            f"--eval-size 5 --max-tokens 12 --max-steps 1 --lr 1e-4 --run-dir {run_dir}".split(), *more]

def weights_of(run_dir):
    policy = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    return dict(policy.named_parameters())

def difference(one, two):
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)

def launch(script, *argv, config=None, **variables):
    """Two processes of script on the CPU, which accelerate starts with --multi_gpu and this variable, and as
    one process with --cpu. -> (exit code, what was printed)."""
    how = ["--config_file", str(config)] if config else "--multi_gpu --dynamo_backend no".split()
    program = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines",
               "1", "--mixed_precision", "no", "--main_process_port", "0", *how, script, *argv]
    variables = dict(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1") | variables
    done = subprocess.run(list(map(str, program)), env=os.environ | variables, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout

# --- One step ----------------------------------------------------------------------------------------------
@pytest.fixture
def stubs(monkeypatch):
    """Rollouts that are fixed, a calm AdamW, and an engine that does nothing (its log-probs come with the
    rollouts)."""
    space = {}
    source = FIXED.format(here="").split("trl_grpo.Bridge")[0]
    exec(source, space)
    monkeypatch.setattr(trl_grpo.Bridge, "generate", space["fixed"])
    monkeypatch.setattr(torch.optim.AdamW, "__init__", space["calm"])
    monkeypatch.setattr(ng, "policy_device", ng.policy_device)  # load() changes it
    import trl.trainer.grpo_trainer as module
    monkeypatch.setattr(module, "VLLMGeneration", lambda **_: SimpleNamespace(sync_weights=lambda: None))

SAME = {  # the steps are small, so the clip ranges are
    "grpo": "--cliprange 0.01", "dr_grpo": "--no-std-norm --no-length-norm --cliprange 0.01",
    "dapo": "--loss-aggregation token --cliprange 0.01 --cliprange-high 0.014", "gspo": "--loss gspo",
    "gspo by token": "--loss gspo --loss-aggregation token", "noclip": "--loss noclip",
    "cispo": "--loss cispo --loss-aggregation token --cliprange-high 0.01", "kl": "--kl-coef 0.5",
    "kl by token": "--kl-coef 0.5 --loss-aggregation token", "rloo": "--baseline loo --no-length-norm",
    "maxrl": "--advantage-norm mean --no-length-norm", "batch std": "--advantage-norm batch-std",
    "tis": "--tis-cap 1.5 -- --use_vllm true", "tis, kl": "--tis-cap 0.8 --kl-coef 0.5 -- --use_vllm true",
    "shaped": "--length-reward 0.5 --overlong-cache 4", "temperature": "--temperature 0.7"}

@pytest.mark.parametrize("name", SAME)
def test_one_rollout_batch_gives_the_weights_of_nano_grpo(name, folder, tmp_path, stubs, monkeypatch):
    """Two passes over the batch: in the second one the ratio is off 1, and clips act. Three microbatches."""
    seen, before, _, after = [], *SAME[name].partition("-- ")
    roll_out = trl_grpo.Bridge.rollout
    monkeypatch.setattr(trl_grpo.Bridge, "rollout",
                        lambda self, *values: seen.append(self) or roll_out(self, *values))
    passes = ["--epochs-per-rollout-batch", "2", "--microbatch-tokens", "72"]
    argv = flags_for(folder, tmp_path / "run", *passes, *before.split())
    trl_grpo.main([*argv, "--", *after.split()])
    rows, args = seen[0].rows, ng.configure(ng.parse_args(argv), False)
    assert len({row.advantage for row in rows}) > 4 and len({len(row.response_ids) for row in rows}) > 3
    policy = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    reference, optimizer = ng.reference_and_optimizer(policy, args)
    start = copy.deepcopy(dict(policy.named_parameters()))
    wanted = ng.update(policy, reference, optimizer, rows, 1, args)
    assert difference(start, dict(policy.named_parameters())) > 1e-4
    assert difference(weights_of(tmp_path / "run"), dict(policy.named_parameters())) < 1e-6
    logged = read_lines(tmp_path / "run" / "metrics.jsonl")[1]
    assert not wanted["train/clip_fraction"] == 0.0 or "--cliprange" not in before
    assert logged["train/loss"] == pytest.approx(wanted["train/loss"], abs=1e-6)

# --- Several processes -------------------------------------------------------------------------------------
STEPS = "--max-steps 4 --eval-every 2 --lr 1e-4".split()

def test_a_killed_run_of_two_processes_ends_where_one_process_does(folder, tmp_path, stubs):
    trl_grpo.main(flags_for(folder, tmp_path / "one", *STEPS))
    argv = folder / "fixed.py", "ddp", *flags_for(folder, tmp_path / "two", *STEPS)
    assert launch(*argv, KILL_AT="3")[0] != 0
    assert [line["step"] for line in read_lines(tmp_path / "two" / "metrics.jsonl")] == [0, 1, 2, 2]
    code, text = launch(*argv[:2], "--resume", "--run-dir", tmp_path / "two", "--", "--dataloader_pin_memory",
                        "false")
    assert code == 0, text[-3000:]
    assert difference(weights_of(tmp_path / "one"), weights_of(tmp_path / "two")) < 1e-6
    one, two = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in two] == [0, 1, 2, 2, 3, 4, 4]
    for key in ("train/reward", "train/tokens", "train/dead_groups", "train/loss", "eval/length", "train/lr"):
        assert [line.get(key) for line in one] == pytest.approx([line.get(key) for line in two], abs=1e-6)

def test_two_processes_that_share_the_weights_end_where_one_does(folder, tmp_path, stubs):
    """FSDP2 with tools/fsdp2.yaml."""
    trl_grpo.main(flags_for(folder, tmp_path / "one"))
    code, text = launch(folder / "fixed.py", "as_if_on_gpus", *flags_for(folder, tmp_path / "two"),
                        config=HERE / "tools" / "fsdp2.yaml")
    assert code == 0 and "SHARDED True" in text, text[-3000:]
    assert difference(weights_of(tmp_path / "one"), weights_of(tmp_path / "two")) < 1e-6

def test_two_processes_teach_the_tiny_model(tmp_path):
    argv = "--no-std-norm --max-steps 10 --eval-size 128 --seed 1 --run-dir".split()
    code, text = launch(HERE / "tools" / "trl_grpo.py", *argv, tmp_path / "run")
    assert code == 0, text[-3000:]
    before, after = (line["eval/accuracy"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")
                     if "eval/accuracy" in line)
    assert before < 0.5 and after > 0.75

# --- The bridge --------------------------------------------------------------------------------------------
def test_a_run_by_trl_reads_like_one_by_nano_grpo(folder, tmp_path, stubs):
    """Order of the questions, prompts, names of the metrics, files; figures.py draws both on shared axes."""
    argv = ["--max-steps", "2", "--microbatch-tokens", "72"]
    trl_grpo.main(flags_for(folder, tmp_path / "trl", *argv))
    ng.main(ng.parse_args(flags_for(folder, tmp_path / "nano", *argv)))
    lines, samples, keys = {}, {}, {}
    for name in ("trl", "nano"):
        lines[name] = read_lines(tmp_path / name / "metrics.jsonl")
        keys[name] = {key for line in lines[name] for key in line}
        samples[name] = read_lines(tmp_path / name / "samples.jsonl")
    assert [(one["step"], one["prompt"], one["ground_truth"], one.keys()) for one in samples["trl"]] == [
        (one["step"], one["prompt"], one["ground_truth"], one.keys()) for one in samples["nano"]]
    assert keys["trl"] <= keys["nano"]
    assert keys["nano"] - keys["trl"] <= {"train/ratio_outside", "train/engine_gap", "train/bad_steps",
                                          "train/kl", "time/push", "time/canary"}
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("trl", "nano")]
    assert files[0] == files[1]
    assert len(read_lines(tmp_path / "trl" / "evaluation.jsonl")) == 5
    folders = [tmp_path / "trl", tmp_path / "nano"]
    figures.draw_curves(folders, ["train/reward", "eval/length"], tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 10_000

@pytest.mark.parametrize("made, program", [("checkpoint-2", ng), ("step-000002.pt", trl_grpo)])
def test_each_program_resumes_its_own_runs_only(made, program, folder, tmp_path, capsys):
    """The other one would begin anew in the folder, and cut the logs back to nothing."""
    (tmp_path / "checkpoint" / made).mkdir(parents=True)
    args = vars(ng.configure(ng.parse_args(flags_for(folder, tmp_path)), False))
    (tmp_path / "args.json").write_text(json.dumps({"args": args}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    argv = ["--resume", "--run-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        ng.main(ng.parse_args(argv)) if program is ng else trl_grpo.main(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "go on with that" in error and error.count("\n") == 1
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}]

def test_a_response_ends_at_its_stop_string_and_padding_is_cut_off():
    """generate() of transformers pads finished rows. TRL alone would train on the first padding token where
    that is the end token, and on all of them where it is not."""
    full, stop = TOKENIZER.encode(" 1 + 2 = 3 </think> <answer> 3 </answer>"), "</answer>"
    sampler = SimpleNamespace(eos_ids=[EOS], closers={full[-1]}, stop=stop, tokenizer=TOKENIZER)
    sampler.is_finished = lambda ids: ng.HFSampler.is_finished(sampler, ids)
    bridge = trl_grpo.Bridge(None, sampler, [], [], None, ng.configure({"model": "tiny"}, False))
    made = [full + [EOS, EOS], full[:4] + [EOS] * 3, full[:-1] + [7, 7, 7]]
    from accelerate import PartialState
    bridge.trainer = SimpleNamespace(accelerator=PartialState(), _generate_single_turn=lambda prompts, *_: (
        made, [[-0.5] * len(ids) for ids in made]))
    bridge.step = 0
    samples = bridge.generate([[1], [2], [3]], 1, 0, 99)
    assert [one[0] for [one] in samples] == [full, full[:4] + [EOS], made[2]]
    assert [len(one[1]) for [one] in samples] == [len(one[0]) for [one] in samples]
    assert [one[2] for [one] in samples] == [False, False, True]

def test_the_bench_gives_both_sides_the_same_two_steps(capsys):
    """Rows, weights and optimizer are the same, so the loss and both gradient norms are."""
    argv = ("--against-trl --model tiny --rollout-batch-size 8 --group-size 4 --row-lengths 8 24 "
            "--max-tokens 24 --rollout-tokens 4 --loss gspo --side").split()
    found = []
    for side in ("here", "trl"):
        bench.one_side(*bench.parse([*argv, side]))
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    here, there = found
    assert len(here["norms"]) == 2 and here["norms"][0] > 0.1 and here.keys() == there.keys()
    assert here["norms"] == pytest.approx(there["norms"], rel=1e-5)
    assert here["losses"] == pytest.approx(there["losses"], abs=1e-6)

# --- The command line --------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv, named", [
    ("--loss kimi", "--loss kimi"), ("--mode sft", "--mode sft"), ("--overlap", "--overlap"),
    ("--dynamic-sampling 2", "--dynamic-sampling"), ("--baseline max", "--baseline max"),
    ("--baseline none --loss noclip", "--baseline none"), ("--curriculum prioritized", "--curriculum"),
    ("--kl-coef 0.1 --kl k1", "--kl k1"), ("--kl-coef 0.1 --loss gspo", "--kl-coef"),
    ("--max-hours 1", "--max-hours"),
    ("--loss pg --train-batch-size 64", "--loss pg"), ("--loss cispo", "--loss cispo"),
    ("--truncated mask --loss-aggregation token", "--truncated mask"), ("--tis-cap 2", "--tis-cap"),
    ("--entropy-coef 0.1", "--entropy-coef"), ("--compile", "--compile"), ("--lora-rank 8", "--lora-rank"),
    ("--sampler vllm", "--use_vllm"), ("--thinking-budget 8", "--thinking-budget"),
    ("--reset-optimizer",) * 2,
    ("--eval-temperature 0", "--eval-temperature"), ("--difficulty-filter 4", "--difficulty-filter"),
    ("--max-engine-gap 1", "--max-engine-gap"), ("--leaderboard", "--leaderboard"),
    ("-- --beta 0.1", "--beta"), ("-- --learning_rate=1", "--learning_rate"), ("-- --no_such 1", "--no_such"),
    ("--reward-fn nowhere.py:f", "--reward-fn nowhere.py:f")])
def test_what_trl_cannot_do_is_refused_in_one_line_before_anything_loads(argv, named, monkeypatch, capsys):
    monkeypatch.setattr(trl_grpo, "load", None)
    with pytest.raises(SystemExit) as stop:
        trl_grpo.main(["--model", "tiny", *argv.split()])
    assert stop.value.code == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("nano_grpo: error: ") and named in line

def test_processes_that_do_not_divide_the_batch_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        trl_flags.parse(["--model", "tiny"])
    assert "--train-batch-size 256 does not divide by 3 processes" in capsys.readouterr().err

def test_each_flag_is_mapped_or_refused():
    """A new flag of nano_grpo.py has to be put into trl_flags.py, or here as one that acts without TRL."""
    refused = {key for keys in trl_flags.REFUSED for key in keys.split()}
    source = Path(trl_flags.__file__).read_text()
    known = {flag.key for flag in ng.flags.all_flags()}
    mapped = {key for key in known if f"args.{key}" in source} - refused
    own = set("""model resume run_dir report_to dataset eval_dataset prompt reward_fn min_tokens length_reward
    length_reward_after overlong_cache language_reward advantage_norm no_std_norm no_length_norm eval_size
    eval_samples stop warmup_steps lr_decay""".split())
    assert known == mapped | refused | own and not refused - known

def test_the_fields_hold_for_any_number_of_processes():
    argv = "--model tiny --train-batch-size 64 --epochs-per-rollout-batch 2".split()
    args = ng.configure(ng.parse_args(argv), False)
    for processes in (1, 2, 8, 64):
        fields = trl_flags.config_fields(args, processes)
        rows = fields["per_device_train_batch_size"]
        assert rows * fields["gradient_accumulation_steps"] * processes == 64 and rows * 96 <= 4096
        assert fields["max_steps"] == 100 * 8 and fields["generation_batch_size"] == 256
