"""A standard error stream whose write errors do not end the process: failed writes are counted and dropped.

Driver and ranks install it before logging is configured. Results on stdout are written by ``launch/cli/output.py``.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def protect_stderr() -> None:
    """Replace ``sys.stderr``, so that a full disk or a closed pipe does not end the process.

    After the next successful write, a line reports how many bytes were dropped. Called before logging is configured.
    """
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        raw = _LossyFile(sys.stderr.fileno())
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
        )


class _LossyFile(io.RawIOBase):
    """A file descriptor whose write errors are counted instead of raised."""

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
        """Write ``data`` or drop it; returns the number of bytes consumed."""
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
