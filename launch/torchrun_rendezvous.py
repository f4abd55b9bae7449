"""Rendezvous: small key-value stores over which the processes that torchrun started find the driver."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from launch.environment import TorchrunRanks
from runtime.common.errors import EngineError
from runtime.executor.run_dir import PREFIX

FILE_POLL_SECONDS = 0.02
STORE_POLL_SECONDS = 0.2

DRIVER = "driver"
"""The key of the address that agents connect to. It changes with every engine; :data:`EXIT` is the last value."""

EXIT = b"exit"


def goodbye_key(rank: int) -> str:
    """The key that agent ``rank`` sets before it exits."""
    return f"bye-{rank}"


class Rendezvous(Protocol):
    """A key-value store that all processes of a torchrun run share."""

    def publish(self, key: str, value: bytes) -> None:
        """Set ``key``."""

    def wait(self, key: str, timeout: float, other_than: bytes = b"") -> bytes:
        """Wait for a value of ``key`` that differs from ``other_than``. Raises TimeoutError."""
        ...

    def remove(self) -> None:
        """Remove the store."""


class FileRendezvous:
    """Files in a private folder, for one host. The folder is named after the torchrun process, the common parent."""

    def __init__(self, ranks: TorchrunRanks) -> None:
        # The name matches that of torchrun's run directories, so the next start removes it if torchrun was killed.
        name = f"{PREFIX}{os.getppid()}-torchrun-{ranks.master_port}-{ranks.restart_count}"
        self._folder = Path(tempfile.gettempdir()) / name
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise EngineError(f"{self._folder} belongs to another user; remove it or set TMPDIR")

    def publish(self, key: str, value: bytes) -> None:
        """Write the value to a temporary file and rename it, so that readers never see a partial value."""
        partial = self._folder / f".{key}"
        partial.write_bytes(value)
        partial.rename(self._folder / key)

    def wait(self, key: str, timeout: float, other_than: bytes = b"") -> bytes:
        """Poll for the file. Only start-up waits here."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                value = (self._folder / key).read_bytes()
                if value != other_than:
                    return value
            time.sleep(FILE_POLL_SECONDS)
        raise TimeoutError(f"{key!r} did not appear in {self._folder} within {timeout:.0f} s")

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class StoreRendezvous:
    """A TCP store at the address that torchrun gives every process, for several hosts."""

    def __init__(self, ranks: TorchrunRanks) -> None:
        import torch.distributed as dist  # A slow import, needed on several hosts only.

        is_master = ranks.rank == 0 and not ranks.agent_store
        stores: Any = dist
        store = stores.TCPStore(ranks.master_addr, ranks.master_port, is_master=is_master)
        self._store = stores.PrefixStore(f"lockstep/{ranks.restart_count}", store)

    def publish(self, key: str, value: bytes) -> None:
        """Set the key."""
        self._store.set(key, value)

    def wait(self, key: str, timeout: float, other_than: bytes = b"") -> bytes:
        """Poll the store, because it cannot wait for a key to be overwritten."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._store.check([key]):
                value = bytes(self._store.get(key))
                if value != other_than:
                    return value
            time.sleep(STORE_POLL_SECONDS)
        raise TimeoutError(f"{key!r} did not appear in torchrun's store within {timeout:.0f} s")

    def remove(self) -> None:
        """Nothing to remove: the store ends with torchrun."""


def open_rendezvous(ranks: TorchrunRanks) -> FileRendezvous | StoreRendezvous:
    """A file rendezvous on one host, a store rendezvous on several."""
    return FileRendezvous(ranks) if ranks.one_host else StoreRendezvous(ranks)
