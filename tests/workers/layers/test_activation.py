"""SiluAndMul against its definition."""

from __future__ import annotations

import pytest
import torch

from workers.layers.mlp import SiluAndMul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_of_the_first_half_times_the_second(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 26).to(dtype)
    found = SiluAndMul()(x)
    assert (found.shape, found.dtype) == ((5, 13), dtype)
    assert found.equal(torch.nn.SiLU()(x[:, :13]) * x[:, 13:])
