"""What a person sees while something takes long: a line per stage with its time, and bars on a terminal.

Everything goes to stderr: stdout carries results only. Not a terminal: plain lines, none more often than every few
seconds. Nothing here needs an end: no thread draws and no terminal mode is set, so a failure at any point leaves a
usable terminal. Logging is ``runtime/common/log.py``; nothing here decides how long anything may take.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

TERMINAL_INTERVAL_S = 0.1
PLAIN_INTERVAL_S = 5.0
"""Seconds between two drawings of a bar: on a terminal, and as plain lines."""

_BAR_WIDTH = 40
_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Stages and bars of one command.

    Args:
        stream: where to write; stderr by default.
        enabled: False writes nothing at all, so callers need no ``if``.
    """

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled
        self._console = _terminal(self._stream) if enabled else None

    def say(self, text: str) -> None:
        """One line."""
        self._clear()
        self._write(f"{text}\n")

    def stage_started(self, name: str) -> None:
        """A stage begins; only a terminal shows this."""
        if self._console:
            self._write(f"{_CLEAR_LINE}  {name} ...")

    def stage_done(self, name: str, seconds: float, detail: str = "") -> None:
        """A stage is over after ``seconds``: its one lasting line."""
        self.say(f"  {name:<12} {seconds:8.2f} s  {detail}".rstrip())

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Generator[None]:
        """Time what happens inside and report it as a stage; nothing is reported if it raises."""
        begun = time.monotonic()
        self.stage_started(name)
        try:
            yield
        except BaseException:
            self._clear()
            raise
        self.stage_done(name, time.monotonic() - begun, detail)

    @contextmanager
    def bar(self, name: str, total: int) -> Generator[Bar]:
        """A bar from 0 to ``total`` (bytes, pieces, prompts), gone from a terminal when the block ends."""
        try:
            interval = TERMINAL_INTERVAL_S if self._console else PLAIN_INTERVAL_S
            yield Bar(lambda done, text: self._draw(name, done, total, text), interval)
        finally:
            self._clear()

    def _draw(self, name: str, done: int, total: int, text: str) -> None:
        percent = 100 * done // total if total else 100
        if not self._console:
            self.say(f"  {name:<12} {percent:3d} %  ({done} of {total}){', ' if text else ''}{text}")
            return
        from rich.progress_bar import ProgressBar

        self._write(f"{_CLEAR_LINE}  {name:<12} ")
        self._console.print(ProgressBar(total=max(total, 1), completed=done, width=_BAR_WIDTH), end="")
        self._write(f" {percent:3d} %{'  ' if text else ''}{text}")

    def _clear(self) -> None:
        """Remove an unfinished stage or bar from a terminal, before something else is written."""
        if self._console:
            self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        if self._enabled:
            # In a program of the user's, stderr is theirs: a bar that cannot be drawn must not end their work.
            with suppress(OSError):
                self._stream.write(text)
                self._stream.flush()


class Bar:
    """How far one thing has come, counted in whatever its total counts. Made by :meth:`Progress.bar`."""

    def __init__(self, draw: Callable[[int, str], None], interval: float) -> None:
        self._draw, self._interval = draw, interval
        self._done = 0
        self._text = ""
        self._drawn = time.monotonic()

    def update(self, done: int, *, text: str | None = None) -> None:
        """So much is done now. Cheap to call often: it draws only every ``interval`` seconds.

        Args:
            done: of the total.
            text: shown beside the bar from now on, such as a rate; None leaves what was there.
        """
        self._done = done
        self._text = self._text if text is None else text
        now = time.monotonic()
        if now - self._drawn >= self._interval:
            self._drawn = now
            self._draw(done, self._text)

    def advance(self, count: int = 1, *, text: str | None = None) -> None:
        """``count`` more are done; 0 only gives the bar a chance to show its text."""
        self.update(self._done + count, text=text)


class Throughput:
    """Tokens per second since it was made, as words for a bar."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._tokens = 0

    def add(self, tokens: int) -> str:
        """So many more tokens were made; gives the rate so far, all requests together."""
        self._tokens += tokens
        seconds = time.monotonic() - self._begun
        return f"{self._tokens / seconds:.1f} tokens/s" if seconds > 0 else ""


def _terminal(stream: TextIO) -> Console | None:
    """A console on ``stream`` if it is a terminal that can clear a line. rich takes 0.1 s to import, so only then."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return None if console.is_dumb_terminal else console
