"""Attention over a paged KV cache: one kernel for prefill chunks, one for decode.

The cache is [num_blocks, 2, num_kv_heads, block_size, head_dim], keys at 0 and values at 1, and already holds the
step's own tokens. Both kernels pack the query heads of one KV head into the rows of one matrix product, so a key is
read once for all of them, and keep softmax in fp32.

- **Prefill**: one program per (tile of a request's new tokens, KV head) loops over the keys that the tile attends to.
- **Decode**: split-KV, as in Flash-Decoding. Tiles of keys are assigned in turn to a fixed number of KV splits;
  programs reduce the splits, and a second kernel combines a request's splits in their order.

The kernel and the summation order follow from the request's own length and number of new tokens, so the result is batch
invariant. The number of programs that share the splits depends on the batch and changes no sum.

Launches depend on no tensor value: grids follow from padded sizes, and programs without work return at once. So a CUDA
graph that was captured at the maxima serves every smaller batch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workers.kernels.custom_op import fused_op
from workers.kernels.triton_launch import Part, kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl

MAX_KV_SPLITS = 32
"""Maximum number of KV splits of a decoding request and head; a request with fewer tiles of keys has fewer."""

SATURATING_PROGRAMS = 2048
"""Number of decode programs that saturates a large GPU."""

MAX_REGISTERS = 255
"""Registers of one thread, on every GPU."""


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch parameters of a kernel.

    Attributes:
        rows: rows of the query side of a product: tokens times the query heads of a KV head.
        keys: keys that a program loads at once.
        warps: warps of a program.
        stages: stages of the software pipeline that prefetches keys and values.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """Launch options. All registers may be used; by default the compiler spills some to fit another program."""
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return options | {"maxnreg": MAX_REGISTERS}


def prefill_tile(dtype: torch.dtype, head_dim: int, group: int, *, data_center: bool) -> Tile:
    """The tile for ``group`` query heads to a KV head: the largest that the compiler keeps in registers.

    fp32 products run without matrix units and need registers for their operands. There are five pipeline stages, not
    two, because a key's block id has to be loaded before the key itself: two stages make one load.
    """
    smallest = next_power_of_2(group)
    if dtype == torch.float32:
        return Tile(max(16, smallest), 16 if head_dim > 64 else 32, 4, 1)
    if data_center:
        if head_dim > 128:
            return Tile(max(64, smallest), 32, 8, 5)
        return Tile(max(128, smallest), 64, 8, 5 if head_dim > 64 else 2)
    if head_dim > 128:
        return Tile(max(64, smallest), 32, 8, 2)
    return Tile(max(64, smallest), 32 if head_dim > 64 else 64, 4, 2)


def decode_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """The tile for ``group`` query heads to a KV head; a matrix unit needs at least 16 rows.

    In fp32, more than 16 query heads to a KV head spill registers: correct, but slow.
    """
    rows = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(rows, 32 if rows == 16 else 16, 4 if rows == 16 and head_dim <= 128 else 8, 1)
    wide = head_dim > 128
    return Tile(rows, 32 if wide or rows > 16 else 64, 8 if rows > (16 if wide else 32) else 4, 3)


@functools.cache
def is_data_center(device: torch.device) -> bool:
    """Whether the device has the shared memory and matrix units of a Hopper or Blackwell data-center GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def attention_reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """Attention of one request as defined, in fp32; the reference of every backend.

    Args:
        query: [n, num_heads, head_dim], the last n tokens of the request.
        keys: [L, num_kv_heads, head_dim], all of them.
        values: like ``keys``.
        scale: of the scores.
        window: tokens a token attends to, itself included; None: all before it.

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


def paged_attention_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
) -> None:
    """Attention of every token of a step.

    Args:
        query: [T_padded, num_heads, head_dim], rotated.
        kv_cache: of one layer, dense.
        output: like ``query``, dense; every row is written, padded rows with zeros.
        block_table: int32 [>= R, max_blocks].
        seq_lens: int32 [>= R]; 0 for a request that only pads the batch.
        query_start_loc: int32 [>= R + 1]; does not increase over a request that only pads the batch.
        num_reqs: R.
        max_query_len: upper bound of a request's new tokens; 1: every request decodes.
        max_seq_len: upper bound of the context lengths.
        scale: of the scores.
        window: tokens that a token attends to, itself included; 0: all before it.
    """
    output.zero_()
    starts: list[int] = query_start_loc[: num_reqs + 1].tolist()
    lengths: list[int] = seq_lens[:num_reqs].tolist()
    for request, length in enumerate(lengths):
        own = slice(starts[request], starts[request + 1])
        blocks = block_table[request, : -(-length // kv_cache.shape[3])].to(torch.int64)
        # [blocks, 2, heads, size, dim] -> two of [length, heads, dim]
        pages = kv_cache.index_select(0, blocks).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
        if own.stop > own.start:
            output[own] = attention_reference(query[own], pages[0], pages[1], scale=scale, window=window or None).to(
                output.dtype
            )


def paged_attention_fake(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
) -> None:
    """Nothing: the op has no result."""


@Part
def _attend(
    q, cache, table, kv_head, key, first, end, position, maximum, total, summed, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the keys at positions ``key`` [KEYS], of which first to end may be read.

    ``maximum`` [ROWS] of the scores so far (base 2), ``total`` [ROWS] of the weights, ``summed`` [ROWS, DIM].
    """
    at = tl.arange(0, DIM)
    readable = (key >= first) & (key < end)
    block = tl.load(table + key // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
    row = cache + (block * 2 * KV_HEADS + kv_head) * (BLOCK_SIZE * HEAD_DIM) + key % BLOCK_SIZE * HEAD_DIM
    k = tl.load(row[None, :] + at[:, None], mask=readable[None, :] & (at < HEAD_DIM)[:, None], other=0.0)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    seen = readable[None, :] & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (key[None, :] > position[:, None] - WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(maximum, tl.max(scores, 1))
    # A row without any key so far stays at -inf; the difference of two of those would be NaN.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(maximum - shift)
    rows = row + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    v = tl.load(rows[:, None] + at[None, :], mask=readable[:, None] & (at < HEAD_DIM)[None, :], other=0.0)
    summed = tl.dot(weights.to(v.dtype), v, summed * decay[:, None], input_precision="ieee")
    return highest, total * decay + tl.sum(weights, 1), summed


@kernel(varying=("num_reqs", "stride_table"))
def _prefill(
    query, cache, output, block_table, seq_lens, query_start_loc, num_reqs, scale,
    stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): ``TOKENS`` new tokens of one request that has more than one.

    Request r's tiles are numbered from ``start // TOKENS + r``, which reserves enough numbers without a table.
    """
    number, kv_head = tl.program_id(0), tl.program_id(1)
    low, high = tl.full((), 0, tl.int32), num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // TOKENS + middle <= number:
            low = middle
        else:
            high = middle - 1
    start = tl.load(query_start_loc + low)
    count = tl.load(query_start_loc + low + 1) - start
    tile = (number - start // TOKENS - low) * TOKENS
    if (tile >= count) | (count < 2):
        return
    before = tl.load(seq_lens + low) - count
    row = tl.arange(0, ROWS)
    token = tile + row // GROUP
    head = kv_head * GROUP + row % GROUP
    at = tl.arange(0, DIM)
    real = ((row < TOKENS * GROUP) & (token < count))[:, None] & (at < HEAD_DIM)[None, :]
    source = query + (start + token).to(tl.int64)[:, None] * stride_token + head[:, None] * stride_head
    q = tl.load(source + at[None, :], mask=real, other=0.0)
    end = before + tl.minimum(count, tile + TOKENS)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(before + tile - WINDOW + 1, 0)
    table = block_table + low.to(tl.int64) * stride_table
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM], tl.float32)
    for key in range(first // KEYS * KEYS, end, KEYS):
        maximum, total, summed = _attend(
            q, cache, table, kv_head, key + tl.arange(0, KEYS), first, end, before + token, maximum, total, summed,
            scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, DIM,
        )  # fmt: skip
    result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    target = output + ((start + token).to(tl.int64)[:, None] * KV_HEADS * GROUP + head[:, None]) * HEAD_DIM
    tl.store(target + at[None, :], result.to(q.dtype), mask=real)


@kernel(varying=("kv_splits", "stride_table"))
def _decode(
    query, cache, partial, weight, block_table, seq_lens, query_start_loc, kv_splits, scale,
    stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, KV_SPLITS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program (request, KV head, i): every n-th KV split from i of a request with one new token, n = grid dimension 2.

    A split's normalised sum is stored in ``partial`` [R, heads, kv_splits, HEAD_DIM], the logarithm of its total weight
    (base 2) in ``weight`` [R, heads, kv_splits].
    """
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(query_start_loc + request)
    if tl.load(query_start_loc + request + 1) - start != 1:
        return
    end = tl.load(seq_lens + request)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    first_tile, tiles = first // KEYS, (end + KEYS - 1) // KEYS
    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    at = tl.arange(0, DIM)
    real = (row < GROUP)[:, None] & (at < HEAD_DIM)[None, :]
    source = query + start.to(tl.int64) * stride_token + head[:, None] * stride_head + at[None, :]
    q = tl.load(source, mask=real, other=0.0)
    position = tl.zeros([ROWS], tl.int32) + (end - 1)
    table = block_table + request * stride_table
    for split in range(tl.program_id(2), tl.minimum(tiles - first_tile, KV_SPLITS), tl.num_programs(2)):
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, DIM], tl.float32)
        for tile in range(first_tile + split, tiles, KV_SPLITS):
            maximum, total, summed = _attend(
                q, cache, table, kv_head, tile * KEYS + tl.arange(0, KEYS), first, end, position, maximum, total,
                summed, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, DIM,
            )  # fmt: skip
        slot = (request * KV_HEADS * GROUP + head) * kv_splits + split
        tl.store(weight + slot, maximum + tl.log2(total), mask=row < GROUP)
        tl.store(partial + slot[:, None] * HEAD_DIM + at[None, :], summed / total[:, None], mask=real)


