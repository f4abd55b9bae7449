"""A server over a fake executor: real sockets, a real engine, a tokenizer of single bytes, and no ranks."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.common.config import EngineConfig
from runtime.common.errors import LockstepError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import StepResult
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine import Engine
from runtime.server.app import create_app
from runtime.server.app_state import AppState
from runtime.server.lifecycle import ServerRun
from runtime.server.options import ServerOptions
from runtime.text.chat_template import ChatTemplate
from runtime.text.tokenizer import Tokenizer
from tests.runtime.engine.fake_executor import FakeExecutor
from tests.small_tokenizer import byte_backend

VOCAB = 300
EOS = 299
MODEL = ModelConfig("LlamaForCausalLM", 8, 8, 1, 1, 1, 8, VOCAB, 4096, eos_token_ids=(EOS,))
TIMEOUT = 20.0
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}[{{ c.function.name }} {{ c.function.arguments.x }}]{% endfor %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """A tokenizer whose token ids are the text's bytes."""
    return Tokenizer(byte_backend(), {}, None if template is None else ChatTemplate(template, Path("template"), {}))


class HeldExecutor(FakeExecutor):
    """A fake executor that a test can stop between two steps: :meth:`collect` blocks while :attr:`going` is not set,
    and takes one of :attr:`permits`, unless they are None.
    """

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.going = threading.Event()
        self.going.set()
        self.permits: threading.Semaphore | None = None

    def collect(self) -> StepResult:
        assert self.going.wait(TIMEOUT), "a test left its executor stopped"
        if self.permits is not None:
            assert self.permits.acquire(timeout=TIMEOUT), "a test gave too few permits"
        return super().collect()


@dataclass
class Reply:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; its shape is asserted."""
        (error,) = self.json.values()
        assert list(self.json) == ["error"] and set(error) == {"message", "type", "param", "code"}, self.json
        return error

    @property
    def events(self) -> list[Any]:
        """The parsed events of a stream."""
        lines = [line for line in self.body.decode().split("\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]", lines[-3:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@dataclass
class Running:
    """A server in a thread."""

    executor: HeldExecutor
    engine: Engine
    state: AppState
    port: int
    run: ServerRun
    loop: asyncio.AbstractEventLoop
    results: list[LockstepError | None]
    """The result of ``ServerRun.run``, once the server has ended."""

    headers: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def ended(self) -> bool:
        return bool(self.results)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """Send one request over its own connection; a body other than bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())

    def post(self, path: str, headers: dict[str, str] | None = None, /, **body: Any) -> Reply:
        return self.ask("POST", path, body, headers)

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, None, headers)

    def complete(self, prompt: Any = "ab", **body: Any) -> Reply:
        return self.post("/v1/completions", prompt=prompt, **body)

    def chat(self, content: Any = "ab", **body: Any) -> Reply:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)

    def open_stream(self, *, receive_buffer: int | None = None, **body: Any) -> socket.socket:
        """A socket on which a streamed completion was requested and nothing was read."""
        data = json.dumps({"prompt": "ab", "stream": True, **body}).encode()
        client = socket.socket()
        client.settimeout(TIMEOUT)
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", self.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        return client

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function in the server's event loop and return its result."""

        async def call() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(TIMEOUT)


@contextlib.contextmanager
def running(
    *,
    options: ServerOptions | None = None,
    num_blocks: int = 512,
    template: str | None = TEMPLATE,
    send_buffer: int | None = None,
    **settings: Any,
) -> Generator[Running]:
    """Run a server on a free port; asserts afterwards that its thread has ended and every KV block is free."""
    sizes = {"max_model_len": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4} | settings
    config = EngineConfig(model="tiny", **sizes)
    executor = HeldExecutor(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=VOCAB - 1,  # It does not generate the end-of-sequence token unless scripted.
    )
    tokenizer = byte_tokenizer(template)
    engine = Engine(config, MODEL, tokenizer, executor, num_blocks)
    driver = AsyncEngine(engine, max_queued_requests=config.max_queued_requests)
    driver.start()
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    ready, made = threading.Event(), list[Any]()
    results: list[LockstepError | None] = []

    async def serve() -> None:
        app = create_app(driver, tokenizer, config, MODEL, options)
        run = ServerRun(app, listener)
        made.extend((app.state.lockstep, run, asyncio.get_running_loop()))
        results.append(await run.run(ready.set))

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(TIMEOUT)
        state, run, loop = made
        yield Running(executor, engine, state, port, run, loop, results)
    finally:
        executor.going.set()
        if thread.is_alive():
            with contextlib.suppress(RuntimeError):  # Its loop has just been closed.
                made[2].call_soon_threadsafe(made[1].stop)
        thread.join(TIMEOUT)
        driver.close()
        assert not thread.is_alive()
    assert engine.scheduler.pool.num_used == 0


def read_until(client: socket.socket, marker: bytes) -> bytes:
    """Receive up to and including ``marker``."""
    got = b""
    while marker not in got:
        received = client.recv(65536)
        assert received, f"the connection ended after {got[-200:]!r}"
        got += received
    return got


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll a condition that other threads or processes make true."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


async def gather_events(events: AsyncGenerator[bytes]) -> bytes:
    """Join the events of a stream."""
    return b"".join([event async for event in events])
