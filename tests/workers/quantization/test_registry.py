"""Which object chooses the linear methods of a model."""

from __future__ import annotations

import pytest
import torch

from runtime.common.errors import ConfigError
from workers.quantization.cpu_linear import CpuLinearMethod
from workers.quantization.registry import get_quant_config


def test_without_quantization_a_cpu_has_its_own_method() -> None:
    assert isinstance(get_quant_config(None, torch.device("cpu")).get_linear_method("row", "layer"), CpuLinearMethod)
    assert get_quant_config(None, torch.device("cuda")).get_linear_method("row", "layer") is None


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="quantization 'fp8' is not supported"):
        get_quant_config("fp8", torch.device("cpu"))
