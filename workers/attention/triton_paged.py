"""Attention by Triton kernels over the paged cache: the backend for GPUs.

The cache is laid out as in ``torch_paged.py``. Nothing here reads a tensor's value on the host, and launches depend on
padded sizes and the metadata's maxima alone, so a CUDA graph can hold a whole step: captured with as many requests as
rows and the longest context there can be, it serves every batch up to that. A request that only pads such a batch has
no new token: its ``seq_lens`` is 0 and ``query_start_loc`` stays where it is.
"""

from __future__ import annotations

import torch

from workers.attention.base import AttentionBackend
from workers.forward_context import AttentionLayer, ForwardContext
from workers.kernels.ops.kv_cache_write import kv_cache_write
from workers.kernels.ops.paged_attention import paged_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


class TritonPagedAttention(AttentionBackend):
    """See the module's text; the kernels are in ``workers/kernels/ops/``."""

    capturable = True

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def write_kv(self, context: ForwardContext, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store keys and values of all tokens with a slot."""
        kv_cache_write(key, value, kv_cache, context.metadata.slot_mapping)

    def forward(
        self,
        context: ForwardContext,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend from the cache alone; this step's keys and values are in it."""
        metadata = context.metadata
        paged_attention(
            query,
            kv_cache,
            output,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.num_reqs,
            metadata.max_query_len,
            metadata.max_seq_len,
            layer.scale,
            layer.sliding_window or 0,
        )
