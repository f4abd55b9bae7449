"""Results on stdout, a line at a time, and what to do when nobody reads them any more or there is no room.

Results that cannot be written are an error. A log line that cannot be written is none: see
``launch/standard_error.py``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from runtime.common.errors import LockstepError


class OutputClosed(Exception):
    """The reader of our stdout went away (``lockstep ... | head``): no error, there is just nothing left to do."""


class OutputError(LockstepError):
    """Results cannot be written."""

    def __init__(self, where: str, error: OSError) -> None:
        super().__init__(f"the results cannot be written to {where}: {error.strerror or error}; make room there")


def write_line(text: str) -> None:
    """Write one line to stdout at once. Raises like :func:`write_text`."""
    write_text(text + "\n")


def write_text(text: str) -> None:
    """Write a piece of text to stdout at once, as it is.

    Raises:
        OutputClosed: its reader is gone.
        OutputError: e.g. the disk that it is redirected to is full.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more when it ends, and would complain: give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputClosed if isinstance(error, BrokenPipeError) else OutputError("stdout", error) from None


def write_json(value: Any) -> None:
    """Write ``value`` as one line of JSON."""
    write_line(json.dumps(value, ensure_ascii=False))
