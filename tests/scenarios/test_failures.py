"""Failures of ranks without restarts: the error names rank and cause, and nothing is left behind.

Restarts are in ``test_restart.py``. Faults come from ``LOCKSTEP_FAULT`` or from signals; the leak check of
``conftest.py`` follows every test.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from launch.llm import LLM
from runtime.common.errors import (
    CheckpointError,
    LockstepGuardError,
    RankDiedError,
    RankError,
    RankRaisedError,
    RankTimeoutError,
)
from runtime.common.sampling_params import SamplingParams
from runtime.executor.run_dir import cleanup_run_dir, make_run_dir
from tests.checkpoints import tiny_checkpoint

LOCKSTEP = Path(sys.executable).with_name("lockstep")
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12], [13, 14]]


def start(tp: int = 2, **settings) -> LLM:
    settings = {"enforce_eager": True, "max_restarts": 0, **settings}
    return LLM(
        str(tiny_checkpoint()),
        tensor_parallel_size=tp,
        distributed_executor_backend="local",
        progress=False,
        **settings,
    )


def fail(llm: LLM) -> RankError:
    """The error that ends a generation."""
    with pytest.raises(RankError) as caught:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert all(output.finish_reason != "error" for output in outputs), outputs[0].error
    return caught.value


def test_a_rank_that_dies_while_idle_is_named_by_the_next_request():
    with start() as llm:
        llm.generate(PROMPTS, GREEDY)
        ended = os.pidfd_open(llm.rank_pids[1])
        os.kill(llm.rank_pids[1], signal.SIGKILL)
        assert select.select([ended], [], [], 10)[0]  # Dead; its parent reaps it.
        os.close(ended)
        error = fail(llm)
        assert isinstance(error, RankDiedError) and error.rank == 1 and error.returncode == -9


def test_a_rank_that_exits_gives_its_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", "rank=1,step=5,kind=exit")
    with start() as llm:
        error = fail(llm)
        assert isinstance(error, RankDiedError) and error.rank == 1 and error.exit_code == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_any_rank_is_the_message(rank: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", f"rank={rank},step=5,kind=raise")
    with start() as llm:
        error = fail(llm)
        assert isinstance(error, RankRaisedError) and error.rank == rank and error.stage == "step 5"
        assert "injected fault: raise at step 5" in str(error) and "Traceback" in str(error)


def test_a_rank_that_hangs_misses_the_step_deadline(monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setenv("LOCKSTEP_FAULT", "rank=1,step=5,kind=hang")
    with start(step_timeout=1.0) as llm:
        error = fail(llm)
        assert isinstance(error, RankTimeoutError) and "--step-timeout" in str(error)
        assert "1" in re.findall(r"silent: ranks ([\d, ]+)", str(error))[0]
    assert "faults.py" in capfd.readouterr().err  # The stack of the hanging rank.


def test_a_skipped_collective_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", "rank=1,step=5,kind=skip_collective")
    with start(collective_timeout=2.0) as llm:
        error = fail(llm)
        assert isinstance(error, RankRaisedError) and error.exception_type.startswith("Collective")


def test_a_rank_with_another_plan_is_detected_in_that_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", "rank=1,step=5,kind=corrupt_plan")
    with start() as llm:
        error = fail(llm)
        assert isinstance(error, LockstepGuardError) and error.rank == 1 and "digest" in str(error)


def test_a_rank_that_cannot_load_ends_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", "rank=1,kind=load_fail")
    with pytest.raises(RankRaisedError) as caught:
        start()
    assert caught.value.rank == 1 and caught.value.stage == "weights" and "load_fail" in str(caught.value)


def test_a_checkpoint_of_other_shapes_is_an_input_error():
    folder = tiny_checkpoint(hidden_size=108)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 250', '"intermediate_size": 256'))
    with pytest.raises(CheckpointError, match=r"down_proj|gate_proj") as caught:
        LLM(str(folder), tensor_parallel_size=2, distributed_executor_backend="local", progress=False)
    assert caught.value.exit_code == 2


def test_a_stage_that_misses_its_deadline_names_its_flag(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", "rank=1,kind=load_hang")
    with pytest.raises(RankTimeoutError, match="--weights-timeout") as caught:
        start(weights_timeout=1.0)
    assert caught.value.stage == "weights" and caught.value.rank == 1


def test_a_start_removes_leftovers_of_dead_drivers_only(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    dead, alive = process.pid, os.getpid()
    names = {pid: Path(f"/dev/shm/lockstep-{pid}-x-tp") for pid in (dead, alive)}
    folders = {pid: Path(tempfile.gettempdir(), f"lockstep-{pid}-x") for pid in (dead, alive)}
    try:
        for pid in (dead, alive):
            names[pid].write_bytes(b"x" * 4096)
            folders[pid].mkdir()
        with start() as llm, start() as other:  # Two engines at once.
            assert [llm.generate(PROMPTS, GREEDY)[0].token_ids] == [other.generate(PROMPTS, GREEDY)[0].token_ids]
            assert [path.exists() for path in (names[dead], folders[dead])] == [False, False]
            assert [path.exists() for path in (names[alive], folders[alive])] == [True, True]
    finally:
        for pid in (dead, alive):
            names[pid].unlink(missing_ok=True)
            cleanup_run_dir(str(folders[pid]))


def test_a_full_shared_memory_names_needed_and_free_bytes():
    """In a mount namespace of its own, where /dev/shm has 64 KiB."""
    command = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {LOCKSTEP} generate {tiny_checkpoint()} --prompt x"
    flags = "--enforce-eager -tp 2 --distributed-executor-backend local"
    isolated = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*isolated, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True).returncode:
        pytest.skip("this system does not allow a mount namespace with another /dev/shm")
    done = subprocess.run([*isolated, f"{command} {flags}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    said = next(line for line in done.stderr.splitlines() if line.startswith("lockstep generate: "))
    assert re.search(r"/dev/shm has 65536 bytes left, but the collectives need \d+; .*--shm-size", said)


@pytest.mark.parametrize("when", ["starting", "running"])
def test_sigkill_of_the_driver_leaves_nothing(when: str):
    """In any stage, the ranks exit by themselves; the leak check covers the rest."""
    command = [
        LOCKSTEP,
        "generate",
        tiny_checkpoint(max_position_embeddings=65536),
        "-tp",
        "2",
        "--prompt",
        "x",
        "--enforce-eager",
    ]
    command += ["--distributed-executor-backend", "local", "--max-tokens", "60000", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        wanted = "spawn" if when == "starting" else "ready"
        for line in driver.stderr:
            if re.match(rf"\s*{wanted}\b", line):
                break
        ranks = psutil.Process(driver.pid).children(recursive=True)
        assert len([r for r in ranks if "launch.rank_main" in " ".join(r.cmdline())]) == 2
        driver.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    cleanup_run_dir(make_run_dir())  # The next start removes the files of a killed driver.


def test_non_finite_logits_fail_one_request_only(monkeypatch: pytest.MonkeyPatch):
    with start() as llm:
        expected = llm.generate(PROMPTS, GREEDY)
    monkeypatch.setenv("LOCKSTEP_FAULT", "rank=0,step=3,kind=nan")
    with start() as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.finish_reason for output in outputs] == ["error", "length", "length", "length"]
    assert [output.token_ids for output in outputs[1:]] == [output.token_ids for output in expected[1:]]


@pytest.mark.slow
def test_idle_ranks_use_no_cpu():
    with start(tp=3) as llm:
        llm.generate(PROMPTS, GREEDY)
        ranks = [psutil.Process(pid) for pid in llm.rank_pids]
        before = sum(sum(rank.cpu_times()[:2]) for rank in ranks)
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "60"], timeout=2.0)  # Two idle seconds.
        used = sum(sum(rank.cpu_times()[:2]) for rank in ranks) - before
    assert used < 0.1
