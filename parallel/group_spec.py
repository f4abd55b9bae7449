"""The configuration of one rank of a tensor-parallel group. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

BACKENDS = ("auto", "shm", "gloo", "nccl")
"""Implementations of the collectives by name; "auto" selects the fastest that the device and the hosts support."""


@dataclass(frozen=True)
class GroupSpec:
    """What one rank needs to join a group. Plain values, so that a launcher can send it.

    Attributes:
        name: of the group in compiled graphs; the same in every run ("tp"), unique within a process.
        rank: this rank.
        size: the number of ranks.
        init_method: the rendezvous of a backend that needs a store: ``file:///path`` (one host) or
            ``tcp://host:port``, where rank 0 listens.
        backend: "auto", "shm", "gloo" or "nccl".
        same_host: whether all ranks run on one host; then nothing listens outside loopback.
        run_id: ``lockstep-<pid>-<anything>`` or ``<pid>-<anything>``, with the pid of the driver (or of rank 0),
            different for each start of a group. Shared-memory names contain it; names with a dead pid are removed.
        timeout: seconds a rank waits for the others at the rendezvous and in one collective.
        library_dir: where compiled C libraries are cached.

    Raises:
        ValueError: a rank outside the group, an unknown backend, or a timeout that is not positive.
    """

    name: str
    rank: int
    size: int
    init_method: str
    backend: str = "auto"
    same_host: bool = True
    run_id: str = ""
    timeout: float = 60.0
    library_dir: str = ""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"group {self.name!r} has rank {self.rank} of {self.size}; ranks are 0 to size - 1")
        if self.backend not in BACKENDS:
            raise ValueError(f"group {self.name!r} has backend {self.backend!r}; known: {', '.join(BACKENDS)}")
        if not self.timeout > 0:
            raise ValueError(f"group {self.name!r} has a timeout of {self.timeout} s; it must be positive")
