"""The flags of nano_grpo.py on TRL's GRPOTrainer, on as many processes and machines as accelerate launches.

  accelerate launch --num_processes 8 tools/trl_grpo.py --model FOLDER --dataset FILE -- --use_vllm true

Behind `--` stand fields of TRL's GRPOConfig. TRL samples, takes the loss and steps; accelerate distributes.
The rest is nano_grpo.py's: questions, prompt ids, rewards, advantages, evaluation, logs (docs/scale.md).
"""
import contextlib
import functools
import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import nano_grpo as ng  # before torch: it sets the number of threads
import torch
import transformers
from accelerate.utils import broadcast_object_list, gather_object
from run import Run, step_seconds, stop_run, stopwatch
from tools import trl_flags
from transformers.trainer_utils import get_last_checkpoint

METRICS = {"loss": "loss", "grad_norm": "grad_norm", "kl": "kl", "entropy": "entropy",
           "clip_ratio/region_mean": "clip_fraction", "cispo_clip_ratio": "clip_fraction",
           "sampling/sampling_logp_difference/mean": "engine_gap"}  # TRL's name: ours, behind train/

class Bridge(transformers.TrainerCallback):
    """What TRL's loop has from nano_grpo.py. run: None on all processes but the first."""
    def __init__(self, run, sampler, asked, held_out, reward_fn, args):
        self.run, self.sampler, self.asked, self.held_out = run, sampler, asked, held_out
        self.reward_fn, self.args, self.steps = reward_fn, args, trl_flags.steps_a_rollout(args)
        sampler.generate, sampler.min_tokens = self.generate, 0  # TRL ends at any stop string

    def generate(self, prompts, n, seed, max_tokens):
        """As HFSampler.generate, by TRL. Each process samples a share, and all get all, without padding."""
        torch.manual_seed(seed + self.trainer.accelerator.process_index)
        numbered, samples = list(enumerate(prompt for prompt in prompts for _ in range(n))), []
        with self.trainer.accelerator.split_between_processes(numbered, apply_padding=True) as mine:
            rows, log_probs = self.trainer._generate_single_turn([ids for _, ids in mine], None, {}, 1)
        for (number, _), ids, values in zip(mine, rows, log_probs or [None] * len(rows)):
            end = next((i for i in range(1, len(ids) + 1) if self.sampler.is_finished(ids[:i])), None)
            samples.append((number, [ids[:end], values and values[:end], end is None]))
        found = dict(gather_object(samples))
        return ng.chunks([found[number] for number, _ in numbered], n)

    def rollout(self, prompts, trainer):
        """TRL's rollout_func. A prompt is a place in `asked`: no text has to give the same ids once more."""
        args, step, first = self.args, self.step, len(prompts) * trainer.args.process_index
        seed, mine = ng.seed_for(args.seed, "rollout 0", step), slice(first, first + len(prompts))
        self.metrics, self.begun, self.sampler.version = {"step": step}, time.time(), step
        with stopwatch(self.metrics, "rollout"):
            examples = gather_object([self.asked[int(place)] for place in prompts])
            rows = ng.sample(self.sampler, examples, 1, seed, step, args.max_tokens)[mine]
        with stopwatch(self.metrics, "reward"):
            ng.rewards.seed_random(seed + trainer.args.process_index)
            self.rows = gather_object(ng.grade_rows(rows, self.reward_fn))
            for group in ng.chunks(self.rows, args.group_size):
                ng.shape_rewards(group, step, args)
            ng.rows_to_train_on(self.rows, args)
        self.metrics |= ng.rollout_metrics(self.rows, args.group_size)
        self.advantages = [row.advantage for row in self.rows[mine]]
        return {"prompt_ids": [row.example.prompt_ids for row in rows],
                "completion_ids": [row.response_ids for row in rows],
                "logprobs": [row.sampler_log_probs for row in rows] if trainer.use_vllm else None}

    def evaluate(self):
        metrics, self.sampler.version = {"step": self.step}, self.step
        with stopwatch(metrics, "eval"):
            results, rows = ng.evaluate(self.sampler, self.held_out, self.reward_fn, self.step, self.args)
        if self.run:
            records = [ng.response_record(row, self.sampler.tokenizer) for row in rows]
            self.run.log_evaluation(metrics | results, records)
            self.run.draw(self.step == self.args.max_steps)

    def on_train_begin(self, _, state, control, **__):
        self.step = state.global_step // self.steps
        if not self.step:  # a step with a checkpoint has been evaluated
            self.evaluate()

    def on_step_begin(self, _, state, control, optimizer, **__):
        self.step = 1 + state.global_step // self.steps
        for group in optimizer.param_groups:
            group["lr"] = ng.learning_rate(self.step, self.args)

    def on_log(self, _, state, control, logs, **__):
        if "loss" in logs:  # else it is TRL's summary at the end
            self.metrics |= {f"train/{ours}": logs[name] for name, ours in METRICS.items() if name in logs}
            seconds = time.time() - self.begun - step_seconds(self.metrics)
            self.metrics |= {"train/lr": ng.learning_rate(self.step, self.args), "time/update": seconds}
            if self.run:
                how = self.args.group_size, self.sampler.tokenizer
                self.run.log(self.metrics, ng.sample_records(self.rows, self.rows, *how))
            if self.step % self.args.eval_every == 0 or self.step == self.args.max_steps:
                self.evaluate()

