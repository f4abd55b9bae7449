"""The process in which Triton kernels run without a GPU, shared by the tests of one session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]

Check = Callable[..., float]


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Check]:
    """``interpreted("rms_norm", dtype="bfloat16", rows=3, ...)`` runs that check of ``benchmarks/kernel_checks.py``."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.workers.kernels.interpreter_main"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    channel = process.stdin, process.stdout

    def check(name: str, **arguments: Any) -> float:
        print(json.dumps({"check": name, **arguments}), file=channel[0], flush=True)
        answer = json.loads(channel[1].readline() or '{"traceback": "the interpreter process ended"}')
        if "traceback" in answer:
            pytest.fail(answer["traceback"], pytrace=False)
        return answer["error"]

    try:
        yield check
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=30)
