"""TorchrunLauncher: what it needs, and ranks under agents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launch.torchrun_launcher import AgentRank, TorchrunLauncher
from runtime.common.channel import Channel, channel_pair, wait_readable
from runtime.common.config import EngineConfig
from runtime.common.errors import ConfigError
from runtime.common.protocol import pack, unpack
from tests.launch.test_environment import TORCHRUN
from tests.runtime.executor.fakes import MODEL


@pytest.fixture
def pair() -> Iterator[tuple[AgentRank, Channel]]:
    """A rank under an agent, and the agent's end of its control channel."""
    driver, socket = channel_pair()
    rank, agent = AgentRank(1, "host", driver), Channel(socket)
    yield rank, agent
    rank.close()
    agent.close()


def test_it_needs_torchrun_with_as_many_processes_as_ranks(monkeypatch: pytest.MonkeyPatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="needs torchrun's variables"):
        TorchrunLauncher()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, torchrun started 4 processes"):
        TorchrunLauncher().start(EngineConfig(tensor_parallel_size=2), MODEL, 1.0)


def test_signals_go_to_the_agent_and_the_end_comes_back(pair: tuple[AgentRank, Channel]):
    rank, agent = pair
    rank.signal(10)
    rank.kill()
    assert [unpack(agent.recv(5.0)) for _ in range(2)] == [["signal", 10], ["signal", 9]]
    assert not rank.wait(0.0) and rank.returncode() is None
    agent.send(pack(["ended", -9]))
    assert wait_readable([rank], 5.0) == [rank]
    assert rank.wait(5.0) and rank.wait(0.0) and rank.returncode() == -9
    rank.kill()  # Not sent any more.
    with pytest.raises(TimeoutError):
        agent.recv(0.0)


def test_a_rank_whose_agent_ends_has_ended_with_an_unknown_code(pair: tuple[AgentRank, Channel]):
    rank, agent = pair
    agent.close()
    assert rank.wait(5.0) and rank.returncode() is None
