"""Every Triton kernel against its plain-torch reference: one function a kernel, one call a case.

The tests call them with small odd sizes on the CPU, where Triton interprets; ``device_check.py`` with :data:`CASES` on
a GPU. Inputs are random and differ from case to case; outputs and unused parts of a cache start as NaN, so what is not
written, or read beyond its end, shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from workers.kernels.ops import kv_cache_write, paged_attention, rms_norm, rotary_embedding, silu_and_mul

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the norm of the error over the norm of the result, where sums are formed in another order."""


def check_silu_and_mul(device: str, dtype: torch.dtype, *, rows: int, width: int) -> float:
    """Largest difference over [rows, 2 * width]."""
    x = _random(device, dtype, rows, 2 * width)
    return _same(silu_and_mul.silu_and_mul_triton(x), silu_and_mul.silu_and_mul_reference(x))


def check_rms_norm(device: str, dtype: torch.dtype, *, rows: int, width: int, heads: int = 0) -> float:
    """Largest difference over [rows, width], or over heads that lie in a wider projection."""
    x, weight = _random(device, dtype, rows, width * max(heads, 1) + 3 * width), _random(device, dtype, width)
    x = x[:, : width * heads].unflatten(-1, (heads, width)) if heads else x[:, :width]
    return _same(rms_norm.rms_norm_triton(x, weight, 1e-5), rms_norm.rms_norm_reference(x, weight, 1e-5))


def check_fused_add_rms_norm(device: str, dtype: torch.dtype, *, rows: int, width: int) -> float:
    """Largest difference over [rows, width] of both results."""
    x, residual = _random(device, dtype, rows, width), _random(device, dtype, rows, width)
    weight = _random(device, dtype, width)
    found = rms_norm.fused_add_rms_norm_triton(x, residual, weight, 1e-5)
    wanted = rms_norm.fused_add_rms_norm_reference(x, residual, weight, 1e-5)
    return max(_same(a, b) for a, b in zip(found, wanted, strict=True))


def check_rotary_embedding(
    device: str, dtype: torch.dtype, *, rows: int, heads: int, kv_heads: int, head_dim: int
) -> float:
    """Largest difference over the queries and keys of a fused projection."""
    qkv = _random(device, dtype, rows, (heads + 2 * kv_heads) * head_dim)
    query, key, _ = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    angles = _random(device, torch.float32, rows, 1, head_dim // 2)
    cos, sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype).chunk(2, dim=-1)
    found = rotary_embedding.rotary_embedding_triton(query, key, cos, sin)
    wanted = rotary_embedding.rotary_embedding_reference(query, key, cos, sin)
    return max(_same(a, b) for a, b in zip(found, wanted, strict=True))


def check_kv_cache_write(
    device: str, dtype: torch.dtype, *, rows: int, kv_heads: int, head_dim: int, block_size: int
) -> float:
    """0.0, as nothing is computed: keys and values of a fused projection, every third token with slot -1 or beyond.

    The block behind the cache has to stay as it was.
    """
    blocks = -(-rows // block_size) + 2
    new = _random(device, dtype, rows, 2, kv_heads, head_dim)
    slots = torch.randperm(blocks * block_size)[:rows]
    slots[2::3] = -1
    slots[5::6] = blocks * block_size
    shape = (blocks + 1, 2, kv_heads, block_size, head_dim)
    caches = [torch.full(shape, NAN, dtype=dtype, device=device) for _ in "ab"]
    kv_cache_write.kv_cache_write_triton(new[:, 0], new[:, 1], caches[0][:blocks], slots.to(device))
    kv_cache_write.kv_cache_write_reference(new[:, 0], new[:, 1], caches[1][:blocks], slots.to(device))
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0, equal_nan=True)
    return 0.0


@dataclass(frozen=True)
class Paged:
    """A step over a paged cache: the arguments of ``paged_attention`` up to ``max_seq_len``."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    output: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_reqs: int
    max_query_len: int
    max_seq_len: int

    def arguments(self, **others: Any) -> dict[str, Any]:
        """By the op's names, some replaced or added."""
        return vars(self) | others


