"""Ranks whose places torchrun made: the command's output, its exit code, and ends of every kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launch.torchrun_wrapper import DriverEnded, signals_to_driver
from runtime.executor.run_dir import cleanup_run_dir, make_run_dir
from tests.checkpoints import tiny_checkpoint

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.timeout(180)]


def under_torchrun(nproc: int, *argv: object) -> list[str]:
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(nproc), "-m", "launch.spmd", *map(str, argv)]


def under_launch(nproc: int, *argv: object) -> list[str]:
    return [str(BIN / "lockstep"), "launch", "--nproc-per-node", str(nproc), "--", *map(str, argv)]


def generate(*extra: object) -> list[object]:
    return ["generate", tiny_checkpoint(), "--prompt", "Hello", "--json", "--max-tokens", 5, "--enforce-eager", *extra]


def run(argv: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=150, cwd=ROOT, env={**os.environ, **environment}
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", [under_torchrun, under_launch])
def test_one_answer_comes_out_and_the_code_is_0(place):
    done = run(place(2, *generate("-tp", 2)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"finish_reason"') == 1


@pytest.mark.slow
def test_the_number_of_ranks_is_that_of_torchrun():
    """Without a size the command takes torchrun's; another one is refused."""
    done = run(under_launch(2, *generate()))
    assert done.returncode == 0, done.stderr
    done = run(under_launch(2, *generate("-tp", 3)))
    assert done.returncode == 2, done.stderr
    assert "torchrun started 2" in done.stderr


@pytest.mark.slow
def test_help_and_wrong_flags_end_every_process():
    assert run(under_launch(2, "generate", "--help")).returncode == 0
    assert run(under_launch(2, *generate("--no-such-flag"))).returncode == 2
    assert run(under_torchrun(2, *generate("--no-such-flag"))).returncode == 1  # torchrun says 1 for every failure


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [("exit", 3), ("raise", 1)])
def test_a_failing_rank_is_named_and_gives_the_code(kind: str, code: int):
    done = run(under_launch(3, *generate("-tp", 3)), LOCKSTEP_FAULT=f"rank=2,step=2,kind={kind}")
    assert done.returncode == code, done.stderr
    assert "rank 2" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("place", [under_torchrun, under_launch])
def test_row_10_sigkill_of_the_launcher_leaves_nothing(place):
    folder = tiny_checkpoint(max_position_embeddings=65536)
    argv = ["generate", folder, "-tp", "2", "--prompt", "x", "--max-tokens", "60000", "--ignore-eos", "--enforce-eager"]
    with subprocess.Popen(place(2, *argv), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as launcher:
        for line in launcher.stderr:
            if line.strip().startswith("ready"):
                break
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert sum("launch.rank_main" in " ".join(p.cmdline()) for p in family) == 2
        launcher.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    cleanup_run_dir(make_run_dir())  # what a killed launcher could not remove, the next start does


@pytest.mark.slow
def test_sigterm_to_lockstep_launch_is_the_commands_end_and_no_failure_to_restart():
    folder = tiny_checkpoint(max_position_embeddings=65536)
    argv = ["generate", folder, "-tp", "2", "--prompt", "x", "--max-tokens", "60000", "--ignore-eos", "--enforce-eager"]
    command = under_launch(2, *argv)
    command[2:2] = ["--max-restarts", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as launcher:
        said = ""
        for line in launcher.stderr:
            said += line
            if line.strip().startswith("ready"):
                launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(10) == 128 + signal.SIGTERM, said
    assert said.count("spawn") == 1 and "Traceback" not in said, said


def test_a_signal_before_there_is_a_driver_ends_lockstep_launch():
    with signals_to_driver(), pytest.raises(DriverEnded) as end:
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM


def test_outside_torchrun_the_module_says_how_to_start_it():
    done = run([sys.executable, "-m", "launch.spmd", "generate", "demo"])
    assert done.returncode == 2
    assert "torchrun --nproc-per-node" in done.stderr
