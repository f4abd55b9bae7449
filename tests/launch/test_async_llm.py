"""AsyncLLM over real ranks: the same tokens as LLM, readers that come and go, and its end, asked for or forgotten."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launch.llm import LLM, AsyncLLM
from runtime.common.errors import EngineClosedError, RequestError
from runtime.common.sampling_params import SamplingParams
from runtime.engine.request import RequestOutput
from tests.checkpoints import prompts, tiny_checkpoint

SETTINGS = {"enforce_eager": True, "progress": False}
PARAMS = [
    SamplingParams(max_tokens=count, temperature=t, seed=5, ignore_eos=True) for count, t in ((20, 0.0), (9, 1.0))
]

FORGETFUL = """
import asyncio, sys
from lockstep import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM(sys.argv[1], enforce_eager=True, progress=False)
    print(*llm.rank_pids, flush=True)
    async for output in llm.generate([1, 2], SamplingParams(max_tokens=200, ignore_eos=True)):
        return llm

forgotten = asyncio.run(main())
"""


async def read(llm: AsyncLLM, prompt: str | list[int], params: SamplingParams, **names: str) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **names)]


@pytest.mark.slow
def test_readers_of_one_engine() -> None:
    work = [(prompt, params) for prompt in prompts(4, 20, 33) for params in PARAMS]
    with LLM(str(tiny_checkpoint()), **SETTINGS) as llm:
        expected = [llm.generate([prompt], params)[0].token_ids for prompt, params in work]
        assert llm.engine.snapshot().requests == len(work)

    async def main() -> None:
        async with AsyncLLM(str(tiny_checkpoint()), **SETTINGS) as llm:
            results = await asyncio.gather(*(read(llm, prompt, params) for prompt, params in work))
            assert [outputs[-1].token_ids for outputs in results] == expected
            [*_, last] = await read(llm, "Hello", SamplingParams(max_tokens=3, ignore_eos=True))
            assert last.prompt == "Hello" and last.text == llm.tokenizer.decode(last.token_ids)
            conversation = [{"role": "user", "content": "Hello"}]
            answers = [output async for output in llm.chat(conversation, PARAMS[1])]
            assert answers[-1].prompt == llm.tokenizer.apply_chat_template(conversation)
            assert len(answers[-1].token_ids) == PARAMS[1].max_tokens
            with pytest.raises(RequestError, match="256"):
                await read(llm, [5] * 300, PARAMS[0])
            reader = asyncio.create_task(
                read(llm, [1], SamplingParams(max_tokens=250, ignore_eos=True), request_id="x")
            )
            while not await llm.abort("x"):
                await asyncio.sleep(0.01)
            assert (await reader)[-1].finish_reason == "abort"
            async for _ in llm.generate([1], SamplingParams(max_tokens=250, ignore_eos=True)):
                break
            while llm.engine.num_unfinished:
                await asyncio.sleep(0)
            assert llm.engine.snapshot().kv_usage == 0.0
            pids = llm.rank_pids
        assert pids and not any(map(psutil.pid_exists, pids))
        with pytest.raises(EngineClosedError, match="AsyncLLM was closed"):
            await read(llm, [1], PARAMS[0])

    asyncio.run(main())


@pytest.mark.slow
def test_a_forgotten_engine_ends_with_its_object_and_at_exit() -> None:
    llm = AsyncLLM(str(tiny_checkpoint()), **SETTINGS)
    pids = llm.rank_pids
    assert asyncio.run(read(llm, [1], PARAMS[0]))[-1].finished
    del llm
    gc.collect()
    assert not any(map(psutil.pid_exists, pids))
    command = [sys.executable, "-c", FORGETFUL, str(tiny_checkpoint())]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())
