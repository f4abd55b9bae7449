"""Attention by our C kernel over the paged cache: what CPUs use where there is a C compiler.

The cache is laid out as ``torch_paged.py``'s. One call per layer (``csrc/attention.c``) stores the step's keys and
values and attends for all requests, whatever their numbers of new tokens. A token's result has the same bits whichever
requests are in the step, however a prompt is cut into chunks, and whatever the number of threads.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import ClassVar

import torch

from workers.attention.base import AttentionBackend
from workers.forward_context import AttentionLayer, AttentionMetadata, ForwardContext
from workers.kernels.bindings import CSRC, DTYPE_CODES, OptionalKernels

SOURCE = CSRC / "attention.c"

MAX_HEAD_DIM = 512
"""A thread's stack has room for vectors of this size."""

_PACK = struct.Struct("14qd11q").pack
"""``layer_step`` of csrc/attention.c."""

_STEP = "cpu_paged.step"
"""Key in a forward context's ``shared``."""


_Native = OptionalKernels(SOURCE, "attention goes without the C kernel, several times slower in decode")
use_native = _Native.use


def native_backend(dtype: torch.dtype, head_dim: int) -> AttentionBackend | None:
    """The backend for this cache, or None if :func:`use_native` has loaded nothing or the kernel is not made for it.

    Args:
        dtype: of queries and cache.
        head_dim: size of one head.
    """
    if _Native.library is None or dtype not in DTYPE_CODES or head_dim > MAX_HEAD_DIM:
        return None
    return NativeCPUAttention(_Native.library)


class NativeCPUAttention(AttentionBackend):
    """See the module's text.

    Args:
        library: the compiled ``csrc/attention.c``.
    """

    writes_kv_in_forward: ClassVar[bool] = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend: Callable[[bytes], int] = library.lockstep_attention
        self._store: Callable[[bytes], None] = library.lockstep_store_kv

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def write_kv(self, context: ForwardContext, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store keys and values of all tokens with a slot, as :meth:`forward` does by itself."""
        key, value = _dense(key), _dense(value)
        self._store(_describe(context, key, key, value, kv_cache, key))

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
        """Store the step's keys and values, then attend."""
        query, key, value = _dense(query), _dense(key), _dense(value)
        window = layer.sliding_window or 0
        if self._attend(_describe(context, query, key, value, kv_cache, output, layer.scale, window)):
            raise MemoryError(f"no memory for the attention of {context.metadata.num_reqs} requests")


def _dense(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim], in any order in memory as long as a head's numbers lie together."""
    return x if x.stride(2) == 1 else x.contiguous()


def _describe(
    context: ForwardContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    scale: float = 0.0,
    window: int = 0,
) -> bytes:
    """``layer_step`` of csrc/attention.c, good for as long as these tensors live."""
    dtype = kv_cache.dtype
    if not (query.dtype == key.dtype == value.dtype == output.dtype == dtype):
        raise TypeError(f"queries are {query.dtype}, keys {key.dtype}, values {value.dtype}, but the cache is {dtype}")
    step = context.shared.get(_STEP)
    if step is None:
        step = context.shared[_STEP] = _describe_step(context.metadata)
    _, _, kv_heads, block_size, head_dim = kv_cache.shape
    # The last stride is 1: see _dense.
    query_stride, key_stride, value_stride = query.stride()[:2], key.stride()[:2], value.stride()[:2]
    return _PACK(
        *step,
        key.shape[0],
        block_size,
        kv_heads,
        query.shape[1] // kv_heads,
        head_dim,
        DTYPE_CODES[dtype],
        window,
        scale,
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        kv_cache.data_ptr(),
        output.data_ptr(),
        *query_stride,
        *key_stride,
        *value_stride,
    )


def _describe_step(metadata: AttentionMetadata) -> tuple[int, ...]:
    """The part of ``layer_step`` that all layers share: where metadata is, and how much of it."""
    return (
        metadata.slot_mapping.data_ptr(),
        metadata.block_table.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.query_start_loc.data_ptr(),
        metadata.block_table.stride(0),
        metadata.num_reqs,
        metadata.num_tokens,
    )
