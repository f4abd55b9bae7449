"""Sharding rules, by table and by properties that hold for every size."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parallel.shard import HeadShard, Shard, ShardError, check_tp_size, format_sizes, split, split_heads


def sizes(shards: tuple[Shard, ...]) -> list[int]:
    return [shard.size for shard in shards]


def covers(shards: tuple[Shard, ...], total: int) -> bool:
    """Whether the shards are not empty, touch each other, and are all of it."""
    edges = [0, *(shard.stop for shard in shards)]
    return edges == [*(shard.start for shard in shards), total] and min(sizes(shards)) > 0


@pytest.mark.parametrize(
    ("total", "parts", "multiple", "expected"),
    [
        (14336, 2, 16, [7168, 7168]),
        (1536, 5, 1, [307, 307, 307, 307, 308]),
        (1536, 5, 16, [304, 304, 304, 304, 320]),
        (1003, 4, 1, [250, 251, 251, 251]),
        (1003, 4, 16, [240, 256, 256, 251]),
        (96, 4, 64, [16, 16, 32, 32]),  # 64 and 32 would leave a part empty: relaxed to 16
        (3, 3, 16, [1, 1, 1]),
        (7, 1, 16, [7]),
    ],
)
def test_split_by_table(total: int, parts: int, multiple: int, expected: list[int]) -> None:
    assert sizes(split(total, parts, align=multiple)) == expected


@pytest.mark.parametrize("multiple", [1, 2, 16, 64])
def test_split_covers_everything_in_aligned_shards(multiple: int) -> None:
    for total in range(1, 200):
        for parts in range(1, min(total, 20) + 1):
            shards = split(total, parts, align=multiple)
            assert len(shards) == parts
            assert covers(shards, total)
            if total >= multiple * parts:
                assert all(shard.start % multiple == 0 for shard in shards)
                assert max(sizes(shards)) - min(sizes(shards)[:-1] or [total]) <= multiple


@pytest.mark.parametrize(
    ("total", "parts", "multiple", "expected"),
    [
        (512, 2, 128, [256, 256]),
        (384, 2, 128, [128, 256]),
        (1000, 3, 128, [256, 384, 360]),  # the last group is incomplete
        (96, 3, 24, [24, 24, 48]),  # 48, the common multiple with the preferred 16, would leave a rank empty
        (144, 3, 24, [48, 48, 48]),
        (9, 3, 3, [3, 3, 3]),
    ],
)
def test_split_never_divides_a_quantization_group(total: int, parts: int, multiple: int, expected: list[int]) -> None:
    assert sizes(split(total, parts, multiple=multiple)) == expected


@pytest.mark.parametrize("multiple", [1, 2, 3, 24, 128])
def test_a_border_lies_between_groups_or_the_size_is_refused(multiple: int) -> None:
    for total in range(1, 400, 7):
        groups = -(-total // multiple)
        for parts in range(1, 9):
            if parts <= groups:
                shards = split(total, parts, multiple=multiple)
                assert covers(shards, total)
                assert all(shard.start % multiple == 0 for shard in shards)
            else:
                with pytest.raises(ShardError, match=rf"sizes that work: 1( to {groups})?$"):
                    split(total, parts, multiple=multiple)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "parts", "expected"),
    [
        (32, 8, 1, [(32, 8)]),
        (32, 8, 4, [(8, 2)] * 4),
        (32, 8, 16, [(2, 1)] * 16),
        (9, 3, 2, [(6, 2), (3, 1)]),
        (9, 3, 3, [(3, 1)] * 3),
        (9, 3, 4, [(2, 1), (1, 1), (3, 1), (3, 1)]),
        (9, 3, 9, [(1, 1)] * 9),
        (8, 1, 3, [(3, 1), (3, 1), (2, 1)]),
        (4, 4, 3, [(2, 2), (1, 1), (1, 1)]),
    ],
)
def test_split_heads_by_table(heads: int, kv_heads: int, parts: int, expected: list[tuple[int, int]]) -> None:
    assert [(shard.q.size, shard.kv.size) for shard in split_heads(heads, kv_heads, parts)] == expected


def test_more_ranks_than_kv_heads_replicates_a_kv_head() -> None:
    assert split_heads(9, 3, 4) == (
        HeadShard(Shard(0, 2), Shard(0, 1)),
        HeadShard(Shard(2, 1), Shard(0, 1)),
        HeadShard(Shard(3, 3), Shard(1, 1)),
        HeadShard(Shard(6, 3), Shard(2, 1)),
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_multiple", "kv_multiple", "working"),
    [
        (32, 8, 1, 1, "1 to 32"),
        (32, 8, 2, 1, "1 to 16"),
        (32, 8, 2, 2, "1 to 4"),
        (9, 3, 2, 1, "1 to 2"),  # two groups of three heads are three pairs, one is none
        (8, 1, 2, 2, "1 to 4"),
        (8, 1, 3, 1, "1 to 3"),
        (12, 4, 4, 1, "1"),
    ],
)
def test_split_heads_keeps_groups_that_span_heads(
    heads: int, kv_heads: int, q_multiple: int, kv_multiple: int, working: str
) -> None:
    accepted: list[int] = []
    for parts in range(1, heads + 1):
        try:
            shards = split_heads(heads, kv_heads, parts, q_multiple=q_multiple, kv_multiple=kv_multiple)
        except ShardError as error:
            assert str(error).endswith(f"sizes that work: {working}")
            continue
        accepted.append(parts)
        assert covers(tuple(shard.q for shard in shards), heads)
        assert all(shard.q.start % q_multiple == 0 and shard.kv.start % kv_multiple == 0 for shard in shards)
        assert {kv for shard in shards for kv in range(shard.kv.start, shard.kv.stop)} == set(range(kv_heads))
    assert format_sizes(accepted) == working


@pytest.mark.parametrize("kv_heads", range(1, 9))
@pytest.mark.parametrize("group", range(1, 6))
def test_every_query_head_lies_with_its_kv_head(kv_heads: int, group: int) -> None:
    heads = kv_heads * group
    for parts in range(1, heads + 1):
        shards = split_heads(heads, kv_heads, parts)
        assert len(shards) == parts
        assert covers(tuple(shard.q for shard in shards), heads)
        assert {kv for shard in shards for kv in range(shard.kv.start, shard.kv.stop)} == set(range(kv_heads))
        for shard in shards:
            needed = {head // group for head in range(shard.q.start, shard.q.stop)}
            assert needed == set(range(shard.kv.start, shard.kv.stop))
            # Attention maps local query heads to local KV heads by a fixed ratio.
            assert shard.q.size % shard.kv.size == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: split(3, 4), "sizes that work: 1 to 3$"),
        (lambda: split(3, 0), "start at 1"),
        (lambda: split(300, 4, multiple=128), "300 elements in groups of 128 .* sizes that work: 1 to 3$"),
        (lambda: split_heads(9, 4, 1), "whole number of groups"),
        (lambda: split_heads(9, 3, 10), "sizes that work: 1 to 9$"),
    ],
)
def test_an_unsupported_size_names_those_that_work(call: object, text: str) -> None:
    with pytest.raises(ShardError, match=text):
        call()


def test_check_tp_size_accepts_exactly_the_sizes_that_work() -> None:
    model = {"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}
    for tp_size in range(1, 10):
        check_tp_size(**model, tp_size=tp_size)
    for tp_size in (0, 10, 1000):
        with pytest.raises(ShardError, match=f"{tp_size} .*9 query heads; sizes that work: 1 to 9$"):
            check_tp_size(**model, tp_size=tp_size)


def test_check_tp_size_names_the_narrowest_dimension() -> None:
    with pytest.raises(ShardError, match=r"2 MLP columns; sizes that work: 1 to 2$"):
        check_tp_size(num_heads=8, num_kv_heads=8, intermediate_size=2, vocab_size=100, tp_size=4)
    with pytest.raises(ShardError, match=r"config\.json is wrong"):
        check_tp_size(num_heads=9, num_kv_heads=2, intermediate_size=64, vocab_size=100, tp_size=1)


def test_check_tp_size_keeps_quantization_groups() -> None:
    model = {"num_heads": 32, "num_kv_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "head_dim": 64}
    check_tp_size(**model, tp_size=8, input_multiple=128)
    check_tp_size(**model, tp_size=4, input_multiple=128, output_multiple=128)
    with pytest.raises(ShardError, match=r"8 .* in quantization groups of 128; sizes that work: 1 to 4$"):
        check_tp_size(**model, tp_size=8, input_multiple=128, output_multiple=128)
    narrow = {**model, "intermediate_size": 384}
    with pytest.raises(ShardError, match=r"sizes that work: 1 to 3$"):
        check_tp_size(**narrow, tp_size=4, input_multiple=128)
    with pytest.raises(ShardError, match=r"sizes that work: 1 to 2$"):
        check_tp_size(**{**model, "vocab_size": 200}, tp_size=3, output_multiple=128)


def test_needs_no_torch() -> None:
    code = "import sys, parallel.shard; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
