"""Every command that the README shows is run, as it stands there, and every file that the map names exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

ALL_COMMANDS = re.findall(r"^(?:echo .*)?\.venv/bin/.*$", README, flags=re.MULTILINE)
SERVERS = [command for command in ALL_COMMANDS if "lockstep serve" in command]
COMMANDS = [command for command in ALL_COMMANDS if command not in SERVERS]
ALL_EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
CLIENTS = [example for example in ALL_EXAMPLES if "127.0.0.1:8000" in example]
EXAMPLES = [example for example in ALL_EXAMPLES if example not in CLIENTS]


def run(argv: list[str] | str, **options) -> str:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, cwd=ROOT, env=environment, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str):
    here = Path(sys.executable).parent
    assert run(command.replace(".venv/bin", str(here)), shell=True).strip()


@pytest.mark.parametrize("command", SERVERS)
def test_server_and_its_clients(command: str):
    """Like this, but on a port that is free."""
    argv = [*shlex.split(command.replace(".venv/bin", str(Path(sys.executable).parent))), "--port", "0"]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            found = next(match for line in server.stderr if (match := re.search(r"ready at http://(\S+)", line)))
            for example in CLIENTS:
                assert "Paris" in run([sys.executable, "-c", example.replace("127.0.0.1:8000", found[1])])
        finally:
            server.terminate()
            server.communicate(timeout=60)
    assert server.returncode == 0


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: str):
    assert run([sys.executable, "-c", example]).strip()


def test_the_map_names_files_that_exist():
    named = re.findall(r"`((?:launch|runtime|workers|parallel|benchmarks|tests|tools)/[\w./]*)`", ARCHITECTURE)
    assert len(named) > 80
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_two_commands_are_targets():
    """Run by hand and by continuous integration; here only that they exist and what ``make demo`` would do."""
    plan = run(["make", "-n", "demo", f"VENV={Path(sys.prefix)}"])
    assert "generate demo --tensor-parallel-size 2 --distributed-executor-backend ray --chat" in plan
    assert "pytest" in run(["make", "-n", "test", f"VENV={Path(sys.prefix)}"])
    assert len(COMMANDS) >= 10 and SERVERS and CLIENTS and len(EXAMPLES) >= 2
