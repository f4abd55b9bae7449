"""Helper processes for work that a request's text can make arbitrarily expensive: their command line and limits.

Chat templates (``chat_template.py``) and large grammars (``grammar_check.py``) run in a subprocess that can be killed,
with bounded memory and CPU time. Messages are each caller's own.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def helper_command(module: str, function: str) -> list[str]:
    """The command line of an isolated interpreter that calls ``module.function()`` with this process's import path."""
    roots = [str(Path(__file__).resolve().parents[2]), *sys.path]
    program = f"import sys; sys.path[:] = {roots!r}; from {module} import {function} as run; run()"
    return [sys.executable, "-I", "-c", program]


def limit_process(*, memory_bytes: int, cpu_seconds: int | None = None) -> None:
    """Limit this process; called by the helper itself before it reads a request.

    Args:
        memory_bytes: of address space.
        cpu_seconds: SIGXCPU ends the process after them, SIGKILL one second later; None: no limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if cpu_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
