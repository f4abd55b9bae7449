"""Who holds what: how a dimension, the attention heads and the vocabulary are cut over tensor-parallel ranks.

Pure functions without torch, so that ``launch/`` can refuse an impossible size before it spawns anything. Layers
(``linear.py``, ``embedding.py``) ask here for their own cut; nothing here knows weights, devices or collectives.

Whole KV groups go to the *first* ranks when they do not divide evenly, remainders of plain dimensions (MLP,
vocabulary) to the *last* ones, so that no rank gets both.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 16
"""Elements that stay together where a dimension may be cut freely: 32 bytes of bf16, what vector and tensor-core
loads want. Every parallel layer uses it by default, so that the output cut of one is the input cut of the next."""


class ShardError(ValueError):
    """Something cannot be cut into that many parts; the message names the sizes that work."""


@dataclass(frozen=True)
class Shard:
    """A half-open range of one dimension: elements ``start`` to ``start + size``."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        """The first element after the range."""
        return self.start + self.size


@dataclass(frozen=True)
class HeadShard:
    """The query heads and the KV heads of one rank, counted in heads. The query heads attend to these KV heads only."""

    q: Shard
    kv: Shard


def split(total: int, parts: int, multiple: int = 1) -> tuple[Shard, ...]:
    """Cut ``total`` elements into ``parts`` neighbouring ranges, none empty, together all of it.

    Sizes are multiples of ``multiple`` (but for the end of the last one, if ``total`` is not) and differ by at most
    one multiple; the longer ones come last. Where that would leave a part empty, ``multiple`` is halved until it
    does not.

    Raises:
        ShardError: fewer elements than parts, or a ``parts`` or ``multiple`` below 1.
    """
    if parts < 1 or multiple < 1:
        raise ShardError(f"parts and multiple start at 1; got parts {parts}, multiple {multiple}")
    if total < parts:
        raise ShardError(f"{total} elements cannot be cut into {parts} parts of at least one; use 1 to {total} parts")
    while -(-total // multiple) < parts:
        multiple //= 2
    blocks = -(-total // multiple)
    fewest, longer = divmod(blocks, parts)
    shards: list[Shard] = []
    start = 0
    for part in range(parts):
        stop = min(total, start + (fewest + (part >= parts - longer)) * multiple)
        shards.append(Shard(start, stop - start))
        start = stop
    return tuple(shards)


def split_heads(num_heads: int, num_kv_heads: int, parts: int) -> tuple[HeadShard, ...]:
    """Cut attention heads by KV group: a rank that holds a query head holds the KV head it attends to.

    With at most ``num_kv_heads`` parts, every rank gets whole groups; the first ranks get one more if they do not
    divide evenly. With more, every KV head is given to ``parts // num_kv_heads`` neighbouring ranks (the first KV
    heads to one more) and its query heads are divided among them, so every size up to ``num_heads`` works.

    Raises:
        ShardError: ``num_heads`` is no multiple of ``num_kv_heads``, or ``parts`` is not in 1 to ``num_heads``.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShardError(f"{num_heads} query heads are not a whole number of groups of {num_kv_heads} KV heads")
    if not 1 <= parts <= num_heads:
        raise ShardError(f"{num_heads} query heads cannot be cut into {parts} parts; use 1 to {num_heads} parts")
    group = num_heads // num_kv_heads
    if parts <= num_kv_heads:
        groups = _first_longer(num_kv_heads, parts)
        return tuple(HeadShard(Shard(g.start * group, g.size * group), g) for g in groups)
    shards: list[HeadShard] = []
    for kv_head, ranks in enumerate(_first_longer(parts, num_kv_heads)):
        for q in _first_longer(group, ranks.size):
            shards.append(HeadShard(Shard(kv_head * group + q.start, q.size), Shard(kv_head, 1)))
    return tuple(shards)


def check_tp_size(*, num_heads: int, num_kv_heads: int, intermediate_size: int, vocab_size: int, tp_size: int) -> None:
    """Refuse a number of ranks over which a model cannot be cut.

    Raises:
        ShardError: some rank would hold no query head, no MLP column or no vocabulary entry, or the heads form no
            whole groups. The message names the sizes that work.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShardError(
            f"the model has {num_heads} query heads and {num_kv_heads} KV heads, which is no whole number of query "
            "heads per KV head: its config.json is wrong, no tensor_parallel_size works"
        )
    limits = {"query heads": num_heads, "MLP columns": intermediate_size, "vocabulary entries": vocab_size}
    what, largest = min(limits.items(), key=lambda item: item[1])
    if not 1 <= tp_size <= largest:
        allowed = f"1 to {largest}" if largest > 1 else "1"
        raise ShardError(
            f"tensor_parallel_size {tp_size} cannot cut a model with {largest} {what}; sizes that work: {allowed}"
        )


def _first_longer(total: int, parts: int) -> tuple[Shard, ...]:
    """``total`` in ``parts`` ranges whose sizes differ by at most one, the longer ones first."""
    fewest, longer = divmod(total, parts)
    starts = [part * fewest + min(part, longer) for part in range(parts)]
    return tuple(Shard(start, fewest + (part < longer)) for part, start in enumerate(starts))
