"""Launcher: the interface between the executor and the code in ``launch/`` that makes the ranks' processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.common.channel import Channel
from runtime.common.config import EngineConfig
from runtime.common.model_config import ModelConfig


class RankHandle(Protocol):
    """Controls one rank's process.

    Attributes:
        rank: the rank's number.
        host: name of its host.
        pid: process id on that host; None until the rank has sent hello.
    """

    rank: int
    host: str
    pid: int | None

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        ...

    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs or where the code is unknown."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal, if the launcher supports it for this rank."""

    def kill(self) -> None:
        """End the process unconditionally."""

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the process to end; whether it has ended."""
        ...

    def close(self) -> None:
        """Release the handle's resources."""


@dataclass(frozen=True)
class StartedRank:
    """A rank's process and its channel. The rank sends hello as soon as it runs."""

    handle: RankHandle
    channel: Channel


class Launcher(Protocol):
    """Makes the processes of one worker group after another.

    Attributes:
        name: the value of ``distributed_executor_backend``.
        supports_restart: whether another worker group can be started after one has failed.
        restart_hint: if not, what the user does instead.
    """

    name: str
    supports_restart: bool
    restart_hint: str

    def start(self, config: EngineConfig, model: ModelConfig, timeout: float) -> list[StartedRank]:
        """Start every rank within ``timeout`` seconds; returns them in rank order."""
        ...

    def release(self) -> None:
        """Release what the last start holds beyond its ranks, which have ended. Another start may follow."""

    def close(self) -> None:
        """Release everything. No start follows."""
