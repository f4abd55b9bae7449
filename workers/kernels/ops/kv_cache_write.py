"""The op that stores a step's keys and values in the paged KV cache of one layer.

The cache is an argument here; the KV-update op (``workers/attention/kv_cache_update_op.py``) finds it in the forward
context and calls this op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.kernels.custom_op import fused_op
from workers.kernels.triton_launch import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def kv_cache_write_reference(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store keys and values token by token; slots outside the cache, -1 among them, are skipped.

    Args:
        key: [T_padded, num_kv_heads, head_dim].
        value: like ``key``.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], keys at 0 and values at 1; dense.
        slot_mapping: int64 [T_padded], block * block_size + offset.
    """
    block_size = kv_cache.shape[3]
    slots: list[int] = slot_mapping.tolist()
    for token, slot in enumerate(slots):
        if 0 <= slot < kv_cache.shape[0] * block_size:
            kv_cache[slot // block_size, 0, :, slot % block_size] = key[token]
            kv_cache[slot // block_size, 1, :, slot % block_size] = value[token]


def kv_cache_write_fake(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Nothing: the op has no result."""


@kernel()
def _kv_cache_write(
    key, value, cache, slot_mapping, num_slots,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program i stores keys and values of all heads of token i."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot < 0) | (slot >= num_slots):
        return
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = (head < KV_HEADS) & (at < HEAD_DIM)
    plane = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    target = cache + slot // BLOCK_SIZE * 2 * plane + (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + at
    new_key = tl.load(key + token * stride_key_token + head * stride_key_head + at, mask=inside)
    new_value = tl.load(value + token * stride_value_token + head * stride_value_head + at, mask=inside)
    tl.store(target, new_key, mask=inside)
    tl.store(target + plane, new_value, mask=inside)


def kv_cache_write_triton(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """One launch. Keys and values may be views of heads in a wider projection."""
    if not key.numel():
        return
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    heads, block_size, head_dim = kv_cache.shape[2:]
    _kv_cache_write[(key.shape[0],)](
        key,
        value,
        kv_cache,
        slot_mapping,
        kv_cache.shape[0] * block_size,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HEADS=next_power_of_2(heads),
        DIM=next_power_of_2(head_dim),
        num_warps=4,
        enable_fp_fusion=True,
    )


kv_cache_write = fused_op(
    "kv_cache_write",
    kv_cache_write_reference,
    kv_cache_write_triton,
    kv_cache_write_fake,
    mutates_args=("kv_cache",),
)
