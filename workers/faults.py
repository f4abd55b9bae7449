"""Faults on demand, for the tests of everything that must notice them.

``LOCKSTEP_FAULT="rank=1,step=10,kind=exit"`` makes that rank misbehave; ``launch/`` reads the variable and hands its
text to the workers inside the config. Without it :class:`FaultInjector` is never made, so a step pays one ``is None``.
Real signals (SIGKILL, SIGSTOP) need nothing from here.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from parallel.collectives.base import Collectives
from parallel.group import TensorParallelGroup
from runtime.common.errors import ConfigError
from runtime.common.protocol import unpack

STEP_KINDS = ("exit", "raise", "hang", "nan", "skip_collective", "corrupt_plan", "slow")
STARTUP_KINDS = {"load_fail": "weights", "load_hang": "weights"}
VOTE_KINDS = {"compile_fail": "compile", "capture_fail": "capture"}


class InjectedFaultError(RuntimeError):
    """Raised on purpose, by ``kind=raise`` and the ``*_fail`` kinds."""


@dataclass(frozen=True)
class Fault:
    """One parsed fault: which rank, from which step on, and what goes wrong (``seconds`` for ``slow``)."""

    rank: int
    kind: str
    step: int = 0
    seconds: float = 0.0


def parse_fault(text: str) -> Fault | None:
    """The fault that ``LOCKSTEP_FAULT`` describes; None for an empty text.

    Raises:
        ConfigError: a key or a kind that does not exist, or a value that is no number.
    """
    if not text:
        return None
    fields = {key: value for key, _, value in (part.partition("=") for part in text.split(","))}
    unknown = set(fields) - {"rank", "step", "kind"}
    kind, _, argument = fields.get("kind", "").partition(":")
    if unknown or kind not in (*STEP_KINDS, *STARTUP_KINDS, *VOTE_KINDS):
        allowed = ", ".join((*STEP_KINDS, *STARTUP_KINDS, *VOTE_KINDS))
        raise ConfigError(f"LOCKSTEP_FAULT={text!r}: write rank=R,step=N,kind=K with K one of {allowed}")
    try:
        return Fault(int(fields.get("rank", "0")), kind, int(fields.get("step", "0")), float(argument or 0))
    except ValueError as error:
        raise ConfigError(f"LOCKSTEP_FAULT={text!r}: {error}") from error


class FaultInjector:
    """Carries out one rank's fault at the points where the worker asks for it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._group: TensorParallelGroup | None = None

    def on_group(self, group: TensorParallelGroup) -> None:
        """Called with the group once it is connected."""
        self._group = group

    def _due(self, step_id: int, *kinds: str) -> bool:
        return self.fault.kind in kinds and step_id >= self.fault.step

    def on_startup(self, stage: str) -> None:
        """Called at the start of a start-up stage."""
        if STARTUP_KINDS.get(self.fault.kind) != stage:
            return
        while self.fault.kind == "load_hang":
            time.sleep(0.1)
        raise InjectedFaultError(f"injected fault: {self.fault.kind}")

    def on_vote(self, stage: str) -> None:
        """Called where a failure of this rank makes all ranks fall back together."""
        if VOTE_KINDS.get(self.fault.kind) == stage:
            raise InjectedFaultError(f"injected fault: {self.fault.kind}")

    def on_message(self, frame: bytes) -> bytes:
        """Called with the bytes of every step message before anything reads them."""
        # The last byte of a plan is its (empty) list of dropped requests: 0x90 -> 0x91 would not parse, so flip a
        # byte that keeps the plan readable, the length marker of an empty array into that of an empty map.
        if (
            self.fault.kind != "corrupt_plan"
            or frame[-1:] != b"\x90"
            or not self._due(unpack(frame)[1], "corrupt_plan")
        ):
            return frame
        return frame[:-1] + b"\x80"

    def on_step(self, step_id: int) -> None:
        """Called before a step is executed."""
        if self._due(step_id, "exit"):
            os._exit(3)
        if self._due(step_id, "raise"):
            raise InjectedFaultError(f"injected fault: raise at step {step_id}")
        if self._due(step_id, "slow"):
            time.sleep(self.fault.seconds)
        if self._due(step_id, "skip_collective") and self._group is not None and self._group.collectives is not None:
            self._group.collectives = _SkipOne(self._group)
        while self._due(step_id, "hang"):
            time.sleep(0.1)

    def poisons_logits(self, step_id: int) -> bool:
        """Whether the first row of this step's logits becomes NaN."""
        return self.fault.step == step_id and self.fault.kind == "nan"


class _SkipOne(Collectives):
    """Stands in for a group's collectives until it has left out one all-reduce, then puts the real ones back."""

    def __init__(self, group: TensorParallelGroup) -> None:
        assert group.collectives is not None, "only a group of several ranks has collectives to skip"
        self._group, self._inner = group, group.collectives
        self.backend = self._inner.backend
        super().__init__(self._inner.rank, self._inner.size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's own part, as if the others did not exist."""
        self._inner.epoch = self.epoch
        self._group.collectives = self._inner
        return x.clone()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As it should be."""
        return self._inner.all_gather(x)

    def gather(self, x: torch.Tensor, dst: int) -> torch.Tensor | None:
        """As it should be."""
        return self._inner.gather(x, dst)

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """As it should be."""
        return self._inner.broadcast(x, src)

    def barrier(self) -> None:
        """As it should be."""
        self._inner.barrier()

    def close(self) -> None:
        """As it should be."""
        self._inner.close()
