"""The memory segment shared by the ranks of a host: its name, the rendezvous in it, and removal of stale segments.

The segment is a file in /dev/shm that has a name only until every rank has mapped it; after that nothing remains,
however the ranks end. ``shared_memory.py`` and ``shm.c`` use the mapped memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import struct
import time
from enum import IntEnum
from pathlib import Path

from parallel.collectives.base import CollectiveError, CollectiveTimeout, format_ranks

DIRECTORY = "/dev/shm"

# The layout of shm.c: a header, a line of 128 bytes per rank, then two slots per rank.
FIRST_LINE = 128
LINE_STRIDE = 128
SLOT_ALIGN = 4096
_VOTE = 64  # within a rank's line, on a cache line that the collectives do not touch
_LAYOUT_VERSION = 1

_RUN_ID = re.compile(r"(?:lockstep-)?(\d+)-(.+)")
_OURS = re.compile(r"lockstep-(\d+)-.+")


class Vote(IntEnum):
    """What a rank reports once it has mapped the segment."""

    ABSENT = 0
    READY = 1
    NO_LIBRARY = 2


class Segment:
    """A mapped segment. Made by :func:`create_segment` on rank 0 and :func:`attach_segment` on the others.

    Attributes:
        address: where it is mapped.
        size: the number of ranks.
        slot_bytes: of one slot.
    """

    def __init__(self, path: Path, fd: int, size: int, slot_bytes: int) -> None:
        self.size = size
        self.slot_bytes = slot_bytes
        self._path = path
        self._fd = fd
        self._map = mmap.mmap(fd, segment_bytes(size, slot_bytes))
        self._pin = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._pin)
        self._words = memoryview(self._map).cast("Q")

    def vote(self, rank: int, vote: Vote, timeout: float) -> tuple[Vote, ...]:
        """Report this rank's vote, wait for those of all ranks, and remove the segment's name.

        Raises:
            CollectiveTimeout: some ranks did not join.
        """
        offsets = [(FIRST_LINE + other * LINE_STRIDE + _VOTE) // 8 for other in range(self.size)]
        self._words[offsets[rank]] = int(vote)
        deadline = time.monotonic() + timeout
        while not all(votes := [self._words[offset] for offset in offsets]):
            if time.monotonic() > deadline:
                missing = tuple(other for other, vote in enumerate(votes) if not vote)
                raise CollectiveTimeout(
                    f"{format_ranks(missing)} of {self.size} did not open shared memory {self._path} within "
                    f"{timeout:g} s; rank {rank} timed out",
                    missing,
                )
            time.sleep(0.001)
        # Every rank removes the name, so that it is removed even if one of them dies at this point.
        self._path.unlink(missing_ok=True)
        return tuple(Vote(value) for value in votes)

    def close(self) -> None:
        """Unmap the segment, and remove its name if it still has one; ``address`` is invalid afterwards."""
        if self._fd < 0:
            return
        self._path.unlink(missing_ok=True)
        self._words.release()
        del self._pin
        self._map.close()
        os.close(self._fd)
        self._fd = -1


def segment_name(run_id: str, group: str) -> str:
    """The file name of a group's segment, the same on every rank.

    Raises:
        ValueError: the run id contains no pid.
    """
    match = _RUN_ID.fullmatch(run_id)
    if match is None:
        raise ValueError(
            f"run_id {run_id!r} has to be '<pid>-<anything>' with the pid of the driver or of rank 0: shared memory "
            "whose name contains no live pid is removed as stale"
        )
    pid, rest = match.groups()
    return re.sub(r"[^\w.-]", "_", f"lockstep-{pid}-{rest}-{group}", flags=re.ASCII)


def segment_bytes(size: int, slot_bytes: int) -> int:
    """Bytes of a segment for that many ranks."""
    lines = FIRST_LINE + size * LINE_STRIDE
    return -(-lines // SLOT_ALIGN) * SLOT_ALIGN + 2 * size * slot_bytes


def create_segment(name: str, size: int, slot_bytes: int, directory: str = DIRECTORY) -> Segment:
    """Create a segment and then link its name, so that a rank which finds the name can use the segment.

    Raises:
        CollectiveError: not enough space (the message gives needed and free bytes), or the name exists.
    """
    needed = segment_bytes(size, slot_bytes)
    _check_space(directory, needed)
    path = Path(directory, name)
    unnamed = Path(directory, f"{name}.new")
    try:
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CollectiveError(f"cannot create shared memory {unnamed}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # Held while the name exists: remove_stale_segments skips locked files.
        os.posix_fallocate(fd, 0, needed)  # Without it, a full /dev/shm would cause a SIGBUS in a step.
        os.pwrite(fd, _layout(size, slot_bytes), 0)
        os.link(unnamed, path)
    except FileExistsError as error:
        os.close(fd)
        raise CollectiveError(
            f"shared memory {path} exists already; every start of a group needs its own run_id"
        ) from error
    except OSError as error:
        os.close(fd)
        raise CollectiveError(f"cannot reserve {needed} bytes in {directory}: {error.strerror}") from error
    finally:
        unnamed.unlink(missing_ok=True)
    return Segment(path, fd, size, slot_bytes)


def attach_segment(name: str, size: int, slot_bytes: int, timeout: float, directory: str = DIRECTORY) -> Segment:
    """Wait until rank 0 has created the segment, and map it.

    Raises:
        CollectiveTimeout: it was not created in time.
        CollectiveError: it was created for another number of ranks or by another version.
    """
    path = Path(directory, name)
    deadline = time.monotonic() + timeout
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            break
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"rank 0 did not create shared memory {path} within {timeout:g} s", (0,)
                ) from None
            time.sleep(0.001)
    expected = _layout(size, slot_bytes)
    if os.pread(fd, len(expected), 0) != expected or os.fstat(fd).st_size != segment_bytes(size, slot_bytes):
        os.close(fd)
        raise CollectiveError(f"shared memory {path} is not one for {size} ranks of this version of Lockstep")
    fcntl.flock(fd, fcntl.LOCK_SH)
    return Segment(path, fd, size, slot_bytes)


def remove_stale_segments(directory: str = DIRECTORY) -> list[str]:
    """Remove the shared memory of runs that are dead.

    A name is stale if the process whose pid it contains is dead and no process holds a lock on the file. The lock
    protects runs in other containers, whose pids are not visible here.

    Returns:
        the names that were removed.
    """
    removed: list[str] = []
    for path in sorted(Path(directory).glob("lockstep-*")):
        match = _OURS.fullmatch(path.name)
        if match is None or _is_alive(int(match.group(1))):
            continue
        # Another process may remove it at the same time; files of other users are skipped.
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
            removed.append(path.name)
    return removed


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _check_space(directory: str, needed: int) -> None:
    space = os.statvfs(directory)
    have = space.f_bavail * space.f_frsize
    if have < needed:
        raise CollectiveError(
            f"{directory} has {have} bytes left, but the collectives need {needed}; free some, give the container more "
            'shared memory (docker --shm-size), or set collectives to "gloo"'
        )


def _layout(size: int, slot_bytes: int) -> bytes:
    """The first word of a segment, which an attaching rank compares with its own."""
    return struct.pack("<Q", _LAYOUT_VERSION << 56 | size << 40 | slot_bytes)
