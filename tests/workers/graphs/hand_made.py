"""A model cut at its splitting ops but not compiled: each subgraph is an FX graph run by Python.

It has the form that ``workers/compile/`` gives, at no cost of compiling, so graphs can be tested by themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from workers.compile.compiled_model import CompiledModel, Stage
from workers.models.decoder import DecoderForCausalLM

SPLITTING = (torch.ops.lockstep.attention, torch.ops.lockstep.kv_cache_update)


def hand_made_model(model: DecoderForCausalLM) -> CompiledModel:
    """The model of a model, traced for any number of tokens."""
    graph, given = _trace(model)
    index = {node: number for number, node in enumerate(graph.nodes)}
    bound: dict[int, Any] = {}
    inputs: dict[str, int] = {}
    num_tokens_index = None
    for node in graph.nodes:
        if node.op == "placeholder":
            value = given[node.name]
            if isinstance(value, str):
                inputs[value] = index[node]
            elif isinstance(value, torch.Tensor):
                bound[index[node]] = value.detach()
            else:
                num_tokens_index = index[node]
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    stages: list[Stage] = []
    for splits, nodes in itertools.groupby(calls, key=lambda node: node.target in SPLITTING):
        stages.append(_stage("op" if splits else "subgraph", list(nodes), index))
    (output,) = next(node for node in graph.nodes if node.op == "output").args[0]
    return CompiledModel(
        stages=stages,
        num_values=len(index),
        bound=bound,
        inputs=inputs,
        num_tokens_index=num_tokens_index,
        output=index[output],
    )


def _trace(model: DecoderForCausalLM) -> tuple[fx.Graph, dict[str, Any]]:
    """The graph, and for each placeholder the tensor, the name of the step input, or None for the token count."""
    kept: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def keep(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        kept.append((module, examples))
        return lambda *_: (torch.zeros(6, 1),)

    torch._dynamo.reset()
    tokens = {name: torch.zeros(6, dtype=torch.int64) for name in ("input_ids", "positions")}
    for tensor in tokens.values():
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(**tokens)
    ((module, examples),) = kept
    names = {id(tensor): name for name, tensor in tokens.items()}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    given: dict[str, Any] = {}
    for node, example in zip(placeholders, examples, strict=True):
        number = isinstance(example, torch.SymInt)
        given[node.name] = None if number else names.get(id(example), example)
    return module.graph, given


def _stage(kind: Any, nodes: list[fx.Node], index: dict[fx.Node, int]) -> Stage:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inner = set(nodes)
    taken = list(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inner))
    for node in taken:
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    made = [node for node in nodes if any(user not in inner for user in node.users)]
    graph.output([copies[node] for node in made])
    module = fx.GraphModule(nn.Module(), graph)

    def run(values: list[Any]) -> list[Any]:
        given = values.copy()
        values.clear()  # A compiled subgraph may do so.
        return module.forward(*given)

    return Stage(kind, nodes[0].name, run, tuple(map(index.__getitem__, taken)), tuple(map(index.__getitem__, made)))
