"""The leak check that follows every test, and the environment of the test session."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell starts background jobs with SIGINT ignored, which children inherit; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

OURS = ("launch.rank_main", "launch.spmd", "bin/lockstep", "RankActor")
SETTLE_SECONDS = 10.0

# Other sessions may run on this machine. A variable and a folder mark what belongs to this one.
SESSION = f"{os.getpid()}-{time.monotonic_ns()}"
os.environ["LOCKSTEP_TEST_SESSION"] = SESSION
SCRATCH = tempfile.TemporaryDirectory(prefix="lt-")
os.environ["TMPDIR"] = tempfile.tempdir = SCRATCH.name


def is_of_this_session(process: psutil.Process) -> bool:
    """Whether a process was started, directly or not, by this run of pytest."""
    try:
        return process.environ().get("LOCKSTEP_TEST_SESSION") == SESSION
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def our_processes() -> set[str]:
    """Command lines of this session's live Lockstep processes (those of zombies are empty)."""
    found: set[str] = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):  # Faster than psutil.process_iter.
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if any(name in command for name in OURS) and is_of_this_session(psutil.Process(int(pid))):
                found.add(f"{pid}: {command}")
    return found


def our_names() -> set[str]:
    """Shared-memory names with a pid of this session or of a dead process, and run directories."""
    found = {str(path) for path in Path(SCRATCH.name).glob("lockstep-*") if "lockstep-tests-" not in path.name}
    for path in Path("/dev/shm").glob("lockstep-*"):
        pid = path.name.split("-")[1]
        alive = pid.isdecimal() and psutil.pid_exists(int(pid))
        if not alive or is_of_this_session(psutil.Process(int(pid))):
            found.add(str(path))
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a shared-memory name or a run directory of Lockstep behind."""
    if request.node.get_closest_marker("leaves_session_processes"):
        yield
        return
    before = our_processes() | our_names()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    left = (our_processes() | our_names()) - before
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = (our_processes() | our_names()) - before
    assert not left, f"this test left behind: {sorted(left)}"
