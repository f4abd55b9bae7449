"""Attention backend in plain PyTorch over the paged cache: runs on every device, and is the reference of the kernels.

The KV cache of a layer is [num_blocks, 2, num_kv_heads, block_size, head_dim], keys at 0 and values at 1. A block is
contiguous; within it the tokens of one KV head are contiguous, which is the tile that a kernel for one (request, KV
head) streams.

Decode requests (one new token) are batched: their keys and values are gathered through the block table into
[B, num_kv_heads, L, head_dim], padded to the longest context of the group, for one masked SDPA. Every other request is
an SDPA call of its own. The gather indices are computed once per step and shared by the layers of one window.

The gather is by token, not by block: padding repeats the request's own last token, so no value of another request, NaN
included, is read. Softmax is fp32 inside SDPA. The grouping of decode requests depends on the batch, so this backend is
batch-invariant only up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from workers.attention.base import AttentionBackend
from workers.attention.bounds import check_blocks, check_slots
from workers.forward_context import AttentionLayer, AttentionMetadata

SMALL_CONTEXT = 128
"""Decode requests with contexts up to this length form one batch, regardless of padding."""


@dataclass(frozen=True)
class _Decode:
    """B requests with one new token each, computed in one SDPA call.

    Attributes:
        tokens: int64 [B], their rows of the batch.
        rows: int64 [2 * B * num_kv_heads * L], rows of the flat cache: all keys, then all values.
        mask: bool [B, 1, 1, L], which of the L are not padding; None if all.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Prefill:
    """One request with several new tokens: rows ``start`` to ``stop`` of the batch.

    Attributes:
        rows: int64 [2 * num_kv_heads * L], rows of the flat cache; None if its whole context is in this step.
        mask: bool [stop - start, L]; None for plain causal attention within this step.
    """

    start: int
    stop: int
    rows: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    """The SDPA calls of one step."""

    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]


@dataclass(frozen=True)
class TorchStep:
    """One step. The gather indices are filled in by the first layer that needs them.

    Attributes:
        metadata: of the step.
        writes: what :func:`_rows_to_write` gives, by the cache's shape.
        plans: by window and by the cache's shape.
    """

    metadata: AttentionMetadata
    writes: dict[tuple[int, ...], tuple[torch.Tensor | None, torch.Tensor]] = field(
        default_factory=dict[tuple[int, ...], tuple[torch.Tensor | None, torch.Tensor]]
    )
    plans: dict[tuple[int | None, tuple[int, ...]], _Plan] = field(
        default_factory=dict[tuple[int | None, tuple[int, ...]], _Plan]
    )


class TorchPagedAttention(AttentionBackend[TorchStep]):
    """PyTorch ops only. Sizes are read back to the host once per step, so a CUDA graph cannot contain it."""

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def prepare_step(self, metadata: AttentionMetadata) -> TorchStep:
        """An empty table of gather indices: they depend on a layer's window and cache."""
        return TorchStep(metadata)

    def write_kv(self, step: TorchStep, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store keys and values of all tokens with a slot."""
        shape = tuple(kv_cache.shape)
        if shape not in step.writes:
            step.writes[shape] = _rows_to_write(step.metadata, shape)
        tokens, rows = step.writes[shape]
        if tokens is not None:
            key, value = key.index_select(0, tokens), value.index_select(0, tokens)
        stored = torch.stack((key, value), dim=1).view(-1, kv_cache.shape[-1])
        kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, rows, stored)

    def forward(
        self,
        step: TorchStep,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend: decode requests in batches, the others one by one."""
        shape = tuple(kv_cache.shape)
        at = (layer.sliding_window, shape)
        if at not in step.plans:
            step.plans[at] = _plan(step.metadata, layer.sliding_window, shape)
        plan = step.plans[at]
        flat_cache = kv_cache.view(-1, layer.head_dim)
        output[step.metadata.num_tokens :].zero_()
        for decode in plan.decodes:
            _attend_decode(layer, decode, query, flat_cache, output)
        for prefill in plan.prefills:
            _attend_prefill(layer, prefill, query, key, value, flat_cache, output)


def _attend_decode(
    layer: AttentionLayer, work: _Decode, query: torch.Tensor, flat_cache: torch.Tensor, output: torch.Tensor
) -> None:
    batch = work.tokens.shape[0]
    keys, values = flat_cache.index_select(0, work.rows).view(2, batch, layer.num_kv_heads, -1, layer.head_dim)
    # The query heads of one KV head take the place of query tokens: they share the keys.
    grouped = query.index_select(0, work.tokens).view(batch, layer.num_kv_heads, -1, layer.head_dim)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=work.mask, scale=layer.scale)
    output.index_copy_(0, work.tokens, attended.reshape(batch, layer.num_heads, layer.head_dim))


def _attend_prefill(
    layer: AttentionLayer,
    work: _Prefill,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    flat_cache: torch.Tensor,
    output: torch.Tensor,
) -> None:
    own = slice(work.start, work.stop)
    if work.rows is None:
        keys, values = key[own].transpose(0, 1), value[own].transpose(0, 1)
    else:
        keys, values = flat_cache.index_select(0, work.rows).view(2, layer.num_kv_heads, -1, layer.head_dim)
    attended = F.scaled_dot_product_attention(
        query[own].transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=work.mask,
        is_causal=work.mask is None,
        scale=layer.scale,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
    )
    output[own] = attended[0].transpose(0, 1)


