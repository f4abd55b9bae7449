"""The blocked product for CPUs without 16-bit instructions, against F.linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel import cpu_linear
from tests.parallel.sources import random


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_f_linear_but_for_rounding(
    dtype: torch.dtype, tokens: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "BLOCK_BYTES", 4 * 96 * 50)  # 130 rows are two blocks and a rest
    x, weight = random(tokens, 96, seed=1, dtype=dtype), random(130, 96, seed=2, dtype=dtype)
    bias = random(130, seed=3, dtype=dtype) if with_bias else None
    out = torch.ops.lockstep.cpu_linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert out.dtype == dtype
    # One rounding of the result, plus what fp32 sums lose.
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_any_leading_dimensions() -> None:
    x, weight = random(2, 3, 4, 8, seed=1), random(5, 8, seed=2)
    torch.testing.assert_close(torch.ops.lockstep.cpu_linear(x, weight), F.linear(x, weight))


def test_is_chosen_for_slow_dtypes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(5, 8, seed=1, dtype=torch.bfloat16), random(6, 8, seed=2, dtype=torch.bfloat16)
    for slow, expected in (((torch.bfloat16,), 1), ((), 0)):
        monkeypatch.setattr(cpu_linear, "SLOW_DTYPES", slow)
        with torch.profiler.profile() as profile:
            cpu_linear.linear(x, weight)
            cpu_linear.linear(x.float(), weight.float())
        assert sum(event.name == "lockstep::cpu_linear" for event in profile.events() or ()) == expected


def test_opcheck() -> None:
    arguments = (random(5, 8, seed=1), random(6, 8, seed=2), random(6, seed=3))
    torch.library.opcheck(torch.ops.lockstep.cpu_linear.default, arguments)


def test_does_not_depend_on_the_default_dtype() -> None:
    x, weight = random(5, 8, seed=1, dtype=torch.bfloat16), random(6, 8, seed=2, dtype=torch.bfloat16)
    expected = torch.ops.lockstep.cpu_linear(x, weight)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(torch.ops.lockstep.cpu_linear(x, weight), expected)
    finally:
        torch.set_default_dtype(torch.float32)
