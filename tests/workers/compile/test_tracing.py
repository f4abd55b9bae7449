"""One trace serves any number of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import fx, nn

from parallel.group import single_rank_group
from runtime.common.model_config import load_model_config
from tests.checkpoints import tiny_checkpoint
from tests.workers.compile import models
from tests.workers.compile.models import TinyModel, line_of
from workers.compile.errors import TraceError
from workers.compile.split import op_name
from workers.compile.tracing import Capture, TracedModel, trace_model
from workers.models.decoder import DecoderForCausalLM
from workers.models.registry import build_model

CPU = torch.device("cpu")


def trace(model: nn.Module, num_tokens: int = 13, capture: Capture | None = None) -> TracedModel:
    return trace_model(model, num_tokens=num_tokens, device=CPU, capture=capture)


@pytest.fixture(scope="module")
def model() -> DecoderForCausalLM:
    config = load_model_config(tiny_checkpoint("qwen3-bias"))
    built = build_model(config, group=single_rank_group(CPU), dtype=torch.float32)
    return built.to_empty(device=CPU)


@pytest.fixture(scope="module")
def traced(model: DecoderForCausalLM) -> TracedModel:
    return trace(model)


def calls(traced: TracedModel) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]


def test_the_graph_holds_placeholders_calls_and_one_output(traced: TracedModel) -> None:
    assert {node.op for node in calls(traced)} <= {"call_function", "call_method"}
    assert sum(node.op == "output" for node in traced.graph.nodes) == 1


def test_the_layer_loop_leaves_only_its_ops(model: DecoderForCausalLM, traced: TracedModel) -> None:
    ops = [op_name(node.target) for node in calls(traced)]
    assert ops.count("lockstep::attention") == ops.count("lockstep::kv_cache_update") == model.config.num_layers
    names = [node.args[4] for node in calls(traced) if op_name(node.target) == "lockstep::attention"]
    assert names == list(model.attention_layers)


def test_parameters_are_inputs_and_no_cache_is(model: DecoderForCausalLM, traced: TracedModel) -> None:
    used = {name for name, _ in model.named_parameters()} | {"model.rotary_embs.0.table"}
    assert set(traced.bound.values()) == used  # the head is tied and outside of forward
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    assert set(placeholders) == {*traced.bound, *traced.step_inputs.values(), traced.tokens}
    assert len(placeholders) == len(used) + 3


def test_the_token_dimension_is_a_symbol_everywhere(traced: TracedModel) -> None:
    output = next(node for node in traced.graph.nodes if node.op == "output").args[0][0]
    for node in (*traced.step_inputs.values(), output):
        assert node.meta["example_value"].shape[0].node.expr == traced.tokens.meta["example_value"].node.expr


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_first_trace_at_zero_or_one_tokens_is_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"has {num_tokens} tokens and needs 2 or more"):
        trace(TinyModel(), num_tokens)


def test_a_graph_serves_every_number_of_tokens() -> None:
    model, capture = TinyModel(), Capture()
    traced = trace(model, capture=capture)
    assert traced.traces == capture.traces == 1
    named = dict([*model.named_parameters(), *model.named_buffers()])
    run = fx.Interpreter(fx.GraphModule(nn.Module(), traced.graph))
    for count in (1, 2, 13, 40):
        ids, positions = torch.arange(count) % 32, torch.arange(count)
        given = {traced.step_inputs["input_ids"]: ids, traced.step_inputs["positions"]: positions, traced.tokens: count}
        given |= {node: named[name] for node, name in traced.bound.items()}
        found = run.run(*[given[node] for node in traced.graph.nodes if node.op == "placeholder"])
        torch.testing.assert_close(found[0], model(ids, positions))


def test_tracing_leaves_no_model_behind() -> None:
    """Hundreds of traces in one process are no recompilations of one function."""
    for _ in range(10):
        assert trace(TinyModel()).traces == 1


@pytest.fixture
def no_declared_dimension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing were dynamic, which without guards makes a graph for one size."""
    monkeypatch.setattr("torch._dynamo.decorators.mark_unbacked", lambda *_, **__: None)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        yield


@pytest.mark.usefixtures("no_declared_dimension")
def test_a_second_trace_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compiler.skip_all_guards_unsafe", lambda entries: [True] * len(entries))
    with pytest.raises(TraceError, match="was traced 2 times: a step of 14 tokens did not use the graph of 13"):
        trace(TinyModel())


@pytest.mark.usefixtures("no_declared_dimension")
def test_a_graph_of_one_size_is_an_error_though_no_guard_tells() -> None:
    capture = Capture()
    with pytest.raises(TraceError, match="0 different dynamic sizes"):
        trace(TinyModel(), capture=capture)
    assert capture.traces == 1


@pytest.mark.parametrize(
    "kind",
    [
        models.BranchesOnValue,
        models.BranchesOnTokens,
        models.TreatsOneTokenSpecially,
        models.LoopsOverTokens,
        models.FixesTheSize,
    ],
)
def test_what_cannot_be_one_graph_is_an_error_that_names_the_line(kind: type[TinyModel]) -> None:
    with pytest.raises(TraceError) as caught:
        trace(kind())
    assert line_of(kind) in str(caught.value)
    assert str(caught.value).startswith((line_of(kind), f"{kind.__name__} was traced for exactly 13 tokens"))


def test_a_branch_says_what_to_do() -> None:
    with pytest.raises(TraceError, match=r"in between: `if x.sum\(\) > 0:.*torch.where.*--enforce-eager"):
        trace(models.BranchesOnValue())


def test_a_tensor_that_is_no_buffer_is_refused() -> None:
    with pytest.raises(TraceError, match=r"neither parameter nor buffer .*loose.*register_buffer"):
        trace(models.UsesALooseTensor())


def test_forward_gives_one_tensor() -> None:
    with pytest.raises(TraceError, match="has to return one tensor"):
        trace(models.GivesTwoTensors())
