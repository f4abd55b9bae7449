"""Every Triton kernel compiles for GPUs that are not here, keeps its values in registers, and fits shared memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel_checks import make_paged
from tests.workers.kernels.ahead_of_time import SHARED_MEMORY, compile_for, record
from workers.kernels.ops import kv_cache_write, paged_attention, rms_norm, rotary_embedding, silu_and_mul

pytest.importorskip("triton")

CAPABILITIES = sorted(SHARED_MEMORY)

Call = Callable[[torch.dtype], Any]

SMALL: dict[str, Call] = {
    "activation": lambda dtype: silu_and_mul.silu_and_mul_triton(ones(dtype, 4, 28672)),
    "norm": lambda dtype: rms_norm.rms_norm_triton(ones(dtype, 4, 4096), ones(dtype, 4096), 1e-5),
    "norm of heads": lambda dtype: rms_norm.rms_norm_triton(ones(dtype, 4, 32, 128), ones(dtype, 128), 1e-5),
    "norm with residual": lambda dtype: rms_norm.fused_add_rms_norm_triton(
        ones(dtype, 4, 16384), ones(dtype, 4, 16384), ones(dtype, 16384), 1e-5
    ),
    "rotation": lambda dtype: rotary_embedding.rotary_embedding_triton(
        ones(dtype, 4, 32, 128), ones(dtype, 4, 8, 128), ones(dtype, 4, 1, 64), ones(dtype, 4, 1, 64)
    ),
    "writing": lambda dtype: kv_cache_write.kv_cache_write_triton(
        ones(dtype, 4, 8, 128), ones(dtype, 4, 8, 128), ones(dtype, 2, 2, 8, 16, 128), torch.arange(4)
    ),
}


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def ones(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def attend(dtype: torch.dtype, head_dim: int, group: int, window: int) -> None:
    """Both attention kernels and the one that combines KV splits."""
    case = make_paged("cpu", dtype, [(20, 5), (33, 1)], heads=2 * group, kv_heads=2, head_dim=head_dim, block_size=16)
    paged_attention.paged_attention_triton(**case.arguments(scale=0.1, window=window))


def check(monkeypatch: pytest.MonkeyPatch, folder: Path, capability: int, call: Callable[[], Any]) -> set[str]:
    """Compile what ``call`` launches; gives the kernels' names."""
    monkeypatch.setattr(paged_attention, "is_data_center", lambda device: capability in (90, 100))
    names: set[str] = set()
    for launch in record(monkeypatch, call):
        found = compile_for(launch, capability, folder)
        name = launch.kernel.function.__name__
        assert found.stack == 0, f"{name} spills registers on sm_{capability}: {found}"
        assert found.shared <= SHARED_MEMORY[capability] * 1024, f"{name} does not fit sm_{capability}: {found}"
        names.add(name)
    return names


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_kernels(dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, call in SMALL.items():
        assert check(monkeypatch, tmp_path, capability, lambda call=call: call(dtype)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "window", "capability"),
    [
        (torch.bfloat16, 64, 3, 0, 90),
        (torch.bfloat16, 80, 1, 0, 80),
        *((torch.bfloat16, 128, 4, 0, capability) for capability in CAPABILITIES),
        *((torch.float16, 256, 16, 512, capability) for capability in CAPABILITIES),
        (torch.float32, 128, 8, 50, 100),
    ],
)
def test_attention(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    window: int,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    names = check(monkeypatch, tmp_path, capability, lambda: attend(dtype, head_dim, group, window))
    assert names == {"_prefill", "_decode", "_combine"}


def test_a_spill_would_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paged_attention, "MAX_REGISTERS", 32)
    with pytest.raises(AssertionError, match="spills registers on sm_90"):
        check(monkeypatch, tmp_path, 90, lambda: attend(torch.float32, 64, 1, 0))
