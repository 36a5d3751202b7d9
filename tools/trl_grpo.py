"""The flags of nano_grpo.py on TRL's GRPOTrainer, on as many processes and machines as accelerate launches.

  accelerate launch --num_processes 8 tools/trl_grpo.py --model FOLDER --dataset FILE -- --use_vllm true

Behind `--` stand fields of TRL's GRPOConfig. TRL samples, takes the loss and steps; accelerate distributes;
questions, prompt ids, rewards, advantages, evaluation and logs are nano_grpo.py's. docs/scale.md: what is equal.
"""
import contextlib
import functools
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import nano_grpo as ng  # before torch: it sets the number of threads
import torch
import transformers
from accelerate.utils import broadcast_object_list, gather_object
from run import Run, read_lines, step_seconds, stop_run, stopwatch, write_lines
from transformers.trainer_utils import get_last_checkpoint
from trl_flags import config_fields, refuse, steps_a_rollout

METRICS = {"loss": "loss", "grad_norm": "grad_norm", "kl": "kl", "entropy": "entropy",
           "clip_ratio/region_mean": "clip_fraction", "cispo_clip_ratio": "clip_fraction",
           "sampling/sampling_logp_difference/mean": "engine_gap"}  # TRL's name: ours, behind train/

class Bridge(transformers.TrainerCallback):
    """What TRL's loop has from nano_grpo.py. run: None on all processes but the first."""
    def __init__(self, run, sampler, asked, held_out, reward_fn, args):
        self.run, self.sampler, self.asked, self.held_out = run, sampler, asked, held_out
        self.reward_fn, self.args, self.metrics = reward_fn, args, {}
        sampler.generate, sampler.min_tokens = self.generate, 0  # generate() ends at any stop string

    def generate(self, prompts, n, seed, max_tokens):
        """As HFSampler.generate, by TRL. Each process samples a share, and all get all."""
        torch.manual_seed(seed + self.trainer.accelerator.process_index)
        numbered, samples = list(enumerate(prompt for prompt in prompts for _ in range(n))), []
        with self.trainer.accelerator.split_between_processes(numbered, apply_padding=True) as mine:
            rows, log_probs = self.trainer._generate_single_turn([ids for _, ids in mine], None, {}, 1)
        for (number, _), ids, values in zip(mine, rows, log_probs or rows):
            ends = (end for end in range(1, len(ids) + 1) if self.sampler.is_finished(ids[:end]))
            end = next(ends, None)  # padding may stand behind it
            samples.append((number, [ids[:end], values[:end], end is None]))
        found = dict(gather_object(samples))
        return ng.chunks([found[number] for number, _ in numbered], n)

    def rollout(self, prompts, trainer):
        """TRL's rollout_func. A prompt is a place in `asked`: no text has to give the same ids once more."""
        args, step = self.args, 1 + trainer.state.global_step // steps_a_rollout(self.args)
        seed, first = ng.seed_for(args.seed, "rollout 0", step), len(prompts) * trainer.args.process_index
        self.sampler.version = step
        with stopwatch(self.metrics, "rollout"):
            examples = gather_object([self.asked[int(place)] for place in prompts])
            rows = ng.sample(self.sampler, examples, 1, seed, step, args.max_tokens)
        with stopwatch(self.metrics, "reward"):
            ng.rewards.seed_random(seed + first)
            rows = gather_object(ng.grade_rows(rows[first:first + len(prompts)], self.reward_fn))
            for group in ng.chunks(rows, args.group_size):
                ng.shape_rewards(group, step, args)
            ng.rows_to_train_on(rows, args)
        self.metrics |= ng.rollout_metrics(rows, args.group_size)
        self.rows, self.mine = rows, rows[first:first + len(prompts)]
        return {"prompt_ids": [row.example.prompt_ids for row in self.mine],
                "completion_ids": [row.response_ids for row in self.mine],
                "logprobs": [row.sampler_log_probs for row in self.mine] if trainer.use_vllm else None}

    def reward(self, **_):
        """TRL's reward function: the advantages. The mean of their group, which TRL takes off, is 0."""
        return [row.advantage for row in self.mine]

    def evaluate(self, step):
        self.sampler.version = step
        with stopwatch(self.metrics, "eval"):
            results, rows = ng.evaluate(self.sampler, self.held_out, self.reward_fn, step, self.args)
        if self.run:
            records = [ng.response_record(row, self.args.prompt) for row in rows]
            write_lines(self.run.folder / "evaluation.jsonl", records)
            self.run.log({"step": step} | self.metrics | results, [] if step else records[:8])
            self.run.draw(step == self.args.max_steps)
        self.metrics, self.begun = {}, time.time()

    def on_train_begin(self, _, state, control, **__):
        self.begun = time.time()
        if not state.global_step:  # a step with a checkpoint has been evaluated
            self.evaluate(0)

    def on_step_begin(self, _, state, control, optimizer, **__):
        self.step = 1 + state.global_step // steps_a_rollout(self.args)
        for group in optimizer.param_groups:
            group["lr"] = ng.learning_rate(self.step, self.args)

    def on_log(self, _, state, control, logs, **__):
        if "loss" not in logs:  # TRL's summary at the end
            return
        self.metrics["time/update"] = time.time() - self.begun - step_seconds(self.metrics)
        if self.run:
            known = {f"train/{ours}": logs[name] for name, ours in METRICS.items() if name in logs}
            known["train/lr"] = ng.learning_rate(self.step, self.args)
            records = [ng.response_record(row, self.args.prompt) for row in self.rows[:8]]
            self.run.log({"step": self.step} | self.metrics | known, records)
        self.metrics, self.begun = {}, time.time()
        if self.step % self.args.eval_every == 0 or self.step == self.args.max_steps:
            self.evaluate(self.step)

