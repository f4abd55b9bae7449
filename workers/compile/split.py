"""Splits a traced model at its splitting ops and makes graphs of the segments between them.

A subgraph is canonical: its inputs and values are numbered, and it names no layer, parameter or module. The subgraph
between two attention layers is therefore the same graph, with the same text, in every layer.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.node import _get_qualified_name, map_arg

from workers.compile.errors import CompileError

SPLITTING_OPS = ("lockstep::kv_cache_update", "lockstep::attention")
"""Ops that no subgraph contains, because they read the forward context."""

CALLS = ("call_function", "call_method")


@dataclass(frozen=True)
class Segment:
    """Consecutive calls of the graph.

    Attributes:
        kind: "op": splitting ops; "subgraph": the calls between them.
        nodes: the calls.
        inputs: values of other segments that they use, in the order of first use.
        outputs: their values that other segments use, in order.
    """

    kind: Literal["subgraph", "op"]
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Subgraph:
    """A segment as a graph of its own.

    Attributes:
        module: placeholders in the order of ``inputs``; the output is a tuple in the order of the segment's outputs.
        inputs: the number of tokens, which every subgraph takes first, and the segment's inputs.
        examples: a fake value for each input.
        text: equal for two subgraphs with the same computation on the same shapes, strides and dtypes.
        aliases: outputs, by position, that are views of inputs.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    examples: tuple[Any, ...]
    text: str
    aliases: tuple[int, ...]


def op_name(target: Any) -> str:
    """``namespace::name`` of a registered op, "" for any other target."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return str(target._qualified_op_name) if isinstance(target, torch._ops.OpOverloadPacket) else ""


def split_graph(graph: fx.Graph, tokens: fx.Node, splitting_ops: Collection[str] = SPLITTING_OPS) -> list[Segment]:
    """Split a graph into segments, in the order of the graph.

    Args:
        graph: from ``tracing.py``; sizes that equal the number of tokens are replaced by ``tokens``.
        tokens: the placeholder of that number.
        splitting_ops: names of ops to split at; consecutive ones share a segment. Empty: one subgraph.

    Raises:
        CompileError: a value that is neither tensor nor number is used in another segment.
    """
    _share_token_count(graph, tokens)
    groups: list[tuple[Literal["subgraph", "op"], list[fx.Node]]] = []
    home: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op not in CALLS:
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in home and not _can_cross(source):
            # An element of a tuple belongs to the segment of the tuple: only tensors and numbers cross a split.
            home[node] = home[source]
            groups[home[node]][1].append(node)
            continue
        kind = "op" if op_name(node.target) in splitting_ops else "subgraph"
        if not groups or groups[-1][0] != kind:
            groups.append((kind, []))
        home[node] = len(groups) - 1
        groups[-1][1].append(node)
    return [_segment(kind, nodes, number, home) for number, (kind, nodes) in enumerate(groups)]


def _share_token_count(graph: fx.Graph, tokens: fx.Node) -> None:
    """Replace every size that equals the number of tokens by the placeholder, so that no segment passes it on."""
    count = tokens.meta["example_value"].node.expr
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if node.op in CALLS and isinstance(value, torch.SymInt) and value.node.expr == count:
            node.replace_all_uses_with(tokens)
            graph.erase_node(node)


def _can_cross(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (torch.Tensor, torch.SymInt, int))


def _segment(kind: Literal["subgraph", "op"], nodes: list[fx.Node], number: int, home: dict[fx.Node, int]) -> Segment:
    inputs: dict[fx.Node, None] = {}
    outputs: list[fx.Node] = []
    for node in nodes:
        inputs.update({used: None for used in node.all_input_nodes if home.get(used) != number})
        if any(home.get(user) != number for user in node.users):
            if not _can_cross(node):
                raise CompileError(
                    f"`{node.format_node()}` returns a {type(node.meta.get('example_value')).__name__} that is used "
                    "after an attention layer; only tensors and numbers can be. Compute it again there\n"
                    f"{node.stack_trace or ''}"
                )
            outputs.append(node)
    return Segment(kind, tuple(nodes), tuple(inputs), tuple(outputs))


def make_subgraph(segment: Segment, tokens: fx.Node) -> Subgraph:
    """The canonical graph of a segment. ``tokens`` is the placeholder of the number of tokens."""
    inputs = (tokens, *(node for node in segment.inputs if node is not tokens))
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    lines: list[str] = []
    for position, node in enumerate(inputs):
        env[node] = graph.placeholder(f"a{position}")
        lines.append(f"a{position}: {_described(node.meta['example_value'])}")
    for position, node in enumerate(segment.nodes):
        args: Any = map_arg(node.args, env.__getitem__)
        kwargs: Any = map_arg(node.kwargs, env.__getitem__)
        env[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"v{position}")
        lines.append(f"v{position} = {node.op} {_target(node.target)} {args!r} {kwargs!r}")
    outputs = tuple(env[node] for node in segment.outputs)
    graph.output(outputs)
    lines.append(f"return {outputs!r}")
    for old, new in env.items():
        new.meta = {key: old.meta[key] for key in ("example_value", "unbacked_bindings") if key in old.meta}
    count = tokens.meta["example_value"].node.expr
    return Subgraph(
        module=fx.GraphModule(torch.nn.Module(), graph),
        inputs=inputs,
        examples=tuple(node.meta["example_value"] for node in inputs),
        text=re.sub(rf"\b{re.escape(str(count))}\b", "T", "\n".join(lines)),
        aliases=tuple(_aliases(inputs, segment.outputs)),
    )


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    name = op_name(target)
    if name:
        return name if isinstance(target, torch._ops.OpOverloadPacket) else str(target)
    return _get_qualified_name(target)


def _described(value: Any) -> str:
    """The properties of an input that compiled code depends on."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    shape, stride = list(value.shape), list(value.stride())
    return f"{value.dtype} {shape} stride {stride} offset {value.storage_offset()} on {value.device}"


def _aliases(inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> Iterable[int]:
    def storage(node: fx.Node) -> int | None:
        value = node.meta["example_value"]
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None

    held = {storage(node) for node in inputs} - {None}
    return (position for position, node in enumerate(outputs) if storage(node) in held)
