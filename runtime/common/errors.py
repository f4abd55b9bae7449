"""The errors that Lockstep raises, as one tree.

::

    LockstepError                  exit code 1
    ├── InputError                 exit code 2; also a ValueError
    │   ├── ConfigError            a setting
    │   ├── CheckpointError        a model folder
    │   └── RequestError           one request
    ├── QueueFullError             too many waiting requests
    └── EngineError
        ├── EngineClosedError      a request after close()
        ├── ProtocolError          malformed bytes on a channel
        └── RankError              a rank failed, and with it its worker group
            ├── RankDiedError      its process ended; exit code of that process
            ├── RankRaisedError    it raised an exception
            ├── RankTimeoutError   it missed a deadline
            ├── LockstepGuardError it answered another message than the one sent
            └── StartupError       a start-up stage failed otherwise

A message states what was asked, what is allowed, what to change and, where a rank is involved, which rank.
``exit_code`` is the exit code of the command line for an error that reaches it. Folders that raise errors of their own
derive them from this tree.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping


class LockstepError(Exception):
    """Base class of all errors that Lockstep raises.

    Attributes:
        exit_code: of the command line.
    """

    exit_code: int = 1


class InputError(LockstepError, ValueError):
    """Invalid input. Nothing was changed."""

    exit_code = 2


class ConfigError(InputError):
    """A setting is unknown, out of range, or contradicts another one."""


class CheckpointError(InputError):
    """A checkpoint folder cannot be loaded; the message names the file and, where there is one, the tensor."""


class RequestError(InputError):
    """One request is invalid (too long, token out of range, contradicting parameters); others are unaffected.

    Attributes:
        param: the request field that is wrong, None where no single field can be named.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class QueueFullError(LockstepError):
    """A request is refused because too many are waiting; it was not queued.

    Attributes:
        retry_after: seconds after which a retry may succeed.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class EngineError(LockstepError):
    """The engine cannot continue, or was called out of order."""


class EngineClosedError(EngineError):
    """The engine was closed."""


class ProtocolError(EngineError):
    """Bytes on a channel between driver and rank are not a message: too long, malformed, or an unknown method."""


class RankError(EngineError):
    """A tensor-parallel rank failed, and with it its whole worker group.

    Attributes:
        rank: the rank that failed first, or -1 where no single rank can be named.
        host: the host it ran on.
        stage: the start-up stage or ``"step N"``; "" while idle.
        cause: one line that says what happened.
        rank_traceback: the rank's own traceback, or "".
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
    """A rank's process exited or was killed by a signal.

    Attributes:
        returncode: as in ``subprocess``: negative for a signal, None where the launcher does not know it.
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
    """A rank raised an exception; its traceback is part of the message.

    Attributes:
        exception_type: name of the exception's class.
        fields: the exception's own attributes, where the rank sent any.
    """

    def __init__(
        self,
        cause: str,
        *,
        rank: int,
        host: str = "localhost",
        stage: str = "",
        rank_traceback: str = "",
        exception_type: str = "",
        fields: Mapping[str, object] | None = None,
    ) -> None:
        self.exception_type = exception_type
        self.fields = dict(fields or {})
        super().__init__(cause, rank=rank, host=host, stage=stage, rank_traceback=rank_traceback)


class RankTimeoutError(RankError):
    """A rank did not answer within the deadline of a start-up stage or of a step."""


class LockstepGuardError(RankError):
    """A rank answered with the number or the digest of another message than the one sent."""


class StartupError(RankError):
    """A start-up stage failed although every rank answered, e.g. because fingerprints differ."""


def shell_code(returncode: int) -> int:
    """The exit code that a shell reports for a ``subprocess`` return code: 128 + N for signal N."""
    return 128 - returncode if returncode < 0 else returncode


def signal_name(number: int) -> str:
    """The name of a signal number (9 -> ``SIGKILL``); ``signal N`` for an unknown one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
