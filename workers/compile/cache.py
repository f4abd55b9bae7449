"""Compiled artifacts on disk: one folder per key, checked before use, written at once, one writer at a time.

Trust: an entry holds code that is run (Python, shared objects, on CUDA Inductor's own pickles). Checksums find what is
truncated, mixed up or left by another program; they are no signature. Whoever can write to the cache directory can
run code as this user, so it is created for its owner alone and must not be shared with users one does not trust.

What goes into an entry and its key is ``subgraph.py``'s, ``plan.py``'s and ``keys.py``'s.
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
_DIGEST_BYTES = 16
_INSTALL_ATTEMPTS = 100
_STALE_SECONDS = 3600.0
"""How old a leftover has to be to be removed, if this host has no such process. Another host that shares the directory
may have it, but then it works on the folder now."""


@dataclass(frozen=True)
class Entry:
    """An entry that was found whole.

    Attributes:
        folder: where its files are.
        files: their contents as they were verified.
    """

    folder: Path
    files: Mapping[str, bytes]


class Store:
    """The entries under one directory.

    Nothing here raises for a directory that cannot be read or written: an entry is then compiled again or not kept,
    and :attr:`warnings` says so.

    Args:
        root: the directory, made when first written to; "": nothing is kept.

    Attributes:
        warnings: what the user should know.
    """

    def __init__(self, root: str) -> None:
        self.root = Path(root) if root else None
        self.warnings: list[str] = []
        self._complained = False

    def load(self, key: str) -> Entry | None:
        """The entry, or None if there is none or it is not what was written under this key."""
        folder = None if self.root is None else self.root / key
        if folder is None or not os.path.lexists(folder):
            return None
        try:
            return Entry(folder, _verified(folder, key))
        except (OSError, ValueError) as error:
            self.warn(f"the compiled code in {folder} cannot be used ({error}) and is compiled again")
            return None

    def save(self, key: str, files: Mapping[str, bytes]) -> Entry | None:
        """Write an entry in one step, in place of a broken one. None if it could not be kept."""
        if self.root is None:
            return None
        folder = self.root / key
        made: str | None = None
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=f".new-{os.getpid()}-", dir=self.root)
            for name, content in files.items():
                Path(made, name).write_bytes(content)
            Path(made, MANIFEST).write_bytes(_manifest(key, files))
            self._install(made, folder)
        except OSError as error:
            self._cannot_write(error)
            return None
        finally:
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
        return Entry(folder, dict(files))

    @contextlib.contextmanager
    def lock(self, key: str, *, wait: bool) -> Generator[bool]:
        """Hold the right to write ``key``, among all processes of this host that use this directory.

        Yields:
            whether it is held. Without ``wait`` it is not held if another process has it. On a file system without
            locks it counts as held, so that several processes may compile the same artifact.
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
        """A folder for a compiler's files: under the root, or with the system's where that fails.

        It is removed at the end of the ``with`` block. With ``keep`` it stays as long as this process may read it, and
        is removed by a later start.
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
        """Remove what killed processes left behind."""
        assert self.root is not None, "only called with a root"
        for path in self.root.glob(".*-*"):
            with contextlib.suppress(OSError):
                alive = os.path.exists(f"/proc/{path.name.split('-')[1]}")
                if not alive and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path)

    def _install(self, made: str, folder: Path) -> None:
        """Give a finished folder its name. Others may be doing the same for the same key: the last one stays."""
        for attempt in range(_INSTALL_ATTEMPTS):
            self._put_aside(folder)
            try:
                os.rename(made, folder)
                return
            except OSError as error:
                taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)  # Between the two lines, by another process.
                if not taken or attempt + 1 == _INSTALL_ATTEMPTS:
                    raise

    def _put_aside(self, folder: Path) -> None:
        """Make room for a new entry. What is in the way may be in use by a running process: renamed, it stays whole."""
        if not os.path.lexists(folder):
            return
        aside = tempfile.mkdtemp(prefix=f".old-{os.getpid()}-", dir=folder.parent)
        with contextlib.suppress(FileNotFoundError):  # Another process that saves the same was faster.
            os.rename(folder, Path(aside, "entry"))
        shutil.rmtree(aside, ignore_errors=True)

    def _cannot_write(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self.warn(
                f"compiled code cannot be kept in {self.root} ({error}), so every start compiles again; make it "
                "writable or set LOCKSTEP_CACHE_DIR"
            )

    def warn(self, text: str) -> None:
        """Note something the user should know, and log it."""
        self.warnings.append(text)
        log.warning("%s", text)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _manifest(key: str, files: Mapping[str, bytes]) -> bytes:
    """What belongs to the entry, followed by its own digest."""
    listed = {name: _digest(content) for name, content in files.items()}
    body = pack({"format": FORMAT, "key": key, "files": listed})
    return body + _digest(body)


def _verified(folder: Path, key: str) -> dict[str, bytes]:
    """The contents of an entry's files. Raises ValueError where they are not those that were written."""
    manifest = Path(folder, MANIFEST).read_bytes()
    body, told = manifest[:-_DIGEST_BYTES], manifest[-_DIGEST_BYTES:]
    if _digest(body) != told:
        raise ValueError("its manifest is damaged")
    fields: Any = msgpack.unpackb(body)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT or fields.get("key") != key:
        raise ValueError("it was written under another key or by another version")
    files: dict[str, bytes] = {}
    for name, digest in fields["files"].items():
        content = Path(folder, name).read_bytes()
        if _digest(content) != digest:
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
    log.info("waiting for another process that compiles the same code")
