"""RankActor without Ray: it reports how its rank ended, and ends with its raylet."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys

import pytest

from launch import ray_actor
from launch.local import RankProcess
from launch.rank_spec import RankSpec, host_identity, make_rank_specs
from launch.ray_actor import RankActor
from runtime.common.channel import Channel, channel_pair
from runtime.common.config import EngineConfig
from runtime.common.protocol import unpack
from tests.runtime.executor.fakes import MODEL

SPEC = make_rank_specs(EngineConfig(), MODEL, ["a"])[0].pack()

ACTOR = """if True:
    import os, subprocess, sys
    from launch import ray_actor
    from launch.local import RankProcess
    from runtime.common.channel import channel_pair
    from tests.launch.test_ray_actor import SPEC
    def spawn(spec):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
        print(os.getpid(), child.pid, flush=True)
        return RankProcess(spec.rank, child), channel_pair()[0]
    ray_actor.spawn_rank = spawn
    ray_actor.RankActor().run(SPEC)
"""


@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_it_reports_how_the_rank_ended(script: str, code: int, monkeypatch: pytest.MonkeyPatch):
    def spawn(spec: RankSpec) -> tuple[RankProcess, Channel]:
        channel, other = channel_pair()
        other.close()
        return RankProcess(spec.rank, subprocess.Popen([sys.executable, "-c", script])), channel

    monkeypatch.setattr(ray_actor, "spawn_rank", spawn)
    assert RankActor().run(SPEC) == code


def test_it_describes_its_host():
    assert unpack(RankActor().describe())[:3] == ["actor", socket.gethostname(), host_identity()]


def test_the_end_of_its_parent_ends_it_and_its_rank():
    """The parent, which stands for the raylet, is killed once the actor runs."""
    raylet = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ACTOR!r}])"
    with subprocess.Popen([sys.executable, "-c", raylet], stdout=subprocess.PIPE, text=True) as parent:
        actor, rank = map(int, parent.stdout.readline().split())
        ends = [os.pidfd_open(pid) for pid in (actor, rank)]
        parent.kill()
    for end in ends:
        assert select.select([end], [], [], 60.0)[0]
        os.close(end)
