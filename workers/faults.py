"""Fault injection, for tests of failure detection and recovery.

``LOCKSTEP_FAULT="rank=1,step=10,kind=exit"`` makes that rank fail; ``launch/`` reads the variable and passes its text
to the workers in the config. :class:`FaultyRunner` replaces the model runner of that rank, and
:func:`corrupt_plans` wraps its channel; without a fault, no step refers to this module. Tests send real signals
(SIGKILL, SIGSTOP) themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from parallel.collectives.base import Collectives
from parallel.group import TensorParallelGroup
from runtime.common.errors import ConfigError
from runtime.common.protocol import StepPlan, StepResult, unpack
from workers.batch import Batch
from workers.runner import ModelRunner, Progress
from workers.weights import LoadReport

if TYPE_CHECKING:
    from workers.compile.compiler import CompileReport
    from workers.compile.levels import CompileSettings
    from workers.graphs.inputs import Forward

KINDS = (
    "exit", "raise", "hang", "nan", "skip_collective", "corrupt_plan", "slow",
    "load_fail", "load_hang", "compile_fail", "capture_fail",
)  # fmt: skip
"""Kinds of faults: those of a step, then those of a start-up stage."""


class InjectedFaultError(RuntimeError):
    """Raised by ``kind=raise`` and the ``*_fail`` kinds."""


@dataclass(frozen=True)
class Fault:
    """A parsed fault: the rank, the kind, the first step it applies to, and ``seconds`` for ``slow``."""

    rank: int
    kind: str
    step: int = 0
    seconds: float = 0.0

    def is_due(self, kind: str, step_id: int) -> bool:
        """Whether a fault of this kind applies to a step."""
        return self.kind == kind and step_id >= self.step

    def raise_if(self, kind: str) -> None:
        """Raise :class:`InjectedFaultError` if the fault is of this kind."""
        if self.kind == kind:
            raise InjectedFaultError(f"injected fault: {kind}")


def parse_fault(text: str) -> Fault:
    """The fault that ``LOCKSTEP_FAULT`` describes.

    Raises:
        ConfigError: an unknown key or kind, or a value that is not a number.
    """
    fields = {key: value for key, _, value in (part.partition("=") for part in text.split(","))}
    unknown = set(fields) - {"rank", "step", "kind"}
    kind, _, argument = fields.get("kind", "").partition(":")
    if unknown or kind not in KINDS:
        raise ConfigError(f"LOCKSTEP_FAULT={text!r}: write rank=R,step=N,kind=K with K one of {', '.join(KINDS)}")
    try:
        return Fault(int(fields.get("rank", "0")), kind, int(fields.get("step", "0")), float(argument or 0))
    except ValueError as error:
        raise ConfigError(f"LOCKSTEP_FAULT={text!r}: {error}") from error


def corrupt_plans(receive: Callable[[], bytes], fault: Fault) -> Callable[[], bytes]:
    """``receive`` with step plans corrupted if the fault is ``corrupt_plan``; ``receive`` itself if not."""
    if fault.kind != "corrupt_plan":
        return receive

    def receive_corrupted() -> bytes:
        frame = receive()
        # The last byte of a plan is its (empty) list of dropped requests. As an empty map, 0x80 instead of 0x90, the
        # plan can still be parsed, and only the digest differs.
        if frame[-1:] != b"\x90" or not fault.is_due("corrupt_plan", unpack(frame)[1]):
            return frame
        return frame[:-1] + b"\x80"

    return receive_corrupted


class FaultyRunner(ModelRunner):
    """A model runner that injects one fault.

    Args:
        fault: the fault of this rank.
        *arguments: of :class:`~workers.runner.ModelRunner`.
        **settings: of :class:`~workers.runner.ModelRunner`.
    """

    def __init__(self, fault: Fault, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.fault = fault
        self._poison_logits = False

    @override
    def load_model(self, progress: Progress | None = None) -> LoadReport:
        self.fault.raise_if("load_fail")
        while self.fault.kind == "load_hang":
            time.sleep(0.1)
        return super().load_model(progress)

    @override
    def compile(self, progress: Progress | None = None) -> tuple[Forward, CompileReport, CompileSettings]:
        self.fault.raise_if("compile_fail")
        return super().compile(progress)

    @override
    def capture(self, progress: Progress | None = None) -> int:
        self.fault.raise_if("capture_fail")
        return super().capture(progress)

    @override
    def execute(self, plan: StepPlan) -> StepResult:
        fault, step_id = self.fault, plan.step_id
        if fault.is_due("exit", step_id):
            os._exit(3)
        if fault.is_due("raise", step_id):
            raise InjectedFaultError(f"injected fault: raise at step {step_id}")
        if fault.is_due("slow", step_id):
            time.sleep(fault.seconds)
        if fault.is_due("skip_collective", step_id) and self.group.collectives is not None:
            self.group.collectives = _SkipOne(self.group)
        while fault.is_due("hang", step_id):
            time.sleep(0.1)
        self._poison_logits = fault.kind == "nan" and fault.step == step_id
        return super().execute(plan)

    @override
    def compute_sample_logits(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits = super().compute_sample_logits(hidden, batch)
        if self._poison_logits:
            logits[0] = float("nan")
        return logits


class _SkipOne(Collectives):
    """Collectives that skip one all-reduce, then restore the group's own."""

    def __init__(self, group: TensorParallelGroup) -> None:
        assert group.collectives is not None, "only a group of several ranks has collectives to skip"
        self._group, self._inner = group, group.collectives
        self.backend = self._inner.backend
        super().__init__(self._inner.rank, self._inner.size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's own part, without the others'."""
        self._inner.epoch = self.epoch
        self._group.collectives = self._inner
        return x.clone()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Unchanged."""
        return self._inner.all_gather(x)

    def gather(self, x: torch.Tensor, dst: int) -> torch.Tensor | None:
        """Unchanged."""
        return self._inner.gather(x, dst)

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Unchanged."""
        return self._inner.broadcast(x, src)

    def barrier(self) -> None:
        """Unchanged."""
        self._inner.barrier()

    def close(self) -> None:
        """Unchanged."""
        self._inner.close()
