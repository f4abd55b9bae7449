"""The engine's thread and its readers: what they get, how they leave, and what is left when either is gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from runtime.common.errors import EngineClosedError, EngineError, QueueFullError, RankDiedError, RequestError
from runtime.common.sampling_params import SamplingParams, StructuredOutputs
from runtime.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.runtime.engine.engine_bench import SECONDS, VOCAB, Served, byte_tokenizer, run, soon, text_ids, until
from tests.runtime.engine.fake_executor import expected_output


@pytest.fixture
def make() -> Iterator[Callable[..., Served]]:
    """Make engines; at the end they are closed, and no thread and no descriptor may be left."""
    made: list[Served] = []
    descriptors = len(os.listdir("/proc/self/fd"))

    def start(*args: Any, **settings: Any) -> Served:
        served = Served(*args, **settings)
        made.append(served)
        return served

    yield start
    for served in made:
        if served.gate is not None:
            served.gate.open()
        served.engine.close()
        assert served.num_used == 0 and served.bench.executor.closed >= 1
    assert not [thread.name for thread in threading.enumerate() if thread.name == "lockstep-engine"]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


Make = Callable[..., Served]


# ---- what readers get


def test_many_requests_at_once(make: Make) -> None:
    served = make(num_blocks=40, max_num_seqs=8)
    served.engine.start()
    chance = random.Random(2)
    work = [
        ([chance.randrange(VOCAB) for _ in range(chance.randrange(1, 40))], chance.randrange(1, 40), number)
        for number in range(60)
    ]

    async def one(prompt: list[int], count: int, seed: int) -> None:
        await asyncio.sleep(0.001 * (seed % 7))
        outputs = await served.all(prompt, max_tokens=count, seed=seed)
        assert outputs[-1].token_ids == expected_output(prompt, SamplingParams(seed=seed), VOCAB, count)
        assert [t for output in outputs for t in output.outputs[0].new_token_ids] == outputs[-1].token_ids
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

    async def main() -> None:
        await asyncio.gather(*(one(*item) for item in work))
        await served.drained()
        assert (served.engine.num_unfinished, served.engine.seconds_since_progress()) == (0, 0.0)

    run(main())
    snapshot = served.engine.snapshot()
    assert (snapshot.requests, snapshot.finished["length"], snapshot.num_waiting) == (60, 60, 0)
    assert snapshot.preemptions > 0


def test_several_loops_share_one_engine(make: Make) -> None:
    served = make()
    served.engine.start()
    results: dict[int, list[int]] = {}

    def reader(number: int) -> None:
        async def main() -> None:
            outputs = await asyncio.gather(*(served.all([number, i], max_tokens=20, seed=i) for i in range(5)))
            results[number] = [len(output[-1].token_ids) for output in outputs]

        run(main())

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert results == {number: [20] * 5 for number in range(4)}


def test_what_a_slow_reader_missed_is_one_output(make: Make, tokenizer: Tokenizer) -> None:
    served = make(tokenizer)
    gate = served.gated(1)
    served.engine.start()
    said = "Hello, world of words"
    served.bench.executor.scripted[0] = text_ids(said)

    async def main() -> None:
        stream = served.generate(text_ids("x"), max_tokens=len(said), logprobs=0, prompt="x")
        first = await anext(stream)
        assert (first.text, first.outputs[0].new_text, first.prompt) == ("H", "H", "x")
        gate.open()
        await served.drained()
        last = await anext(stream)
        assert (last.finished, last.outputs[0].new_text, last.text) == (True, said[1:], said)
        assert bytes(last.outputs[0].new_token_ids).decode() == said[1:]
        assert len(last.outputs[0].new_logprobs or ()) == len(said) - 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(main())


def test_clients_of_a_group_that_fails_see_a_pause(make: Make) -> None:
    served = make()
    served.bench.executor.failing_steps = {
        step: RankDiedError(rank=1, returncode=-9, stage=f"step {step}") for step in (1, 9, 15)
    }
    served.engine.start()

    async def main() -> None:
        outputs = await asyncio.gather(*(served.all([7, i], max_tokens=20, seed=i) for i in range(5)))
        for i, output in enumerate(outputs):
            assert output[-1].token_ids == expected_output([7, i], SamplingParams(seed=i), VOCAB, 20)
            assert [t for o in output for t in o.outputs[0].new_token_ids] == output[-1].token_ids

    run(main())
    assert (served.engine.snapshot().restarts, served.engine.failure) == (3, None)


def test_an_idle_thread_sleeps(make: Make) -> None:
    served = make()
    served.engine.start()
    waits: list[int] = []

    async def main() -> None:
        for number in range(3):
            await served.all([1], max_tokens=3)
            # The thread sleeps once before the request, at most twice after it: a wake-up may have come meanwhile.
            await until(lambda: served.bench.executor.waits > len(waits))
            waits.append(served.bench.executor.waits)
            assert waits[-1] <= 3 * (number + 1) + 1

    run(main())


# ---- readers that leave


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "cancel before", "exception", "timeout"])
def test_leaving_early_frees_the_blocks(make: Make, how: str) -> None:
    served = make()
    gate = served.gated(0 if how == "cancel before" else 5)
    served.engine.start()

    async def read() -> None:
        async for _ in served.generate([1] * 50, max_tokens=3000):
            if how == "break":
                break
            if how == "exception":
                raise KeyError("the reader has a bug")

    async def main() -> None:
        other = asyncio.create_task(served.all([2], max_tokens=30, seed=1))
        if how == "break":
            await read()
        elif how == "exception":
            with pytest.raises(KeyError):
                await read()
        elif how == "aclose":
            stream = served.generate([1] * 50, max_tokens=3000)
            await anext(stream)
            await stream.aclose()
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(), 0.05)
        else:
            task = asyncio.create_task(read())
            await until(lambda: served.engine.num_unfinished == 2)
            if how == "cancel":
                await until(lambda: served.bench.engine.stats.generated_tokens >= 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: served.engine.num_unfinished <= 1, meanwhile=lambda: gate.let(1))
        gate.open()
        assert (await other)[-1].token_ids == expected_output([2], SamplingParams(seed=1), VOCAB, 30)
        await served.drained()
        assert served.num_used == 0
        # Where it left before the thread had seen it, it was never there.
        assert served.bench.engine.stats.finished["abort"] == served.bench.engine.stats.requests - 1

    run(main())


def test_a_request_whose_reader_is_gone_before_it_begins_never_runs(make: Make) -> None:
    served = make()
    gate = served.gated()
    served.engine.start()

    async def main() -> None:
        first = asyncio.create_task(served.all([1], max_tokens=2))
        await until(lambda: served.bench.executor.num_outstanding == 2)
        second = asyncio.create_task(served.all([2], max_tokens=2))
        await until(lambda: served.engine.num_unfinished == 2)
        second.cancel()
        await asyncio.wait([second])
        gate.open()
        await first
        await served.drained()

    run(main())
    assert served.engine.snapshot().requests == 1


def test_a_loop_that_is_gone_disturbs_nobody(make: Make) -> None:
    served = make()
    gate = served.gated(1)
    served.engine.start()
    loop = asyncio.new_event_loop()
    forgotten = served.generate([1] * 40, max_tokens=3000)
    first = loop.run_until_complete(soon(anext(forgotten)))
    loop.close()
    assert not first.finished

    async def main() -> None:
        task = asyncio.create_task(served.all([2], max_tokens=20, seed=1))
        gate.open()
        assert (await task)[-1].token_ids == expected_output([2], SamplingParams(seed=1), VOCAB, 20)
        await served.drained()

    run(main())
    assert served.bench.engine.stats.finished["abort"] == 1 and served.engine.failure is None
    with contextlib.suppress(StopIteration):
        forgotten.aclose().send(None)  # Its loop cannot do that any more.


def test_abort_by_name(make: Make) -> None:
    served = make()
    gate = served.gated(2)
    served.engine.start()

    async def main() -> None:
        running = asyncio.create_task(served.all([1] * 30, max_tokens=3000, request_id="a"))
        await until(lambda: served.bench.engine.stats.generated_tokens == 2)
        late = asyncio.create_task(served.all([2], max_tokens=5, request_id="late"))
        await until(lambda: served.engine.num_unfinished == 2)
        assert not await served.engine.abort("b")
        aborts = [asyncio.create_task(served.engine.abort(name)) for name in ("a", "late", "a")]
        cancelled = asyncio.create_task(served.engine.abort("a"))
        await asyncio.sleep(0)
        cancelled.cancel()
        gate.let(1)
        assert [await soon(abort) for abort in aborts] == [True, True, False]
        outputs = await running
        assert (outputs[-1].finish_reason, outputs[-1].finished) == ("abort", True)
        assert len(outputs[-1].token_ids) in (2, 3), "the step under way may have given another one"
        assert [output.finish_reason for output in await late] == ["abort"], "it had not even begun"
        assert not await served.engine.abort("a")
        gate.open()
        assert (await served.all([3], max_tokens=2, request_id="a"))[-1].finish_reason == "length"

    run(main())


# ---- what is refused


def test_invalid_requests_are_refused_before_anything_is_yielded(make: Make) -> None:
    served = make(num_blocks=10)
    served.engine.start()

    async def main() -> None:
        for prompt, params, message in (
            ([], {}, "no tokens"),
            ([VOCAB], {}, "vocabulary"),
            ([1] * 30, {"max_tokens": 30}, "needs 15 KV blocks"),
            ([1], {"stop": "x"}, "stop strings need a tokenizer"),
            ([1], {"priority": 2**40}, "priority"),
            ([1], {"structured_outputs": StructuredOutputs(regex="(")}, "regex"),
        ):
            with pytest.raises(RequestError, match=message):
                await anext(served.generate(prompt, **params))
        await served.drained()
        assert (await served.all([1], max_tokens=2))[-1].finish_reason == "length"

    run(main())
    assert served.engine.failure is None and served.engine.snapshot().requests == 1


def test_a_name_is_one_requests(make: Make) -> None:
    served = make()
    gate = served.gated()
    served.engine.start()

    async def main() -> None:
        first = asyncio.create_task(served.all([1], max_tokens=2, request_id="a"))
        await until(lambda: served.engine.num_unfinished == 1)
        with pytest.raises(RequestError, match="'a' already"):
            await served.all([1], request_id="a")
        gate.open()
        assert (await first)[-1].finished
        await served.all([1], max_tokens=2, request_id="a")

    run(main())


def test_a_full_queue_refuses_more(make: Make) -> None:
    served = make(max_queued=3, max_num_seqs=2)
    gate = served.gated()
    served.engine.start()

    async def main() -> None:
        # A burst into an idle engine: two will run, three wait, all before the thread has seen any of them.
        tasks = [asyncio.create_task(served.all([number], max_tokens=40)) for number in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="max_queued_requests is 3") as caught:
            await served.all([9], max_tokens=4)
        assert 1.0 <= caught.value.retry_after <= 60.0
        # The first may have gone alone; the others come with the next plan.
        await until(lambda: served.bench.engine.scheduler.num_running == 2, meanwhile=lambda: gate.let(1))
        assert served.engine.snapshot().num_waiting == 3
        with pytest.raises(QueueFullError):
            await served.all([9], max_tokens=4)
        tasks.pop().cancel()
        gate.open()
        for task in tasks:
            assert (await task)[-1].finish_reason == "length"
        await served.all([9], max_tokens=4)

    run(main())
    assert served.engine.snapshot().requests in (5, 6), "the cancelled one may have been queued before it left"


# ---- the end


def test_the_engines_failure_ends_every_request(make: Make) -> None:
    served = make(max_restarts=0, max_num_seqs=2)
    gate = served.gated()
    served.engine.start()

    async def main() -> None:
        tasks = [asyncio.create_task(served.all([number], max_tokens=500)) for number in range(4)]
        ended = asyncio.create_task(served.engine.ended())
        await until(lambda: served.bench.engine.stats.requests == 4, meanwhile=lambda: gate.let(1))
        served.bench.executor.failure = RankDiedError(rank=2, returncode=-11, stage="step 4")
        gate.open()
        for task in tasks:
            last = (await task)[-1]
            assert last.finished and last.finish_reason == "error" and "SIGSEGV" in last.error
        await ended
        await served.drained()
        assert isinstance(served.engine.failure, RankDiedError) and "rank 2" in served.engine.snapshot().failure
        for _ in range(2):
            with pytest.raises(RankDiedError, match="rank 2"):
                await served.all([1])
        assert not await served.engine.abort("request-1")

    run(main())
    assert served.bench.executor.closed == 1


def test_a_bug_in_the_thread_is_told_to_everybody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make()
    gate = served.gated(2)
    served.engine.start()

    async def main() -> None:
        tasks = [asyncio.create_task(served.all([number], max_tokens=50)) for number in range(3)]
        slow = served.generate([5], max_tokens=50)
        await anext(slow)
        monkeypatch.setattr(served.bench.engine.scheduler, "update", lambda _result: 1 / 0)
        gate.open()
        for task in tasks:
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await task
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            while True:
                assert not (await anext(slow)).finished
        await served.engine.ended()
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await served.all([1])

    run(main())


def test_no_text_of_a_request_kills_the_thread(
    make: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make(tokenizer)
    served.engine.start()

    def append(_self: IncrementalDetokenizer, _token_ids: Sequence[int]) -> str:
        raise RecursionError("too deep")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(IncrementalDetokenizer, "append", append)
            outputs = await served.all([1], max_tokens=5)
        assert outputs[-1].finish_reason == "error" and "too deep" in outputs[-1].error
        assert (await served.all([1], max_tokens=5))[-1].finish_reason == "length"

    run(main())


def test_close_ends_what_runs_and_what_waits(make: Make) -> None:
    served = make()
    gate = served.gated(4)
    served.engine.start()

    async def main() -> None:
        running = asyncio.create_task(served.all([1], max_tokens=50))
        await until(lambda: served.bench.engine.stats.generated_tokens == 4)
        late = asyncio.create_task(served.all([2], max_tokens=50))
        await until(lambda: served.engine.num_unfinished == 2)
        closers = [asyncio.create_task(asyncio.to_thread(served.engine.close)) for _ in range(3)]
        await until(lambda: served.engine._thread.is_closing)  # pyright: ignore[reportPrivateUsage]
        gate.open()
        assert (await running)[-1].finish_reason == "abort"
        assert [output.finish_reason for output in await late] == ["abort"]
        await asyncio.gather(*closers)
        await served.engine.ended()
        await served.drained()
        with pytest.raises(EngineClosedError, match="closed"):
            await served.all([1])

    run(main())
    served.engine.close()
    assert served.bench.executor.closed == 1 and isinstance(served.engine.failure, EngineClosedError)


def test_an_engine_is_started_once_and_before_use(make: Make) -> None:
    served, unused = make(), make()
    with pytest.raises(EngineError, match="start"):
        run(served.all([1]))
    served.engine.start()
    with pytest.raises(EngineError, match="started"):
        served.engine.start()
    unused.engine.close()
    with pytest.raises(EngineError, match="closed"):
        unused.engine.start()


def test_progress_is_watched_only_while_there_is_work(make: Make) -> None:
    served = make()
    gate = served.gated()
    served.engine.start()

    async def main() -> None:
        assert served.engine.seconds_since_progress() == 0.0
        task = asyncio.create_task(served.all([1], max_tokens=2))
        await until(lambda: served.engine.seconds_since_progress() > 0.05)
        gate.let(1)
        await until(lambda: 0.0 < served.engine.seconds_since_progress() < 0.05)
        gate.open()
        await task
        await served.drained()
        assert served.engine.seconds_since_progress() == 0.0

    run(main())


def test_a_forked_child_leaves_the_engine_alone(make: Make) -> None:
    served = make()
    served.engine.start()
    child = os.fork()
    if child == 0:
        # Not pytest's to go on in: whatever happens, this process ends here.
        code = 1
        try:
            served.engine.close()
            try:
                asyncio.run(served.all([1]))
            except EngineError as error:
                code = 0 if "forked" in str(error) and served.bench.executor.closed == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run(served.all([1], max_tokens=2))[-1].finish_reason == "length"
