"""Channel: an authenticated byte stream per rank that carries frames of bounded length.

A frame is four bytes of length, big-endian, and that many bytes, which ``protocol.py`` interprets. There are two ways
to connect. On one host the launcher makes a socket pair and the child process inherits one end; nothing listens, so no
authentication is needed. Otherwise the driver opens a :class:`ChannelListener` (a Unix socket in a private folder, or
TCP if ranks run on other hosts), and both sides prove by HMAC that they know the run's secret before any frame is read.
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
"""Time limit of a handshake; a slower peer is disconnected."""

MAX_HANDSHAKES = 256
"""Limit of concurrent handshakes; further peers are disconnected."""

STALLED_FRAME_SECONDS = 30.0
"""A peer that sends or receives no byte of a started frame for this long counts as disconnected."""

JOIN_BYTES = 64 * 1024
"""A frame of at most this size is joined with its length, so that it needs one system call."""

READ_BYTES = 1024 * 1024
"""Limit of one read, whose buffer is allocated before the bytes have arrived."""

_LENGTH = struct.Struct("!I")


class ChannelClosedError(Exception):
    """The peer is disconnected. Internal: callers raise an error that names the rank instead."""


class Channel:
    """Frames to and from one peer. One thread may send while another receives.

    Args:
        sock: connected; the channel owns it from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        # The kernel bounds every read and write; a timeout of Python's own would make the socket non-blocking.
        sock.settimeout(None)
        _set_timeouts(sock, STALLED_FRAME_SECONDS)
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def fileno(self) -> int:
        """The socket's descriptor, for poll; -1 once the channel is closed."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send one frame.

        Raises:
            ChannelClosedError: the peer is disconnected or does not receive.
        """
        header = _LENGTH.pack(len(frame))
        try:
            if len(frame) <= JOIN_BYTES:
                self._socket.sendall(header + frame)
            else:
                self._socket.sendall(header)
                self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def recv(self, timeout: float | None = None) -> bytes:
        """Receive one frame.

        Args:
            timeout: seconds to wait for its first byte; None waits without limit.

        Raises:
            TimeoutError: no frame started in time.
            ChannelClosedError: the peer is disconnected, or stalled in the middle of a frame.
            ProtocolError: the frame's length exceeds the limit.
        """
        if not self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000.0):
            raise TimeoutError(f"no message within {timeout} s")
        return self.recv_ready()

    def recv_ready(self) -> bytes:
        """Receive one frame after poll has reported :meth:`fileno` as readable. Raises as :meth:`recv`."""
        (length,) = _LENGTH.unpack(self._recv_exactly(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a frame of {length} bytes is longer than the {MAX_MESSAGE_BYTES} allowed")
        return self._recv_exactly(length)

    def _recv_exactly(self, size: int) -> bytes:
        chunks: list[bytes] = []
        while size:
            try:
                chunk = self._socket.recv(min(size, READ_BYTES))
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not chunk:
                raise ChannelClosedError("end of file")
            chunks.append(chunk)
            size -= len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()


class ChannelListener:
    """Accepts authenticated channels at a Unix socket path or a TCP address.

    Args:
        address: ``"unix:/path"``, or ``"tcp:HOST"`` for a free port of that host's interface.
        secret: the run's secret, which peers receive by other means.
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
        """Accept peers, each with a handshake thread of its own: an idle peer does not delay the others."""
        with contextlib.suppress(OSError):  # close() ends the loop.
            while True:
                sock, _ = self._socket.accept()
                if self._handshakes.acquire(blocking=False):
                    threading.Thread(target=self._authenticate, args=(sock,), daemon=True).start()
                else:
                    sock.close()

    def _authenticate(self, sock: socket.socket) -> None:
        try:
            channel = _handshake(sock, self._secret, listening=True)
        finally:
            self._handshakes.release()
        if channel is not None:
            self._accepted.put(channel)

    def accept(self, timeout: float) -> Channel:
        """The next authenticated channel. Raises TimeoutError if there is none in time."""
        try:
            return self._accepted.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError(f"no peer connected within {timeout:.1f} s") from None

    def close(self) -> None:
        """Stop listening and remove the Unix socket's path. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Wakes the accepting thread; close alone does not.
        self._socket.close()
        kind, _, place = self.address.partition(":")
        if kind == "unix":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place)


def connect(address: str, secret: bytes, timeout: float) -> Channel:
    """Connect to the listener at ``address`` (``"unix:/path"`` or ``"tcp:HOST:PORT"``).

    Raises:
        ConnectionError: no listener within ``timeout`` seconds, or a listener with another secret.
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
    """An object with a descriptor: a channel, a rank's handle."""

    def fileno(self) -> int:
        """The descriptor."""
        ...


def wait_readable(objects: Iterable[Waitable], timeout: float | None) -> list[Waitable]:
    """The ``objects`` that are readable, after at most ``timeout`` seconds; None waits without limit."""
    ready: list[Any] = multiprocessing.connection.wait(cast(Any, list(objects)), timeout)
    return ready


def channel_pair() -> tuple[Channel, socket.socket]:
    """A connected pair: the driver's channel, and the socket that a child process inherits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours), theirs


def _handshake(sock: socket.socket, secret: bytes, *, listening: bool) -> Channel | None:
    """Authenticate both sides; None, with the socket closed, if the peer fails or is too slow.

    The challenges are the standard library's (``multiprocessing.connection``).
    """
    sock.settimeout(None)
    if listening and sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _set_timeouts(sock, HANDSHAKE_SECONDS)
    connection = Connection(os.dup(sock.fileno()))
    try:
        # The sides run the steps in opposite order; in the same order both would wait.
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
    """Bound every single read and write in the kernel."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
