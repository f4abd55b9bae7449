"""From a loaded model to what steps call: trace, cut, compile or find every subgraph, bind. One call at start-up.

A later start finds the plan of the same model on the same machine and skips all but the last. What each mode means is
``levels.py``'s. Nothing here executes the model or a collective, so a rank that fails here holds nobody up.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel.platform import Platform
from runtime.common.config import CompileMode, EngineConfig
from runtime.common.model_config import ModelConfig
from workers.compile.cache import Store
from workers.compile.compiled_model import CompiledModel
from workers.compile.errors import CompileError, TraceError
from workers.compile.keys import digest, environment, model_shape, source_digest
from workers.compile.plan import Plan, make_plan
from workers.compile.split import SPLITTING_OPS, Segment, Subgraph, make_subgraph, split_graph
from workers.compile.subgraph import INDUCTOR_OPTIONS, Run, SubgraphCompiler, load_subgraph
from workers.compile.tracing import FEWEST_TOKENS, example_inputs, explained, own_entry, trace_model

log = logging.getLogger("lockstep")

PLAN_FILE = "plan"

Compiled = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""input_ids [T], positions [T] -> hidden states [T, hidden_size], inside a forward context."""

Progress = Callable[[int, int], None]
"""Distinct subgraphs that are ready, and how many there are."""


@dataclass(frozen=True)
class CompileReport:
    """What compiling came to on this rank.

    Attributes:
        compiled_subgraphs: subgraphs this process put through Inductor.
        distinct_subgraphs: subgraphs that differ; each is compiled once, however many layers have it.
        cache_hits: distinct subgraphs taken from the cache.
        seconds: that all of it took.
        warnings: what the user should know.
        plan_from_cache: whether the model was not even traced.
        subgraphs: stages of the model that are compiled code; equal on all ranks.
    """

    compiled_subgraphs: int = 0
    distinct_subgraphs: int = 0
    cache_hits: int = 0
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    plan_from_cache: bool = False
    subgraphs: int = 0


def compile_model(
    model: nn.Module,
    *,
    mode: CompileMode,
    config: EngineConfig,
    model_config: ModelConfig,
    platform: Platform,
    device: torch.device,
    example_tokens: int,
    progress: Progress | None = None,
) -> tuple[Compiled, CompileReport]:
    """Compile a model whose weights are in place.

    Args:
        model: one rank's model.
        mode: from ``resolve_level``.
        config: resolved; ``cache_dir`` says where artifacts are kept, "" keeps none.
        model_config: part of the plan's key.
        platform: of the device.
        device: where the model is.
        example_tokens: tokens of the first trace; fewer than 2 are made 2.
        progress: told after every distinct subgraph.

    Returns:
        what a step calls, and the report. With mode NONE it is the model itself.

    Raises:
        CompileError: it cannot be compiled (TraceError: because of how the model is written).
    """
    started = time.perf_counter()
    example_tokens = max(example_tokens, FEWEST_TOKENS)
    if mode is CompileMode.NONE:
        return model, CompileReport()
    if mode is CompileMode.STOCK:
        compiled, traces = _stock(model, example_tokens, device)
        seconds = time.perf_counter() - started
        return compiled, CompileReport(traces, traces, 0, seconds, subgraphs=1)
    store = Store(os.path.join(config.cache_dir, "compile") if config.cache_dir else "")
    ops = SPLITTING_OPS if mode is CompileMode.PIECEWISE else ()
    job = _Job(model, store, ops, platform, device, example_tokens, progress or (lambda done, total: None))
    compiled = job.from_plan(model_config)
    from_cache = compiled is not None
    if compiled is None:
        compiled = job.from_model(model_config)
    return compiled, CompileReport(
        compiled_subgraphs=job.compiled,
        distinct_subgraphs=len(job.runs),
        cache_hits=len(job.runs) - job.compiled,
        seconds=time.perf_counter() - started,
        warnings=tuple(store.warnings),
        plan_from_cache=from_cache,
        subgraphs=sum(stage.kind == "subgraph" for stage in compiled.stages),
    )


