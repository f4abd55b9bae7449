"""LLM and AsyncLLM: start a worker group, put the engine on it, generate, close both.

This is where a user's settings become a running group: the model folder is found and checked, "auto" is resolved, the
cut is refused if it cannot be made, a launcher is chosen, all before any process is started. Scheduling is
``runtime/engine/engine.py``'s, watching ranks is ``supervisor.py``'s.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import importlib.util
import os
import weakref
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Self

from launch.demo_model import ensure_demo_model
from launch.environment import read_environment, torchrun_ranks
from launch.local import LocalLauncher
from launch.progress import Bar, Progress, Throughput
from parallel.shard import ShardError, check_tp_size
from runtime.common.checkpoint import inspect_checkpoint
from runtime.common.config import EngineConfig, resolve
from runtime.common.errors import ConfigError, EngineClosedError, RequestError
from runtime.common.log import configure_logging
from runtime.common.model_config import ModelConfig, load_model_config
from runtime.common.sampling_params import SamplingParams
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine import Engine
from runtime.engine.request import RequestOutput
from runtime.executor.launcher import Launcher
from runtime.executor.startup import StartupReport
from runtime.executor.supervisor import Supervisor
from runtime.text.tokenizer import Tokenizer

DEMO = "demo"

Message = dict[str, Any]
"""One chat message: at least "role" and "content"."""


class _Model:
    """What LLM and AsyncLLM have in common: the way from settings to a worker group, and its end.

    Attributes:
        config: resolved.
        model_config: what the checkpoint says.
        tokenizer: the checkpoint's own.
        startup: what the start took and found.
    """

    def __init__(self, model: str = DEMO, *, progress: bool = True, **settings: Any) -> None:
        environment = read_environment()
        configure_logging(environment.log_level)
        self._progress = Progress(enabled=progress)
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
        self._supervisor = Supervisor(launcher, self.config, self.model_config, _StageLines(self._progress))
        self._closed = False
        # A forgotten close() still ends the group: when the object is collected, or at the latest at exit.
        self._resources = _Resources(self._supervisor, self.tokenizer)
        self._finalizer = weakref.finalize(self, self._resources.close)
        atexit.register(self._finalizer)
        self.startup: StartupReport = self._supervisor.start()

    def _make_engine(self) -> Engine:
        return Engine(self.config, self.model_config, self.tokenizer, self._supervisor, self.startup.num_kv_blocks)

    @property
    def rank_pids(self) -> list[int]:
        """Each rank's process id, on its own host."""
        return self._supervisor.rank_pids

    def close(self) -> None:
        """End every rank and everything they hold. May be called twice."""
        self._closed = True
        self._finalizer()
        atexit.unregister(self._finalizer)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"this {type(self).__name__} was closed; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Resources:
    """What has to be closed at the end. It knows nothing of the LLM, which could never be collected otherwise."""

    def __init__(self, supervisor: Supervisor, tokenizer: Tokenizer) -> None:
        self._pid = os.getpid()
        self._supervisor = supervisor
        self._tokenizer = tokenizer
        self.async_engine: AsyncEngine | None = None

    def close(self) -> None:
        """End the engine's thread, the worker group and the tokenizer's helper process, in that order."""
        if os.getpid() != self._pid:
            return  # A forked child that exits: all of it is its parent's.
        if self.async_engine is not None:
            self.async_engine.close()
        self._supervisor.close()
        self._tokenizer.close()


