"""Runs the forward pass of a step: in a captured graph where one fits, else as it is.

The runner of a rank asks :meth:`GraphRunner.choose` how a step will run, fills its buffers to that size, and hands the
choice back. How graphs are made is ``cuda_graph.py``'s and ``replay.py``'s, which one fits is ``dispatcher.py``'s.
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
from workers.forward_context import AttentionMetadata, forward_context
from workers.graphs.cuda_graph import CudaGraphs
from workers.graphs.dispatcher import Captured, Dispatch, dispatch
from workers.graphs.inputs import Forward, MakeContext, StaticInputs
from workers.graphs.replay import CpuReplay
from workers.graphs.sizes import CaptureSizes
from workers.graphs.tape import Direct

Progress = Callable[[int, int], None]
"""Told how many graphs of how many are done."""


class CaptureError(EngineError):
    """This rank could not capture its graphs, and holds none now."""


class GraphRunner:
    """The forward pass of one rank, and its graphs.

    Args:
        forward: a compiled model, or the module itself.
        mode: what to capture, see :func:`workers.graphs.modes.supported_mode`.
        sizes: at which numbers of tokens.
        buffers: the static tensors of a step.
        make_context: gives a step's forward context from its metadata.
        device: this rank's.
        direct: for the CPU: Python functions to call in place of ops while replaying.

    Attributes:
        captured: what there are graphs for.
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
        self._device = device
        self.captured = Captured()
        full = sizes.decode if mode.decode is GraphMode.FULL else ()
        piecewise = sizes.mixed if GraphMode.PIECEWISE in (mode.decode, mode.mixed) else ()
        keys = [Dispatch(GraphMode.FULL, size) for size in full]
        keys += [Dispatch(GraphMode.PIECEWISE, size) for size in piecewise]
        # Largest first: the memory that it takes serves all that follow.
        self._keys = sorted(keys, key=lambda key: -key.size)
        self._graphs: CudaGraphs | CpuReplay | None = None
        if keys and device.type == "cuda":
            self._graphs = CudaGraphs(forward, self._inputs, make_context, device)
        elif keys:
            self._graphs = CpuReplay(forward, self._inputs, make_context, direct)

    @property
    def keys(self) -> tuple[Dispatch, ...]:
        """What will be captured, in this order."""
        return tuple(self._keys)

    @torch.inference_mode()
    def warm_up(self, progress: Progress | None = None) -> None:
        """Make ready what cannot be made while capturing. Collective: every rank calls it at the same time.

        A failure in the middle leaves other ranks waiting, so it has to end the group.
        """
        for done, key in enumerate(self._keys, start=1):
            assert self._graphs is not None, "there are keys only where there are graphs"
            self._graphs.warm_up(key)
            if progress is not None:
                progress(done, len(self._keys))

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> tuple[Dispatch, ...]:
        """Capture everything, after :meth:`warm_up`. Exchanges nothing with other ranks, so that all can vote after it.

        Returns:
            what was captured.

        Raises:
            CaptureError: it failed; nothing is captured then.
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
                f"the {key.mode.value} graph of {key.size} tokens could not be captured: {type(error).__name__}: "
                f"{error}. Set cudagraph_mode NONE (or --enforce-eager) to run without graphs"
            ) from error
        sizes = {mode: tuple(sorted(k.size for k in self._keys if k.mode is mode)) for mode in GraphMode}
        self.captured = Captured(sizes[GraphMode.FULL], sizes[GraphMode.PIECEWISE])
        return self.keys

    def discard(self) -> None:
        """Drop all graphs and run every step as NONE from now on: what all ranks do if one could not capture."""
        self.captured = Captured()
        if self._graphs is not None:
            self._graphs.discard()

    def choose(self, num_tokens: int, num_reqs: int, uniform_query_len: int | None) -> Dispatch:
        """How a step will run, and the size that the buffers have to be filled to, the tail with slot -1."""
        return dispatch(num_tokens, num_reqs, uniform_query_len, self.captured)

    @torch.inference_mode()
    def run(self, choice: Dispatch, metadata: AttentionMetadata) -> torch.Tensor:
        """Run the step that is in the buffers.

        Args:
            choice: from :meth:`choose` for this step.
            metadata: of this step, with ``choice.size`` rows.

        Returns:
            hidden states [size, hidden_size]; rows of padding hold nothing of use. Overwritten by the next step.
        """
        rows = metadata.slot_mapping.shape[0]
        assert rows == choice.size, f"the buffers were filled to {rows} rows, the step was to have {choice.size}"
        if choice.mode is GraphMode.NONE or self._graphs is None:
            with forward_context(self._make_context(metadata)):
                return self._forward(*self._inputs.tokens(choice.size))
        return self._graphs.replay(choice, metadata)

    @torch.inference_mode()
    def op_seconds(self, choice: Dispatch, metadata: AttentionMetadata) -> float:
        """For benchmarks on the CPU: replay the step in the buffers with a clock around each call.

        Returns:
            seconds within ops (of a compiled model: within subgraphs and splitting ops), without what calls them.
        """
        assert isinstance(self._graphs, CpuReplay), "a CUDA graph is timed by the device's own events"
        return self._graphs.op_seconds(choice, metadata)

    def describe(self) -> Mapping[str, str]:
        """What has to be the same on every rank: the sizes of the graphs of each mode."""
        return {
            "full_graphs": ",".join(map(str, self.captured.full)),
            "piecewise_graphs": ",".join(map(str, self.captured.piecewise)),
        }


@contextlib.contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Leave garbage where it is: freeing another graph or an event would break a CUDA capture that runs, and the many
    small objects that a recording makes would have the collector walk all of torch again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
