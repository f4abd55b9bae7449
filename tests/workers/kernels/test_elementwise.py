"""The C forms of the elementwise ops against the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.parallel.sources import random
from workers.kernels import elementwise
from workers.kernels.ops.rms_norm import fused_add_rms_norm_reference, rms_norm_reference
from workers.kernels.ops.rotary_embedding import rotary_embedding_reference
from workers.kernels.ops.silu_and_mul import silu_and_mul_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 7, 16, 33, 576, 1030]


@pytest.fixture(scope="module")
def library_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("native"))


@pytest.fixture(autouse=True)
def native(library_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise._library, "library", None)
    assert elementwise.use_native(library_dir)


def same(native: Callable[..., Any], reference: Callable[..., Any], *arguments: Any) -> None:
    """Equal but for one rounding more or less, which a sum in another order can cause."""
    dtype = next(a.dtype for a in arguments if isinstance(a, torch.Tensor))
    got, expected = native(*arguments), reference(*arguments)
    for mine, theirs in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (got, expected)), strict=True):
        assert mine.dtype == theirs.dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=4 * eps, atol=eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 5, 120])
def test_norms(dtype: torch.dtype, width: int, tokens: int) -> None:
    x, residual, weight = (random(n, width, seed=i, dtype=dtype) for i, n in enumerate((tokens, tokens, 1)))
    same(elementwise.rms_norm, rms_norm_reference, x, weight[0], 1e-5)
    same(elementwise.fused_add_rms_norm, fused_add_rms_norm_reference, x, residual, weight[0], 1e-5)
    assert torch.equal(elementwise.fused_add_rms_norm(x, residual, weight[0], 1e-5)[1], x + residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_of_a_wider_projection(dtype: torch.dtype) -> None:
    x, weight = random(6, 3 * 24 + 9, seed=1, dtype=dtype), random(24, seed=2, dtype=dtype)
    same(elementwise.rms_norm, rms_norm_reference, x[:, 5:77].unflatten(1, (3, 24)), weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3)])
@pytest.mark.parametrize("head_dim", [2, 20, 64])
@pytest.mark.parametrize("tokens", [1, 70])
def test_rotation_has_the_same_bits(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, tokens: int) -> None:
    rows = random(tokens, (heads[0] + 2 * heads[1]) * head_dim, seed=1, dtype=dtype).unflatten(1, (-1, head_dim))
    query, key = rows[:, : heads[0]], rows[:, heads[0] : sum(heads)]
    cos, sin = random(tokens, 1, head_dim, seed=2, dtype=dtype).chunk(2, dim=-1)
    arguments = query, key, cos, sin
    for mine, theirs in zip(
        elementwise.rotary_embedding(*arguments), rotary_embedding_reference(*arguments), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 5, 120])
def test_silu_and_mul(dtype: torch.dtype, width: int, tokens: int) -> None:
    x = random(tokens, 2 * width, seed=1, dtype=dtype) * 6
    same(elementwise.silu_and_mul, silu_and_mul_reference, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers(dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 80.0, -80.0, 200.0, -200.0, float("inf"), float("nan")], dtype=dtype)
    x = torch.cat((gate, torch.ones(8, dtype=dtype)))[None]
    got, expected = elementwise.silu_and_mul(x), silu_and_mul_reference(x)
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-5, atol=1e-30)
    rows = random(3, 40, seed=1, dtype=dtype)
    rows[1, 39] = float("nan")
    normed = elementwise.rms_norm(rows, torch.ones(40, dtype=dtype), 1e-5)
    assert normed.isnan().all(dim=1).tolist() == [False, True, False]
    assert not bool(normed[[0, 2]].isnan().any())


def test_what_the_kernels_do_not_take() -> None:
    x, weight = random(3, 8, seed=1), random(8, seed=2)
    assert elementwise.rms_norm(x.double(), weight.double(), 1e-5) is None
    assert elementwise.rms_norm(x.t().contiguous().t(), weight, 1e-5) is None
    assert elementwise.fused_add_rms_norm(x, x[:2], weight, 1e-5) is None
    assert elementwise.silu_and_mul(x[:, :7]) is None
    assert elementwise.rotary_embedding(x[:, None], x[:, None], x[:, None], x[:, None]) is None
