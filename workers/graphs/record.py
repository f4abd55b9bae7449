"""Records the ops of one eager forward pass, as the dispatcher sees them, for ``tape.py`` to replay.

A tensor is known by its storage. What a recorded op produced is a *value* and is described by :class:`Place`;
everything else (parameters, static inputs) is kept as it is. Ops that only make views vanish: later ops know the
geometry of what they read. Exchanges between ranks are not carried out, so that a rank can record, and fail, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.common.errors import EngineError

UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Ops that only give memory, which a tape has already."""

COPIES = ("to", "_to_copy", "clone", "contiguous", "reshape", "flatten")
"""Ops whose result, where it is no view, may be a copy of their first argument, perhaps in another dtype or shape."""

EXCHANGES: dict[str, Callable[..., torch.Tensor]] = {
    "lockstep::all_reduce": lambda x, group_name: x.clone(memory_format=torch.contiguous_format),
    "lockstep::all_gather": lambda x, group_size, group_name: x.new_zeros((group_size, *x.shape)),
}
"""What stands for the result of an exchange (see ``parallel/group.py``) while recording."""


class RecordError(EngineError):
    """A forward pass did something that a replay could not repeat; the message names the op."""


@dataclass(frozen=True)
class Place:
    """A tensor within a recorded value.

    Attributes:
        value: index of the value.
        offset: in elements, from the start of the value.
    """

    value: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


Into = Callable[..., Any]
"""Computes an op into an existing tensor: called with the op's arguments and ``out=``."""


