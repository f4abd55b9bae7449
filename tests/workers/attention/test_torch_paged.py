"""Paged attention in plain torch against the definition: mixed batches, windows, dtypes, padding, isolation."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from workers.attention.bounds import KVCacheBoundsError
from workers.attention.torch_paged import TorchPagedAttention, _group_by_length
from workers.forward_context import AttentionMetadata, ForwardContext, forward_context
from workers.kernels.ops.paged_attention import attention_reference
from workers.layers.attention import Attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 16, 4
NAN = float("nan")


@dataclass
class Case:
    """Requests as (tokens cached before, new tokens), and the tensors of their step."""

    requests: list[tuple[int, int]]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query: torch.Tensor
    cache: torch.Tensor
    metadata: AttentionMetadata


def make_case(requests: list[tuple[int, int]], dtype: torch.dtype = torch.float32, padding: int = 2) -> Case:
    """Random contexts; what is cached lies in shuffled blocks of a cache that is NaN everywhere else."""
    generator = torch.Generator().manual_seed(0)
    lengths = [cached + new for cached, new in requests]
    keys, values = (
        [torch.randn(n, KV_HEADS, HEAD_DIM, generator=generator).to(dtype) for n in lengths] for _ in range(2)
    )
    widths = [-(-n // BLOCK) for n in lengths]
    blocks = random.Random(0).sample(range(sum(widths) + 3), sum(widths))
    cache = torch.full((sum(widths) + 3, 2, KV_HEADS, BLOCK, HEAD_DIM), NAN, dtype=dtype)
    table = torch.zeros(len(requests), max(widths, default=1), dtype=torch.int32)
    slots: list[int] = []
    starts = [0]
    for row, (cached, new) in enumerate(requests):
        own = [blocks.pop() for _ in range(widths[row])]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        for position in range(cached):
            cache[own[position // BLOCK], 0, :, position % BLOCK] = keys[row][position]
            cache[own[position // BLOCK], 1, :, position % BLOCK] = values[row][position]
        slots += [own[p // BLOCK] * BLOCK + p % BLOCK for p in range(cached, cached + new)]
        starts.append(starts[-1] + new)
    metadata = AttentionMetadata(
        num_tokens=len(slots),
        num_reqs=len(requests),
        max_query_len=max((new for _, new in requests), default=0),
        max_seq_len=max(lengths, default=0),
        slot_mapping=torch.tensor([*slots, *[-1] * padding], dtype=torch.int64),
        block_table=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
    )
    query = torch.randn(len(slots) + padding, HEADS, HEAD_DIM, generator=generator).to(dtype)
    return Case(requests, keys, values, query, cache, metadata)


def attend(case: Case, window: int | None = None) -> torch.Tensor:
    """The layer's output [T_padded, HEADS, HEAD_DIM]."""
    layer = Attention(
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        dtype=case.query.dtype,
        backend=TorchPagedAttention(),
        prefix="a",
        sliding_window=window,
    )
    new = [slice(cached, cached + count) for cached, count in case.requests]
    filler = torch.full((len(case.query) - case.metadata.num_tokens, KV_HEADS, HEAD_DIM), 7.0, dtype=case.query.dtype)
    key, value = (
        torch.cat([*(x[s] for x, s in zip(tensors, new, strict=True)), filler]) for tensors in (case.keys, case.values)
    )
    with forward_context(ForwardContext.for_step(case.metadata, {"a": layer}, {"a": case.cache})):
        return layer(case.query, key, value).view(-1, HEADS, HEAD_DIM)


def expected(case: Case, window: int | None = None) -> torch.Tensor:
    """The definition, request by request, and zeros for the padding."""
    parts: list[torch.Tensor] = []
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        own = slice(int(case.metadata.query_start_loc[row]), int(case.metadata.query_start_loc[row + 1]))
        parts.append(attention_reference(case.query[own], keys, values, scale=HEAD_DIM**-0.5, window=window))
    parts.append(torch.zeros(len(case.query) - case.metadata.num_tokens, HEADS, HEAD_DIM))
    return torch.cat(parts)


BATCHES: dict[str, list[tuple[int, int]]] = {
    "one prompt": [(0, 9)],
    "one token": [(0, 1)],
    "prompts": [(0, 5), (0, 1), (0, 16)],
    "decode": [(3, 1), (4, 1), (0, 1), (19, 1)],
    "alike": [(5, 1), (5, 1)],
    "chunk": [(6, 7)],
    "mixed": [(12, 1), (0, 6), (3, 1), (8, 5), (7, 1), (1, 2)],
    "two groups": [(300, 1), (2, 1), (299, 1), (5, 3), (40, 1)],
    "nothing": [],
}


