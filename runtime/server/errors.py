"""Errors of the HTTP API: status, headers, and OpenAI's error object.

Wrong input ends as 400, 401, 404, 405, 408 or 413; 429 and 503 say when to try again; 500 is a request that the engine
itself could not finish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from runtime.common.errors import EngineError, InputError, LockstepError, QueueFullError, RequestError

RETRY_SECONDS = 5
"""``Retry-After`` of a 503."""


class HttpError(LockstepError):
    """A request that ends with a given status.

    Attributes:
        status: the HTTP status.
        kind: OpenAI's ``type``.
        param: the field of the body that is wrong, or None.
        code: OpenAI's ``code``, by which programs distinguish errors.
        headers: response headers.
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
    """The body of a request is wrong: 400, with the field as ``param``."""


class GenerationError(HttpError):
    """The engine ended one request with an error: 500."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, kind="server_error", code="generation_failed")


class UnavailableError(HttpError):
    """The server is shutting down, or its engine has failed: 503 with ``Retry-After``."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, status=503, kind="server_error", code=code, headers=_retry_after(RETRY_SECONDS))


def shutting_down() -> UnavailableError:
    """The error of requests that arrive, or are still in flight, when the server ends."""
    return UnavailableError("this server is shutting down; send the request to another one", code="shutting_down")


@dataclass(frozen=True)
class ErrorReply:
    """Status, JSON body and headers of an error response."""

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
        param = error.param if isinstance(error, RequestError) else None
        return ErrorReply(400, error_body(str(error), param=param, code="invalid_value"))
    # The first line names rank and cause; the rank's traceback stays in the log.
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
