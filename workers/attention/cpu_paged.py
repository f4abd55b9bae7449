"""Attention backend for CPUs with a C compiler: the C kernel over the paged cache.

The cache has the layout of ``torch_paged.py``. One call per layer (``csrc/attention.c``) stores the step's keys and
values and computes the attention of all requests, prefill and decode alike. Batch invariance: a token's result has the
same bits whatever other requests are in the step, however a prompt is cut into chunks, and for any number of threads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from workers.attention.base import AttentionBackend
from workers.attention.bounds import check_block_table, check_slots
from workers.forward_context import AttentionLayer, AttentionMetadata
from workers.kernels.bindings import CSRC, DTYPE_CODES, KernelLibrary

SOURCE = CSRC / "attention.c"

_PACK = struct.Struct("14qd12q")
"""``attention_args`` of csrc/attention.c."""

_OUT_OF_MEMORY, _SLOT_OUT_OF_RANGE, _BLOCK_OUT_OF_RANGE = 1, 2, 3
"""Results of the kernel other than 0."""

_library = KernelLibrary(
    SOURCE, {"attention_args": _PACK.size}, "attention runs without the C kernel, several times slower in decode"
)
use_native = _library.use


@dataclass(frozen=True)
class CpuStep:
    """The step's part of ``attention_args``, the same for every layer.

    Attributes:
        metadata: keeps the tensors alive that ``fields`` points to.
        fields: addresses of the metadata's tensors, the block table's stride, and the numbers of requests and tokens.
    """

    metadata: AttentionMetadata
    fields: tuple[int, ...]


class CpuPagedAttention(AttentionBackend[CpuStep]):
    """The C kernel. :func:`use_native` loads it, before a backend is created."""

    device_types = ("cpu",)
    dtypes = tuple(DTYPE_CODES)
    max_head_dim = 512  # vectors of this size fit on a thread's stack
    writes_kv_in_forward = True

    @classmethod
    def missing(cls) -> str:
        """The compiled kernel, where there is no C compiler."""
        return "" if _library.is_used() else "its C kernel is not compiled (is a C compiler installed?)"

    def __init__(self) -> None:
        library = _library.loaded()
        self._attention = library.lockstep_attention
        self._store_kv = library.lockstep_store_kv

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def prepare_step(self, metadata: AttentionMetadata) -> CpuStep:
        """Addresses and sizes of the metadata's tensors."""
        fields = (
            metadata.slot_mapping.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.seq_lens.data_ptr(),
            metadata.query_start_loc.data_ptr(),
            metadata.block_table.stride(0),
            metadata.num_reqs,
            metadata.num_tokens,
        )
        return CpuStep(metadata, fields)

    def write_kv(self, step: CpuStep, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store keys and values of all tokens with a slot, as :meth:`forward` does by itself."""
        key, value = _dense(key), _dense(value)
        _check(self._store_kv(_pack_args(step, key, key, value, kv_cache, key)), step, kv_cache)

    def forward(
        self,
        step: CpuStep,
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
        _check(
            self._attention(_pack_args(step, query, key, value, kv_cache, output, layer.scale, window)), step, kv_cache
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim] with any strides of tokens and heads, and a last stride of 1."""
    return x if x.stride(2) == 1 else x.contiguous()


def _pack_args(
    step: CpuStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    scale: float = 0.0,
    window: int = 0,
) -> bytes:
    """``attention_args`` of csrc/attention.c; valid while these tensors live."""
    dtype = kv_cache.dtype
    if not (query.dtype == key.dtype == value.dtype == output.dtype == dtype):
        raise TypeError(f"queries are {query.dtype}, keys {key.dtype}, values {value.dtype}, but the cache is {dtype}")
    num_blocks, _, kv_heads, block_size, head_dim = kv_cache.shape
    # The last stride is 1: see _dense.
    query_stride, key_stride, value_stride = query.stride()[:2], key.stride()[:2], value.stride()[:2]
    return _PACK.pack(
        *step.fields,
        key.shape[0],
        block_size,
        kv_heads,
        query.shape[1] // kv_heads,
        head_dim,
        DTYPE_CODES[dtype],
        window,
        scale,
        num_blocks,
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        kv_cache.data_ptr(),
        output.data_ptr(),
        *query_stride,
        *key_stride,
        *value_stride,
    )


def _check(status: int, step: CpuStep, kv_cache: torch.Tensor) -> None:
    """Raise the error that a kernel's result stands for."""
    if not status:
        return
    metadata, (num_blocks, _, _, block_size, _) = step.metadata, kv_cache.shape
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"no memory for the attention of {metadata.num_reqs} requests")
    if status == _SLOT_OUT_OF_RANGE:
        check_slots(metadata.slot_mapping, num_blocks, block_size)
    if status == _BLOCK_OUT_OF_RANGE:
        check_block_table(metadata, num_blocks, block_size)
    raise RuntimeError(f"internal error: csrc/attention.c returned {status}, and the step's slots and blocks are valid")
