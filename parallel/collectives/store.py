"""The rendezvous store of a gloo or NCCL group: a file on one host, or a TCP server."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = "127.0.0.1"


def open_store(init_method: str, rank: int, size: int, *, prefix: str, same_host: bool, timeout: float) -> Store:
    """Open the store that ``init_method`` names; rank 0 runs the server of a TCP store.

    Args:
        init_method: ``file:///path``, or ``tcp://host:port``.
        rank: this rank.
        size: the number of ranks.
        prefix: of every key, so that groups and runs can share a store.
        same_host: bind a TCP server to loopback.
        timeout: seconds to wait for a key.

    Raises:
        ValueError: an unsupported address.
        RuntimeError: the server cannot be reached in time (torch's DistNetworkError), or its port is in use.
    """
    url = urlsplit(init_method)
    wait = timedelta(seconds=timeout)
    if url.scheme == "file" and url.path:
        store: Store = FileStore(url.path, size)
    elif url.scheme == "tcp" and url.hostname and url.port:
        store = _tcp_store(url.hostname, url.port, rank, size, same_host, wait)
    else:
        raise ValueError(f"init_method {init_method!r} is neither file:///path nor tcp://host:port")
    store.set_timeout(wait)
    return PrefixStore(prefix, store)


def _tcp_store(host: str, port: int, rank: int, size: int, same_host: bool, wait: timedelta) -> Store:
    if not same_host:
        return TCPStore(host, port, size, rank == 0, wait, wait_for_workers=False)
    if rank > 0:
        return TCPStore(LOOPBACK, port, size, False, wait, wait_for_workers=False)
    # By default the server listens on every interface, whatever the host name.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise RuntimeError(f"rank 0 cannot listen on {LOOPBACK}:{port}: {error.strerror}") from error
        listener.listen()
        fd = os.dup(listener.fileno())
    return TCPStore(LOOPBACK, port, size, True, wait, wait_for_workers=False, master_listen_fd=fd)
