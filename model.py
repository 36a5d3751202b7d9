"""What the script needs of a model's inside: all its weights are loaded, its output matrix is taken in tiles,
its layers can be computed again in backward."""
import functools

import torch
import torch.utils.checkpoint

def load_policy(path, auto_class):
    """The model with all its weights, in float32: in bfloat16 a small update rounds back to the old value.
    ValueError names the weights that do not fit: transformers would fill them with random numbers."""
    misfits = []
    for key_mapping in (None, {r"^(_orig_mod|module)\.": ""}):  # the prefix of a compiled or wrapped model
        policy, report = auto_class.from_pretrained(path, dtype=torch.float32, trust_remote_code=False,
                                                    output_loading_info=True, key_mapping=key_mapping)
        found = [f"{kind.split('_')[0]} {min(map(str, keys))}" for kind, keys in report.items() if keys]
        if not found:
            if key_mapping:
                print(f"note: --model {path}: the prefix _orig_mod. or module. of its weights was taken off")
            return policy
        misfits = misfits or found
    raise ValueError(f"its weights do not fit its config: {'; '.join(misfits)}")

def checkpoint_layers(policy):
    """--gradient-checkpointing: backward computes each layer again. The layers stay in evaluation mode, since
    in training mode some would drop out."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    for layer in policy.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward,
                                              use_reentrant=False, preserve_rng_state=False)

def log_probs_and_entropy(logits, labels, temperature=1.0):
    """(..., V) logits, (...) labels -> log-probs of labels, entropy. In float32: bfloat16 is off by 0.08."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, labels[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)

TILE = {"cpu": 512, "cuda": 8192}  # vocabulary entries at a time; on a CPU what stays in its cache

class TiledHead(torch.autograd.Function):
    """(N, H) hidden states, (V, H) output matrix, (N) labels -> (N) log-probs of the labels, (N) entropies.
    It goes over the vocabulary in tiles, and again in backward: the (N, V) logits never exist. Products, and
    so the logits, are rounded to `dtype`; the sums are in float32 or better."""
    @staticmethod
    def forward(ctx, hidden, weight, labels, dtype):
        tile, half = TILE[hidden.device.type], hidden.to(dtype)
        parts, label_logits = weight.split(tile), torch.empty_like(hidden[:, 0])
        log_zs, means = hidden.new_empty(2, len(parts), len(hidden))  # of each tile
        for number, part in enumerate(parts):
            logits = (half @ part.to(dtype).T).to(hidden.dtype)
            here = labels // tile == number  # rows whose label is in this tile
            label_logits[here] = logits[here, labels[here] % tile]
            log_zs[number] = logits.logsumexp(1)
            means[number] = (logits.softmax(1) * logits).sum(1)
        log_z = log_zs.logsumexp(0)
        entropy = log_z - (log_zs.softmax(0) * means).sum(0)
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.dtype, ctx.tile = dtype, tile
        return label_logits - log_z, entropy

    @staticmethod
    def backward(ctx, d_log_probs, d_entropy):
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        d_hidden, d_weight, half = torch.zeros_like(hidden), torch.empty_like(weight), hidden.to(ctx.dtype)
        has_entropy = d_entropy.any()
        for number, part in enumerate(weight.split(ctx.tile)):
            half_part = part.to(ctx.dtype)
            log_p = (half @ half_part.T).to(hidden.dtype).sub_(log_z[:, None])
            here = labels // ctx.tile == number
            # d log pi(label) / d logits = [label] - p;  d entropy / d logits = -p (log p + entropy)
            factor = d_log_probs[:, None]
            if has_entropy:
                factor = factor + d_entropy[:, None] * (log_p + entropy[:, None])
            d_logits = log_p.exp_().mul_(-factor)
            d_logits[here, labels[here] % ctx.tile] += d_log_probs[here]
            d_logits = d_logits.to(ctx.dtype)
            d_hidden += d_logits @ half_part
            d_weight[number * ctx.tile:][:len(part)] = d_logits.T @ half
        return d_hidden, d_weight, None, None

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
