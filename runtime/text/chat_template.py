"""Renders a checkpoint's chat template in a helper process of its own.

A template is a program that came with a checkpoint. Jinja's sandbox keeps it from files and from Python's insides, but
not from running for ever or filling the memory, and neither a thread nor a trace hook can stop a single C call such as
``10 ** 10 ** 10``, which Jinja may even evaluate while it compiles. A process can be stopped: the helper limits its
own address space, and asks the kernel to kill it when the time for one rendering is over. It is started by the first
rendering, costs a pipe round trip after that, and ends when its stdin closes, so it never outlives the driver.

Both ends are here: :class:`ChatTemplate` in the driver, :func:`serve` in the helper. They exchange JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from runtime.common.errors import CheckpointError, RequestError

RENDER_SECONDS = 3.0
"""A rendering that takes longer is ended. Real templates take milliseconds."""

START_SECONDS = 30.0
"""How long the helper may take to start; it only has to import jinja2."""

MEMORY_BYTES = 1024 * 1024 * 1024
"""Address space of the helper."""

MAX_RENDERED_CHARS = 8 * 1024 * 1024
"""A longer text is refused: no model reads it."""

MAX_ERROR_CHARS = 2000
"""A template can raise an error of any length; so much of it is shown."""


class ChatTemplate:
    """One template and the helper that renders it. Safe to use from several threads, one rendering at a time.

    Args:
        source: the template's text.
        path: the file it came from, for messages.
        variables: what it may read besides the messages: the special tokens, by name.
        seconds: how long one rendering may take.
    """

    def __init__(
        self, source: str, path: Path, variables: Mapping[str, str], *, seconds: float = RENDER_SECONDS
    ) -> None:
        self._source = source
        self._path = path
        self._variables = dict(variables)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], ChatTemplate] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text that the model continues.

        Raises:
            RequestError: the messages are no JSON, the template refuses them, or rendering them takes too long or
                gives too much.
            CheckpointError: the template itself is broken or forbidden.
        """
        try:
            request = json.dumps({"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt})
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"chat messages have to be plain JSON values: {error}") from None
        with self._lock:
            started = time.monotonic()
            try:
                reply = _exchange(self._helper or self._start(), request, self._seconds + 2.0)
            except BaseException:
                self._stop()  # Ctrl-C while it renders: its reply must not be taken for that to the next request.
                raise
            if reply is None:
                returncode = self._stop()
                if returncode == -signal.SIGALRM or time.monotonic() - started > self._seconds:
                    raise RequestError(
                        f"the chat template in {self._path} took more than {self._seconds:g} s for these messages and "
                        "was stopped; use shorter messages, or another template if it does so for any"
                    )
                raise RequestError(f"the process that renders {self._path} ended with {returncode}; try again")
        kind, text = reply
        if kind == "ok":
            return text
        raise (CheckpointError if kind == "template" else RequestError)(f"chat template {self._path}: {text}")

    def close(self) -> None:
        """End the helper. May be called twice; a later :meth:`render` would start a new one."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        roots = [str(Path(__file__).resolve().parents[2]), *sys.path]
        program = f"import sys; sys.path[:] = {roots!r}; from runtime.text.chat_template import serve; serve()"
        helper = subprocess.Popen([sys.executable, "-I", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._helper = helper
        self._finalizer = weakref.finalize(self, _end, helper)
        set_up = json.dumps({"source": self._source, "variables": self._variables, "seconds": self._seconds})
        if _exchange(helper, set_up, START_SECONDS) is None:
            raise RequestError(f"the process that renders {self._path} ended with {self._stop()} before it was ready")
        return helper

    def _stop(self) -> int | None:
        helper, self._helper = self._helper, None
        if helper is None or self._finalizer is None:
            return None
        self._finalizer.detach()
        _end(helper)
        return helper.returncode


def _exchange(helper: subprocess.Popen[bytes], line: str, seconds: float) -> tuple[str, str] | None:
    """Send a line and read the reply: its kind and text. None if the helper died, or had to be killed, meanwhile."""
    if helper.stdin is None or helper.stdout is None:
        raise RequestError("the process that renders chat templates was started without pipes")
    # The helper ends itself in time; this is for one that cannot, because somebody has stopped it.
    watchdog = threading.Timer(seconds, helper.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        helper.stdin.write(line.encode() + b"\n")
        helper.stdin.flush()
        reply = helper.stdout.readline()
    except BrokenPipeError:
        reply = b""
    finally:
        watchdog.cancel()
    if not reply.endswith(b"\n"):
        return None
    kind, text = json.loads(reply)
    return kind, text


def _end(helper: subprocess.Popen[bytes]) -> None:
    """Close the helper's stdin, which ends it, and wait; a helper that does not listen is killed."""
    for pipe in (helper.stdin, helper.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        helper.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        helper.kill()
        helper.wait()


# ---- in the helper


def serve() -> None:
    """Read the template, then render it for each line of stdin until that closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the driver decides.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    set_up = json.loads(sys.stdin.buffer.readline())
    environment = _environment()
    _reply("ok", "")
    template: Any = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, set_up["seconds"])
        try:
            # Compiling can run for ever, too: constant expressions are evaluated then.
            template = template or environment.from_string(set_up["source"])
            kind, text = "ok", _render(template, {**set_up["variables"], **json.loads(line)})
        except (MemoryError, RecursionError, OverflowError) as error:
            kind, text = "request", f"it takes too much memory, depth or length ({type(error).__name__}: {error})"
        except Exception as error:  # noqa: BLE001 - whatever a template does wrong is told to the driver
            kind, text = _explain(error)
            text = text[:MAX_ERROR_CHARS]
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(kind, text)


def _reply(kind: str, text: str) -> None:
    try:
        sys.stdout.buffer.write(json.dumps([kind, text]).encode() + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)  # The driver is gone: nobody is left to tell, and flushing at exit would only fail again.


def _environment() -> Any:
    """The jinja2 environment that Hugging Face's templates are written for."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTag(Extension):
        """``{% generation %}`` marks what the assistant said, for training; here it only groups."""

        tags = {"generation"}  # noqa: RUF012 - the name and kind that jinja2 wants

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """A namespace without underscored names, which could reach into Python's insides."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            for name in dict(*args, **kwargs):
                PlainNamespace.check(name)
            super().__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            PlainNamespace.check(name)
            super().__setitem__(name, value)

        @staticmethod
        def check(name: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"namespace attribute {name!r} begins with an underscore")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    functions: dict[str, Any] = environment.globals
    functions["raise_exception"] = raise_exception
    functions["strftime_now"] = strftime_now
    functions["namespace"] = PlainNamespace
    return environment


def _render(template: Any, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    length = 0
    for piece in template.generate(documents=None, **variables):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_RENDERED_CHARS:
            raise OverflowError(f"more than {MAX_RENDERED_CHARS} characters")
    return "".join(pieces)


def _explain(error: Exception) -> tuple[str, str]:
    """Whose fault an error is, "template" or "request", and what to say about it."""
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return "template", f"line {error.lineno}: {error.message}"
    if isinstance(error, SecurityError):
        return "template", f"it tries something that is not allowed: {error}"
    if type(error) is TemplateError:
        return "request", f"it refuses these messages: {error}"
    return "request", f"it cannot render these messages: {type(error).__name__}: {error}"


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without keys whose value is None, which templates take for text.

    Raises:
        RequestError: there are none, or one is not an object.
    """
    if not messages:
        raise RequestError("a conversation has to have at least one message")
    for index, message in enumerate(cast("Sequence[Any]", messages)):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {index} is {message!r:.80}; a message is an object with role and content")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
