"""Ranks as child processes of this one: the local launcher, and the way every launcher starts a rank on its host.

A Ray actor and a torchrun process do not become a rank themselves: they call :func:`spawn_rank` and watch the child, so
that whatever happens to a rank, its exit code or signal is known and a rank can be started again. Deciding what a
death means is ``supervisor.py``'s.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from launch.environment import rank_environment
from launch.rank_spec import RankSpec, host_identity, make_rank_specs
from runtime.common.channel import Channel, channel_pair, wait_readable
from runtime.common.config import EngineConfig
from runtime.common.model_config import ModelConfig
from runtime.executor.launcher import StartedRank

SOURCE_ROOT = Path(__file__).resolve().parent.parent


class RankProcess:
    """A rank's process on this host, as its parent sees it. Implements ``ranks.RankHandle``."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.host = socket.gethostname()
        self.pid: int | None = process.pid
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        """Readable once the process has ended."""
        return self._pidfd

    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process."""
        self._process.kill()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end and reap it; None waits for ever. False if it still runs after ``timeout`` seconds."""
        if self._process.poll() is None and not wait_readable([self], timeout):
            return False
        self._process.wait()
        return True

    def close(self) -> None:
        """Give the descriptor back; the process must have ended."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def spawn_rank(spec: RankSpec) -> tuple[RankProcess, Channel]:
    """Start one rank on this host and send it its spec.

    Returns:
        the process, and our end of the socket pair: the rank's channel unless the spec names another address.
    """
    channel, theirs = channel_pair()
    # -P keeps a user's working folder off sys.path: a file of theirs called `workers.py` must not shadow ours.
    command = [sys.executable, "-P", "-m", "launch.rank_main", "--rank", str(spec.rank)]
    command += ["--fd", str(theirs.fileno())]
    if threading.current_thread() is threading.main_thread():
        # The kernel ties this to the parent *thread*: from any other thread it would end ranks that are still wanted.
        command += ["--parent", str(os.getpid())]
    with theirs:
        # Standard output belongs to the driver (JSON lines); whatever a library of a rank prints goes to stderr.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            env=rank_environment(SOURCE_ROOT),
        )
    channel.send(spec.pack())
    return RankProcess(spec.rank, process), channel


class LocalLauncher:
    """One spawned process per rank on this host. Implements ``ranks.Launcher``; nothing listens anywhere."""

    name = "local"
    supports_restart = True
    restart_hint = ""

    def start(self, config: EngineConfig, model: ModelConfig, timeout: float) -> list[StartedRank]:
        """Start every rank, in rank order; each will say hello on its channel."""
        del timeout  # Starting a child does not wait for anything.
        hosts = [host_identity()] * config.tensor_parallel_size
        started: list[StartedRank] = []
        try:
            for spec in make_rank_specs(config, model, hosts):
                started.append(StartedRank(*spawn_rank(spec)))
        except BaseException:
            for rank in started:
                rank.handle.kill()
                rank.handle.wait(5.0)
                rank.channel.close()
                rank.handle.close()
            raise
        return started

    def release(self) -> None:
        """Nothing beyond the ranks themselves."""

    def close(self) -> None:
        """Nothing here either."""
