"""The KV-update op: stores a step's keys and values in the KV cache before attention reads it.

It runs only where the attention backend does not store them in its forward. The cache is not among the op's arguments,
so its result, an empty tensor that the attention op takes as an argument, is the data dependency that orders the two.
"""

from __future__ import annotations

import torch

from parallel.library import dispatch_keys, register_op
from workers.forward_context import get_forward_context


def kv_cache_update(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> torch.Tensor:
    """Store keys and values, [T, num_kv_heads, head_dim], in the slots of the step's tokens.

    Returns:
        an empty tensor, for the attention op of the same layer.

    Raises:
        RuntimeError: no forward pass is running.
        KeyError: the context has no such layer.
    """
    context = get_forward_context()
    backend = context.layers[layer_name].backend
    backend.write_kv(context.steps[backend], key, value, context.kv_caches[layer_name])
    return kv_cache_update_fake(key, value, layer_name)


def kv_cache_update_fake(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> torch.Tensor:
    """The empty tensor."""
    return torch.empty(0, dtype=key.dtype, device=key.device)


register_op("kv_cache_update", kv_cache_update, fake=kv_cache_update_fake, dispatch_key=dispatch_keys())
