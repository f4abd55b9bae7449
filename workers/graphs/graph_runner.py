"""Runs the forward pass of a step: in a captured graph where one fits, else through the model.

The runner of a rank calls :meth:`GraphRunner.choose` for a step, fills its buffers to the chosen size, and passes the
choice to :meth:`GraphRunner.run`. ``cuda_graph.py`` and ``cpu_replay.py`` capture graphs.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType

import torch

from runtime.common.config import GraphMode
from runtime.common.errors import EngineError
from workers.batch import BatchBuffers
from workers.compile.compiled_model import CompiledModel
from workers.forward_context import AttentionMetadata, forward_context
from workers.graphs.cpu_replay import CpuReplay, Direct
from workers.graphs.cuda_graph import CudaGraphs
from workers.graphs.dispatcher import Captured, CaptureSizes, Dispatch, dispatch
from workers.graphs.inputs import Forward, MakeContext, StaticInputs

Progress = Callable[[int, int], None]
"""Called with the number of finished graphs and the number of all."""


class CaptureError(EngineError):
    """This rank failed to capture its graphs and holds none."""


class GraphRunner:
    """The forward pass of one rank and its captured graphs.

    Args:
        forward: a compiled model, or the module itself.
        mode: what to capture, from :func:`workers.graphs.dispatcher.supported_mode`.
        sizes: the numbers of tokens to capture.
        buffers: the static tensors of a step.
        make_context: makes a step's forward context from its metadata.
        device: of this rank.
        direct: on a CPU: Python functions that replays call in place of ops.

    Attributes:
        captured: the sizes that have a graph.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        mode: GraphMode,
        sizes: CaptureSizes,
        buffers: BatchBuffers,
        make_context: MakeContext,
        device: torch.device,
        direct: Direct = MappingProxyType({}),
    ) -> None:
        self._forward = forward
        self._inputs = StaticInputs(buffers)
        self._make_context = make_context
        self._direct = direct
        self.captured = Captured()
        full = sizes.decode if mode.decode is GraphMode.FULL else ()
        piecewise = sizes.mixed if GraphMode.PIECEWISE in (mode.decode, mode.mixed) else ()
        keys = [Dispatch(GraphMode.FULL, size) for size in full]
        keys += [Dispatch(GraphMode.PIECEWISE, size) for size in piecewise]
        # Largest first: the memory of the largest size serves all that follow.
        self._keys = sorted(keys, key=lambda key: -key.size)
        self._graphs: CudaGraphs | CpuReplay | None = None
        if keys and device.type == "cuda":
            self._graphs = CudaGraphs(forward, self._inputs, make_context, device)
        elif keys:
            assert isinstance(forward, CompiledModel), "supported_mode() allows no CPU graphs of an untraced model"
            self._graphs = CpuReplay(forward, self._inputs, make_context, direct)

    @property
    def keys(self) -> tuple[Dispatch, ...]:
        """The graphs to capture, in this order."""
        return tuple(self._keys)

    @torch.inference_mode()
    def warm_up(self, progress: Progress | None = None) -> None:
        """Prepare what cannot be prepared during a capture. Collective: every rank calls it at the same time.

        A failure leaves the other ranks waiting in a collective, so it has to end the worker group.
        """
        for done, key in enumerate(self._keys, start=1):
            assert self._graphs is not None, "keys without graphs"
            self._graphs.warm_up(key)
            if progress is not None:
                progress(done, len(self._keys))

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> tuple[Dispatch, ...]:
        """Capture all graphs, after :meth:`warm_up`. Executes no collective, so that all ranks can vote afterwards.

        Returns:
            the captured graphs.

        Raises:
            CaptureError: a capture failed; every graph is discarded.
        """
        if self._graphs is None:
            return ()
        key = self._keys[0]
        try:
            with _no_garbage_collection(), self._graphs.capturing():
                for done, key in enumerate(self._keys, start=1):
                    self._graphs.capture(key)
                    if progress is not None:
                        progress(done, len(self._keys))
        except Exception as error:
            self.discard()
            raise CaptureError(
                f"the {key.mode} graph of {key.size} tokens could not be captured: {type(error).__name__}: "
                f"{error}. Set cudagraph_mode NONE (or --enforce-eager) to run without graphs"
            ) from error
        sizes = {mode: tuple(sorted(k.size for k in self._keys if k.mode is mode)) for mode in GraphMode}
        self.captured = Captured(sizes[GraphMode.FULL], sizes[GraphMode.PIECEWISE])
        return self.keys

    def discard(self) -> None:
        """Drop all graphs and run every step as NONE. All ranks do so if one could not capture."""
        self.captured = Captured()
        if self._graphs is not None:
            self._graphs.discard()

    def choose(self, num_tokens: int, num_reqs: int, uniform_query_len: int | None) -> Dispatch:
        """How a step runs, and the size that its buffers have to be padded to with slot -1."""
        return dispatch(num_tokens, num_reqs, uniform_query_len, self.captured)

    @torch.inference_mode()
    def run(self, choice: Dispatch, metadata: AttentionMetadata) -> torch.Tensor:
        """Run the step in the buffers.

        Args:
            choice: from :meth:`choose` for this step.
            metadata: of this step, with ``choice.size`` rows.

        Returns:
            hidden states [size, hidden_size]; padded rows are meaningless. The next step overwrites them.
        """
        rows = metadata.slot_mapping.shape[0]
        assert rows == choice.size, f"the buffers are filled to {rows} rows, the step runs with {choice.size}"
        if choice.mode is GraphMode.NONE or self._graphs is None:
            with forward_context(self._make_context(metadata)):
                return self._forward(*self._inputs.tokens(choice.size))
        return self._graphs.replay(choice, metadata)

    @torch.inference_mode()
    def op_seconds(self, choice: Dispatch, metadata: AttentionMetadata) -> float:
        """For benchmarks on the CPU: seconds within the ops of the step in the buffers, run once more.

        Args:
            choice: as for :meth:`run`.
            metadata: as for :meth:`run`.
        """
        from workers.graphs.op_timing import op_seconds

        full = choice.mode is GraphMode.FULL
        with forward_context(self._make_context(metadata)):
            return op_seconds(self._forward, *self._inputs.tokens(choice.size), full=full, direct=self._direct)

    def describe(self) -> Mapping[str, str]:
        """The captured sizes of each mode, which have to be equal on every rank."""
        return {
            "full_graphs": ",".join(map(str, self.captured.full)),
            "piecewise_graphs": ",".join(map(str, self.captured.piecewise)),
        }


@contextlib.contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Disable garbage collection: freeing another graph or an event would break a running CUDA capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