@pytest.mark.parametrize("window", [None, 1, 3, 8, 1000])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_definition(name: str, window: int | None) -> None:
    case = make_case(BATCHES[name])
    torch.testing.assert_close(attend(case, window), expected(case, window))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = make_case(BATCHES["mixed"], dtype)
    torch.testing.assert_close(attend(case).float(), expected(case), rtol=0, atol=2e-2)


def test_new_keys_and_values_are_stored_and_nothing_else() -> None:
    case = make_case(BATCHES["mixed"], padding=3)
    before = case.cache.isnan().clone()
    attend(case)
    lengths = [cached + new for cached, new in case.requests]
    assert int((~case.cache.isnan()).sum()) == 2 * KV_HEADS * HEAD_DIM * sum(lengths)
    assert bool((before | ~case.cache.isnan()).all())


def test_a_request_with_nan_does_not_touch_the_others() -> None:
    clean, sick = make_case(BATCHES["mixed"]), make_case(BATCHES["mixed"])
    sick.keys[2].fill_(NAN)
    sick.values[2].fill_(NAN)
    good, bad = attend(clean), attend(sick)
    own = slice(int(clean.metadata.query_start_loc[2]), int(clean.metadata.query_start_loc[3]))
    assert bool(bad[own].isnan().all())
    bad[own] = good[own]
    assert bad.equal(good)


def test_rows_of_requests_past_num_reqs_are_not_read() -> None:
    case = make_case(BATCHES["decode"])
    outer = case.metadata
    case.metadata = AttentionMetadata(
        num_tokens=outer.num_tokens,
        num_reqs=outer.num_reqs,
        max_query_len=1,
        max_seq_len=outer.max_seq_len,
        slot_mapping=outer.slot_mapping,
        block_table=torch.cat((outer.block_table, torch.full_like(outer.block_table, 10**6))),
        seq_lens=torch.cat((outer.seq_lens, torch.full_like(outer.seq_lens, 10**6))),
        query_start_loc=torch.cat((outer.query_start_loc, outer.query_start_loc[1:] + 10**6)),
    )
    torch.testing.assert_close(attend(case), expected(case))


def test_company_changes_a_request_by_rounding_only() -> None:
    together = make_case(BATCHES["decode"], padding=0)
    whole = attend(together)
    for row, request in enumerate(together.requests):
        alone = make_case([request], padding=0)
        alone.keys, alone.values = [together.keys[row]], [together.values[row]]
        alone.query = together.query[row : row + 1]
        alone.cache, alone.metadata = (
            together.cache,
            AttentionMetadata(
                num_tokens=1,
                num_reqs=1,
                max_query_len=1,
                max_seq_len=sum(request),
                slot_mapping=together.metadata.slot_mapping[row : row + 1],
                block_table=together.metadata.block_table[row : row + 1],
                seq_lens=together.metadata.seq_lens[row : row + 1],
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            ),
        )
        torch.testing.assert_close(attend(alone)[0], whole[row], rtol=1e-6, atol=1e-6)


def test_grouping_bounds_the_padding() -> None:
    assert _group_by_length([0, 1, 2], [100, 3, 128]) == [[0, 1, 2]]
    assert _group_by_length([0, 2, 3], [1000, 5, 499, 500]) == [[0, 3], [2]]
    assert _group_by_length([0, 1, 2, 3], [1000, 200, 90, 3]) == [[0], [1], [2, 3]]
    assert _group_by_length([], []) == []


def test_slots_and_blocks_outside_the_cache_are_refused() -> None:
    backend, cache = TorchPagedAttention(), torch.zeros(3, 2, 1, 4, 8)
    key = torch.ones(2, 1, 8)
    metadata = AttentionMetadata(
        num_tokens=2,
        num_reqs=1,
        max_query_len=2,
        max_seq_len=6,
        slot_mapping=torch.tensor([4, 13]),
        block_table=torch.tensor([[1, 7]], dtype=torch.int32),
        seq_lens=torch.tensor([6], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
    )
    step = backend.prepare_step(metadata)
    with pytest.raises(KVCacheBoundsError, match="slot 13 of token 1 is outside the KV cache, which has 3 blocks of 4"):
        backend.write_kv(step, key, key, cache)
    assert not cache.any()
    layer = Attention(1, 1, 8, dtype=torch.float32, backend=backend, prefix="a")
    with pytest.raises(KVCacheBoundsError, match="block 7 is outside the KV cache, which has 3 blocks"):
        backend.forward(step, layer, key, key, key, cache, torch.empty_like(key))
