"""Run directory: the private folder of one start of a worker group, and the cleanup of everything named after it.

The folder (mode 0700) holds the driver's socket and the file of the ranks' rendezvous, which are used during start-up
only. Its name contains the driver's pid, and the names of the start's shared-memory segments begin with it. So the
supervisor, a rank whose driver was killed, and a later start can all remove what a start has left behind. Segments of
dead drivers are also removed by ``parallel/collectives``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "lockstep-"
SHARED_MEMORY = Path("/dev/shm")


def make_run_dir() -> str:
    """Make a private folder for one start. Folders of this user's dead drivers are removed first."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}") and path.stat().st_uid == os.getuid():
            cleanup_run_dir(str(path))
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")


def run_id(folder: str) -> str:
    """The name of the start that owns ``folder``: the prefix of its shared-memory names."""
    return os.path.basename(folder)


def cleanup_run_dir(folder: str) -> None:
    """Remove the folder and every shared-memory name of its start. Idempotent; "" is ignored."""
    if not folder:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for path in SHARED_MEMORY.glob(f"{run_id(folder)}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
