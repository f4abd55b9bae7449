"""Cut at attention, in the original order, into subgraphs that know no layer (rows 36, 37, traps b and d)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from parallel.group import single_rank_group
from runtime.common.model_config import load_model_config
from tests.checkpoints import tiny_checkpoint
from tests.workers.compile.models import SIZE, TinyModel
from tests.workers.models.harness import ModelHarness
from workers.compile.errors import CompileError
from workers.compile.plan import make_plan
from workers.compile.split import SPLITTING_OPS, Segment, Subgraph, make_subgraph, op_name, split_graph
from workers.compile.tracing import TracedModel, trace_model
from workers.forward_context import ForwardContext, forward_context
from workers.models.registry import build_model

CPU = torch.device("cpu")
ATTENTION = "lockstep::attention"
UPDATE = "lockstep::kv_cache_update"


def trace(model: nn.Module) -> TracedModel:
    return trace_model(model, num_tokens=13, device=CPU)


def trace_kind(kind: str, **settings: Any) -> TracedModel:
    config = load_model_config(tiny_checkpoint(kind, **settings))
    return trace(build_model(config, group=single_rank_group(CPU), dtype=torch.float32).to_empty(device=CPU))


@pytest.fixture(scope="module")
def traced() -> TracedModel:
    return trace_kind("llama-bias", num_hidden_layers=5)


@pytest.fixture(scope="module")
def segments(traced: TracedModel) -> list[Segment]:
    return split_graph(traced.graph, traced.tokens)


def ops_of(segment: Segment) -> list[str]:
    return [op_name(node.target) for node in segment.nodes]


def graphs(traced: TracedModel, segments: list[Segment]) -> list[Subgraph]:
    return [make_subgraph(segment, traced.tokens) for segment in segments if segment.kind == "subgraph"]


def test_splitting_ops_are_the_kv_update_and_attention() -> None:
    assert set(SPLITTING_OPS) == {ATTENTION, UPDATE}


def test_subgraphs_and_ops_alternate_and_consecutive_ops_share_a_stage(segments: list[Segment]) -> None:
    assert [segment.kind for segment in segments] == ["subgraph", "op"] * 5 + ["subgraph"]
    for segment in segments:
        if segment.kind == "op":
            assert ops_of(segment) == [UPDATE, ATTENTION]
        else:
            assert not set(ops_of(segment)) & set(SPLITTING_OPS)


def test_attention_depends_on_the_kv_update(segments: list[Segment]) -> None:
    """Without that input nothing in the graph keeps the update before the attention that reads its keys."""
    for segment in segments:
        if segment.kind == "op":
            update, attend = segment.nodes
            assert update in attend.all_input_nodes


def test_the_order_of_the_graph_is_kept(traced: TracedModel, segments: list[Segment]) -> None:
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    places = [order[node] for segment in segments for node in segment.nodes]
    assert places == sorted(places)
    assert len(places) == sum(node.op not in ("placeholder", "output") for node in traced.graph.nodes)


def test_a_stage_takes_only_what_was_made_before(traced: TracedModel, segments: list[Segment]) -> None:
    made = {node for node in traced.graph.nodes if node.op == "placeholder"}
    for segment in segments:
        assert set(segment.inputs) <= made
        assert set(segment.outputs) <= set(segment.nodes)
        made |= set(segment.outputs)


def test_the_middle_subgraphs_of_all_layers_are_one(traced: TracedModel, segments: list[Segment]) -> None:
    texts = [graph.text for graph in graphs(traced, segments)]
    assert len(texts) == 6
    assert len(set(texts)) == 3
    assert len(set(texts[1:-1])) == 1


def test_a_subgraph_names_no_layer_and_no_parameter(traced: TracedModel, segments: list[Segment]) -> None:
    for graph in graphs(traced, segments):
        code = graph.text + graph.module.code
        for name in ("layer", "proj", "embed_tokens", "parameters", "modules"):
            assert name not in code, name


@pytest.mark.slow
def test_windows_and_layer_counts_make_no_new_subgraphs(traced: TracedModel, segments: list[Segment]) -> None:
    def texts(traced: TracedModel) -> set[str]:
        return {graph.text for graph in graphs(traced, split_graph(traced.graph, traced.tokens))}

    assert texts(trace_kind("llama-bias")) == {graph.text for graph in graphs(traced, segments)}
    assert texts(trace_kind("qwen2-window")) == texts(trace_kind("qwen2"))  # another window in later layers
    assert texts(trace_kind("llama")) != texts(trace_kind("qwen3"))


def test_without_splitting_ops_all_is_one_subgraph() -> None:
    traced = trace_kind("llama")
    (segment,) = split_graph(traced.graph, traced.tokens, ())
    assert segment.kind == "subgraph"
    assert ops_of(segment).count(ATTENTION) == 3


@pytest.mark.parametrize("kind", ["llama-bias", "llama3", "mistral", "qwen3-bias"])
def test_the_cut_graph_run_as_it_is_equals_the_model(kind: str) -> None:
    harness = ModelHarness(tiny_checkpoint(kind), single_rank_group(CPU))
    traced = trace(harness.model)
    segments = split_graph(traced.graph, traced.tokens)
    subgraphs = {
        segment: (make_subgraph(segment, traced.tokens), "") for segment in segments if segment.kind == "subgraph"
    }
    numbered = {segment: (graph, str(number)) for number, (segment, (graph, _)) in enumerate(subgraphs.items())}
    runs = {key: (lambda inputs, run=graph.module: run(*inputs)) for graph, key in numbered.values()}
    compiled = make_plan(traced, segments, numbered).bind(harness.model, runs)
    for first, second in (([1, 2, 3, 4, 5], [6]), ([9], [7, 8])):
        for request, tokens in enumerate((first, second)):
            found, expected = (
                _hidden(harness, forward, base + request, tokens)
                for base, forward in ((0, compiled), (100, harness.model))
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@torch.inference_mode()
def _hidden(harness: ModelHarness, forward: Any, request: int, tokens: list[int]) -> torch.Tensor:
    *inputs, metadata = harness.prepare([(request, tokens)], padding=2)
    with forward_context(ForwardContext.for_step(metadata, harness.model.attention_layers, harness.kv_caches)):
        return forward(*inputs)[: len(tokens)]


def attend(x: torch.Tensor, layer: str) -> torch.Tensor:
    heads = x.unsqueeze(1)
    output = torch.empty_like(heads)
    torch.ops.lockstep.attention(heads, heads, heads, output, layer, None)
    return output.flatten(1)


class TakesHalvesAcrossACut(TinyModel):
    """A tuple made before an attention, an element of it taken after."""

    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        halves = F.relu(x).chunk(2, dim=-1)
        attended = attend(x, "a")
        return attended + torch.cat((halves[1], halves[0]), dim=-1)


class AttendsTwiceInARow(TinyModel):
    """Two attentions with nothing between them but a view."""

    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads, output, again = x.unsqueeze(1), torch.empty(x.shape[0], 1, SIZE), torch.empty(x.shape[0], 1, SIZE)
        torch.ops.lockstep.attention(heads, heads, heads, output, "a", None)
        torch.ops.lockstep.attention(output, heads, heads, again, "b", None)
        return again.flatten(1)


class CountsTokensAfterACut(TinyModel):
    """The number of tokens, taken before an attention and used after it."""

    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        return attend(x, "a") * count


class HandsAShapeOn(TinyModel):
    """A whole shape taken before an attention and used after it."""

    def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        shape = x.size()
        return attend(x, "a") + torch.zeros(shape)


def cut(model: nn.Module) -> tuple[TracedModel, list[Segment]]:
    traced = trace(model)
    return traced, split_graph(traced.graph, traced.tokens)


def test_elements_of_a_tuple_are_taken_where_it_was_made() -> None:
    _, segments = cut(TakesHalvesAcrossACut())
    assert [segment.kind for segment in segments] == ["subgraph", "op", "subgraph"]
    assert all(isinstance(node.meta["example_value"], torch.Tensor) for node in segments[0].outputs)


def test_two_attentions_in_a_row_are_one_stage() -> None:
    _, segments = cut(AttendsTwiceInARow())
    assert [ops_of(segment) for segment in segments if segment.kind == "op"] == [[ATTENTION, ATTENTION]]


def test_the_number_of_tokens_is_handed_to_every_subgraph() -> None:
    traced, segments = cut(CountsTokensAfterACut())
    first, last = graphs(traced, segments)
    assert first.inputs[0] is last.inputs[0] is traced.tokens
    assert not any(isinstance(node.meta["example_value"], torch.SymInt) for node in segments[0].outputs)


def test_views_of_inputs_among_the_outputs_are_known() -> None:
    class GivesAView(TinyModel):
        def between(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return attend(attend(x, "a").unflatten(-1, (2, -1)).flatten(1), "b") + x

    traced, segments = cut(GivesAView())
    first, middle, _ = graphs(traced, segments)
    assert first.aliases == ()
    assert middle.aliases == (
        segments[2].outputs.index(next(n for n in segments[2].outputs if n.target == "unsqueeze")),
    )


def test_what_cannot_cross_a_cut_is_an_error_that_names_it() -> None:
    traced = trace(HandsAShapeOn())
    sizes = [node for node in traced.graph.nodes if isinstance(node.meta.get("example_value"), torch.Size)]
    if not sizes:
        pytest.skip("this torch resolves shapes while it traces")
    with pytest.raises(CompileError, match=r"returns a Size that is used after an attention layer"):
        split_graph(traced.graph, traced.tokens)


def test_canonical_graphs_are_valid(traced: TracedModel, segments: list[Segment]) -> None:
    for graph in graphs(traced, segments):
        assert isinstance(graph.module, fx.GraphModule)
        graph.module.graph.lint()
        assert len(graph.examples) == len(graph.inputs)
