"""Linear methods for weights that are not quantized."""

from __future__ import annotations

import torch
from typing_extensions import override

from parallel.linear_method import LinearInput, LinearMethod, UnquantizedLinearMethod
from parallel.parameter import ParallelModule
from workers.quantization.cpu_linear import uses_op


class CpuLinearMethod(UnquantizedLinearMethod):
    """A plain weight on a CPU, multiplied by the op ``lockstep::cpu_linear`` or by F.linear, whichever is faster."""

    @override
    def apply(
        self,
        layer: ParallelModule,
        x: LinearInput,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if isinstance(x, torch.Tensor) and uses_op(x.dtype, out_dtype or x.dtype):
            return torch.ops.lockstep.cpu_linear(x, layer.weight, bias, out_dtype or x.dtype)
        return super().apply(layer, x, bias, out_dtype=out_dtype)


class UnquantizedConfig:
    """Chooses the method of every layer of a model without quantization (``parallel.linear_method.QuantConfig``).

    Args:
        device: where the model computes.
    """

    input_multiple = 1
    output_multiple = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def get_linear_method(self, layer_kind: str, prefix: str) -> LinearMethod | None:
        """:class:`CpuLinearMethod` for every layer on a CPU, the default method elsewhere."""
        return CpuLinearMethod() if self._device.type == "cpu" else None
