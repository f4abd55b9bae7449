"""The gated MLP of a decoder layer: gate and up in one product, activation, down.

The activation is fused with the quantization of ``down_proj``'s input where its linear method has a kernel for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from parallel.group import TensorParallelGroup
from parallel.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from parallel.linear_method import LinearInput, QuantConfig, joint_multiple
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


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``: column-parallel gate and up, row-parallel down.

    Args:
        hidden_size: of input and output.
        intermediate_size: of the activation, over all ranks.
        hidden_act: "silu"; a model with another activation has a layer of its own.
        quant_config: of the two linear layers; None: plain weights.
        bias: whether the linear layers have biases.
        prefix: the layer's full name; ``{prefix}.gate_up_proj`` and ``{prefix}.down_proj`` hold the parameters.
        reduce_results: all-reduce the output; else return this rank's partial sum.
        disable_tp: full weights on every rank and no collective.
        group: the ranks.
        dtype: of the parameters.

    Raises:
        ValueError: another ``hidden_act``.
        ShardError: ``intermediate_size`` cannot be divided over that many ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: QuantConfig | None = None,
        bias: bool = False,
        prefix: str = "",
        reduce_results: bool = True,
        disable_tp: bool = False,
        *,
        group: TensorParallelGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if hidden_act != "silu":
            raise ValueError(
                f"{prefix or 'MLP'}: hidden_act is {hidden_act!r}; this layer computes silu(gate) * up and takes "
                "'silu' only, a model with another activation has a layer of its own"
            )
        multiple = joint_multiple(quant_config)
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            group=group,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
            disable_tp=disable_tp,
            dtype=dtype,
            multiple=multiple,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            group=group,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
            reduce_results=reduce_results,
            disable_tp=disable_tp,
            dtype=dtype,
            multiple=multiple,
        )
        self._activate = activation_for(self.down_proj, SiluAndMul())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        gate_up, _ = self.gate_up_proj(x)
        output, _ = self.down_proj(self._activate(gate_up))
        return output
