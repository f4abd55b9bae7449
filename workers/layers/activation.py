"""Activation layers of the MLP, and their fusion with the input quantization of the next linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from parallel.linear import LinearBase
from parallel.linear_method import LinearInput
from workers.kernels.ops.silu_and_mul import silu_and_mul


class SiluAndMul(nn.Module):
    """``silu(first half) * second half`` of the last dimension: [T, 2d] -> [T, d]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computed in x's dtype: a half-precision silu is rounded before the product."""
        return silu_and_mul(x)


@runtime_checkable
class FusesActivation(Protocol):
    """A linear method with kernels that compute an activation and quantize the result in one pass."""

    def fused_activation(self, activation: nn.Module) -> Callable[[torch.Tensor], LinearInput] | None:
        """The kernel for ``activation`` followed by input quantization; None if there is none."""


def activation_for(linear: LinearBase, activation: nn.Module) -> Callable[[torch.Tensor], LinearInput]:
    """What computes the input of ``linear``: a fused kernel of its method if there is one, else ``activation``."""
    fused = linear.method.fused_activation(activation) if isinstance(linear.method, FusesActivation) else None
    return activation if fused is None else fused
