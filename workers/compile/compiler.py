"""From a loaded model to the forward that steps call: trace, split, compile or load every subgraph, bind.

A later start with an equal model on an equal machine loads the plan and skips tracing. No op and no collective is
executed here, so a rank that fails blocks no other rank.
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
from workers.compile.compiled_model import CompiledModel, Run
from workers.compile.errors import CompileError, TraceError
from workers.compile.keys import cache_key, environment, model_shape, source_hash
from workers.compile.plan import Plan, make_plan
from workers.compile.split import SPLITTING_OPS, Segment, Subgraph, make_subgraph, split_graph
from workers.compile.subgraph_compiler import INDUCTOR_OPTIONS, SubgraphCompiler, load_subgraph
from workers.compile.tracing import MIN_TOKENS, example_inputs, explain, own_entry, trace_model

log = logging.getLogger("lockstep")

PLAN_FILE = "plan"

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""input_ids [T], positions [T] -> hidden states [T, hidden_size], inside a forward context."""

Progress = Callable[[int, int], None]
"""Called with the number of ready distinct subgraphs and the number of all."""


@dataclass(frozen=True)
class CompileReport:
    """The result of compiling on this rank.

    Attributes:
        compiled_subgraphs: subgraphs that this process compiled with Inductor.
        distinct_subgraphs: subgraphs that differ; each is compiled once, however many layers use it.
        cache_hits: distinct subgraphs loaded from the cache.
        seconds: duration of all of it.
        warnings: messages for the user.
        plan_from_cache: whether the trace was skipped.
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
) -> tuple[Forward, CompileReport]:
    """Compile a model whose weights are loaded.

    Args:
        model: this rank's shard.
        mode: from ``resolve_level``.
        config: resolved; artifacts are kept under its ``cache_dir``, "" keeps none.
        model_config: part of the plan's key.
        platform: of the device.
        device: of the model.
        example_tokens: number of tokens of the first trace, at least 2; smaller values count as 2.
        progress: called after every distinct subgraph.

    Returns:
        the forward that steps call, and the report. With mode NONE it is the model itself.

    Raises:
        CompileError: the model cannot be compiled (TraceError: because of its code).
    """
    started = time.perf_counter()
    example_tokens = max(example_tokens, MIN_TOKENS)
    if mode is CompileMode.NONE:
        return model, CompileReport()
    if mode is CompileMode.STOCK:
        compiled, traces = _stock(model, example_tokens, device)
        seconds = time.perf_counter() - started
        return compiled, CompileReport(traces, traces, 0, seconds, subgraphs=1)
    store = Store(os.path.join(config.cache_dir, "compile") if config.cache_dir else "")
    ops = SPLITTING_OPS if mode is CompileMode.PIECEWISE else ()
    progress = progress or (lambda done, total: None)
    compilation = _Compilation(model, store, ops, platform, device, example_tokens, progress)
    compiled = compilation.from_plan(model_config)
    from_cache = compiled is not None
    if compiled is None:
        compiled = compilation.from_model(model_config)
    return compiled, CompileReport(
        compiled_subgraphs=compilation.compiled,
        distinct_subgraphs=len(compilation.runs),
        cache_hits=len(compilation.runs) - compilation.compiled,
        seconds=time.perf_counter() - started,
        warnings=tuple(store.warnings),
        plan_from_cache=from_cache,
        subgraphs=compiled.num_subgraphs,
    )


class _Compilation:
    """The state of one compilation.

    Attributes:
        runs: compiled code by cache key.
        compiled: number of subgraphs that this process compiled.
    """

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
        self._base = [platform.name, environment(device), source_hash(model), dict(INDUCTOR_OPTIONS)]
        self.runs: dict[str, Run] = {}
        self.compiled = 0

    def _plan_key(self, model_config: ModelConfig) -> str:
        shape = model_shape(self._model)
        return cache_key("plan", *self._base, model_config.to_dict(), shape, list(self._splitting_ops))

    def from_plan(self, model_config: ModelConfig) -> CompiledModel | None:
        """The compiled model of a cached plan; None if the plan or one of its subgraphs is not cached."""
        entry = self._store.load(self._plan_key(model_config))
        if entry is None:
            return None
        try:
            plan = Plan.unpacked(entry.files[PLAN_FILE])
            for done, key in enumerate(plan.artifacts):
                run = self._load(key)
                if run is None:
                    return None
                self.runs[key] = run
                self._progress(done + 1, len(plan.artifacts))
            return plan.bind(self._model, self.runs)
        except (CompileError, KeyError, TypeError, ValueError) as error:
            self._store.warn(f"the compiled model in {entry.folder} is unusable ({error}); tracing the model again")
            return None

    def from_model(self, model_config: ModelConfig) -> CompiledModel:
        """Trace and compile the model, and save its plan for later starts."""
        traced = trace_model(self._model, num_tokens=self._example_tokens, device=self._device)
        segments = split_graph(traced.graph, traced.tokens, self._splitting_ops)
        subgraphs: dict[Segment, tuple[Subgraph, str]] = {}
        portable: dict[str, bool] = {}
        for number, segment in enumerate(segments):
            if segment.kind == "subgraph":
                graph = make_subgraph(segment, traced.tokens)
                # An output that is a view of an input, and that a later op writes to, has to share its memory.
                views = {segment.outputs[position] for position in graph.aliases}
                written = any(views & set(later.inputs) for later in segments[number + 1 :] if later.kind == "op")
                key = cache_key("subgraph", *self._base, graph.text, written)
                subgraphs[segment] = graph, key
                portable[key] = not written
        self._obtain_all({key: graph for graph, key in subgraphs.values()}, portable)
        plan = make_plan(traced, segments, subgraphs)
        self._store.save(self._plan_key(model_config), {PLAN_FILE: plan.packed()})
        return plan.bind(self._model, self.runs)

    def _obtain_all(self, graphs: Mapping[str, Subgraph], portable: Mapping[str, bool]) -> None:
        """Load or compile every subgraph. Those that other processes are compiling come last, and are waited for."""
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
                # Every lock was held: wait for the first. After any progress, try all of them again.
                wait = len(left) == len(pending)
                pending = left

    def _obtain(self, key: str, graph: Subgraph, portable: bool, compiler: SubgraphCompiler, *, wait: bool) -> bool:
        """Load or compile one subgraph; False if another process holds its lock."""
        run = self._load(key)
        if run is None:
            with self._store.lock(key, wait=wait) as held:
                if not held:
                    return False
                run = self._load(key)  # The previous holder of the lock may have compiled it.
                if run is None:
                    subgraph = compiler.compile(graph, portable=portable)
                    self._store.save(key, subgraph.files)
                    self.compiled += 1
                    run = subgraph.run
        self.runs[key] = run
        return True

    def _load(self, key: str) -> Run | None:
        entry = self._store.load(key)
        if entry is None:
            return None
        try:
            return load_subgraph(entry, key, self._store, self._device)
        except CompileError as error:
            self._store.warn(f"{error}; compiling it again")
            return None


class _StockBackend:
    """Inductor as ``torch.compile`` calls it. While ``only_compile`` is set, compiled code is not executed."""

    def __init__(self) -> None:
        self.traces = 0
        self.only_compile = True

    def __call__(self, module: Any, examples: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        self.traces += 1
        run = compile_fx(module, examples)

        def call(*arguments: Any) -> Any:
            if self.only_compile:
                raise _NotExecuted
            return run(*arguments)  # pyright: ignore[reportCallIssue]

        return call


class _NotExecuted(Exception):
    """Raised in place of executing compiled code."""


def _stock(model: nn.Module, example_tokens: int, device: torch.device) -> tuple[Forward, int]:
    """``torch.compile`` with guards, warmed up for one token and for several, which it compiles separately."""
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
        except _NotExecuted:
            continue
        except TorchDynamoException as error:
            raise TraceError(explain(error, model)) from error
    backend.only_compile = False
    return compiled, backend.traces
