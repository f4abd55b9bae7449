"""RMSNorm equals torch's in fp32 and, bit for bit, transformers' rounding in half precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from workers.layers.norm import RMSNorm


def make(dtype: torch.dtype) -> tuple[RMSNorm, torch.Tensor, torch.Tensor]:
    """A norm of 48 with random weight, and two inputs of 5 rows."""
    torch.manual_seed(0)
    norm = RMSNorm(48, 1e-5, dtype=dtype)
    norm.weight.copy_(torch.randn(48))
    return norm, torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype) * 3


def test_equals_torch() -> None:
    norm, x, residual = make(torch.float32)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (48,), norm.weight, 1e-5))
    normed, total = norm(x, residual)
    assert total.equal(x + residual)
    torch.testing.assert_close(normed, F.rms_norm(x + residual, (48,), norm.weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    norm, x, residual = make(dtype)
    theirs = LlamaRMSNorm(48, 1e-5)
    theirs.weight.data = norm.weight.data
    assert norm(x).equal(theirs(x))
    normed, total = norm(x, residual)
    assert total.dtype == normed.dtype == dtype
    assert normed.equal(theirs(x + residual))


def test_inputs_are_left_alone() -> None:
    norm, x, residual = make(torch.float32)
    before = x.clone(), residual.clone()
    norm(x, residual)
    assert x.equal(before[0])
    assert residual.equal(before[1])
