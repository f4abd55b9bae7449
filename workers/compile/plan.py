"""A compiled model as data: the order of its stages, where each input comes from, and how each splitting op is called.

A plan names artifacts by cache key and parameters by name, so a later start binds it to the model's tensors and makes
a :class:`~workers.compile.compiled_model.CompiledModel` without tracing. It contains no rank: ranks of equal shapes
have equal plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgpack
import torch
from torch import fx, nn

from runtime.common.protocol import pack
from workers.compile.compiled_model import Argument, CompiledModel, Run, SplittingOp, Stage, op_runner
from workers.compile.errors import CompileError
from workers.compile.split import Segment, Subgraph
from workers.compile.tracing import TracedModel


@dataclass(frozen=True)
class PlanStage:
    """One stage. Other fields as of :class:`Stage`.

    Attributes:
        artifact: of a "subgraph" stage: the cache key of its code.
    """

    kind: Literal["subgraph", "op"]
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    artifact: str = ""
    ops: tuple[SplittingOp, ...] = ()
    results: tuple[int, ...] = ()


@dataclass(frozen=True)
class BoundTensor:
    """A parameter or buffer that stages take as an input, and its layout."""

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """A compiled model without tensors and code. Fields as of :class:`CompiledModel`."""

    stages: tuple[PlanStage, ...]
    num_values: int
    bound: tuple[BoundTensor, ...]
    inputs: dict[str, int]
    num_tokens_index: int | None
    output: int

    @property
    def artifacts(self) -> tuple[str, ...]:
        """The cache keys of the distinct subgraphs, in the order of their first use."""
        return tuple(dict.fromkeys(stage.artifact for stage in self.stages if stage.kind == "subgraph"))

    def packed(self) -> bytes:
        """As bytes, for the cache."""
        return pack(asdict(self))

    @classmethod
    def unpacked(cls, content: bytes) -> Plan:
        """The inverse of :meth:`packed`.

        Raises:
            ValueError, TypeError: the content is not a packed plan.
        """
        fields: dict[str, Any] = msgpack.unpackb(content, use_list=False)
        for stage in fields["stages"]:
            stage["ops"] = tuple(SplittingOp(**op) for op in stage["ops"])
        fields["stages"] = tuple(PlanStage(**stage) for stage in fields["stages"])
        fields["bound"] = tuple(BoundTensor(**tensor) for tensor in fields["bound"])
        return cls(**fields)

    def bind(self, model: nn.Module, runs: Mapping[str, Run]) -> CompiledModel:
        """The compiled model: this plan with a model's tensors and the code of its subgraphs.

        Args:
            model: has the parameters and buffers.
            runs: compiled code by cache key.

        Raises:
            CompileError: a tensor is missing from the model or has another layout.
        """
        stages = [
            Stage(
                stage.kind,
                stage.name,
                runs[stage.artifact] if stage.kind == "subgraph" else op_runner(stage.ops, stage.results),
                stage.inputs,
                stage.outputs,
                stage.ops,
                stage.results,
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
        for expected in self.bound:
            tensor = known.get(expected.name)
            if tensor is None or expected != _bound_tensor(expected.index, expected.name, tensor):
                found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise CompileError(
                    f"{expected.name} is {found}; the compiled model takes {expected.dtype} {list(expected.shape)}"
                )
            tensors[expected.index] = tensor.detach()
        return tensors


def _bound_tensor(index: int, name: str, tensor: torch.Tensor) -> BoundTensor:
    return BoundTensor(index, name, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))


def make_plan(
    traced: TracedModel, segments: Sequence[Segment], subgraphs: Mapping[Segment, tuple[Subgraph, str]]
) -> Plan:
    """The plan of a traced model.

    Args:
        traced: the traced model.
        segments: its graph, split.
        subgraphs: graph and cache key of each segment that is a subgraph.

    Raises:
        CompileError: an argument of a splitting op is no tensor, number or string.
    """
    index: dict[fx.Node, int] = {}

    def index_of(node: fx.Node) -> int:
        return index.setdefault(node, len(index))

    inputs = {name: index_of(node) for name, node in traced.step_inputs.items()}
    index_of(traced.tokens)
    stages: list[PlanStage] = []
    for segment in segments:
        if segment.kind == "subgraph":
            graph, key = subgraphs[segment]
            name = f"subgraph {sum(stage.kind == 'subgraph' for stage in stages)}"
            taken, outputs = tuple(map(index_of, graph.inputs)), tuple(map(index_of, segment.outputs))
            stages.append(PlanStage("subgraph", name, taken, outputs, artifact=key))
        else:
            taken, outputs = tuple(map(index_of, segment.inputs)), tuple(map(index_of, segment.outputs))
            ops, results = _splitting_ops(segment)
            stages.append(PlanStage("op", _layer_name(ops), taken, outputs, ops=ops, results=results))
    bound = tuple(
        _bound_tensor(index[node], name, node.meta["example_value"])
        for node, name in traced.bound.items()
        if node in index
    )
    result = next(node for node in traced.graph.nodes if node.op == "output").args[0][0]
    return Plan(tuple(stages), len(index), bound, inputs, index[traced.tokens], index[result])


def _splitting_ops(segment: Segment) -> tuple[tuple[SplittingOp, ...], tuple[int, ...]]:
    """The calls of a segment of splitting ops, and the positions of its outputs among its values."""
    local = {node: position for position, node in enumerate((*segment.inputs, *segment.nodes))}
    ops: list[SplittingOp] = []
    for node in segment.nodes:
        op = node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "default")  # noqa: B009
        given = [*node.args]
        for argument in op._schema.arguments[len(given) :]:
            given.append(node.kwargs.get(argument.name, argument.default_value))
        arguments = tuple(_argument(value, local, node) for value in given)
        ops.append(SplittingOp(op._schema.name, op._overloadname, arguments))
    return tuple(ops), tuple(local[node] for node in segment.outputs)


def _argument(value: Any, local: Mapping[fx.Node, int], node: fx.Node) -> Argument:
    if isinstance(value, fx.Node):
        return "value", local[value]
    if value is None or isinstance(value, (str, int, float)):
        return "const", value
    raise CompileError(
        f"`{node.format_node()}` is called with {value!r}; a splitting op takes tensors, numbers and strings"
    )


def _layer_name(ops: Sequence[SplittingOp]) -> str:
    """The layer that the ops are called for; without a layer, the names of the ops."""
    names = [value for op in ops for kind, value in op.arguments if kind == "const" and isinstance(value, str)]
    return ", ".join(dict.fromkeys(names)) or ", ".join(op.op for op in ops)