def load(args):
    """-> (policy, sampler, questions to train on, held-out ones), as nano_grpo.py makes them."""
    ungradable = ng.rewards.ungradable if args.reward_fn in ng.rewards.REWARDS else None
    try:
        sets = ng.load_examples(args.dataset, args.eval_dataset, args.eval_size, args.mode, ungradable)
    except ValueError as error:
        stop_run(error)
    ng.policy_device = lambda: "cpu"  # accelerate moves it
    own = dict(sampler="hf", gradient_checkpointing=False, mode="eval")  # eval: no plan for one GPU
    policy, sampler = ng.load_model(Namespace(**vars(args) | own))
    args.context = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return policy, sampler, *(ng.add_prompts(examples, sampler.tokenizer, args)
                              for examples in (sets[0], sets[1][:args.eval_size]))

def main(argv):
    args, config, reward_fn = trl_flags.parse(argv)
    from datasets import Dataset
    from trl import GRPOTrainer
    is_first = config.process_index == 0
    with Run(args.run_dir, vars(args)) if is_first else contextlib.nullcontext() as run:
        [folder] = broadcast_object_list([run and run.folder])
        with config.main_process_first():  # which may have to download, or to make the tiny model
            policy, sampler, train_set, held_out = load(args)
        last = get_last_checkpoint(folder / "checkpoint") if (folder / "checkpoint").is_dir() else None
        if run:
            step = int(last.rpartition("-")[2]) // trl_flags.steps_a_rollout(args) if last else -1
            run.cut_logs(step)  # back to the checkpoint
            run.flags |= {"run_dir": str(folder), "resume": False}
            run.begin()
            run.started -= sum(map(step_seconds, run.records))
        count = args.max_steps * args.rollout_batch_size // args.group_size
        asked = ng.Curriculum(train_set, "uniform", args.seed).take(count)
        bridge = Bridge(run, sampler, asked, held_out, reward_fn, args)
        config.output_dir, policy.generation_config.eos_token_id = str(folder / "checkpoint"), sampler.eos_ids
        config.generation_kwargs = trl_flags.generation_kwargs(args, config, sampler)
        places = Dataset.from_dict({"prompt": [str(place) for place in range(count)]})
        # the advantages take the place of rewards: the mean of their group, which TRL takes off, is 0
        trainer = bridge.trainer = GRPOTrainer(
            policy, lambda **_: bridge.advantages, config, places, processing_class=sampler.tokenizer,
            callbacks=[bridge], rollout_func=bridge.rollout)
        trainer.remove_callback(transformers.PrinterCallback)
        # with FSDP all processes have to take part in each token, until the last row of all has ended
        policy.generate = functools.partial(policy.generate, tokenizer=sampler.tokenizer,
                                            synced_gpus=trainer.is_fsdp_enabled or None)
        trainer.train(resume_from_checkpoint=last)
        trainer.save_model(str(folder / "model"))
        if run:
            run.write_result(train=ng.fingerprint(train_set), held_out=ng.fingerprint(held_out))

if __name__ == "__main__":
    main(sys.argv[1:])
