"""What one start of a worker group puts into the file system, and how every trace of it is removed again.

The folder (mode 0700) holds the driver's socket and the file over which ranks meet. It is needed during start-up only.
Shared-memory names begin with the folder's name, which carries the driver's pid, so that both the supervisor and a rank
whose driver was killed can remove them, and a later start can sweep those of the dead (the shared-memory names are
swept in ``parallel/collectives``).
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
    """A new private folder for one start; folders of ours whose driver is dead are removed first."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}") and path.stat().st_uid == os.getuid():
            cleanup_run_dir(str(path))
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")


def run_id(folder: str) -> str:
    """The name of the start that owns ``folder``, with which its shared-memory names begin."""
    return os.path.basename(folder)


def cleanup_run_dir(folder: str) -> None:
    """Remove the folder and every shared-memory name of its start. Nothing happens for "" or a second time."""
    if not folder:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for path in SHARED_MEMORY.glob(f"{run_id(folder)}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
