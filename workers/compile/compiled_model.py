"""The compiled model: stages in a fixed order over a table of values. No model code runs in it.

Made by ``plan.py``; a graph capture (``workers/graphs/``) walks the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Stage:
    """One step of the model.

    Attributes:
        kind: "subgraph": compiled code between splitting ops. "op": consecutive splitting ops, run as they are; they
            need a forward context.
        name: for people: the subgraph's number, or the ops' layer.
        run: inputs in order -> outputs in order. It may empty the list it is given.
        inputs: where its inputs are in the table of values.
        outputs: where its outputs go.
    """

    kind: Literal["subgraph", "op"]
    name: str
    run: Callable[[list[Any]], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class CompiledModel:
    """A model's forward as stages. Called like the model: step inputs to hidden states, inside a forward context.

    Args:
        stages: in execution order.
        num_values: size of the table of values.
        bound: values that are the same in every step: parameters and buffers, the model's own tensors.
        inputs: index of each step input, in the order of forward's arguments.
        num_tokens_index: index of the number of tokens as an int, None if no stage takes it.
        output: index of the result.

    Attributes:
        kills: for each stage, the values that it is the last to use. The table lets go of them as the stage begins, so
            that a subgraph can free or reuse their memory while it runs.
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
        self.kills = self._last_uses()
        self._table: list[Any] = [self.bound.get(index) for index in range(num_values)]
        self._program = tuple(
            (stage.run, stage.inputs, stage.outputs, kill) for stage, kill in zip(self.stages, self.kills, strict=True)
        )

    def _last_uses(self) -> tuple[tuple[int, ...], ...]:
        kept = {*self.bound, self.output}
        last: dict[int, int] = {}
        for number, stage in enumerate(self.stages):
            last.update(dict.fromkeys(stage.inputs, number))
        return tuple(
            tuple(sorted(index for index, use in last.items() if use == number and index not in kept))
            for number in range(len(self.stages))
        )

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One step.

        Args:
            input_ids: int64 [T].
            positions: int64 [T].

        Returns:
            hidden states [T, hidden_size].
        """
        values = self._table.copy()
        values[self.inputs["input_ids"]] = input_ids
        values[self.inputs["positions"]] = positions
        if self.num_tokens_index is not None:
            values[self.num_tokens_index] = input_ids.shape[0]
        for run, inputs, outputs, kill in self._program:
            arguments = [values[index] for index in inputs]
            for index in kill:
                values[index] = None
            for index, result in zip(outputs, run(arguments), strict=True):
                values[index] = result
        return values[self.output]
