"""LLM and AsyncLLM, the composition root: model folder, configuration, launcher, supervisor, engine.

``prepare.py`` checks the model and resolves the configuration before any process is started. Scheduling is in
``runtime/engine/``, supervision of the ranks in ``runtime/executor/supervisor.py``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import os
import weakref
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from launch.engine_args import EngineArgs
from launch.environment import read_environment
from launch.prepare import DEMO, find_model, prepare
from launch.progress import Bar, Progress, StageProgress, Throughput
from runtime.common.config import EngineConfig
from runtime.common.errors import ConfigError, EngineClosedError, RequestError
from runtime.common.log import configure_logging
from runtime.common.model_config import load_model_config
from runtime.common.sampling_params import SamplingParams
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine import Engine
from runtime.engine.request import GenerateRequest, RequestOutput
from runtime.executor.startup import StartupReport
from runtime.executor.supervisor import Supervisor
from runtime.text.tokenizer import Tokenizer

Message = dict[str, Any]
"""One chat message: at least "role" and "content"."""


class _WorkerGroupOwner:
    """Start and end of a worker group, common to LLM and AsyncLLM.

    Attributes:
        config: the resolved configuration.
        model_config: the checkpoint's configuration.
        tokenizer: the checkpoint's tokenizer.
        startup: durations and results of the start-up stages.
    """

    def __init__(self, model: str = DEMO, *, progress: bool = True, **settings: Unpack[EngineArgs]) -> None:
        environment = read_environment()
        configure_logging(environment.log_level)
        self._progress = Progress(enabled=progress)
        if internal := (settings.keys() - EngineArgs.__annotations__.keys()) & EngineConfig.__annotations__.keys():
            raise ConfigError(f"unknown setting {min(internal)!r}; launch/ sets it, from the environment or by itself")
        asked = EngineConfig.from_dict({"model": model, **settings})
        asked = dataclasses.replace(
            asked,
            cache_dir=asked.cache_dir or str(environment.cache_dir),
            log_level=environment.log_level,
            fault=environment.fault,
        )
        folder = find_model(asked.model, Path(asked.cache_dir), self._progress)
        self.model_config = load_model_config(folder)
        self.config, launcher = prepare(asked, folder, self.model_config)
        self.tokenizer = Tokenizer.from_folder(folder)
        self._supervisor = Supervisor(launcher, self.config, self.model_config, StageProgress(self._progress))
        self._closed = False
        # Without close(), the group ends when this object is collected, at the latest at interpreter exit.
        self._resources = _Resources(self._supervisor, self.tokenizer)
        self._finalizer = weakref.finalize(self, self._resources.close)
        atexit.register(self._finalizer)
        try:
            self.startup: StartupReport = self._supervisor.start()
        finally:
            self._progress.clear()  # Of a stage that failed.

    def _make_engine(self) -> Engine:
        return Engine(self.config, self.model_config, self.tokenizer, self._supervisor, self.startup.num_kv_blocks)

    @property
    def rank_pids(self) -> list[int]:
        """Each rank's process id, on its own host."""
        return self._supervisor.rank_pids

    def close(self) -> None:
        """Stop the ranks and release their resources. A second call does nothing."""
        self._closed = True
        self._finalizer()
        atexit.unregister(self._finalizer)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"this {type(self).__name__} was closed; create a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Resources:
    """The resources that close() releases. It holds no reference to the LLM, so that the LLM can be collected."""

    def __init__(self, supervisor: Supervisor, tokenizer: Tokenizer) -> None:
        self._pid = os.getpid()
        self._supervisor = supervisor
        self._tokenizer = tokenizer
        self.async_engine: AsyncEngine | None = None

    def close(self) -> None:
        """Stop the engine's thread, the worker group and the tokenizer's helper process, in that order."""
        if os.getpid() != self._pid:
            return  # In a forked child, the resources belong to the parent.
        if self.async_engine is not None:
            self.async_engine.close()
        self._supervisor.close()
        self._tokenizer.close()


