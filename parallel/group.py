"""The tensor-parallel group: rank, size and collectives, as layers use them.

``all_reduce`` and ``all_gather`` are opaque ops keyed by the group's *name*, so that a traced graph contains neither a
rank nor a process group and is the same on every rank. The ops look the group up in the registry below, the only
mutable state of this module. The implementations are in ``parallel/collectives/``.
"""

from __future__ import annotations

import torch

from parallel.collectives.base import Collectives
from parallel.collectives.factory import open_collectives
from parallel.group_spec import GroupSpec
from parallel.library import dispatch_keys, register_op

_GROUPS: dict[str, TensorParallelGroup] = {}
"""Open groups by name: an op's schema cannot contain a group."""


class TensorParallelGroup:
    """The ranks over which one model is sharded.

    Every rank makes the same calls in the same order, from one thread. With one rank there is no communication.

    Attributes:
        name: see :class:`GroupSpec`.
        rank: this rank, from 0.
        size: the number of ranks.
        device: of this rank.
        collectives: the implementation; None with one rank. Fault injection replaces it by a wrapper.
    """

    def __init__(
        self, name: str, rank: int, size: int, device: torch.device, collectives: Collectives | None = None
    ) -> None:
        if (collectives is None) != (size == 1):
            raise ValueError(f"group {name!r} of {size}: collectives are for groups of two or more ranks")
        self.name = name
        self.rank = rank
        self.size = size
        self.device = device
        self.collectives = collectives
        if collectives is not None:
            if name in _GROUPS:
                raise ValueError(f"this process already has a group {name!r}; close it first or choose another name")
            _GROUPS[name] = self

    @property
    def backend(self) -> str:
        """The name of the implementation in use, "none" with one rank."""
        return "none" if self.collectives is None else self.collectives.backend

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` over the ranks, a new tensor of the same shape and dtype; with one rank ``x`` itself.

        Rank-order sum with fp32 accumulation, the same bits on every rank. Traceable.

        Raises:
            CollectiveError: a rank did not join, or joined another collective. The group is unusable afterwards.
        """
        return x if self.size == 1 else torch.ops.lockstep.all_reduce(x, self.name)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[size, *x.shape]``, the ``x`` of every rank; shapes and dtypes have to be equal. Traceable."""
        return x.unsqueeze(0) if self.size == 1 else torch.ops.lockstep.all_gather(x, self.size, self.name)

    def gather(self, x: torch.Tensor, dst: int = 0) -> torch.Tensor | None:
        """``[size, *x.shape]`` on rank ``dst``, None on the others."""
        return x.unsqueeze(0) if self.collectives is None else self.collectives.gather(x, dst)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Rank ``src``'s tensor, on every rank. The others pass a tensor of that shape and dtype."""
        return x if self.collectives is None else self.collectives.broadcast(x, src)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        if self.collectives is not None:
            self.collectives.barrier()

    def set_epoch(self, epoch: int) -> None:
        """Set the step (0 to 2**63 - 1) of the following collectives: ranks in different steps raise an error."""
        if self.collectives is not None:
            self.collectives.epoch = epoch

    def close(self) -> None:
        """Leave the group and free its name. May be called twice."""
        if self.collectives is not None:
            self.collectives.close()
            if _GROUPS.get(self.name) is self:
                del _GROUPS[self.name]


def single_rank_group(device: torch.device) -> TensorParallelGroup:
    """A group of one rank, which needs no communication."""
    return TensorParallelGroup("single", 0, 1, device)


def init_group(spec: GroupSpec, device: torch.device) -> TensorParallelGroup:
    """Join a group. Every rank of the group calls it at about the same time.

    Args:
        spec: equal on all ranks but for ``rank``.
        device: of this rank; a CUDA device has to be the current one.

    Raises:
        CollectiveTimeout: some ranks did not join.
        CollectiveError: the group cannot be set up (no space in /dev/shm, no compiler for an explicit "shm", ...).
    """
    if spec.size == 1:
        return TensorParallelGroup(spec.name, spec.rank, 1, device)
    return TensorParallelGroup(spec.name, spec.rank, spec.size, device, open_collectives(spec, device))


def get_group(name: str) -> TensorParallelGroup:
    """The open group of that name.

    Raises:
        ValueError: no group of that name is open.
    """
    try:
        return _GROUPS[name]
    except KeyError:
        known = ", ".join(sorted(_GROUPS)) or "none"
        raise ValueError(f"no group {name!r} is open in this process (open: {known}); call init_group first") from None


def _collectives(name: str) -> Collectives:
    collectives = get_group(name).collectives
    if collectives is None:
        raise ValueError(f"group {name!r} has one rank and no collectives")
    return collectives


def _all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return _collectives(group_name).all_reduce(x)


def _all_reduce_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def _all_gather(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return _collectives(group_name).all_gather(x)


def _all_gather_fake(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return x.new_empty((group_size, *x.shape))


register_op("all_reduce", _all_reduce, fake=_all_reduce_fake, dispatch_key=dispatch_keys())
register_op("all_gather", _all_gather, fake=_all_gather_fake, dispatch_key=dispatch_keys())
