"""Checkpoint tensors for tests, which record their reads."""

from __future__ import annotations

import torch


class Recorded:
    """A ``TensorSource`` over a tensor in memory.

    Attributes:
        reads: the slices of every read.
    """

    def __init__(self, tensor: torch.Tensor, name: str = "tensor") -> None:
        self.name = name
        self.shape = tuple(tensor.shape)
        self.reads: list[tuple[slice, ...]] = []
        self._tensor = tensor

    def read(self, *slices: slice) -> torch.Tensor:
        self.reads.append(slices)
        return self._tensor[slices].clone()


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal random numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
