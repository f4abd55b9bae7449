"""The checks of ``lockstep doctor``: versions, devices, memory, compilers, Ray, caches, stale shared memory.

Each check yields findings: ok, warn (works, but slower or with a feature missing) or problem (Lockstep does not run);
the last two carry advice. Checks start no process group and change nothing, except that stale shared memory of dead
runs is removed, as at every start of a group. ``launch/cli/commands/doctor.py`` prints the findings.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.demo_model import demo_model_folder, missing_tools
from launch.environment import Environment, read_environment
from runtime.common.errors import ConfigError

OK = "ok"
WARN = "warn"
PROBLEM = "problem"

MIN_TORCH = (2, 11)
MIN_PYTHON = (3, 11)
MIN_SHM_BYTES = 64 << 20
MIN_CACHE_BYTES = 1 << 30
MIN_MEMORY_BYTES = 2 << 30

_SHM = Path("/dev/shm")
_REQUIRED = ("jinja2", "msgpack", "numpy", "safetensors", "tokenizers", "pyyaml", "rich")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was checked.
        status: :data:`OK`, :data:`WARN` or :data:`PROBLEM`.
        detail: what was found.
        advice: what to do about it; empty for :data:`OK`.
    """

    name: str
    status: str
    detail: str
    advice: str = ""


def run_checks() -> list[Finding]:
    """Run every check and return the findings; an invalid environment is a finding too."""
    try:
        environment = read_environment()
    except ConfigError as error:
        return [Finding("environment", PROBLEM, str(error), "fix the variable and run lockstep doctor again")]
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_versions,
        check_device,
        check_memory,
        check_shared_memory,
        check_compilers,
        lambda: check_ray(environment),
        lambda: check_cache(environment),
        lambda: check_demo_model(environment),
    ]
    return [finding for check in checks for finding in check()]


