"""Compiler driver for the C sources: each source becomes a shared library, built on first use and cached on disk.

The cache key is a digest of the source, the headers it can include, the compiler flags and the CPU model. A library
ends with a digest of its own content, which the dynamic loader ignores, and gets its final name by an atomic rename:
a truncated or foreign file is rebuilt, never loaded. Any number of processes may build concurrently; with file locks
each library is built once.

The sources use no torch headers, so one library serves every torch version.
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
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from filelock import FileLock, Timeout

log = logging.getLogger("lockstep")

COMPILERS = ("cc", "gcc", "clang")
"""The first of these on the PATH is used."""

WARNINGS = ("-Wall", "-Wextra")
"""Reported, never fatal: a newer compiler's warnings must not break an installation. The tests add -Werror."""

FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-std=c11",
    "-D_GNU_SOURCE",
    "-shared",
    "-fPIC",
    *WARNINGS,
)

INCLUDE_DIR = Path(__file__).parent / "include"
"""Headers that every source may include, beside those in its own folder."""

COMPILE_SECONDS = 120
_DIGEST_BYTES = 16


class NativeBuildError(RuntimeError):
    """A C source cannot be compiled, loaded or stored; the message names the cause and the fix."""


class StructSizeError(RuntimeError):
    """A struct that Python packs has another size in the C source: one of the two was changed alone."""


def find_compiler() -> str | None:
    """Path of the C compiler, or None without one."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def load_library(
    source: Path,
    directory: str,
    extra_flags: tuple[str, ...] = (),
    *,
    structs: Mapping[str, int] = MappingProxyType({}),
) -> ctypes.CDLL:
    """Load the compiled library of a C source, building it if the cache has no intact copy.

    Args:
        source: a C file; it may include headers of its own folder and of :data:`INCLUDE_DIR`.
        directory: the cache, created if missing. Write access to it is the right to run code as this user.
        extra_flags: compiler flags after :data:`FLAGS`.
        structs: sizes in bytes of the structs that the caller packs, by their C names; the source exports each by
            ``EXPORT_SIZE`` of include/shared_struct.h.

    Raises:
        NativeBuildError: no compiler, a compile error, or a directory that is not writable.
        StructSizeError: a struct has another size in C.
    """
    flags = (*FLAGS, *extra_flags)
    path = _library_path(source, directory, flags)
    _build(source, flags, path, wait=True)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"the compiled {source.name} cannot be loaded: {error}") from error
    for name, size in structs.items():
        _check_struct(library, source, name, size)
    return library


def _check_struct(library: ctypes.CDLL, source: Path, name: str, size: int) -> None:
    exported = getattr(library, f"lockstep_sizeof_{name}", None)
    if exported is None:
        raise StructSizeError(f"{source.name} exports no size of its struct {name!r}; add EXPORT_SIZE({name})")
    if (found := exported()) != size:
        raise StructSizeError(
            f"struct {name!r} has {found} bytes in {source.name} and {size} in Python; make their fields agree"
        )


def build_ahead(sources: Iterable[Path], directory: str) -> None:
    """Build the missing libraries of several sources concurrently, one thread per core.

    A source that another process is compiling is skipped, so that ranks which start together share the work. Errors
    are not raised here: :func:`load_library` reports them.
    """

    def build(source: Path) -> None:
        with contextlib.suppress(NativeBuildError):
            _build(source, FLAGS, _library_path(source, directory, FLAGS), wait=False)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(build, sources))


def _library_path(source: Path, directory: str, flags: tuple[str, ...]) -> Path:
    if not directory:
        raise NativeBuildError(f"no directory is given to keep the compiled {source.name} in; set library_dir")
    headers = [*sorted(source.parent.glob("*.h")), *sorted(INCLUDE_DIR.glob("*.h"))]
    code = [path.read_bytes() for path in (source, *headers)]
    key = hashlib.blake2b(b"\0".join([*code, *(f.encode() for f in flags), _cpu()]), digest_size=12).hexdigest()
    return Path(directory) / f"{source.stem}-{key}.so"


def _build(source: Path, flags: tuple[str, ...], path: Path, *, wait: bool) -> None:
    """Build a library unless an intact one exists; without ``wait``, skip it while another process builds it."""
    if _is_intact(path):
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
        if not _is_intact(path):  # The previous owner of the lock may have compiled it.
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
            built = Path(folder) / path.name
            _run([compiler, *flags, f"-I{INCLUDE_DIR}", str(source), "-o", str(built)], source)
            with built.open("ab") as file:
                file.write(_digest(built.read_bytes()))
            os.replace(built, path)
    except OSError as error:
        raise NativeBuildError(f"cannot store the compiled {source.name} in {path.parent}: {error}") from error


def _run(command: list[str], source: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{command[0]} did not compile {source.name} in {COMPILE_SECONDS} s") from error
    if done.returncode:
        raise NativeBuildError(f"{' '.join(command)} failed with code {done.returncode}:\n{done.stderr.strip()}")


def _is_intact(path: Path) -> bool:
    """Whether the file exists and ends with the digest of the content before it."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > _DIGEST_BYTES and content[-_DIGEST_BYTES:] == _digest(content[:-_DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


@functools.cache
def _cpu() -> bytes:
    """The inputs of -march=native: machine type, CPU model and features, as far as /proc/cpuinfo lists them."""
    kept = (b"model name", b"flags", b"Features", b"CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(kept)})
    return b"\n".join([platform.machine().encode(), *features])
