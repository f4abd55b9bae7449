"""The C attention against the definition, against plain torch, and against itself in other company."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from parallel import toolchain
from workers.attention import cpu_paged
from workers.attention.base import AttentionBackend
from workers.attention.bounds import KVCacheBoundsError
from workers.attention.cpu_paged import CpuPagedAttention, use_native
from workers.attention.registry import create_backend
from workers.attention.torch_paged import TorchPagedAttention
from workers.forward_context import AttentionMetadata, ForwardContext, forward_context
from workers.kernels.ops.paged_attention import attention_reference
from workers.layers.attention import Attention

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LONG = 2 * 256 + 40
"""More than two spans of the kernel."""

BATCHES: dict[str, list[tuple[int, int]]] = {
    "one prompt": [(0, 9)],
    "one token": [(0, 1)],
    "prompts": [(0, 5), (0, 1), (0, 16)],
    "decode": [(3, 1), (4, 1), (0, 1), (19, 1)],
    "mixed": [(12, 1), (0, 6), (3, 1), (8, 5), (7, 1), (1, 2)],
    "long": [(LONG, 1), (2, 1), (LONG - 50, 3), (0, LONG), (255, 1), (256, 2)],
    "nothing new": [(5, 1), (4, 0), (7, 1), (3, 0)],
    "nothing": [],
}
"""Requests as (tokens cached before, new tokens)."""


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block: int = 4
    dtype: torch.dtype = torch.float32


@dataclass
class Case:
    """The contexts of some requests, and the tensors of their step."""

    shape: Shape
    requests: list[tuple[int, int]]
    queries: list[torch.Tensor]  # of all positions, though only those of new tokens are asked for
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache: torch.Tensor
    metadata: AttentionMetadata


@pytest.fixture(scope="module")
def library_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("native"))


@pytest.fixture
def backend(library_dir: str, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    monkeypatch.setattr(cpu_paged._library, "library", None)
    assert use_native(library_dir)
    return CpuPagedAttention()


def make_case(requests: Sequence[tuple[int, int]], shape: Shape, padding: int = 2) -> Case:
    """Random contexts; what is cached lies in shuffled blocks of a cache that is NaN everywhere else."""
    generator = torch.Generator().manual_seed(0)

    def numbers(length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, shape.head_dim, generator=generator).to(shape.dtype)

    lengths = [cached + new for cached, new in requests]
    queries = [numbers(n, shape.heads) for n in lengths]
    keys, values = ([numbers(n, shape.kv_heads) for n in lengths] for _ in range(2))
    return step(shape, requests, queries, keys, values, padding)


def step(
    shape: Shape,
    requests: Sequence[tuple[int, int]],
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    padding: int = 0,
) -> Case:
    """The step in which these requests have so many tokens cached, and so many new ones, of these contexts."""
    block, lengths = shape.block, [cached + new for cached, new in requests]
    widths = [-(-n // block) for n in lengths]
    blocks = random.Random(0).sample(range(sum(widths) + 3), sum(widths))
    cache = torch.full((sum(widths) + 3, 2, shape.kv_heads, block, shape.head_dim), NAN, dtype=shape.dtype)
    table = torch.full((len(requests) + 1, max(widths, default=1) + 2), 10**6, dtype=torch.int32)
    slots: list[int] = []
    starts = [0]
    for row, (cached, new) in enumerate(requests):
        own = [blocks.pop() for _ in range(widths[row])]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        places = torch.tensor([own[p // block] * block + p % block for p in range(lengths[row])], dtype=torch.int64)
        for what, kept in enumerate((keys[row][:cached], values[row][:cached])):
            cache[places[:cached] // block, what, :, places[:cached] % block] = kept
        slots += places[cached:].tolist()
        starts.append(starts[-1] + new)
    metadata = AttentionMetadata(
        num_tokens=len(slots),
        num_reqs=len(requests),
        max_query_len=max((new for _, new in requests), default=0),
        max_seq_len=max(lengths, default=0),
        slot_mapping=torch.tensor([*slots, *[-1] * padding], dtype=torch.int64),
        block_table=table,
        seq_lens=torch.tensor([*lengths, 10**6], dtype=torch.int32),
        query_start_loc=torch.tensor([*starts, 10**6], dtype=torch.int32),
    )
    return Case(shape, list(requests), queries, keys, values, cache, metadata)


def new_tokens(case: Case, tensors: list[torch.Tensor], filler: float = 7.0) -> torch.Tensor:
    """The rows of the step, as a part of wider rows, which is how a fused projection gives them."""
    own = [x[cached : cached + new] for x, (cached, new) in zip(tensors, case.requests, strict=True)]
    padding = len(case.metadata.slot_mapping) - case.metadata.num_tokens
    heads = case.shape.kv_heads if tensors is not case.queries else case.shape.heads
    rows = torch.cat([*own, torch.full((padding, heads, case.shape.head_dim), filler, dtype=case.shape.dtype)])
    return F.pad(rows.flatten(1), (5, 3), value=NAN)[:, 5:-3].view(rows.shape)


def attend(case: Case, backend: AttentionBackend, window: int | None = None) -> torch.Tensor:
    """The layer's output [T_padded, heads, head_dim]."""
    shape = case.shape
    layer = Attention(
        shape.heads, shape.kv_heads, shape.head_dim,
        dtype=shape.dtype, backend=backend, prefix="a", sliding_window=window,
    )  # fmt: skip
    rows = (new_tokens(case, tensors) for tensors in (case.queries, case.keys, case.values))
    with forward_context(ForwardContext.for_step(case.metadata, {"a": layer}, {"a": case.cache})):
        return layer(*rows).view(-1, shape.heads, shape.head_dim)


