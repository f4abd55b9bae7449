"""Graphs on the CPU: a compiled model replayed as an op list over static inputs, with the contract of a CUDA graph.

An op list is bound once to the static inputs of a padded size and then runs without model code. PIECEWISE lists the
stages of the compiled model. FULL also lists every splitting op by itself and calls the Python function that
implements it, which saves the dispatcher. Ops that read the forward context, attention above all, read that of the
step that is replayed, so one list serves decode and mixed batches. The bits are those of NONE at the same size.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.common.config import GraphMode
from workers.compile.compiled_model import CompiledModel, Stage
from workers.forward_context import AttentionMetadata, forward_context
from workers.graphs.dispatcher import Dispatch
from workers.graphs.inputs import MakeContext, StaticInputs

Direct = Mapping[Any, Callable[..., Any]]
"""The Python function behind an op overload: a call of it skips the dispatcher."""


@dataclass(frozen=True, slots=True)
class OpListEntry:
    """One call of an op list.

    Attributes:
        take: selects the arguments from the table of values.
        dropped: indices that the table drops before the call.
        run: the stage or op to call.
        listed: whether ``run`` takes its arguments as one list, which it may empty, and returns a sequence.
        outputs: indices of the results.
    """

    take: Callable[[list[Any]], Sequence[Any]]
    dropped: tuple[int, ...]
    run: Callable[..., Any]
    listed: bool
    outputs: tuple[int, ...]


class OpList:
    """Calls over a table of values that holds the static inputs of one size.

    Args:
        entries: the calls, in order.
        values: the table: parameters, constants and inputs stay, other values are dropped at their last use.
        output: index of the result.
    """

    def __init__(self, entries: Sequence[OpListEntry], values: list[Any], output: int) -> None:
        self._entries = tuple(entries)
        self._values = values
        self._output = output

    def __call__(self) -> torch.Tensor:
        """Replay. The result is a new tensor."""
        values = self._values
        for entry in self._entries:
            if entry.listed:
                arguments = list(entry.take(values))
                for index in entry.dropped:
                    values[index] = None
                for index, value in zip(entry.outputs, entry.run(arguments), strict=True):
                    values[index] = value
            else:
                result = entry.run(*entry.take(values))
                for index in entry.dropped:
                    values[index] = None
                for index in entry.outputs:
                    values[index] = result
        result, values[self._output] = values[self._output], None
        return result

    def op_seconds(self) -> float:
        """Replay with a clock around each call; returns the seconds within the calls."""
        spent: list[float] = []
        timed = [replace(entry, run=functools.partial(_timed, entry.run, spent)) for entry in self._entries]
        OpList(timed, self._values, self._output)()
        return sum(spent)


class OpLists:
    """Makes the op lists of one compiled model. Lists of all sizes share their entries.

    Args:
        model: the compiled model.
        direct: functions that FULL lists call in place of ops.
    """

    def __init__(self, model: CompiledModel, direct: Direct) -> None:
        self._model = model
        self._direct = direct
        self._constants: list[Any] = []
        self._piecewise, self._full = list[OpListEntry](), list[OpListEntry]()
        static = {*model.inputs.values(), model.num_tokens_index}
        for stage, uses in zip(model.stages, model.last_uses, strict=True):
            dropped = tuple(index for index in uses if index not in static)
            whole = OpListEntry(_taker(stage.inputs), dropped, stage.run, True, stage.outputs)
            self._piecewise.append(whole)
            self._full += self._split(stage, dropped) or [whole]

    def make(self, full: bool, input_ids: torch.Tensor, positions: torch.Tensor) -> OpList:
        """The op list for static inputs, int64 [size] each."""
        values = self._model.start(input_ids, positions) + self._constants
        return OpList(self._full if full else self._piecewise, values, self._model.output)

    def _split(self, stage: Stage, dropped: tuple[int, ...]) -> list[OpListEntry]:
        """An entry for each splitting op of a stage; empty for a stage that only runs as a whole."""
        indices = list(stage.inputs)  # In the table, of the stage's values so far.
        outputs = dict(zip(stage.results, stage.outputs, strict=True)) if stage.ops else {}
        entries: list[OpListEntry] = []
        for op in stage.ops:
            overload = op.resolve()
            taken = [indices[value] if kind == "value" else self._add_constant(value) for kind, value in op.arguments]
            result = outputs.get(len(indices))
            indices.append(self._add_constant(None) if result is None else result)
            put = (indices[-1],) if overload._schema.returns else ()
            entries.append(OpListEntry(_taker(taken), (), self._direct.get(overload, overload), False, put))
        if entries:
            entries[-1] = replace(entries[-1], dropped=dropped)
        return entries

    def _add_constant(self, value: Any) -> int:
        """A new index of the table, whose initial value is ``value``."""
        self._constants.append(value)
        return self._model.num_values + len(self._constants) - 1


class CpuReplay:
    """The captured op lists of one compiled model.

    Args:
        model: the compiled model.
        inputs: the static inputs.
        make_context: see :data:`~workers.graphs.inputs.MakeContext`.
        direct: functions that FULL replays call in place of ops.
    """

    def __init__(self, model: CompiledModel, inputs: StaticInputs, make_context: MakeContext, direct: Direct) -> None:
        self._inputs = inputs
        self._make_context = make_context
        self._lists = OpLists(model, direct)
        self._captured: dict[Dispatch, OpList] = {}

    def discard(self) -> None:
        """Drop everything that was captured, and free its memory."""
        self._captured = {}

    def warm_up(self, key: Dispatch) -> None:
        """Does nothing: a replay on the CPU needs no warm-up."""

    @contextlib.contextmanager
    def capturing(self) -> Generator[None]:
        """Encloses all captures."""
        yield

    def capture(self, key: Dispatch) -> None:
        """Bind an op list to the static inputs of one size. Runs no op."""
        self._captured[key] = self._lists.make(key.mode is GraphMode.FULL, *self._inputs.tokens(key.size))

    def replay(self, key: Dispatch, metadata: AttentionMetadata) -> torch.Tensor:
        """Hidden states [size, hidden_size] of the step in the static inputs."""
        with forward_context(self._make_context(metadata)):
            return self._captured[key]()


def _timed(run: Callable[..., Any], spent: list[float], *args: Any) -> Any:
    started = time.perf_counter()
    result = run(*args)
    spent.append(time.perf_counter() - started)
    return result


def _taker(indices: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Selects the values at ``indices``. ``itemgetter`` of one index would return the value, not a sequence."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[index] for index in indices]
