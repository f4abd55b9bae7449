"""The attention layer: calls the KV-update op and the attention op with the layer's name.

The ops find the layer, its KV cache and the step's metadata in the forward context. Projections and rotary embedding
are the decoder's (``workers/models/decoder.py``), the computation is the attention backend's.
"""

from __future__ import annotations

import torch
from torch import nn

from parallel.platform import detect_platform
from workers.attention.attention_op import attention
from workers.attention.base import AttentionBackend
from workers.attention.kv_cache_update_op import kv_cache_update


class Attention(nn.Module):
    """Causal attention of one layer over the paged cache. Has no parameters.

    Args:
        num_heads: query heads of this rank.
        num_kv_heads: KV heads of this rank; divides ``num_heads``.
        head_dim: size of one head.
        dtype: of the cache.
        backend: the attention backend.
        prefix: the layer's name, unique in the model; key of the forward context.
        sliding_window: tokens that a token attends to, itself included; None: all before it.
        opaque: call registered ops, at which a compiled graph is split, instead of the Python functions; default:
            the platform's choice.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        backend: AttentionBackend,
        prefix: str,
        sliding_window: int | None = None,
        opaque: bool | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"{prefix}: {num_heads} query heads are not whole groups of {num_kv_heads} KV heads")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.dtype = dtype
        self.backend = backend
        self.prefix = prefix
        self.sliding_window = sliding_window
        self.opaque = detect_platform().opaque_attention_op() if opaque is None else opaque

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[T, num_heads, head_dim], [T, num_kv_heads, head_dim] twice -> [T, num_heads * head_dim]."""
        attend = torch.ops.lockstep.attention if self.opaque else attention
        update = torch.ops.lockstep.kv_cache_update if self.opaque else kv_cache_update
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        written = None if self.backend.writes_kv_in_forward else update(key, value, self.prefix)
        attend(query, key, value, output, self.prefix, written)
        return output.flatten(1)
