"""Log lines: their source, their stream, and their format on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from runtime.common.errors import ConfigError
from runtime.common.log import LOGGER_NAME, configure_logging


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger(LOGGER_NAME)
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    logger.handlers[:] = []
    yield logger
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_name_time_level_and_rank(logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("info", rank=3, stream=stream)
    logger.info("loaded %d", 5)
    logger.debug("hidden")
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO rank 3: loaded 5\n", stream.getvalue())


def test_the_second_call_replaces_the_first_and_leaves_others_alone(logger: logging.Logger) -> None:
    first, second = io.StringIO(), io.StringIO()
    others = logging.NullHandler()
    logger.addHandler(others)
    configure_logging("INFO", stream=first)
    configure_logging("DEBUG", stream=second)
    logger.debug("once")
    assert (first.getvalue(), second.getvalue().count("once")) == ("", 1)
    assert others in logger.handlers


def test_stdout_stays_clean(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO")
    logger.warning("careful")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith("WARNING lockstep: careful\n")


def test_only_terminals_get_colours(logger: logging.Logger) -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        configure_logging("INFO", stream=stream)
        logger.error("bad")
        logger.info("good")
    assert terminal.getvalue().count("\x1b[0m") == 1 and "\x1b" not in file.getvalue()


def test_unknown_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'LOUD'; allowed: DEBUG, INFO"):
        configure_logging("LOUD")
