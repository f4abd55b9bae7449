"""Compiled models without a compiler: traced and split, each subgraph run as an FX graph by Python.

Imported in rank processes, so it imports no transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from runtime.common.config import CompileMode
from workers.compile.compiled_model import CompiledModel
from workers.compile.compiler import CompileReport
from workers.compile.keys import cache_key, model_shape
from workers.compile.plan import Plan, make_plan
from workers.compile.split import make_subgraph, split_graph
from workers.compile.tracing import trace_model
from workers.models.decoder import DecoderForCausalLM

Run = Callable[[list[Any]], Sequence[Any]]

_PLANS: dict[str, tuple[Plan, dict[str, Run]]] = {}


def split_model(model: DecoderForCausalLM) -> CompiledModel:
    """The compiled model of a model. Models of equal shape are traced once in a process."""
    key = cache_key(model_shape(model))
    if key not in _PLANS:
        traced = trace_model(model, num_tokens=6, device=torch.device("cpu"))
        segments = split_graph(traced.graph, traced.tokens)
        subgraphs = {
            segment: (make_subgraph(segment, traced.tokens), str(number))
            for number, segment in enumerate(segments)
            if segment.kind == "subgraph"
        }
        runs = {name: run_of(graph.module) for graph, name in subgraphs.values()}
        _PLANS[key] = make_plan(traced, segments, subgraphs), runs
    plan, runs = _PLANS[key]
    return plan.bind(model, runs)


def compile_without_inductor(
    model: DecoderForCausalLM, *, mode: CompileMode, **_: Any
) -> tuple[DecoderForCausalLM | CompiledModel, CompileReport]:
    """Stands in for ``compile_model``: piecewise compilation without a compiler."""
    if mode is CompileMode.NONE:
        return model, CompileReport()
    compiled = split_model(model)
    return compiled, CompileReport(subgraphs=compiled.num_subgraphs)


def run_of(module: fx.GraphModule) -> Run:
    """A graph as a stage's function, which empties its list of inputs like compiled code."""

    def run(values: list[Any]) -> Sequence[Any]:
        given = values.copy()
        values.clear()
        return module.forward(*given)

    return run
