"""What the script needs of a model's inside: all its weights are loaded, its output matrix is taken in tiles,
its layers can be computed again in backward."""
import contextlib
import functools
import importlib.util
import re
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

def plain_class(path, auto_class):
    """The class that auto_class would take, from a second copy of its module. vLLM serves some models through
    the classes of transformers, and changes those: a policy of such a class cannot be built beside it."""
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    known = auto_class._model_mapping[type(config)]
    spec = importlib.util.find_spec(known.__module__)
    module = importlib.util.module_from_spec(spec)  # not in sys.modules: the first copy stays what it is
    spec.loader.exec_module(module)
    return getattr(module, known.__name__)

def load_tokenizer(path):
    """ValueError says what a folder lacks: transformers would look on the hub, or make an empty tokenizer."""
    from transformers import AutoTokenizer
    if (Path(path) / "adapter_config.json").exists():
        raise ValueError(f"--model {path} holds adapters, not a whole model: add them to their base (peft: "
                         "merge_and_unload) and save that")
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # it knows no word
        raise ValueError(f"--model {path} has no tokenizer: copy tokenizer.json and tokenizer_config.json "
                         "from the model that it was made from")
    return tokenizer

def load_policy(path, auto_class, is_beside_vllm=False):
    """The model with all its weights, in float32: in bfloat16 a small update rounds back to the old value.
    ValueError names the weights that do not fit: transformers would fill them with random numbers. A config
    that says they are quantised is not asked: whole ones are taken, quantised ones do not fit."""
    from transformers import AutoConfig
    auto_class, misfits = plain_class(path, auto_class) if is_beside_vllm else auto_class, []
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    is_quantised = getattr(config, "quantization_config", None)
    if is_quantised:
        del config.quantization_config
    for key_mapping in (None, {r"^(_orig_mod|module)\.": ""}):  # the prefix of a compiled or wrapped model
        policy, report = auto_class.from_pretrained(
            path, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True,
            key_mapping=key_mapping)
        found = [f"{kind.split('_')[0]} {min(map(str, keys))}" for kind, keys in report.items() if keys]
        if not found:
            if key_mapping:
                print(f"note: --model {path}: the prefix _orig_mod. or module. of its weights was taken off")
                del policy._weight_conversions  # of that prefix: it cannot be put on again when this is saved
            return policy
        misfits = misfits or found
    cure = " (quantised ones cannot be trained: give the full model)" if is_quantised else ""
    raise ValueError(f"its weights do not fit its config{cure}: {'; '.join(misfits)}")

def refuse_unsaveable(policy, tokenizer):
    """ValueError if the trained model could not be written: tried at the start, without its weights."""
    try:
        policy.generation_config.validate(strict=True)
    except ValueError:  # a temperature without do_sample, as some models have it: nothing here asks for it
        policy.generation_config.do_sample = True
    try:
        with tempfile.TemporaryDirectory() as folder:
            policy.save_pretrained(folder, state_dict={})
            tokenizer.save_pretrained(folder)
    except Exception as error:  # of any architecture
        raise ValueError(f"--model could not be saved after training ({str(error)[:160]}): mend its "
                         "config.json, generation_config.json or tokenizer_config.json") from error

