"""What -O0 to -O3 and --enforce-eager come to (rows 41 to 45)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel.platform import CpuPlatform, CudaPlatform, Platform
from runtime.common.config import CompileMode, EngineConfig
from workers.compile.levels import (
    LEVEL_FUSIONS,
    PLATFORM_FUSIONS,
    find_cxx,
    missing_for_compiling,
    resolve_level,
)

CPU, CUDA = CpuPlatform(), CudaPlatform()


@pytest.mark.parametrize("platform", [CPU, CUDA])
@pytest.mark.parametrize(
    ("settings", "level", "mode", "graph_mode", "fusions"),
    [
        ({}, 2, "PIECEWISE", "FULL_AND_PIECEWISE", ("norm", "activation")),
        ({"optimization_level": 0}, 0, "NONE", "NONE", ()),
        ({"optimization_level": 1}, 1, "PIECEWISE", "PIECEWISE", ("norm", "activation")),
        ({"optimization_level": 2}, 2, "PIECEWISE", "FULL_AND_PIECEWISE", ("norm", "activation")),
        ({"optimization_level": 3}, 3, "PIECEWISE", "FULL_AND_PIECEWISE", ("norm", "activation")),
        ({"enforce_eager": True, "optimization_level": 3}, 0, "NONE", "NONE", ()),
        ({"cudagraph_mode": "FULL"}, 2, "PIECEWISE", "FULL", ("norm", "activation")),
        ({"cudagraph_mode": "NONE"}, 2, "PIECEWISE", "NONE", ("norm", "activation")),
        ({"optimization_level": 0, "cudagraph_mode": "FULL"}, 0, "NONE", "FULL", ()),
    ],
)
def test_levels(
    platform: Platform, settings: dict[str, Any], level: int, mode: str, graph_mode: str, fusions: tuple[str, ...]
) -> None:
    found = resolve_level(EngineConfig(**settings), platform)
    assert (found.level, found.mode, found.graph_mode, found.fusions) == (level, mode, graph_mode, fusions)
    assert found.warnings == ()


def test_higher_levels_ask_for_more_and_a_platform_makes_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(LEVEL_FUSIONS[1]) < set(LEVEL_FUSIONS[2]) == set(LEVEL_FUSIONS[3])
    assert all(set(has) <= set(LEVEL_FUSIONS[3]) for has in PLATFORM_FUSIONS.values())
    everything = {"cpu": dict.fromkeys(LEVEL_FUSIONS[3], "")}
    monkeypatch.setattr("workers.compile.levels.PLATFORM_FUSIONS", everything)
    assert resolve_level(EngineConfig(optimization_level=2), CPU).fusions == LEVEL_FUSIONS[2]
    assert resolve_level(EngineConfig(optimization_level=1), CPU).fusions == LEVEL_FUSIONS[1]
    assert resolve_level(EngineConfig(optimization_level=2), CUDA).fusions == ()


@pytest.mark.parametrize(
    ("mode", "asked", "remains"),
    [
        (CompileMode.STOCK, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        (CompileMode.DYNAMO_TRACE_ONCE, "PIECEWISE", "NONE"),
        (CompileMode.STOCK, "FULL", "FULL"),
        (CompileMode.PIECEWISE, "PIECEWISE", "PIECEWISE"),
    ],
)
def test_piecewise_graphs_need_subgraphs(mode: CompileMode, asked: str, remains: str) -> None:
    found = resolve_level(EngineConfig(cudagraph_mode=asked), CPU, mode=mode)
    assert (found.mode, found.graph_mode) == (mode, remains)
    assert bool(found.warnings) == (asked != remains)


def test_eager_levels_take_no_compile_mode() -> None:
    assert resolve_level(EngineConfig(enforce_eager=True), CPU, mode=CompileMode.STOCK).mode is CompileMode.NONE


def test_without_a_compiler_the_level_falls_to_zero_and_says_what_to_install() -> None:
    missing = missing_for_compiling(CPU, which=lambda name: None)
    found = resolve_level(EngineConfig(), CPU, missing=missing)
    assert (found.level, found.mode, found.graph_mode, found.fusions) == (0, CompileMode.NONE, "NONE", ())
    assert "-O2 falls back to -O0" in found.warnings[0]
    assert "apt-get install g++" in found.warnings[0]
    assert resolve_level(EngineConfig(enforce_eager=True), CPU, missing=missing).warnings == ()


def test_without_python_headers_nothing_can_be_compiled_either(tmp_path: Path) -> None:
    missing = missing_for_compiling(CPU, which=lambda name: "/usr/bin/g++", headers=str(tmp_path))
    assert missing is not None
    assert "python3-dev" in missing


def test_what_is_there_is_found() -> None:
    assert missing_for_compiling(CPU) is None, "the tests that compile need a C++ compiler"
    assert missing_for_compiling(CUDA, which=lambda name: None) is None
    assert find_cxx(lambda name: f"/bin/{name}" if name == "clang++" else None) == "/bin/clang++"
