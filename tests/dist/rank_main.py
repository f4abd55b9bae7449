"""What runs in a rank process of ``ranks.py``: receive a job, open the group, call the function, send the outcome."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import importlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import torch

from parallel.group import init_group
from parallel.group_spec import GroupSpec

PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    """Serve jobs until the other end is closed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(fd)
    while True:
        try:
            job = msgpack.unpackb(connection.recv_bytes(), raw=False, strict_map_key=False)
        except EOFError:
            return
        faulthandler.dump_traceback_later(max(0.5, job["timeout"] - 1))
        try:
            outcome: list[Any] = [_run(job), ""]
            answer = msgpack.packb(outcome)
        except Exception:  # noqa: BLE001 - whatever the function raised is the outcome
            answer = msgpack.packb([None, traceback.format_exc()])
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(answer)


def _run(job: dict[str, Any]) -> Any:
    module, _, name = job["function"].partition(":")
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    group = init_group(GroupSpec(**job["spec"]), torch.device("cpu"))
    try:
        return function(group, *job["args"])
    finally:
        group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
