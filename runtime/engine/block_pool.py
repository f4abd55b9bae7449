"""Which KV-cache blocks are free, shared or worth keeping. Accounting only: who gets one is ``scheduler.py``'s.

A block is a number; the memory behind it is on the ranks (``workers/kv_cache.py``), where every rank uses the same
numbers. What a hash stands for, and when a block's content may be offered, is not known here (``prefix_cache.py``,
``scheduler.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from runtime.common.errors import EngineError


class BlockPool:
    """Blocks ``0`` to ``num_blocks - 1``, each with a count of how many requests hold it.

    A block that nobody holds is free. If its content was offered under a hash it can still be found and shared, until
    ``allocate`` needs it and forgets the hash. The same calls always give the same blocks: first those without a hash,
    the one that was freed last before the others; then those with one, the one that was freed first before the others.

    Attributes:
        num_blocks: how many there are.
        block_size: tokens in a block.
        queried_tokens: prompt tokens that were looked up in the prefix cache; counted by the scheduler.
        hit_tokens: how many of those were found.
        evictions: findable blocks that were given away and forgotten.
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
        # A free block is in exactly one of these two: nothing in it can be found, or its hash still leads to it.
        self._unused = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those that can still be found included."""
        return len(self._unused) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds, each counted once."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks that many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks; their content is forgotten.

        Raises:
            EngineError: fewer are free; callers look at :attr:`num_free` first, so this is a bug of ours.
        """
        if count > self.num_free:
            raise EngineError(f"{count} KV blocks were asked for, {self.num_free} of {self.num_blocks} are free")
        block_ids: list[int] = []
        for _ in range(count):
            if self._unused:
                block_id = self._unused.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._forget(block_id)
                self.evictions += 1
            self._references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block. Of a sequence, later blocks are evicted before earlier ones.

        Raises:
            EngineError: nobody holds one, or it is none of this pool: two requests believe they own it.
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
                self._cached[block_id] = None

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks with these hashes, up to the first that cannot be found. Nothing changes."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds: sharing them lowers :attr:`num_free` by so many."""
        return sum(not self._references[block_id] for block_id in block_ids)

    def share(self, block_ids: Sequence[int]) -> None:
        """Take one more reference to each of some blocks that ``find`` gave.

        Raises:
            EngineError: nobody holds one and it cannot be found: what is in it is unknown.
        """
        for block_id in block_ids:
            if not self._references[block_id]:
                if block_id not in self._cached:
                    raise EngineError(f"KV block {block_id} of {self.num_blocks} was shared without being held or kept")
                del self._cached[block_id]
            self._references[block_id] += 1

    def offer(self, block_id: int, block_hash: bytes) -> None:
        """Let a held block be found by ``block_hash`` from now on; if another one is, that one stays.

        Raises:
            EngineError: nobody holds it, or it is offered under another hash already.
        """
        if not self._references[block_id] or self._hashes[block_id] not in (None, block_hash):
            raise EngineError(f"KV block {block_id} of {self.num_blocks} was offered while free, or for other content")
        if self._block_of.setdefault(block_hash, block_id) == block_id:
            self._hashes[block_id] = block_hash

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Let the blocks with these hashes be found no longer; who holds them keeps them."""
        for block_id in [self._block_of[block_hash] for block_hash in hashes if block_hash in self._block_of]:
            self._forget(block_id)
            if block_id in self._cached:
                del self._cached[block_id]
                self._unused.append(block_id)

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hashes[block_id] = None