@kernel(varying=("num_reqs", "num_rows", "kv_splits"))
def _combine(
    partial, weight, output, seq_lens, query_start_loc, num_reqs, num_rows, kv_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, KV_SPLITS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Program (request, head): clears its share of the padded rows, then combines the splits of a decoding request."""
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM)
    for row in range(tl.load(query_start_loc + num_reqs) + number, num_rows, tl.num_programs(0)):
        padded = output + (row * HEADS + head) * HEAD_DIM + at
        tl.store(padded, tl.zeros([DIM], output.dtype.element_ty), mask=at < HEAD_DIM)
    start = tl.load(query_start_loc + number)
    if tl.load(query_start_loc + number + 1) - start != 1:
        return
    end = tl.load(seq_lens + number)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    split = tl.arange(0, KV_SPLITS)
    used = split < (end + KEYS - 1) // KEYS - first // KEYS
    slot = (number * HEADS + head) * kv_splits + split
    log_weight = tl.load(weight + slot, mask=used, other=float("-inf"))
    share = tl.exp2(log_weight - tl.max(log_weight, 0))
    summed = tl.load(
        partial + slot[:, None] * HEAD_DIM + at[None, :], mask=used[:, None] & (at < HEAD_DIM)[None, :], other=0.0
    )
    result = tl.sum(summed * share[:, None], 0) / tl.sum(share, 0)  # pyright: ignore[reportOperatorIssue]
    target = output + (start.to(tl.int64) * HEADS + head) * HEAD_DIM + at
    tl.store(target, result.to(output.dtype.element_ty), mask=at < HEAD_DIM)


def paged_attention_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
) -> None:
    """Two launches if every request decodes, else three."""
    num_rows, num_heads, head_dim = query.shape
    if num_reqs == 0:
        output.zero_()
        return
    kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // kv_heads
    if query.stride(-1) != 1:
        query = query.contiguous()
    batch = (block_table, seq_lens, query_start_loc)
    strides = (query.stride(0), query.stride(1), block_table.stride(0))
    sizes = {"HEAD_DIM": head_dim, "DIM": max(16, next_power_of_2(head_dim)), "WINDOW": window}
    layout = {"GROUP": group, "KV_HEADS": kv_heads, "BLOCK_SIZE": block_size}
    scale = scale / math.log(2.0)  # The kernels' exponentials are of base 2.
    if max_query_len > 1:
        tile = prefill_tile(query.dtype, head_dim, group, data_center=is_data_center(query.device))
        tokens = tile.rows // group
        _prefill[(num_rows // tokens + num_reqs, kv_heads)](
            query, kv_cache, output, *batch, num_reqs, scale, *strides, **sizes, **layout,
            TOKENS=tokens, ROWS=tile.rows, KEYS=tile.keys, **tile.options(),
        )  # fmt: skip
    tile = decode_tile(query.dtype, head_dim, group)
    kv_splits = max(1, min(MAX_KV_SPLITS, -(-max_seq_len // tile.keys)))
    partial = torch.empty(num_reqs, num_heads, kv_splits, head_dim, dtype=torch.float32, device=query.device)
    weight = torch.empty(num_reqs, num_heads, kv_splits, dtype=torch.float32, device=query.device)
    shares = min(kv_splits, next_power_of_2(-(-SATURATING_PROGRAMS // (num_reqs * kv_heads))))
    _decode[(num_reqs, kv_heads, shares)](
        query, kv_cache, partial, weight, *batch, kv_splits, scale, *strides, **sizes, **layout,
        KV_SPLITS=MAX_KV_SPLITS, ROWS=tile.rows, KEYS=tile.keys, **tile.options(),
    )  # fmt: skip
    _combine[(num_reqs, num_heads)](
        partial, weight, output, seq_lens, query_start_loc, num_reqs, num_rows, kv_splits, **sizes,
        HEADS=num_heads, KV_SPLITS=MAX_KV_SPLITS, KEYS=tile.keys, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


paged_attention = fused_op(
    "paged_attention",
    paged_attention_reference,
    paged_attention_triton,
    paged_attention_fake,
    mutates_args=("output",),
)
