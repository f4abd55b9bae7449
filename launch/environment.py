"""The only place that reads environment variables: ours, and those by which torchrun introduces a rank.

Everything else is passed in :class:`~runtime.common.config.EngineConfig` or as an argument. Nothing here sets a
variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.common.errors import ConfigError

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Environment:
    """Our own variables, with their defaults filled in.

    Attributes:
        cache_dir: LOCKSTEP_CACHE_DIR, absolute; where the demo model and compiled code are kept. It may not exist yet.
        log_level: LOCKSTEP_LOG_LEVEL, the name of a level of ``logging``.
        fault: LOCKSTEP_FAULT, a fault to inject for tests; empty in earnest.
    """

    cache_dir: Path
    log_level: str
    fault: str


@dataclass(frozen=True)
class TorchrunRanks:
    """What torchrun tells a process it started.

    Attributes:
        rank: this process among all of them; rank 0 also drives.
        local_rank: this process among those of its host.
        world_size: how many processes there are.
        local_world_size: how many of them this host runs.
        master_addr: host of the rendezvous of all ranks.
        master_port: its TCP port.
        run_id: TORCHELASTIC_RUN_ID, the same for every rank of a run; empty without torchelastic.
        restart_count: how often torchrun has restarted the group before.
        agent_store: torchrun itself serves a TCP store at the rendezvous; otherwise rank 0 would have to.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    run_id: str
    restart_count: int
    agent_store: bool

    @property
    def one_host(self) -> bool:
        """Whether all of them run on this host."""
        return self.local_world_size == self.world_size


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Our variables as they are now. Raises :class:`ConfigError` for a value that cannot be used."""
    level = variables.get("LOCKSTEP_LOG_LEVEL", "").strip().upper() or "INFO"
    if level not in _LOG_LEVELS:
        raise ConfigError(f"LOCKSTEP_LOG_LEVEL is {level!r}; allowed: {', '.join(_LOG_LEVELS)}; set one or unset it")
    chosen = variables.get("LOCKSTEP_CACHE_DIR", "").strip() or "~/.cache/lockstep"
    try:
        cache_dir = Path(os.path.abspath(Path(chosen).expanduser()))
    except RuntimeError as error:
        raise ConfigError(f"no home folder to resolve {chosen!r} ({error}); set LOCKSTEP_CACHE_DIR") from error
    return Environment(cache_dir=cache_dir, log_level=level, fault=variables.get("LOCKSTEP_FAULT", "").strip())


def torchrun_ranks(variables: Mapping[str, str] = os.environ) -> TorchrunRanks | None:
    """What torchrun said about this process, or None if it did not start it (not all of its variables are set).

    Raises:
        ConfigError: a variable that should be a number is none, or the numbers contradict each other.
    """
    if not all(variables.get(name, "").strip() for name in TORCHRUN_VARIABLES):
        return None
    rank, local_rank = _number(variables, "RANK"), _number(variables, "LOCAL_RANK")
    world_size, local_world_size = _number(variables, "WORLD_SIZE"), _number(variables, "LOCAL_WORLD_SIZE")
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise ConfigError(
            f"RANK {rank} of WORLD_SIZE {world_size}, LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE {local_world_size} "
            "contradict each other; torchrun sets them right, or unset them all to run without it"
        )
    return TorchrunRanks(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=variables["MASTER_ADDR"].strip(),
        master_port=_number(variables, "MASTER_PORT"),
        run_id=variables.get("TORCHELASTIC_RUN_ID", "").strip(),
        restart_count=_number(variables, "TORCHELASTIC_RESTART_COUNT", "0"),
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE", "").strip().lower() == "true",
    )


def _number(variables: Mapping[str, str], name: str, default: str = "") -> int:
    value = variables.get(name, default).strip()
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r}; torchrun sets it to a whole number; unset it to run without torchrun")
    return int(value)
