"""Responses to errors: status, code, param and headers by the error's type and fields."""

from __future__ import annotations

import pytest

from runtime.common.errors import (
    ConfigError,
    EngineError,
    LockstepError,
    QueueFullError,
    RankDiedError,
    RankRaisedError,
    RequestError,
)
from runtime.server.errors import BodyError, GenerationError, error_reply, shutting_down


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code", "retry_after"),
    [
        (BodyError("no", param="n", code="too_long"), 400, "invalid_request_error", "n", "too_long", None),
        (RequestError("temperature is 5", param="stop"), 400, "invalid_request_error", "stop", "invalid_value", None),
        # A message that begins with a field's name does not make that field the param.
        (RequestError("temperature is 5"), 400, "invalid_request_error", None, "invalid_value", None),
        (ConfigError("no"), 400, "invalid_request_error", None, "invalid_value", None),
        (QueueFullError("full", retry_after=1.2), 429, "rate_limit_error", None, "queue_full", "2"),
        (QueueFullError("full", retry_after=0.0), 429, "rate_limit_error", None, "queue_full", "1"),
        (GenerationError("nan"), 500, "server_error", None, "generation_failed", None),
        (LockstepError("odd"), 500, "server_error", None, "internal_error", None),
        (EngineError("dead"), 503, "server_error", None, "engine_dead", "5"),
        (RankDiedError(rank=1, returncode=-9), 503, "server_error", None, "engine_dead", "5"),
        (shutting_down(), 503, "server_error", None, "shutting_down", "5"),
    ],
)
def test_reply(
    error: LockstepError, status: int, kind: str, param: str | None, code: str, retry_after: str | None
) -> None:
    reply = error_reply(error)
    detail = reply.body["error"]
    assert (reply.status, detail["type"], detail["param"], detail["code"]) == (status, kind, param, code)
    assert reply.headers.get("Retry-After") == retry_after
    assert detail["message"] == str(error)


def test_traceback_of_a_rank_is_not_sent() -> None:
    reply = error_reply(RankRaisedError("boom", rank=1, rank_traceback="secret line"))
    assert reply.body["error"]["message"] == "rank 1 on localhost failed: boom"
