"""What fits on the card: from a model's config, the flags and the memory of the GPU, before anything loads.

`plan` chooses the token budget of a microbatch, gradient checkpointing and the engine's share. The formula of
`update_peak` counts the tensors that live at the worst moment of an update; tools/gpu_check.py --plan puts it
beside the same update under fake tensors. Here gb is GiB, 2^30 bytes, as torch and nvidia-smi count.
"""
from typing import NamedTuple

GB = 2**30
SPARE = 0.9           # of a card's memory is planned with; the rest is for fragmentation and the unknown
CONTEXT_GB = 0.6      # CUDA's context, cuBLAS workspaces
ASLEEP_GB = 0.9       # what a sleeping engine keeps
ENGINE_WORK_GB = 3.0  # of an awake one beside weights and cache: CUDA graphs, a prefill, logits of its rows
PROMPT = 256          # tokens of a prompt, where the data is not read yet
HEAD_TILE = 8192      # model.TILE["cuda"]
ENOUGH_TOKENS, MOST_TOKENS, UNIT = 3072, 65536, 256  # of a microbatch: a GPU is busy; no gain above; steps
CARDS = (24, 40, 48, 80, 141)

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
    """Numbers of weights: all, of the layers' matrices, of the output matrix, of adapters for each rank; and
    widths: hidden, intermediate, queries, keys; layers, vocabulary, longest context."""
    weights: int
    matrices: int
    head: int
    adapters: int
    hidden: int
    inner: int
    queries: int
    keys: int
    layers: int
    vocabulary: int
    context: int

def meta_model(config):
    """The model of a transformers config in float32 without memory: shapes only."""
    import torch
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

def sizes(config):
    model, text = meta_model(config), config.get_text_config()
    inputs, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = [weight for weight in model.parameters()
                if weight.dim() > 1 and weight is not inputs and weight is not head]
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys = (getattr(text, "num_key_value_heads", None) or heads) * head_dim
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    context = getattr(text, "max_position_embeddings", None) or 4096
    return Sizes(sum(weight.numel() for weight in model.parameters()), sum(one.numel() for one in matrices),
                 head.numel(), sum(sum(one.shape) for one in matrices), text.hidden_size, inner,
                 heads * head_dim, keys, text.num_hidden_layers, text.vocab_size, context)

def update_peak(model, tokens, gradient_checkpointing=False, lora_rank=None, copies=0):
    """Bytes of the trainer at the worst moment of an update: in the backward pass of the second or a later
    microbatch, when gradients and Adam's states are there. model: its Sizes; tokens: padded, of a microbatch;
    copies: further models in float32. Autocast: float32 weights, products in bfloat16, flash attention."""
    trained = lora_rank * model.adapters if lora_rank else model.weights
    lasting = 4 * model.weights * (1 + copies) + 4 * trained * (2 if lora_rank else 3)
    lasting += 8 * trained if lora_rank else 0
    hidden, inner, queries, keys = model.hidden, model.inner, model.queries, model.keys
    # What a layer keeps of a token for its backward pass: the residual stream in float32 (twice) and, where
    # the norms learn, their output in float32 (twice); in bfloat16 the inputs of the seven products, q, k, v,
    # the attention's output, and four times the width of the MLP.
    layer = 26 * hidden + 4 * queries + 4 * keys + 8 * inner
    if lora_rank:
        layer = 18 * hidden + 6 * queries + 4 * keys + 8 * inner + 14 * lora_rank
    # The output matrix in tiles: logits and their gradient, two tiles at a time, each in float32 and
    # bfloat16; hidden states and their gradient in float32.
    head = 12 * HEAD_TILE + 22 * hidden
    head_gradient = 0 if lora_rank else 4 * model.head
    if not gradient_checkpointing:
        return lasting + 2 * model.matrices + head_gradient + tokens * (model.layers * layer + head)
    # The inputs of the layers, and one layer after the other computed again, with the gradients inside it;
    # or, at the very end, the gradient of a tied output matrix, that of the embedding, and their sum.
    again = tokens * (4 * hidden * model.layers + max(head, layer + 4 * inner + 12 * hidden))
    again += 2 * model.matrices // model.layers
    return lasting + head_gradient + max(again, 2 * head_gradient + tokens * 24 * hidden)

def engine_least(model, context):
    """Bytes of the smallest engine that starts: weights and, for one sequence of `context` tokens, keys and
    values in bfloat16, and what it works with."""
    return 2 * model.weights + 4 * model.keys * model.layers * context + ENGINE_WORK_GB * GB

