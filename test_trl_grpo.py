"""The tests of tools/trl_grpo.py: `python -m pytest -q test_trl_grpo.py`. They are skipped where TRL is not
installed (pip install trl==1.16.0).

A step of TRL is compared with a step of nano_grpo.py on the same weights and rollouts. Several processes are
started by accelerate, on the CPU (gloo).
"""
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
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
from tools import trl_flags, trl_grpo

# What each process runs in the place of trl_grpo.py: rollouts that follow from seed and place in the batch.
FIXED = """
import random, sys
sys.path.append({here!r})
import nano_grpo as ng
from tools import trl_grpo
def fixed(self, prompts, n, seed, max_tokens):
    rngs = [random.Random(f"{{seed}} {{i}}") for i in range(len(prompts) * n)]
    rows = [[rng.randrange(257, 320) for _ in range(rng.randrange(4, max_tokens))] for rng in rngs]
    return ng.chunks([[row, [-3.0 - rng.random() for _ in row], False] for row, rng in zip(rows, rngs)], n)
trl_grpo.Bridge.generate = fixed
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
            f"--eval-size 5 --max-tokens 12 --max-steps 1 --lr 1e-3 --run-dir {run_dir}".split(), *more]

def weights_of(run_dir):
    policy = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    return dict(policy.named_parameters())

def difference(one, two):
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)

def launch(processes, script, *argv, config=None):
    """Starts script by accelerate, which starts processes on the CPU with --multi_gpu and this variable."""
    how = ["--config_file", config] if config else "--multi_gpu --mixed_precision no --dynamo_backend no".split()
    program = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes),
               "--num_machines", "1", "--main_process_port", "0", *how, str(script), *map(str, argv)]
    if processes == 1:
        program = [sys.executable, str(script), *map(str, argv)]
    variables = dict(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1")
    return subprocess.Popen(program, env=os.environ | variables, stdout=subprocess.PIPE, text=True,
                            stderr=subprocess.STDOUT, start_new_session=True)

def finished(process):
    """-> what it printed; it has to have ended well."""
    text = process.communicate(timeout=1200)[0]
    assert process.returncode == 0, text[-3000:]
    return text

# --- One step ----------------------------------------------------------------------------------------------
@pytest.fixture
def stubs(monkeypatch):
    """Rollouts that are fixed, and an engine that does nothing (its log-probs come with the rollouts)."""
    space = {}
    source = FIXED.format(here="").split("trl_grpo.Bridge")[0]
    exec(source, space)
    monkeypatch.setattr(trl_grpo.Bridge, "generate", space["fixed"])
    monkeypatch.setattr(ng, "policy_device", ng.policy_device)  # load() changes it
    import trl.trainer.grpo_trainer as module
    monkeypatch.setattr(module, "VLLMGeneration", lambda **_: SimpleNamespace(sync_weights=lambda: None))

SAME = {
    "grpo": "", "no std": "--no-std-norm", "dr_grpo": "--no-std-norm --no-length-norm",
    "dapo": "--loss-aggregation token --cliprange-high 0.28", "gspo": "--loss gspo",
    "gspo by token": "--loss gspo --loss-aggregation token", "noclip": "--loss noclip",
    "cispo": "--loss cispo --loss-aggregation token --cliprange-high 0.1", "kl": "--kl-coef 0.5",
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
    assert difference(start, dict(policy.named_parameters())) > 1e-3
    assert difference(weights_of(tmp_path / "run"), dict(policy.named_parameters())) < 1e-6
    logged = read_lines(tmp_path / "run" / "metrics.jsonl")[1]
    assert logged["train/loss"] == pytest.approx(wanted["train/loss"], abs=1e-6)
