"""``lockstep run-batch``: execute a file of requests in the format of OpenAI's batch API.

Every line of the input is ``{"custom_id", "method", "url", "body"}``; bodies are validated and executed by the code of
``lockstep serve``, so the command needs the ``serve`` extra. The output has a line for each request, in input order. It
replaces a file of that name only once it is complete.
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
from launch.cli.commands.serve import require
from launch.cli.output import OutputError
from launch.hub import served_name
from launch.progress import Bar, Progress, Throughput
from runtime.common.errors import InputError, LockstepError, QueueFullError

if TYPE_CHECKING:
    from runtime.server.app_state import AppState

URLS = ("/v1/chat/completions", "/v1/completions")

UNFINISHED = ".unfinished"
"""Suffix of the output's name if the run ends early."""

LIBRARIES = ("pydantic",)
"""What validation of bodies needs of the ``serve`` extra."""

NO_ROOM = {errno.EDQUOT, errno.EFBIG, errno.ENOSPC}


def build_parser() -> Parser:
    """The arguments of ``run-batch``."""
    parser = Parser(
        "lockstep run-batch",
        "MODEL -i FILE -o FILE [flags]",
        "Execute a file of requests in the format of OpenAI's batch API: a JSON object a line with custom_id, method "
        f"POST, url ({' or '.join(URLS)}) and body. The output has a line for each, in the same order.",
        "Exit code 1 if a request failed; its line in the output has the error, the others have their responses.",
    )
    add_model(parser)
    parser.add_argument("-i", "--input-file", metavar="FILE", required=True, help="the requests; '-': standard input")
    parser.add_argument(
        "-o",
        "--output-file",
        metavar="FILE",
        required=True,
        help="the responses; appears when complete (early end: FILE.unfinished)",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", nargs="+", default=None,
        help="what requests may call the model (default: MODEL as given)",
    )  # fmt: skip
    add_engine_flags(parser)
    return parser


def check(argv: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """Parse and validate the arguments without starting anything. Raises :class:`InputError`."""
    parser = build_parser()
    arguments = parser.parse(argv)
    settings = read_settings(arguments, parser, sampling=False)
    require("run-batch", LIBRARIES)
    return arguments, settings


def run(argv: Sequence[str]) -> int:
    """Execute the file; 1 if a request failed. Raises :class:`~runtime.common.errors.LockstepError`."""
    arguments, settings = check(argv)
    items = read_items(arguments.input_file)
    with complete_file(arguments.output_file, arguments.input_file) as output:
        from launch.llm import AsyncLLM
        from runtime.server.app_state import AppState
        from runtime.server.options import ServerOptions

        with AsyncLLM(settings.model, **settings.engine) as llm:
            options = ServerOptions(
                served_model_names=tuple(arguments.served_model_name or (served_name(settings.model),))
            )
            state = AppState(llm.engine, llm.tokenizer, llm.config, llm.model_config, options)
            try:
                with Progress().bar("requests", len(items)) as bar:
                    batch = Batch(state, _endpoints(), items, output, bar)
                    asyncio.run(batch.execute(2 * llm.config.max_num_seqs))
            finally:
                state.close()
    answered = f"{len(items) - batch.failed} of {len(items)} requests answered"
    print(f"lockstep run-batch: {answered}: {arguments.output_file}", file=sys.stderr)
    return 1 if batch.failed else 0


# ---- files


@dataclass(frozen=True)
class Item:
    """One line of the input: a request, or the error of a line that is none.

    Attributes:
        custom_id: the user's id of the request; None if the line has no valid one.
        url, body: as given; not validated if ``error`` is set.
        error: an error object of OpenAI's batch format, or None.
    """

    custom_id: str | None
    url: str = ""
    body: Any = None
    error: dict[str, str] | None = None


def read_items(file: str) -> list[Item]:
    """Read the lines of ``file`` that are not blank. Raises :class:`InputError` if it is unreadable or has none."""
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
    """Open a temporary file that replaces ``path`` when the block ends without an exception.

    After an exception the lines written so far are kept in a file with the suffix :data:`UNFINISHED`.

    Raises:
        InputError: ``path`` cannot be written; raised before the block is entered.
        OutputError: the disk is full.
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


# ---- execution

Endpoint = Callable[..., Awaitable[dict[str, Any]]]
"""Computes the response to ``(state, body, request_id=...)``, or raises a LockstepError."""


class ErrorReply(Protocol):
    """The response to a failed request: ``runtime.server.errors.ErrorReply``."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        ...


def _endpoints() -> dict[str, Endpoint]:
    """The endpoints of the server, by URL. A body is validated as ``lockstep serve`` does."""
    from runtime.server.chat import create_chat_completion
    from runtime.server.completions import create_completion
    from runtime.server.schemas import ChatCompletionRequest, CompletionRequest

    async def chat(state: AppState, body: Any, *, request_id: str) -> dict[str, Any]:
        return await create_chat_completion(state, ChatCompletionRequest.model_validate(body), request_id=request_id)

    async def completion(state: AppState, body: Any, *, request_id: str) -> dict[str, Any]:
        return await create_completion(state, CompletionRequest.model_validate(body), request_id=request_id)

    return dict(zip(URLS, (chat, completion), strict=True))


class Batch:
    """Executes requests concurrently and writes their responses in input order.

    Args:
        state: the engine and its settings.
        endpoints: functions that compute responses, by URL.
        items: the requests.
        output: receives a line for each request.
        bar: advances with each request.

    Attributes:
        failed: number of requests that ended with an error.
    """

    def __init__(
        self, state: AppState, endpoints: dict[str, Endpoint], items: Sequence[Item], output: TextIO, bar: Bar
    ) -> None:
        self.failed = 0
        self._state, self._endpoints, self._items, self._output, self._bar = state, endpoints, items, output, bar
        self._left = iter(enumerate(items))
        self._lines: dict[int, str] = {}
        self._written = 0
        self._throughput = Throughput()
        self._trying = 0
        self._ended = 0
        self._one_ended = asyncio.Condition()

    async def execute(self, concurrency: int) -> None:
        """Execute every request. Raises :class:`LockstepError` if the engine fails."""
        workers = [asyncio.create_task(self._work()) for _ in range(min(concurrency, len(self._items)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            # After an early end: responses that waited for an earlier request.
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
        """Execute one request; an error becomes its response."""
        from runtime.server.errors import error_reply

        request_id = uuid.uuid4().hex
        while True:
            ended = self._ended
            self._trying += 1
            try:
                body = await self._endpoints[item.url](self._state, item.body, request_id=request_id)
                status = 200
            except LockstepError as error:
                if self._state.engine.failure is not None:
                    raise self._state.engine.failure from None
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
                # This batch has filled the queue. The last task that tries does not wait, so one request always ends.
                await self._one_ended.wait_for(lambda ended=ended: self._ended > ended)

    def _write(self, index: int, line: str) -> None:
        """Write a line, and those after it that are ready, once every earlier line is written."""
        self._lines[index] = line
        while self._written in self._lines:
            self._output.write(self._lines.pop(self._written) + "\n")
            self._written += 1
