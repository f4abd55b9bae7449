"""Memory for the values of a replay: one block that all captured sizes share, in which values follow one another.

Planning is a pure function of when values are made and last read. Replays run one at a time, so they can all use the
same memory; the largest size is captured first and makes the block as large as it has to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Bytes: of torch's own allocator, and of a cache line."""


@dataclass(frozen=True)
class Lifetime:
    """A value of ``size`` bytes, made by call ``first`` and last read by call ``last``."""

    first: int
    last: int
    size: int


def plan_memory(lifetimes: Sequence[Lifetime]) -> tuple[tuple[int, ...], int]:
    """An offset in bytes for each value, and the bytes of all: values that live at the same time do not overlap.

    Each takes the lowest gap that is free when it is made. An input of a call outlives it, so that a call never
    writes over what it reads.
    """
    offsets = [0] * len(lifetimes)
    alive: list[tuple[int, int, int]] = []  # offset, end, last
    total = 0
    for index in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].first):
        value = lifetimes[index]
        size = -(-value.size // ALIGNMENT) * ALIGNMENT
        alive = [entry for entry in alive if entry[2] >= value.first]
        offset = 0
        for start, end, _ in sorted(alive):
            if offset + size <= start:
                break
            offset = max(offset, end)
        if size:
            alive.append((offset, offset + size, value.last))
        offsets[index] = offset
        total = max(total, offset + size)
    return tuple(offsets), total


class Arena:
    """A block of memory on the CPU that tapes are bound to."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._tensors: dict[object, torch.Tensor] = {}

    def reserve(self, size: int) -> None:
        """Make the block at least ``size`` bytes. What is bound to a smaller one keeps that one alive."""
        if self._block.numel() < size:
            self._block = torch.empty(size, dtype=torch.uint8)
            self._tensors = {}

    def tensor(
        self, start: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """A tensor whose element 0 is ``offset`` elements after byte ``start``; the same one for the same place."""
        key = (start, dtype, shape, stride, offset)
        if key not in self._tensors:
            first = start // dtype.itemsize + offset
            storage = self._block.untyped_storage()
            self._tensors[key] = torch.empty(0, dtype=dtype).set_(storage, first, shape, stride)
        return self._tensors[key]
