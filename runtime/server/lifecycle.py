"""From a bound socket to the exit: uvicorn without its signals, the drain, and the watch of the engine.

The first SIGTERM or SIGINT drains: new requests get 503, those under way go on, and when they have ended, or their time
is over, the server does. The second one ends it at once. If the engine fails, the server tells everybody so for a
moment and ends. Workers are the command's to end, after this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from runtime.common.errors import LockstepError, signal_name
from runtime.common.log import LOGGER_NAME
from runtime.server.serving import Serving

if TYPE_CHECKING:
    from asyncio import Protocol

    from fastapi import FastAPI
    from uvicorn import Server

SIGNALS = (signal.SIGTERM, signal.SIGINT)

FORCED_EXIT_SECONDS = 2.0
"""After the second signal the process is gone this much later, whatever still hangs."""

FAILED_SECONDS = 1.0
"""How long a server without an engine still answers, so that a health check can see why."""

FLUSH_SECONDS = 1
"""How long open connections may take to carry away their last bytes."""

POLL_SECONDS = 0.02
MAX_HEADER_BYTES = 32 * 1024
MAX_CONNECTIONS = 4096
RESERVED_FILES = 128
"""Open files that are not connections: libraries, channels to ranks, logs."""

_log = logging.getLogger(LOGGER_NAME)


class ServerRun:
    """One run of the server in the current event loop.

    Args:
        app: from ``create_app``.
        listener: bound; closed when the run ends.
        max_files: how many files this process may open.

    Attributes:
        signals: those that arrived, in order.
    """

    def __init__(self, app: FastAPI, listener: socket.socket, *, max_files: int = 1024) -> None:
        self.signals: list[int] = []
        self._serving: Serving = app.state.serving
        self._listener = listener
        self._server = _make_server(app, self._serving, max(16, min(MAX_CONNECTIONS, max_files - RESERVED_FILES)))
        self._ending: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[], None] | None = None) -> LockstepError | None:
        """Serve until a signal or the engine's end.

        Args:
            on_ready: called once connections are accepted.

        Returns:
            the error that ended the engine; None if it is well.
        """
        watcher = asyncio.ensure_future(self._watch(on_ready))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            watcher.cancel()
            self._serving.close()
            await asyncio.gather(watcher, return_exceptions=True)
        return self._serving.engine.failure

    @contextlib.contextmanager
    def handle_signals(self) -> Generator[None]:
        """While in here, SIGTERM and SIGINT drain. For the main thread; what was set before comes back."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, self.on_signal, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def on_signal(self, number: int) -> None:
        """The first one drains, the next one ends everything."""
        self.signals.append(number)
        if len(self.signals) == 1:
            self.drain(signal_name(number))
            return
        _log.warning("%s: stopping at once", signal_name(number))
        # Whatever hangs (a rank in a collective, a thread in C code): the ranks end with this process.
        timer = threading.Timer(FORCED_EXIT_SECONDS, os._exit, [128 + number])
        timer.daemon = True
        timer.start()
        self._server.force_exit = True
        self.stop()

    def drain(self, why: str) -> None:
        """Refuse new requests, let those under way finish, then end."""
        traffic, seconds = self._serving.traffic, self._serving.options.drain_seconds
        traffic.draining = True
        _log.info(
            "%s: finishing %d requests, for at most %g s; the next signal stops at once",
            why, traffic.num_active, seconds,
        )  # fmt: skip
        self._ending = asyncio.ensure_future(self._end_after(seconds))

    def stop(self) -> None:
        """End the requests under way, and the server."""
        self._serving.traffic.stop()
        self._server.should_exit = True

    async def _end_after(self, seconds: float) -> None:
        """Wait for the requests under way, end those that take longer, and then the server."""
        loop, traffic = asyncio.get_running_loop(), self._serving.traffic
        deadline = loop.time() + seconds
        while traffic.num_active and loop.time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if traffic.num_active:
            _log.warning("%d requests did not end within %g s (--drain-timeout)", traffic.num_active, seconds)
        self.stop()

    async def _watch(self, on_ready: Callable[[], None] | None) -> None:
        """Say when the server is ready, and end it when the engine has ended."""
        while not self._server.started:
            await asyncio.sleep(POLL_SECONDS)
        if on_ready is not None:
            on_ready()
        await self._serving.engine.ended()
        if self.signals:
            return
        # Requests get their errors from the engine itself; this is for whoever asks /health.
        await asyncio.sleep(FAILED_SECONDS)
        self.stop()


def _make_server(app: FastAPI, serving: Serving, max_connections: int) -> Server:
    """uvicorn with our signals, our log and limits for clients that are slow on purpose."""
    import uvicorn

    class QuietServer(uvicorn.Server):
        """Signals are :class:`ServerRun`'s."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    _log_like_ours(logging.getLogger("uvicorn"))
    config = uvicorn.Config(
        app,
        http=_protocol(serving.options.body_seconds),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=max_connections,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    return QuietServer(config)


def _protocol(header_seconds: float) -> type[Protocol]:
    """HTTP/1.1 that does not wait for ever for the headers of a request."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PatientProtocol(H11Protocol):
        """Up to a point: a connection that has sent no whole request in time is closed."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(header_seconds, self._expired)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_answering():
                self._stop_timer()
            elif self._timer is None:  # The beginning of another request on the same connection.
                self._timer = self.loop.call_later(header_seconds, self._expired)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _is_answering(self) -> bool:
            cycle: Any = self.cycle  # None before the first request, whatever its type says.
            return cycle is not None and not cycle.response_complete

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _expired(self) -> None:
            self._timer = None
            if not self._is_answering():
                self.transport.close()

    return PatientProtocol


def _log_like_ours(logger: logging.Logger) -> None:
    """Give uvicorn's logger our handlers; of what it says, only warnings are for others."""
    logger.handlers = list(_log.handlers)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
