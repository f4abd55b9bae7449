"""A compiled model as data: the order of stages, where each input comes from, what each splitting op is called with.

A plan names artifacts by key, parameters by name and layers by name, so a later start makes a :class:`CompiledModel`
of it and the model's tensors without tracing the model. It holds no rank: ranks of equal shapes have the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgpack
import torch
from torch import fx, nn

from runtime.common.protocol import pack
from workers.compile.compiled_model import CompiledModel, Stage
from workers.compile.errors import CompileError
from workers.compile.split import Segment, Subgraph
from workers.compile.subgraph import Run
from workers.compile.tracing import TracedModel

Argument = tuple[Literal["value", "const"], Any]
"""A position among the stage's values, or a plain value."""


@dataclass(frozen=True)
class OpCall:
    """One splitting op.

    Attributes:
        op: ``namespace::name``.
        overload: of it.
        arguments: all of the schema's, in order. Values 0, 1, ... are the stage's inputs, followed by the results of
            the stage's calls.
    """

    op: str
    overload: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class PlanStage:
    """One stage: see :class:`~workers.compile.compiled_model.Stage`.

    Attributes:
        artifact: of a subgraph: its key.
        calls: of an op stage.
        results: of an op stage: which of its values are its outputs.
    """

    kind: Literal["subgraph", "op"]
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    artifact: str = ""
    calls: tuple[OpCall, ...] = ()
    results: tuple[int, ...] = ()


@dataclass(frozen=True)
class BoundTensor:
    """A parameter or buffer that stages take, and what it has to be like."""

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """A model without its tensors and its code. Fields as of :class:`~workers.compile.compiled_model.CompiledModel`."""

    stages: tuple[PlanStage, ...]
    num_values: int
    bound: tuple[BoundTensor, ...]
    inputs: dict[str, int]
    num_tokens_index: int | None
    output: int

    @property
    def artifacts(self) -> tuple[str, ...]:
        """The keys of the distinct subgraphs, in the order of their first use."""
        return tuple(dict.fromkeys(stage.artifact for stage in self.stages if stage.kind == "subgraph"))

    def packed(self) -> bytes:
        """As bytes, for the cache."""
        return pack(asdict(self))

    @classmethod
    def unpacked(cls, content: bytes) -> Plan:
        """The inverse of :meth:`packed`. Raises ValueError or TypeError for something else."""
        fields: dict[str, Any] = msgpack.unpackb(content, use_list=False)
        for stage in fields["stages"]:
            stage["calls"] = tuple(OpCall(**call) for call in stage["calls"])
        fields["stages"] = tuple(PlanStage(**stage) for stage in fields["stages"])
        fields["bound"] = tuple(BoundTensor(**tensor) for tensor in fields["bound"])
        return cls(**fields)

    def bind(self, model: nn.Module, runs: Mapping[str, Run]) -> CompiledModel:
        """The model: this plan with a model's tensors and the code of its subgraphs.

        Raises:
            CompileError: the model has not the tensors that the plan was made for.
        """
        stages = [
            Stage(
                stage.kind,
                stage.name,
                runs[stage.artifact] if stage.kind == "subgraph" else op_runner(stage.calls, stage.results),
                stage.inputs,
                stage.outputs,
            )
            for stage in self.stages
        ]
        return CompiledModel(
            stages=stages,
            num_values=self.num_values,
            bound=self._tensors(model),
            inputs=self.inputs,
            num_tokens_index=self.num_tokens_index,
            output=self.output,
        )

    def _tensors(self, model: nn.Module) -> dict[int, torch.Tensor]:
        known = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        tensors: dict[int, torch.Tensor] = {}
        for wanted in self.bound:
            tensor = known.get(wanted.name)
            if tensor is None or wanted != _bound_tensor(wanted.index, wanted.name, tensor):
                found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise CompileError(
                    f"{wanted.name} is {found}; the compiled model takes {wanted.dtype} {list(wanted.shape)}"
                )
            tensors[wanted.index] = tensor.detach()
        return tensors


