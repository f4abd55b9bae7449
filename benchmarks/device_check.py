"""What can only be seen on a GPU, in one run of under five minutes, without a network: right, equal, and how fast.

    python -m benchmarks.device_check --device cuda --out result.json

Every section runs in a process of its own, so that one which fails, hangs or breaks the CUDA context leaves the others
alone; it is then reported as failed with its traceback, and the exit code is 1. On a GPU the sections that measure no
time run at once. Progress goes to stderr; the result is one JSON object. ``--device cpu`` runs the same with small
sizes: that is how the tests know that it works.
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
"""The sections in order, and seconds that each may take."""

UNTIMED = ("kernels", "tokens", "tensor_parallel")
"""Sections that measure nothing, so that a GPU may run them at once."""

TOTAL_SECONDS = 290.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check, or as its child one section; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_check", description="Check a GPU.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the JSON result; default: stdout")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--no-compile", action="store_true", help="leave out what needs a compiler")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child is not None:
        return _run_section(arguments.only[0], arguments.device, not arguments.no_compile, arguments.child)
    result = check(arguments.device, arguments.only, compile=not arguments.no_compile)
    text = json.dumps(result, indent=1)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text)
    return 0 if result["ok"] else 1


def check(device: str, sections: Sequence[str] = tuple(SECTIONS), *, compile: bool = True) -> dict[str, Any]:
    """Run sections and gather what they found.

    Args:
        device: "cuda" or "cpu".
        sections: names of :data:`SECTIONS`.
        compile: whether to check compiled code too.
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
    """One section in its own process, started at once."""

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
        # Without a GPU Triton can only interpret its kernels, which has to be said before it is imported.
        environment = os.environ | ({"TRITON_INTERPRET": "1"} if (name, device) == ("kernels", "cpu") else {})
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, deadline: float) -> dict[str, Any]:
        """The section's outcome: its status, seconds, report, and where it failed why. Ends it at the deadline."""
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
    """A child's whole life: carry out one section and write what came of it."""
    report: dict[str, Any] = {}
    outcome: dict[str, Any] = {"status": "passed", "report": report}
    try:
        from benchmarks import device_decode, device_sections

        job = device_sections.Job(device, folder, compile)
        run = device_decode.decode if name == "decode" else getattr(device_sections, name)
        run(job, report)
    except BaseException:  # noqa: BLE001 - whatever it was is the outcome
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
    """Name and driver of the GPU, as its own tool says."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"


if __name__ == "__main__":
    sys.exit(main())