class LLM(_Model):
    """A model over tensor-parallel ranks that continues lists of prompts.

    Args:
        model: a folder with a Hugging Face checkpoint, or ``"demo"``.
        progress: whether to report start-up stages on stderr.
        settings: fields of :class:`~runtime.common.config.EngineConfig`.

    Attributes:
        engine: makes the steps; while :meth:`generate` runs, for that call alone.

    Raises:
        InputError: the settings or the checkpoint cannot be used; no process was started.
        RankError: a rank failed while starting; everything it had started is gone.
    """

    def __init__(self, model: str = DEMO, *, progress: bool = True, **settings: Any) -> None:
        super().__init__(model, progress=progress, **settings)
        self.engine = self._make_engine()

    def measure_step(self, repeats: int = 50) -> dict[str, float]:
        """For benchmarks on the CPU: rank 0's seconds of the last step's forward pass, and of the ops in it."""
        return self._supervisor.collective_rpc("measure_step", repeats=repeats)[0]

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt; the results are in input order.

        Args:
            prompts: texts, or token ids of ready-made prompts.
            params: for all prompts, or one for each; default :class:`SamplingParams`.
            progress: whether to show a bar on stderr.

        Raises:
            RequestError: a prompt or its parameters are invalid; nothing was generated.
            RankError: the worker group failed more often than it may be restarted; this LLM is dead.
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
        """Answer one conversation, or each of several, through the checkpoint's chat template."""
        several: list[Any] = list(conversations)
        if several and isinstance(several[0], dict):
            several = [several]
        texts = [self.tokenizer.apply_chat_template(messages) for messages in several]
        # The template has written the special tokens already.
        token_ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(token_ids, params, progress=progress)
        return [dataclasses.replace(output, prompt=text) for output, text in zip(outputs, texts, strict=True)]

    def _add(self, prompts: Sequence[str | Sequence[int]], params: Sequence[SamplingParams]) -> list[int]:
        req_ids: list[int] = []
        try:
            for index, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
                try:
                    token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                    req_ids.append(self.engine.add(self.engine.limits.check(token_ids, how), final_only=True))
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
            # A plan may be under way for requests that have ended. Nobody would watch its deadline from here on.
            while engine.has_work and engine.failure is None:
                engine.step()
        except BaseException:
            self._abort(req_ids)
            raise
        return finished

    def _abort(self, req_ids: Sequence[int]) -> None:
        for req_id in req_ids:
            self.engine.abort(req_id)


