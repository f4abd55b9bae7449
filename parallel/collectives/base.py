"""The interface of the collectives, their errors, and the base class of the host implementations.

``factory.py`` selects an implementation; layers and the sampler only use the group. Every implementation gives all
ranks the same bits. Host implementations sum in rank order with fp32 accumulation, so they agree bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import NamedTuple

import torch
from typing_extensions import override


class CollectiveError(RuntimeError):
    """A collective failed; no rank can use the group afterwards.

    Attributes:
        missing: the ranks that did not join or have left the group, ascending; empty where unknown.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class CollectiveTimeout(CollectiveError):
    """Some ranks did not join in time. The message names them, the operation and its number."""


class CollectiveMismatch(CollectiveError):
    """The ranks called different collectives: another operation, size, dtype, root or epoch."""


class Operation(IntEnum):
    """The collective operations, with the numbers that ``shm.c`` uses."""

    ALL_REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    BROADCAST = 4
    BARRIER = 5


REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that can be summed on the host."""

DTYPES = (
    torch.uint8,  # its number, 0, also stands for "none"
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.float64,
    torch.int8,
    torch.int16,
)
"""The dtypes that can be sent. The first four have the numbers that ``shm.c`` uses."""

_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class Collectives(ABC):
    """Collective operations of one group. Every rank calls the same ones, in the same order, from one thread.

    Attributes:
        backend: the name of the implementation.
        rank: this rank.
        size: the number of ranks.
        epoch: a number that host implementations compare across ranks in every collective. A worker sets it to its
            step id, so that a rank in another step causes a mismatch error.
    """

    backend: str = ""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.epoch = 0

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` over the ranks, as a new tensor. Raises :class:`CollectiveError`, as do all the others."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[size, *x.shape]``: the tensors of all ranks, which have equal shapes and dtypes."""

    @abstractmethod
    def gather(self, x: torch.Tensor, dst: int) -> torch.Tensor | None:
        """As ``all_gather``, on rank ``dst``; None on the others."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Rank ``src``'s tensor, as a new one. The other ranks pass any tensor of the same shape and dtype."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and release what it owns. May be called twice."""


class CollectiveCall(NamedTuple):
    """The parameters of one collective on one rank; they have to be equal on all ranks.

    Attributes:
        operation: the operation.
        dtype: index into :data:`DTYPES`.
        root: the source or destination rank, 0 where there is none.
        nbytes: of one rank's tensor.
        epoch: see :class:`Collectives`.
    """

    operation: Operation
    dtype: int
    root: int
    nbytes: int
    epoch: int

    def __str__(self) -> str:
        text = self.operation.name.lower()
        if self.operation is not Operation.BARRIER:
            text += f" of {self.nbytes} bytes of {str(DTYPES[self.dtype]).removeprefix('torch.')}"
        if self.operation in (Operation.GATHER, Operation.BROADCAST):
            text += f" with root {self.root}"
        return text + (f" in epoch {self.epoch}" if self.epoch else "")


def describe_mismatch(calls: dict[int, CollectiveCall], number: int) -> str:
    """The message of a :class:`CollectiveMismatch`, from the call of each rank."""
    by_call: dict[CollectiveCall, list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(rank)
    described = "; ".join(f"{format_ranks(ranks)} called {call}" for call, ranks in by_call.items())
    return (
        f"the ranks do not agree on collective {number}: {described}. One of them skipped or added a collective before"
    )


def format_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class HostCollectives(Collectives):
    """Base class of implementations in host memory: argument checks, staging of device tensors, outputs.

    A subclass provides :meth:`run`. A tensor on another device is copied to the host and the result back, which is slow
    and cannot be captured in a CUDA graph.
    """

    @abstractmethod
    def run(self, call: CollectiveCall, source: torch.Tensor, target: torch.Tensor | None) -> None:
        """Execute ``call``.

        Args:
            call: the operation and its parameters.
            source: this rank's tensor, contiguous, on the host.
            target: uninitialized memory for the result, None where this rank gets none; ``[size, *source.shape]`` for
                gathers, else the shape of ``source``.
        """

    @override
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in REDUCIBLE:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE)
            raise ValueError(f"all_reduce sums {names}; rank {self.rank} passed {x.dtype}")
        return _require_result(self._call(Operation.ALL_REDUCE, x, 0, x.shape))

    @override
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return _require_result(self._call(Operation.ALL_GATHER, x, 0, (self.size, *x.shape)))

    @override
    def gather(self, x: torch.Tensor, dst: int) -> torch.Tensor | None:
        shape = (self.size, *x.shape) if self.rank == dst else None
        return self._call(Operation.GATHER, x, dst, shape)

    @override
    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        return _require_result(self._call(Operation.BROADCAST, x, src, x.shape))

    @override
    def barrier(self) -> None:
        self._call(Operation.BARRIER, torch.empty(0, dtype=torch.uint8, device="cpu"), 0, None)

    def _call(
        self, operation: Operation, x: torch.Tensor, root: int, shape: tuple[int, ...] | None
    ) -> torch.Tensor | None:
        if not 0 <= root < self.size:
            raise ValueError(f"{operation.name.lower()} with root {root}; the ranks are 0 to {self.size - 1}")
        number = _DTYPE_NUMBERS.get(x.dtype)
        if number is None:
            raise ValueError(
                f"rank {self.rank} passed {x.dtype} to {operation.name.lower()}, which does not support it"
            )
        source = x if x.is_cpu else x.to("cpu")
        if not source.is_contiguous():
            source = source.contiguous()
        target = None if shape is None else torch.empty(shape, dtype=x.dtype, device="cpu")
        self.run(CollectiveCall(operation, number, root, source.nbytes, self.epoch), source, target)
        return target if target is None or x.is_cpu else target.to(x.device)


def _require_result(result: torch.Tensor | None) -> torch.Tensor:
    if result is None:
        raise CollectiveError("internal error: a collective with a result on every rank returned none")
    return result
