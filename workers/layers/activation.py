"""Activation layers of the feed-forward network, and their fusion with the next layer's input quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from parallel.linear import LinearBase
from workers.kernels.ops.silu_and_mul import silu_and_mul


class SiluAndMul(nn.Module):
    """``silu(first half) * second half`` of the last dimension: [T, 2d] -> [T, d]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computed in x's dtype, so a half-precision silu is rounded before the product."""
        return silu_and_mul(x)


@runtime_checkable
class FusesActivation(Protocol):
    """A linear method that has kernels which activate and quantize its input at once."""

    def fused_activation(self, activation: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The kernel that stands for ``activation`` followed by the input quantization, None if there is none."""


def activation_for(linear: LinearBase, activation: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What to apply before ``linear``: a fused kernel if its method has one for this activation, else the layer."""
    fused = linear.method.fused_activation(activation) if isinstance(linear.method, FusesActivation) else None
    return activation if fused is None else fused
