"""The one tree of errors that Lockstep raises on purpose.

Every error says what was asked, what is allowed, what to change and, where a rank is involved, which rank.
``exit_code`` is what the command line ends with when the error reaches it: 2 for wrong input, 1 for anything else, a
failed rank's own code for a failed rank. Nothing here formats logs or decides what to do about an error.
"""

from __future__ import annotations

import signal


class LockstepError(Exception):
    """Base class of everything Lockstep raises on purpose."""

    exit_code: int = 1


class InputError(LockstepError, ValueError):
    """The caller asked for something that cannot be done; nothing was changed. Ends the command line with 2."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration value is unknown, out of range, or contradicts another one."""


class CheckpointError(InputError):
    """A checkpoint folder cannot be used: the message names the file and, where there is one, the tensor."""


class RequestError(InputError):
    """One request is invalid (too long, token out of range, contradicting parameters); others are unaffected.

    Attributes:
        param: the request field that is wrong, None where no single field can be named.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class QueueFullError(LockstepError):
    """So many requests are waiting that another one is refused; nothing was queued.

    Attributes:
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class EngineError(LockstepError):
    """The engine cannot go on, or was asked for something after it had ended."""


class EngineClosedError(EngineError):
    """A request reached an engine that was closed."""


class ProtocolError(EngineError):
    """Bytes on a channel between driver and worker were not a message of ours (too long, malformed, unknown method)."""


class RankError(EngineError):
    """One tensor-parallel rank failed, and with it its whole worker group.

    Attributes:
        rank: the rank that failed first, or -1 where no single rank can be named.
        host: the host it ran on.
        stage: the start-up stage or ``"step N"``.
        cause: one line saying what happened.
        rank_traceback: the traceback printed by that rank, or an empty string.
    """

    def __init__(
        self, cause: str, *, rank: int, host: str = "localhost", stage: str = "", rank_traceback: str = ""
    ) -> None:
        self.rank = rank
        self.host = host
        self.stage = stage
        self.cause = cause
        self.rank_traceback = rank_traceback
        where = f"rank {rank} on {host}" if rank >= 0 else f"the worker group on {host}"
        during = f" during {stage}" if stage else ""
        text = f"{where} failed{during}: {cause}"
        if rank_traceback:
            text += f"\n--- traceback of rank {rank} ---\n{rank_traceback.rstrip()}"
        super().__init__(text)


class RankDiedError(RankError):
    """A rank's process ended by itself or by a signal.

    Attributes:
        returncode: as ``subprocess`` gives it: negative for a signal, None where the launcher cannot tell.
    """

    def __init__(
        self,
        *,
        rank: int,
        returncode: int | None,
        host: str = "localhost",
        stage: str = "",
        hint: str = "",
    ) -> None:
        self.returncode = returncode
        if returncode is None:
            cause = "its process died (its channel closed)"
        elif returncode < 0:
            cause = f"killed by signal {-returncode} ({signal_name(-returncode)})"
        else:
            cause = f"its process ended with exit code {returncode}"
        if hint:
            cause += f"; {hint}"
        super().__init__(cause, rank=rank, host=host, stage=stage)
        if returncode is not None and returncode != 0:
            self.exit_code = shell_code(returncode)


class RankRaisedError(RankError):
    """A rank raised an exception; its traceback is part of the message."""


class RankTimeoutError(RankError):
    """A rank did not answer within the deadline of a start-up stage or of a step."""


class LockstepGuardError(RankError):
    """A rank answered for another step, or executed a plan with other bytes than the one that was sent."""


class StartupError(RankError):
    """A start-up stage could not be completed for a reason that is nobody's input (e.g. fingerprints differ)."""


def shell_code(returncode: int) -> int:
    """A process's exit code as a shell has it, from how ``subprocess`` gives it: 128 + N for signal N."""
    return 128 - returncode if returncode < 0 else returncode


def signal_name(number: int) -> str:
    """The name of a signal number (9 -> ``SIGKILL``), or ``signal N`` for an unknown one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
