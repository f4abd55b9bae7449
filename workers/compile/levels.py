"""Optimization levels: from -O0 to -O3 and ``--enforce-eager`` to resolved compile settings.

Pure functions of config and platform, so every rank resolves the same settings. ``compiler.py`` implements the compile
modes, ``workers/graphs/`` captures graphs.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parallel.platform import Platform
from runtime.common.config import CompileMode, EngineConfig, GraphMode

CXX_COMPILERS = ("g++", "clang++")
"""C++ compilers for the CPU's generated code, in order of preference."""


@dataclass(frozen=True)
class CompileSettings:
    """Resolved compile settings.

    Attributes:
        mode: how to compile.
        graph_mode: which graphs to capture, as far as the machine supports them.
        warnings: requested settings that do not take effect, and how to change that.
    """

    mode: CompileMode
    graph_mode: GraphMode
    warnings: tuple[str, ...] = ()


EAGER = CompileSettings(CompileMode.NONE, GraphMode.NONE)
"""The model's own forward, without graphs."""


def resolve_level(config: EngineConfig, *, missing: str | None = None) -> CompileSettings:
    """The compile settings of the config's level.

    Args:
        config: resolved.
        missing: what :func:`missing_for_compiling` returned. If not None, nothing is compiled and no graph captured.
    """
    level = 0 if config.enforce_eager else config.optimization_level
    if missing is not None and level > 0:
        warning = f"-O{level} falls back to -O0 (no compiled code, no graphs): {missing}"
        return CompileSettings(CompileMode.NONE, GraphMode.NONE, (warning,))
    assert config.cudagraph_mode is not None, "resolve() sets cudagraph_mode"
    mode = CompileMode.NONE if level == 0 else CompileMode(config.compile_mode or CompileMode.PIECEWISE)
    return CompileSettings(mode, GraphMode.parse(config.cudagraph_mode))


def missing_for_compiling(
    platform: Platform,
    *,
    which: Callable[[str], str | None] = shutil.which,
    headers: str | None = None,
) -> str | None:
    """What this machine lacks to compile for the platform, and how to install it; None if nothing is missing.

    Args:
        platform: where the model runs. A CPU needs a C++ compiler and Python's headers; Triton has its own compiler.
        which: finds a program on the PATH.
        headers: folder of Python.h; default: this interpreter's.
    """
    if not platform.opaque_attention_op():
        return f"platform {platform.name} calls attention as a plain function, which cannot be a splitting op"
    if platform.device_type != "cpu":
        return None
    if find_cxx(which) is None:
        return f"no C++ compiler ({', '.join(CXX_COMPILERS)}) on the PATH; install one, e.g. `apt-get install g++`"
    folder = headers or sysconfig.get_path("include")
    if not (Path(folder) / "Python.h").is_file():
        return f"no Python.h in {folder}; install Python's headers, e.g. `apt-get install python3-dev`"
    return None


def find_cxx(which: Callable[[str], str | None] = shutil.which) -> str | None:
    """The path of the preferred C++ compiler, None if none is installed."""
    return next((path for name in CXX_COMPILERS if (path := which(name))), None)
