"""Seconds that a forward pass on the CPU spends within its ops, for ``bench latency``. No step runs any of this.

The rest of a forward pass is Python: the model's own code, or the replay of an op list.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workers.compile.compiled_model import CompiledModel
from workers.graphs.cpu_replay import Direct, OpLists
from workers.graphs.inputs import Forward


class OpTimer(TorchDispatchMode):
    """Times every op that reaches the dispatcher while it is the active mode.

    Attributes:
        seconds: the sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch wraps ``__torch_dispatch__`` in a way that imports Dynamo, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op and add its seconds."""
        started = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - started
        return result


def op_seconds(
    forward: Forward, input_ids: torch.Tensor, positions: torch.Tensor, *, full: bool, direct: Direct
) -> float:
    """Run one forward pass with a clock around each op.

    Args:
        forward: a compiled model (its ops are the subgraphs and the splitting ops), a module, or a function that
            ``torch.compile`` made, which counts as one op.
        input_ids: int64 [T].
        positions: int64 [T].
        full: whether the pass runs as FULL, with ``direct``.
        direct: functions that FULL replays call in place of ops.
    """
    if isinstance(forward, CompiledModel):
        return OpLists(forward, direct if full else {}).make(True, input_ids, positions).op_seconds()
    if isinstance(forward, nn.Module):
        with OpTimer() as timer:
            forward(input_ids, positions)
        return timer.seconds
    started = time.perf_counter()
    forward(input_ids, positions)
    return time.perf_counter() - started
