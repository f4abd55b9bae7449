"""``lockstep chat``: a conversation in the terminal, answered as the words come.

Lines are read from a terminal, with editing, or from a pipe, one message a line. How a conversation becomes a prompt
is the checkpoint's chat template; how it is answered is the engine's. Nothing is kept beyond the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from launch.cli.args import Parser, Settings, add_engine_flags, add_model, add_sampling_flags, read_settings, suggest
from launch.cli.output import write_text
from runtime.common.errors import InputError, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from runtime.common.sampling_params import SamplingParams
    from runtime.engine.request import RequestOutput

CHAT_MAX_TOKENS = 1024
"""``--max-tokens`` unless told otherwise: an answer should end by itself."""

PROMPT = "> "

HELP = """\
  /reset          forget the conversation; the system message stays
  /system [TEXT]  say how the model should behave; without TEXT: show what was said
  /exit           end, as Ctrl-D does
  /help           this
Ctrl-C stops an answer; what there is of it stays in the conversation. To send a text that begins with /, put a space
before it."""


class Answerer(Protocol):
    """What answers: ``launch.llm.AsyncLLM``."""

    @property
    def engine(self) -> Any:
        """Its ``failure`` is the error that ended it, None while it is well."""

    def chat(self, messages: Any, params: SamplingParams) -> AsyncGenerator[RequestOutput]:
        """The answer as it grows."""
        ...


def build_parser() -> Parser:
    """The arguments of ``chat``."""
    parser = Parser(
        "lockstep chat",
        "MODEL [--system TEXT] [flags]",
        "Talk with MODEL in the terminal. Answers go to stdout, everything else to stderr; /help tells the commands.",
        "From a pipe every line is a message: printf 'Hi\\nTell me more\\n' | lockstep chat demo",
    )
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message: how the model should behave")
    add_sampling_flags(parser, max_tokens=CHAT_MAX_TOKENS)
    add_engine_flags(parser)
    return parser


def check(argv: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """The arguments in ``argv``, found good without starting anything. Raises :class:`InputError` if they are not."""
    parser = build_parser()
    arguments = parser.parse(argv)
    settings = read_settings(arguments, parser, max_tokens=CHAT_MAX_TOKENS)
    if settings.sampling.n != 1:
        parser.error(f"-n {settings.sampling.n}: a conversation goes on from one answer; leave -n out")
    return arguments, settings


def run(argv: Sequence[str]) -> int:
    """Talk until the input ends; 1 if a message could not be answered. Raises :class:`LockstepError`."""
    arguments, settings = check(argv)

    from launch.llm import AsyncLLM

    with AsyncLLM(settings.model, **settings.engine) as llm:
        if not llm.tokenizer.has_chat_template:
            raise RequestError(
                f"{settings.model} has no chat template, so it cannot hold a conversation; use lockstep generate"
            )
        return Conversation(llm, settings.sampling, arguments.system).hold()


class Conversation:
    """One conversation: what was said, and who answers.

    Args:
        llm: answers.
        params: of every answer.
        system: the system message, if there is one.

    Attributes:
        messages: what was said, without the system message.
    """

    def __init__(self, llm: Answerer, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params, self._system = llm, params, system
        self.messages: list[dict[str, str]] = []
        self._answer = ""
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._failed = False

    def hold(self) -> int:
        """Read, answer, until the input ends; 1 if a message could not be answered, else 0."""
        if self._interactive:
            _say("Ctrl-C stops an answer, Ctrl-D ends, /help tells the commands.")
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # Gives input() a line that can be edited.
        with asyncio.Runner() as runner:
            while True:
                try:
                    line = self._read()
                    if line is None or not self._turn(line, runner):
                        return 1 if self._failed else 0
                except KeyboardInterrupt:
                    if not self._interactive:
                        raise
                    _say("\nCtrl-D or /exit ends.")

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        try:
            if not self._interactive:
                line = sys.stdin.readline()
                return line.rstrip("\r\n") if line else None
            return input(PROMPT)
        except EOFError:
            write_text("\n")
            return None
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 (byte {error.start}); convert it to UTF-8") from None

    def _turn(self, line: str, runner: asyncio.Runner) -> bool:
        """Do what a line says; False: to end."""
        if line.startswith("/"):
            return self._command(line)
        if line.strip():
            self._say_and_answer(line.strip(), runner)
        return True

    def _command(self, line: str) -> bool:
        name, _, text = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            _say(HELP)
        elif name == "/reset":
            self.messages.clear()
            _say("(the conversation begins anew)")
        elif name == "/system":
            self._system = text.strip() or self._system
            _say(f"(system message: {self._system or 'none'})")
        else:
            _say(f"no command {name}{suggest(name, ('/help', '/reset', '/system', '/exit'))} (/help tells them all)")
        return True

    def _say_and_answer(self, text: str, runner: asyncio.Runner) -> None:
        """Send a message and print its answer. A message that got none is forgotten."""
        self._answer = ""
        answered = False
        self.messages.append({"role": "user", "content": text})
        try:
            # A first Ctrl-C cancels what the runner runs, which aborts the request; run() then raises it.
            last = runner.run(self._stream())
            answered = last is not None and last.finish_reason != "error"
            if last is not None and last.finish_reason == "error":
                self._failed = True
                if self._llm.engine.failure is not None:
                    raise self._llm.engine.failure
                _say(f"lockstep chat: this answer failed: {last.error}")
            elif last is not None and last.finish_reason == "length":
                _say("(cut: the answer reached --max-tokens, or the conversation --max-model-len)")
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            _say("(stopped)")
        except InputError as error:
            self._failed = True
            _say(f"lockstep chat: {error}{'; /reset begins anew' if len(self.messages) > 1 else ''}")
        finally:
            if answered or self._answer:
                self.messages.append({"role": "assistant", "content": self._answer})
            else:
                self.messages.pop()

    async def _stream(self) -> RequestOutput | None:
        """Print the answer as it comes and end its line; gives the last output."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        last: RequestOutput | None = None
        try:
            async with contextlib.aclosing(self._llm.chat([*system, *self.messages], self._params)) as outputs:
                async for last in outputs:
                    # Kept before it is written: a Ctrl-C may come in between.
                    self._answer += last.outputs[0].new_text
                    write_text(last.outputs[0].new_text)
        finally:
            if self._answer or last is not None:
                write_text("\n")
        return last


def _say(text: str) -> None:
    """A line for the person, not for the answers' reader."""
    print(text, file=sys.stderr, flush=True)
