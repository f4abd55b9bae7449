"""Which KV-cache blocks are free. Accounting only: who gets one, and who has to give his back, is ``scheduler.py``'s.

A block is a number; the memory behind it is on the ranks (``workers/kv_cache.py``), where every rank uses the same
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.errors import EngineError


class BlockPool:
    """Blocks ``0`` to ``num_blocks - 1``, each either free or allocated once.

    The same calls always give the same blocks: the one that was freed last goes out first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """``block_size`` is in tokens."""
        if num_blocks < 1 or block_size < 1:
            raise EngineError(f"a KV cache of {num_blocks} blocks of {block_size} tokens; both have to be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks that many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks.

        Raises:
            EngineError: fewer are free; callers look at :attr:`num_free` first, so this is a bug of ours.
        """
        if count > len(self._free):
            raise EngineError(f"{count} KV blocks were asked for, {len(self._free)} of {self.num_blocks} are free")
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._is_free[block_id] = 0
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back.

        Raises:
            EngineError: one is free already, or is none of this pool: two requests believe they own it.
        """
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks or self._is_free[block_id]:
                raise EngineError(f"KV block {block_id} of {self.num_blocks} was freed without being allocated")
            self._is_free[block_id] = 1
        self._free.extend(reversed(block_ids))
