"""KV-cache block pool: free, referenced and cached blocks, and the prefix hashes that cached blocks are found by.

This is accounting only: a block is a number, and its memory is on the ranks (``workers/kv_cache.py``), where every
rank uses the same numbers. Which sequence gets a block, and when its content may be cached, is ``scheduler.py``'s.

A prefix hash covers the block's own tokens, all tokens before them, and the cache salt. Equal hashes mean equal keys
and values, since those depend on nothing but the tokens up to their position.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from runtime.common.errors import EngineError
from runtime.engine.request import SequenceState

HASH_BYTES = 16


class BlockPool:
    """Blocks ``0`` to ``num_blocks - 1`` with reference counts.

    A block without references is free. If its content is cached under a hash, ``lookup`` still finds it, until
    ``allocate`` evicts it. The same calls always give the same blocks: first those without a hash, last freed first;
    then those with a hash, first freed first (LRU).

    Attributes:
        num_blocks: size of the pool.
        block_size: tokens in a block.
        queried_tokens: prompt tokens looked up in the prefix cache; counted by the scheduler.
        hit_tokens: how many of those were found.
        evictions: cached blocks that were evicted by ``allocate``.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """``block_size`` is in tokens."""
        if num_blocks < 1 or block_size < 1:
            raise EngineError(f"a KV cache of {num_blocks} blocks of {block_size} tokens; both have to be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.evictions = 0
        self._references = [0] * num_blocks
        # A free block is in exactly one of these two: without a hash, or with one that leads to it.
        self._unused = list(range(num_blocks - 1, -1, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without references, cached ones included."""
        return len(self._unused) + len(self._free_cached)

    @property
    def num_used(self) -> int:
        """Blocks with references, each counted once."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold ``num_tokens``, the last one perhaps partly filled."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks with one reference each; cached ones are evicted.

        Raises:
            EngineError: fewer are free; callers check :attr:`num_free` first, so this is an internal error.
        """
        if count > self.num_free:
            raise EngineError(f"{count} KV blocks were asked for, {self.num_free} of {self.num_blocks} are free")
        block_ids: list[int] = []
        for _ in range(count):
            if self._unused:
                block_id = self._unused.pop()
            else:
                block_id, _ = self._free_cached.popitem(last=False)
                self._drop_hash(block_id)
                self.evictions += 1
            self._references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Remove one reference from each block. Later blocks of a sequence are evicted before earlier ones.

        Raises:
            EngineError: a block has no reference, or is outside the pool.
        """
        for block_id in reversed(block_ids):
            if not 0 <= block_id < self.num_blocks or not self._references[block_id]:
                raise EngineError(f"KV block {block_id} of {self.num_blocks} was freed without being allocated")
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if self._hashes[block_id] is None:
                self._unused.append(block_id)
            else:
                self._free_cached[block_id] = None

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks cached under these hashes, up to the first miss. Nothing changes."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks have no reference: ``incref`` lowers :attr:`num_free` by that many."""
        return sum(not self._references[block_id] for block_id in block_ids)

    def incref(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each of some blocks that ``lookup`` returned.

        Raises:
            EngineError: a block has neither a reference nor a hash, so its content is unknown.
        """
        for block_id in block_ids:
            if not self._references[block_id]:
                if block_id not in self._free_cached:
                    raise EngineError(f"KV block {block_id} of {self.num_blocks} has neither a reference nor a hash")
                del self._free_cached[block_id]
            self._references[block_id] += 1

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Cache a referenced block under ``block_hash``; if another block is, that one stays.

        Raises:
            EngineError: the block has no reference, or is cached under another hash.
        """
        if not self._references[block_id] or self._hashes[block_id] not in (None, block_hash):
            raise EngineError(f"KV block {block_id} of {self.num_blocks} was cached while free, or for other content")
        if self._block_of.setdefault(block_hash, block_id) == block_id:
            self._hashes[block_id] = block_hash

    def evict(self, hashes: Iterable[bytes]) -> None:
        """Remove these hashes from the prefix cache; references to their blocks stay."""
        for block_id in [self._block_of[block_hash] for block_hash in hashes if block_hash in self._block_of]:
            self._drop_hash(block_id)
            if block_id in self._free_cached:
                del self._free_cached[block_id]
                self._unused.append(block_id)

    def _drop_hash(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hashes[block_id] = None


def extend_hashes(sequence: SequenceState, count: int, block_size: int) -> None:
    """Extend ``sequence.block_hashes`` to its first ``count`` blocks, all of known tokens. Tokens never change, so a
    hash stays valid.

    Each hash is BLAKE2b over the previous one (over the salt's for the first) and the block's token ids as 8 bytes
    each. The salt is hashed with its own personalization, so that no salt equals the hash of a prefix.
    """
    hashes, prompt, output = sequence.block_hashes, sequence.prompt_token_ids, sequence.output_token_ids
    for index in range(len(hashes), count):
        start, end = index * block_size, (index + 1) * block_size
        tokens = array("q", prompt[start:end])
        if end > len(prompt):
            tokens.extend(output[max(start - len(prompt), 0) : end - len(prompt)])
        previous = hashes[-1] if hashes else _digest(b"salt", sequence.cache_salt or b"")
        hashes.append(_digest(b"block", previous + tokens.tobytes()))


def _digest(kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES, person=kind).digest()
