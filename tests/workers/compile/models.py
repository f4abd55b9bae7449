"""Small models that a trace must refuse, or that a cut has to handle. Each says what is special about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

SIZE = 8


class TinyModel(nn.Module):
    """Embedding and one product; a subclass does something in between."""

    dynamic_arg_dims: ClassVar[Mapping[str, int]] = {"input_ids": 0, "positions": 0}

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, SIZE), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)
        self.register_buffer("shift", torch.ones(SIZE))
        self.loose = torch.ones(SIZE)

    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = F.embedding(input_ids, self.table) + positions[:, None] + self.get_buffer("shift")
        return F.linear(self.between(x, positions), self.weight)


class BranchesOnValue(TinyModel):
    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line
            x = x + 1
        return x


class BranchesOnTokens(TinyModel):
    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 5 else x  # the line


class TreatsOneTokenSpecially(TinyModel):
    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) == 1 else x  # the line


class LoopsOverTokens(TinyModel):
    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[token] for token in range(x.shape[0])])  # the line


class FixesTheSize(TinyModel):
    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x.reshape(13, SIZE)  # the line


class UsesALooseTensor(TinyModel):
    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x + self.loose


class GivesTwoTensors(TinyModel):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = super().forward(input_ids, positions)
        return x, x + 1


def line_of(model: type[TinyModel]) -> str:
    """``file:line`` of the line that is marked in a model's code."""
    code = model.between.__code__
    with open(code.co_filename, encoding="utf-8") as file:
        lines = file.read().splitlines()
    marked = next(n for n in range(code.co_firstlineno, len(lines)) if "# the line" in lines[n])
    return f"{code.co_filename}:{marked + 1}"