def check_versions() -> Iterator[Finding]:
    """Versions of Python, Lockstep, torch and the other required libraries."""
    python = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        yield Finding("python", PROBLEM, python, f"use Python {_dotted(MIN_PYTHON)} or later")
    else:
        yield Finding("python", OK, python)
    yield Finding("lockstep", OK, _version("lockstep") or "not installed; run from its checkout")
    yield _torch_version(_version("torch"))
    if missing := [name for name in _REQUIRED if _version(name) is None]:
        yield Finding("libraries", PROBLEM, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield Finding("libraries", OK, ", ".join(f"{name} {_version(name)}" for name in _REQUIRED))


def _torch_version(version: str | None) -> Finding:
    if version is None:
        return Finding("torch", PROBLEM, "not installed", f"pip install 'torch>={_dotted(MIN_TORCH)}'")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < MIN_TORCH:
        return Finding("torch", PROBLEM, version, f"install torch {_dotted(MIN_TORCH)} or later")
    return Finding("torch", OK, version)


def check_device() -> Iterator[Finding]:
    """The device that ``--device auto`` selects, and the CPU's capabilities."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("device", OK, f"cuda: {len(names)} x {', '.join(sorted(set(names)))}")
    elif os.path.exists("/dev/nvidiactl"):
        reason = "torch is a CPU build" if torch.version.cuda is None else "torch cannot use it"
        yield Finding("device", WARN, f"cpu; an NVIDIA device is there but {reason}", "install a CUDA build of torch")
    else:
        yield Finding("device", OK, "cpu")
    cores = len(os.sched_getaffinity(0))
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("cpu", OK, f"{cores} cores, {capability}, {torch.get_num_threads()} threads by default")


def check_memory() -> Iterator[Finding]:
    """Free main memory, which holds every CPU rank's weights and KV cache."""
    memory = psutil.virtual_memory()
    detail = f"{_size(memory.available)} free of {_size(memory.total)}"
    if memory.available < MIN_MEMORY_BYTES:
        yield Finding("memory", WARN, detail, "free memory, or lower --max-model-len or --max-num-seqs")
    else:
        yield Finding("memory", OK, detail)


def check_shared_memory() -> Iterator[Finding]:
    """/dev/shm, which the shared-memory all-reduce of one host uses, and stale segments of dead runs."""
    if not _SHM.is_dir():
        advice = "mount a tmpfs there; until then --collectives gloo works, slower"
        yield Finding("/dev/shm", WARN, "not there", advice)
        return
    usage = shutil.disk_usage(_SHM)
    detail = f"{_size(usage.free)} free of {_size(usage.total)}"
    if not os.access(_SHM, os.W_OK):
        yield Finding("/dev/shm", WARN, f"{detail}, not writable", "allow it, or use --collectives gloo")
    elif usage.free < MIN_SHM_BYTES:
        advice = "free some or enlarge it (docker run --shm-size 1g), or use --collectives gloo"
        yield Finding("/dev/shm", WARN, detail, advice)
    else:
        yield Finding("/dev/shm", OK, detail)
    from parallel.collectives.segment import remove_stale_segments

    if removed := remove_stale_segments():
        yield Finding("leftovers", OK, f"removed shared memory of dead runs: {', '.join(removed)}")
    else:
        yield Finding("leftovers", OK, "no shared memory of dead runs")


def check_compilers() -> Iterator[Finding]:
    """A C compiler for Lockstep's kernels; a C++ compiler and Python's headers for torch.compile."""
    from parallel.toolchain import find_compiler

    if (c_compiler := find_compiler()) is None:
        advice = "apt-get install gcc; until then CPU ranks exchange over gloo, slower"
        yield Finding("c compiler", WARN, "none", advice)
    else:
        yield Finding("c compiler", OK, _first_line([c_compiler, "--version"]))
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    missing = [
        *([] if shutil.which("g++") or shutil.which("clang++") else ["a C++ compiler (g++)"]),
        *([] if headers.is_file() else ["Python's headers (python3-dev)"]),
    ]
    if missing:
        advice = "apt-get install g++ python3-dev; until then run with --enforce-eager"
        yield Finding("torch.compile", WARN, f"on CPU it needs {' and '.join(missing)}", advice)
    else:
        yield Finding("torch.compile", OK, "C++ compiler and Python headers are there")


def check_ray(environment: Environment) -> Iterator[Finding]:
    """Ray's version and the cluster that a run would use."""
    version = _version("ray")
    if version is None:
        advice = "pip install 'lockstep[ray]'; without it use --distributed-executor-backend local for several ranks"
        yield Finding("ray", WARN, "not installed", advice)
        return
    found = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "gcs_server"]
    if address := environment.ray_address:
        where = f"RAY_ADDRESS is {address}"
    elif found:
        where = f"a cluster's head runs here (pid {', '.join(map(str, found))}) and will be used"
    else:
        where = "no cluster on this host: an embedded one is started for each run"
    yield Finding("ray", OK, f"{version}; {where}")


def check_cache(environment: Environment) -> Iterator[Finding]:
    """The cache folder for models and compiled code: writable, and with free space."""
    folder = environment.cache_dir
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    used = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) if folder.is_dir() else 0
    detail = f"{folder}: {_size(used)} used, {_size(free)} free on its disk"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        advice = "allow writing, or set LOCKSTEP_CACHE_DIR; until then every start compiles from scratch"
        yield Finding("cache", WARN, f"{folder} cannot be written", advice)
    elif free < MIN_CACHE_BYTES:
        yield Finding("cache", WARN, detail, "free some disk space, or set LOCKSTEP_CACHE_DIR to another disk")
    else:
        yield Finding("cache", OK, detail)


def check_demo_model(environment: Environment) -> Iterator[Finding]:
    """The ``demo`` model: in the cache, or the libraries that its conversion needs."""
    folder = demo_model_folder(environment.cache_dir)
    if folder.is_dir():
        yield Finding("demo model", OK, str(folder))
    elif missing := missing_tools():
        advice = "pip install 'lockstep[demo]' if you want it; your own checkpoints need none of these"
        yield Finding("demo model", WARN, f"not there, and making it needs {', '.join(missing)}", advice)
    else:
        yield Finding("demo model", OK, "not there yet: its first use fetches 93 MB and converts them, once")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout or done.stderr).partition("\n")[0] or f"{command[0]} (exit code {done.returncode})"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
