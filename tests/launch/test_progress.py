"""Stages and bars on a terminal and elsewhere; the tests set the clock."""

from __future__ import annotations

import contextlib
import io
import time

import pytest

from launch.progress import Progress, StageProgress, Throughput


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def last_line(stream: io.StringIO) -> str:
    """What follows the last erased line."""
    return stream.getvalue().rpartition("\x1b[2K")[2]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """time.monotonic() returns the last element."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    return now


def test_plain_lines(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.say("hello")
    with progress.stage("weights", "269 MB"), progress.bar("weights", 200) as bar:
        for done in (50, 100):
            clock.append(clock[-1] + 3)
            bar.update(done)
        bar.advance(50)
    progress.stage_done("ready", 0.5)
    assert stream.getvalue().splitlines() == [
        "hello",
        "  weights       50 %  (100 of 200)",
        "  weights          6.00 s  269 MB",
        "  ready            0.50 s",
    ]


def test_a_terminal_ends_with_lasting_lines_only(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(stream)
    with progress.stage("weights"), progress.bar("weights", 200) as bar:
        clock.append(clock[-1] + 1)
        bar.update(100)
        assert last_line(stream).rstrip().endswith(" 50 %")
    assert last_line(stream) == "  weights          1.00 s\n"
    assert "\x1b[?25" not in stream.getvalue(), "the cursor stays as it is"


def test_a_failed_stage_is_not_reported(clock: list[float]) -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match="no"), Progress(stream).stage("weights"):
        raise ValueError("no")
    assert stream.getvalue() == ""


def test_disabled_writes_nothing(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(stream, enabled=False)
    progress.say("hello")
    with progress.stage("weights"), progress.bar("weights", 2) as bar:
        clock.append(clock[-1] + 60)
        bar.advance()
    assert stream.getvalue() == ""


def test_a_bar_shows_the_rate_beside_it(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        with Progress(stream).bar("prompts", 4) as bar:
            throughput = Throughput()
            clock.append(clock[-1] + 10)
            bar.advance(0, text=throughput.add(25))
            clock.append(clock[-1] + 10)
            bar.advance(text=throughput.add(100))
            clock.append(clock[-1] + 10)
            bar.advance()
    assert plain.getvalue().splitlines() == [
        "  prompts        0 %  (0 of 4), 2.5 tokens/s",
        "  prompts       25 %  (1 of 4), 6.2 tokens/s",
        "  prompts       50 %  (2 of 4), 6.2 tokens/s",
    ]
    assert " 25 % 6.2 tokens/s" in terminal.getvalue()


def test_a_rate_needs_time(clock: list[float]) -> None:
    assert Throughput().add(5) == ""


def test_start_up_stages_show_a_bar_once_they_count(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(stream)
    stages = StageProgress(progress)
    stages.started("weights")
    assert last_line(stream).startswith("  weights ...")
    for done in (1, 2):
        clock.append(clock[-1] + 1)
        stages.advanced("weights", done, 4)
    assert last_line(stream).rstrip().endswith(" 50 %")
    stages.finished("weights", 2.0, "")
    assert last_line(stream) == "  weights          2.00 s\n"


def test_a_failed_stage_leaves_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(stream)
    StageProgress(progress).started("weights")
    progress.clear()
    assert last_line(stream) == ""


def test_a_dumb_terminal_gets_plain_lines(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress(stream).bar("prompts", 4) as bar:
        clock.append(clock[-1] + 10)
        bar.advance()
    assert stream.getvalue() == "  prompts       25 %  (1 of 4)\n"


def test_an_unwritable_stderr_fails_nothing(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for terminal in (False, True):
        with open("/dev/full", "w") as stream:
            monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal, raising=False)
            progress = Progress(stream)
            with progress.stage("weights"), progress.bar("weights", 2) as bar:
                clock.append(clock[-1] + 10)
                bar.advance()
            with contextlib.suppress(OSError):
                stream.close()
