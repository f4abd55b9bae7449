"""One HTTP exchange over ASGI: read a bounded body, answer once, stop working when the client is gone.

Written against ASGI itself, so that nothing stands between a token and the socket: no response class, no task group,
no copy. ``send`` waits while the client's buffers are full, so a client that does not read holds back only itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from runtime.common.errors import LockstepError
from runtime.server.errors import BodyError, HttpError, error_reply

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

MAX_DEPTH = 64
"""Objects and lists within each other in a body."""

MAX_BRACKETS = 100_000
MAX_COMMAS = 2_000_000
"""A byte of JSON can become sixty in memory: so many objects and lists, and so many entries, are parsed at most."""

_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
CLOSE = (b"connection", b"close")


class ClientGone(Exception):
    """The client closed its connection before its answer was complete: nobody is left to tell."""


class Exchange:
    """One request and its one answer.

    Args:
        scope, receive, send: ASGI's.
        max_body_bytes: a longer body is refused, as soon as that is known.
        body_seconds: how long the body may take to arrive.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, max_body_bytes: int, body_seconds: float) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds
        self._body_read = False
        self._streaming = False

    async def read(self) -> Any:
        """The body, parsed.

        Raises:
            HttpError: it is too long, too slow, or not JSON that we take.
            ClientGone: it never came to its end.
        """
        return parse(await self._read_bytes())

    async def _read_bytes(self) -> bytes:
        limit = self._max_body_bytes
        announced = dict(self._scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise _too_long(int(announced[:20]), limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_long(len(body), limit)
                    if not message.get("more_body", False):
                        self._body_read = True
                        return bytes(body)
        except TimeoutError:
            raise HttpError(
                f"the body did not arrive within {self._body_seconds:g} s; {len(body)} bytes of it did",
                status=408,
                code="body_timeout",
            ) from None

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives; it is cancelled, and its end awaited, when the client goes away.

        Raises:
            ClientGone: the client went away.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            # The request has left the engine when this returns, whatever the reason.
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        """Send ``value`` as JSON."""
        body = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        await self._start(status, b"application/json", headers, len(body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def stream(self, events: AsyncGenerator[bytes]) -> None:
        """Send server-sent events as they come.

        Nothing is sent before the first of them: an error until then raises, and so has a status of its own. A later
        one becomes the last event.
        """
        async with contextlib.aclosing(events):
            body = await anext(events)
            await self._start(200, b"text/event-stream; charset=utf-8", {"Cache-Control": "no-cache"}, None)
            self._streaming = True
            try:
                while body:
                    await self._send({"type": "http.response.body", "body": body, "more_body": True})
                    body = await anext(events, b"")
            except LockstepError as error:
                await self.fail(error)
                return
            self._streaming = False
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: LockstepError) -> None:
        """Answer with an error: as the response, or as the last event of a stream that has begun."""
        reply = error_reply(error)
        if self._streaming:
            self._streaming = False
            event = f"data: {json.dumps(reply.body)}\n\ndata: [DONE]\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
            return
        await self.answer(reply.status, reply.body, reply.headers)

    async def _start(self, status: int, kind: bytes, headers: dict[str, str] | None, length: int | None) -> None:
        sent = [(b"content-type", kind)]
        if length is not None:
            sent.append((b"content-length", str(length).encode()))
        sent += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        if not self._body_read and self._scope["method"] not in ("GET", "HEAD"):
            sent.append(CLOSE)  # The rest of the body is not read, so nothing can follow it on this connection.
        await self._send({"type": "http.response.start", "status": status, "headers": sent})


def parse(body: bytes) -> Any:
    """The value of a JSON text. Raises :class:`BodyError`, before it can take much memory or any deep recursion."""
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > MAX_DEPTH:
        # Strings may hold brackets and commas, so they go first; this takes as long as a copy.
        bare = _STRINGS.sub(b"", body)
        brackets, commas = bare.count(b"[") + bare.count(b"{"), bare.count(b",")
        if brackets > MAX_BRACKETS:
            raise BodyError(f"the body has {brackets} lists and objects; allowed: {MAX_BRACKETS}", code="too_long")
        if _depth(bare) > MAX_DEPTH:
            raise BodyError(f"the body is nested deeper than {MAX_DEPTH} lists and objects", code="too_deep")
    else:
        commas = body.count(b",")
    if commas > MAX_COMMAS:
        raise BodyError(f"the body has more than {commas} entries; allowed: {MAX_COMMAS}", code="too_long")
    try:
        return json.loads(body.decode(), parse_constant=_no_constant)  # Left to itself, json would take UTF-16, too.
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise BodyError(f"the body is not JSON: {error}"[:300], code="invalid_json") from None


def _depth(bare: bytes) -> int:
    """How deep the brackets of a JSON text without its strings are nested; counted to just over the limit."""
    depth = deepest = 0
    for bracket in bare.translate(None, _NOT_BRACKETS):
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                break
        else:
            depth -= 1
    return deepest


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _too_long(size: int, limit: int) -> HttpError:
    return HttpError(
        f"the body has {size} bytes or more; allowed: {limit} (lockstep serve --max-body-bytes)",
        status=413,
        code="body_too_long",
    )
