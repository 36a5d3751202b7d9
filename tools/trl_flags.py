"""The command line of trl_grpo.py: what each flag of nano_grpo.py is in TRL 1.16's GRPOConfig, or why it is
refused. Flags that are in neither table act without TRL: data, prompts, rewards, evaluation, logs.
"""
import os
from pathlib import Path

import nano_grpo as ng
import torch
from run import stop_run
from transformers import HfArgumentParser

REFUSED = {  # flags: why
    "max_hours leaderboard": "the processes have no common clock: use the limit of your queue, and --resume",
    "overlap dynamic_sampling difficulty_filter guessable_filter": "TRL samples once a step, then it trains",
    "thinking_budget wait": "TRL samples a response in one go",
    "max_engine_gap": "TRL has no canary; with --tis-cap it logs the gap",
    "reset_optimizer": "TRL keeps the moments of Adam", "tau": "TRL does not have --loss kimi",
    "lora_rank": "TRL takes a peft_config, which GRPOConfig does not hold",
    "sampler_batch_size max_model_len gpu_memory_utilization entropy_coef compile":
        "TRL has its own, or something like it: give that field of GRPOConfig behind --"}
LOSS_TYPES = {"sequence": "grpo", "token": "dapo", "constant": "dr_grpo"}  # by --loss-aggregation

def refuse(given, args, processes):
    """Stops, in one line, where TRL cannot do what a flag says, or would do something else."""
    why = {key: reason for keys, reason in REFUSED.items() for key in keys.split()}
    for key in given:
        if given[key] and key in why:
            stop_run(f"--{key.replace('_', '-')}: {why[key]}")
    by_token, size, loss = args.loss_aggregation == "token", args.train_batch_size, args.loss
    for is_bad, message in [
        (args.mode != "grpo", f"--mode {args.mode}: this is --mode grpo; TRL has an SFTTrainer"),
        (args.sampler == "vllm", "--sampler vllm: give TRL's own -- --use_vllm true --vllm_mode colocate"),
        (args.curriculum != "uniform", f"--curriculum {args.curriculum}: TRL fixes its order before the run"),
        (args.baseline in ("none", "max"), f"--baseline {args.baseline}: TRL takes off the group's mean"),
        (loss == "kimi", "--loss kimi: TRL does not have it"),
        (loss == "pg" and steps_a_rollout(args) > 1, "--loss pg: TRL always has a ratio: take noclip"),
        (loss == "cispo" and not by_token, "--loss cispo: TRL's needs --loss-aggregation token"),
        (args.kl_coef and args.kl != "k3", f"--kl {args.kl}: TRL has k3 only"),
        (args.kl_coef and loss == "gspo", "--kl-coef: with --loss gspo TRL weighs it by another ratio"),
        (args.kl_ref_every and args.resume, "--kl-ref-every: TRL does not save the copy, so no --resume"),
        (args.resume and list(Path(args.run_dir, "checkpoint").glob("step-*.pt")),
         f"--resume: {args.run_dir} is a run of nano_grpo.py: go on with that"),
        (args.truncated == "mask" and (args.stop or not by_token), "--truncated mask: "
         "TRL's needs --loss-aggregation token and a prompt without a stop string: take zero"),
        (args.eval_temperature != args.temperature, "--eval-temperature: TRL has one temperature"),
        (size % processes, f"--train-batch-size {size} does not divide by {processes} processes")]:
        if is_bad:
            stop_run(message)

def steps_a_rollout(args):
    """Optimizer steps, which TRL counts, in a rollout batch, which nano_grpo.py counts."""
    return args.rollout_batch_size // args.train_batch_size * args.epochs_per_rollout_batch

