"""From a quantization scheme and a device to the object that chooses each layer's linear method."""

from __future__ import annotations

import torch

from parallel.linear_method import LinearMethod, QuantConfig
from runtime.common.errors import ConfigError
from workers.quantization.cpu_linear import CpuLinearMethod


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


def get_quant_config(quantization: str | None, device: torch.device) -> QuantConfig:
    """The quantization config of a model.

    Args:
        quantization: name of the scheme; None: weights are not quantized.
        device: where the model computes.

    Raises:
        ConfigError: the scheme is unknown.
    """
    if quantization is not None:
        raise ConfigError(f"quantization {quantization!r} is not supported; leave --quantization out")
    return UnquantizedConfig(device)
