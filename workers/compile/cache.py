"""The artifact cache on disk: one folder per key, verified before use, written atomically, one writer at a time.

Trust: an entry holds code that is executed (Python, shared objects, on CUDA Inductor's own pickles). Checksums detect
truncated, mixed up and foreign files; they are no signature. A user who can write to the cache directory can run code
as its owner, so the directory is created with mode 0700 and must not be shared with untrusted users.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from filelock import BaseFileLock, FileLock, Timeout

from runtime.common.protocol import pack

log = logging.getLogger("lockstep")

MANIFEST = "manifest"
FORMAT = 1
_CHECKSUM_BYTES = 16
_INSTALL_ATTEMPTS = 100
_STALE_SECONDS = 3600.0
"""Minimum age of a leftover folder that is removed. A younger one may belong to a process of another host."""


@dataclass(frozen=True)
class Entry:
    """A verified entry.

    Attributes:
        folder: the folder of its files.
        files: their verified contents.
    """

    folder: Path
    files: Mapping[str, bytes]


class Store:
    """The cache entries under one directory.

    No method raises for a directory that cannot be read or written: the caller compiles again, and :attr:`warnings`
    says why.

    Args:
        root: the directory, created by the first write; "": the store keeps nothing.

    Attributes:
        warnings: messages for the user.
    """

    def __init__(self, root: str) -> None:
        self.root = Path(root) if root else None
        self.warnings: list[str] = []
        self._warned_of_writing = False

    def load(self, key: str) -> Entry | None:
        """The entry; None if it is missing, damaged or of another key."""
        folder = None if self.root is None else self.root / key
        if folder is None or not os.path.lexists(folder):
            return None
        try:
            return Entry(folder, _verified(folder, key))
        except (OSError, ValueError) as error:
            self.warn(f"the compiled code in {folder} is unusable ({error}) and is compiled again")
            return None

    def save(self, key: str, files: Mapping[str, bytes]) -> Entry | None:
        """Write an entry atomically; it replaces a damaged one. None if writing failed."""
        if self.root is None:
            return None
        folder = self.root / key
        new: str | None = None
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = tempfile.mkdtemp(prefix=f".new-{os.getpid()}-", dir=self.root)
            for name, content in files.items():
                Path(new, name).write_bytes(content)
            Path(new, MANIFEST).write_bytes(_manifest(key, files))
            self._install(new, folder)
        except OSError as error:
            self._cannot_write(error)
            return None
        finally:
            if new is not None:
                shutil.rmtree(new, ignore_errors=True)
        return Entry(folder, dict(files))

    @contextlib.contextmanager
    def lock(self, key: str, *, wait: bool) -> Generator[bool]:
        """Hold the lock of ``key`` among all processes of this host that use this directory.

        Yields:
            whether the lock is held. Without ``wait`` it is False if another process holds it. On a file system
            without locks it is True, and several processes may compile the same code.
        """
        if self.root is None:
            yield True
            return
        lock = FileLock(self.root / "locks" / key, mode=0o600, fallback_to_soft=False)
        held = True
        try:
            os.makedirs(os.path.dirname(lock.lock_file), mode=0o700, exist_ok=True)
            held = _acquire(lock, wait=wait)
        except OSError as error:
            self._cannot_write(error)
        try:
            yield held
        finally:
            lock.release()

    @contextlib.contextmanager
    def scratch(self, *, keep: bool = False) -> Generator[str]:
        """A folder for a compiler's files: under the root, or the system's temporary folder if that fails.

        It is removed at the end of the ``with`` block. With ``keep`` it stays while this process runs, and a later
        start removes it.
        """
        folder: str | None = None
        if self.root is not None:
            with contextlib.suppress(OSError):
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._sweep()
                folder = tempfile.mkdtemp(prefix=f".work-{os.getpid()}-", dir=self.root)
        folder = folder or tempfile.mkdtemp(prefix="lockstep-compile-")
        try:
            yield folder
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove the folders that killed processes left."""
        assert self.root is not None, "sweeping needs a root"
        for path in self.root.glob(".*-*"):
            with contextlib.suppress(OSError):
                alive = os.path.exists(f"/proc/{path.name.split('-')[1]}")
                if not alive and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path)

    def _install(self, new: str, folder: Path) -> None:
        """Rename a finished folder to its key. If several processes do so, the last one stays."""
        for attempt in range(_INSTALL_ATTEMPTS):
            self._put_aside(folder)
            try:
                os.rename(new, folder)
                return
            except OSError as error:
                taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)  # By another process, since _put_aside().
                if not taken or attempt + 1 == _INSTALL_ATTEMPTS:
                    raise

    def _put_aside(self, folder: Path) -> None:
        """Rename an existing entry. A process that is reading it still finds its open files."""
        if not os.path.lexists(folder):
            return
        aside = tempfile.mkdtemp(prefix=f".old-{os.getpid()}-", dir=folder.parent)
        with contextlib.suppress(FileNotFoundError):  # Another process has renamed it.
            os.rename(folder, Path(aside, "entry"))
        shutil.rmtree(aside, ignore_errors=True)

    def _cannot_write(self, error: OSError) -> None:
        if not self._warned_of_writing:
            self._warned_of_writing = True
            self.warn(
                f"compiled code cannot be written to {self.root} ({error}), so every start compiles again; make it "
                "writable or set LOCKSTEP_CACHE_DIR"
            )

    def warn(self, text: str) -> None:
        """Add a warning and log it."""
        self.warnings.append(text)
        log.warning("%s", text)


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()


def _manifest(key: str, files: Mapping[str, bytes]) -> bytes:
    """The key and the checksums of an entry's files, followed by a checksum of both."""
    listed = {name: _checksum(content) for name, content in files.items()}
    body = pack({"format": FORMAT, "key": key, "files": listed})
    return body + _checksum(body)


def _verified(folder: Path, key: str) -> dict[str, bytes]:
    """The contents of an entry's files. Raises ValueError if a checksum differs."""
    manifest = Path(folder, MANIFEST).read_bytes()
    body, checksum = manifest[:-_CHECKSUM_BYTES], manifest[-_CHECKSUM_BYTES:]
    if _checksum(body) != checksum:
        raise ValueError("its manifest is damaged")
    fields: Any = msgpack.unpackb(body)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT or fields.get("key") != key:
        raise ValueError("it was written under another key or by another version")
    files: dict[str, bytes] = {}
    for name, checksum in fields["files"].items():
        content = Path(folder, name).read_bytes()
        if _checksum(content) != checksum:
            raise ValueError(f"{name} is damaged")
        files[name] = content
    return files


def _acquire(lock: BaseFileLock, *, wait: bool) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if wait:
            _say_waiting()
            lock.acquire()
        return wait
    return True


def _say_waiting() -> None:
    log.info("waiting for another process that is compiling the same code")
