"""LocalLauncher: ranks as child processes on this host, and :func:`spawn_rank`, with which every launcher starts one.

A Ray actor or a torchrun process does not become a rank itself. It spawns the rank and watches the child, so the exit
code or signal of every rank is known.
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
    """A child process that runs a rank. Implements ``runtime.executor.launcher.RankHandle``."""

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
        """Send a signal; ignored if the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self._process.kill()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the process to end and reap it; None waits without limit. Whether it has ended."""
        if self._process.poll() is None and not wait_readable([self], timeout):
            return False
        self._process.wait()
        return True

    def close(self) -> None:
        """Close the descriptor; the process must have ended."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def spawn_rank(spec: RankSpec) -> tuple[RankProcess, Channel]:
    """Start one rank on this host and send it its spec.

    Returns:
        the process, and this end of the socket pair, which is the rank's channel unless the spec names an address.
    """
    channel, theirs = channel_pair()
    # -P keeps the working directory off sys.path: a user's file named `workers.py` must not shadow the package.
    command = [sys.executable, "-P", "-m", "launch.rank_main", "--rank", str(spec.rank)]
    command += ["--fd", str(theirs.fileno())]
    if threading.current_thread() is threading.main_thread():
        # PR_SET_PDEATHSIG fires at the end of the parent *thread*, so only the main thread can use it.
        command += ["--parent", str(os.getpid())]
    with theirs:
        # Standard output carries the driver's results, so prints of a rank's libraries go to stderr.
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
    """One child process per rank, connected by a socket pair. Implements ``runtime.executor.launcher.Launcher``."""

    name = "local"
    supports_restart = True
    restart_hint = ""

    def start(self, config: EngineConfig, model: ModelConfig, timeout: float) -> list[StartedRank]:
        """Start every rank, in rank order."""
        del timeout  # Starting a child does not block.
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
        """Nothing to release: a start holds only its ranks."""

    def close(self) -> None:
        """Nothing to release."""
