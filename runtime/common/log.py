"""The one logger, "lockstep", and how its lines look. Lines go to stderr only: stdout belongs to results.

The level is an argument, because the environment is read in ``launch/`` only. Modules take their logger with
``logging.getLogger("lockstep")``; progress bars are ``launch/progress.py``'s.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from runtime.common.errors import ConfigError

LOGGER_NAME = "lockstep"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}
RESET = "\x1b[0m"


def configure_logging(level: str = "INFO", *, rank: int | None = None, stream: TextIO | None = None) -> logging.Logger:
    """Give the logger its level and its one handler; a second call replaces the first.

    Args:
        level: one of :data:`LEVELS`, in any case.
        rank: a worker's rank, which its lines then begin with; None in the driver.
        stream: where lines go; default: stderr, as it is at this moment.

    Raises:
        ConfigError: no such level.
    """
    if level.upper() not in LEVELS:
        raise ConfigError(f"log level is {level!r}; allowed: {', '.join(LEVELS)} (LOCKSTEP_LOG_LEVEL sets it)")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_LineFormatter(rank, colored=handler.stream.isatty()))
    logger = logging.getLogger(LOGGER_NAME)
    for previous in list(logger.handlers):
        if isinstance(previous.formatter, _LineFormatter):  # Handlers that others have attached stay.
            logger.removeHandler(previous)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


class _LineFormatter(logging.Formatter):
    """``12:34:56 WARNING rank 1: text``; warnings and errors are coloured on a terminal."""

    def __init__(self, rank: int | None, *, colored: bool) -> None:
        who = LOGGER_NAME if rank is None else f"rank {rank}"
        super().__init__(f"%(asctime)s %(levelname)s {who}: %(message)s", datefmt="%H:%M:%S")
        self._colored = colored

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        color = COLORS.get(record.levelno, "") if self._colored else ""
        return f"{color}{line}{RESET}" if color else line
