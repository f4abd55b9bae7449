"""The attention op, at which a compiled graph is split.

The op returns nothing and writes ``output``, which the caller allocates and the schema lists as mutated. The layer
and its KV cache are found in the forward context by the layer's name, so a graph holds that name and no cache. The
computation is the backend's.
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
        kv_written: the result of the KV-update op, or None where the backend stores keys and values itself. It is not
            read; the data dependency orders the update before the attention.
        output_scale: receives the scales of a quantized output.

    Raises:
        RuntimeError: no forward pass is running.
        KeyError: the context has no such layer.
    """
    del kv_written
    context = get_forward_context()
    layer = context.layers[layer_name]
    if output_scale is not None:
        raise NotImplementedError(f"{layer_name}: {type(layer.backend).__name__} does not quantize its output")
    layer.backend.forward(context.steps[layer.backend], layer, query, key, value, context.kv_caches[layer_name], output)


def attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
    kv_written: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """No result; the output keeps its shape."""


register_op(
    "attention",
    attention,
    mutates_args=("output", "output_scale"),
    fake=attention_fake,
    dispatch_key=dispatch_keys(),
)
