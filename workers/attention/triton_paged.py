"""Attention backend for GPUs: Triton kernels over the paged cache.

The cache has the layout of ``torch_paged.py``. No tensor value is read on the host, and launches depend only on padded
sizes and on the metadata's maxima, so a CUDA graph can contain a whole step: captured with as many requests as rows and
the longest possible context, it serves every smaller batch. A request that only pads such a batch has no new token: its
``seq_lens`` is 0 and ``query_start_loc`` does not advance over it.
"""

from __future__ import annotations

import torch

from workers.attention.base import AttentionBackend
from workers.forward_context import AttentionLayer, AttentionMetadata
from workers.kernels.ops.kv_cache_write import kv_cache_write
from workers.kernels.ops.paged_attention import paged_attention
from workers.kernels.triton_launch import triton_is_installed


class TritonPagedAttention(AttentionBackend[AttentionMetadata]):
    """Triton kernels of ``workers/kernels/ops/``. A step is its metadata."""

    device_types = ("cuda",)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    max_head_dim = 256
    capturable = True

    @classmethod
    def missing(cls) -> str:
        """Triton, where it is not installed."""
        return "" if triton_is_installed() else "Triton is not installed"

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def prepare_step(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The metadata: the kernels read its tensors."""
        return metadata

    def write_kv(self, step: AttentionMetadata, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store keys and values of all tokens whose slot lies in the cache."""
        kv_cache_write(key, value, kv_cache, step.slot_mapping)

    def forward(
        self,
        step: AttentionMetadata,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend from the cache alone, which already holds this step's keys and values."""
        paged_attention(
            query,
            kv_cache,
            output,
            step.block_table,
            step.seq_lens,
            step.query_start_loc,
            step.num_reqs,
            step.max_query_len,
            step.max_seq_len,
            layer.scale,
            layer.sliding_window or 0,
        )
