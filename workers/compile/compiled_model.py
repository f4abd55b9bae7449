"""The compiled model: a fixed list of stages over a table of values, called like the model's forward.

A stage is a compiled subgraph or a run of consecutive splitting ops. No code of the model's modules runs in a step.
``plan.py`` makes compiled models; graph capture (``workers/graphs/``) walks the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Run = Callable[[list[Any]], Sequence[Any]]
"""A stage's function: its inputs in order, in a list that it may empty, to its outputs in order."""

Argument = tuple[Literal["value", "const"], Any]
"""An op's argument: ("value", position among the stage's values) or ("const", the value itself)."""


@dataclass(frozen=True)
class SplittingOp:
    """One call of a splitting op.

    Attributes:
        op: ``namespace::name``.
        overload: of the op.
        arguments: all arguments of the schema, in order. A stage's values are its inputs, followed by the results of
            its ops.
    """

    op: str
    overload: str
    arguments: tuple[Argument, ...]

    def resolve(self) -> torch._ops.OpOverload:
        """The registered overload."""
        namespace, name = self.op.split("::")
        return getattr(getattr(getattr(torch.ops, namespace), name), self.overload)


@dataclass(frozen=True)
class Stage:
    """One stage of a compiled model.

    Attributes:
        kind: "subgraph": compiled code between splitting ops. "op": consecutive splitting ops, which read the forward
            context.
        name: for messages: the subgraph's number, or the layer of the ops.
        run: its function.
        inputs: indices of its inputs in the table of values.
        outputs: indices of its outputs.
        ops: of an "op" stage: its calls. Empty: the stage is only run as a whole.
        results: of an "op" stage: positions of its outputs among its values.
    """

    kind: Literal["subgraph", "op"]
    name: str
    run: Run
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple[SplittingOp, ...] = ()
    results: tuple[int, ...] = ()


class CompiledModel:
    """A model's forward as stages: step inputs to hidden states, inside a forward context.

    Args:
        stages: in execution order.
        num_values: size of the table of values.
        bound: parameters and buffers by index; the model's own tensors, not copies.
        inputs: index of each step input by the name of forward's argument.
        num_tokens_index: index of the number of tokens, an int; None if no stage takes it.
        output: index of the result.

    Attributes:
        last_uses: for each stage, the values that no later stage uses. The table drops them when the stage begins, so
            that the stage may free or reuse their memory. Bound values and the result are not among them.
    """

    def __init__(
        self,
        *,
        stages: Sequence[Stage],
        num_values: int,
        bound: Mapping[int, Any],
        inputs: Mapping[str, int],
        num_tokens_index: int | None,
        output: int,
    ) -> None:
        self.stages = tuple(stages)
        self.num_values = num_values
        self.bound = dict(bound)
        self.inputs = dict(inputs)
        self.num_tokens_index = num_tokens_index
        self.output = output
        self.last_uses = self._find_last_uses()
        self._table: list[Any] = [self.bound.get(index) for index in range(num_values)]
        self._program = tuple(
            (stage.run, stage.inputs, stage.outputs, dropped)
            for stage, dropped in zip(self.stages, self.last_uses, strict=True)
        )

    @property
    def num_subgraphs(self) -> int:
        """How many stages are compiled code."""
        return sum(stage.kind == "subgraph" for stage in self.stages)

    def _find_last_uses(self) -> tuple[tuple[int, ...], ...]:
        kept = {*self.bound, self.output}
        last: dict[int, int] = {}
        for number, stage in enumerate(self.stages):
            last.update(dict.fromkeys(stage.inputs, number))
        return tuple(
            tuple(sorted(index for index, use in last.items() if use == number and index not in kept))
            for number in range(len(self.stages))
        )

    def start(self, input_ids: torch.Tensor, positions: torch.Tensor) -> list[Any]:
        """A table of values with the bound values and a step's inputs in place. Arguments as of :meth:`__call__`."""
        values = self._table.copy()
        values[self.inputs["input_ids"]] = input_ids
        values[self.inputs["positions"]] = positions
        if self.num_tokens_index is not None:
            values[self.num_tokens_index] = input_ids.shape[0]
        return values

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run one step.

        Args:
            input_ids: int64 [T].
            positions: int64 [T].

        Returns:
            hidden states [T, hidden_size].
        """
        values = self.start(input_ids, positions)
        for run, inputs, outputs, dropped in self._program:
            arguments = [values[index] for index in inputs]
            for index in dropped:
                values[index] = None
            for index, result in zip(outputs, run(arguments), strict=True):
                values[index] = result
        return values[self.output]


def op_runner(ops: Sequence[SplittingOp], results: Sequence[int]) -> Run:
    """The ``run`` of an "op" stage: call the ops in order and return the values at ``results``."""
    program: list[tuple[Callable[..., Any], list[Any], list[tuple[int, int]]]] = []
    for op in ops:
        template = [value if kind == "const" else None for kind, value in op.arguments]
        holes = [(position, value) for position, (kind, value) in enumerate(op.arguments) if kind == "value"]
        program.append((op.resolve(), template, holes))

    def run(values: list[Any]) -> list[Any]:
        for op, template, holes in program:
            arguments = template.copy()
            for position, index in holes:
                arguments[position] = values[index]
            values.append(op(*arguments))
        return [values[index] for index in results]

    return run
