"""A lock that the processes of one host share: one of them makes what all of them need."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator
from pathlib import Path


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool = True, on_wait: Callable[[], object] | None = None) -> Generator[bool]:
    """Hold the lock on ``path``. The kernel ends it with its owner, however that dies.

    The file stays behind: removing it would let two processes hold locks on two files of one name.

    Args:
        path: a file, made if need be, as is its folder, for their owner alone.
        wait: whether to wait for another process that has it.
        on_wait: called before that.

    Yields:
        whether it is held; always with ``wait``.

    Raises:
        OSError: they cannot be made, or its file system has no locks.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _acquire(descriptor, wait, on_wait)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, wait: bool, on_wait: Callable[[], object] | None) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            return False
        if on_wait is not None:
            on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return True