def expected(case: Case, window: int | None = None) -> torch.Tensor:
    """The definition, request by request, and zeros for the padding."""
    parts: list[torch.Tensor] = []
    for (cached, _), query, keys, values in zip(case.requests, case.queries, case.keys, case.values, strict=True):
        scale = case.shape.head_dim**-0.5
        parts.append(attention_reference(query[cached:], keys, values, scale=scale, window=window))
    padding = len(case.metadata.slot_mapping) - case.metadata.num_tokens
    return torch.cat([*parts, torch.zeros(padding, case.shape.heads, case.shape.head_dim)])


def check(case: Case, backend: AttentionBackend, window: int | None = None) -> None:
    narrow = case.shape.dtype != torch.float32
    bounds = {"rtol": 2e-2, "atol": 2e-3} if narrow else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(attend(case, backend, window).float(), expected(case, window), **bounds)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 300, 1000])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_definition(backend: AttentionBackend, name: str, window: int | None) -> None:
    check(make_case(BATCHES[name], Shape()), backend, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (4, 1), (16, 2), (30, 1)])
@pytest.mark.parametrize(("head_dim", "block"), [(64, 16), (20, 5), (7, 1), (128, 32)])
def test_any_shape(
    backend: AttentionBackend, heads: tuple[int, int], head_dim: int, block: int, dtype: torch.dtype
) -> None:
    check(make_case(BATCHES["mixed"], Shape(*heads, head_dim, block, dtype)), backend, window=9)
    check(make_case([(300, 1), (250, 20)], Shape(*heads, head_dim, block, dtype), padding=0), backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_plain_torch(backend: AttentionBackend, dtype: torch.dtype) -> None:
    shape = Shape(9, 3, 64, 16, dtype)
    here, there = (make_case(BATCHES["mixed"], shape) for _ in range(2))
    bounds = {"rtol": 2e-2, "atol": 1e-2} if dtype != torch.float32 else {}
    torch.testing.assert_close(attend(here, backend), attend(there, TorchPagedAttention()), **bounds)
    assert torch.equal(here.cache.isnan(), there.cache.isnan())
    assert torch.equal(here.cache.nan_to_num(), there.cache.nan_to_num())


def test_equals_sdpa(backend: AttentionBackend) -> None:
    case = make_case([(0, 100)], Shape(6, 2, 32, 16), padding=0)
    q, k, v = (x[0].transpose(0, 1)[None] for x in (case.queries, case.keys, case.values))
    told = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(attend(case, backend), told)


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_the_context_only(
    backend: AttentionBackend, library_dir: str, dtype: torch.dtype, window: int | None
) -> None:
    case = make_case(BATCHES["long"], Shape(9, 3, 64, 16, dtype))
    together = attend(case, backend, window)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    use_native(library_dir)
    try:
        for row, (cached, new) in enumerate(case.requests):
            context = [[x[row]] for x in (case.queries, case.keys, case.values)]
            begin = int(case.metadata.query_start_loc[row])
            # Alone, and in other portions: by token, or the whole context as one prompt.
            portions = [(cached + i, 1) for i in (range(new) if new < 9 else [0, 7, 255, 256, new - 1])]
            for start, count in [(cached, new), (0, cached + new), *portions]:
                parts = [[x[: start + count] for x in whole] for whole in context]
                alone = attend(step(case.shape, [(start, count)], *parts), backend, window)
                shared = range(max(start, cached), start + count)
                assert torch.equal(
                    alone[shared.start - start :], together[begin + shared.start - cached :][: len(shared)]
                )
    finally:
        torch.set_num_threads(threads)
        use_native(library_dir)


def test_new_keys_and_values_are_stored_and_nothing_else(backend: AttentionBackend) -> None:
    stored, attended = (make_case(BATCHES["mixed"], Shape(), padding=3) for _ in range(2))
    rows = (new_tokens(stored, tensors) for tensors in (stored.keys, stored.values))
    backend.write_kv(backend.prepare_step(stored.metadata), *rows, stored.cache)
    attend(attended, backend)
    lengths = [cached + new for cached, new in stored.requests]
    for cache in (stored.cache, attended.cache):
        assert int((~cache.isnan()).sum()) == 2 * 2 * 16 * sum(lengths)
    assert torch.equal(stored.cache.nan_to_num(), attended.cache.nan_to_num())


@pytest.mark.parametrize("what", ["keys", "values", "queries"])
@pytest.mark.parametrize("number", [NAN, float("inf")])
def test_a_sick_request_does_not_touch_the_others(backend: AttentionBackend, what: str, number: float) -> None:
    clean, sick = make_case(BATCHES["mixed"], Shape()), make_case(BATCHES["mixed"], Shape())
    getattr(sick, what)[3].fill_(number)
    sick.cache = step(sick.shape, sick.requests, sick.queries, sick.keys, sick.values).cache
    good, bad = attend(clean, backend), attend(sick, backend)
    own = slice(int(clean.metadata.query_start_loc[3]), int(clean.metadata.query_start_loc[4]))
    assert not bool(bad[own].isfinite().any())
    bad[own] = good[own]
    assert torch.equal(bad, good)


def test_a_later_token_does_not_touch_those_before(backend: AttentionBackend) -> None:
    clean, sick = make_case([(0, 40)], Shape()), make_case([(0, 40)], Shape())
    sick.keys[0][25], sick.values[0][25] = NAN, NAN
    good, bad = attend(clean, backend), attend(sick, backend)
    assert torch.equal(bad[:25], good[:25])
    assert bool(bad[25:40].isnan().all())


def test_is_chosen_once_it_is_loaded(
    backend: AttentionBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def choice(dtype: torch.dtype, head_dim: int) -> type[AttentionBackend]:
        return type(create_backend("auto", torch.device("cpu"), dtype=dtype, head_dim=head_dim))

    assert choice(torch.bfloat16, 64) is CpuPagedAttention
    assert choice(torch.float64, 64) is choice(torch.float32, 1024) is TorchPagedAttention
    monkeypatch.setattr(cpu_paged._library, "library", None)
    monkeypatch.setattr(cpu_paged._library, "warned", False)
    monkeypatch.setattr(toolchain, "COMPILERS", ())
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert not use_native(str(tmp_path))
        assert not use_native(str(tmp_path))
    assert caplog.text.count("no C compiler") == 1
    assert choice(torch.bfloat16, 64) is TorchPagedAttention


def test_another_dtype_than_the_cache_is_refused(backend: AttentionBackend) -> None:
    case = make_case([(3, 1)], Shape())
    case.cache = case.cache.bfloat16()
    with pytest.raises(TypeError, match=r"the cache is torch\.bfloat16"):
        attend(case, backend)


def test_slots_outside_the_cache_are_refused(backend: AttentionBackend) -> None:
    """The memory behind the cache keeps its values, and so does the cache."""
    case = make_case([(3, 1), (0, 2)], Shape())
    blocks = case.cache.shape[0]
    memory = torch.full((blocks + 8, *case.cache.shape[1:]), 5.0)
    case.cache = memory[:blocks]
    beyond = blocks * case.shape.block + 3
    case.metadata.slot_mapping[1] = beyond
    rows = [new_tokens(case, tensors) for tensors in (case.keys, case.values)]
    with pytest.raises(KVCacheBoundsError, match=f"slot {beyond} of token 1 is outside"):
        attend(case, backend)
    with pytest.raises(KVCacheBoundsError, match=f"slot {beyond} of token 1 is outside"):
        backend.write_kv(backend.prepare_step(case.metadata), *rows, case.cache)
    assert bool((memory == 5.0).all())


@pytest.mark.parametrize("block", [-1, 10**5])
def test_blocks_outside_the_cache_are_refused(backend: AttentionBackend, block: int) -> None:
    case = make_case([(3, 1), (9, 2)], Shape())
    case.metadata.block_table[1, 1] = block
    with pytest.raises(KVCacheBoundsError, match=f"block {block} is outside"):
        attend(case, backend)
    outside_of_the_window = make_case([(300, 1)], Shape())
    outside_of_the_window.metadata.block_table[0, 0] = block
    check(outside_of_the_window, backend, window=8)
