"""The Ray actor that stands for one rank on its node; imports neither ray nor torch itself.

It is placed by Ray, starts the rank as its child and reports how the child ended. The rank runs in a process of its
own so that its exit code or signal is known exactly, and so that Ray's niceness and thread settings stay outside.
Ray itself takes some 15 seconds to end the actors of a node whose raylet died; so the actor watches its raylet too.
"""

from __future__ import annotations

import contextlib
import os
import socket

from launch.local import spawn_rank
from launch.rank_spec import RankSpec, host_identity
from runtime.common.channel import wait_readable
from runtime.common.protocol import pack

RAYLET_GONE_EXIT_CODE = 71
"""The exit code of an actor whose raylet ended; nobody is left to read it, but logs show it."""


class RankActor:
    """One per rank, in a placement-group bundle of its own."""

    def describe(self) -> bytes:
        """Where this actor landed: host, what it shares memory with, and the actor's pid."""
        return pack(["actor", socket.gethostname(), host_identity(), os.getpid()])

    def run(self, spec: bytes) -> int:
        """Start the rank and wait for its end; gives its return code, negative for a signal.

        The child dies with this process (it is started from the main thread), so killing the actor ends the rank.
        """
        with contextlib.closing(_Parent()) as raylet:
            process, channel = spawn_rank(RankSpec.unpack(spec))
            if process not in wait_readable([process, raylet], None):
                process.kill()
                os._exit(RAYLET_GONE_EXIT_CODE)
        process.wait(None)
        channel.close()
        code = process.returncode()
        process.close()
        return -1 if code is None else code


class _Parent:
    """The process that started this one, as something to wait for.

    Raises:
        ProcessLookupError: it has ended.
    """

    def __init__(self) -> None:
        pid = os.getppid()
        self._pidfd = os.pidfd_open(pid)
        if os.getppid() != pid:  # It ended between the two calls: its number may be somebody else's by now.
            self.close()
            raise ProcessLookupError(f"process {pid}, which started this one, has ended")

    def fileno(self) -> int:
        """Readable once it has ended."""
        return self._pidfd

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._pidfd)