def checkpoint_layers(policy):
    """--gradient-checkpointing: backward computes each layer again. The layers stay in evaluation mode, since
    in training mode some would drop out."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    for layer in policy.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward,
                                              use_reentrant=False, preserve_rng_state=False)
    policy.shares_prompts = False  # a layer that is computed again would write to the cache again

# --- LoRA (arXiv 2106.09685): W + 32 / rank B A, where only A and B are trained ----------------------------
def add_adapters(policy, rank, seed):
    """Puts adapters, which change nothing yet, on all matrices but the output, and freezes the rest."""
    import peft
    torch.manual_seed(seed)
    # with alpha / rank in front, one learning rate suits all ranks
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear"), policy)

@contextlib.contextmanager
def without_adapters(policy):
    """Within the block a policy with adapters is the model as it was loaded; another one stays as it is."""
    layers = [layer for layer in policy.modules() if hasattr(layer, "get_delta_weight")]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)

def loaded_names(policy):
    """{name in state_dict: name in the model as loaded}, without adapters. Those of state_dict, because
    named_parameters lacks a tied output matrix, which some engines keep."""
    return {name: name.replace(".base_layer.", ".") for name in policy.state_dict() if ".lora_" not in name}

def tied_weights(policy):
    """(name, weight) of each weight that the model has under another name too."""
    first = {}
    return [(name, weight) for name, weight in policy.state_dict().items()
            if first.setdefault((weight.data_ptr(), weight.shape), name) != name]

@torch.no_grad()
def merged_weights(policy):
    """(name, weight) of all weights under the names of the model as loaded, with adapters added in, one after
    the other."""
    weights = policy.state_dict()
    for name, loaded_name in loaded_names(policy).items():
        weight, (owner, _, kind) = weights[name], name.rpartition(".base_layer.")
        if owner and kind == "weight":
            weight = weight + policy.get_submodule(owner).get_delta_weight("default")
        yield loaded_name, weight

def equal_weights(model, weights):
    """-> the names of the (name, weight) that a model of any dtype holds, cast to it, bit for bit. Not those
    of one number: in another order they would be equal too."""
    parameters, names = dict(model.named_parameters()), set()
    for name, weight in weights:
        if name in parameters:
            held = parameters[name][:len(weight)]  # an engine may pad the vocabulary
            if held.shape == weight.shape and torch.equal(held, weight.to(held)):
                low, high = held.aminmax()  # in one pass: this is done for each weight after each push
                if low < high:
                    names.add(name)
    return names

@functools.cache
def cache_class():
    from transformers import DynamicCache
    class Cache(DynamicCache):
        """Keys are kept in the dtype of the values: under autocast rotary positions make them float32, which
        would take twice the memory and change no product."""
        def update(self, keys, values, *rest, **more):
            return super().update(keys.to(values.dtype), values, *rest, **more)
    return Cache

def new_cache(config):
    """For the keys and values of what a model has read."""
    return cache_class()(config=config)

@torch.no_grad()
def can_cut_cache(policy, next_logits):
    """Tries what a sampler asks of a cache, and that padding on the left changes no logits.
    next_logits(ids, attention mask, cache) -> (B, V)."""
    try:
        ids, cache = torch.tensor([[0, 1]], device=policy.device), new_cache(policy.config)
        with autocast(policy.device):
            plain = next_logits(ids, torch.ones_like(ids), cache)
            padded = next_logits(F.pad(ids, (1, 0)), F.pad(ids * 0 + 1, (1, 0)), new_cache(policy.config))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0], device=ids.device))
        noise = (1e-4 if ids.device.type == "cpu" else 0.05) * plain.abs().max()
        return cache.get_seq_length() == 2 and bool((plain - padded).abs().max() <= noise)
    except Exception:  # of any architecture: the slow path works for each that has logits
        return False

def log_probs_and_entropy(logits, labels, temperature=1.0):
    """(..., V) logits, (...) labels -> log-probs of labels, entropy. In float32: bfloat16 is off by 0.08."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, labels[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)

def autocast(device):
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()

# --- One prompt, many responses: its keys and values are computed once, and given to all of its rows --------
def shared_prompts(rows):
    """-> (tokens of a prompt, the number of its prompt for each row), or None: the prompts have to be of one
    length, since then nothing needs a mask, and a third of the tokens has to be saved."""
    numbers, length = {}, len(rows[0].example.prompt_ids)
    which = [numbers.setdefault(id(row.example), len(numbers)) for row in rows]
    read = len(numbers) * length + len(rows) * max(len(row.response_ids) for row in rows)
    is_worth_it = read <= 2 / 3 * len(rows) * max(map(len, rows))
    fits_one_tensor = all(len(row.example.prompt_ids) == length for row in rows)
    return (length, which) if is_worth_it and fits_one_tensor else None

