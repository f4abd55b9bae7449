"""Chat templates of checkpoints, rendered in a helper process.

A template is an untrusted program. Jinja's sandbox denies it files and Python's internals, but bounds neither its time
nor its memory, and neither a thread nor a trace hook can interrupt a single C call such as ``10 ** 10 ** 10``, which
Jinja may evaluate while it compiles. The helper process limits its address space and sets a timer whose signal kills it
at the deadline of a rendering. The first rendering starts it, later ones cost a pipe round trip, and it ends when its
stdin closes, so it does not outlive the driver.

Both ends are here: :class:`ChatTemplate` in the driver, :func:`serve` in the helper. They exchange JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import os
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
from runtime.text.helper_process import helper_command, limit_process

RENDER_SECONDS = 3.0
"""Deadline of one rendering. Templates of published models take milliseconds."""

START_SECONDS = 30.0
"""Deadline for the helper to start, which imports jinja2."""

MEMORY_BYTES = 1024 * 1024 * 1024
"""Limit of the helper's address space."""

MAX_RENDERED_CHARS = 8 * 1024 * 1024
"""Limit of a rendered prompt."""

MAX_ERROR_CHARS = 2000
"""Limit of an error message of a template."""


class ChatTemplate:
    """A chat template and the helper process that renders it. Thread-safe; renderings are serialized.

    Args:
        source: the template's text.
        path: the template's file, for messages.
        variables: variables of the template besides the messages: the special tokens, by name.
        seconds: deadline of one rendering.
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
        """Render messages into a prompt.

        Raises:
            RequestError: the messages are not JSON, the template refuses them, or rendering exceeds its time or size.
            CheckpointError: the template has a syntax error or violates the sandbox.
        """
        try:
            request = json.dumps({"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt})
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"chat messages have to be plain JSON values: {error}", param="messages") from None
        with self._lock:
            started = time.monotonic()
            try:
                reply = _exchange(self._helper or self._start(), request, self._seconds + 2.0)
            except BaseException:
                self._stop()  # E.g. Ctrl-C: a late reply must not be read as that of the next request.
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
        """End the helper. Idempotent; a later :meth:`render` starts another one."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        command = helper_command("runtime.text.chat_template", "serve")
        helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
    """Send a line and read the reply: its kind and text. None if the helper died or was killed."""
    if helper.stdin is None or helper.stdout is None:
        raise RequestError("the process that renders chat templates was started without pipes")
    # The helper's own timer ends it earlier, unless the process was stopped by a signal.
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
    """Close the helper's stdin, which ends it, and wait; kill a helper that does not end."""
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
    """Read the template, then render it for each line of stdin until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the driver ends the helper.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    limit_process(memory_bytes=MEMORY_BYTES)
    set_up = json.loads(sys.stdin.buffer.readline())
    environment = _environment()
    _reply("ok", "")
    template: Any = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, set_up["seconds"])
        try:
            # The timer also covers compilation, which evaluates constant expressions.
            template = template or environment.from_string(set_up["source"])
            kind, text = "ok", _render(template, {**set_up["variables"], **json.loads(line)})
        except (MemoryError, RecursionError, OverflowError) as error:
            kind, text = "request", f"it takes too much memory, depth or length ({type(error).__name__}: {error})"
        except Exception as error:  # noqa: BLE001 - reported to the driver
            kind, text = _explain(error)
            text = text[:MAX_ERROR_CHARS]
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(kind, text)


def _reply(kind: str, text: str) -> None:
    try:
        sys.stdout.buffer.write(json.dumps([kind, text]).encode() + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)  # The driver has ended. Flushing stdout at exit would fail again.


def _environment() -> Any:
    """The jinja2 environment of Hugging Face's chat templates."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTag(Extension):
        """``{% generation %}`` marks the assistant's text for training; it has no effect here."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's class attribute

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """A namespace without underscored names, which give access to Python's internals."""

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
    """Render a template; raises OverflowError for a prompt over the limit."""
    parts: list[str] = []
    length = 0
    for part in template.generate(documents=None, **variables):
        parts.append(part)
        length += len(part)
        if length > MAX_RENDERED_CHARS:
            raise OverflowError(f"more than {MAX_RENDERED_CHARS} characters")
    return "".join(parts)


def _explain(error: Exception) -> tuple[str, str]:
    """The kind of a rendering error, "template" or "request", and its message."""
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return "template", f"line {error.lineno}: {error.message}"
    if isinstance(error, SecurityError):
        return "template", f"it tries something that is not allowed: {error}"
    if type(error) is TemplateError:
        return "request", f"it refuses these messages: {error}"
    return "request", f"it cannot render these messages: {type(error).__name__}: {error}"


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy messages without keys whose value is None, which templates would render as text.

    Raises:
        RequestError: the list is empty, or an entry is not an object.
    """
    if not messages:
        raise RequestError("a conversation has to have at least one message", param="messages")
    for index, message in enumerate(cast("Sequence[Any]", messages)):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {index} is {message!r:.80}; a message is an object with role and content")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
