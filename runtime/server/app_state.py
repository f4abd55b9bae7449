"""State of the server that every route uses: the engine, the tokenizer, the settings and the requests in flight.

``lockstep run-batch`` uses it without HTTP. Tokenization and chat templates run in a few threads, since either may take
long; everything else here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from runtime.common.config import EngineConfig
from runtime.common.errors import RequestError
from runtime.common.model_config import ModelConfig
from runtime.server.errors import HttpError
from runtime.server.logprobs import TokenTexts
from runtime.server.options import ServerOptions
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.engine.async_engine import AsyncEngine
    from runtime.server.metrics import Metrics

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2

MAX_TOKEN_CHARACTERS = 8
"""A text with many more characters for each token of ``max_model_len`` is first tokenized in part."""


class InFlightRequests:
    """The requests that have no complete response yet, and whether the server accepts more.

    Attributes:
        draining: new requests are refused; those in flight continue.
        stopping: the requests in flight are being cancelled.
    """

    def __init__(self) -> None:
        self.draining = False
        self.stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_active(self) -> int:
        """Requests in flight."""
        return len(self._tasks)

    @contextlib.contextmanager
    def track(self) -> Generator[None]:
        """Count the current task as a request in flight."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request in flight is tracked from its own task")
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def stop(self) -> None:
        """Cancel every request in flight."""
        self.draining = self.stopping = True
        for task in list(self._tasks):
            task.cancel()


class AppState:
    """One served model.

    Args:
        engine: a started engine; its owner closes it.
        tokenizer: the model's tokenizer.
        config: a resolved configuration.
        model_config: the configuration in the checkpoint.
        options: options of the HTTP server.

    Attributes:
        names: names that requests may give the model.
        texts: texts of single tokens, for logprobs.
        created: time of construction, in seconds since the epoch.
        in_flight: requests in flight.
        metrics: observes requests; None without HTTP.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        config: EngineConfig,
        model_config: ModelConfig,
        options: ServerOptions | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.model_config = model_config
        self.options = options or ServerOptions()
        self.metrics: Metrics | None = None
        self.names = self.options.served_model_names or (config.model,)
        self.texts = TokenTexts(tokenizer)
        self.created = int(time.time())
        self.in_flight = InFlightRequests()
        self.max_model_len = config.max_model_len or model_config.max_position_embeddings
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="lockstep-text")

    def close(self) -> None:
        """End the threads. The engine's owner closes the engine."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run_in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in one of the threads and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def model_name(self, requested: str | None) -> str:
        """The model's name in the response. Raises :class:`HttpError` (404) for a model that is not served."""
        if requested and requested not in self.names:
            raise HttpError(
                f"the model {requested[:100]!r} does not exist; there is {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return requested or self.names[0]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a prompt; a text that is much too long is refused without tokenizing all of it.

        Raises:
            RequestError: it is longer than ``max_model_len``, or not valid Unicode.
        """
        beginning = MAX_TOKEN_CHARACTERS * self.max_model_len + 1024
        if len(text) > 2 * beginning:
            # The cut can only change the tokens next to it.
            count = len(self.tokenizer.encode(text[:beginning], add_special_tokens)) - 16
            if count > self.max_model_len:
                raise RequestError(
                    f"a prompt of {len(text)} characters, more than {count} tokens, is too long: max_model_len is "
                    f"{self.max_model_len}; shorten it"
                )
        return self.tokenizer.encode(text, add_special_tokens)
