"""Failure: an observed sign that a rank failed, and how well it explains why the worker group failed.

Ranks fail together: one that dies makes the collectives of the others fail a moment later. The worker group collects
all signs within a grace period and raises the error of the one with the best evidence.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from runtime.common.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    InputError,
    LockstepGuardError,
    RankDiedError,
    RankRaisedError,
    RequestError,
)
from runtime.common.protocol import ExceptionKind, RankException
from runtime.executor.launcher import RankHandle

INPUT_ERRORS = {cls.__name__: cls for cls in (InputError, CheckpointError, ConfigError, RequestError)}
"""The classes of a rank's exceptions of kind INPUT, by name."""

REAP_SECONDS = 0.5
"""Time limit for a process to become reapable after its channel closed."""


class Evidence(IntEnum):
    """How directly a sign points to the cause of a failure. The lowest value is the best explanation."""

    INPUT = 0
    """A rank refuses the user's input."""
    EXIT = 1
    """A process ended with a known exit code or signal."""
    EXCEPTION = 2
    """A rank raised an exception."""
    DIVERGENCE = 3
    """A rank's message violates the lockstep guard, or its channel closed for an unknown reason."""
    COLLECTIVE = 4
    """A collective failed, which is usually the consequence of another rank's failure."""


@dataclass(frozen=True)
class Failure:
    """A sign of a failure and the error that describes it."""

    evidence: Evidence
    error: EngineError | InputError


@dataclass(frozen=True)
class RankContext:
    """What an error says about its rank: number, host, and the stage or step of its oldest unanswered message."""

    rank: int
    host: str
    stage: str


def best_error(failures: Iterable[Failure]) -> EngineError | InputError:
    """The error with the best evidence; among equals, the first observed."""
    return min(failures, key=lambda failure: failure.evidence).error


def divergence(where: RankContext, text: str) -> Failure:
    """A rank's message is not the expected answer."""
    return Failure(Evidence.DIVERGENCE, LockstepGuardError(text, rank=where.rank, host=where.host, stage=where.stage))


def exception(where: RankContext, raised: RankException) -> Failure:
    """A rank reports an exception."""
    if raised.kind is ExceptionKind.INPUT:
        text = f"rank {where.rank}: {raised.message}"
        known = INPUT_ERRORS.get(raised.type_name)
        return Failure(Evidence.INPUT, known(text, **raised.fields) if known else InputError(text))
    evidence = Evidence.COLLECTIVE if raised.kind is ExceptionKind.COLLECTIVE else Evidence.EXCEPTION
    error = RankRaisedError(
        f"{raised.type_name}: {raised.message}",
        rank=where.rank,
        host=where.host,
        stage=where.stage,
        rank_traceback=raised.traceback,
        exception_type=raised.type_name,
        fields=raised.fields,
    )
    return Failure(evidence, error)


def death(where: RankContext, handle: RankHandle) -> Failure:
    """A rank's channel closed or its process ended."""
    handle.wait(REAP_SECONDS)
    code = handle.returncode()
    hint = ""
    if code == -signal.SIGKILL:
        hint = "if it was not sent on purpose, look for the kernel's out-of-memory killer in dmesg"
    error = RankDiedError(rank=where.rank, returncode=code, host=where.host, stage=where.stage, hint=hint)
    return Failure(Evidence.DIVERGENCE if code is None else Evidence.EXIT, error)
