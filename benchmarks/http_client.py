"""A small HTTP/1.1 client over asyncio streams, for loads: requests in, status and body or server-sent events out.

One connection for each request, as a client without a pool makes them. It does what ``bench serve`` needs of a server
that speaks OpenAI's protocol, and no more: no redirects, no compression, no cookies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from runtime.common.errors import InputError

LINE_LIMIT = 1024 * 1024
"""Longest line of an answer, in bytes; an event with many log-probabilities is long."""


class HttpError(Exception):
    """The server answered with something else than 200, or not in HTTP."""


@dataclass(frozen=True)
class Server:
    """Where to send requests.

    Attributes:
        url: ``http://host:port``, without a path.
        api_key: sent as a bearer token if not empty.
    """

    url: str
    api_key: str = ""

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether over TLS. Raises :class:`InputError` for a URL that is none."""
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise InputError(f"{self.url!r} is no server's URL; give http://HOST:PORT, without a path")
        return parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.scheme == "https"

    async def get(self, path: str) -> str:
        """The body of ``path``. Raises :class:`HttpError` or OSError."""
        async with self._request("GET", path) as (_, body):
            return (await _all(body)).decode(errors="replace")

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Post ``body`` and give each event of the answer as it arrives, up to ``[DONE]``.

        Raises:
            HttpError: another status than 200, or an answer that ends too early.
            OSError: no connection, or a lost one.
        """
        async with self._request("POST", path, json.dumps(body).encode()) as (kind, pieces):
            if "text/event-stream" not in kind:
                raise HttpError(f"the answer is {kind or 'of no type'}, not a stream of events")
            async for line in _lines(pieces):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if not isinstance(event, dict) or "error" in event:
                    raise HttpError(f"an event in the stream says: {data.decode(errors='replace'):.300}")
                yield event
        raise HttpError("the stream ended without [DONE]")

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncGenerator[tuple[str, AsyncIterator[bytes]]]:
        """Send a request; gives the content type and the pieces of the body of a 200."""
        host, port, secure = self.address
        reader, writer = await asyncio.open_connection(host, port, ssl=secure or None, limit=LINE_LIMIT)
        try:
            head = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close", "Accept: */*"]
            if self.api_key:
                head.append(f"Authorization: Bearer {self.api_key}")
            if body:
                head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            await writer.drain()
            status, headers = await _read_head(reader)
            pieces = _read_body(reader, headers)
            if status != 200:
                raise HttpError(f"{status}: {(await _all(pieces)).decode(errors='replace'):.300}")
            yield headers.get("content-type", ""), pieces
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        status_line = (await reader.readline()).decode("latin-1").split()
        status = int(status_line[1])
        headers: dict[str, str] = {}
        while line := (await reader.readline()).decode("latin-1").strip():
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
    except (IndexError, ValueError):
        raise HttpError("the server closed the connection, or its answer is not HTTP") from None
    return status, headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it arrives: in chunks, of a known length, or up to the end of the connection."""
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readline()).split(b";")[0], 16):
                yield await reader.readexactly(size)
                await reader.readexactly(2)
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while piece := await reader.read(65536):
                yield piece
    except (ValueError, asyncio.IncompleteReadError):
        raise HttpError("the connection was lost before the answer was complete") from None


async def _all(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines, however the pieces are cut."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest
