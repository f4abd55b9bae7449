"""Root-mean-square normalisation, with the residual addition that precedes it in a decoder."""

from __future__ import annotations

from typing import overload

import torch

from parallel.parameter import ParallelModule, ParameterLoader, Partition
from parallel.shard import Shard
from workers.kernels.ops.rms_norm import fused_add_rms_norm, rms_norm


class RMSNorm(ParallelModule):
    """``x / rms(x) * weight`` over the last dimension: fp32 inside, rounded to the input's dtype before the weight.

    Args:
        hidden_size: of the last dimension.
        eps: added to the mean square.
        dtype: of the weight, which every rank holds whole.
        prefix: the layer's full name.
    """

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype, prefix: str = "") -> None:
        super().__init__(prefix)
        self.eps = eps
        whole = Partition(None, hidden_size, Shard(0, hidden_size))
        self.add_parameter("weight", ParameterLoader(self, "weight", (whole,)), dtype)

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
