"""Lifecycle of the server: uvicorn on a bound socket, signals and drain, and the end of the engine.

The first SIGTERM or SIGINT drains: new requests get 503, requests in flight continue, and the server ends when they
have finished or at the drain's deadline. The second signal ends the server at once. After a failure of the engine, the
server answers with 503 for :data:`FAILED_SECONDS` and ends. The command ends the workers afterwards.
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
from runtime.server.app_state import AppState

if TYPE_CHECKING:
    from asyncio import Protocol

    from fastapi import FastAPI
    from uvicorn import Server

SIGNALS = (signal.SIGTERM, signal.SIGINT)

FORCED_EXIT_SECONDS = 2.0
"""Deadline for the process to exit after the second signal, whatever hangs."""

FAILED_SECONDS = 1.0
"""Time for which the server still responds after its engine failed, so that a health check sees the reason."""

FLUSH_SECONDS = 1
"""Deadline for open connections to send their last bytes."""

POLL_SECONDS = 0.02
MAX_HEADER_BYTES = 32 * 1024
MAX_CONNECTIONS = 4096
RESERVED_FILES = 128
"""File descriptors reserved for other uses than connections: libraries, channels to ranks, logs."""

_log = logging.getLogger(LOGGER_NAME)


class ServerRun:
    """Runs the server in the current event loop.

    Args:
        app: the application of ``create_app``.
        listener: a bound socket; closed when the server ends.
        max_files: the process's limit of open files.

    Attributes:
        signals: the signals received, in order.
    """

    def __init__(self, app: FastAPI, listener: socket.socket, *, max_files: int = 1024) -> None:
        self.signals: list[int] = []
        self._state: AppState = app.state.lockstep
        self._listener = listener
        self._server = _make_server(app, self._state, max(16, min(MAX_CONNECTIONS, max_files - RESERVED_FILES)))
        self._ending: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[], None] | None = None) -> LockstepError | None:
        """Serve until a signal or the end of the engine.

        Args:
            on_ready: called once connections are accepted.

        Returns:
            the error that ended the engine, or None.
        """
        watcher = asyncio.ensure_future(self._watch(on_ready))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            watcher.cancel()
            self._state.close()
            await asyncio.gather(watcher, return_exceptions=True)
        return self._state.engine.failure

    @contextlib.contextmanager
    def handle_signals(self) -> Generator[None]:
        """Handle SIGTERM and SIGINT in the block, in the main thread; restores the previous handlers."""
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
        """Drain on the first signal, end at once on the second."""
        self.signals.append(number)
        if len(self.signals) == 1:
            self.drain(signal_name(number))
            return
        _log.warning("%s: stopping at once", signal_name(number))
        # For whatever hangs, such as a rank in a collective or a thread in C code: the ranks end with this process.
        timer = threading.Timer(FORCED_EXIT_SECONDS, os._exit, [128 + number])
        timer.daemon = True
        timer.start()
        self._server.force_exit = True
        self.stop()

    def drain(self, why: str) -> None:
        """Refuse new requests, wait for those in flight up to the deadline, then end."""
        in_flight, seconds = self._state.in_flight, self._state.options.drain_seconds
        in_flight.draining = True
        _log.info(
            "%s: finishing %d requests, for at most %g s; the next signal stops at once",
            why, in_flight.num_active, seconds,
        )  # fmt: skip
        self._ending = asyncio.ensure_future(self._end_after(seconds))

    def stop(self) -> None:
        """Cancel the requests in flight and end the server."""
        self._state.in_flight.stop()
        self._server.should_exit = True

    async def _end_after(self, seconds: float) -> None:
        """Wait for the requests in flight up to a deadline, then end the server."""
        loop, in_flight = asyncio.get_running_loop(), self._state.in_flight
        deadline = loop.time() + seconds
        while in_flight.num_active and loop.time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if in_flight.num_active:
            _log.warning("%d requests did not end within %g s (--drain-timeout)", in_flight.num_active, seconds)
        self.stop()

    async def _watch(self, on_ready: Callable[[], None] | None) -> None:
        """Call ``on_ready`` once the server listens, and end the server after the engine."""
        while not self._server.started:
            await asyncio.sleep(POLL_SECONDS)
        if on_ready is not None:
            on_ready()
        await self._state.engine.ended()
        if self.signals:
            return
        # Requests in flight get their errors from the engine; this time is for health checks.
        await asyncio.sleep(FAILED_SECONDS)
        self.stop()


def _make_server(app: FastAPI, state: AppState, max_connections: int) -> Server:
    """Configure uvicorn: no signal handlers, Lockstep's log, and limits against slow clients."""
    import uvicorn

    class SignalFreeServer(uvicorn.Server):
        """uvicorn's server without signal handlers, which :class:`ServerRun` installs."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    _use_own_handlers(logging.getLogger("uvicorn"))
    config = uvicorn.Config(
        app,
        http=_header_timeout_protocol(state.options.body_seconds),
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
    return SignalFreeServer(config)


def _header_timeout_protocol(header_seconds: float) -> type[Protocol]:
    """A subclass of uvicorn's HTTP/1.1 protocol with a deadline for the headers of each request."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class HeaderTimeoutProtocol(H11Protocol):
        """Closes a connection on which no complete request head arrives before the deadline."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(header_seconds, self._expired)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_answering():
                self._stop_timer()
            elif self._timer is None:  # The first bytes of another request on the same connection.
                self._timer = self.loop.call_later(header_seconds, self._expired)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _is_answering(self) -> bool:
            cycle: Any = self.cycle  # None before the first request, unlike its annotation.
            return cycle is not None and not cycle.response_complete

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _expired(self) -> None:
            self._timer = None
            if not self._is_answering():
                self.transport.close()

    return HeaderTimeoutProtocol


def _use_own_handlers(logger: logging.Logger) -> None:
    """Send a logger's warnings and errors to Lockstep's handlers."""
    logger.handlers = list(_log.handlers)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
