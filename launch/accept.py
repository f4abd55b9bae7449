"""The driver's side of ranks that connect by address: each launcher but the local one collects its channels here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from runtime.common.channel import Channel, ChannelClosedError, ChannelListener
from runtime.common.errors import RankDiedError, RankTimeoutError
from runtime.executor.launcher import RankHandle


def accept_ranks(listener: ChannelListener, handles: Sequence[RankHandle], deadline: float) -> dict[int, Channel]:
    """A channel from every rank, by rank.

    Ranks connect in any order, so each sends its number, two bytes, before anything else.

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
            channel = listener.accept(min(0.2, max(0.01, deadline - time.monotonic())))
            channels[int.from_bytes(channel.recv(timeout=5.0), "big")] = channel
    return channels