def plan(config, memory_gb, num_gpus, *, microbatch_tokens=None, gradient_checkpointing=None, lora_rank=None,
         gpu_memory_utilization=None, max_tokens=1024, max_model_len=None, has_engine=True, copies=0,
         sampler_batch_size=256, advise=True):
    """-> the Plan for a transformers config (or its Sizes) and GPUs of memory_gb each. What is not None is
    kept, and the rest is fitted round it. copies: frozen float32 copies of the model (--kl-coef)."""
    model = config if isinstance(config, Sizes) else sizes(config)
    is_shared = has_engine and num_gpus == 1
    room, row = SPARE * memory_gb - CONTEXT_GB, max_tokens + PROMPT  # a row is never split
    trained = lora_rank * model.adapters if lora_rank else model.weights
    between = (4 * model.weights * (1 + copies) + (12 if lora_rank else 8) * trained) / GB  # no gradients
    engine = 0.0
    if has_engine:  # awake: on its own GPU, or beside the weights and Adam's states of the trainer
        engine = min(0.5 * memory_gb, room - between) if is_shared else 0.85 * memory_gb
        engine = gpu_memory_utilization * memory_gb if gpu_memory_utilization else engine
        rollout = engine + between * is_shared
        least = engine_least(model, max_model_len or model.context) / GB
    else:  # the hf sampler: weights, keys and values in bfloat16, logits of its rows in float32 and float64
        cache = sampler_batch_size * (4 * model.keys * model.layers * row + 32 * model.vocabulary)
        rollout, least = between + (2 * model.matrices + cache) / GB, 0.0
    update_room = room - ASLEEP_GB * is_shared
    options = [microbatch_tokens] if microbatch_tokens else range(MOST_TOKENS, 0, -UNIT)
    options = [tokens for tokens in options if microbatch_tokens or tokens >= row] or [row]
    for checkpointing in (False, True) if gradient_checkpointing is None else (gradient_checkpointing,):
        peaks = {tokens: update_peak(model, max(tokens, row), checkpointing, lora_rank, copies) / GB
                 for tokens in options}
        tokens = next((tokens for tokens in options if peaks[tokens] <= update_room), None)
        if tokens and (checkpointing or tokens >= ENOUGH_TOKENS or microbatch_tokens):
            break
    tokens = tokens or options[-1]
    fits = peaks[tokens] <= update_room and rollout <= room and least <= engine
    known = Plan(fits, tokens, checkpointing, lora_rank, engine, peaks[tokens],
                 engine / memory_gb if has_engine else None, "")
    return known._replace(about=describe(known, memory_gb, between, rollout, least) + (
        "" if fits or not advise else "; " + advice(model, memory_gb, num_gpus, lora_rank, dict(
            max_tokens=max_tokens, max_model_len=max_model_len, has_engine=has_engine))))

def describe(known, memory_gb, between, rollout, least):
    """The plan in one line; where it does not fit, what is too large."""
    how = f"--microbatch-tokens {known.microbatch_tokens}" + (
        " --gradient-checkpointing" if known.gradient_checkpointing else "") + (
        f" --lora-rank {known.lora_rank}" if known.lora_rank else "")
    if known.fits:
        engine = f", {known.engine_gb:.1f} of them the engine" if known.engine_gb else ""
        return (f"memory: of {memory_gb:.1f} GiB an update takes {known.predicted_peak_gb:.1f} at most, a "
                f"rollout {rollout:.1f}{engine}: {how}")
    what = f"an update takes {known.predicted_peak_gb:.1f}, a rollout {rollout:.1f} GiB"
    if least > known.engine_gb:
        what = (f"vLLM needs {least:.1f} GiB and gets {max(0, known.engine_gb):.1f} beside {between:.1f} of "
                "weights and Adam's states (--gpu-memory-utilization, --max-model-len)")
    return f"the model does not fit in {SPARE:.0%} of {memory_gb:.1f} GiB with {how}: {what}"

def advice(model, memory_gb, num_gpus, lora_rank, more):
    """What would fit, in half a sentence."""
    ways = [] if lora_rank else [("--lora-rank 32", memory_gb, num_gpus, 32, {})]
    ways += [("--max-model-len 4096", memory_gb, num_gpus, lora_rank, dict(max_model_len=4096))]
    ways += [("two such cards", memory_gb, 2, lora_rank, {})]
    ways += [(f"a card of {card} GB", card, num_gpus, lora_rank, {}) for card in CARDS if card > memory_gb]
    fitting = [name for name, card, count, rank, changes in ways
               if plan(model, card, count, lora_rank=rank, advise=False, **(more | changes)).fits]
    return f"{' or '.join(fitting[:2]) or 'a smaller model'} would fit"

def plan_for_cuda(config, args, has_engine):
    """-> the Plan for the GPUs of this machine; what it chooses goes into args."""
    import torch
    memory = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    known = plan(
        config, min(memory) / GB, len(memory), microbatch_tokens=args.microbatch_tokens,
        gradient_checkpointing=args.gradient_checkpointing or None, lora_rank=args.lora_rank,
        gpu_memory_utilization=args.gpu_memory_utilization, max_tokens=args.max_tokens,
        max_model_len=args.max_model_len, copies=int(bool(args.kl_coef and not args.lora_rank)),
        sampler_batch_size=args.sampler_batch_size, has_engine=has_engine)
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
