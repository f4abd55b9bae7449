"""``lockstep run-batch``: carry out a file of requests in the format of OpenAI's batch API.

Every line of the input is ``{"custom_id", "method", "url", "body"}``; its body is answered by the same functions that
``lockstep serve`` answers it with. The output has a line for each, in the order of the input, and appears when all are
done: until then, and if the run fails, there is no such file, or the old one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from launch.cli.args import Parser, Settings, add_engine_flags, add_model, read_settings
from launch.cli.output import OutputError
from launch.progress import Bar, Progress, Throughput
from runtime.common.errors import InputError, LockstepError, QueueFullError

if TYPE_CHECKING:
    from runtime.server.serving import Serving

URLS = ("/v1/chat/completions", "/v1/completions")

UNFINISHED = ".unfinished"
"""Added to the output's name if the run ends early."""

NO_ROOM = {errno.EDQUOT, errno.EFBIG, errno.ENOSPC}


def build_parser() -> Parser:
    """The arguments of ``run-batch``."""
    parser = Parser(
        "lockstep run-batch",
        "MODEL -i FILE -o FILE [flags]",
        "Carry out a file of requests in the format of OpenAI's batch API: a JSON object a line with custom_id, method "
        f"POST, url ({' or '.join(URLS)}) and body. The output has a line for each, in the same order.",
        "Exit code 1 if a request failed; the output then says which and why, and has the others' answers.",
    )
    add_model(parser)
    parser.add_argument("-i", "--input-file", metavar="FILE", required=True, help="the requests; '-': standard input")
    parser.add_argument(
        "-o",
        "--output-file",
        metavar="FILE",
        required=True,
        help="the answers; appears when complete (early end: FILE.unfinished)",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", nargs="+", default=None,
        help="what requests may call the model (default: MODEL as given)",
    )  # fmt: skip
    add_engine_flags(parser)
    return parser


def check(argv: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """The arguments in ``argv``, found good without starting anything. Raises :class:`InputError` if they are not."""
    parser = build_parser()
    arguments = parser.parse(argv)
    return arguments, read_settings(arguments, parser, sampling=False)


def run(argv: Sequence[str]) -> int:
    """Carry the file out; 1 if a request failed. Raises :class:`~runtime.common.errors.LockstepError`."""
    arguments, settings = check(argv)
    items = read_items(arguments.input_file)
    with complete_file(arguments.output_file, arguments.input_file) as output:
        from launch.llm import AsyncLLM
        from runtime.server.serving import ServerOptions, Serving

        with AsyncLLM(settings.model, **settings.engine) as llm:
            options = ServerOptions(served_model_names=tuple(arguments.served_model_name or (settings.model,)))
            serving = Serving(llm.engine, llm.tokenizer, llm.config, llm.model_config, options)
            try:
                with Progress().bar("requests", len(items)) as bar:
                    batch = Batch(serving, _answerers(), items, output, bar)
                    asyncio.run(batch.carry_out(2 * llm.config.max_num_seqs))
            finally:
                serving.close()
    answered = f"{len(items) - batch.failed} of {len(items)} requests answered"
    print(f"lockstep run-batch: {answered}: {arguments.output_file}", file=sys.stderr)
    return 1 if batch.failed else 0


# ---- files


@dataclass(frozen=True)
class Item:
    """One line of the input: a request, or why it is none.

    Attributes:
        custom_id: what the user calls it; None if the line has no usable one.
        url, body: as given; unchecked where ``error`` says that the line cannot be carried out.
        error: an error object of OpenAI's batch format, or None.
    """

    custom_id: str | None
    url: str = ""
    body: Any = None
    error: dict[str, str] | None = None


def read_items(file: str) -> list[Item]:
    """The lines of ``file``, blank ones left out. Raises :class:`InputError` if it cannot be read or holds none."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InputError(f"-i {file}: {error.strerror}; give a file of requests, a JSON object a line") from None
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip(b"\r\t \xef\xbb\xbf")]
    if not lines:
        raise InputError(f"-i {file} holds no request; write a JSON object on each line")
    seen: set[str] = set()
    return [_read_item(number, line.removeprefix(b"\xef\xbb\xbf"), seen) for number, line in lines]


def _read_item(number: int, line: bytes, seen: set[str]) -> Item:
    try:
        value: Any = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return Item(None, error=_error("invalid_json_line", f"line {number} is not JSON: {error}"[:300]))
    if not isinstance(value, dict):
        kind = type(value).__name__
        return Item(None, error=_error("invalid_request", f"line {number} is a {kind}; a request is a JSON object"))
    fields = cast("dict[str, Any]", value)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Item(None, error=_error("missing_custom_id", f"line {number} has no custom_id, a text of its own"))
    if custom_id in seen:
        message = f"line {number} has the custom_id of a line before it: {custom_id[:200]!r}"
        return Item(custom_id, error=_error("duplicate_custom_id", message))
    seen.add(custom_id)
    method, url, body = fields.get("method"), fields.get("url"), fields.get("body")
    problem = None
    if method != "POST":
        problem = _error("invalid_method", f"line {number}: method is {method!r:.100}; it has to be 'POST'")
    elif url not in URLS:
        problem = _error("invalid_url", f"line {number}: url is {url!r:.200}; allowed: {', '.join(URLS)}")
    elif isinstance(body, dict) and cast("dict[str, Any]", body).get("stream"):
        problem = _error("streaming", f"line {number}: a batch cannot stream; leave stream out")
    return Item(custom_id, str(url), body, problem)


def _error(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}


@contextlib.contextmanager
def complete_file(path: str, other_than: str) -> Generator[TextIO]:
    """A file to write that takes the place of ``path`` when the block ends well.

    If it does not, what was written is kept beside it under another name (:data:`UNFINISHED`): hours of work may be in
    it, and every line says which request it answers.

    Raises:
        InputError: it cannot be written there; nothing was done yet.
        OutputError: the disk became full.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise InputError(f"-o {path} is no regular file, so it cannot be replaced by one; give another name")
    if other_than != "-" and target == Path(other_than).resolve():
        raise InputError(f"-o {path} is the input; give another name")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        stream = partial.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"-o {path}: {error.strerror}; give a name in a folder that can be written to") from None
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise OutputError(path, error) from None
    except BaseException:
        if partial.stat().st_size:
            kept = partial.replace(target.with_name(target.name + UNFINISHED))
            print(f"lockstep run-batch: the answers that were ready are in {kept}", file=sys.stderr)
        raise
    finally:
        partial.unlink(missing_ok=True)


