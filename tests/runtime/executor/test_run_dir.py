"""Run directories: private, swept after dead drivers, and cleaned up with their shared-memory names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.executor import run_dir
from runtime.executor.run_dir import cleanup_run_dir, make_run_dir, run_id


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Folders of the test's own for temporary files and shared memory."""
    temporary, shared = tmp_path / "tmp", tmp_path / "shm"
    for folder in (temporary, shared):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(run_dir, "SHARED_MEMORY", shared)
    return temporary, shared


def test_a_run_dir_is_private_and_named_after_the_driver():
    folder = Path(make_run_dir())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert run_id(str(folder)).startswith(f"lockstep-{os.getpid()}-")
    assert make_run_dir() != str(folder)


def test_cleanup_removes_the_folder_and_its_names_only(places: tuple[Path, Path]):
    folder, other = make_run_dir(), make_run_dir()
    for owner in (folder, other):
        (places[1] / f"{run_id(owner)}-tp").touch()
    for _ in range(2):
        cleanup_run_dir(folder)
    cleanup_run_dir("")
    assert list(places[0].iterdir()) == [Path(other)]
    assert [path.name for path in places[1].iterdir()] == [f"{run_id(other)}-tp"]


def test_a_start_sweeps_the_folders_of_dead_drivers(places: tuple[Path, Path]):
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    names = {pid: f"lockstep-{pid}-x" for pid in (process.pid, os.getpid())}
    for name in (*names.values(), "lockstep-tests-x"):
        (places[0] / name).mkdir()
        (places[1] / f"{name}-tp").touch()
    made = Path(make_run_dir()).name
    assert {path.name for path in places[0].iterdir()} == {names[os.getpid()], "lockstep-tests-x", made}
    assert {path.name for path in places[1].iterdir()} == {f"{names[os.getpid()]}-tp", "lockstep-tests-x-tp"}