def load(args):
    """-> (policy, sampler, questions to train on, held-out ones), as nano_grpo.py makes them."""
    try:
        train_set, held_out = ng.load_examples(
            args.dataset, args.eval_dataset, args.eval_size, args.mode,
            ng.rewards.ungradable if args.reward_fn in ng.rewards.REWARDS else None)
    except ValueError as error:
        stop_run(error)
    ng.policy_device = lambda: "cpu"  # accelerate puts each process on its own
    policy, sampler = ng.load_model(type(args)(**vars(args) | {"sampler": "hf", "gradient_checkpointing": False}))
    args.context = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return policy, sampler, *(ng.add_prompts(part, sampler.tokenizer, args)
                              for part in (train_set, held_out[:args.eval_size]))

def train(run, folder, config, reward_fn, args):
    """Everything from the data to result.json."""
    import datasets
    import trl
    with config.main_process_first():  # which may have to download, or to make the tiny model
        policy, sampler, train_set, held_out = load(args)
    checkpoints = folder / "checkpoint"
    checkpoint = get_last_checkpoint(checkpoints) if args.resume and checkpoints.is_dir() else None
    if run:
        step = int(checkpoint.rpartition("-")[2]) // steps_a_rollout(args) if checkpoint else -1
        for log in (folder / "metrics.jsonl", folder / "samples.jsonl"):
            write_lines(log, [record for record in read_lines(log) if record["step"] <= step])
        run.flags |= {"resume": False, "eval_size": len(held_out), "run_dir": str(folder)}
        run.begin()
        run.started -= sum(map(step_seconds, run.records))
    questions, size = ng.Curriculum(train_set, args.curriculum, args.seed), args.rollout_batch_size
    asked = sum((questions.take(size // args.group_size) for _ in range(args.max_steps)), [])
    bridge = Bridge(run, sampler, asked, held_out, reward_fn, args)
    config.output_dir, stop = str(checkpoints), [sampler.stop] * bool(sampler.stop)
    config.generation_kwargs = (config.generation_kwargs or {}) | (
        dict(min_tokens=args.min_tokens, stop=stop, include_stop_str_in_output=True, stop_token_ids=sampler.eos_ids)
        if config.use_vllm else dict(min_new_tokens=args.min_tokens))
    trainer = bridge.trainer = trl.GRPOTrainer(
        policy, bridge.reward, config, datasets.Dataset.from_dict({"prompt": list(map(str, range(len(asked))))}),
        processing_class=sampler.tokenizer, callbacks=[bridge], rollout_func=bridge.rollout)
    trainer.remove_callback(transformers.PrinterCallback)
    # all processes of FSDP have to take part in each token, until the last row of all has ended
    policy.generate = functools.partial(policy.generate, tokenizer=sampler.tokenizer, stop_strings=stop or None,
                                        synced_gpus=trainer.is_fsdp_enabled or None)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder / "model"))
    if run:
        run.write_result(train=ng.fingerprint(train_set), held_out=ng.fingerprint(held_out))

def main(argv):
    cut = argv.index("--") if "--" in argv else len(argv)
    given, others = ng.parse_args(argv[:cut]), argv[cut + 1:]
    args, processes = ng.configure(given, torch.cuda.is_available()), int(os.environ.get("WORLD_SIZE", 1))
    refuse(given, args, processes)
    try:
        reward_fn = ng.rewards.load_reward_fn(args.reward_fn)
        from trl import GRPOConfig
    except (ValueError, ImportError) as error:
        stop_run(f"{error}: see --reward-fn, or pip install trl==1.16.0")
    fields, parser = config_fields(args, processes), transformers.HfArgumentParser(GRPOConfig)
    for other in others:
        if other[2:].split("=")[0] in fields:
            stop_run(f"{other}: not behind --, a flag of nano_grpo.py says it")
    parser.error = lambda message: stop_run(f"behind --: {message}")
    parser.set_defaults(**fields, use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
                        disable_dropout=True, report_to="none", disable_tqdm=True)
    [config] = parser.parse_args_into_dataclasses(others)
    if args.tis_cap is not None and not config.use_vllm:
        stop_run("--tis-cap: the policy itself samples, but for -- --use_vllm true")
    run = Run(args.run_dir, vars(args)) if config.process_index == 0 else None
    with run or contextlib.nullcontext():
        [folder] = broadcast_object_list([run and str(run.folder)])
        train(run, Path(folder), config, reward_fn, args)

if __name__ == "__main__":
    main(sys.argv[1:])
