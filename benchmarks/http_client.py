"""A minimal HTTP/1.1 client over asyncio streams for ``bench serve``: bodies and server-sent events.

It shares the cores with the server that it measures, and needs much less CPU time for an event than httpx, whose
layers would slow the ranks down. One connection for each request; no redirects, compression or cookies.
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
"""Longest line of a response, in bytes: events with many logprobs are long."""


class HttpError(Exception):
    """The response has another status than 200, or is not HTTP."""


@dataclass(frozen=True)
class Server:
    """The server that receives the requests.

    Attributes:
        url: ``http://host:port``, without a path.
        api_key: bearer token of every request, if not empty.
    """

    url: str
    api_key: str = ""

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether to use TLS. Raises :class:`InputError` for an invalid URL."""
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise InputError(f"{self.url!r} is no server's URL; give http://HOST:PORT, without a path")
        return parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.scheme == "https"

    async def get(self, path: str) -> str:
        """Get the body of ``path``. Raises :class:`HttpError` or OSError."""
        async with self._request("GET", path) as (_, body):
            return (await _all(body)).decode(errors="replace")

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Post ``body`` and yield each event of the response as it arrives, up to ``[DONE]``.

        Raises:
            HttpError: another status than 200, or a response that ends too early.
            OSError: the connection failed.
        """
        async with self._request("POST", path, json.dumps(body).encode()) as (kind, chunks):
            if "text/event-stream" not in kind:
                raise HttpError(f"the response is {kind or 'of no type'}, not an event stream")
            async for line in _lines(chunks):
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
        """Send a request and yield the content type and the body, in chunks, of a response with status 200."""
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
            chunks = _read_body(reader, headers)
            if status != 200:
                raise HttpError(f"{status}: {(await _all(chunks)).decode(errors='replace'):.300}")
            yield headers.get("content-type", ""), chunks
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of a response."""
    try:
        status_line = (await reader.readline()).decode("latin-1").split()
        status = int(status_line[1])
        headers: dict[str, str] = {}
        while line := (await reader.readline()).decode("latin-1").strip():
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
    except (IndexError, ValueError):
        raise HttpError("the server closed the connection, or its response is not HTTP") from None
    return status, headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield the body: chunked, of a known length, or up to the end of the connection."""
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readline()).split(b";")[0], 16):
                yield await reader.readexactly(size)
                await reader.readexactly(2)
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while chunk := await reader.read(65536):
                yield chunk
    except (ValueError, asyncio.IncompleteReadError):
        raise HttpError("the connection was lost before the response was complete") from None


async def _all(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield whole lines, wherever the chunks are split."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest
