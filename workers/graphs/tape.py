"""A recorded forward pass bound to fixed memory: a flat list of prepared calls.

Every tensor is resolved when the tape is made: results lie in the shared arena, views are views of it. Replaying runs
the calls one after another; no module, no model code and no memory allocation is left but what an op does inside.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from workers.graphs.arena import Arena, Lifetime, plan_memory
from workers.graphs.record import Call, Place, RecordError, Recording, copy_into, tensors_in

Direct = Mapping[Any, Callable[..., Any]]
"""Python functions by the op overload that they implement: calling one saves the way through the dispatcher."""


class Tape:
    """Calls to repeat, and where the result is afterwards.

    Attributes:
        steps: the calls, complete with their arguments.
        output: [size, hidden_size], written by the last of them.
    """

    def __init__(self, steps: Sequence[Callable[[], Any]], output: torch.Tensor) -> None:
        self.steps = tuple(steps)
        self.output = output

    def __call__(self) -> torch.Tensor:
        """Replay; the result is overwritten by the next one."""
        for step in self.steps:
            step()
        return self.output

    def op_seconds(self) -> float:
        """Replay with a clock around each call; gives the seconds within them."""
        seconds = 0.0
        for step in self.steps:
            started = time.perf_counter()
            step()
            seconds += time.perf_counter() - started
        return seconds


def bind(recording: Recording, arena: Arena, output: torch.Tensor, direct: Direct) -> Tape:
    """Make a tape of a recording.

    Args:
        recording: of one size.
        arena: gives memory to its values.
        output: receives the result.
        direct: what to call in place of an op.
    """
    starts, total = plan_memory(_lifetimes(recording))
    arena.reserve(total)

    def resolve(argument: Any) -> Any:
        if isinstance(argument, Place):
            return arena.tensor(
                starts[argument.value], argument.dtype, argument.shape, argument.stride, argument.offset
            )
        if isinstance(argument, (list, tuple)):
            return type(argument)(resolve(item) for item in argument)
        if isinstance(argument, dict):
            return {name: resolve(item) for name, item in argument.items()}
        return argument

    steps = [_prepare(call, resolve, direct) for call in recording.calls]
    return Tape([*steps, functools.partial(output.copy_, resolve(recording.result))], output)


def _lifetimes(recording: Recording) -> list[Lifetime]:
    """When each value is made and last used; the result's value is used at the very end."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, call in enumerate(recording.calls):
        for place in _places((call.args, call.kwargs, call.results)):
            first.setdefault(place.value, index)
            last[place.value] = index
    for place in _places(recording.result):
        first.setdefault(place.value, 0)
        last[place.value] = len(recording.calls)
    return [Lifetime(first.get(v, 0), last.get(v, -1), size) for v, size in enumerate(recording.sizes)]


def _places(argument: Any) -> list[Place]:
    if isinstance(argument, Place):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [place for item in argument for place in _places(item)]
    if isinstance(argument, dict):
        return _places(tuple(argument.values()))
    return []


def _prepare(call: Call, resolve: Callable[[Any], Any], direct: Direct) -> Callable[[], Any]:
    """One call with its arguments, writing its results where they belong."""
    args, kwargs = resolve(call.args), resolve(call.kwargs)
    targets: tuple[torch.Tensor, ...] = resolve(call.results)
    if call.into is copy_into:
        return functools.partial(targets[0].view(args[0].shape).copy_, args[0])
    if call.into is not None:
        return functools.partial(direct.get(call.into, call.into), *args, **kwargs, out=targets[0])
    run = functools.partial(direct.get(call.op, call.op), *args, **kwargs)
    if all(target.numel() == 0 for target in targets):
        return run
    if len(targets) == 1 and isinstance(call.op._schema.returns[0].type, torch.TensorType):
        return functools.partial(_copy_result, run, targets[0].copy_)
    return functools.partial(_copy_results, run, call.positions, targets)


def _copy_result(run: Callable[[], torch.Tensor], copy: Callable[[torch.Tensor], Any]) -> None:
    copy(run())


def _copy_results(run: Callable[[], Any], positions: tuple[int, ...], targets: tuple[torch.Tensor, ...]) -> None:
    results = list(tensors_in(run()))
    for position, target in zip(positions, targets, strict=True):
        target.copy_(results[position])


def check_repeatable(first: Recording, second: Recording) -> None:
    """Compare two recordings of the same pass over other values.

    Raises:
        RecordError: they differ. Either the model decides by a state of its own or by what a tensor holds, or it reads
            tensors that are made anew for every pass where the recorder cannot see it, such as inside compiled code.
    """
    if [call.op for call in first.calls] != [call.op for call in second.calls]:
        raise RecordError(
            "the model called other ops when it ran a second time, so a replay would not do what it does. Make its "
            "forward depend on the shapes of its arguments only, or set cudagraph_mode NONE"
        )
    if not second.outside <= first.outside:
        raise RecordError(
            "the model read tensors that it makes anew in every pass by other means than torch ops (compiled code or "
            "a foreign library), which a replay would miss. Register such code as an op, or set cudagraph_mode NONE"
        )
    for one, other in zip(first.calls, second.calls, strict=True):
        if _constants(one.args) != _constants(other.args) or _constants(one.kwargs) != _constants(other.kwargs):
            raise RecordError(
                f"the model called {one.op} with other arguments when it ran a second time, on other tokens: a replay "
                "would repeat the first. Make its forward depend on shapes only, or set cudagraph_mode NONE"
            )


def _constants(argument: Any) -> Any:
    """An op's arguments with nothing for the tensors that come from outside."""
    if isinstance(argument, torch.Tensor):
        return None
    if isinstance(argument, (list, tuple)):
        return [_constants(item) for item in argument]
    if isinstance(argument, dict):
        return [(name, _constants(item)) for name, item in argument.items()]
    return argument
