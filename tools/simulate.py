"""An update of nano_grpo.py under fake tensors: what it takes on a GPU, measured on any machine.

The functions that run are the script's own, nano_grpo.train_step and all below it, on tensors that have
shapes and no numbers (torch's FakeTensorMode), while every storage that lives is counted.
"""
import argparse
import copy
import contextlib
import weakref
from unittest import mock

import nano_grpo as ng
import memory
import model as rooms
import torch
import torch.nn.functional as F
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all storages that live, while FakeTensorMode below it makes tensors of shapes
    only. What is computed from ids and masks alone is computed really: the sizes of what a mask picks out
    depend on it. A number that is read from a fake tensor, such as the loss for the log, is 0."""
    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        are_real = bool(tensors) and not any(isinstance(one, FakeTensor) for one in tensors)
        if func is torch.ops.aten._local_scalar_dense.default and not are_real:
            return 0.0
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) and not are_real:
            args = (args[0], self.positions(args[1]), *args[2:])
        result = None if are_real else func(*args, **kwargs)
        if are_real or not tensors and isinstance(result, torch.Tensor) and not result.is_floating_point():
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self.count(one.untyped_storage())
        return result

    @staticmethod
    def positions(indices):
        """Masks among indices become the positions where they are true."""
        found = []
        for index in indices:
            with unset_fake_temporarily():
                is_mask = index is not None and index.dtype == torch.bool
                found += index.nonzero(as_tuple=True) if is_mask else [index]
        return found

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size):
        self.known.discard(key)
        self.live -= size

def cuda_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
    """CUDA's operators under autocast and what they save: flash attention, with a mask the efficient one."""
    query, key, value = (one.bfloat16() for one in (query, key, value))
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale)[0]
    bias = torch.zeros(attn_mask.shape, dtype=query.dtype).expand(-1, query.shape[1], -1, -1)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]

@contextlib.contextmanager
def as_on_cuda():
    """A CPU build of torch has no backward pass for fake CUDA tensors, so these are fake CPU tensors, and in
    this block the five places that ask for the device do as on CUDA: autocast, attention, the head's dtype,
    its tiles and its products. All else is the script's own code."""
    head = rooms.TiledHead
    half = mock.Mock(apply=lambda *values: head.apply(*values[:3], torch.bfloat16))
    with contextlib.ExitStack() as stack:
        for room, name, value in [
                (rooms, "autocast", lambda device: torch.autocast("cpu", torch.bfloat16)),
                (F, "scaled_dot_product_attention", cuda_attention), (rooms, "TiledHead", half),
                (rooms, "TILE", {"cpu": rooms.TILE["cuda"]}),
                (rooms, "product", lambda a, b, dtype: a.new_empty(len(a), b.shape[1], dtype=dtype))]:
            stack.enter_context(mock.patch.object(room, name, value))
        yield

def has_fused_head(config):
    """As the script finds it out, on one thin layer with real numbers."""
    thin = dict(num_hidden_layers=1, intermediate_size=64, vocab_size=64, layer_types=None, pad_token_id=None)
    text = config.get_text_config()
    small = type(text)(**text.to_diff_dict() | {key: thin[key] for key in thin if hasattr(text, key)})
    torch.manual_seed(0)
    policy = transformers.AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    return rooms.fits_tiled_head(policy.eval())

def full_microbatches(tokens, longest, count):
    """Rows that fill `count` microbatches of `tokens` padded tokens, an eighth of each a prompt."""
    rows = max(1, tokens // longest)
    length = max(8, tokens // rows)
    example = ng.Example("", "", prompt_ids=[1] * (length // 8))
    short = [number == 0 and length > 8 for number in range(rows * count)]  # one of them needs padding
    responses = [[2] * (length - length // 8 - one) for one in short]
    return [ng.Row(example, ids, sampler_log_probs=[0.0] * len(ids), old_log_probs=[0.0] * len(ids),
                   ref_log_probs=[0.0] * len(ids)) for ids in responses]

def simulated_peak(config, known, args):
    """Bytes that live at the worst moment of nano_grpo.train_step with the Plan `known`, on two microbatches,
    when Adam has its states."""
    policy = memory.meta_model(config).eval()
    if known.lora_rank:
        with torch.device("meta"):
            rooms.add_adapters(policy, known.lora_rank, 0)
    if known.gradient_checkpointing:
        rooms.checkpoint_layers(policy)
    policy.has_fused_head, policy.shares_prompts = has_fused_head(config), False  # fakes cannot be compared
    args = argparse.Namespace(**vars(args) | {"microbatch_tokens": known.microbatch_tokens})
    rows = full_microbatches(known.microbatch_tokens, args.max_tokens + memory.PROMPT, 2)
    with FakeTensorMode(allow_non_fake_inputs=True), PeakMemory() as peak, as_on_cuda():
        made = {}
        for module in policy.modules():
            for name, weight in [*module._parameters.items(), *module._buffers.items()]:
                if weight is not None:  # a tied matrix is one tensor under two names
                    if weight not in made:
                        made[weight] = torch.empty(weight.shape, dtype=weight.dtype)
                        if isinstance(weight, torch.nn.Parameter):
                            made[weight] = torch.nn.Parameter(made[weight], weight.requires_grad)
                    setattr(module, name, made[weight])
        sampled_with = copy.deepcopy(policy) if args.overlap and not known.engine_gb else policy
        reference, optimizer = ng.reference_and_optimizer(policy, args)
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        ng.train_step(policy, optimizer, rows, args)
        del sampled_with  # it lay beside the update
    return peak.peak
