"""Ranks under torchrun and ``lockstep launch``: the command's output, its exit code, signals, and kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch import spmd
from launch.local import RankProcess
from launch.rank_spec import RankSpec, make_rank_specs
from launch.spmd import DeferredSigterm
from runtime.common.channel import Channel, ChannelClosedError, channel_pair
from runtime.common.config import EngineConfig
from runtime.common.protocol import pack, unpack
from runtime.executor.run_dir import cleanup_run_dir, make_run_dir
from tests.checkpoints import tiny_checkpoint
from tests.runtime.executor.fakes import MODEL

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
    """The default size is torchrun's number of processes; another one is refused."""
    done = run(under_launch(2, *generate()))
    assert done.returncode == 0, done.stderr
    done = run(under_launch(2, *generate("-tp", 3)))
    assert done.returncode == 2, done.stderr
    assert "torchrun started 2" in done.stderr


@pytest.mark.slow
def test_help_and_wrong_flags_end_every_process():
    assert run(under_launch(2, "generate", "--help")).returncode == 0
    assert run(under_launch(2, *generate("--no-such-flag"))).returncode == 2
    assert run(under_torchrun(2, *generate("--no-such-flag"))).returncode == 1  # Torchrun's own code.


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [("exit", 3), ("raise", 1)])
def test_a_failing_rank_is_named_and_gives_the_code(kind: str, code: int):
    done = run(under_launch(3, *generate("-tp", 3)), LOCKSTEP_FAULT=f"rank=2,step=2,kind={kind}")
    assert done.returncode == code, done.stderr
    assert "rank 2" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("place", [under_torchrun, under_launch])
def test_sigkill_of_the_launcher_leaves_nothing(place):
    folder = tiny_checkpoint(max_position_embeddings=65536)
    argv = ["generate", folder, "-tp", "2", "--prompt", "x", "--max-tokens", "60000", "--ignore-eos", "--enforce-eager"]
    with subprocess.Popen(place(2, *argv), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as launcher:
        for line in launcher.stderr:
            if line.strip().startswith("ready"):
                break
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert sum("launch.rank_main" in " ".join(p.cmdline()) for p in family) == 2
        launcher.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    cleanup_run_dir(make_run_dir())  # The next start removes the files of a killed driver.


@pytest.mark.slow
def test_sigterm_to_lockstep_launch_ends_the_command_without_a_restart():
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
        assert launcher.wait(60) == 128 + signal.SIGTERM, said
    assert said.count("spawn") == 1 and "Traceback" not in said, said


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Restores the handler of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_an_agent_defers_sigterm_while_the_driver_uses_its_rank():
    exits: list[str] = []
    deferred = DeferredSigterm(lambda: exits.append("goodbye"))
    with pytest.raises(SystemExit) as end, deferred.defer():
        signal.raise_signal(signal.SIGTERM)
        assert exits == []
    assert (exits, end.value.code) == (["goodbye"], 128 + signal.SIGTERM)


@pytest.mark.usefixtures("sigterm")
def test_an_idle_agent_exits_on_sigterm():
    exits: list[str] = []
    deferred = DeferredSigterm(lambda: exits.append("goodbye"))
    with deferred.defer():
        pass
    assert exits == []
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    assert exits == ["goodbye"]


@pytest.fixture
def control() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a control channel: the driver's and the agent's."""
    driver, socket = channel_pair()
    agent = Channel(socket)
    yield driver, agent
    driver.close()
    agent.close()


def spawn_sleeping(spec: RankSpec) -> tuple[RankProcess, Channel]:
    channel, other = channel_pair()
    other.close()
    return RankProcess(spec.rank, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])), channel


def run_until_closed(agent: Channel) -> None:
    with contextlib.suppress(ChannelClosedError):
        spmd.run_rank_spec(agent)


def test_an_agent_forwards_signals_and_reports_the_end(control, monkeypatch: pytest.MonkeyPatch):
    driver, agent = control
    monkeypatch.setattr(spmd, "spawn_rank", spawn_sleeping)
    thread = threading.Thread(target=run_until_closed, args=(agent,))
    thread.start()
    driver.send(make_rank_specs(EngineConfig(), MODEL, ["a"])[0].pack())
    driver.send(pack(["signal", signal.SIGTERM]))
    assert unpack(driver.recv(60.0)) == ["ended", -signal.SIGTERM]
    driver.close()
    thread.join(60)
    assert not thread.is_alive()


def test_the_end_of_the_control_channel_kills_the_rank(control, monkeypatch: pytest.MonkeyPatch):
    driver, agent = control
    spawned: list[RankProcess] = []

    def spawn(spec: RankSpec) -> tuple[RankProcess, Channel]:
        process, channel = spawn_sleeping(spec)
        spawned.append(process)
        return process, channel

    monkeypatch.setattr(spmd, "spawn_rank", spawn)
    driver.send(make_rank_specs(EngineConfig(), MODEL, ["a"])[0].pack())
    driver.close()
    with pytest.raises(ChannelClosedError):
        spmd.run_rank_spec(agent)
    assert spawned[0].returncode() == -signal.SIGKILL


def test_outside_torchrun_the_module_says_how_to_start_it():
    done = run([sys.executable, "-m", "launch.spmd", "generate", "demo"])
    assert done.returncode == 2
    assert "torchrun --nproc-per-node" in done.stderr
