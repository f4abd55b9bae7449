"""accept_ranks: ranks that connect in any order, and ranks that do not connect."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launch.accept import accept_ranks
from runtime.common.channel import ChannelListener, connect
from runtime.common.errors import RankDiedError, RankTimeoutError
from tests.runtime.executor.fakes import FakeRank

SECRET = b"s" * 32


@pytest.fixture
def listener(tmp_path: Path):
    opened = ChannelListener(f"unix:{tmp_path}/driver", SECRET)
    yield opened
    opened.close()


@pytest.fixture
def handles():
    made = [FakeRank(rank) for rank in range(3)]
    yield made
    for handle in made:
        handle.die(0)
        handle.close()
        handle.driver_end.close()


def test_a_channel_is_known_by_the_rank_that_it_sends(listener: ChannelListener, handles: list[FakeRank]):
    connect(listener.address, SECRET, 5.0).close()  # Sends no rank, and delays no other.
    ranks = {}
    for rank in (2, 0, 1):
        ranks[rank] = connect(listener.address, SECRET, 5.0)
        ranks[rank].send(rank.to_bytes(2, "big"))
    channels = accept_ranks(listener, handles, time.monotonic() + 60)
    assert sorted(channels) == [0, 1, 2]
    for rank, channel in channels.items():
        channel.send(b"to %d" % rank)
        assert ranks[rank].recv(5.0) == b"to %d" % rank
        channel.close()
        ranks[rank].close()


def test_a_rank_that_ends_before_it_connects_is_named(listener: ChannelListener, handles: list[FakeRank]):
    handles[1].die(3)
    with pytest.raises(RankDiedError) as caught:
        accept_ranks(listener, handles, time.monotonic() + 60)
    assert (caught.value.rank, caught.value.returncode, caught.value.stage) == (1, 3, "spawn")


def test_a_rank_that_does_not_connect_in_time_is_named(listener: ChannelListener, handles: list[FakeRank]):
    with pytest.raises(RankTimeoutError, match="--spawn-timeout") as caught:
        accept_ranks(listener, handles, time.monotonic() - 1)
    assert (caught.value.rank, caught.value.stage) == (0, "spawn")
