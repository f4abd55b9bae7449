"""``device_check`` without a GPU: every section runs, and a failed section fails alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import device_check

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows how sections fail without a GPU")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sections_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    without_decode = [name for name in device_check.SECTIONS if name != "decode"]  # The next test runs it.
    assert device_check.main(["--device", "cpu", "--no-compile", "--only", *without_decode, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["ok"]
    assert result["versions"]["torch"] == torch.__version__
    sections: dict[str, Any] = result["sections"]
    assert {name: section["status"] for name, section in sections.items()} == dict.fromkeys(without_decode, "passed")
    assert sections["tokens"]["report"]["compared"] == ["eager"]
    assert sections["tensor_parallel"]["report"]["compared"] == ["TP 1", "TP 2"]
    assert {row["op"] for row in sections["rooflines"]["report"]["rows"][1:]} >= {"paged_attention", "rms_norm"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_decode_in_every_mode() -> None:
    result = device_check.check("cpu", ["decode"])
    outcome = result["sections"]["decode"]
    assert outcome["status"] == "passed", outcome
    report = outcome["report"]
    modes = ["eager", "NONE", "PIECEWISE", "FULL"]
    assert [row["mode"] for row in report["steps"]] == [mode for mode in modes for _ in range(2)]
    assert report["tokens_as_eager"] == dict.fromkeys(modes, 1.0)
    overhead = report["launch_overhead"]
    assert overhead["predicted_eager_launch_ms"] == pytest.approx(
        overhead["launches_per_step"]["eager"] * overhead["launch_us"] / 1e3, rel=0.01
    )


def test_dry_lists_the_sections_and_runs_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(device_check, "check")
    assert device_check.main(["--dry", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(device_check.SECTIONS)
    assert all(" needs " in line for line in lines)


@without_gpu
def test_sections_fail_alone_and_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert device_check.main(["--device", "cuda", "--only", "kernels", "rooflines", "--out", str(out)]) == 1
    for outcome in json.loads(out.read_text())["sections"].values():
        assert outcome["status"] == "failed"
        assert "CUDA" in outcome["traceback"]
    assert "kernels          failed" in capsys.readouterr().err


def test_a_section_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(device_check.sys, "executable", str(hanging))
    monkeypatch.setitem(device_check.SECTIONS, "rooflines", 0.0)
    result = device_check.check("cpu", ["rooflines"])
    assert not result["ok"]
    assert result["sections"]["rooflines"]["traceback"].startswith("stopped after")
