"""GPU check: kernel accuracy, token equality across modes and ranks, and decode speed, in under five minutes.

    python -m benchmarks.device_check --device cuda --out result.json

Each section runs in its own process, so a section that fails, hangs or corrupts the CUDA context does not affect the
others; it is reported as failed with its traceback, and the exit code is 1. On a GPU, sections without timings run
concurrently. Progress goes to stderr; the result is one JSON object. No network is needed. ``--device cpu`` runs the
same sections with small sizes, as the tests do; ``--dry`` lists the sections and what each needs, and runs none.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]

SECTIONS = {"kernels": 120.0, "tokens": 150.0, "tensor_parallel": 120.0, "decode": 150.0, "rooflines": 60.0}
"""Sections in execution order, with the timeout of each in seconds."""

REQUIREMENTS = {
    "kernels": "Triton; --device cpu runs its interpreter",
    "tokens": "a C++ compiler (not with --no-compile)",
    "tensor_parallel": "two processes on one device",
    "decode": "half of the device's free memory; a C++ compiler (not with --no-compile)",
    "rooflines": "a device that runs nothing else",
}
"""What each section needs besides the device, as ``--dry`` prints it."""

UNTIMED = ("kernels", "tokens", "tensor_parallel")
"""Sections without timings, which a GPU runs concurrently."""

TOTAL_SECONDS = 290.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check, or one section in a child process; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_check", description="Check a GPU.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the JSON result; default: stdout")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--no-compile", action="store_true", help="skip compiled modes")
    parser.add_argument("--dry", action="store_true", help="list the sections and their requirements, run none")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child is not None:
        return _run_section(arguments.only[0], arguments.device, not arguments.no_compile, arguments.child)
    if arguments.dry:
        for name in arguments.only:
            print(f"{name:<16} up to {SECTIONS[name]:.0f} s on {arguments.device}; needs {REQUIREMENTS[name]}")
        return 0
    result = check(arguments.device, arguments.only, compile=not arguments.no_compile)
    text = json.dumps(result, indent=1)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text)
    return 0 if result["ok"] else 1


def check(device: str, sections: Sequence[str] = tuple(SECTIONS), *, compile: bool = True) -> dict[str, Any]:
    """Run sections and collect their outcomes.

    Args:
        device: "cuda" or "cpu".
        sections: names of :data:`SECTIONS`.
        compile: whether to run compiled modes too.
    """
    started = time.monotonic()
    outcomes: dict[str, dict[str, Any]] = {}
    together = [name for name in sections if name in UNTIMED]
    rounds = (
        [together, *([name] for name in sections if name not in UNTIMED)]
        if device == "cuda"
        else [[n] for n in sections]
    )
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        for names in rounds:
            running = [_Section(name, device, compile, Path(folder)) for name in names]
            for section in running:
                outcomes[section.name] = section.wait(started + TOTAL_SECONDS)
    return {
        "ok": all(outcome["status"] != "failed" for outcome in outcomes.values()),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "card": _card() if device == "cuda" else platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in ("torch", "triton")},
        "seconds": round(time.monotonic() - started, 1),
        "sections": outcomes,
    }


class _Section:
    """One section in its own process, started by the constructor."""

    def __init__(self, name: str, device: str, compile: bool, folder: Path) -> None:
        self.name = name
        self._folder = folder / name
        self._folder.mkdir()
        self._started = time.monotonic()
        self._skipped = ""
        if name == "kernels" and importlib.util.find_spec("triton") is None:
            self._skipped = "Triton is not installed"
            return
        command = [sys.executable, "-m", "benchmarks.device_check", "--device", device, "--only", name]
        command += ["--child", str(self._folder), *([] if compile else ["--no-compile"])]
        # Without a GPU, Triton only interprets kernels; it reads the variable at import.
        environment = os.environ | ({"TRITON_INTERPRET": "1"} if (name, device) == ("kernels", "cpu") else {})
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, deadline: float) -> dict[str, Any]:
        """Wait for the section and return its status, seconds, report and traceback; kill it at the deadline."""
        if self._skipped:
            return {"status": "skipped", "reason": self._skipped}
        limit = min(self._started + SECTIONS[self.name], deadline)
        try:
            code = self._process.wait(timeout=max(1.0, limit - time.monotonic()))
            ending = f"its process ended with {code}"
        except subprocess.TimeoutExpired:
            ending = f"stopped after {time.monotonic() - self._started:.0f} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        outcome: dict[str, Any] = {"seconds": round(time.monotonic() - self._started, 1)}
        written = self._folder / "result.json"
        if written.exists():
            outcome |= json.loads(written.read_text())
        else:
            tail = (self._folder / "log").read_text(errors="replace")[-4000:]
            outcome |= {"status": "failed", "traceback": f"{ending}\n{tail}"}
        print(f"{self.name:<16} {outcome['status']:<8} {outcome['seconds']:6.1f} s", file=sys.stderr, flush=True)
        return outcome


def _run_section(name: str, device: str, compile: bool, folder: Path) -> int:
    """Entry point of a child process: run one section and write its outcome to ``folder``."""
    report: dict[str, Any] = {}
    outcome: dict[str, Any] = {"status": "passed", "report": report}
    try:
        from benchmarks import device_decode, device_sections

        job = device_sections.Job(device, folder, compile)
        run = device_decode.decode if name == "decode" else getattr(device_sections, name)
        run(job, report)
    except BaseException:  # noqa: BLE001 - reported as the outcome
        outcome |= {"status": "failed", "traceback": traceback.format_exc()}
    (folder / "result.tmp").write_text(json.dumps(outcome))
    (folder / "result.tmp").rename(folder / "result.json")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _card() -> str:
    """Name and driver version of the GPU, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"


if __name__ == "__main__":
    sys.exit(main())
