"""Logging: the level, handler and line format of the logger "lockstep". Lines go to stderr; stdout carries results.

Modules get the logger by ``logging.getLogger("lockstep")``. Progress bars are in ``launch/progress.py``.
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
    """Set the level and the handler of the logger. Another call replaces both; handlers of other origin stay.

    Args:
        level: one of :data:`LEVELS`, in any case.
        rank: shown in every line of a rank's process; None in the driver.
        stream: receives the lines; default: the current ``sys.stderr``.

    Raises:
        ConfigError: an unknown level.
    """
    if level.upper() not in LEVELS:
        raise ConfigError(f"log level is {level!r}; allowed: {', '.join(LEVELS)} (LOCKSTEP_LOG_LEVEL sets it)")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_LineFormatter(rank, colored=handler.stream.isatty()))
    logger = logging.getLogger(LOGGER_NAME)
    for previous in list(logger.handlers):
        if isinstance(previous.formatter, _LineFormatter):
            logger.removeHandler(previous)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


class _LineFormatter(logging.Formatter):
    """Formats ``12:34:56 WARNING rank 1: text``; warnings and errors are coloured on a terminal."""

    def __init__(self, rank: int | None, *, colored: bool) -> None:
        source = LOGGER_NAME if rank is None else f"rank {rank}"
        super().__init__(f"%(asctime)s %(levelname)s {source}: %(message)s", datefmt="%H:%M:%S")
        self._colored = colored

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        color = COLORS.get(record.levelno, "") if self._colored else ""
        return f"{color}{line}{RESET}" if color else line