class LLM(_WorkerGroupOwner):
    """Offline batch generation over tensor-parallel ranks.

    For example::

        with LLM("demo", tensor_parallel_size=2) as llm:
            for output in llm.generate(["Hello"], SamplingParams(max_tokens=32)):
                print(output.text)

    Args:
        model: a checkpoint folder, ``ORG/NAME[@REVISION]`` on the Hugging Face hub, or ``"demo"``.
        progress: whether to report start-up stages on stderr.
        settings: the fields of ``EngineConfig``.

    Attributes:
        engine: the engine, stepped by :meth:`generate`.

    Raises:
        InputError: the settings or the checkpoint are invalid; no process was started.
        RankError: a rank failed during start-up; every process was stopped.
    """

    def __init__(self, model: str = DEMO, *, progress: bool = True, **settings: Unpack[EngineArgs]) -> None:
        super().__init__(model, progress=progress, **settings)
        self.engine = self._make_engine()

    def measure_step(self, repeats: int = 50) -> dict[str, float]:
        """Benchmarks on the CPU: rank 0's seconds of the last step's forward pass and of the ops in it."""
        return self._supervisor.collective_rpc("measure_step", repeats=repeats)[0]

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for every prompt and return the outputs in input order.

        Args:
            prompts: texts or lists of token ids.
            params: one for all prompts, or one for each; default ``SamplingParams()``.
            progress: whether to show a progress bar on stderr.

        Raises:
            RequestError: a prompt or its parameters are invalid; nothing was generated.
            RankError: the worker group failed more than ``max_restarts`` times; this LLM is unusable.
        """
        self._check_open()
        given: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(given)
        if len(params) != len(given):
            raise RequestError(f"{len(params)} sampling parameters for {len(given)} prompts; give one, or one each")
        req_ids = self._add(given, params)
        with self._progress.bar("prompts", len(given)) if progress else contextlib.nullcontext() as bar:
            finished = self._run(req_ids, bar)
        outputs = []
        for index, (req_id, prompt) in enumerate(zip(req_ids, given, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            outputs.append(dataclasses.replace(finished[req_id], index=index, prompt=text))
        return outputs

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Apply the checkpoint's chat template to one conversation or to several, and generate the answers."""
        batch: list[Any] = list(conversations)
        if batch and isinstance(batch[0], dict):
            batch = [batch]
        texts = [self.tokenizer.apply_chat_template(messages) for messages in batch]
        # The template's text includes the special tokens.
        token_ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(token_ids, params, progress=progress)
        return [dataclasses.replace(output, prompt=text) for output, text in zip(outputs, texts, strict=True)]

    def _add(self, prompts: Sequence[str | Sequence[int]], params: Sequence[SamplingParams]) -> list[int]:
        req_ids: list[int] = []
        try:
            for index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
                try:
                    token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                    request = GenerateRequest(token_ids, prompt_params, final_only=True)
                    req_ids.append(self.engine.add(request))
                except RequestError as error:
                    raise RequestError(f"prompt {index}: {error}") from None
        except BaseException:
            self._abort(req_ids)
            raise
        return req_ids

    def _run(self, req_ids: Sequence[int], bar: Bar | None) -> dict[int, RequestOutput]:
        engine, throughput = self.engine, Throughput()
        finished: dict[int, RequestOutput] = {}
        try:
            while len(finished) < len(req_ids):
                outputs = engine.step()
                if engine.failure is not None:
                    raise engine.failure
                finished.update((output.req_id, output) for output in outputs if output.finished)
                if bar is not None:
                    tokens = sum(s.num_tokens - s.old_tokens for output in outputs for s in output.outputs)
                    ended = sum(output.finished for output in outputs)
                    bar.advance(ended, text=throughput.add(tokens))
            # A step of finished requests may be in flight; its deadline is only checked by step().
            while engine.has_work and engine.failure is None:
                engine.step()
        except BaseException:
            self._abort(req_ids)
            raise
        return finished

    def _abort(self, req_ids: Sequence[int]) -> None:
        for req_id in req_ids:
            self.engine.abort(req_id)


class AsyncLLM(_WorkerGroupOwner):
    """Streaming generation over tensor-parallel ranks for asyncio, with concurrent requests.

    For example::

        async with AsyncLLM("demo", tensor_parallel_size=2) as llm:
            async for output in llm.generate("Hello", SamplingParams(max_tokens=32)):
                print(output.outputs[0].new_text, end="")

    The constructor blocks for the whole start-up: call it before the event loop runs, or in a thread.

    Args:
        model: a checkpoint folder, ``ORG/NAME[@REVISION]`` on the Hugging Face hub, or ``"demo"``.
        progress: whether to report start-up stages on stderr.
        settings: the fields of ``EngineConfig``.

    Attributes:
        engine: the engine, which runs in its own thread.

    Raises:
        InputError: the settings or the checkpoint are invalid; no process was started.
        RankError: a rank failed during start-up; every process was stopped.
    """

    def __init__(self, model: str = DEMO, *, progress: bool = True, **settings: Unpack[EngineArgs]) -> None:
        super().__init__(model, progress=progress, **settings)
        self.engine = AsyncEngine(self._make_engine(), max_queued_requests=self.config.max_queued_requests)
        self._resources.async_engine = self.engine
        self.engine.start()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt and yield an output after every new token or chunk of text.

        Args:
            prompt: a text or a list of token ids.
            params: default ``SamplingParams()``.
            request_id: id for :meth:`abort`; default: a generated one.
            priority: lower values are scheduled first, equal ones in order of arrival.
            cache_salt: requests share cached prefixes only with requests of the same salt.

        Raises:
            RequestError: the request is invalid. Like the other errors, it is raised before the first output.
            QueueFullError: ``max_queued_requests`` requests are waiting.
            EngineError: the engine has stopped.
        """
        self._check_open()
        text = prompt if isinstance(prompt, str) else None
        token_ids = await asyncio.to_thread(self.tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
        request = GenerateRequest(
            token_ids,
            params or SamplingParams(),
            prompt=text,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        outputs = self.engine.generate(request)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Apply the checkpoint's chat template to a conversation and generate the answer like :meth:`generate`."""
        self._check_open()
        text = await asyncio.to_thread(self.tokenizer.apply_chat_template, messages)
        # The template's text includes the special tokens.
        token_ids = await asyncio.to_thread(self.tokenizer.encode, text, False)
        request = GenerateRequest(
            token_ids,
            params or SamplingParams(),
            prompt=text,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        outputs = self.engine.generate(request)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> bool:
        """Abort a request: its last output has ``finish_reason`` "abort". Return whether the id was running."""
        return await self.engine.abort(request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.close)
