"""Results on stdout, flushed line by line, and the errors of a closed pipe or a full disk.

Results that cannot be written are an error; log lines that cannot be written are dropped and counted by
``launch/standard_error.py``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from runtime.common.errors import LockstepError


class OutputClosed(Exception):
    """The reader closed stdout (``lockstep ... | head``); the command stops without an error message."""


class OutputError(LockstepError):
    """Results cannot be written to stdout or to a file."""

    def __init__(self, where: str, error: OSError) -> None:
        super().__init__(f"the results cannot be written to {where}: {error.strerror or error}; make room there")


def write_line(text: str) -> None:
    """Write one line to stdout and flush. Raises like :func:`write_text`."""
    write_text(text + "\n")


def write_text(text: str) -> None:
    """Write ``text`` to stdout and flush.

    Raises:
        OutputClosed: the reader closed the pipe.
        OutputError: the write failed, for example on a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes stdout again at exit and would report the error: point it at /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputClosed if isinstance(error, BrokenPipeError) else OutputError("stdout", error) from None


def write_json(value: Any) -> None:
    """Write ``value`` as one line of JSON."""
    write_line(json.dumps(value, ensure_ascii=False))