@dataclass(frozen=True)
class Call:
    """One op to repeat.

    Attributes:
        op: the overload.
        args: as the op got them, with a :class:`Place` where a tensor is part of a value.
        kwargs: likewise.
        results: the new values it makes; empty for an op that only writes its arguments.
        positions: which of the tensors in what it returns those are.
        into: computes the one result into an existing tensor with the same bits; None: call ``op``, copy its results.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Place, ...]
    positions: tuple[int, ...] = ()
    into: Into | None = None


@dataclass
class Recording:
    """A forward pass as a list of calls.

    Attributes:
        calls: in order.
        sizes: bytes of each value.
        result: the tensor that the pass returned.
        outside: storages that it read or wrote and did not make.
    """

    calls: list[Call] = field(default_factory=list[Call])
    sizes: list[int] = field(default_factory=list[int])
    result: Place | torch.Tensor | None = None
    outside: set[int] = field(default_factory=set[int])


class Recorder(TorchDispatchMode):
    """Records while it is the active mode; :func:`record` is the way to use it."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        # A weak reference keeps a storage's identity from being given to another one, but not its memory.
        self._values: dict[int, tuple[int, StorageWeakRef]] = {}
        self._kept: list[torch.Tensor] = []
        self._proven: dict[Any, Into | None] = {}
        self._generator = torch.Generator().manual_seed(0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, or torch would wrap the method below in a way that imports its whole compiler, a second's work."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op and note it down."""
        kwargs = kwargs or {}
        _refuse_what_depends_on_data(func)
        exchange = EXCHANGES.get(func._schema.name)
        result = func(*args, **kwargs) if exchange is None else exchange(*args)
        given = {_storage(tensor) for tensor in tensors_in((args, kwargs))}
        made = {at: tensor for at, tensor in enumerate(tensors_in(result)) if self._is_new(tensor, given)}
        if func._schema.name.removeprefix("aten::") in UNINITIALISED:
            for tensor in made.values():
                self._add_value(tensor)
        elif made or func._schema.is_mutable or not tensors_exist(result):
            # Arguments first: what an op writes in place is one of them.
            placed_args, placed_kwargs = self.place(args), self.place(kwargs)
            into = self._find_into(func, args, kwargs, list(made.values()))
            results = tuple(self._add_value(tensor) for tensor in made.values())
            self.recording.calls.append(Call(func, placed_args, placed_kwargs, results, tuple(made), into))
        return result

    def place(self, argument: Any) -> Any:
        """An argument with a :class:`Place` for every tensor that is part of a value."""
        if isinstance(argument, torch.Tensor):
            key = _storage(argument)
            if key not in self._values:
                self.recording.outside.add(key)
                self._kept.append(argument)
                return argument
            return _place_of(argument, self._values[key][0])
        if isinstance(argument, (list, tuple)):
            return type(argument)(self.place(item) for item in argument)
        if isinstance(argument, dict):
            return {name: self.place(item) for name, item in argument.items()}
        return argument

    def _is_new(self, tensor: torch.Tensor, given: set[int]) -> bool:
        """Whether the op that gave ``tensor`` made its memory too. ``given``: the storages of its arguments."""
        key = _storage(tensor)
        return key not in self._values and key not in given

    def _add_value(self, tensor: torch.Tensor) -> Place:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._values:
            self._values[storage._cdata] = (len(self.recording.sizes), StorageWeakRef(storage))
            self.recording.sizes.append(storage.nbytes())
        return _place_of(tensor, self._values[storage._cdata][0])

    def _find_into(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[torch.Tensor]
    ) -> Into | None:
        """How to compute an op's one result into given memory, proven once for each geometry."""
        one = len(made) == 1 and made[0].numel() > 0
        if not one or func._schema.is_mutable or func._schema.name in EXCHANGES:
            return None
        key = (func, _signature(args), _signature(kwargs))
        if key not in self._proven:
            ways = tuple(_ways_to_compute_into(func))
            self._proven[key] = self._first_proven(ways, func, args, kwargs) if ways else None
        return self._proven[key]

    def _first_proven(
        self, ways: Sequence[Into], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Into | None:
        trial = self._with_noise(args)
        expected = func(*trial, **kwargs)
        return next((way for way in ways if _proves(way, trial, kwargs, expected)), None)

    def _with_noise(self, argument: Any) -> Any:
        """Arguments with random numbers for what ops have computed, as the batch that is recorded is mostly zeros."""
        if isinstance(argument, torch.Tensor):
            dense = all(stride > 0 for stride in argument.stride())
            if _storage(argument) not in self._values or not argument.is_floating_point() or not dense:
                return argument
            noise = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)
            return noise.normal_(generator=self._generator)
        if isinstance(argument, (list, tuple)):
            return type(argument)(self._with_noise(item) for item in argument)
        return argument


def record(forward: Callable[[], torch.Tensor]) -> Recording:
    """Run ``forward`` once and give what it did.

    Raises:
        RecordError: it read a tensor's value on the host, or an op's result has a shape that depends on values.
    """
    recorder = Recorder()
    with recorder:
        result = forward()
    recorder.recording.result = recorder.place(result)
    return recorder.recording


def tensors_in(argument: Any) -> Iterator[torch.Tensor]:
    """All tensors in an op's arguments or results."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from tensors_in(item)
    elif isinstance(argument, dict):
        yield from tensors_in(tuple(argument.values()))


def tensors_exist(argument: Any) -> bool:
    """Whether there is a tensor in it."""
    return next(tensors_in(argument), None) is not None


def _refuse_what_depends_on_data(func: Any) -> None:
    """Refuse an op that gives a number, not a tensor, or a tensor of as many elements as values say."""
    gives_number = any(
        not isinstance(returned.type, (torch.TensorType, torch.ListType)) for returned in func._schema.returns
    )
    if gives_number or torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        raise RecordError(
            f"the model called {func}, whose result depends on the values of a tensor; a replay cannot follow that. "
            "Write the model without it, or set cudagraph_mode NONE"
        )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place_of(tensor: torch.Tensor, value: int) -> Place:
    return Place(value, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _ways_to_compute_into(func: Any) -> Iterator[Into]:
    """Functions that may compute what ``func`` does into ``out=``, quickest first.

    torch's own Python functions parse their arguments in half the time that calling an overload takes.
    """
    name = func._schema.name
    if name.removeprefix("aten::") in COPIES:
        yield copy_into
    if name.startswith("aten::"):
        for module in (torch, torch._C._nn):  # pyright: ignore[reportAttributeAccessIssue]
            function = getattr(module, name.removeprefix("aten::"), None)
            if function is not None:
                yield function
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        if any(argument.is_out for argument in candidate._schema.arguments):
            yield candidate


def _proves(way: Into, args: tuple[Any, ...], kwargs: dict[str, Any], expected: torch.Tensor) -> bool:
    """Whether a function computes ``expected``, bit for bit, in the memory it is given."""
    out = torch.empty_strided(expected.shape, expected.stride(), dtype=expected.dtype, device=expected.device)
    memory = out.data_ptr()
    try:
        way(*args, **kwargs, out=out)
    except (TypeError, RuntimeError, ValueError):
        return False  # It takes other arguments, or no out=: the next one is tried.
    return out.data_ptr() == memory and out.stride() == expected.stride() and _same_bits(out, expected)


def copy_into(source: torch.Tensor, *_: Any, out: torch.Tensor) -> None:
    """What :data:`COPIES` do, into given memory; the other arguments only say how that is laid out."""
    out.view(source.shape).copy_(source)


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    flat = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, expected))
    return torch.equal(*flat)


def _signature(argument: Any) -> Any:
    """What decides how an op computes: geometry of tensors, values of everything else."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, tuple(argument.shape), argument.stride()
    if isinstance(argument, (list, tuple)):
        return tuple(_signature(item) for item in argument)
    if isinstance(argument, dict):
        return tuple((name, _signature(item)) for name, item in argument.items())
    return argument
