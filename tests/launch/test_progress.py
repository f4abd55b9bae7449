"""Progress on a terminal and elsewhere; the clock is the test's."""

from __future__ import annotations

import io
import time

import pytest

from launch.progress import Progress, Throughput


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time.monotonic() says: the last element."""
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
        assert stream.getvalue().endswith(" 50 %")
    assert stream.getvalue().rpartition("\x1b[K")[2] == "  weights          1.00 s\n"


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
    assert " 25 %  6.2 tokens/s" in terminal.getvalue()


def test_a_rate_needs_time(clock: list[float]) -> None:
    assert Throughput().add(5) == ""