class AsyncLLM(_Model):
    """A model over tensor-parallel ranks for asyncio: requests come at any time, and their outputs as they grow.

    Starting takes as long as for LLM and keeps an event loop waiting: do it before, or in a thread.

    Args:
        model: a folder with a Hugging Face checkpoint, or ``"demo"``.
        progress: whether to report start-up stages on stderr.
        settings: fields of :class:`~runtime.common.config.EngineConfig`.

    Attributes:
        engine: what :meth:`generate` talks to; see :class:`~runtime.engine.async_engine.AsyncEngine`.
    """

    def __init__(self, model: str = DEMO, *, progress: bool = True, **settings: Any) -> None:
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
        """Continue a prompt; yields an output whenever there is something new.

        Args:
            prompt: a text, or token ids of a ready-made prompt.
            params: how to continue it; default :class:`SamplingParams`.
            request_id: its name for :meth:`abort`; made up if None.
            priority: lower goes first; of equals, the one that came first.
            cache_salt: only requests with the same salt share the KV blocks of what they have in common.

        Raises:
            RequestError: it can never run; raised before anything is yielded, like the others.
            QueueFullError: too many requests are waiting.
            EngineError: the engine has ended.
        """
        self._check_open()
        text = prompt if isinstance(prompt, str) else None
        token_ids = await asyncio.to_thread(self.tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
        outputs = self.engine.generate(
            token_ids, params, request_id=request_id, prompt=text, priority=priority, cache_salt=cache_salt
        )
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
        """Answer a conversation through the checkpoint's chat template; otherwise like :meth:`generate`."""
        self._check_open()
        text = await asyncio.to_thread(self.tokenizer.apply_chat_template, messages)
        # The template has written the special tokens already.
        token_ids = await asyncio.to_thread(self.tokenizer.encode, text, False)
        outputs = self.engine.generate(
            token_ids, params, request_id=request_id, prompt=text, priority=priority, cache_salt=cache_salt
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> bool:
        """End a request, whose reader gets its last output with ``finish_reason`` "abort"; whether there was one."""
        return await self.engine.abort(request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.close)


class _StageLines:
    """Start-up stages as lines and bars on stderr."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars = contextlib.ExitStack()
        self._bar: Bar | None = None

    def started(self, stage: str) -> None:
        """On a terminal, what is being done now."""
        self._progress.stage_started(stage)

    def advanced(self, stage: str, done: int, total: int) -> None:
        """Move the stage's bar, which appears with its first count."""
        if self._bar is None:
            self._bar = self._bars.enter_context(self._progress.bar(stage, total))
        self._bar.update(done)

    def finished(self, stage: str, seconds: float, detail: str) -> None:
        """A line with the stage's time."""
        self._bars.close()
        self._bar = None
        self._progress.stage_done(stage, seconds, detail)


def find_model(model: str, cache_dir: Path, progress: Progress) -> str:
    """The folder of a model the user named; fetches and converts the demo model once."""
    if model == DEMO and not os.path.isdir(model):
        return str(ensure_demo_model(cache_dir, progress))
    return os.path.abspath(os.path.expanduser(model))


def prepare(asked: EngineConfig, folder: str, model: ModelConfig) -> tuple[EngineConfig, Launcher]:
    """The resolved configuration and a launcher for it. Nothing is started.

    Raises:
        InputError: the checkpoint's files are broken, or the model cannot be cut or run as asked.
    """
    inspect_checkpoint(folder)
    executor = choose_executor(asked)
    ranks = torchrun_ranks()
    if executor == "torchrun" and ranks is not None and asked.tensor_parallel_size == 1:
        # The default size, where torchrun was already told how many ranks there are.
        asked = dataclasses.replace(asked, tensor_parallel_size=ranks.world_size)
    try:
        check_tp_size(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            intermediate_size=model.intermediate_size,
            vocab_size=model.vocab_size,
            tp_size=asked.tensor_parallel_size,
        )
    except ShardError as error:
        raise ConfigError(str(error)) from None
    config = resolve(
        dataclasses.replace(asked, model=folder), model, device=find_device(asked.device), executor=executor
    )
    return config, make_launcher(executor)


def choose_executor(config: EngineConfig) -> str:
    """Who starts the ranks: as asked, or torchrun if it started us, one local process for TP 1, Ray otherwise."""
    if config.distributed_executor_backend != "auto":
        return config.distributed_executor_backend
    if torchrun_ranks() is not None:
        return "torchrun"
    return "local" if config.tensor_parallel_size == 1 else "ray"


def make_launcher(executor: str) -> Launcher:
    """The launcher of that name; Ray and torchrun are imported only here."""
    if executor == "ray":
        from launch.ray_launcher import RayLauncher

        return RayLauncher()
    if executor == "torchrun":
        from launch.torchrun_launcher import TorchrunLauncher

        return TorchrunLauncher()
    return LocalLauncher()


def find_device(asked: str) -> str:
    """What to compute on, "cpu" or "cuda", found without importing torch into the driver.

    Raises:
        ConfigError: cuda was asked for and this host has no NVIDIA device, or its torch was built without CUDA.
    """
    spec = importlib.util.find_spec("torch")
    library = Path(spec.origin).parent / "lib" / "libtorch_cuda.so" if spec and spec.origin else None
    has_device = os.path.exists("/dev/nvidiactl") and read_environment().cuda_visible_devices != ""
    usable = has_device and library is not None and library.exists()
    if asked == "cuda" and not usable:
        reason = "torch was built without CUDA" if has_device else "this host has no NVIDIA device that is visible"
        raise ConfigError(f"device is 'cuda', but {reason}; use --device cpu or auto")
    return "cuda" if usable and asked != "cpu" else "cpu"
