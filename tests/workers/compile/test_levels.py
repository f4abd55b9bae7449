"""Optimization levels: the compile settings of -O0 to -O3 and --enforce-eager, and what compiling needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel.platform import CpuPlatform, CudaPlatform, Platform
from runtime.common.config import CompileMode, EngineConfig, GraphMode, resolve
from runtime.common.model_config import ModelConfig
from workers.compile.levels import EAGER, find_cxx, missing_for_compiling, resolve_level

CPU, CUDA = CpuPlatform(), CudaPlatform()


def resolved(**settings: Any) -> EngineConfig:
    model = ModelConfig("LlamaForCausalLM", 8, 8, 1, 1, 1, 8, 32, 64)
    return resolve(EngineConfig(**settings), model, device="cpu", executor="local")


@pytest.mark.parametrize(
    ("settings", "mode", "graph_mode"),
    [
        ({}, "PIECEWISE", "FULL_AND_PIECEWISE"),
        ({"optimization_level": 0}, "NONE", "NONE"),
        ({"optimization_level": 1}, "PIECEWISE", "PIECEWISE"),
        ({"optimization_level": 2}, "PIECEWISE", "FULL_AND_PIECEWISE"),
        ({"optimization_level": 3}, "PIECEWISE", "FULL_AND_PIECEWISE"),
        ({"enforce_eager": True, "optimization_level": 3}, "NONE", "NONE"),
        ({"cudagraph_mode": "FULL"}, "PIECEWISE", "FULL"),
        ({"cudagraph_mode": "NONE"}, "PIECEWISE", "NONE"),
        ({"optimization_level": 0, "cudagraph_mode": "FULL"}, "NONE", "FULL"),
        ({"compile_mode": "STOCK"}, "STOCK", "FULL_AND_PIECEWISE"),
        ({"compile_mode": "DYNAMO_TRACE_ONCE"}, "DYNAMO_TRACE_ONCE", "FULL_AND_PIECEWISE"),
        ({"compile_mode": "NONE", "cudagraph_mode": "FULL"}, "NONE", "FULL"),
    ],
)
def test_levels(settings: dict[str, Any], mode: str, graph_mode: str) -> None:
    found = resolve_level(resolved(**settings))
    assert (found.mode, found.graph_mode) == (mode, graph_mode)
    assert isinstance(found.mode, CompileMode)
    assert isinstance(found.graph_mode, GraphMode)
    assert found.warnings == ()


def test_eager_settings_are_those_of_enforce_eager() -> None:
    assert resolve_level(resolved(enforce_eager=True)) == EAGER


def test_without_a_compiler_the_level_falls_to_zero_and_says_what_to_install() -> None:
    missing = missing_for_compiling(CPU, which=lambda name: None)
    found = resolve_level(resolved(), missing=missing)
    assert (found.mode, found.graph_mode) == (CompileMode.NONE, GraphMode.NONE)
    assert "-O2 falls back to -O0" in found.warnings[0]
    assert "apt-get install g++" in found.warnings[0]
    assert resolve_level(resolved(enforce_eager=True), missing=missing).warnings == ()


def test_without_python_headers_nothing_is_compiled_either(tmp_path: Path) -> None:
    missing = missing_for_compiling(CPU, which=lambda name: "/usr/bin/g++", headers=str(tmp_path))
    assert missing is not None
    assert "python3-dev" in missing


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_platform_whose_attention_is_no_op_is_not_compiled(level: int) -> None:
    """A compiled graph would contain attention's reads of the forward context of the trace."""

    class Plain(Platform):
        name = "plain"
        device_type = "cuda"

    assert not Platform.opaque_attention_op(Plain())
    missing = missing_for_compiling(Plain())
    assert missing is not None
    assert "plain calls attention as a plain function" in missing
    found = resolve_level(resolved(optimization_level=level), missing=missing)
    assert (found.mode, found.graph_mode) == (CompileMode.NONE, GraphMode.NONE)
    assert found.warnings == (f"-O{level} falls back to -O0 (no compiled code, no graphs): {missing}",)


def test_installed_compilers_are_found() -> None:
    assert missing_for_compiling(CPU) is None, "the tests that compile need a C++ compiler"
    assert missing_for_compiling(CUDA, which=lambda name: None) is None
    assert find_cxx(lambda name: f"/bin/{name}" if name == "clang++" else None) == "/bin/clang++"
