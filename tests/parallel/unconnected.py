"""A group that knows its place but exchanges nothing: for tests of what a rank holds, without processes."""

from __future__ import annotations

import torch

from parallel.group import TensorParallelGroup


class _UnconnectedGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__("unconnected", 0, 1, torch.device("cpu"))
        self.rank = rank
        self.size = size


def unconnected_group(rank: int, size: int) -> TensorParallelGroup:
    """Rank ``rank`` of ``size``, alone."""
    return _UnconnectedGroup(rank, size)
