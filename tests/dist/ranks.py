"""Runs a function in several rank processes inside one pytest function.

    def _sum(group, scale):
        return group.all_reduce(torch.full((3,), float(group.rank) * scale)).tolist()

    def test_sum():
        assert run_ranks(_sum, 2, 10.0) == [[10.0] * 3] * 2

The function has to be importable (top level of its module). Arguments and results go through msgpack, so they are
numbers, strings, bytes, lists, dicts. The processes are kept for the next test, because importing torch is what takes
the time; after a failure they are replaced. ``rank_main.py`` is what runs in them.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgpack

ROOT = Path(__file__).resolve().parents[2]

Target = str | Callable[..., Any]


@dataclass
class Outcome:
    """What one rank made of the function: a value, or the traceback of the exception that it raised."""

    value: Any = None
    error: str = ""


class RanksFailed(AssertionError):
    """At least one rank raised, died, or did not answer; the message holds the traceback of each."""


def run_ranks(function: Target, size: int, *args: Any, **options: Any) -> list[Any]:
    """Call ``function(group, *args)`` in ``size`` rank processes and give the results in rank order.

    Args:
        function: a top-level function, or "module:qualname".
        size: the number of ranks.
        args: what msgpack can carry.
        options: of :func:`try_ranks`.

    Raises:
        RanksFailed: not every rank returned.
    """
    outcomes = try_ranks(function, size, *args, **options)
    failed = [f"--- rank {rank} of {size} ---\n{o.error.rstrip()}" for rank, o in enumerate(outcomes) if o.error]
    if failed:
        raise RanksFailed(f"{_name(function)} failed\n" + "\n".join(failed))
    return [outcome.value for outcome in outcomes]


def try_ranks(
    function: Target,
    size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "auto",
    collective_timeout: float = 20.0,
) -> list[Outcome]:
    """As :func:`run_ranks`, but failures are outcomes too.

    Args:
        function: as there.
        size: as there.
        args: as there.
        timeout: seconds after which every process is killed.
        backend: of the group, see ``parallel.group.GroupSpec``.
        collective_timeout: seconds a rank waits for the others in one collective.
    """
    return _POOL.run(_name(function), size, args, timeout, backend, collective_timeout)


def close_ranks() -> None:
    """End all rank processes; the next call starts new ones."""
    _POOL.close()


class _Rank:
    """One process and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.dist.rank_main", str(fd)], pass_fds=[fd], env=environment, cwd=ROOT
            )
        self.connection = Connection(ours.detach())

    def receive(self) -> Outcome:
        try:
            return Outcome(*msgpack.unpackb(self.connection.recv_bytes(), raw=False, strict_map_key=False))
        except (EOFError, OSError):
            return Outcome(error=f"the process ended with {self.process.wait()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class _Pool:
    """The processes that are alive, in rank order, and a folder for what they compile."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._folder = ""

    def run(
        self, function: str, size: int, args: tuple[Any, ...], timeout: float, backend: str, collective_timeout: float
    ) -> list[Outcome]:
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="rank-processes-")
        while len(self._ranks) < size:
            self._ranks.append(_Rank())
        ranks = self._ranks[:size]
        run_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        store = Path(self._folder, f"store-{run_id}")
        for number, rank in enumerate(ranks):
            spec = {
                "name": "tp", "rank": number, "size": size, "init_method": f"file://{store}", "backend": backend,
                "run_id": run_id, "timeout": collective_timeout, "library_dir": self._folder,
            }  # fmt: skip
            job = {"function": function, "args": args, "spec": spec, "timeout": timeout}
            rank.connection.send_bytes(msgpack.packb(job))
        outcomes = self._collect(ranks, timeout)
        store.unlink(missing_ok=True)
        if any(outcome.error for outcome in outcomes):
            self._replace()
        return outcomes

    def close(self) -> None:
        self._replace()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _collect(self, ranks: list[_Rank], timeout: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(ranks):
            waiting = {rank.connection: number for number, rank in enumerate(ranks) if number not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for number in waiting.values():
                    outcomes[number] = Outcome(error=f"no answer within {timeout:g} s; killed (stacks are on stderr)")
            for connection in ready:
                number = waiting[connection]
                outcomes[number] = ranks[number].receive()
        return [outcomes[number] for number in range(len(ranks))]

    def _replace(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()


_POOL = _Pool()
atexit.register(close_ranks)


def _name(function: Target) -> str:
    return function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