def _bound_tensor(index: int, name: str, tensor: torch.Tensor) -> BoundTensor:
    return BoundTensor(index, name, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))


def make_plan(
    traced: TracedModel, segments: Sequence[Segment], subgraphs: Mapping[Segment, tuple[Subgraph, str]]
) -> Plan:
    """The plan of a traced model.

    Args:
        traced: the model.
        segments: its cut.
        subgraphs: graph and artifact key of each segment that is a subgraph.

    Raises:
        CompileError: a splitting op was called with something that is no plain value.
    """
    index: dict[fx.Node, int] = {}

    def place(node: fx.Node) -> int:
        return index.setdefault(node, len(index))

    inputs = {name: place(node) for name, node in traced.step_inputs.items()}
    place(traced.tokens)
    stages: list[PlanStage] = []
    for segment in segments:
        if segment.kind == "subgraph":
            graph, key = subgraphs[segment]
            name = f"subgraph {sum(stage.kind == 'subgraph' for stage in stages)}"
            taken, outputs = tuple(map(place, graph.inputs)), tuple(map(place, segment.outputs))
            stages.append(PlanStage("subgraph", name, taken, outputs, artifact=key))
        else:
            taken, outputs = tuple(map(place, segment.inputs)), tuple(map(place, segment.outputs))
            calls, results = _op_calls(segment)
            stages.append(PlanStage("op", _layer_name(calls), taken, outputs, calls=calls, results=results))
    bound = tuple(
        _bound_tensor(index[node], name, node.meta["example_value"])
        for node, name in traced.bound.items()
        if node in index
    )
    result = next(node for node in traced.graph.nodes if node.op == "output").args[0][0]
    return Plan(tuple(stages), len(index), bound, inputs, index[traced.tokens], index[result])


def _op_calls(segment: Segment) -> tuple[tuple[OpCall, ...], tuple[int, ...]]:
    local = {node: position for position, node in enumerate((*segment.inputs, *segment.nodes))}
    calls: list[OpCall] = []
    for node in segment.nodes:
        op = node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "default")  # noqa: B009
        given = [*node.args]
        for argument in op._schema.arguments[len(given) :]:
            given.append(node.kwargs.get(argument.name, argument.default_value))
        arguments = tuple(_argument(value, local, node) for value in given)
        calls.append(OpCall(op._schema.name, op._overloadname, arguments))
    return tuple(calls), tuple(local[node] for node in segment.outputs)


def _argument(value: Any, local: Mapping[fx.Node, int], node: fx.Node) -> Argument:
    if isinstance(value, fx.Node):
        return "value", local[value]
    if value is None or isinstance(value, (str, int, float)):
        return "const", value
    raise CompileError(
        f"`{node.format_node()}` is called with {value!r}; a splitting op takes tensors, numbers and strings"
    )


def _layer_name(calls: Sequence[OpCall]) -> str:
    """The layer that the ops are called for, their own names where there is none."""
    names = [value for call in calls for kind, value in call.arguments if kind == "const" and isinstance(value, str)]
    return ", ".join(dict.fromkeys(names)) or ", ".join(call.op for call in calls)


def op_runner(calls: Sequence[OpCall], results: Sequence[int]) -> Run:
    """A function that makes the calls: the stage's inputs, in a list of its own, to its outputs."""
    program: list[tuple[Callable[..., Any], list[Any], list[tuple[int, int]]]] = []
    for call in calls:
        namespace, name = call.op.split("::")
        op = getattr(getattr(getattr(torch.ops, namespace), name), call.overload)
        template = [value if kind == "const" else None for kind, value in call.arguments]
        holes = [(position, value) for position, (kind, value) in enumerate(call.arguments) if kind == "value"]
        program.append((op, template, holes))

    def run(values: list[Any]) -> list[Any]:
        for op, template, holes in program:
            arguments = template.copy()
            for position, index in holes:
                arguments[position] = values[index]
            values.append(op(*arguments))
        return [values[index] for index in results]

    return run
