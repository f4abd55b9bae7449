"""Results on stdout, a line at a time, and what to do when nobody reads them any more."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class OutputClosed(Exception):
    """The reader of our stdout went away (``lockstep ... | head``): no error, there is just nothing left to do."""


def write_line(text: str) -> None:
    """Write one line to stdout at once. Raises :class:`OutputClosed` if its reader is gone."""
    write_text(text + "\n")


def write_text(text: str) -> None:
    """Write a piece of text to stdout at once, as it is. Raises :class:`OutputClosed` if its reader is gone."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and would complain: give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputClosed from None


def write_json(value: Any) -> None:
    """Write ``value`` as one line of JSON."""
    write_line(json.dumps(value, ensure_ascii=False))
