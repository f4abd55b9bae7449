"""Progress on stderr, drawn by rich: one line per stage with its duration, and progress bars on a terminal.

Without a terminal, bars are plain lines at intervals of seconds. rich runs no thread here and changes no terminal mode,
so an exception at any point leaves a usable terminal. Results go to stdout (``launch/cli/output.py``), log lines
through ``runtime/common/log.py``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich import progress as rich_progress
    from rich.console import Console

TERMINAL_INTERVAL_S = 0.1
PLAIN_INTERVAL_S = 5.0
"""Seconds between two updates of a bar: on a terminal, and as plain lines."""

_BAR_WIDTH = 40


class Progress:
    """Stages and bars of one command.

    Args:
        stream: default: stderr.
        enabled: False writes nothing.
    """

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self._console = _make_console(sys.stderr if stream is None else stream) if enabled else None
        self._terminal = self._console is not None and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: rich_progress.Progress | None = None

    def say(self, text: str) -> None:
        """Write one line."""
        self.clear()
        self._print(text)

    def stage_started(self, name: str) -> None:
        """Show the running stage; only on a terminal."""
        if self._terminal:
            self._show(f"  {name} ...")

    def stage_done(self, name: str, seconds: float, detail: str = "") -> None:
        """Write the line of a finished stage with its duration in seconds."""
        self.say(f"  {name:<12} {seconds:8.2f} s  {detail}".rstrip())

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Generator[None]:
        """Measure the block and write its line; an exception writes none."""
        started = time.monotonic()
        self.stage_started(name)
        try:
            yield
        except BaseException:
            self.clear()
            raise
        self.stage_done(name, time.monotonic() - started, detail)

    @contextmanager
    def bar(self, name: str, total: int) -> Generator[Bar]:
        """A bar from 0 to ``total`` (bytes, subgraphs, prompts), removed from the terminal at the end of the block."""
        try:
            interval = TERMINAL_INTERVAL_S if self._terminal else PLAIN_INTERVAL_S
            yield Bar(lambda done, text: self._draw(name, done, total, text), interval)
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove an unfinished stage or bar from the terminal."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    def _draw(self, name: str, done: int, total: int, text: str) -> None:
        if self._terminal:
            self._show(f"  {name:<12}", done, max(total, 1), text)
            return
        percent = 100 * done // total if total else 100
        self._print(f"  {name:<12} {percent:3d} %  ({done} of {total}){', ' if text else ''}{text}")

    def _show(self, description: str, done: int = 0, total: int = 0, text: str = "") -> None:
        """Show a live line, or update it: a description, and with a ``total`` a bar and a text."""
        from rich import progress as rich_progress

        live = self._live
        with suppress(OSError):
            if live is not None and live.tasks[0].description == description:
                live.update(live.tasks[0].id, completed=done, text=text, refresh=True)
                return
            self.clear()
            columns: list[Any] = [rich_progress.TextColumn("{task.description}", markup=False)]
            if total:
                columns += [rich_progress.BarColumn(_BAR_WIDTH), rich_progress.TextColumn("{task.percentage:3.0f} %")]
                columns += [rich_progress.TextColumn("{task.fields[text]}", markup=False)]
            self._live = live = rich_progress.Progress(
                *columns, console=self._console, auto_refresh=False, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            live.add_task(description, total=total or None, completed=done, text=text)
            live.start()

    def _print(self, text: str) -> None:
        if self._console is not None:
            # stderr belongs to the program that uses LLM: a progress line that cannot be written must not fail it.
            with suppress(OSError):
                self._console.print(text)


class Bar:
    """Completed units of a known total. Made by :meth:`Progress.bar`."""

    def __init__(self, draw: Callable[[int, str], None], interval: float) -> None:
        self._draw, self._interval = draw, interval
        self._done = 0
        self._text = ""
        self._drawn = time.monotonic()

    def update(self, done: int, *, text: str | None = None) -> None:
        """Set the completed units. Cheap to call often: the bar is drawn every ``interval`` seconds at most.

        Args:
            done: of the total.
            text: shown beside the bar from now on, such as a rate; None keeps the last text.
        """
        self._done = done
        self._text = self._text if text is None else text
        now = time.monotonic()
        if now - self._drawn >= self._interval:
            self._drawn = now
            self._draw(done, self._text)

    def advance(self, count: int = 1, *, text: str | None = None) -> None:
        """Add ``count`` completed units; 0 only updates the text."""
        self.update(self._done + count, text=text)


class Throughput:
    """Tokens per second since construction, formatted for a bar."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._tokens = 0

    def add(self, tokens: int) -> str:
        """Count generated tokens and return the rate so far."""
        self._tokens += tokens
        seconds = time.monotonic() - self._started
        return f"{self._tokens / seconds:.1f} tokens/s" if seconds > 0 else ""


class StageProgress:
    """Start-up stages as lines and bars; implements the supervisor's progress interface."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars = contextlib.ExitStack()
        self._bar: Bar | None = None

    def started(self, stage: str) -> None:
        """On a terminal, show the running stage."""
        self._progress.stage_started(stage)

    def advanced(self, stage: str, done: int, total: int) -> None:
        """Update the stage's bar, which is created on the first update."""
        if self._bar is None:
            self._bar = self._bars.enter_context(self._progress.bar(stage, total))
        self._bar.update(done)

    def finished(self, stage: str, seconds: float, detail: str) -> None:
        """Write the stage's line with its duration."""
        self._bars.close()
        self._bar = None
        self._progress.stage_done(stage, seconds, detail)


def _make_console(stream: TextIO) -> Console:
    """A console that writes text as it is. Imported here because rich takes 0.1 s and ``--help`` does without."""
    from rich.console import Console

    class VisibleCursor(Console):
        """Leaves the cursor visible, so that a killed process leaves it visible too."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    return VisibleCursor(
        file=stream, force_terminal=stream.isatty(), highlight=False, markup=False, emoji=False, soft_wrap=True
    )
