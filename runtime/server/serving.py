"""What every route works on: the engine, the tokenizer and the settings; and a body's prompts run through the engine.

Without HTTP it serves the batch-file runner as well. Tokenizing and chat templates run in a few threads, since either
may take a while; everything else here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from runtime.common.config import EngineConfig
from runtime.common.errors import RequestError
from runtime.common.model_config import ModelConfig
from runtime.common.sampling_params import SamplingParams
from runtime.engine.request import RequestOutput
from runtime.server.errors import GenerationError, HttpError, shutting_down
from runtime.server.logprobs import TokenTexts
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.engine.async_engine import AsyncEngine
    from runtime.server.metrics import Metrics

P = ParamSpec("P")
T = TypeVar("T")

MEBIBYTE = 1024 * 1024
TEXT_THREADS = 2
MERGED_OUTPUTS = 16
"""Outputs of several prompts of one body that may wait for a slow client; more are merged by the engine."""

MAX_TOKEN_CHARACTERS = 8
"""A text that has many more characters than this for each token the model can take is looked at piecemeal first."""


@dataclass(frozen=True)
class ServerOptions:
    """How to serve.

    Attributes:
        served_model_names: what requests may call the model; the first is what responses call it. Empty: as the
            configuration calls it.
        api_key: what clients have to show; None: nothing.
        max_body_bytes: a longer body is refused with 413.
        body_seconds: how long a body, or the headers, may take to arrive.
        drain_seconds: how long requests may go on once the server was told to end.
    """

    served_model_names: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 8 * MEBIBYTE
    body_seconds: float = 30.0
    drain_seconds: float = 30.0


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for the engine; ``text`` is what it was made of, None where ids were given."""

    token_ids: Sequence[int]
    text: str | None = None


@dataclass(frozen=True)
class Job:
    """What one body asks of the engine.

    Attributes:
        params: for every prompt.
        max_tokens: as asked for; None if nothing was said.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    max_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""


@dataclass
class Usage:
    """Tokens of one response, counted once for each prompt and for each sample."""

    _outputs: dict[int, RequestOutput] = field(default_factory=dict[int, RequestOutput])

    def see(self, index: int, output: RequestOutput) -> None:
        """The newest output of a prompt."""
        self._outputs[index] = output

    def to_dict(self, *, completion_tokens: int | None = None) -> dict[str, Any]:
        """OpenAI's ``usage``."""
        outputs = self._outputs.values()
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        if completion_tokens is None:
            completion_tokens = sum(sample.num_tokens for output in outputs for sample in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        }


class Traffic:
    """The requests being answered, and whether more are taken.

    Attributes:
        draining: new ones are refused; those under way go on.
        stopping: those under way are being ended.
    """

    def __init__(self) -> None:
        self.draining = False
        self.stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_active(self) -> int:
        """Requests being answered."""
        return len(self._tasks)

    @contextlib.contextmanager
    def one(self) -> Any:
        """Around the answering of a request, in its task."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests are answered in tasks")
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def stop(self) -> None:
        """End every request under way."""
        self.draining = self.stopping = True
        for task in list(self._tasks):
            task.cancel()


class Serving:
    """One model being served.

    Args:
        engine: started.
        config: resolved.
        metrics: None where nobody asks for any.

    Attributes:
        names: what the model may be called.
        texts: the texts of single tokens, for logprobs.
        started: when it was made, in seconds since the epoch.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        config: EngineConfig,
        model_config: ModelConfig,
        options: ServerOptions | None = None,
        *,
        metrics: Metrics | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.model_config = model_config
        self.options = options or ServerOptions()
        self.metrics = metrics
        self.names = self.options.served_model_names or (config.model,)
        self.texts = TokenTexts(tokenizer)
        self.started = int(time.time())
        self.traffic = Traffic()
        self.max_model_len = config.max_model_len or model_config.max_position_embeddings
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="lockstep-text")

    def close(self) -> None:
        """End the threads. The engine is its owner's to close."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``call`` gives, called where it may take its time."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def model_name(self, asked: str | None) -> str:
        """The name for the response. Raises :class:`HttpError` (404) for a model that is not served."""
        if asked and asked not in self.names:
            raise HttpError(
                f"the model {asked[:100]!r} does not exist; there is {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return asked or self.names[0]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; one that is far too long is refused without making all of them.

        Raises:
            RequestError: it is longer than the model can take, or no valid text.
        """
        beginning = MAX_TOKEN_CHARACTERS * self.max_model_len + 1024
        if len(text) > 2 * beginning:
            # Cutting the text can only change the tokens at the cut.
            count = len(self.tokenizer.encode(text[:beginning], add_special_tokens)) - 16
            if count > self.max_model_len:
                raise RequestError(
                    f"a prompt of {len(text)} characters, more than {count} tokens, is too long: max_model_len is "
                    f"{self.max_model_len}; shorten it"
                )
        return self.tokenizer.encode(text, add_special_tokens)

    def with_all_room(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """The parameters with as many tokens as the model's length and the KV cache leave after the prompt."""
        room = self.engine.max_total_tokens - len(prompt.token_ids)
        return dataclasses.replace(params, max_tokens=max(1, params.min_tokens, room))

    async def run(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Every output of every prompt with the prompt's index, as they come. Leaving it aborts what has not ended.

        Raises:
            LockstepError: a prompt was refused, or failed; all others were aborted.
        """
        if len(job.prompts) == 1:
            async with contextlib.aclosing(self._run_one(job, job.prompts[0])) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        async with contextlib.aclosing(self._run_many(job)) as pairs:
            async for pair in pairs:
                yield pair

    async def finish(self, job: Job) -> list[RequestOutput]:
        """The last output of every prompt, in order. Raises as :meth:`run` does."""
        last: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self.run(job)) as outputs:
            async for index, output in outputs:
                last[index] = output
        return [last[index] for index in range(len(job.prompts))]

    async def _run_one(self, job: Job, prompt: Prompt) -> AsyncGenerator[RequestOutput]:
        generate = self.engine.generate(
            prompt.token_ids, job.params, prompt=prompt.text, priority=job.priority, cache_salt=job.cache_salt
        )
        meter = None
        async with contextlib.aclosing(generate) as outputs:
            async for output in outputs:
                if self.metrics is not None:
                    meter = meter or self.metrics.meter(job.params, job.max_tokens)
                    meter.see(output)
                for sample in output.outputs:
                    if sample.finish_reason in ("error", "abort"):
                        raise self._failed(sample.finish_reason, sample.error)
                yield output

    def _failed(self, reason: str, text: str) -> Exception:
        """The error of a request that the engine did not finish."""
        if self.engine.failure is not None:
            return self.engine.failure
        return shutting_down() if reason == "abort" else GenerationError(text)

    async def _run_many(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Each prompt has a task that fills one short queue, so a slow reader holds all of them back."""
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(MERGED_OUTPUTS)

        async def pump(index: int, prompt: Prompt) -> None:
            try:
                async with contextlib.aclosing(self._run_one(job, prompt)) as outputs:
                    async for output in outputs:
                        await queue.put((index, output))
            except Exception as error:  # noqa: BLE001 - raised again where the queue is read
                await queue.put((index, error))
            else:
                await queue.put((index, None))

        tasks = [asyncio.ensure_future(pump(index, prompt)) for index, prompt in enumerate(job.prompts)]
        try:
            running = len(tasks)
            while running:
                index, output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                if output is None:
                    running -= 1
                else:
                    yield index, output
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