class _Job:
    """One compilation: what the steps of it share."""

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        splitting_ops: tuple[str, ...],
        platform: Platform,
        device: torch.device,
        example_tokens: int,
        progress: Progress,
    ) -> None:
        self._model = model
        self._store = store
        self._splitting_ops = splitting_ops
        self._device = device
        self._example_tokens = example_tokens
        self._progress = progress
        self._base = [platform.name, environment(device), source_digest(model), dict(INDUCTOR_OPTIONS)]
        self.runs: dict[str, Run] = {}
        self.compiled = 0

    def _plan_key(self, model_config: ModelConfig) -> str:
        return digest("plan", *self._base, model_config.to_dict(), model_shape(self._model), list(self._splitting_ops))

    def from_plan(self, model_config: ModelConfig) -> CompiledModel | None:
        """The model of an earlier start's plan, None if plan or subgraphs are not all there."""
        entry = self._store.load(self._plan_key(model_config))
        if entry is None:
            return None
        try:
            plan = Plan.unpacked(entry.files[PLAN_FILE])
            for done, key in enumerate(plan.artifacts):
                run = self._stored(key)
                if run is None:
                    return None
                self.runs[key] = run
                self._progress(done + 1, len(plan.artifacts))
            return plan.bind(self._model, self.runs)
        except (CompileError, KeyError, TypeError, ValueError) as error:
            self._store.warn(f"the compiled model in {entry.folder} cannot be used ({error}); tracing the model anew")
            return None

    def from_model(self, model_config: ModelConfig) -> CompiledModel:
        """The model by tracing the model; its plan is kept for the next start."""
        traced = trace_model(self._model, num_tokens=self._example_tokens, device=self._device)
        segments = split_graph(traced.graph, traced.tokens, self._splitting_ops)
        subgraphs: dict[Segment, tuple[Subgraph, str]] = {}
        portable: dict[str, bool] = {}
        for number, segment in enumerate(segments):
            if segment.kind == "subgraph":
                graph = make_subgraph(segment, traced.tokens)
                # An output that is a view of an input, and that an op writes to afterwards, has to be that view.
                views = {segment.outputs[position] for position in graph.aliases}
                written = any(views & set(later.inputs) for later in segments[number + 1 :] if later.kind == "op")
                key = digest("subgraph", *self._base, graph.text, written)
                subgraphs[segment] = graph, key
                portable[key] = not written
        self._ready({key: graph for graph, key in subgraphs.values()}, portable)
        plan = make_plan(traced, segments, subgraphs)
        self._store.save(self._plan_key(model_config), {PLAN_FILE: plan.packed()})
        return plan.bind(self._model, self.runs)

    def _ready(self, graphs: Mapping[str, Subgraph], portable: Mapping[str, bool]) -> None:
        """Make every subgraph runnable. What another process is compiling is left to it, and waited for last."""
        self.runs = {key: run for key, run in self.runs.items() if key in graphs}
        pending = [key for key in graphs if key not in self.runs]
        wait = False
        with SubgraphCompiler(self._store, self._device) as compiler:
            while pending:
                left: list[str] = []
                for key in pending:
                    if not self._obtain(key, graphs[key], portable[key], compiler, wait=wait and not left):
                        left.append(key)
                        continue
                    self._progress(len(self.runs), len(graphs))
                # Nothing was free: wait for the first of them. Any progress makes it worth asking for all again.
                wait = len(left) == len(pending)
                pending = left

    def _obtain(self, key: str, graph: Subgraph, portable: bool, compiler: SubgraphCompiler, *, wait: bool) -> bool:
        run = self._stored(key)
        if run is None:
            with self._store.lock(key, wait=wait) as held:
                if not held:
                    return False
                run = self._stored(key)  # Another process may have had the lock before.
                if run is None:
                    subgraph = compiler.compile(graph, portable=portable)
                    self._store.save(key, subgraph.files)
                    self.compiled += 1
                    run = subgraph.run
        self.runs[key] = run
        return True

    def _stored(self, key: str) -> Run | None:
        entry = self._store.load(key)
        if entry is None:
            return None
        try:
            return load_subgraph(entry, key, self._store, self._device)
        except CompileError as error:
            self._store.warn(f"{error}; compiling it again")
            return None


class _StockBackend:
    """Inductor as torch.compile calls it, but a call made only to compile runs nothing."""

    def __init__(self) -> None:
        self.traces = 0
        self.only_compile = True

    def __call__(self, module: Any, examples: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        self.traces += 1
        run = compile_fx(module, examples)

        def call(*arguments: Any) -> Any:
            if self.only_compile:
                raise _Compiled
            return run(*arguments)  # pyright: ignore[reportCallIssue]

        return call


class _Compiled(Exception):
    """Raised instead of running compiled code."""


def _stock(model: nn.Module, example_tokens: int, device: torch.device) -> tuple[Compiled, int]:
    """torch.compile with its guards, warmed up for one token and for several, which it compiles separately."""
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1
    from torch._dynamo.exc import TorchDynamoException

    backend = _StockBackend()
    compiled = torch.compile(own_entry(model.forward), fullgraph=True, dynamic=True, backend=backend)
    for tokens in dict.fromkeys((example_tokens, 1)):
        arguments = example_inputs(model, tokens, device)  # pyright: ignore[reportArgumentType]
        try:
            with torch.inference_mode():
                compiled(*arguments.values())
        except _Compiled:
            continue
        except TorchDynamoException as error:
            raise TraceError(explained(error, model)) from error
    backend.only_compile = False
    return compiled, backend.traces
