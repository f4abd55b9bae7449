"""The channel between driver and rank: framing, limits, and authentication against unknown peers."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from runtime.common import channel as channel_module
from runtime.common.channel import ChannelClosedError, ChannelListener, channel_pair, connect
from runtime.common.errors import ProtocolError

SECRET = b"s" * 32


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest, tmp_path: Path):
    address = f"unix:{tmp_path}/socket" if request.param == "unix" else "tcp:127.0.0.1"
    opened = ChannelListener(address, SECRET)
    yield opened
    opened.close()
    assert not (tmp_path / "socket").exists()


def accept_in_thread(listener: ChannelListener, timeout: float = 20.0):
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(timeout)))
    thread.start()

    def result():
        thread.join(timeout)
        return accepted[0]

    return result


def raw_socket(listener: ChannelListener) -> socket.socket:
    kind, _, place = listener.address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(place)
        return sock
    host, _, port = place.rpartition(":")
    return socket.create_connection((host, int(port)))


def test_frames_arrive_whole_and_in_order(listener: ChannelListener):
    accepted = accept_in_thread(listener)
    there = connect(listener.address, SECRET, 5.0)
    here = accepted()
    frames = [b"x", b"", os.urandom(3_000_000)]
    sender = threading.Thread(target=lambda: [there.send(frame) for frame in frames])
    sender.start()
    assert [here.recv(5.0) for _ in frames] == frames
    sender.join()
    there.close()
    with pytest.raises(ChannelClosedError):
        here.recv(5.0)
    here.close()


def test_no_frame_in_time_is_a_timeout():
    here, theirs = channel_pair()
    with pytest.raises(TimeoutError):
        here.recv(0.01)
    theirs.close()
    here.close()


def test_wrong_secret_is_refused_and_the_right_one_still_gets_in(listener: ChannelListener):
    accepted = accept_in_thread(listener)
    with pytest.raises(ConnectionError, match="secrets"):
        connect(listener.address, b"w" * 32, 5.0)
    there = connect(listener.address, SECRET, 5.0)
    there.send(b"me")
    here = accepted()
    assert here.recv(5.0) == b"me"
    here.close()
    there.close()


@pytest.mark.parametrize("garbage", [b"", os.urandom(4096), struct.pack("!i", 2**31 - 1), b"\xff" * 64])
def test_an_unauthenticated_peer_does_not_delay_others(listener: ChannelListener, garbage: bytes):
    """It sends random bytes, a huge length, or nothing at all."""
    accepted = accept_in_thread(listener)
    unknown = raw_socket(listener)
    if garbage:
        unknown.sendall(garbage)
    there = connect(listener.address, SECRET, 5.0)
    here = accepted()
    there.send(b"fine")
    assert here.recv(5.0) == b"fine"
    for end in (unknown, here, there):
        end.close()


def test_a_frame_longer_than_allowed_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 1000)
    here, theirs = channel_pair()
    theirs.sendall(struct.pack("!i", 1001))
    with pytest.raises(ProtocolError, match="1000"):
        here.recv(5.0)
    theirs.close()
    here.close()


def test_a_long_frame_is_sent_apart_from_its_length_and_read_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "JOIN_BYTES", 10)
    monkeypatch.setattr(channel_module, "READ_BYTES", 7)
    here, theirs = channel_pair()
    there = channel_module.Channel(theirs)
    frames = [b"x" * 10, b"y" * 11, b""]
    for frame in frames:
        here.send(frame)
    assert [there.recv(5.0) for _ in frames] == frames
    here.close()
    there.close()


@pytest.mark.parametrize("part", [b"\0\0", struct.pack("!I", 3) + b"ab"])
def test_a_frame_that_stalls_ends_the_channel(part: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "STALLED_FRAME_SECONDS", 0.05)
    here, theirs = channel_pair()
    theirs.sendall(part)
    with pytest.raises(ChannelClosedError):
        here.recv(5.0)
    with pytest.raises(ChannelClosedError):
        for _ in range(100):  # the peer reads none of it
            here.send(bytes(1_000_000))
    theirs.close()
    here.close()


def test_a_closed_channel_raises_its_own_error():
    here, theirs = channel_pair()
    here.close()
    here.close()
    for use in (lambda: here.send(b"x"), here.recv_ready):
        with pytest.raises(ChannelClosedError):
            use()
    theirs.close()


def test_connecting_without_a_listener_is_refused():
    with pytest.raises(ConnectionError, match="cannot reach"):
        connect("tcp:127.0.0.1:1", SECRET, 1.0)
