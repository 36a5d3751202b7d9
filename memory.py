"""What fits on the card: from a model's config, the flags and the memory of the GPU, before anything loads.

`plan` chooses the token budget of a microbatch, gradient checkpointing and the engine's share. `update_peak`
counts the tensors that live at the worst moment of an update; tools/gpu_check.py --plan puts it beside the
same update under fake tensors. Here gb is GiB, 2^30 bytes, as torch and nvidia-smi count.
"""
from pathlib import Path
from typing import NamedTuple

GB = 2**30
SPARE = 0.9           # of a card is planned with; the rest is for fragmentation and the unknown
CONTEXT_GB = 0.6      # CUDA's context, cuBLAS workspaces
ASLEEP_GB = 0.9       # what a sleeping engine keeps
ENGINE_WORK_GB = 3.0  # of an awake one beside weights and cache: CUDA graphs, a prefill, logits of its rows
PROMPT = 256          # tokens of a prompt, since the data is not read yet
HEAD_TILE = 8192      # model.TILE["cuda"]
# Tokens of a microbatch: with so many a GPU is busy; more than the second gain nothing; tried in such steps.
ENOUGH_TOKENS, MOST_TOKENS, UNIT = 3072, 65536, 256
CARDS = (24, 40, 48, 80, 141)
CAPS = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # the head in tiles cannot do these

class Plan(NamedTuple):
    fits: bool
    microbatch_tokens: int
    gradient_checkpointing: bool
    lora_rank: int | None
    engine_gb: float          # of its GPU, for vLLM; 0 with the hf sampler
    predicted_peak_gb: float  # of the trainer in an update, without the CUDA context and a sleeping engine
    gpu_memory_utilization: float | None
    about: str                # one line: the plan, or what would fit

class Sizes(NamedTuple):
    weights: int   # numbers of weights: all, those of the layers' matrices, of the output matrix,
    matrices: int
    head: int
    adapters: int  # of adapters of rank 1
    hidden: int    # widths
    inner: int
    queries: int
    keys: int
    layers: int
    vocabulary: int
    context: int
    logits: int    # bytes of a token's logits and their gradient
    is_tied: bool  # the output matrix is the embedding

def meta_model(config):
    """The model of a transformers config in float32 without memory: shapes only."""
    import torch
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

def sizes(config):
    """A transformers config -> Sizes, counted on a model without memory."""
    model, text = meta_model(config), config.get_text_config()
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = [one for one in model.parameters() if one.dim() > 1 and not any(one is end for end in ends)]
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    # Tiles: two at a time, each in float32 and bfloat16. Whole logits: five in float32.
    is_capped = any(getattr(text, name, None) not in (None, 1) for name in CAPS)
    logits = 20 * text.vocab_size if is_capped else 12 * min(HEAD_TILE, text.vocab_size)
    return Sizes(
        sum(one.numel() for one in model.parameters()), sum(one.numel() for one in matrices), ends[1].numel(),
        sum(sum(one.shape[-2:]) for one in matrices), text.hidden_size,
        getattr(text, "intermediate_size", None) or 4 * text.hidden_size, heads * head_dim,
        (getattr(text, "num_key_value_heads", None) or heads) * head_dim, text.num_hidden_layers,
        text.vocab_size, getattr(text, "max_position_embeddings", None) or 4096, logits,
        ends[0] is ends[1])

def lasting(model, lora_rank, copies, tensors=4):
    """Bytes of float32 weights, copies of the model, and gradients and two Adam states of what is trained:
    tensors=3 leaves out the gradients, as between two updates."""
    frozen = model.weights * (copies + bool(lora_rank))
    return 4 * (frozen + tensors * (lora_rank * model.adapters if lora_rank else model.weights))

