"""Sharding rules: how a dimension, the attention heads and the vocabulary are divided over tensor-parallel ranks.

Pure functions without torch, so that ``launch/`` can refuse an unsupported size before it spawns processes. The layers
(``linear.py``, ``embedding.py``) call them for their own shards; nothing here depends on weights, devices or
collectives.

Where KV groups do not divide evenly the *first* ranks get one more; where a plain dimension (MLP, vocabulary) does not,
the *last* ranks do. So no rank gets both remainders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 16
"""Preferred alignment of shard borders in elements: 32 bytes of bf16, as vector and tensor-core loads want. Every
parallel layer uses it, so that the output shard of one layer is the input shard of the next."""


class ShardError(ValueError):
    """A dimension cannot be divided over that many ranks; the message names the sizes that work."""


@dataclass(frozen=True)
class Shard:
    """A half-open range of one dimension: elements ``start`` to ``start + size``."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        """The first element after the range."""
        return self.start + self.size

    def scaled(self, factor: int) -> Shard:
        """The same range counted in units of ``1 / factor``: heads to elements, for instance."""
        return Shard(self.start * factor, self.size * factor)


@dataclass(frozen=True)
class HeadShard:
    """The query heads and the KV heads of one rank, counted in heads. The query heads attend to these KV heads only."""

    q: Shard
    kv: Shard


def split(total: int, parts: int, *, multiple: int = 1, align: int = BLOCK) -> tuple[Shard, ...]:
    """Divide ``total`` elements into ``parts`` contiguous, non-empty ranges.

    Borders are multiples of ``multiple`` and, where that leaves no range empty, of ``align``; sizes differ by at most
    one such unit (the last range may be shorter if ``total`` is no whole number of units), the longer ones last.

    Args:
        total: elements of the dimension.
        parts: number of ranges.
        multiple: elements that are never divided, e.g. a quantization group.
        align: preferred alignment, a power of two; halved until no range is empty.

    Raises:
        ShardError: fewer units than parts, or an argument below 1.
    """
    if min(parts, multiple, align) < 1:
        raise ShardError(f"parts, multiple and align start at 1; got {parts}, {multiple}, {align}")
    if _units(total, multiple) < parts:
        unit = "elements" if multiple == 1 else f"elements in groups of {multiple}"
        sizes = format_sizes(range(1, _units(total, multiple) + 1))
        raise ShardError(f"{total} {unit} cannot be divided into {parts} parts; sizes that work: {sizes}")
    while _units(total, math.lcm(multiple, align)) < parts:
        align //= 2
    unit = math.lcm(multiple, align)
    fewest, longer = divmod(_units(total, unit), parts)
    shards: list[Shard] = []
    start = 0
    for part in range(parts):
        stop = min(total, start + (fewest + (part >= parts - longer)) * unit)
        shards.append(Shard(start, stop - start))
        start = stop
    return tuple(shards)


def split_heads(
    num_heads: int, num_kv_heads: int, parts: int, *, q_multiple: int = 1, kv_multiple: int = 1
) -> tuple[HeadShard, ...]:
    """Divide attention heads by KV group: a rank that holds a query head holds the KV head it attends to.

    With at most ``num_kv_heads`` parts, every rank gets whole KV groups; the first ranks get one more if they do not
    divide evenly. With more, every KV head is replicated on ``parts // num_kv_heads`` neighbouring ranks (the first KV
    heads on one more) and its query heads are divided among them.

    Args:
        num_heads: query heads.
        num_kv_heads: KV heads; divides ``num_heads``.
        parts: number of ranks.
        q_multiple: query heads that are never divided, where a quantization group spans several.
        kv_multiple: the same for KV heads.

    Raises:
        ShardError: ``num_heads`` is no multiple of ``num_kv_heads``, or the heads cannot be divided into ``parts``.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShardError(f"{num_heads} query heads are not a whole number of groups of {num_kv_heads} KV heads")

    def divide(size: int) -> tuple[HeadShard, ...]:
        return _divide_heads(num_heads, num_kv_heads, size, q_multiple, kv_multiple)

    shards = divide(parts)
    if not shards:
        sizes = format_sizes(size for size in range(1, num_heads + 1) if divide(size))
        raise ShardError(f"{num_heads} query heads cannot be divided into {parts} parts; sizes that work: {sizes}")
    return shards


