"""Environment variables: the only module that reads or sets them.

Lockstep's own variables and those of Ray and CUDA that it evaluates are in :class:`Environment`, torchrun's in
:class:`TorchrunRanks`. Everything else receives values through :class:`~runtime.common.config.EngineConfig` or as
arguments. The functions at the end set variables for libraries that read them, before those are imported, and make
the environment of child processes. Ruff bans ``os.environ`` in every other module of the product.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from runtime.common.errors import ConfigError
from runtime.common.log import LEVELS

API_KEY_VARIABLE = "LOCKSTEP_API_KEY"
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Environment:
    """The variables that the driver evaluates, with defaults filled in.

    Attributes:
        cache_dir: LOCKSTEP_CACHE_DIR, absolute: the demo model and compiled code. The folder may not exist yet.
        log_level: LOCKSTEP_LOG_LEVEL, the name of a level of ``logging``.
        fault: LOCKSTEP_FAULT, a fault to inject in tests; "" in production.
        api_key: LOCKSTEP_API_KEY, the server's key; None if it is not set.
        ray_address: RAY_ADDRESS, the Ray cluster to use; "" if it is not set.
        cuda_visible_devices: CUDA_VISIBLE_DEVICES; None if it is not set. "" hides every device.
    """

    cache_dir: Path
    log_level: str
    fault: str
    api_key: str | None = None
    ray_address: str = ""
    cuda_visible_devices: str | None = None


@dataclass(frozen=True)
class TorchrunRanks:
    """The place of this process among those that torchrun started.

    Attributes:
        rank: global rank; rank 0 is also the driver.
        local_rank: rank on this host.
        world_size: number of processes on all hosts.
        local_world_size: number of processes on this host.
        master_addr: host of torchrun's rendezvous.
        master_port: its TCP port.
        run_id: TORCHELASTIC_RUN_ID, the same for every rank of a run; "" without torchelastic.
        restart_count: restarts of the group by torchrun so far.
        agent_store: whether torchrun itself serves a TCP store at the rendezvous; otherwise rank 0 has to.
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
        """Whether all processes run on this host."""
        return self.local_world_size == self.world_size


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """The variables' current values. Raises :class:`ConfigError` for a value that cannot be used."""
    level = variables.get("LOCKSTEP_LOG_LEVEL", "").strip().upper() or "INFO"
    if level not in LEVELS:
        raise ConfigError(f"LOCKSTEP_LOG_LEVEL is {level!r}; allowed: {', '.join(LEVELS)}; set one or unset it")
    chosen = variables.get("LOCKSTEP_CACHE_DIR", "").strip() or "~/.cache/lockstep"
    try:
        cache_dir = Path(os.path.abspath(Path(chosen).expanduser()))
    except RuntimeError as error:
        raise ConfigError(f"no home folder to resolve {chosen!r} ({error}); set LOCKSTEP_CACHE_DIR") from error
    return Environment(
        cache_dir=cache_dir,
        log_level=level,
        fault=variables.get("LOCKSTEP_FAULT", "").strip(),
        api_key=variables.get(API_KEY_VARIABLE),
        ray_address=variables.get("RAY_ADDRESS", ""),
        cuda_visible_devices=variables.get("CUDA_VISIBLE_DEVICES"),
    )


def torchrun_ranks(variables: Mapping[str, str] = os.environ) -> TorchrunRanks | None:
    """This process's place under torchrun, or None if one of torchrun's variables is missing.

    Raises:
        ConfigError: a variable is not a number, or the numbers contradict each other.
    """
    if not all(variables.get(name, "").strip() for name in TORCHRUN_VARIABLES):
        return None
    rank, local_rank = _number(variables, "RANK"), _number(variables, "LOCAL_RANK")
    world_size, local_world_size = _number(variables, "WORLD_SIZE"), _number(variables, "LOCAL_WORLD_SIZE")
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise ConfigError(
            f"RANK {rank} of WORLD_SIZE {world_size}, LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE {local_world_size} "
            "contradict each other; torchrun sets consistent values; unset them all to run without torchrun"
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


def rank_environment(source_root: Path, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a rank's process: this one's, with Lockstep's source first on the module path."""
    path = [str(source_root), *filter(None, [variables.get("PYTHONPATH")])]
    return {**variables, "PYTHONPATH": os.pathsep.join(path)}


def prepare_rank(*, threads: int, device: str, variables: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch reads when it is imported; called in a rank's process before that.

    Args:
        threads: CPU threads of this rank.
        device: "cpu" or "cuda"; on "cpu", CUDA devices are hidden from torch.
        variables: changed in place.
    """
    variables["OMP_NUM_THREADS"] = str(threads)
    variables.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch then asks for huge pages: weights read 3 to 10 % faster.
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""


def prepare_ray(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set the defaults of an embedded Ray cluster; called before Ray is imported."""
    variables.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    variables.setdefault("RAY_worker_niceness", "0")  # Ray's default runs every worker process at nice 15.


def prepare_torchrun(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set the defaults of torchrun's agent in this process; called before torchrun reads its configuration."""
    variables.setdefault("OMP_NUM_THREADS", "1")  # For the agents only; torchrun warns if it is not set.


def disable_torchrun_store(variables: MutableMapping[str, str] = os.environ) -> None:
    """Keep torchrun's agent from opening a TCP store: the rendezvous is a file."""
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
