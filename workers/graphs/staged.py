"""Replays a compiled model on the CPU: its stages one after another over a table of values.

Values that never change (parameters, constants, the static inputs of a size) stand in the table for good; others are
dropped at their last use. PIECEWISE runs every stage as it is. FULL also takes the stages of splitting ops apart and
calls each op itself, or whatever Python function implements it.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workers.compile.compiled_model import CompiledModel, Stage
from workers.graphs.splitting_ops import Input, Result, list_ops
from workers.graphs.tape import Direct


def starting_values(model: CompiledModel, input_ids: torch.Tensor, positions: torch.Tensor) -> list[Any]:
    """The table of values before the first stage runs."""
    values: list[Any] = [None] * model.num_values
    for index, value in model.bound.items():
        values[index] = value
    values[model.inputs["input_ids"]] = input_ids
    values[model.inputs["positions"]] = positions
    if model.num_tokens_index is not None:
        values[model.num_tokens_index] = input_ids.shape[0]
    return values


def last_uses(model: CompiledModel) -> list[tuple[int, ...]]:
    """For each stage, what other stages made and it is the last to take. The result of all is not among them.

    Unlike ``CompiledModel.kills`` this leaves the step's inputs alone, which stay bound.
    """
    made = {index for stage in model.stages for index in stage.outputs} - {model.output}
    last = {index: number for number, stage in enumerate(model.stages) for index in stage.inputs if index in made}
    return [tuple(index for index, use in last.items() if use == number) for number in range(len(model.stages))]


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a replay.

    Attributes:
        take: gives its arguments from the table.
        drop: what the table lets go of then.
        run: what to call.
        listed: whether it takes its arguments as one list, which it may empty, and gives a sequence.
        put: where its results go.
    """

    take: Callable[[list[Any]], Sequence[Any]]
    drop: tuple[int, ...]
    run: Callable[..., Any]
    listed: bool
    put: tuple[int, ...]


class StagedTape:
    """The steps over a table of its own, in which the inputs of one size stand."""

    def __init__(self, steps: Sequence[Step], values: list[Any], output: int) -> None:
        self._steps = tuple(steps)
        self._values = values
        self._output = output

    def __call__(self) -> torch.Tensor:
        """Replay. The result is a tensor of its own."""
        values = self._values
        for step in self._steps:
            if step.listed:
                given = list(step.take(values))
                for index in step.drop:
                    values[index] = None
                for index, value in zip(step.put, step.run(given), strict=True):
                    values[index] = value
            else:
                result = step.run(*step.take(values))
                for index in step.drop:
                    values[index] = None
                for index in step.put:
                    values[index] = result
        result, values[self._output] = values[self._output], None
        return result

    def op_seconds(self) -> float:
        """Replay with a clock around each call; gives the seconds within them."""
        spent: list[float] = []
        timed = [replace(step, run=functools.partial(_timed, step.run, spent)) for step in self._steps]
        StagedTape(timed, self._values, self._output)()
        return sum(spent)


class StagedTapes:
    """Makes the tapes of one model; their steps are the same for all sizes.

    Args:
        model: compiled.
        direct: what FULL calls in place of an op.
    """

    def __init__(self, model: CompiledModel, direct: Direct) -> None:
        self._model = model
        self._direct = direct
        self._constants: list[Any] = []
        self._subgraphs, self._whole = list[Step](), list[Step]()
        for stage, drop in zip(model.stages, last_uses(model), strict=True):
            step = Step(_taker(stage.inputs), drop, stage.run, True, stage.outputs)
            self._subgraphs.append(step)
            self._whole += (stage.kind == "op" and self._take_apart(stage, drop)) or [step]

    def tape(self, full: bool, input_ids: torch.Tensor, positions: torch.Tensor) -> StagedTape:
        """The replay of the size that the inputs have."""
        values = starting_values(self._model, input_ids, positions) + self._constants
        return StagedTape(self._whole if full else self._subgraphs, values, self._model.output)

    def _take_apart(self, stage: Stage, drop: tuple[int, ...]) -> list[Step]:
        """A step for each op of a stage; nothing if it has to stay whole."""
        known = [self._model.bound.get(index) for index in stage.inputs]
        ops = list_ops(stage.run, [None if isinstance(value, torch.Tensor) else value for value in known])
        if ops is None or not ops.calls:
            return []
        # What an op gives is an output of the stage, or is passed to another op and gets a place of its own.
        places = {call: output for output, call in zip(stage.outputs, ops.outputs, strict=True)}
        steps: list[Step] = []
        for number, call in enumerate(ops.calls):
            taken: list[int] = []
            for argument in call.args:
                if isinstance(argument, Input):
                    taken.append(stage.inputs[argument.index])
                elif isinstance(argument, Result):
                    taken.append(places[argument.call])
                else:
                    taken.append(self._add_constant(argument))
            put: tuple[int, ...] = ()
            if call.op._schema.returns:
                if number not in places:
                    places[number] = self._add_constant(None)
                put = (places[number],)
            steps.append(Step(_taker(taken), (), self._direct.get(call.op, call.op), False, put))
        steps[-1] = replace(steps[-1], drop=drop)
        return steps

    def _add_constant(self, value: Any) -> int:
        """A new place in the table that holds ``value`` from the start."""
        self._constants.append(value)
        return self._model.num_values + len(self._constants) - 1


def _timed(run: Callable[..., Any], spent: list[float], *args: Any) -> Any:
    started = time.perf_counter()
    result = run(*args)
    spent.append(time.perf_counter() - started)
    return result


def _taker(indices: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Gives the values of these indices. ``itemgetter`` of one index would give the value itself."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[index] for index in indices]
