"""Standard error that never ends a process: what cannot be written is counted and dropped.

Used by every process of ours, driver and ranks, before logging is configured. Results on stdout are another matter, see
``launch/cli/output.py``.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
