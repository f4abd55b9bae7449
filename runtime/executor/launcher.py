"""What a launcher makes: a process and a channel for every rank. ``supervisor.py`` watches them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.common.channel import Channel
from runtime.common.config import EngineConfig
from runtime.common.model_config import ModelConfig


class RankHandle(Protocol):
    """A rank's process as the launcher that made it can see and end it."""

    rank: int
    host: str
    pid: int | None

    def fileno(self) -> int:
        """A descriptor that becomes readable once the process has ended."""
        ...

    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs or where it cannot be known."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal where the launcher can."""

    def kill(self) -> None:
        """End the process for certain."""

    def wait(self, timeout: float) -> bool:
        """Wait for its end, at most ``timeout`` seconds; whether it has ended."""
        ...

    def close(self) -> None:
        """Release what the handle holds."""


@dataclass(frozen=True)
class StartedRank:
    """A rank's process and its channel, which may still be silent."""

    handle: RankHandle
    channel: Channel


class Launcher(Protocol):
    """A way to make processes, one worker group after another.

    Attributes:
        name: as ``distributed_executor_backend`` has it.
        supports_restart: whether another worker group can be started after one has failed.
        restart_hint: if not, what the user does instead.
    """

    name: str
    supports_restart: bool
    restart_hint: str

    def start(self, config: EngineConfig, model: ModelConfig, timeout: float) -> list[StartedRank]:
        """Start every rank within ``timeout`` seconds and give them in rank order."""
        ...

    def release(self) -> None:
        """Give back what the last start took beyond its ranks (they are gone by then). Another start may follow."""

    def close(self) -> None:
        """Release everything; no start follows."""
