"""CUDA graphs of decode steps (FULL) and of the compiled subgraphs between attention layers (PIECEWISE).

A capture records launches instead of running them; a replay launches all of them at once, on the captured addresses.
So inputs are the static inputs of the runner, and all memory that captured code allocates comes from one pool that
only replays use. Replays run one at a time, so a later capture may reuse the memory of an earlier one: the largest
size is captured first, and within a size a subgraph may reuse what earlier subgraphs have released.

Everything is warmed up before the first capture, because compiling a kernel or setting up a communicator cannot be
captured. A warm-up runs the model with its collectives, so all ranks do it together. A capture launches nothing, so a
rank that fails in it blocks no other rank.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from runtime.common.config import GraphMode
from workers.compile.compiled_model import CompiledModel, Stage
from workers.forward_context import AttentionMetadata, forward_context
from workers.graphs.dispatcher import Dispatch
from workers.graphs.inputs import Forward, MakeContext, StaticInputs

T = TypeVar("T")


class CudaGraphs:
    """The captured graphs of one forward pass.

    Args:
        forward: a compiled model; for FULL also a module or a function.
        inputs: the static inputs.
        make_context: see :data:`~workers.graphs.inputs.MakeContext`.
        device: of this rank.
    """

    def __init__(self, forward: Forward, inputs: StaticInputs, make_context: MakeContext, device: torch.device) -> None:
        self._forward = forward
        self._inputs = inputs
        self._make_context = make_context
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._replays: dict[Dispatch, Callable[[], Any]] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool: Any = None
        self._output: torch.Tensor | None = None

    def discard(self) -> None:
        """Drop everything that was captured, and free its memory."""
        self._replays.clear()
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = None
        torch.cuda.empty_cache()

    def warm_up(self, key: Dispatch) -> None:
        """Run what :meth:`capture` will capture. Collective."""
        with self._on_stream(), forward_context(self._make_context(self._metadata(key))):
            hidden = self._forward(*self._inputs.tokens(key.size))
            if self._output is None or self._output.shape[0] < key.size:
                # Outside of captures: memory from the pool would be reused by later captures.
                self._output = torch.empty_like(hidden)

    @contextlib.contextmanager
    def capturing(self) -> Generator[None]:
        """Encloses all captures: cached memory is freed before, and the device is idle before and after."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)

    def capture(self, key: Dispatch) -> None:
        """Capture one graph, or one for each subgraph. Executes no collective.

        Raises:
            RuntimeError: an operation cannot be captured, or memory ran out.
        """
        assert self._output is not None, "warm_up comes before capture"
        with self._on_stream(), forward_context(self._make_context(self._metadata(key))):
            if key.mode is GraphMode.FULL:
                self._replays[key] = self._capture_whole(key.size, self._output[: key.size])
            else:
                self._replays[key] = self._capture_subgraphs(key.size, self._output[: key.size])

    def replay(self, key: Dispatch, metadata: AttentionMetadata) -> torch.Tensor:
        """Hidden states [size, hidden_size], valid until the next replay. Does not synchronize with the device."""
        assert self._output is not None, "capture comes before replay"
        context = self._make_context(metadata)  # Prepares the attention backend, whose buffers a FULL graph may read.
        if key.mode is GraphMode.FULL:
            self._replays[key]()
        else:
            with forward_context(context):
                self._replays[key]()
        return self._output[: key.size]

    def _metadata(self, key: Dispatch) -> AttentionMetadata:
        """The metadata of a dummy batch whose attention launches its kernels: decode for FULL, else a prompt."""
        return (
            self._inputs.dummy_decode(key.size) if key.mode is GraphMode.FULL else self._inputs.dummy_prompt(key.size)
        )

    @contextlib.contextmanager
    def _on_stream(self) -> Generator[None]:
        """Run on the stream of all warm-ups and captures: the pool reuses memory within one stream only."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _graph_of(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture ``run``; its result has no content before the first replay."""
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        # Other threads (NCCL's watchdog) may go on using CUDA meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = run()
        except BaseException:
            # The stream has to leave capture mode; the failed graph raises again here.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, result

    def _capture_whole(self, size: int, output: torch.Tensor) -> Callable[[], Any]:
        tokens = self._inputs.tokens(size)
        graph, _ = self._graph_of(lambda: output.copy_(self._forward(*tokens)))
        return graph.replay

    def _capture_subgraphs(self, size: int, output: torch.Tensor) -> Callable[[], Any]:
        """Capture every subgraph. Stages of ops run once, so that their results exist; they write no KV."""
        model = self._forward
        assert isinstance(model, CompiledModel), "supported_mode() allows PIECEWISE for compiled models only"
        values = model.start(*self._inputs.tokens(size))
        steps: list[Callable[[], Any]] = []
        # The pool owns a subgraph's results. They are held until their last use, and ``values`` has unowned aliases of
        # them, so later subgraphs can reuse the memory and all sizes together need as much as one forward pass.
        held: dict[int, Any] = {}
        for stage, dropped in zip(model.stages, model.last_uses, strict=True):
            given = [values[index] for index in stage.inputs]
            if stage.kind == "subgraph":
                graph, made = self._graph_of(functools.partial(_run_subgraph, stage, given, model.output, output))
                held |= zip(stage.outputs, made, strict=True)
                steps.append(graph.replay)
                made = [unowned(value) if isinstance(value, torch.Tensor) else value for value in made]
            else:
                made = list(stage.run(list(given)))
                steps.append(functools.partial(_run_ops, stage.run, given, made))
                if model.output in stage.outputs:
                    steps.append(functools.partial(output.copy_, made[stage.outputs.index(model.output)]))
            for index, value in zip(stage.outputs, made, strict=True):
                values[index] = value
            for index in dropped:
                held.pop(index, None)
        return functools.partial(_run_all, tuple(steps))


def _run_subgraph(stage: Stage, given: list[Any], result: int, output: torch.Tensor) -> Sequence[Any]:
    """A subgraph's results; if the model's result is among them, it is also copied to the static output."""
    made = stage.run(list(given))
    if result in stage.outputs:
        output.copy_(made[stage.outputs.index(result)])
    return made


def _run_ops(run: Callable[[list[Any]], Sequence[Any]], given: list[Any], made: list[Any]) -> None:
    """Run a stage of ops on arguments with fixed addresses; copy its results to where the subgraphs read them."""
    for place, value in zip(made, run(list(given)), strict=True):
        if isinstance(place, torch.Tensor) and place.numel() and place.data_ptr() != value.data_ptr():
            place.copy_(value)


def _run_all(steps: tuple[Callable[[], Any], ...]) -> None:
    for step in steps:
        step()


class _Memory:
    """Device memory with the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of a CUDA tensor that does not keep its memory allocated."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _Memory(tensor.data_ptr(), elements * tensor.element_size())
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
