"""``lockstep chat``: who is asked what, what is printed where, what Ctrl-C and Ctrl-D do.

The model is a stand-in, but for the last test.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from launch.cli import main as cli
from runtime.common.errors import RankDiedError, RequestError
from runtime.common.sampling_params import SamplingParams
from runtime.engine.request import CompletionOutput, RequestOutput, RequestTimes, SequenceOutput
from tests.checkpoints import tiny_checkpoint

ROOT = Path(__file__).parents[4]


def output(generated: SequenceOutput, text: str, finish_reason: str | None, error: str = "") -> RequestOutput:
    old = len(generated.texts)
    generated.add_text(text)
    sample = CompletionOutput(0, generated, 0, len(generated.texts), finish_reason, error, old_texts=old)
    return RequestOutput(0, (1,), (sample,), finish_reason is not None, RequestTimes(0.0))


class FakeAsyncLLM:
    """Stands in for launch.llm.AsyncLLM: repeats the last message in capitals, a word at a time."""

    made: list[FakeAsyncLLM]

    def __init__(self, model: str, **engine: Any) -> None:
        self.model, self.settings, self.closed = model, engine, False
        self.tokenizer = types.SimpleNamespace(has_chat_template=model != "no-template")
        self.engine = types.SimpleNamespace(failure=None)
        self.asked: list[list[tuple[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.aborted = 0
        type(self).made.append(self)

    async def chat(self, messages: list[dict[str, str]], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        self.params.append(params)
        words = messages[-1]["content"].upper().split(" ")
        if words == ["TOO", "LONG"]:
            raise RequestError("a prompt of 300 tokens leaves no room")
        generated, ended = SequenceOutput(), False
        try:
            for number, word in enumerate(words):
                if word == "^C":
                    signal.raise_signal(signal.SIGINT)
                    await asyncio.Event().wait()
                if word in ("NAN", "DEAD"):
                    self.engine.failure = RankDiedError(rank=1, returncode=-9) if word == "DEAD" else None
                    ended = True
                    yield output(generated, "", "error", "not finite")
                    return
                await asyncio.sleep(0)
                ended = number == len(words) - 1
                reason = ("length" if word == "CUT" else "stop") if ended else None
                yield output(generated, word if number == 0 else f" {word}", reason)
        finally:
            self.aborted += not ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeAsyncLLM]:
    module = types.ModuleType("launch.llm")
    fake = type("FakeAsyncLLM", (FakeAsyncLLM,), {"made": []})
    module.AsyncLLM = fake
    monkeypatch.setitem(sys.modules, "launch.llm", module)
    return fake


Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Run ``lockstep chat`` with lines from a pipe: (exit code, stdout, stderr)."""

    def run(text: str | bytes, *argv: str) -> tuple[int, str, str]:
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code = cli.main(["chat", *(argv or ("demo",))])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """The same on a terminal: each line is what a person types, or the exception that pressing a key raises."""

    def run(*lines: str | BaseException) -> tuple[int, str, str]:
        left: Iterator[str | BaseException] = iter(lines)

        def read(prompt: str) -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        code = cli.main(["chat", "demo"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_every_piped_line_is_a_message_and_the_conversation_grows(llm: type[FakeAsyncLLM], piped: Chat) -> None:
    assert piped("hi there\n\nand you?\r\n") == (0, "HI THERE\nAND YOU?\n", "")
    assert llm.made[0].asked == [
        [("user", "hi there")],
        [("user", "hi there"), ("assistant", "HI THERE"), ("user", "and you?")],
    ]
    assert (llm.made[0].aborted, llm.made[0].closed) == (0, True)


def test_flags_reach_engine_and_answers(llm: type[FakeAsyncLLM], piped: Chat) -> None:
    piped("hi", "demo", "-tp", "2", "--temperature", "0", "--seed", "3", "--system", "be brief")
    made = llm.made[0]
    assert (made.model, made.settings) == ("demo", {"tensor_parallel_size": 2, "seed": 3})
    assert made.params == [SamplingParams(max_tokens=1024, temperature=0.0, seed=3)]
    assert made.asked == [[("system", "be brief"), ("user", "hi")]]


def test_commands(llm: type[FakeAsyncLLM], piped: Chat) -> None:
    lines = ["/system be kind", "one", "/reset", "two", "/system", "/hlp", "/help", " /no command", "/exit", "unread"]
    code, out, err = piped("\n".join(lines))
    assert (code, out) == (0, "ONE\nTWO\n/NO COMMAND\n")
    system = ("system", "be kind")
    assert llm.made[0].asked == [
        [system, ("user", "one")],
        [system, ("user", "two")],
        [system, ("user", "two"), ("assistant", "TWO"), ("user", "/no command")],
    ]
    assert "(system message: be kind)" in err
    assert "no command /hlp; did you mean /help?" in err
    assert "Ctrl-C stops an answer" in err


def test_what_cannot_be_answered_is_told_and_forgotten(llm: type[FakeAsyncLLM], piped: Chat) -> None:
    code, out, err = piped("one\ntoo long\nnan\ntwo\n")
    assert (code, out) == (1, "ONE\n\nTWO\n")
    assert llm.made[0].asked[-1] == [("user", "one"), ("assistant", "ONE"), ("user", "two")]
    assert "a prompt of 300 tokens leaves no room; /reset begins anew\n" in err
    assert "this answer failed: not finite" in err


def test_a_dead_engine_ends_the_conversation_with_its_code(llm: type[FakeAsyncLLM], piped: Chat) -> None:
    code, _, err = piped("dead\nmore\n")
    assert code == 137
    assert "rank 1 on localhost failed: killed by signal 9 (SIGKILL)" in err
    assert (len(llm.made[0].asked), llm.made[0].closed) == (1, True)


def test_a_cut_answer_says_so(llm: type[FakeAsyncLLM], piped: Chat) -> None:
    assert "(cut: the answer reached --max-tokens" in piped("cut")[2]


def test_ctrl_c_stops_the_answer_and_not_the_conversation(llm: type[FakeAsyncLLM], typed: Chat) -> None:
    code, out, err = typed("so far ^c never", "go on")
    assert (code, out) == (0, "SO FAR\nGO ON\n\n")
    assert llm.made[0].aborted == 1
    assert llm.made[0].asked[1] == [("user", "so far ^c never"), ("assistant", "SO FAR"), ("user", "go on")]
    assert "(stopped)" in err


def test_ctrl_c_at_the_prompt_is_explained(llm: type[FakeAsyncLLM], typed: Chat) -> None:
    code, out, err = typed(KeyboardInterrupt(), "hi")
    assert (code, out) == (0, "HI\n\n")
    assert "Ctrl-D or /exit ends." in err


def test_ctrl_c_ends_a_piped_conversation(llm: type[FakeAsyncLLM], piped: Chat) -> None:
    code, out, err = piped("so far ^c never\nunread\n")
    assert (code, out, err) == (130, "SO FAR\n", "lockstep chat: interrupted\n")
    assert (llm.made[0].aborted, llm.made[0].closed) == (1, True)


def test_sigterm_ends_it_from_within_an_answer(
    llm: type[FakeAsyncLLM], piped: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def chat(self: FakeAsyncLLM, *_: Any) -> AsyncIterator[RequestOutput]:
        signal.raise_signal(signal.SIGTERM)
        yield output(SequenceOutput(), "never", "stop")

    monkeypatch.setattr(llm, "chat", chat)
    assert piped("hi") == (143, "", "lockstep chat: terminated\n")
    assert llm.made[0].closed


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("", ["demo", "-n", "2"], "-n 2: a conversation goes on from one answer"),
        ("", ["no-template"], "no-template has no chat template"),
        ("", [], "MODEL is missing"),
        (b"\xff\n", ["demo"], "standard input is not UTF-8"),
    ],
)
def test_wrong_use_is_one_line(
    llm: type[FakeAsyncLLM], piped: Chat, text: str | bytes, argv: list[str], message: str
) -> None:
    code, out, err = piped(text, *(argv or ["--max-tokens", "3"]))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


class Keyboard:
    """A program on a terminal of its own, and who sits before it."""

    def __init__(self, argv: list[str], **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.program = subprocess.Popen(
            argv,
            cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "dumb", **environment},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._seen = b""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, what: str, more: int = 0) -> None:
        """Read on until ``what`` and so many bytes after it were shown."""
        deadline = time.monotonic() + 60
        while True:
            _, found, after = self._seen.partition(what.encode())
            if found and len(after) >= more:
                self._seen = after
                return
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._master], [], [], left)[0], f"no {what!r} in {self._seen!r}"
            self._seen += os.read(self._master, 65536)

    def close(self) -> None:
        os.close(self._master)
        self.program.kill()
        self.program.wait()


@pytest.mark.slow
def test_a_conversation_with_a_real_model_on_a_real_terminal() -> None:
    flags = ["--enforce-eager", "--ignore-eos", "--max-tokens", "200"]
    argv = [sys.executable, "-m", "launch.cli.main", "chat", str(tiny_checkpoint()), *flags]
    keyboard = Keyboard(argv, LOCKSTEP_FAULT="rank=0,kind=slow:0.1")
    try:
        keyboard.read_until("/help tells the commands.")
        keyboard.read_until("> ")
        keyboard.type("hi\n")
        keyboard.read_until("hi\r\n", more=1)  # The answer has begun, and would go on for 20 seconds.
        keyboard.type("\x03")  # The terminal tells every process: those of the ranks too.
        keyboard.read_until("(stopped)")
        keyboard.read_until("> ")
        keyboard.type("again\n")
        keyboard.read_until("again\r\n", more=1)
        keyboard.type("\x03")
        keyboard.read_until("(stopped)")
        keyboard.read_until("> ")
        keyboard.type("\x04")
        assert keyboard.program.wait(30) == 0
    finally:
        keyboard.close()