def _divide_heads(
    num_heads: int, num_kv_heads: int, parts: int, q_multiple: int, kv_multiple: int
) -> tuple[HeadShard, ...]:
    """The shards of :func:`split_heads`; empty where the heads cannot be divided into ``parts``."""
    group = num_heads // num_kv_heads
    unit = math.lcm(kv_multiple, q_multiple // math.gcd(q_multiple, group))  # KV heads that are not divided
    units = _units(num_kv_heads, unit)
    if 1 <= parts <= units:
        shards: list[HeadShard] = []
        for part in _split_longer_first(units, parts):
            start, stop = part.start * unit, min(num_kv_heads, part.stop * unit)
            kv = Shard(start, stop - start)
            shards.append(HeadShard(kv.scaled(group), kv))
        return tuple(shards)
    if parts <= num_kv_heads or (unit > 1 and num_kv_heads > 1):
        return ()
    shards = []
    for kv_head, ranks in enumerate(_split_longer_first(parts, num_kv_heads)):
        if _units(group, q_multiple) < ranks.size:
            return ()
        for part in _split_longer_first(_units(group, q_multiple), ranks.size):
            start, stop = part.start * q_multiple, min(group, part.stop * q_multiple)
            shards.append(HeadShard(Shard(kv_head * group + start, stop - start), Shard(kv_head, 1)))
    return tuple(shards)


def check_tp_size(
    *,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    tp_size: int,
    head_dim: int = 1,
    input_multiple: int = 1,
    output_multiple: int = 1,
) -> None:
    """Refuse a number of ranks over which a model cannot be sharded.

    Args:
        num_heads: query heads.
        num_kv_heads: KV heads.
        intermediate_size: columns of the MLP.
        vocab_size: entries of the vocabulary.
        tp_size: the number of ranks.
        head_dim: elements of one head.
        input_multiple: input elements of a linear layer that share quantization parameters.
        output_multiple: output elements of a linear layer that share quantization parameters.

    Raises:
        ShardError: some rank would hold no query head, no MLP column or no vocabulary entry, a shard border would
            divide a quantization group, or the heads form no whole groups. The message names the sizes that work.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShardError(
            f"the model has {num_heads} query heads and {num_kv_heads} KV heads, which is no whole number of query "
            "heads per KV head: its config.json is wrong, no tensor_parallel_size works"
        )
    both = math.lcm(input_multiple, output_multiple)
    q_multiple, kv_multiple = heads_in(both, head_dim), heads_in(output_multiple, head_dim)

    def works(size: int) -> bool:
        wide_enough = size <= min(_units(intermediate_size, both), _units(vocab_size, output_multiple))
        return wide_enough and bool(_divide_heads(num_heads, num_kv_heads, size, q_multiple, kv_multiple))

    if tp_size >= 1 and works(tp_size):
        return
    limits = {"query heads": num_heads, "MLP columns": intermediate_size, "vocabulary entries": vocab_size}
    name, smallest = min(limits.items(), key=lambda item: item[1])
    quantized = f" in quantization groups of {both}" if both > 1 else ""
    raise ShardError(
        f"tensor_parallel_size {tp_size} cannot shard a model with {smallest} {name}{quantized}; sizes that work: "
        f"{format_sizes(size for size in range(1, smallest + 1) if works(size))}"
    )


def heads_in(multiple: int, head_dim: int) -> int:
    """The fewest heads of ``head_dim`` elements that are whole groups of ``multiple`` elements."""
    return multiple // math.gcd(multiple, head_dim)


def format_sizes(sizes: Iterable[int]) -> str:
    """``1 to 4, 6``: ascending numbers as ranges; "none" if there are none."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size - 1:
            runs[-1][1] = size
        else:
            runs.append([size, size])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in runs) or "none"


def _units(total: int, unit: int) -> int:
    return -(-total // unit)


def _split_longer_first(total: int, parts: int) -> tuple[Shard, ...]:
    """``total`` in ``parts`` ranges whose sizes differ by at most one, the longer ones first."""
    fewest, longer = divmod(total, parts)
    starts = [part * fewest + min(part, longer) for part in range(parts)]
    return tuple(Shard(start, fewest + (part < longer)) for part, start in enumerate(starts))
