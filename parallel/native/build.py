"""Compiles our C sources into shared libraries, once per source, flags and kind of CPU.

A library's file name is a digest of what it was made from (the headers of this folder, which any source may include,
among it), its last bytes are a digest of its content (which a loader ignores), and it gets its name by an atomic
rename: a truncated or foreign file is compiled anew, never loaded. Any number of processes may build at once: each
library is made by one of them, where the file system has locks.
Sources use no torch headers, so the result serves every torch version.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger("lockstep")


COMPILERS = ("cc", "gcc", "clang")
"""The first one found on the PATH is used."""

FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-std=c11",
    "-D_GNU_SOURCE",
    "-shared",
    "-fPIC",
)

HEADERS = Path(__file__).parent
"""Where the headers are that any source may include."""

COMPILE_SECONDS = 120
_DIGEST_BYTES = 16


class NativeBuildError(RuntimeError):
    """A C source could not be compiled or its library not be stored; the message says what is missing."""


def find_compiler() -> str | None:
    """The path of a C compiler, or None if this machine has none."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def load_library(source: Path, directory: str, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The compiled library of ``source``, from ``directory`` if it is there already.

    Args:
        source: a C file that stands alone but for :data:`HEADERS`.
        directory: the cache, made if need be. Whoever can write to it can run code as this user.
        extra_flags: after :data:`FLAGS`.

    Raises:
        NativeBuildError: no compiler, an error of the compiler, or a directory that cannot be written to.
    """
    flags = (*FLAGS, *extra_flags)
    path = _path(source, directory, flags)
    _build(source, flags, path, wait=True)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"the compiled {source.name} cannot be loaded: {error}") from error


def build_ahead(sources: Iterable[Path], directory: str) -> None:
    """Compile what is missing of several sources, as many at once as there are cores for.

    What another process compiles at the moment is left to it, so that processes which start together share the work.
    Nothing is raised: who loads a library that cannot be compiled hears why.
    """

    def build(source: Path) -> None:
        with contextlib.suppress(NativeBuildError):
            _build(source, FLAGS, _path(source, directory, FLAGS), wait=False)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(build, sources))


def _path(source: Path, directory: str, flags: tuple[str, ...]) -> Path:
    """Where the library of a source is, or is to be."""
    if not directory:
        raise NativeBuildError(f"no directory is given to keep the compiled {source.name} in; set library_dir")
    code = [path.read_bytes() for path in (source, *sorted(HEADERS.glob("*.h")))]
    key = hashlib.blake2b(b"\0".join([*code, *(f.encode() for f in flags), _cpu()]), digest_size=12).hexdigest()
    return Path(directory) / f"{source.stem}-{key}.so"


def _build(source: Path, flags: tuple[str, ...], path: Path, *, wait: bool) -> None:
    """Compile a source unless that was done. Without ``wait``, also not if another process is about to."""
    if _is_whole(path):
        return
    lock = FileLock(path.parent / "locks" / path.name, mode=0o600, fallback_to_soft=False)
    try:
        os.makedirs(os.path.dirname(lock.lock_file), mode=0o700, exist_ok=True)
        lock.acquire(blocking=wait)
    except Timeout:
        return  # Another process compiles it.
    except OSError as error:  # Without file locks, each process compiles it.
        log.debug("no lock for %s: %s", path.name, error)
    try:
        if not _is_whole(path):  # The previous owner of the lock may have compiled it.
            _compile(source, flags, path)
    finally:
        lock.release()


def _compile(source: Path, flags: tuple[str, ...], path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError(
            f"no C compiler ({', '.join(COMPILERS)}) on the PATH to compile {source.name}; install one, e.g. "
            "`apt-get install gcc libc6-dev`"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
            made = Path(folder) / path.name
            _run([compiler, *flags, f"-I{HEADERS}", str(source), "-o", str(made)], source)
            with made.open("ab") as file:
                file.write(_digest(made.read_bytes()))
            os.replace(made, path)
    except OSError as error:
        raise NativeBuildError(f"cannot store the compiled {source.name} in {path.parent}: {error}") from error


def _run(command: list[str], source: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{command[0]} did not compile {source.name} in {COMPILE_SECONDS} s") from error
    if done.returncode:
        raise NativeBuildError(f"{' '.join(command)} failed with code {done.returncode}:\n{done.stderr.strip()}")


def _is_whole(path: Path) -> bool:
    """Whether there is a library that ends with the digest of what stands before it."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > _DIGEST_BYTES and content[-_DIGEST_BYTES:] == _digest(content[:-_DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


@functools.cache
def _cpu() -> bytes:
    """What -march=native depends on: the machine, and the CPU's name and features where Linux tells them."""
    kept = (b"model name", b"flags", b"Features", b"CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    told = sorted({line for line in lines if line.startswith(kept)})
    return b"\n".join([platform.machine().encode(), *told])