def config_fields(args, processes):
    """Flags -> the fields of GRPOConfig that say the same. Advantages come from nano_grpo.py, so TRL divides
    them by nothing; its schedule of the learning rate is constant, since that of nano_grpo.py is set anew."""
    steps, share = steps_a_rollout(args), args.train_batch_size // processes
    most = max(1, (args.microbatch_tokens or 16384) // args.max_tokens)
    rows = max(n for n in range(1, share + 1) if share % n == 0 and n <= most)
    wide = 1e9 if args.loss == "noclip" else 0  # no ratio reaches it
    return dict(
        seed=args.seed, max_steps=args.max_steps * steps, logging_steps=steps, shuffle_dataset=False,
        save_steps=args.eval_every * steps, save_total_limit=args.keep, learning_rate=args.lr,
        lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=args.max_grad_norm,
        per_device_train_batch_size=rows, gradient_accumulation_steps=share // rows,
        generation_batch_size=args.rollout_batch_size, num_iterations=args.epochs_per_rollout_batch,
        num_generations=args.group_size, max_completion_length=args.max_tokens, temperature=args.temperature,
        loss_type="cispo" if args.loss == "cispo" else LOSS_TYPES[args.loss_aggregation],
        importance_sampling_level="sequence" if args.loss == "gspo" else "token",
        epsilon=wide or args.cliprange, epsilon_high=wide or args.cliprange_high + (args.loss == "cispo"),
        scale_rewards="none", mask_truncated_completions=args.truncated == "mask", beta=args.kl_coef,
        sync_ref_model=bool(args.kl_ref_every), ref_model_sync_steps=(args.kl_ref_every or 1) * steps,
        ref_model_mixup_alpha=1.0, vllm_importance_sampling_correction=args.tis_cap is not None,
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=args.tis_cap or 1.0,
        gradient_checkpointing=args.gradient_checkpointing)

def parse(argv):
    """Flags of nano_grpo.py, then perhaps `--` and fields of GRPOConfig -> (flags, config, reward_fn)."""
    cut = argv.index("--") if "--" in argv else len(argv)
    given, others, has_cuda = ng.parse_args(argv[:cut]), argv[cut + 1:], torch.cuda.is_available()
    args, processes = ng.configure(given, has_cuda), int(os.environ.get("WORLD_SIZE", 1))
    refuse(given, args, processes)
    fields = config_fields(args, processes)
    for other in others:
        if other[2:].split("=")[0] in fields:
            stop_run(f"{other} behind --: a flag of nano_grpo.py says it, before --")
    try:
        from trl import GRPOConfig
        reward_fn = ng.rewards.load_reward_fn(args.reward_fn)
    except ImportError as error:
        stop_run(f"TRL cannot be imported ({error}): pip install trl==1.16.0")
    except ValueError as error:
        stop_run(f"--reward-fn {error}")
    parser = HfArgumentParser(GRPOConfig)
    parser.error = lambda message: stop_run(f"behind --: {message}")
    parser.set_defaults(**fields, use_cpu=not has_cuda, bf16=has_cuda, disable_dropout=True, report_to="none",
                        disable_tqdm=True)
    try:
        [config] = parser.parse_args_into_dataclasses(others)
    except ValueError as error:  # of a name that is no field, or values that do not fit together
        stop_run(f"behind --: {' '.join(str(error).split())[:200]}")
    if args.tis_cap is not None and not config.use_vllm:
        stop_run("--tis-cap: without -- --use_vllm true the policy itself samples, and the weight is 1")
    args.trl = f"{processes} processes {' '.join(others)}"  # kept in args.json
    return args, config, reward_fn

def generation_kwargs(args, config, sampler):
    """What ends a response, in the names of vLLM or of transformers."""
    stop = [sampler.stop] if sampler.stop else None
    for_vllm = dict(min_tokens=args.min_tokens, stop=stop, include_stop_str_in_output=True,
                    stop_token_ids=sampler.eos_ids)
    for_transformers = dict(min_new_tokens=args.min_tokens, stop_strings=stop)
    return (for_vllm if config.use_vllm else for_transformers) | (config.generation_kwargs or {})
