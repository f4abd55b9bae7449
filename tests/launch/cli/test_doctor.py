"""Findings of ``lockstep doctor`` on machines with something missing, and the command's report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from launch.cli import doctor
from launch.cli import main as cli
from launch.cli.doctor import OK, PROBLEM, WARN, Finding
from launch.demo_model import demo_model_folder
from launch.environment import Environment


class Usage(NamedTuple):
    """The result of shutil.disk_usage."""

    total: int
    used: int
    free: int


def only(findings: Iterator[Finding], name: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Overrides of installed versions; other distributions keep theirs."""
    changed: dict[str, str | None] = {}
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = changed[name] if name in changed else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return changed


def test_every_finding_that_is_not_ok_says_what_to_do() -> None:
    findings = doctor.run_checks()
    assert {"python", "torch", "device", "cpu", "memory", "/dev/shm", "ray", "cache", "demo model"} <= {
        finding.name for finding in findings
    }
    assert all(finding.advice for finding in findings if finding.status != OK)
    assert all(finding.status in (OK, WARN, PROBLEM) for finding in findings)


@pytest.mark.parametrize(
    ("version", "status"), [("2.11.0", OK), ("2.13.0+cpu", OK), ("2.9.1", PROBLEM), (None, PROBLEM)]
)
def test_torch_versions(versions: dict[str, str | None], version: str | None, status: str) -> None:
    versions["torch"] = version
    finding = only(doctor.check_versions(), "torch")
    assert finding.status == status
    assert ("2.11" in finding.advice) == (status == PROBLEM)


def test_a_missing_library_is_a_problem(versions: dict[str, str | None]) -> None:
    versions["msgpack"] = None
    assert only(doctor.check_versions(), "libraries") == Finding(
        "libraries", PROBLEM, "missing: msgpack", "pip install msgpack"
    )


def test_without_ray_there_are_local_processes(versions: dict[str, str | None]) -> None:
    versions["ray"] = None
    finding = only(doctor.check_ray(Environment(Path(), "INFO", "")), "ray")
    assert finding.status == WARN
    assert "--distributed-executor-backend local" in finding.advice


def test_a_small_dev_shm_is_reported_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 54 << 20, 10 << 20))
    finding = only(doctor.check_shared_memory(), "/dev/shm")
    assert (finding.status, finding.detail) == (WARN, "10.5 MB free of 67.1 MB")
    assert "--shm-size" in finding.advice


def test_shared_memory_of_a_dead_run_is_removed() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    name = Path("/dev/shm") / f"lockstep-{dead.pid}-test-doctor"
    name.write_bytes(b"left behind")
    try:
        finding = only(doctor.check_shared_memory(), "leftovers")
        assert name.name in finding.detail
        assert not name.exists()
    finally:
        name.unlink(missing_ok=True)


def test_missing_compilers_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    findings = {finding.name: finding for finding in doctor.check_compilers()}
    assert [finding.status for finding in findings.values()] == [WARN, WARN]
    assert "gloo" in findings["c compiler"].advice
    assert "--enforce-eager" in findings["torch.compile"].advice


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=100 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert only(doctor.check_memory(), "memory").status == WARN


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    finding = only(doctor.check_cache(Environment(file / "cache", "INFO", "")), "cache")
    assert finding.status == WARN
    assert "LOCKSTEP_CACHE_DIR" in finding.advice


def test_the_cache_is_measured(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights").write_bytes(bytes(2_000_000))
    finding = only(doctor.check_cache(Environment(tmp_path, "INFO", "")), "cache")
    assert f"{tmp_path}: 2.0 MB used" in finding.detail


def test_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(tmp_path, "INFO", "")
    assert "not there yet" in only(doctor.check_demo_model(environment), "demo model").detail
    monkeypatch.setattr(doctor, "missing_tools", lambda: ["gguf"])
    assert only(doctor.check_demo_model(environment), "demo model").status == WARN
    demo_model_folder(tmp_path).mkdir(parents=True)
    assert only(doctor.check_demo_model(environment), "demo model").status == OK


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (WARN, 0), (PROBLEM, 1)])
def test_the_command_fails_on_problems_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    findings: Callable[[], list[Finding]] = lambda: [Finding("thing", status, "as found", "fix it")]  # noqa: E731
    monkeypatch.setattr(doctor, "run_checks", findings)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines() == [
        f"{status:<8} thing          as found",
        "                        -> fix it",
    ]
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {
        "ok": code == 0,
        "findings": [{"name": "thing", "status": status, "detail": "as found", "advice": "fix it"}],
    }


def test_a_wrong_variable_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LOCKSTEP_LOG_LEVEL", "loud")
    (finding,) = doctor.run_checks()
    assert finding.status == PROBLEM
    assert "LOCKSTEP_LOG_LEVEL" in finding.detail
