"""The Ray actor that stands for one rank on its node; imports neither ray nor torch itself.

It is placed by Ray, starts the rank as its child and reports how the child ended. The rank runs in a process of its
own so that its exit code or signal is known exactly, and so that Ray's niceness and thread settings stay outside.
"""

from __future__ import annotations

import os
import socket

from launch.local import spawn_rank
from launch.rank_process import Orders, host_identity
from runtime.protocol import pack


class RankActor:
    """One per rank, in a placement-group bundle of its own."""

    def describe(self) -> bytes:
        """Where this actor landed: host, what it shares memory with, and the actor's pid."""
        return pack(["actor", socket.gethostname(), host_identity(), os.getpid()])

    def run(self, orders: bytes) -> int:
        """Start the rank and wait for its end; gives its return code, negative for a signal.

        The child dies with this process (it is started from the main thread), so killing the actor ends the rank.
        """
        process, channel = spawn_rank(Orders.unpacked(orders))
        process.wait(None)
        channel.close()
        code = process.returncode()
        process.close()
        return -1 if code is None else code
