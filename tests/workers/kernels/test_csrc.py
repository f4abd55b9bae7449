"""Every C source without warnings at every vector width, and its results at the widths that this CPU executes."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from parallel import toolchain
from parallel.collectives import shared_memory
from tests.workers.attention.test_cpu_paged import BATCHES, Shape, check, make_case
from workers.attention import cpu_paged
from workers.kernels import elementwise
from workers.kernels.bindings import CSRC
from workers.kernels.ops.rms_norm import fused_add_rms_norm_reference
from workers.kernels.ops.rotary_embedding import rotary_embedding_reference
from workers.kernels.ops.silu_and_mul import silu_and_mul_reference
from workers.quantization import cpu_linear
from workers.sampling import native_sampling

SOURCES = [*sorted(CSRC.glob("*.c")), shared_memory.SOURCE]
WIDTHS = {
    "x86-64": set[str](),
    "haswell": {"avx2", "fma", "f16c", "bmi2"},
    "skylake-avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""Targets of 4, 8 and 16 lanes, and the CPU features that each executes with."""

pytestmark = pytest.mark.skipif(toolchain.find_compiler() is None, reason="no C compiler")


def cpu_features() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def test_no_warnings(tmp_path: Path) -> None:
    """The shipped flags report warnings and go on; here they are errors."""
    assert {"-Wall", "-Wextra"} <= set(toolchain.FLAGS)
    strict = [f for f in toolchain.FLAGS if f not in ("-O3", "-shared")]
    for source in SOURCES:
        command = [toolchain.find_compiler() or "", *strict, "-O1", "-Werror", "-c", f"-I{toolchain.INCLUDE_DIR}"]
        done = subprocess.run(
            [*command, str(source), "-o", str(tmp_path / "out.o")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the widths are those of x86-64")
@pytest.mark.parametrize("width", WIDTHS)
def test_every_vector_width(width: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles with the shipped flags for the target; where the CPU has its features, executes every kernel."""
    flags = tuple(f"-march={width}" if f == "-march=native" else f for f in toolchain.FLAGS)
    assert flags != toolchain.FLAGS
    monkeypatch.setattr(toolchain, "FLAGS", (*flags, "-Werror"))
    toolchain.build_ahead(SOURCES, str(tmp_path))
    assert {path.name.partition("-")[0] for path in tmp_path.glob("*.so")} == {source.stem for source in SOURCES}
    if not WIDTHS[width] <= cpu_features():
        pytest.skip(f"this CPU does not execute {width}: compiled only")
    for library in (cpu_paged._library, elementwise._library, native_sampling._Native):
        monkeypatch.setattr(library, "library", None)
        assert library.use(str(tmp_path))
    monkeypatch.setattr(cpu_linear._Native, "call", None)
    assert cpu_linear.use_native(str(tmp_path))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(make_case(BATCHES["mixed"], Shape(6, 2, 20, 4, dtype)), cpu_paged.CpuPagedAttention(), window=9)
        check_linear(dtype)
        check_elementwise(dtype)
    check_sampling()


def check_linear(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(50, 70).to(dtype), torch.randn(50).to(dtype)
    for tokens in (1, 3, 7):
        x = torch.randn(tokens, 70).to(dtype)
        found = cpu_linear._multiply_natively(x, weight, bias, torch.float32)
        assert found is not None
        torch.testing.assert_close(found, F.linear(x.float(), weight.float(), bias.float()), rtol=1e-4, atol=1e-4)


def check_elementwise(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    x, residual, weight = torch.randn(3, 70).to(dtype), torch.randn(3, 70).to(dtype), torch.randn(70).to(dtype)
    torch.testing.assert_close(
        elementwise.fused_add_rms_norm(x, residual, weight, 1e-5),
        fused_add_rms_norm_reference(x, residual, weight, 1e-5),
        **bounds,
    )
    torch.testing.assert_close(elementwise.silu_and_mul(x), silu_and_mul_reference(x), **bounds)
    heads = torch.randn(3, 5, 20).to(dtype)
    cos, sin = torch.randn(3, 1, 20).to(dtype).chunk(2, dim=-1)
    arguments = heads[:, :3], heads[:, 3:], cos, sin
    torch.testing.assert_close(
        elementwise.rotary_embedding(*arguments), rotary_embedding_reference(*arguments), **bounds
    )


def check_sampling() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 300) * 3
    tokens = torch.tensor([5, 299, 0, 64])
    found = native_sampling.logprobs(logits, tokens, 5)
    assert found is not None
    expected = logits.log_softmax(dim=-1)
    torch.testing.assert_close(found[0], expected.gather(1, tokens[:, None]).flatten(), rtol=1e-4, atol=1e-4)
    assert found[1].equal(expected.topk(5).indices)
