"""What the optimization levels mean: which compile mode, which graph mode, which fusions.

Pure functions of config and platform, so that every rank decides alike. How a mode compiles is ``compiler.py``'s;
how graphs are captured is ``workers/graphs/``'s.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from parallel.platform import Platform
from runtime.common.config import CompileMode, EngineConfig

CXX_COMPILERS = ("g++", "clang++")
"""The first one found on the PATH compiles the CPU's loops."""


@dataclass(frozen=True)
class CompileSettings:
    """What a level comes to on a platform.

    Attributes:
        level: the level that holds, 0 where nothing can be compiled.
        mode: how to compile.
        graph_mode: a name of ``runtime.common.config.GraphMode``.
        fusions: names of the fusions that are made.
        warnings: what the user asked for and does not get, and what to do about it.
    """

    level: int
    mode: CompileMode
    graph_mode: str
    fusions: tuple[str, ...]
    warnings: tuple[str, ...] = ()


LEVEL_FUSIONS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        0: (),
        1: ("norm", "activation"),
        2: ("norm", "activation", "all_reduce", "attention"),
        3: ("norm", "activation", "all_reduce", "attention"),
    }
)
"""The fusions a level asks for; a platform makes those of them that it has."""

PLATFORM_FUSIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {
            "norm": "Inductor fuses the residual addition, the norm and the casts around it into its loops",
            "activation": "Inductor fuses silu and the product with the gate into one loop",
        },
        "cuda": {
            "norm": "Inductor fuses the residual addition, the norm and the casts around it into one Triton kernel",
            "activation": "Inductor fuses silu and the product with the gate into one Triton kernel",
        },
    }
)
"""The fusions each platform has, and how. No platform fuses an all-reduce or an attention with its neighbours yet."""


def resolve_level(
    config: EngineConfig, platform: Platform, *, mode: CompileMode | None = None, missing: str | None = None
) -> CompileSettings:
    """What the config's level means on this platform.

    Args:
        config: resolved.
        platform: where the model runs.
        mode: another compile mode than the level's own.
        missing: what :func:`missing_for_compiling` said; with it nothing is compiled.
    """
    level = 0 if config.enforce_eager else config.optimization_level
    if missing is not None and level > 0:
        warning = f"-O{level} falls back to -O0 (no compiled code, no graphs): {missing}"
        return CompileSettings(0, CompileMode.NONE, "NONE", (), (warning,))
    default_graphs = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE")[level]
    graph_mode = "NONE" if config.enforce_eager else config.cudagraph_mode or default_graphs
    chosen = CompileMode.NONE if level == 0 else mode or CompileMode.PIECEWISE
    graph_mode, warnings = _graphs_without_subgraphs(chosen, graph_mode)
    has = PLATFORM_FUSIONS.get(platform.name, {})
    fusions = tuple(name for name in LEVEL_FUSIONS[level] if name in has and chosen is not CompileMode.NONE)
    return CompileSettings(level, chosen, graph_mode, fusions, warnings)


def _graphs_without_subgraphs(mode: CompileMode, graph_mode: str) -> tuple[str, tuple[str, ...]]:
    """The graph mode that remains where the model is not cut into subgraphs, and a warning if that is another one."""
    remains = {"PIECEWISE": "NONE", "FULL_AND_PIECEWISE": "FULL_DECODE_ONLY"}.get(graph_mode)
    if mode is CompileMode.PIECEWISE or remains is None:
        return graph_mode, ()
    text = f"graph mode {graph_mode} needs a model in subgraphs; compile mode {mode} has none, so it becomes {remains}"
    return remains, (f"{text}. Leave the compile mode at PIECEWISE to keep it",)


def missing_for_compiling(
    platform: Platform,
    *,
    which: Callable[[str], str | None] = shutil.which,
    headers: str | None = None,
) -> str | None:
    """What this machine lacks to compile for the platform and how to install it; None if it lacks nothing.

    Args:
        platform: the CPU needs a C++ compiler and Python's headers; elsewhere Triton brings its own compiler.
        which: finds a program.
        headers: folder of Python.h; default: this interpreter's.
    """
    if not platform.opaque_attention_op():
        return f"platform {platform.name} calls attention as plain functions, which no graph can hold"
    if platform.device_type != "cpu":
        return None
    if find_cxx(which) is None:
        return f"no C++ compiler ({', '.join(CXX_COMPILERS)}) on the PATH; install one, e.g. `apt-get install g++`"
    folder = headers or sysconfig.get_path("include")
    if not (Path(folder) / "Python.h").is_file():
        return f"no Python.h in {folder}; install Python's headers, e.g. `apt-get install python3-dev`"
    return None


def find_cxx(which: Callable[[str], str | None] = shutil.which) -> str | None:
    """The path of the C++ compiler that is used, None if there is none."""
    return next((path for name in CXX_COMPILERS if (path := which(name))), None)
