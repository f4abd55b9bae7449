"""Accepts the channels of ranks that connect by address: all launchers but the local one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from runtime.common.channel import Channel, ChannelClosedError, ChannelListener
from runtime.common.errors import RankDiedError, RankTimeoutError
from runtime.executor.launcher import RankHandle

POLL_SECONDS = 0.2
"""How often to check for ended processes while waiting for a connection."""

RANK_SECONDS = 5.0
"""Time limit for a connected rank to send its number."""


def accept_ranks(listener: ChannelListener, handles: Sequence[RankHandle], deadline: float) -> dict[int, Channel]:
    """Accept one channel per rank, by rank.

    Ranks connect in any order; the first frame of each is its rank, as two bytes.

    Raises:
        RankDiedError: a rank ended before it connected.
        RankTimeoutError: a rank did not connect before ``deadline`` (by ``time.monotonic``).
    """
    channels: dict[int, Channel] = {}
    while len(channels) < len(handles):
        missing = [handle for handle in handles if handle.rank not in channels]
        if time.monotonic() > deadline:
            text = "it did not connect in time; --spawn-timeout sets this deadline"
            raise RankTimeoutError(text, rank=missing[0].rank, host=missing[0].host, stage="spawn")
        for handle in missing:
            if handle.wait(0.0):
                raise RankDiedError(rank=handle.rank, returncode=handle.returncode(), host=handle.host, stage="spawn")
        with contextlib.suppress(TimeoutError, ChannelClosedError):
            channel = listener.accept(min(POLL_SECONDS, max(0.01, deadline - time.monotonic())))
            channels[int.from_bytes(channel.recv(timeout=RANK_SECONDS), "big")] = channel
    return channels