# ---- answers

Answerer = Callable[..., Awaitable[dict[str, Any]]]
"""Gives the response to ``(serving, body, request_id=...)``, or raises a LockstepError."""


class ErrorReply(Protocol):
    """What a failed request is told: ``runtime.server.errors.ErrorReply``."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        ...


def _answerers() -> dict[str, Answerer]:
    from runtime.server.chat import create_chat_completion
    from runtime.server.completions import create_completion

    return dict(zip(URLS, (create_chat_completion, create_completion), strict=True))


class Batch:
    """Requests being carried out, and their answers being written in order.

    Args:
        serving: who answers.
        answerers: by URL.
        items: the requests.
        output: gets a line for each.
        bar: moves with each.

    Attributes:
        failed: how many have no answer but an error.
    """

    def __init__(
        self, serving: Serving, answerers: dict[str, Answerer], items: Sequence[Item], output: TextIO, bar: Bar
    ) -> None:
        self.failed = 0
        self._serving, self._answerers, self._items, self._output, self._bar = serving, answerers, items, output, bar
        self._left = iter(enumerate(items))
        self._lines: dict[int, str] = {}
        self._written = 0
        self._throughput = Throughput()
        self._trying = 0
        self._ended = 0
        self._one_ended = asyncio.Condition()

    async def carry_out(self, at_once: int) -> None:
        """Answer every request, so many at a time. Raises :class:`LockstepError` if the engine fails."""
        workers = [asyncio.create_task(self._work()) for _ in range(min(at_once, len(self._items)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            # After an early end: answers that waited for one before them.
            self._output.writelines(line + "\n" for _, line in sorted(self._lines.items()))

    async def _work(self) -> None:
        for index, item in self._left:
            response = None if item.error else await self._respond(item)
            line = {
                "id": f"batch_req_{uuid.uuid4().hex}",
                "custom_id": item.custom_id,
                "response": response,
                "error": item.error,
            }
            self.failed += response is None or response["status_code"] != 200
            self._write(index, json.dumps(line, ensure_ascii=False))
            usage = response["body"].get("usage", {}) if response else {}
            self._bar.advance(text=self._throughput.add(usage.get("completion_tokens", 0)))

    async def _respond(self, item: Item) -> dict[str, Any]:
        """The response to one request, errors included."""
        from runtime.server.errors import error_reply

        request_id = uuid.uuid4().hex
        while True:
            ended = self._ended
            self._trying += 1
            try:
                body = await self._answerers[item.url](self._serving, item.body, request_id=request_id)
                status = 200
            except LockstepError as error:
                if self._serving.engine.failure is not None:
                    raise self._serving.engine.failure from None
                if isinstance(error, QueueFullError) and self._trying > 1:
                    status, body = 429, {}
                else:
                    reply: ErrorReply = error_reply(error)
                    status, body = reply.status, reply.body
            finally:
                self._trying -= 1
            async with self._one_ended:
                if body:
                    self._ended += 1
                    self._one_ended.notify_all()
                    return {"status_code": status, "request_id": request_id, "body": body}
                # The queue is as full as we made it. The last of us that tries never waits, so somebody always ends.
                await self._one_ended.wait_for(lambda ended=ended: self._ended > ended)

    def _write(self, index: int, line: str) -> None:
        """Write the line once every one before it is written."""
        self._lines[index] = line
        while self._written in self._lines:
            self._output.write(self._lines.pop(self._written) + "\n")
            self._written += 1