def _rows_to_write(metadata: AttentionMetadata, shape: tuple[int, ...]) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Tokens that have a slot (None: all), and the rows of the flat cache that receive their keys and values.

    Args:
        metadata: of the step.
        shape: of the cache, [num_blocks, 2, num_kv_heads, block_size, head_dim].
    """
    slots = metadata.slot_mapping
    tokens = None
    if bool((slots < 0).any()):
        tokens = (slots >= 0).nonzero().flatten()
        slots = slots.index_select(0, tokens)
    num_blocks, parts, heads, block_size, _ = shape
    check_slots(slots, num_blocks, block_size)
    tiles = (slots // block_size * (parts * heads))[:, None] + torch.arange(parts * heads, device=slots.device)
    return tokens, (tiles * block_size + (slots % block_size)[:, None]).flatten()


def _rows_to_read(block_table: torch.Tensor, positions: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows of the flat cache that hold the keys, then the values, of given positions of requests.

    Args:
        block_table: int32 [B, max_blocks].
        positions: int64 [B, L].
        shape: of the cache, [num_blocks, 2, num_kv_heads, block_size, head_dim].

    Returns:
        int64, flat, in the order [2, B, num_kv_heads, L].
    """
    num_blocks, parts, heads, block_size, _ = shape
    blocks = block_table.gather(1, positions // block_size).to(torch.int64)
    check_blocks(blocks, num_blocks)
    part = torch.arange(parts, device=positions.device)[:, None, None, None]
    head = torch.arange(heads, device=positions.device)[:, None]
    tiles = (blocks[:, None] * parts + part) * heads + head
    return (tiles * block_size + (positions % block_size)[:, None]).flatten()


def _plan(metadata: AttentionMetadata, window: int | None, shape: tuple[int, ...]) -> _Plan:
    """Split a step's requests into decode groups and single prefills."""
    starts: list[int] = metadata.query_start_loc[: metadata.num_reqs + 1].tolist()
    lengths: list[int] = metadata.seq_lens[: metadata.num_reqs].tolist()
    single: list[int] = []
    prefills: list[_Prefill] = []
    for request, length in enumerate(lengths):
        start, stop = starts[request], starts[request + 1]
        if stop - start == 1:
            single.append(request)
        elif stop > start:
            prefills.append(_plan_prefill(metadata.block_table, request, start, stop, length, window, shape))
    visible = [length if window is None else min(length, window) for length in lengths]
    groups = _group_by_length(single, visible)
    decodes = [_plan_decode(metadata, group, [visible[r] for r in group], shape) for group in groups]
    return _Plan(tuple(decodes), tuple(prefills))


def _group_by_length(requests: list[int], visible: list[int]) -> list[list[int]]:
    """Groups in which the shortest context is at least half of the longest, so that padding at most doubles the work.

    Within a group, requests keep the order of the batch.
    """
    groups: list[list[int]] = []
    longest = 0
    for request in sorted(requests, key=lambda r: -visible[r]):
        if not groups or (visible[request] * 2 < longest and longest > SMALL_CONTEXT):
            groups.append([])
            longest = visible[request]
        groups[-1].append(request)
    return [sorted(group) for group in groups]


def _plan_decode(
    metadata: AttentionMetadata, requests: list[int], visible: list[int], shape: tuple[int, ...]
) -> _Decode:
    """Gather indices of one group: request b attends to its last ``visible[b]`` positions."""
    device = metadata.block_table.device
    chosen = torch.tensor(requests, dtype=torch.int64, device=device)
    ends = metadata.seq_lens.index_select(0, chosen).to(torch.int64)
    counts = torch.tensor(visible, dtype=torch.int64, device=device)
    offsets = torch.arange(max(visible), device=device)
    positions = torch.minimum((ends - counts)[:, None] + offsets, (ends - 1)[:, None])
    rows = _rows_to_read(metadata.block_table.index_select(0, chosen), positions, shape)
    mask = None if min(visible) == max(visible) else (offsets < counts[:, None])[:, None, None, :]
    return _Decode(metadata.query_start_loc.index_select(0, chosen).to(torch.int64), rows, mask)


def _plan_prefill(
    block_table: torch.Tensor,
    request: int,
    start: int,
    stop: int,
    length: int,
    window: int | None,
    shape: tuple[int, ...],
) -> _Prefill:
    """Gather indices and mask of the last ``stop - start`` of ``length`` tokens of one request."""
    cached = length - (stop - start)
    windowed = window is not None and length > window
    if not cached and not windowed:
        return _Prefill(start, stop, None, None)
    first = max(0, cached + 1 - window) if window is not None else 0
    keys = torch.arange(first, length, device=block_table.device)
    queries = torch.arange(cached, length, device=block_table.device)[:, None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    rows = _rows_to_read(block_table[request : request + 1], keys[None], shape) if cached else None
    return _Prefill(start, stop, rows, mask)
