"""Selection of attention backends by name and by what device, dtype, head size and machine allow."""

from __future__ import annotations

import pytest
import torch

from runtime.common.config import ATTENTION_BACKENDS
from runtime.common.errors import ConfigError
from workers.attention import cpu_paged, triton_paged
from workers.attention.registry import BACKENDS, backend_name, create_backend, load_class

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels are available."""
    monkeypatch.setattr(cpu_paged._library, "is_used", lambda: True)
    monkeypatch.setattr(cpu_paged.CpuPagedAttention, "__init__", lambda self: None)
    monkeypatch.setattr(triton_paged, "triton_is_installed", lambda: True)


def test_the_flag_names_every_backend() -> None:
    assert set(ATTENTION_BACKENDS) == {"auto", *BACKENDS}
    for name in BACKENDS:
        assert backend_name(object.__new__(load_class(name))) == name


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "expected"),
    [
        (CPU, torch.float32, 64, "cpu"),
        (CPU, torch.float64, 64, "torch"),
        (CPU, torch.bfloat16, 1024, "torch"),
        (CUDA, torch.bfloat16, 128, "triton"),
        (CUDA, torch.bfloat16, 512, "torch"),
        (CUDA, torch.float64, 64, "torch"),
    ],
)
def test_auto(kernels: None, device: torch.device, dtype: torch.dtype, head_dim: int, expected: str) -> None:
    assert backend_name(create_backend("auto", device, dtype=dtype, head_dim=head_dim)) == expected


def test_auto_without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_paged._library, "library", None)
    monkeypatch.setattr(triton_paged, "triton_is_installed", lambda: False)
    for device in (CPU, CUDA):
        assert backend_name(create_backend("auto", device, dtype=torch.float32, head_dim=64)) == "torch"


def test_by_name(kernels: None) -> None:
    for name, device in (("cpu", CPU), ("torch", CPU), ("torch", CUDA), ("triton", CUDA)):
        assert backend_name(create_backend(name, device, dtype=torch.float32, head_dim=64)) == name


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "message"),
    [
        ("triton", CPU, torch.float32, 64, "'triton' .* runs on cuda, and this rank .* cpu; allowed: auto, cpu, torch"),
        ("cpu", CUDA, torch.float32, 64, "runs on cpu, and this rank computes on cuda; allowed: auto, triton, torch"),
        ("cpu", CPU, torch.float64, 64, "computes in float32, bfloat16, float16, and the model's dtype is float64"),
        ("triton", CUDA, torch.float32, 512, "heads of at most 256, and the model's have 512; allowed: auto, torch"),
        ("flash", CPU, torch.float32, 64, "no backend has this name; allowed: auto, cpu, torch"),
    ],
)
def test_what_cannot_be_used_is_refused(
    kernels: None, name: str, device: torch.device, dtype: torch.dtype, head_dim: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        create_backend(name, device, dtype=dtype, head_dim=head_dim)
    assert "\n" not in str(raised.value)


def test_missing_compilers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_paged._library, "library", None)
    monkeypatch.setattr(triton_paged, "triton_is_installed", lambda: False)
    with pytest.raises(ConfigError, match="its C kernel is not compiled"):
        create_backend("cpu", CPU, dtype=torch.float32, head_dim=64)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        create_backend("triton", CUDA, dtype=torch.float32, head_dim=64)