def tokens_held(rows, shares_prompts):
    """The tokens that one pass over rows reads, padding included. Keys and values of a shared prompt, which
    each row gets, count for an eighth of a token: what backward keeps of one is some 8 times as much."""
    padded, shared = len(rows) * max(map(len, rows)), shares_prompts and shared_prompts(rows)
    if not shared:
        return padded
    copied = len(rows) * shared[0]
    return padded - copied + (max(shared[1]) + 1) * shared[0] + copied // 8

def states_behind_prompts(base, cache, ids, length, which):
    """(B, S) ids that begin with prompts of `length` tokens, for each row the number of its prompt, an empty
    cache -> (B, S - length + 1, H) last hidden states, from the last token of the prompt on."""
    firsts = [which.index(number) for number in range(max(which) + 1)]
    hidden = base(ids[firsts, :length], past_key_values=cache, use_cache=True).last_hidden_state[which, -1:]
    if ids.shape[1] == length:  # responses of one token
        return hidden
    cache.batch_select_indices(torch.tensor(which, device=ids.device))
    rest = base(ids[:, length:], past_key_values=cache, use_cache=True).last_hidden_state
    return torch.cat([hidden, rest], 1)

@torch.no_grad()
def can_share_prompts(policy):
    """Whether states_behind_prompts are those of whole rows, tried once. The cache has to keep the keys and
    values of all tokens as they are: others change in place what backward needs. Where rotary angles depend
    on the length of what is read, a prompt that is read alone gets others."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
    if not hasattr(policy, "shares_prompts"):
        try:
            ids = torch.tensor([[0, 1, 2, 3], [2, 1, 0, 2], [0, 1, 3, 1]], device=policy.device)
            base, config = policy.base_model, policy.config.get_text_config()
            cache = new_cache(policy.config)
            with autocast(policy.device):
                shared = states_behind_prompts(base, cache, ids, 2, [0, 1, 0])
                plain = base(ids, use_cache=False).last_hidden_state[:, 1:]
            noise = (1e-4 if ids.device.type == "cpu" else 0.05) * plain.abs().max()
            policy.shares_prompts = (
                has_fused_head(policy) and bool((plain - shared).abs().max() <= noise)
                and not re.search("dynamic|longrope", str(getattr(config, "rope_parameters", "")))
                and {*map(type, cache.layers)} <= {DynamicLayer, DynamicSlidingWindowLayer})
        except Exception:  # of any architecture: whole rows work for each
            policy.shares_prompts = False
    return policy.shares_prompts and not getattr(policy, "is_compiled", False)

def token_log_probs(policy, ids, labels, response_mask, temperature, shared=None):
    """(B, S) ids, the (B, S) labels that they predict, where those are of responses -> their log-probs and
    entropies, (N) each. No attention mask: padding is on the right, where a causal model does not look.
    shared: what shared_prompts says of the rows."""
    labels = labels[response_mask]
    if not has_fused_head(policy):
        with autocast(policy.device):
            logits = policy(ids, use_cache=False).logits[response_mask]
        return log_probs_and_entropy(logits, labels, temperature)
    head, base = policy.get_output_embeddings(), policy.base_model
    with autocast(policy.device):
        if shared:
            response_mask = response_mask[:, shared[0] - 1:]
            hidden = states_behind_prompts(base, new_cache(policy.config), ids, *shared)
        else:
            if getattr(policy, "is_compiled", False):
                base = torch.compile(base, dynamic=True)  # torch keeps it
            hidden = base(ids, use_cache=False).last_hidden_state
    hidden, weight = hidden[response_mask].to(head.weight.dtype), head.weight
    if getattr(head, "bias", None) is not None:
        hidden, weight = F.pad(hidden, (0, 1), value=1.0), torch.cat([weight, head.bias[:, None]], 1)
    dtype = torch.bfloat16 if policy.device.type == "cuda" else weight.dtype
    return TiledHead.apply(hidden / temperature, weight, labels, dtype)

TILE = {"cpu": 512, "cuda": 8192}  # vocabulary entries at a time; on a CPU what stays in its cache

def product(a, b, dtype):
    """a @ b as a tensor of `dtype`; a product of halves on CUDA is not rounded to half before."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and a.dtype != dtype else (a @ b).to(dtype)

