"""Linear methods for weights that are not quantized."""

from __future__ import annotations

import torch
from typing_extensions import override

from parallel.linear import LinearMethod, UnquantizedLinearMethod
from parallel.parameter import ParallelModule
from workers.quantization.cpu_linear import uses_op


class CpuLinearMethod(UnquantizedLinearMethod):
    """A plain weight on a CPU, multiplied by the op ``lockstep::cpu_linear`` wherever that is not slower."""

    @override
    def apply(
        self,
        layer: ParallelModule,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        out_dtype = out_dtype or x.dtype
        if uses_op(x.dtype, out_dtype):
            return torch.ops.lockstep.cpu_linear(x, layer.weight, bias, out_dtype)
        return super().apply(layer, x, bias)


class UnquantizedConfig:
    """The method of every layer of a model without quantization (``parallel.linear.QuantConfig``).

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def get_linear_method(self, layer_kind: str, prefix: str) -> LinearMethod | None:
        """The CPU method for every layer on a CPU, the default method elsewhere."""
        return CpuLinearMethod() if self._device.type == "cpu" else None
