"""From a quantization scheme and a device to the object that chooses each layer's linear method."""

from __future__ import annotations

import torch

from parallel.linear_method import QuantConfig
from runtime.common.errors import ConfigError
from workers.quantization.unquantized import UnquantizedConfig


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