def update_peak(model, tokens, gradient_checkpointing=False, lora_rank=None, copies=0):
    """Bytes of the trainer at the worst moment of an update: in the second or a later microbatch, when
    gradients and Adam's states are there. model: its Sizes; tokens: padded, of a microbatch; copies: further
    models in float32. Under autocast: float32 weights, products in bfloat16; flash attention."""
    hidden, inner, casts = model.hidden, model.inner, 2 * model.matrices
    # What a layer keeps of a token for its backward pass: the residual stream in float32 (twice) and, where
    # the norms learn, their output in float32 (twice); in bfloat16 the inputs of the seven products, q, k, v,
    # the attention's output, and four times the width of the MLP.
    layer = 26 * hidden + 4 * model.queries + 4 * model.keys + 8 * inner
    if lora_rank:
        layer += 2 * model.queries - 8 * hidden + 14 * lora_rank
    head = model.logits + 22 * hidden  # with hidden states and their gradient in float32
    head_gradient = 0 if lora_rank else 4 * model.head
    weights = lasting(model, lora_rank, copies)
    if not gradient_checkpointing:
        return weights + casts + head_gradient + tokens * (model.layers * layer + head)
    # The inputs of the layers stay. Beside them stand, at the end of the forward pass, the weights that
    # autocast keeps in bfloat16; in backward one layer computed again, with the gradients inside it; or at
    # the very end the gradient of the embedding, if tied with that of the output matrix and their sum.
    kept = tokens * 4 * hidden * model.layers
    forward = kept + tokens * (8 * inner + 14 * hidden) + (0 if lora_rank else casts)
    again = kept + tokens * max(head, layer + 4 * inner + 12 * hidden) + casts // model.layers
    embedding = head_gradient * (3 if model.is_tied else 1) + tokens * 24 * hidden
    return weights + max(forward, head_gradient + again, embedding)

