"""One trace of a model: its forward becomes one FX graph that serves every number of tokens.

The token dimension is *unbacked*: its size is unknown, so a forward that branches on it (``if x.shape[0] == 1``) is an
error with its line. A merely dynamic dimension would be specialised at 0 and 1, and without guards the specialised
graph would be used for all sizes. Tracing executes no op and no collective.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx, nn

from workers.compile.errors import TraceError

MIN_TOKENS = 2
"""Torch specialises sizes 0 and 1 (empty, broadcast), so a trace needs more tokens."""


class TraceableModel(Protocol):
    """A model's forward, and the token dimension of each argument."""

    @property
    def dynamic_arg_dims(self) -> Mapping[str, int]:
        """Argument name to its token dimension."""
        ...

    @property
    def forward(self) -> Callable[..., torch.Tensor]:
        """One step: int64 tensors to hidden states, [tokens, hidden_size]."""
        ...


@dataclass(frozen=True)
class TracedModel:
    """The graph of a model and the meaning of its placeholders.

    Attributes:
        graph: placeholders, calls, and one output, a tuple of one tensor. Fake values are in ``meta``.
        step_inputs: placeholder of each argument of forward.
        bound: placeholder to the name of its parameter or buffer.
        tokens: the placeholder of the number of tokens.
        traces: number of traces: 1.
    """

    graph: fx.Graph
    step_inputs: Mapping[str, fx.Node]
    bound: Mapping[fx.Node, str]
    tokens: fx.Node
    traces: int


class _Captured(Exception):
    """Raised in place of executing a graph."""


