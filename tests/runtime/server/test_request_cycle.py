"""The request cycle over recorded ASGI messages: one response, errors before and after its start, disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from runtime.common.errors import EngineError
from runtime.server.errors import BodyError
from runtime.server.request_cycle import ClientDisconnected, RequestCycle


class Connection:
    """Received messages of a client, followed by silence or its disconnect, and the messages sent to it."""

    def __init__(self, *received: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._received = list(received)

    async def receive(self) -> dict[str, Any]:
        if not self._received:
            await asyncio.Event().wait()
        return self._received.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))

    def cycle(self, *, max_body_bytes: int = 100) -> RequestCycle:
        scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}
        return RequestCycle(
            scope, self.receive, self.send, request_id="r", max_body_bytes=max_body_bytes, body_seconds=20.0
        )


def body(text: str, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": text.encode(), "more_body": more}


DISCONNECT = {"type": "http.disconnect"}
START = {"type": "http.response.start", "status": 200, "headers": []}


def test_body_in_several_messages() -> None:
    assert asyncio.run(Connection(body('{"a"', more=True), body(": 1}")).cycle().read()) == {"a": 1}
    with pytest.raises(ClientDisconnected):
        asyncio.run(Connection(body('{"a"', more=True), DISCONNECT).cycle().read())


def test_error_before_the_response_is_the_response() -> None:
    connection = Connection()
    asyncio.run(connection.cycle().fail(BodyError("no", param="n")))
    start, content = connection.sent
    assert start["status"] == 400 and (b"connection", b"close") in start["headers"]
    assert json.loads(content["body"])["error"]["param"] == "n"


def test_error_after_a_response_has_started_sends_nothing() -> None:
    connection = Connection(body("{}"))

    async def run() -> None:
        cycle = connection.cycle()
        await cycle.read()
        await cycle.send(dict(START))
        await cycle.fail(BodyError("no"))

    asyncio.run(run())
    assert connection.sent == [START]


def test_error_within_a_stream_is_its_last_event() -> None:
    connection = Connection(body("{}"))

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        raise EngineError("dead")

    async def run() -> None:
        cycle = connection.cycle()
        await cycle.read()
        await cycle.send_events(events())

    asyncio.run(run())
    start, first, last = connection.sent
    assert start["status"] == 200 and (first["body"], first["more_body"]) == (b"data: 1\n\n", True)
    assert b"dead" in last["body"] and last["body"].endswith(b"data: [DONE]\n\n") and not last["more_body"]


def test_error_before_the_first_event_is_raised() -> None:
    connection = Connection()

    async def events() -> AsyncGenerator[bytes]:
        raise BodyError("no")
        yield b""

    with pytest.raises(BodyError):
        asyncio.run(connection.cycle().send_events(events()))
    assert not connection.sent


def test_disconnect_cancels_the_work_and_waits_for_its_end() -> None:
    ended: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def run() -> None:
        with pytest.raises(ClientDisconnected):
            await Connection(DISCONNECT).cycle().while_connected(work())
        assert ended == [True]

    asyncio.run(run())
