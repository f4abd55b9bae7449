"""Rotary position embedding of queries and keys: rotates the two halves of each head by its token's angles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.kernels import elementwise
from workers.kernels.custom_op import fused_op
from workers.kernels.triton_launch import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def rotary_embedding_reference(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each pair (i, i + head_dim / 2) of every head by its token's angle, in the dtype of the heads.

    Args:
        query: [T, num_heads, head_dim].
        key: [T, num_kv_heads, head_dim].
        cos: [T, 1, head_dim / 2], of the heads' dtype, dense or a half of a dense [T, 1, head_dim].
        sin: like ``cos``.
    """
    return rotate(query, cos, sin), rotate(key, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the heads of one tensor, [T, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_embedding_fake(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the results."""
    queries = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return queries, torch.empty(key.shape, dtype=key.dtype, device=key.device)


@kernel()
def _rotary_embedding(
    query, key, cos, sin, query_out, key_out, num_heads, num_kv_heads, half,
    stride_query_token, stride_query_head, stride_key_token, stride_key_head, stride_cos, stride_sin,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (token, chunk) rotates ``HEADS`` heads of the token's queries and keys, numbered consecutively."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    own = head - num_heads
    in_query, in_key = (head < num_heads) & (at < half), (own >= 0) & (own < num_kv_heads) & (at < half)
    c = tl.load(cos + token * stride_cos + at, mask=at < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * stride_sin + at, mask=at < half, other=0.0).to(tl.float32)
    from_query = query + token * stride_query_token + head * stride_query_head + at
    from_key = key + token * stride_key_token + own * stride_key_head + at
    is_query = head < num_heads
    first = tl.where(is_query, tl.load(from_query, mask=in_query), tl.load(from_key, mask=in_key))
    second = tl.where(is_query, tl.load(from_query + half, mask=in_query), tl.load(from_key + half, mask=in_key))
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    # The reference rounds every product, so each is rounded here.
    turned = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    other = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)
    to_query = query_out + (token * num_heads + head) * 2 * half + at
    to_key = key_out + (token * num_kv_heads + own) * 2 * half + at
    tl.store(to_query, turned.to(dtype), mask=in_query)
    tl.store(to_query + half, other.to(dtype), mask=in_query)
    tl.store(to_key, turned.to(dtype), mask=in_key)
    tl.store(to_key + half, other.to(dtype), mask=in_key)


HEADS_PER_PROGRAM = 8


def rotary_embedding_triton(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch. Query and key may be views of heads in a wider projection."""
    query_out, key_out = rotary_embedding_fake(query, key, cos, sin)
    if not query.numel():
        return query_out, key_out
    query, key, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, cos, sin))
    half = query.shape[2] // 2
    heads = query.shape[1] + key.shape[1]
    _rotary_embedding[(query.shape[0], -(-heads // HEADS_PER_PROGRAM))](
        query,
        key,
        cos,
        sin,
        query_out,
        key_out,
        query.shape[1],
        key.shape[1],
        half,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cos.stride(0),
        sin.stride(0),
        HEADS=HEADS_PER_PROGRAM,
        HALF=next_power_of_2(half),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return query_out, key_out


rotary_embedding = fused_op(
    "rotary_embedding",
    rotary_embedding_reference,
    rotary_embedding_triton,
    rotary_embedding_fake,
    native=elementwise.rotary_embedding,
)
