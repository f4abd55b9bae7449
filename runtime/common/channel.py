"""One authenticated byte channel per rank: frames of bounded length over a connected stream socket.

Two ways to get one. On one host the launcher makes a socket pair and the child inherits its end: nothing listens, so
there is nobody to authenticate. Elsewhere the driver opens a :class:`ChannelListener` (a Unix socket in a private
folder, or TCP if ranks live on other hosts) and each side proves that it knows the run's secret (HMAC, both
directions) before a single frame is read. Frames are opaque here; ``protocol.py`` knows what they say. The standard
library's ``Connection`` does framing and handshake; its pickling ``send`` and ``recv`` are never called.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol, cast

from runtime.common.errors import ProtocolError
from runtime.common.protocol import MAX_MESSAGE_BYTES

HANDSHAKE_SECONDS = 5.0
"""A peer that has not proven the secret by then is dropped."""

MAX_HANDSHAKES = 256
"""Handshakes under way at once; callers beyond that are dropped at once."""

STALLED_FRAME_SECONDS = 30.0
"""A peer that stops in the middle of a frame for so long is treated as gone."""


class ChannelClosedError(Exception):
    """The other side of a channel is gone. Internal: callers turn it into an error that names the rank."""


class Channel:
    """Frames of bytes to and from one peer. Not safe for two threads that send, or two that receive."""

    def __init__(self, sock: socket.socket) -> None:
        _set_timeouts(sock, STALLED_FRAME_SECONDS)
        self._connection: Connection = Connection(sock.detach())
        # Kept: Connection.poll makes a selector for every call, which is most of what a small message costs.
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLIN)

    def fileno(self) -> int:
        """The descriptor, for ``multiprocessing.connection.wait`` and poll."""
        return self._connection.fileno()

    def send(self, frame: bytes) -> None:
        """Send one frame. Raises :class:`ChannelClosedError` if the peer is gone or takes nothing any more."""
        try:
            self._connection.send_bytes(frame)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def recv(self, timeout: float | None = None) -> bytes:
        """The next frame.

        Args:
            timeout: seconds to wait for its first byte; None waits for ever.

        Raises:
            TimeoutError: no frame began in time.
            ChannelClosedError: the peer is gone, or stopped in the middle of a frame.
            ProtocolError: the peer announced a frame longer than allowed.
        """
        if not self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000.0):
            raise TimeoutError(f"no message within {timeout} s")
        return self.recv_begun()

    def recv_begun(self) -> bytes:
        """The next frame, whose beginning the caller has seen by polling :meth:`fileno`. Raises as :meth:`recv`."""
        try:
            return self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        except (EOFError, OSError) as error:
            if "bad message length" in str(error):
                raise ProtocolError(f"a frame longer than {MAX_MESSAGE_BYTES} bytes was announced") from error
            raise ChannelClosedError(str(error) or "end of file") from error

    def close(self) -> None:
        """Close this end. May be called twice."""
        self._connection.close()


class ChannelListener:
    """Accepts authenticated channels at a Unix socket path or a TCP host.

    Args:
        address: ``"unix:/path"``, or ``"tcp:HOST"`` for a free port of that host's interface.
        secret: the run's secret, shared out of band with the peers.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        kind, _, place = address.partition(":")
        self._secret = secret
        if kind == "unix":
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(place)
            os.chmod(place, 0o600)
            self.address = address
        else:
            self._socket = socket.create_server((place, 0))
            self.address = f"tcp:{place}:{self._socket.getsockname()[1]}"
        self._socket.listen(128)
        self._accepted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        threading.Thread(target=self._run, name="channel-listener", daemon=True).start()

    def _run(self) -> None:
        """Give every caller a handshake of its own, so that a silent stranger keeps nobody waiting."""
        with contextlib.suppress(OSError):  # close() ends it
            while True:
                sock, _ = self._socket.accept()
                if self._handshakes.acquire(blocking=False):
                    threading.Thread(target=self._admit, args=(sock,), daemon=True).start()
                else:
                    sock.close()

    def _admit(self, sock: socket.socket) -> None:
        try:
            channel = _handshake(sock, self._secret, listening=True)
        finally:
            self._handshakes.release()
        if channel is not None:
            self._accepted.put(channel)

    def accept(self, timeout: float) -> Channel:
        """The next peer that proved the secret; strangers are dropped. Raises TimeoutError when none came in time."""
        try:
            return self._accepted.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError(f"nobody connected within {timeout:.1f} s") from None

    def close(self) -> None:
        """Stop listening and remove the Unix socket's path. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Wakes the thread that accepts; close alone does not.
        self._socket.close()
        kind, _, place = self.address.partition(":")
        if kind == "unix":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place)


def connect(address: str, secret: bytes, timeout: float) -> Channel:
    """A channel to the listener at ``address`` (``"unix:/path"`` or ``"tcp:HOST:PORT"``).

    Raises:
        ConnectionError: nobody listens there within ``timeout`` seconds, or the other side has another secret.
    """
    kind, _, place = address.partition(":")
    try:
        if kind == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout)
            sock.connect(place)
        else:
            host, _, port = place.rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise ConnectionError(f"cannot reach the driver at {address}: {error}") from error
    channel = _handshake(sock, secret, listening=False)
    if channel is None:
        raise ConnectionError(f"the driver at {address} refused this rank: the secrets of the two runs differ")
    return channel


class Waitable(Protocol):
    """Anything with a descriptor: a channel, a rank's handle."""

    def fileno(self) -> int:
        """The descriptor."""
        ...


def wait_readable(objects: Iterable[Waitable], timeout: float | None) -> list[Waitable]:
    """Those of ``objects`` that can be read without blocking, after at most ``timeout`` seconds (None: for ever)."""
    ready: list[Any] = multiprocessing.connection.wait(cast(Any, list(objects)), timeout)
    return ready


def channel_pair() -> tuple[Channel, socket.socket]:
    """A connected pair: our end, and the socket whose descriptor a child process inherits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours), theirs


def _handshake(sock: socket.socket, secret: bytes, *, listening: bool) -> Channel | None:
    """Both sides prove the secret; None, and a closed socket, if the peer cannot or is too slow."""
    sock.settimeout(None)
    if listening and sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _set_timeouts(sock, HANDSHAKE_SECONDS)
    connection = Connection(os.dup(sock.fileno()))
    try:
        # One side asks first and the other answers first, or both would wait.
        steps = (deliver_challenge, answer_challenge) if listening else (answer_challenge, deliver_challenge)
        for step in steps:
            step(connection, secret)
    except (multiprocessing.AuthenticationError, EOFError, OSError):
        sock.close()
        return None
    finally:
        connection.close()
    return Channel(sock)


def _set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Bound every single read and write at the kernel, so that ``Connection``'s plain os.read cannot hang."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
