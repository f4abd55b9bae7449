"""Results on stdout, a line at a time, and what to do when nobody reads them any more or there is no room.

Results that cannot be written are an error. What is said on stderr is not worth one: see :func:`protect_stderr`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from runtime.errors import LockstepError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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


def protect_stderr() -> None:
    """Let no log line, bar or warning end this process because it cannot be written: its disk is full, its pipe closed.

    For processes that are ours, before logging is configured. Once there is room again, a line says what is missing.
    """
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        raw = _LossyFile(sys.stderr.fileno())
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
        )


class _LossyFile(io.RawIOBase):
    """A file descriptor that takes everything: what cannot be written is counted and dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lost = 0
        self._reason = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        """Bytes taken, which is all there are."""
        content = bytes(data)
        try:
            if self._lost:
                notice = f"lockstep: {self._lost} bytes of this log could not be written ({self._reason})\n"
                os.write(self._descriptor, notice.encode())
                self._lost = 0
            return os.write(self._descriptor, content)
        except OSError as error:
            self._lost += len(content)
            self._reason = error.strerror or str(error)
            return len(content)
