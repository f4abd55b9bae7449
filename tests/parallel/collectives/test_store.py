"""The store over TCP on one host listens on loopback only."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from parallel.collectives.store import open_store


def test_a_tcp_store_of_one_host_listens_on_loopback_only() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def join(rank: int) -> object:
        return open_store(f"tcp://localhost:{port}", rank, 2, prefix="a", same_host=True, timeout=20.0)

    with ThreadPoolExecutor(2) as threads:
        served, joined = threads.map(join, [0, 1])
    joined.set("key", "value")
    assert served.get("key") == b"value"
    listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert "127.0.0.1" in listening
    assert not {"0.0.0.0", "::"} & set(listening)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}"):
            open_store(f"tcp://127.0.0.1:{port}", 0, 2, prefix="a", same_host=True, timeout=5.0)
