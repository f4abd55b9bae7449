"""Groups without processes: for tests of what one rank holds and computes."""

from __future__ import annotations

import torch

from parallel.collectives.base import Collectives
from parallel.group import TensorParallelGroup


class _UnconnectedGroup(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__("unconnected", 0, 1, torch.device("cpu"))
        self.rank = rank
        self.size = size


def unconnected_group(rank: int, size: int) -> TensorParallelGroup:
    """Rank ``rank`` of ``size``, whose collectives fail."""
    return _UnconnectedGroup(rank, size)


class ConstantCollectives(Collectives):
    """Two ranks that always hold the same tensors."""

    backend = "constant"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x])

    def gather(self, x: torch.Tensor, dst: int) -> torch.Tensor | None:
        return torch.stack([x, x]) if dst == 0 else None

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        return x.clone()

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
