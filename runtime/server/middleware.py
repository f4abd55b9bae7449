"""ASGI middleware: request ids and the access log, the API key, in-flight requests and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.common.log import LOGGER_NAME
from runtime.server.app_state import AppState
from runtime.server.errors import HttpError, error_reply, shutting_down
from runtime.server.request_cycle import ClientDisconnected, RequestCycle

OPEN_PATHS = ("/health", "/ping")
"""Routes that need no API key, and respond while the server drains."""

QUIET_PATHS = (*OPEN_PATHS, "/metrics")
"""Routes that monitoring polls: their log lines have level debug."""

SHUTDOWN_REPLY_SECONDS = 0.5
"""Deadline for the error that ends an in-flight request at shutdown."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_log = logging.getLogger(LOGGER_NAME)


class AccessLogMiddleware:
    """Assigns request ids, writes the access log, and turns unexpected exceptions into a 500 in OpenAI's shape.

    No line contains prompts, query strings or keys.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request and log its status and duration."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        header = (b"x-request-id", request_id.encode())
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # A defect of the server: logged here with its traceback.
            _log.exception("request %s to %s failed", request_id, _path(scope))
            if status:
                raise  # The response has started; the server can only close the connection.
            await _send_error(
                HttpError("an internal error; the log has more", status=500, kind="server_error"),
                scope, receive, send_with_id,
            )  # fmt: skip
        finally:
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            if _log.isEnabledFor(level):
                client = scope.get("client") or ("-", 0)
                shown = "gone" if state.get("disconnected") else str(status or "unanswered")
                took = time.monotonic() - started
                _log.log(
                    level, "%s %s %s %s %.3f s id=%s", client[0], scope["method"], _path(scope), shown, took, request_id
                )


class ApiKeyMiddleware:
    """Refuses requests without the API key, and POST requests while the server drains."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._in_flight = state.in_flight
        key = state.options.api_key
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or refuse it with 401 or 503."""
        error: HttpError | None = None
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            if not self._has_key(scope):
                error = HttpError(
                    "this server needs its API key: send the header `Authorization: Bearer KEY`",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            elif self._in_flight.draining and scope["method"] == "POST":
                error = shutting_down()
        if error is None:
            await self._app(scope, receive, send)
        else:
            await _send_error(error, scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Compare digests in constant time: neither the key's length nor a common prefix shows in the duration."""
        if self._digest is None:
            return True
        header: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, given = header.partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == b"bearer"


class RequestCycleMiddleware:
    """Gives every POST its :class:`RequestCycle`, counts it as in flight, and ends it when the server stops."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._in_flight = state.in_flight
        self._options = state.options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request to its response, the client's disconnect, or the end of the server."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        cycle = RequestCycle(
            scope, receive, send,
            request_id=state["request_id"],
            max_body_bytes=self._options.max_body_bytes,
            body_seconds=self._options.body_seconds,
        )  # fmt: skip
        state["cycle"] = cycle
        with self._in_flight.track():
            try:
                await self._app(scope, receive, cycle.send)
            except ClientDisconnected:
                state["disconnected"] = True
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._in_flight.stopping or task is None:
                    raise
                task.uncancel()
                with contextlib.suppress(TimeoutError):  # The client may not read.
                    async with asyncio.timeout(SHUTDOWN_REPLY_SECONDS):
                        await cycle.fail(shutting_down())


async def _send_error(error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with an error before the body is read, and close the connection if there may be one."""
    reply = error_reply(error)
    close = {} if scope["method"] in ("GET", "HEAD") else {"Connection": "close"}
    await JSONResponse(reply.body, reply.status, {**reply.headers, **close})(scope, receive, send)


def _request_id(scope: Scope) -> str:
    """The client's X-Request-Id if it is safe in headers and logs, otherwise a new id."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.match(given) else uuid.uuid4().hex


def _path(scope: Scope) -> str:
    """The path, cut to 100 characters and escaped for the log."""
    return ascii(scope["path"][:100])[1:-1].replace(" ", "%20")
