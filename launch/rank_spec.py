"""RankSpec: everything a rank's process needs to start, and the host identity that ranks are grouped by.

Every launcher makes one RankSpec per rank and sends it as the first frame on the socket that the rank inherits.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runtime.common.config import EngineConfig
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import pack, unpack


@dataclass(frozen=True)
class RankSpec:
    """The start-up parameters of one rank.

    Attributes:
        rank, size: rank and size of the tensor-parallel group.
        local_rank, ranks_on_host: rank and number of ranks on this host.
        threads: CPU threads; 0 means an equal share of the host's cores, computed by the rank itself.
        address: the driver's listener, or "" if the inherited socket itself is the channel.
        secret: the run's secret, for the handshake at ``address``.
        config, model: fields of the resolved EngineConfig and of the ModelConfig.
    """

    rank: int
    size: int
    local_rank: int
    ranks_on_host: int
    threads: int
    address: str
    secret: bytes
    config: dict[str, Any]
    model: dict[str, Any]

    def pack(self) -> bytes:
        """The frame that carries this spec."""
        return pack(["rank_spec", asdict(self)])

    @classmethod
    def unpack(cls, frame: bytes) -> RankSpec:
        """The inverse of :meth:`pack`."""
        return cls(**unpack(frame)[1])


def make_rank_specs(
    config: EngineConfig, model: ModelConfig, hosts: Sequence[str], address: str = "", secret: bytes = b""
) -> list[RankSpec]:
    """The specs of all ranks, in rank order.

    Args:
        config: resolved, the same for all ranks.
        model: the same for all ranks.
        hosts: each rank's :func:`host_identity`, in rank order.
        address: the driver's listener; "" if ranks inherit their channel.
        secret: for the handshake at ``address``.
    """
    return [
        RankSpec(
            rank=rank,
            size=len(hosts),
            local_rank=list(hosts[:rank]).count(host),
            ranks_on_host=list(hosts).count(host),
            threads=config.threads_per_rank or 0,
            address=address,
            secret=secret,
            config=config.to_dict(),
            model=model.to_dict(),
        )
        for rank, host in enumerate(hosts)
    ]


def host_identity() -> str:
    """A string that is equal for two processes if they share a kernel and /dev/shm, so shared memory works."""
    boot = "?"
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    shm = os.stat("/dev/shm") if os.path.isdir("/dev/shm") else None
    return f"{socket.gethostname()}/{boot}/{shm.st_dev if shm else 0}"
