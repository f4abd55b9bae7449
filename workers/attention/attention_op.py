"""The attention op: opaque to the compiler, which splits the graph at it.

It returns nothing and writes ``output``, which the caller allocates and which the schema names as written; otherwise
its result would be silently lost. What it attends to is found in the forward context under the layer's name, so a
graph holds that name and no cache. How to attend is a backend's matter (``workers/attention/``).
"""

from __future__ import annotations

import torch

from parallel.library import dispatch_keys, register_op
from workers.forward_context import get_forward_context


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
    kv_written: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Attention of one layer for every token of the step.

    Args:
        query: [T, num_heads, head_dim], rotated.
        key: [T, num_kv_heads, head_dim], this step's own, rotated.
        value: like ``key``.
        output: like ``query``; every row is written, padded rows with zeros.
        layer_name: key of the layer and its cache in the forward context.
        kv_written: the KV-update op's result, or None where the backend stores keys and values itself. Unread: as an
            argument it keeps the update before the attention.
        output_scale: where a backend that quantizes its output writes the scales.

    Raises:
        RuntimeError: no forward pass is running.
        KeyError: the context has no such layer.
    """
    del kv_written
    context = get_forward_context()
    layer = context.layers[layer_name]
    if output_scale is not None:
        raise NotImplementedError(f"{layer_name}: {type(layer.backend).__name__} does not quantize its output")
    layer.backend.forward(context, layer, query, key, value, context.kv_caches[layer_name], output)


def attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
    kv_written: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Nothing: the op has no result, and what it writes keeps its shape."""


def attention_reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """One request's attention, as the definition reads; what every backend has to equal.

    Args:
        query: [n, num_heads, head_dim], the last n tokens of the request.
        keys: [L, num_kv_heads, head_dim], all of them.
        values: like ``keys``.
        scale: of the scores.
        window: tokens a token sees, itself included; None: all before it.

    Returns:
        fp32 [n, num_heads, head_dim].
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    last, length = query.shape[0], keys.shape[0]
    at = torch.arange(length, device=query.device)
    seen = at <= at[length - last :, None]
    if window is not None:
        seen &= at > at[length - last :, None] - window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


register_op(
    "attention",
    attention,
    mutates_args=("output", "output_scale"),
    fake=attention_fake,
    dispatch_key=dispatch_keys(),
)
