"""The request cycle of a POST over ASGI: read a bounded JSON body, respond once, cancel the work on disconnect.

FastAPI validates the body and calls the endpoint; the responses here write to ASGI directly, so that neither a task
group nor a copy is between a token and the socket. ``send`` blocks while the client's buffers are full: a slow client
delays only its own response.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from runtime.common.errors import LockstepError
from runtime.server.errors import HttpError, error_reply
from runtime.server.json_body import parse_json

T = TypeVar("T")

EVENT_STREAM = b"text/event-stream; charset=utf-8"


class ClientDisconnected(Exception):
    """The client closed its connection before its response was complete."""


class RequestCycle:
    """One request and its response.

    Args:
        scope, receive, send: ASGI's.
        request_id: the id in response objects and in the ``X-Request-Id`` header.
        max_body_bytes: a longer body is refused as soon as its length is known.
        body_seconds: deadline for the body.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, request_id: str, max_body_bytes: int, body_seconds: float
    ) -> None:
        self.request_id = request_id
        self._scope = scope
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds
        self._body_read = False
        self._started = False
        self._streaming = False

    @classmethod
    def of(cls, request: Request) -> RequestCycle:
        """The cycle that ``RequestCycleMiddleware`` made for a request."""
        cycle: RequestCycle = request.state.cycle
        return cycle

    async def read(self) -> Any:
        """Read and parse the body.

        Raises:
            HttpError: it is too long, too slow, or not JSON within the limits.
            ClientDisconnected: it never came to its end.
        """
        return parse_json(await self._read_bytes())

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
                        raise ClientDisconnected
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
        """Run ``work``; cancel it, and wait for its end, when the client disconnects.

        Raises:
            ClientDisconnected: the client disconnected.
        """
        task = asyncio.ensure_future(work)
        disconnected = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
            return task.result()
        finally:
            # The request has left the engine when this returns, whatever the reason.
            task.cancel()
            disconnected.cancel()
            await asyncio.gather(task, disconnected, return_exceptions=True)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        """Send an ASGI message. A response to a body that was not read closes the connection."""
        if message["type"] == "http.response.start":
            self._started = True
            if not self._body_read:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await self._send(message)

    async def send_events(self, events: AsyncGenerator[bytes]) -> None:
        """Send server-sent events as they are generated.

        The response starts with the first event: an error before it is raised, so that the response has its status. A
        later error becomes the last event.
        """
        async with contextlib.aclosing(events):
            body = await anext(events)
            headers = [(b"content-type", EVENT_STREAM), (b"cache-control", b"no-cache")]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
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
        """Send an error: as the response, or as the last event of a stream that has started."""
        reply = error_reply(error)
        if self._streaming:
            self._streaming = False
            event = f"data: {json.dumps(reply.body)}\n\ndata: [DONE]\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        elif not self._started:
            await JSONResponse(reply.body, reply.status, reply.headers)(self._scope, self._receive, self.send)


class ResultResponse(Response):
    """A JSON response whose content is computed while the client is connected."""

    def __init__(self, cycle: RequestCycle, result: Coroutine[Any, Any, dict[str, Any]]) -> None:
        super().__init__()
        self._cycle = cycle
        self._result = result

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute the content and send it."""
        await JSONResponse(await self._cycle.while_connected(self._result))(scope, receive, send)


class EventStreamResponse(Response):
    """A response of server-sent events, generated while the client is connected."""

    def __init__(self, cycle: RequestCycle, events: AsyncGenerator[bytes]) -> None:
        super().__init__()
        self._cycle = cycle
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        await self._cycle.while_connected(self._cycle.send_events(self._events))


class JsonBodyRoute(APIRoute):
    """A route whose body :class:`RequestCycle` reads and parses, within its limits, before FastAPI validates it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler of a request whose body is parsed already."""
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            if request.method != "POST":
                return await handle(request)
            return await handle(_ParsedRequest(request, await RequestCycle.of(request).read()))

        return read_and_handle


class _ParsedRequest(Request):
    """A request with a parsed body, which is JSON whatever its Content-Type is (curl -d sends a form's)."""

    def __init__(self, request: Request, value: Any) -> None:
        headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
        scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
        super().__init__(scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        """Not empty, which is all that FastAPI asks before it calls :meth:`json`."""
        return b"{}"

    async def json(self) -> Any:
        """The parsed body."""
        return self._value


def _too_long(size: int, limit: int) -> HttpError:
    return HttpError(
        f"the body has {size} bytes or more; allowed: {limit} (lockstep serve --max-body-bytes)",
        status=413,
        code="body_too_long",
    )
