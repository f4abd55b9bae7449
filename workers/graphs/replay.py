"""Graphs on the CPU: a replay with the contract of a CUDA graph.

Captured once for a padded size, bound to the static inputs, and afterwards run without any Python of the model: of a
module every op was recorded (``record.py``, ``tape.py``), of a compiled model the stages are called one by one
(``staged.py``). Ops that read the forward context, attention above all, read that of the step being replayed, so here
one tape serves decode and mixed batches alike. Its bits are those of running the model at the same size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import torch
from torch import nn

from runtime.common.config import GraphMode
from workers.compile.compiled_model import CompiledModel
from workers.forward_context import AttentionMetadata, forward_context
from workers.graphs.arena import Arena
from workers.graphs.dispatcher import Dispatch
from workers.graphs.inputs import Forward, MakeContext, StaticInputs
from workers.graphs.record import Recording, record
from workers.graphs.staged import StagedTape, StagedTapes
from workers.graphs.tape import Direct, Tape, bind, check_repeatable

Replay = Callable[[], torch.Tensor]


class CpuReplay:
    """The tapes of one forward pass.

    Args:
        forward: a compiled model, a module, or a function that is compiled as a whole.
        inputs: the static inputs.
        make_context: see :data:`~workers.graphs.inputs.MakeContext`.
        direct: Python functions to call in place of ops.
    """

    def __init__(self, forward: Forward, inputs: StaticInputs, make_context: MakeContext, direct: Direct) -> None:
        self._forward = forward
        self._inputs = inputs
        self._make_context = make_context
        self._direct = direct
        self._staged = StagedTapes(forward, direct) if isinstance(forward, CompiledModel) else None
        self.discard()

    def discard(self) -> None:
        """Forget everything that was captured, and free its memory."""
        self._replays: dict[Dispatch, Replay] = {}
        self._recorded: dict[int, Tape] = {}
        self._arena = Arena()
        self._output = torch.empty(0)

    def warm_up(self, key: Dispatch) -> None:
        """Nothing: a replay needs none, and capturing exchanges nothing between ranks."""

    @contextlib.contextmanager
    def capturing(self) -> Generator[None]:
        """Around all captures."""
        yield

    def capture(self, key: Dispatch) -> None:
        """Bind one size.

        Raises:
            RecordError: the model does what a replay could not repeat.
        """
        tokens = self._inputs.tokens(key.size)
        if self._staged is not None:
            self._replays[key] = self._staged.tape(key.mode is GraphMode.FULL, *tokens)
        elif _runs_op_by_op(self._forward):
            if key.size not in self._recorded:
                self._recorded[key.size] = self._record(key.size)
            self._replays[key] = self._recorded[key.size]
        else:
            forward = self._forward
            self._replays[key] = lambda: forward(*tokens)

    def replay(self, key: Dispatch, metadata: AttentionMetadata) -> torch.Tensor:
        """Hidden states [size, hidden_size], valid until the next replay."""
        with forward_context(self._make_context(metadata)):
            return self._replays[key]()

    def op_seconds(self, key: Dispatch, metadata: AttentionMetadata) -> float:
        """Replay with a clock around each call; gives the seconds within them."""
        replay = self._replays[key]
        assert isinstance(replay, (Tape, StagedTape)), "code that was compiled as a whole has no calls to time"
        with forward_context(self._make_context(metadata)):
            return replay.op_seconds()

    def _record(self, size: int) -> Tape:
        recording = self._run(size, token=0)
        if not self._recorded:
            # Once is enough: other sizes run the same code.
            check_repeatable(recording, self._run(size, token=1))
        result = recording.result
        assert result is not None, "a finished recording has a result"
        if self._output.shape[0] < size:
            self._output = torch.empty((size, *result.shape[1:]), dtype=result.dtype)
        return bind(recording, self._arena, self._output[:size], self._direct)

    def _run(self, size: int, token: int) -> Recording:
        """Record the pass over ``size`` rows of padding: nothing is written to the KV cache."""
        with forward_context(self._make_context(self._inputs.idle(size, token))):
            return record(lambda: self._forward(*self._inputs.tokens(size)))


def _runs_op_by_op(forward: Forward) -> bool:
    """Whether a forward is a plain module, all of whose ops the dispatcher sees. Compiled code hides its own."""
    compiled = hasattr(forward, "_orig_mod") or getattr(forward, "_compiled_call_impl", None) is not None
    return isinstance(forward, nn.Module) and not compiled
