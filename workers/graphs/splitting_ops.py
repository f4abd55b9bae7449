"""Which ops a stage of splitting ops calls, found without carrying any of them out.

The stage's function runs once on stand-ins for its inputs, in a mode that only notes each op down. So a rank can find
out alone, before there is a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Input:
    """The stage's input of this index, as an argument."""

    index: int


@dataclass(frozen=True)
class Result:
    """What the call of this index gave, as an argument."""

    call: int


@dataclass(frozen=True)
class OpCall:
    """One op with its positional arguments: :class:`Input`, :class:`Result`, or the value itself."""

    op: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class OpStage:
    """A stage of ops: the calls in order, and for each output of the stage the call that gives it."""

    calls: tuple[OpCall, ...]
    outputs: tuple[int, ...]


class _NotOnlyOps(Exception):
    """The stage does more than to pass its inputs on to ops."""


class _Lister(TorchDispatchMode):
    """Notes ops down and gives stand-ins for their results."""

    def __init__(self, inputs: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        # The tensors are kept, or another one could be given the identity of one that is gone.
        self.known: dict[int, tuple[torch.Tensor, Input | Result]] = {}
        for index, tensor in enumerate(inputs):
            if tensor is not None:
                self.known[id(tensor)] = (tensor, Input(index))
        self.calls: list[OpCall] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: see ``record.Recorder``."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note one op down."""
        returns = func._schema.returns
        if kwargs or len(returns) > 1 or any(not isinstance(given.type, torch.TensorType) for given in returns):
            raise _NotOnlyOps
        self.calls.append(OpCall(func, tuple(self._argument(argument) for argument in args)))
        if not returns:
            return None
        result = torch.empty(0)
        self.known[id(result)] = (result, Result(len(self.calls) - 1))
        return result

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            raise _NotOnlyOps
        return self.reference(argument) if isinstance(argument, torch.Tensor) else argument

    def reference(self, tensor: torch.Tensor) -> Input | Result:
        """Where a tensor comes from."""
        if id(tensor) not in self.known:
            raise _NotOnlyOps
        return self.known[id(tensor)][1]


def list_ops(run: Callable[[list[Any]], Sequence[Any]], inputs: Sequence[Any]) -> OpStage | None:
    """The ops that a stage calls; None if it does anything else, so that it can only be called as a whole.

    Args:
        run: the stage's function.
        inputs: its inputs that are known and no tensors; None for a tensor.
    """
    stand_ins = [torch.empty(0) if given is None else given for given in inputs]
    lister = _Lister([stand_in if given is None else None for stand_in, given in zip(stand_ins, inputs, strict=True)])
    try:
        with lister:
            outputs = run(list(stand_ins))
        sources = [lister.reference(output) for output in outputs]
    except _NotOnlyOps:
        return None
    if not all(isinstance(source, Result) for source in sources):
        return None
    return OpStage(tuple(lister.calls), tuple(source.call for source in sources if isinstance(source, Result)))
