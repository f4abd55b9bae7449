"""An engine over the fake executor, with a tokenizer of bytes or in a thread: what the engine's tests share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from runtime.common.config import EngineConfig
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import StepResult
from runtime.common.sampling_params import SamplingParams
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine import Engine
from runtime.engine.request import GenerateRequest, RequestOutput
from runtime.text.tokenizer import Tokenizer
from tests.runtime.engine.fake_executor import FakeExecutor
from tests.small_tokenizer import byte_backend

VOCAB = 300
EOS = (2, 5)
MODEL = ModelConfig("LlamaForCausalLM", 8, 8, 1, 1, 1, 8, VOCAB, 4096, eos_token_ids=EOS)


def byte_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer with one token for each byte, in the order of the bytes."""
    byte_backend().save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


class Bench:
    """An engine over a fake executor."""

    def __init__(self, tokenizer: Tokenizer | None = None, *, num_blocks: int = 256, **settings: Any) -> None:
        sizes = {"max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4} | settings
        self.config = EngineConfig(**sizes)
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            vocab_size=VOCAB,
        )
        self.engine = Engine(self.config, MODEL, tokenizer, self.executor, num_blocks)
        self._num_sequences = 0

    def add(
        self,
        prompt: list[int],
        script: list[int] | None = None,
        prompt_text: str | None = None,
        final_only: bool = False,
        **params: Any,
    ) -> int:
        """Queue a prompt; with a script, the fake model says that instead of what it would."""
        how = SamplingParams(**params)
        req_id = self.engine.add(GenerateRequest(prompt, how, prompt=prompt_text, final_only=final_only))
        if script is not None:
            self.executor.scripted[self._num_sequences] = list(script)
        self._num_sequences += params.get("n", 1)
        return req_id

    def run(self) -> dict[int, list[RequestOutput]]:
        """All outputs of all requests, by request."""
        outputs: dict[int, list[RequestOutput]] = {}
        while self.engine.has_work:
            for output in self.engine.step():
                outputs.setdefault(output.req_id, []).append(output)
        assert not self.engine.has_unfinished
        assert self.engine.scheduler.pool.num_used == 0
        assert self.engine.step() == []
        return outputs

    def one(self, *args: Any, **params: Any) -> RequestOutput:
        """The last output of one request alone."""
        req_id = self.add(*args, **params)
        return self.run()[req_id][-1]


def text_ids(text: str) -> list[int]:
    return list(text.encode())


# ---- in a thread

SECONDS = 20.0
"""No wait in here takes so long unless something is broken."""


class StepGate:
    """Lets the thread have so many results."""

    def __init__(self, bench: Bench, results: int = 0) -> None:
        self._permits = threading.Semaphore(results)
        self._free = False
        self._collect = bench.executor.collect
        bench.executor.collect = self._wait

    def let(self, results: int) -> None:
        self._permits.release(results)

    def open(self) -> None:
        self._free = True
        self._permits.release()

    def _wait(self) -> StepResult:
        if not self._free:
            assert self._permits.acquire(timeout=SECONDS)
        return self._collect()


class Served:
    """A bench whose engine is run by a thread."""

    def __init__(self, tokenizer: Tokenizer | None = None, *, max_queued: int = 100, **settings: Any) -> None:
        self.bench = Bench(tokenizer, **{"max_model_len": 4000, "num_blocks": 2048} | settings)
        self.engine = AsyncEngine(self.bench.engine, max_queued_requests=max_queued)
        self.gate: StepGate | None = None

    def gated(self, results: int = 0) -> StepGate:
        self.gate = StepGate(self.bench, results)
        return self.gate

    def generate(self, token_ids: list[int], **params: Any) -> AsyncGenerator[RequestOutput, None]:
        names = {
            name: params.pop(name) for name in ("request_id", "prompt", "priority", "cache_salt") if name in params
        }
        return self.engine.generate(
            GenerateRequest(token_ids, SamplingParams(**{"ignore_eos": True, **params}), **names)
        )

    async def all(self, token_ids: list[int], **params: Any) -> list[RequestOutput]:
        return [output async for output in self.generate(token_ids, **params)]

    async def drained(self) -> None:
        """Return once no request is unfinished."""
        await until(lambda: self.engine.num_unfinished == 0)

    @property
    def num_used(self) -> int:
        return self.bench.engine.scheduler.pool.num_used


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


async def soon(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, SECONDS)


async def until(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Yield to the loop until something that another thread does has happened."""
    async with asyncio.timeout(SECONDS):
        while not condition():
            meanwhile()
            await asyncio.sleep(0.001)