class Capture:
    """A backend of ``torch.compile`` that keeps the graph, counts traces and executes nothing."""

    def __init__(self) -> None:
        self.traces = 0
        self.module: fx.GraphModule | None = None
        self.examples: list[Any] = []

    def __call__(self, module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Called by Dynamo once per trace."""
        self.traces += 1
        self.module, self.examples = module, examples

        def stop(*_: Any) -> Any:
            raise _Captured

        return stop


def example_inputs(model: TraceableModel, num_tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Arguments of forward for a step of ``num_tokens`` tokens."""
    shapes = {name: [1] * dim + [num_tokens] for name, dim in model.dynamic_arg_dims.items()}
    return {name: torch.zeros(shape, dtype=torch.int64, device=device) for name, shape in shapes.items()}


def own_entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``function`` and has a code object of its own.

    Dynamo caches compiled code by code object. A code object of its own is freed with the entry, so the cache neither
    keeps a model in memory nor counts against the recompilation limit of the model's forward.
    """

    def entry(*args: Any) -> Any:
        return function(*args)

    return types.FunctionType(entry.__code__.replace(), entry.__globals__, "entry", None, entry.__closure__)


def trace_model(
    model: nn.Module, *, num_tokens: int, device: torch.device, capture: Capture | None = None
) -> TracedModel:
    """Trace ``model.forward`` once without guards, and check that the graph serves other numbers of tokens.

    Args:
        model: with ``dynamic_arg_dims``; its parameters and buffers are inputs of the graph.
        num_tokens: number of tokens of the trace, at least 2.
        device: of the arguments of forward.
        capture: the backend; default: a new one.

    Raises:
        ValueError: fewer tokens than 2.
        TraceError: forward branches on a value, cannot be traced, or specialises the number of tokens.
    """
    if num_tokens < MIN_TOKENS:
        raise ValueError(
            f"the first trace has {num_tokens} tokens and needs {MIN_TOKENS} or more: torch specialises sizes 0 and 1"
        )
    import torch._dynamo

    capture = Capture() if capture is None else capture
    compiled = torch.compile(
        own_entry(model.forward),
        fullgraph=True,
        backend=capture,
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )
    arguments = example_inputs(model, num_tokens, device)  # pyright: ignore[reportArgumentType]
    dims: Mapping[str, int] = model.dynamic_arg_dims  # pyright: ignore[reportAssignmentType]
    for name, dim in dims.items():
        torch._dynamo.decorators.mark_unbacked(arguments[name], dim, shape_id="tokens")
    _run_until_captured(compiled, arguments, model)
    assert capture.module is not None, "a captured call leaves its graph"
    first = capture.module
    other = example_inputs(model, num_tokens + 1, device)  # pyright: ignore[reportArgumentType]
    _run_until_captured(compiled, other, model)
    if capture.traces != 1:
        raise TraceError(
            f"{type(model).__name__} was traced {capture.traces} times: a step of {num_tokens + 1} tokens did not use "
            f"the graph of {num_tokens}, so steps would compile while serving; run it with --enforce-eager"
        )
    traced = _resolve_placeholders(model, first, capture, arguments)
    _check_every_size(model, traced, num_tokens, dims)
    return traced


def _run_until_captured(compiled: Callable[..., Any], arguments: dict[str, torch.Tensor], model: nn.Module) -> None:
    from torch._dynamo.exc import TorchDynamoException

    try:
        with torch.inference_mode():
            compiled(*arguments.values())
    except _Captured:
        return
    except TorchDynamoException as error:
        raise TraceError(explain(error, model)) from error
    raise TraceError(f"{type(model).__name__} ran without torch.compile calling its backend")


def explain(error: Exception, model: nn.Module) -> str:
    """A message that begins with the line of model code that cannot be traced."""
    stack = list(getattr(error, "real_stack", None) or ())
    torch_folder = str(Path(torch.__file__).parent)
    ours = [frame for frame in stack if not frame.filename.startswith(torch_folder)] or stack
    reason = str(error).strip().splitlines() or [type(error).__name__]
    if not ours:
        return f"{type(model).__name__} cannot be traced as one graph: {error}"
    frame = ours[-1]
    return (
        f"{frame.filename}:{frame.lineno}, in {frame.name}: `{(frame.line or '').strip()}` cannot be part of one "
        f"graph for every step: {reason[0]}. A model's forward must not branch on a tensor's value or on the number of "
        "tokens; use torch.where, or run with --enforce-eager"
    )


def _resolve_placeholders(
    model: nn.Module, module: fx.GraphModule, capture: Capture, arguments: dict[str, torch.Tensor]
) -> TracedModel:
    """Identify each placeholder: an argument, a parameter or buffer, or the number of tokens."""
    known = {id(tensor): name for name, tensor in _named_tensors(model)}
    step_ids = {id(tensor): name for name, tensor in arguments.items()}
    steps: dict[str, fx.Node] = {}
    bound: dict[fx.Node, str] = {}
    counts: list[fx.Node] = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, capture.examples, strict=True):
        if isinstance(example, torch.SymInt):
            counts.append(node)
        elif id(example) in step_ids:
            steps[step_ids[id(example)]] = node
        elif id(example) in known:
            bound[node] = known[id(example)]
        else:
            raise TraceError(
                f"{type(model).__name__}.forward uses a tensor that is neither parameter nor buffer ({node.name}); "
                "register it with register_buffer, so that it is loaded, moved and shared like the others"
            )
    constants = [node for node in module.graph.nodes if node.op == "get_attr"]
    if constants:
        raise TraceError(
            f"{_line_of(constants[0], model)} makes a constant tensor part of the graph; make it a buffer of the module"
        )
    if len(counts) != 1 or set(steps) != set(arguments):
        raise TraceError(
            f"{type(model).__name__}.forward has {len(counts)} different dynamic sizes and uses the arguments "
            f"{sorted(steps)}; it takes {sorted(arguments)}, all of one number of tokens"
        )
    return TracedModel(module.graph, steps, bound, counts[0], capture.traces)


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _check_every_size(model: nn.Module, traced: TracedModel, num_tokens: int, dims: Mapping[str, int]) -> None:
    """Refuse a graph that is specialised to the traced number of tokens: no guard checks that in a step."""
    output = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    if not isinstance(output, (tuple, list)) or len(output) != 1:
        raise TraceError(f"{type(model).__name__}.forward has to return one tensor, the hidden states")
    results = [(node, dims[name]) for name, node in traced.step_inputs.items()] + [(output[0], 0)]
    count = traced.tokens.meta["example_value"]
    for node, dim in results:
        size = node.meta["example_value"].shape[dim]
        if isinstance(size, int) or isinstance(count.node.maybe_as_int(), int):
            raise TraceError(
                f"{type(model).__name__} was traced for exactly {num_tokens} tokens instead of any number: "
                f"{_line_of(_fixing_node(traced.graph, num_tokens), model)} fixes the size"
            )


def _fixing_node(graph: fx.Graph, num_tokens: int) -> fx.Node | None:
    """The first call with the traced number of tokens as a constant argument."""

    def holds(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(holds(item) for item in value)
        return isinstance(value, int) and not isinstance(value, bool) and value == num_tokens

    calls = [node for node in graph.nodes if isinstance(node.meta.get("example_value"), torch.Tensor)]
    return next((node for node in calls if node.op != "placeholder" and holds(node.args)), None)


def _line_of(node: fx.Node | None, model: nn.Module) -> str:
    """``file:line, in function: `code``` of a node, as far as Dynamo recorded it."""
    frames = re.findall(r'File "(.+)", line (\d+), in (.+)\n\s*(.+)', (node.stack_trace or "") if node else "")
    if not frames:
        return f"{type(model).__name__}.forward"
    file, line, function, code = frames[-1]
    return f"{file}:{line}, in {function}: `{code}`"