def tiles(weight, labels, size):
    """The output matrix and the labels in it, tile by tile -> (tile, first row, (N, 1) index of the label in
    the tile, (N, 1) whether it is there). Without indexing by a mask, for which a GPU would have to wait."""
    for start in range(0, len(weight), size):
        tile, index = weight[start:start + size], labels[:, None] - start
        yield tile, start, index.clamp(0, len(tile) - 1), (index >= 0) & (index < len(tile))

class TiledHead(torch.autograd.Function):
    """(N, H) hidden states, (V, H) output matrix, (N) labels -> (N) log-probs of the labels, (N) entropies.
    It goes over the vocabulary in tiles, and again in backward: the (N, V) logits never exist. Factors are
    rounded to `dtype`; products and sums are in float32 or better (on a CPU in `dtype`)."""
    @staticmethod
    def forward(ctx, hidden, weight, labels, dtype):
        size, half, label_logits = TILE[hidden.device.type], hidden.to(dtype), torch.zeros_like(hidden[:, :1])
        log_zs, means = hidden.new_empty(2, -(-len(weight) // size), len(hidden))  # of each tile
        for number, (tile, _, index, is_here) in enumerate(tiles(weight, labels, size)):
            logits = product(half, tile.to(dtype).T, hidden.dtype)
            label_logits = torch.where(is_here, logits.gather(1, index), label_logits)
            log_zs[number] = logits.logsumexp(1)
            means[number] = (logits.softmax(1) * logits).sum(1)
        log_z = log_zs.logsumexp(0)
        entropy = log_z - (log_zs.softmax(0) * means).sum(0)
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.dtype, ctx.size = dtype, size
        ctx.set_materialize_grads(False)  # an entropy that is only logged has no gradient at all
        return label_logits[:, 0] - log_z, entropy

    @staticmethod
    def backward(ctx, d_log_probs, d_entropy):
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        factor = torch.zeros_like(hidden[:, :1]) if d_log_probs is None else d_log_probs[:, None]
        d_hidden, half = torch.zeros_like(hidden), hidden.to(ctx.dtype)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for tile, start, index, is_here in tiles(weight, labels, ctx.size):
            half_tile = tile.to(ctx.dtype)
            log_p = product(half, half_tile.T, hidden.dtype).sub_(log_z[:, None])
            # d log pi(label) / d logits = [label] - p;  d entropy / d logits = -p (log p + entropy)
            slope = factor
            if d_entropy is not None:
                slope = factor + d_entropy[:, None] * (log_p + entropy[:, None])
            d_logits = log_p.exp_().mul_(-slope).scatter_add_(1, index, factor * is_here).to(ctx.dtype)
            d_hidden += d_logits @ half_tile
            if d_weight is not None:
                d_weight[start:][:len(tile)] = d_logits.T @ half
        return d_hidden, d_weight, None, None

def has_fused_head(policy):
    """Whether TiledHead can take the place of the output matrix, tried once."""
    if not hasattr(policy, "has_fused_head"):
        policy.has_fused_head = fits_tiled_head(policy)
    return policy.has_fused_head

@torch.no_grad()
def fits_tiled_head(policy):
    """True if the output matrix, on the last hidden states, is the last thing in the model's own forward:
    some cap or scale the logits behind it, under many names. Its output is made large: a cap shows."""
    ids, seen, head = torch.arange(3, 11, device=policy.device)[None], [], policy.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        return False
    watch_head = lambda _, inputs, output: seen.append((inputs[0], 99 * output)) or seen[0][1]
    with head.register_forward_hook(watch_head):
        logits = policy(ids, use_cache=False).logits
    hidden = getattr(policy.base_model(ids, use_cache=False), "last_hidden_state", None)
    return hidden is not None and torch.equal(hidden, seen[0][0]) and torch.equal(logits, seen[0][1])
