"""RankActor: the Ray actor that runs one rank as its child process. Imports neither ray nor torch.

A process of its own gives the rank an exact exit code or signal, and keeps Ray's niceness and thread settings away
from it. The actor also watches its raylet, because Ray takes about 15 seconds to end the actors of a node whose raylet
has died.
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
"""The exit code of an actor whose raylet ended; logs show it."""


class RankActor:
    """One actor per rank, each in a placement-group bundle of its own."""

    def describe(self) -> bytes:
        """The actor's host, host identity and pid, packed."""
        return pack(["actor", socket.gethostname(), host_identity(), os.getpid()])

    def run(self, spec: bytes) -> int:
        """Run the rank until it ends; returns its return code, negative for a signal.

        Ray runs this in the actor's main thread, so the kernel kills the rank when the actor ends.
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
    """This process's parent, as an object that becomes readable when the parent ends.

    Raises:
        ProcessLookupError: the parent has ended.
    """

    def __init__(self) -> None:
        pid = os.getppid()
        self._pidfd = os.pidfd_open(pid)
        if os.getppid() != pid:  # It ended between the two calls; the pid may be reused.
            self.close()
            raise ProcessLookupError(f"process {pid}, which started this one, has ended")

    def fileno(self) -> int:
        """Readable once the parent has ended."""
        return self._pidfd

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._pidfd)
