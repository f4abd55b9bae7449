"""The implementations of cpu_linear, against F.linear in double precision and against each other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from parallel import toolchain
from tests.parallel.sources import random
from workers.quantization import cpu_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def library_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("native"))


@pytest.fixture
def native(library_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C kernel, for any number of tokens."""
    monkeypatch.setattr(cpu_linear._Native, "call", None)
    monkeypatch.setattr(cpu_linear, "MAX_NATIVE_TOKENS", dict.fromkeys(DTYPES, 10**6))
    assert cpu_linear.use_native(library_dir)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear._Native, "call", None)


@pytest.fixture
def restored_threads(library_dir: str) -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    cpu_linear.use_native(library_dir)


def check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> None:
    out_dtype = out_dtype or x.dtype
    out = torch.ops.lockstep.cpu_linear(x, weight, bias, out_dtype)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert out.dtype == out_dtype
    # One rounding of the result, plus what fp32 sums lose.
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(out.dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (24, 32), (130, 96), (31, 2051), (49, 1030)])
def test_the_kernel_equals_f_linear_but_for_rounding(native: None, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = random(*shape, seed=2, dtype=dtype), random(shape[0], seed=3, dtype=dtype)
    for tokens in (1, 2, 3, 4, 5, 8, 33, 99):
        x = random(tokens, shape[1], seed=1, dtype=dtype)
        check(x, weight, bias)
        check(x, weight, None, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_blocks_equal_f_linear_but_for_rounding(
    without_native: None, dtype: torch.dtype, tokens: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "BLOCK_BYTES", 4 * 96 * 50)  # 130 rows are two blocks and a rest
    x, weight = random(tokens, 96, seed=1, dtype=dtype), random(130, 96, seed=2, dtype=dtype)
    bias = random(130, seed=3, dtype=dtype) if with_bias else None
    check(x, weight, bias)
    check(x, weight, bias, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_neither_on_the_batch_nor_on_threads(
    native: None, restored_threads: None, library_dir: str, dtype: torch.dtype
) -> None:
    x, weight = random(107, 1100, seed=1, dtype=dtype), random(301, 1100, seed=2, dtype=dtype)
    torch.set_num_threads(1)
    cpu_linear.use_native(library_dir)
    whole = torch.ops.lockstep.cpu_linear(x, weight, None, torch.float32)
    torch.set_num_threads(3)
    cpu_linear.use_native(library_dir)
    for tokens in (1, 2, 3, 4, 6, 31, 50, 107):
        runs = [torch.ops.lockstep.cpu_linear(part, weight, None, torch.float32) for part in x.split(tokens)]
        assert torch.equal(torch.cat(runs), whole), tokens


def test_tensors_that_are_views(native: None) -> None:
    x, weight = random(3, 40, seed=1, dtype=torch.bfloat16)[:, 3:20], random(9, 50, seed=2, dtype=torch.bfloat16)
    check(x, weight[::2, 7:24], None, torch.float32)


def test_unsupported_tensors_fall_back_to_f_linear(native: None) -> None:
    x, weight = random(3, 8, seed=1), random(5, 8, seed=2)
    check(x.t().contiguous().t(), weight.t().contiguous().t(), None)
    check(x.double(), weight.double(), None)
    check(x[:0], weight, None)
    check(x[:, :0], weight[:, :0], random(5, seed=3))
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.ops.lockstep.cpu_linear(x, weight.bfloat16(), None, x.dtype)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ops.lockstep.cpu_linear(x, weight[:, :7], None, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(native: None, dtype: torch.dtype) -> None:
    x, weight = random(7, 50, seed=1, dtype=dtype), random(9, 50, seed=2, dtype=dtype)
    clean = torch.ops.lockstep.cpu_linear(x, weight, None, x.dtype)
    x[2, 49], x[4, 0] = float("nan"), float("inf")
    out = torch.ops.lockstep.cpu_linear(x, weight, None, x.dtype)
    assert bool(out[2].isnan().all())
    assert bool(out[4].isinf().all())
    others = [0, 1, 3, 5, 6]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_as_torch_does(native: None, dtype: torch.dtype) -> None:
    x = random(64, 1, seed=1, dtype=dtype) * torch.tensor([1e4, 1.0, 1e-5, 1e-9], dtype=dtype).repeat(16)[:, None]
    weight = random(97, 1, seed=2, dtype=dtype)
    out = torch.ops.lockstep.cpu_linear(x, weight, None, x.dtype)
    assert torch.equal(out, (x.float() * weight.float().t()).to(dtype))


def test_any_leading_dimensions(native: None) -> None:
    x, weight = random(2, 3, 4, 8, seed=1), random(5, 8, seed=2)
    torch.testing.assert_close(torch.ops.lockstep.cpu_linear(x, weight, None, x.dtype), F.linear(x, weight))
    assert torch.ops.lockstep.cpu_linear(x[0, 0, 0], weight, None, x.dtype).shape == (5,)


def test_without_a_compiler_there_is_one_warning(
    without_native: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(toolchain, "COMPILERS", ())
    monkeypatch.setattr(cpu_linear._Native, "warned", False)
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert not cpu_linear.use_native(str(tmp_path))
        assert not cpu_linear.use_native(str(tmp_path))
    assert caplog.text.count("no C compiler") == 1
    check(random(3, 8, seed=1, dtype=torch.bfloat16), random(5, 8, seed=2, dtype=torch.bfloat16), None, torch.float32)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_opcheck(native: None, out_dtype: torch.dtype) -> None:
    arguments = [random(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate([(5, 8), (6, 8), (6,)])]
    torch.library.opcheck(torch.ops.lockstep.cpu_linear.default, (*arguments, out_dtype))


@pytest.mark.parametrize("tokens", [5, 200])
def test_does_not_depend_on_the_default_dtype(tokens: int) -> None:
    x, weight = random(tokens, 8, seed=1, dtype=torch.bfloat16), random(6, 8, seed=2, dtype=torch.bfloat16)
    expected = torch.ops.lockstep.cpu_linear(x, weight, None, torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(torch.ops.lockstep.cpu_linear(x, weight, None, torch.float32), expected)
    finally:
        torch.set_default_dtype(torch.float32)
