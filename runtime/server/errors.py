"""What a failed request is told: status, headers, and OpenAI's error object. Which error is raised is others' affair.

Input of any kind ends as 400, 401, 404, 405, 408 or 413; 429 and 503 say when to try again; 500 is left for a request
that the engine itself could not finish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from runtime.common.errors import EngineError, InputError, LockstepError, QueueFullError
from runtime.common.sampling_params import SamplingParams

RETRY_SECONDS = 5
"""What Retry-After says where nobody knows better."""


class HttpError(LockstepError):
    """A request that ends with a status of its own.

    Attributes:
        status: the HTTP status.
        kind: OpenAI's ``type``.
        param: the field of the body that is wrong, or None.
        code: OpenAI's ``code``, for programs to tell errors apart.
        headers: to send with it.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}
        super().__init__(message)


class BodyError(HttpError):
    """The body of a request is wrong: 400, naming the field."""


class GenerationError(HttpError):
    """The engine gave this one request up: 500."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, kind="server_error", code="generation_failed")


class UnavailableError(HttpError):
    """Not now: the server is shutting down, or its engine has failed. 503 with Retry-After."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, status=503, kind="server_error", code=code, headers=_retry_after(RETRY_SECONDS))


def shutting_down() -> UnavailableError:
    """The error of requests that come, or are still running, when the server ends."""
    return UnavailableError("this server is shutting down; send the request to another one", code="shutting_down")


@dataclass(frozen=True)
class ErrorReply:
    """An error as it goes out."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict[str, str])


def error_reply(error: LockstepError) -> ErrorReply:
    """The response to a request that ended with ``error``."""
    if isinstance(error, HttpError):
        body = error_body(str(error), kind=error.kind, param=error.param, code=error.code)
        return ErrorReply(error.status, body, error.headers)
    if isinstance(error, QueueFullError):
        body = error_body(str(error), kind="rate_limit_error", code="queue_full")
        return ErrorReply(429, body, _retry_after(error.retry_after))
    if isinstance(error, InputError):
        return ErrorReply(400, error_body(str(error), param=_field_of(str(error)), code="invalid_value"))
    # A traceback of a rank belongs into the log; the first line names rank and cause.
    text = str(error).partition("\n")[0]
    if isinstance(error, EngineError):
        return ErrorReply(503, error_body(text, kind="server_error", code="engine_dead"), _retry_after(RETRY_SECONDS))
    return ErrorReply(500, error_body(text, kind="server_error", code="internal_error"))


def error_body(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


_FIELDS = frozenset(each.name for each in fields(SamplingParams))


def _field_of(message: str) -> str | None:
    """The field that a message of ``SamplingParams`` begins with."""
    first = message.partition(" ")[0]
    return first if first in _FIELDS else None
