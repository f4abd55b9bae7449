"""Every example runs as a newcomer runs it, with a tiny checkpoint; two_hosts.md needs two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server_process import started_server
from tests.checkpoints import tiny_checkpoint

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(name: str, *argv: str) -> list[str]:
    """The lines that an example writes to stdout."""
    command = [sys.executable, str(ROOT / "examples" / name), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_offline() -> None:
    assert [line.partition(" -> ")[0] for line in run("offline.py", str(tiny_checkpoint()))] == [
        "'The capital of France is'", "'Two plus two equals'", "'Once upon a time'",
    ]  # fmt: skip


def test_async_generate() -> None:
    assert {line.partition(":")[0] for line in run("async_generate.py", str(tiny_checkpoint()))} == {"first", "second"}


def test_structured_output() -> None:
    (line,) = run("structured_output.py", str(tiny_checkpoint()))
    assert set(json.loads(line)) == {"city", "in_europe"}


def test_server_client() -> None:
    with started_server(str(tiny_checkpoint()), ["--enforce-eager"]) as server:
        done, streamed = run("server_client.py", server.url)
    assert done.partition(": ")[2] == streamed.partition(":   ")[2]
