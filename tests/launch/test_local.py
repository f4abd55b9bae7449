"""LocalLauncher: child processes with channels, and their end."""

from __future__ import annotations

import select
import signal
import subprocess
import sys

import pytest

from launch import local
from launch.local import LocalLauncher, RankProcess
from launch.rank_spec import RankSpec, host_identity
from runtime.common.channel import Channel, channel_pair
from runtime.common.config import EngineConfig
from runtime.common.protocol import unpack
from tests.runtime.executor.fakes import MODEL


def sleeping(rank: int = 0) -> RankProcess:
    return RankProcess(rank, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))


def test_every_rank_says_hello_from_this_host():
    started = LocalLauncher().start(EngineConfig(tensor_parallel_size=2), MODEL, 60.0)
    try:
        for rank, start in enumerate(started):
            kind, number, facts = unpack(start.channel.recv(60.0))
            assert (kind, number, facts["pid"], facts["host_id"]) == ("hello", rank, start.handle.pid, host_identity())
    finally:
        for start in started:
            start.handle.kill()
            assert start.handle.wait(60.0) and start.handle.returncode() == -signal.SIGKILL
            start.handle.close()
            start.channel.close()


def test_a_start_that_fails_ends_the_ranks_it_has_started(monkeypatch: pytest.MonkeyPatch):
    spawned: list[RankProcess] = []

    def spawn(spec: RankSpec) -> tuple[RankProcess, Channel]:
        if spec.rank == 1:
            raise OSError("no more processes")
        spawned.append(sleeping())
        channel, other = channel_pair()
        other.close()
        return spawned[0], channel

    monkeypatch.setattr(local, "spawn_rank", spawn)
    with pytest.raises(OSError, match="no more processes"):
        LocalLauncher().start(EngineConfig(tensor_parallel_size=2), MODEL, 60.0)
    assert spawned[0].returncode() == -signal.SIGKILL


def test_a_handle_is_readable_once_its_process_has_ended():
    process = sleeping()
    assert (process.returncode(), process.wait(0.0), select.select([process], [], [], 0.0)[0]) == (None, False, [])
    process.signal(signal.SIGTERM)
    assert select.select([process], [], [], 60.0)[0] == [process]
    assert process.wait(60.0) and process.returncode() == -signal.SIGTERM
    process.kill()
    for _ in range(2):
        process.close()
