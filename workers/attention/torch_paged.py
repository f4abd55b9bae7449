"""Attention in plain torch over the paged cache: the backend for every device, and the one kernels are tested against.

One layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_dim], keys at 0 and values at 1. Blocks come first,
so that a block is one stretch of memory; within it, all tokens of one KV head lie together, which is the tile that
a kernel working on one (request, KV head) streams.

A batch is cut in two kinds of work. Requests with one new token (decode) are batched: their keys and values are
gathered through the block table into [B, num_kv_heads, L, head_dim], padded to the longest of the group, and one masked
SDPA attends for all. Every other request is one SDPA of its own. Where each token lies is worked out once a step and
shared by the layers of one window.

Rows are gathered by token, not by block: a padded entry repeats the request's own last token, so nothing of another
request, NaN included, is ever read. Softmax is fp32 inside SDPA. How decode requests are grouped depends on the batch,
so bits of a request may differ with its company by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.attention.base import AttentionBackend
from workers.forward_context import AttentionLayer, AttentionMetadata, ForwardContext

SMALL_CONTEXT = 128
"""Decode requests up to this many tokens are batched together however much padding that takes."""


@dataclass(frozen=True)
class _Decode:
    """B requests with one new token each, attended to in one call.

    Attributes:
        tokens: int64 [B], their rows of the batch.
        rows: int64 [2 * B * num_kv_heads * L], rows of the flat cache: all keys, then all values.
        mask: bool [B, 1, 1, L], which of the L are real; None if all are.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Prefill:
    """One request with several new tokens: rows ``start`` to ``stop`` of the batch.

    Attributes:
        rows: int64 [2 * num_kv_heads * L], rows of the flat cache; None if all it attends to is in this step.
        mask: bool [stop - start, L]; None for plain causal attention within this step.
    """

    start: int
    stop: int
    rows: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]


class TorchPagedAttention(AttentionBackend):
    """See the module's text. Reads sizes back to the host once a step, so a CUDA graph cannot hold it."""

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def write_kv(self, context: ForwardContext, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store keys and values of all tokens with a slot."""
        shape = tuple(kv_cache.shape[1:])
        at = ("torch_paged.write", shape)
        if at not in context.shared:
            context.shared[at] = _rows_to_write(context.metadata, shape)
        tokens, rows = context.shared[at]
        if tokens is not None:
            key, value = key.index_select(0, tokens), value.index_select(0, tokens)
        stored = torch.stack((key, value), dim=1).view(-1, kv_cache.shape[-1])
        kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, rows, stored)

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
        """Attend, decode requests together and the others one by one."""
        shape = tuple(kv_cache.shape[1:])
        at = ("torch_paged.plan", layer.sliding_window, shape)
        if at not in context.shared:
            context.shared[at] = _plan(context.metadata, layer.sliding_window, shape)
        plan: _Plan = context.shared[at]
        flat_cache = kv_cache.view(-1, layer.head_dim)
        output[context.metadata.num_tokens :].zero_()
        for decode in plan.decodes:
            _attend_decode(layer, decode, query, flat_cache, output)
        for prefill in plan.prefills:
            _attend_prefill(layer, prefill, query, key, value, flat_cache, output)


def _attend_decode(
    layer: AttentionLayer, work: _Decode, query: torch.Tensor, flat_cache: torch.Tensor, output: torch.Tensor
) -> None:
    batch = work.tokens.shape[0]
    keys, values = flat_cache.index_select(0, work.rows).view(2, batch, layer.num_kv_heads, -1, layer.head_dim)
    # The query heads of one KV head stand where SDPA expects query tokens: they see the same keys.
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
    """Tokens that have a slot (None: all), and the rows of the flat cache that their keys and values go to.

    Args:
        metadata: of the step.
        shape: of one block, [2, num_kv_heads, block_size, head_dim].
    """
    slots = metadata.slot_mapping
    tokens = None
    if bool((slots < 0).any()):
        tokens = (slots >= 0).nonzero().flatten()
        slots = slots.index_select(0, tokens)
    parts, heads, block_size, _ = shape
    tiles = (slots // block_size * (parts * heads))[:, None] + torch.arange(parts * heads, device=slots.device)
    return tokens, (tiles * block_size + (slots % block_size)[:, None]).flatten()


def _rows_to_read(block_table: torch.Tensor, positions: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows of the flat cache with the keys, then the values, of some positions of some requests.

    Args:
        block_table: int32 [B, max_blocks].
        positions: int64 [B, L].
        shape: of one block, [2, num_kv_heads, block_size, head_dim].

    Returns:
        int64, flat, in the order [2, B, num_kv_heads, L].
    """
    parts, heads, block_size, _ = shape
    blocks = block_table.gather(1, positions // block_size).to(torch.int64)
    part = torch.arange(parts, device=positions.device)[:, None, None, None]
    head = torch.arange(heads, device=positions.device)[:, None]
    tiles = (blocks[:, None] * parts + part) * heads + head
    return (tiles * block_size + (positions % block_size)[:, None]).flatten()


def _plan(metadata: AttentionMetadata, window: int | None, shape: tuple[int, ...]) -> _Plan:
    """Divide a step's requests into decode groups and single prefills."""
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

    One group of all, in the order of the batch, if they are alike.
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
    """Gather plan of one group: request b sees its last ``visible[b]`` positions."""
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
    """How the last ``stop - start`` of ``length`` tokens attend to those before and among them."""
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