def plan(config, memory_gb, num_gpus, *, microbatch_tokens=None, gradient_checkpointing=None, lora_rank=None,
         gpu_memory_utilization=None, max_tokens=1024, max_model_len=None, has_engine=True, copies=0,
         sampler_batch_size=256, advise=True):
    """-> the Plan for a transformers config (or its Sizes) and GPUs of memory_gb each. What is not None is
    kept, and the rest fitted round it. copies: frozen float32 copies of the policy beside it."""
    model = config if isinstance(config, Sizes) else sizes(config)
    is_shared, row = has_engine and num_gpus == 1, max_tokens + PROMPT  # a row is never split
    room, between = SPARE * memory_gb - CONTEXT_GB, lasting(model, lora_rank, copies, 3) / GB
    token = 4 * model.keys * model.layers  # bytes of keys and values in bfloat16
    if has_engine:  # awake: on its own GPU, or beside the weights and Adam's states of the trainer
        engine = min(0.5 * memory_gb, room - between) if is_shared else 0.85 * memory_gb
        engine = gpu_memory_utilization * memory_gb if gpu_memory_utilization else max(0.0, engine)
        rollout = engine + between * is_shared
        least = ENGINE_WORK_GB + (2 * model.weights + token * (max_model_len or model.context)) / GB
    else:  # the hf sampler: weights and cache in bfloat16, logits of its rows in float32 and float64
        cache = sampler_batch_size * (token * row + 32 * model.vocabulary)
        engine, least, rollout = 0.0, 0.0, between + (2 * model.matrices + cache) / GB
    options = [row, *range(row // UNIT * UNIT + UNIT, MOST_TOKENS + 1, UNIT)]
    options = [microbatch_tokens] if microbatch_tokens else options
    for checkpointing in (False, True) if gradient_checkpointing is None else (gradient_checkpointing,):
        peaks = {tokens: update_peak(model, max(tokens, row), checkpointing, lora_rank, copies) / GB
                 for tokens in options}
        fitting = [tokens for tokens in options if peaks[tokens] <= room - ASLEEP_GB * is_shared]
        tokens = max(fitting, default=options[0])
        if fitting and (microbatch_tokens or tokens >= ENOUGH_TOKENS):
            break
    fits = bool(fitting) and rollout <= room and least <= engine
    known = Plan(fits, tokens, checkpointing, lora_rank, engine, peaks[tokens],
                 engine / memory_gb if has_engine else None, "")
    if not advise:
        return known
    about = describe(known, memory_gb, rollout, least)
    if not fits:
        about += "; " + advice(model, memory_gb, num_gpus, lora_rank, dict(
            max_tokens=max_tokens, max_model_len=max_model_len, has_engine=has_engine, advise=False,
            sampler_batch_size=sampler_batch_size))
    return known._replace(about=about)

def describe(known, memory_gb, rollout, least):
    """The plan in one line; where it does not fit, what is too large."""
    how = f"--microbatch-tokens {known.microbatch_tokens}" + (
        " --gradient-checkpointing" if known.gradient_checkpointing else "") + (
        f" --lora-rank {known.lora_rank}" if known.lora_rank else "")
    takes = f"an update takes {known.predicted_peak_gb:.1f} GiB at most, a rollout {rollout:.1f}"
    engine = f" ({known.engine_gb:.1f} of them the engine)" if known.engine_gb else ""
    if known.fits:
        return f"memory: {takes}{engine} of {memory_gb:.1f}: {how}"
    lacks = f", and vLLM needs {least:.1f}" if least > known.engine_gb else ""
    return f"--model does not fit into {SPARE:.0%} of {memory_gb:.1f} GiB with {how}: {takes}{engine}{lacks}"

def advice(model, memory_gb, num_gpus, lora_rank, more):
    """What would fit, in half a sentence."""
    ways = [("no --microbatch-tokens or --gpu-memory-utilization", memory_gb, num_gpus, lora_rank, {})]
    ways += [] if lora_rank else [("--lora-rank 32", memory_gb, num_gpus, 32, {})]
    ways += [("--max-model-len 4096", memory_gb, num_gpus, lora_rank, dict(max_model_len=4096)),
             ("--sampler-batch-size 32", memory_gb, num_gpus, lora_rank, dict(sampler_batch_size=32)),
             ("two such cards", memory_gb, 2, lora_rank, {})]
    ways += [(f"a card of {card} GB", card, num_gpus, lora_rank, {}) for card in CARDS if card > memory_gb]
    fitting = [name for name, card, count, rank, changes in ways
               if plan(model, card, count, lora_rank=rank, **more | changes).fits]
    return f"{' or '.join(fitting[:2]) or 'a smaller model'} would fit"

def plan_for(config, args, memory_gb, num_gpus, has_engine):
    """-> the Plan under the flags `args`, as they were configured for CUDA."""
    return plan(
        config, memory_gb, num_gpus, microbatch_tokens=args.microbatch_tokens,
        gradient_checkpointing=args.gradient_checkpointing or None, lora_rank=args.lora_rank,
        gpu_memory_utilization=args.gpu_memory_utilization, max_tokens=args.max_tokens,
        max_model_len=args.max_model_len,  # the second copy: --overlap with hf samples with one
        copies=bool(args.kl_coef and not args.lora_rank) + bool(args.overlap and not has_engine),
        sampler_batch_size=args.sampler_batch_size, has_engine=has_engine)

def finds_cuda():
    """torch.cuda.is_available(), and a line on the cause where a GPU is there that torch cannot use."""
    import torch
    if torch.version.cuda and not torch.cuda.is_available() and Path("/dev/nvidia0").exists():
        print(f"note: torch {torch.__version__} cannot use the GPU that is here: CUDA {torch.version.cuda} "
              "needs an NVIDIA driver of version 580 or newer; on with the CPU")
    return torch.cuda.is_available()

def plan_for_cuda(config, args, has_engine):
    """-> the Plan for the GPUs of this machine; what it chooses goes into args."""
    import torch
    memory = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    known = plan_for(config, args, min(memory) / GB, len(memory), has_engine)
    for key in ("microbatch_tokens", "gradient_checkpointing", "gpu_memory_utilization"):
        setattr(args, key, getattr(known, key))
    return known

class OutOfMemory(RuntimeError):
    """A single row does not fit into the memory of the policy's device."""

def fit_in_memory(compute, rows, args):
    """compute(), again and again with half of args.microbatch_tokens while memory runs out: the split into
    microbatches changes no result. OutOfMemory if one of the rows does not fit alone."""
    import torch
    while True:
        try:
            return compute()
        except torch.OutOfMemoryError:
            longest = max(map(len, rows))
        torch.cuda.empty_cache()  # only here have the tensors of the pass gone with the error
        if args.microbatch_tokens <= longest:
            raise OutOfMemory(f"a row of {longest} tokens does not fit into memory: --resume with "
                              "--gradient-checkpointing, or begin with --lora-rank 32 or lower --max-tokens")
        args.microbatch_tokens //= 2
        print(f"note: out of memory; on with --microbatch-tokens {args.microbatch_tokens}")
