"""RMS normalization, with the residual addition that precedes it in a decoder."""

from __future__ import annotations

from typing import overload

import torch

from parallel.parameter import PER_CHANNEL, ParallelModule, ParameterLoader, replicated_vector
from workers.kernels.ops.rms_norm import fused_add_rms_norm, rms_norm


class RMSNorm(ParallelModule):
    """``x / rms(x) * weight`` over the last dimension, computed in fp32 and rounded to x's dtype before the weight.

    Args:
        hidden_size: of the last dimension.
        eps: added to the mean square.
        dtype: of the weight, which is replicated on every rank.
        prefix: the layer's full name.
    """

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype, prefix: str = "") -> None:
        super().__init__(prefix)
        self.eps = eps
        self.add_parameter(
            "weight", ParameterLoader(self, "weight", replicated_vector(hidden_size), PER_CHANNEL), dtype
        )

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    @overload
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """norm(x), or with a residual of the same shape: (norm(x + residual), x + residual)."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return fused_add_rms_norm(x, residual, self.weight, self.eps)