def make_paged(
    device: str,
    dtype: torch.dtype,
    requests: Sequence[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    padded_rows: int = 0,
    padded_reqs: int = 0,
    longest: int = 0,
) -> Paged:
    """Random contexts in shuffled blocks of a cache that is NaN everywhere else.

    Args:
        device: where the tensors lie.
        dtype: of queries and cache.
        requests: (tokens cached before, new tokens) of each.
        heads: query heads.
        kv_heads: KV heads; divides ``heads``.
        head_dim: size of a head.
        block_size: tokens in a block.
        padded_rows: rows after the last token.
        padded_reqs: requests without tokens after the last one, as in a captured graph.
        longest: stands for the longest context, as in a captured graph; 0: the longest there is.
    """
    lengths = [cached + new for cached, new in requests]
    widths = [-(-length // block_size) for length in lengths]
    free = random.Random(0).sample(range(sum(widths) + 2), sum(widths))
    cache = torch.full((sum(widths) + 2, 2, kv_heads, block_size, head_dim), NAN, dtype=dtype, device=device)
    num_reqs = len(requests) + padded_reqs
    table = torch.zeros(num_reqs, max(widths), dtype=torch.int32)
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        own = [free.pop() for _ in range(width)]
        table[row, :width] = torch.tensor(own, dtype=torch.int32)
        for number, block in enumerate(own):
            used = min(block_size, length - number * block_size)
            cache[block, :, :, :used] = _random(device, dtype, 2, kv_heads, used, head_dim)
    starts = torch.tensor([0, *(new for _, new in requests), *[0] * padded_reqs]).cumsum(0).to(torch.int32)
    query = _random(device, dtype, int(starts[-1]) + padded_rows, heads, head_dim)
    return Paged(
        query,
        cache,
        torch.full_like(query, NAN),
        table.to(device),
        torch.tensor(lengths + [0] * padded_reqs, dtype=torch.int32, device=device),
        starts.to(device),
        num_reqs,
        max(new for _, new in requests),
        longest or max(lengths),
    )


def check_paged_attention(
    device: str, dtype: torch.dtype, *, requests: Sequence[tuple[int, int]], window: int = 0, **shape: int
) -> float:
    """Norm of the error over the norm of the result; ``shape`` as for :func:`make_paged`."""
    case = make_paged(device, dtype, requests, **shape)
    scale = shape["head_dim"] ** -0.5
    paged_attention.paged_attention_triton(**case.arguments(scale=scale, window=window))
    # The reference attends in fp32 and rounds at the end; here it keeps what it has.
    wanted = torch.empty_like(case.output, dtype=torch.float32)
    paged_attention.paged_attention_reference(**case.arguments(output=wanted, scale=scale, window=window))
    assert torch.isfinite(case.output).all(), "some rows were not written, or unused parts of the cache were read"
    num_tokens = sum(new for _, new in requests)
    assert not case.output[num_tokens:].any(), "padded rows are not zero"
    error = float((case.output.float() - wanted).norm() / wanted.norm())
    assert error < TOLERANCE[dtype], f"the error's norm is {error:.2e} of the result's, more than {TOLERANCE[dtype]}"
    return error


def check_batch_invariance(
    device: str, dtype: torch.dtype, *, requests: Sequence[tuple[int, int]], **shape: int
) -> float:
    """0.0, if every request has the same bits alone as with the others, in a padded batch, and by few programs."""
    case = make_paged(device, dtype, requests, **shape)
    how = {"scale": shape["head_dim"] ** -0.5, "window": 0}
    paged_attention.paged_attention_triton(**case.arguments(**how))
    few = torch.full_like(case.output, NAN)
    with mock.patch.object(paged_attention, "SATURATING_PROGRAMS", 1):
        paged_attention.paged_attention_triton(**case.arguments(output=few, **how))
    assert few.equal(case.output), "the bits depend on the number of programs"
    starts: list[int] = case.query_start_loc.tolist()
    for row, (cached, new) in enumerate(requests):
        own, one = slice(starts[row], starts[row + 1]), slice(row, row + 1)
        alone = Paged(
            case.query[own],
            case.kv_cache,
            torch.full_like(case.output[own], NAN),
            case.block_table[one],
            case.seq_lens[one],
            torch.tensor([0, new], dtype=torch.int32, device=device),
            1,
            new,
            cached + new,
        )
        paged_attention.paged_attention_triton(**alone.arguments(**how))
        assert alone.output.equal(case.output[own]), f"request {row} has other bits alone than in company"
    return 0.0


def _random(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(device=device, dtype=dtype)


def _same(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference. Half precision rounds where the reference does, so nearly all elements are equal."""
    torch.testing.assert_close(found, wanted)
    if found.dtype != torch.float32:
        share = float((found != wanted).float().mean())
        assert share < 0.01, f"{share:.1%} of the elements are rounded differently"
    return float((found.float() - wanted.float()).abs().max())


CHECKS: dict[str, Callable[..., float]] = {
    "silu_and_mul": check_silu_and_mul,
    "rms_norm": check_rms_norm,
    "fused_add_rms_norm": check_fused_add_rms_norm,
    "rotary_embedding": check_rotary_embedding,
    "kv_cache_write": check_kv_cache_write,
    "paged_attention": check_paged_attention,
    "company": check_batch_invariance,
}
