"""Outputs do not depend on company: each of many requests, together and under pressure, is what it is alone.

Arrivals and aborts are scripted by the step, not by the clock, so that a run can be repeated exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from launch.llm import LLM
from runtime.common.sampling_params import SamplingParams
from runtime.engine.engine import Engine
from runtime.engine.request import GenerateRequest, RequestOutput
from tests.checkpoints import tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_REQUESTS = 200
VOCAB = 1003
BLOCK = 4
BLOCK_BYTES = 2 * 16 * BLOCK * 4  # one layer, keys and values, one KV head of 16 floats on each of 2 ranks


@dataclass(frozen=True)
class Ask:
    """One request, the step it arrives at, and how many tokens it may give before it is aborted."""

    token_ids: list[int]
    params: SamplingParams
    arrives: int
    patience: int | None


def mixed_requests(seed: int) -> list[Ask]:
    """Greedy and seeded, short and long, many with a beginning in common, some with several samples."""
    random_ = random.Random(seed)
    beginnings = [[random_.randrange(VOCAB) for _ in range(length)] for length in (17, 40, 64)]
    asks: list[Ask] = []
    step = 0
    for number in range(NUM_REQUESTS):
        beginning = random_.choice([[], *beginnings])
        own = [random_.randrange(VOCAB) for _ in range(random_.randint(1, 40))]
        settings = random_.choice(
            [
                {"temperature": 0.0},
                {"temperature": 1.0},
                {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
                {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.5},
                {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {5: 3.0}},
            ]
        )
        count = random_.randint(1, 30)
        params = SamplingParams(
            max_tokens=count, ignore_eos=True, seed=number, n=random_.choice([1, 1, 1, 3]), **settings
        )
        patience = random_.randint(0, 10) if random_.random() < 0.1 else None
        asks.append(Ask([*beginning, *own], params, step, patience))
        step += random_.choice([0, 0, 0, 1, 2])
    return asks


def tokens(output: RequestOutput) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


def run_all(engine: Engine, asks: list[Ask]) -> dict[int, list[list[int]]]:
    """What each request gave; of aborted ones, what they had given by then."""
    due = list(enumerate(asks))
    index_of: dict[int, int] = {}
    results: dict[int, list[list[int]]] = {}
    step = 0
    while due or engine.has_unfinished:
        while due and due[0][1].arrives <= step:
            index, ask = due.pop(0)
            index_of[engine.add(GenerateRequest(ask.token_ids, ask.params))] = index
        for output in engine.step() if engine.has_unfinished else []:
            index = index_of[output.req_id]
            ask = asks[index]
            assert output.error == ""
            if output.finished:
                results[index] = tokens(output)
            elif ask.patience is not None and output.outputs[0].num_tokens >= ask.patience:
                results[index] = tokens(engine.abort(output.req_id))
        step += 1
    return results


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[list[int]]]]:
    """What each request gives when there is no other, and nothing in the KV cache."""
    with start(enable_prefix_caching=False) as llm:
        engine = llm.engine
        results = []
        for ask in mixed_requests(0):
            results.append(run_all(engine, [Ask(ask.token_ids, ask.params, 0, None)])[0])
    yield results


def start(**settings) -> LLM:
    return LLM(
        str(tiny_checkpoint(num_hidden_layers=1)),
        tensor_parallel_size=2,
        distributed_executor_backend="local",
        dtype="float32",
        enforce_eager=True,
        progress=False,
        block_size=BLOCK,
        max_num_seqs=24,
        max_num_batched_tokens=96,
        **settings,
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [1536, 45])
def test_each_is_what_it_is_alone(num_blocks: int, prefix_caching: bool, alone: list[list[list[int]]]):
    asks = mixed_requests(0)
    with start(enable_prefix_caching=prefix_caching, kv_cache_memory=num_blocks * BLOCK_BYTES) as llm:
        assert llm.startup.num_kv_blocks == num_blocks
        engine = llm.engine
        results = run_all(engine, asks)
        snapshot = engine.snapshot()
        assert engine.scheduler.pool.num_used == 0
    for index, ask in enumerate(asks):
        expected = alone[index]
        if ask.patience is None:
            assert results[index] == expected, f"request {index}"
        else:
            for got, whole in zip(results[index], expected, strict=True):
                assert got == whole[: len(got)], f"request {index}, aborted"
    assert (snapshot.preemptions >= 20) == (num_blocks == 45)
    # Without prefix caching, only samples of one prompt share its blocks.
    assert (snapshot.prefix_hit_tokens > 8000) == prefix_caching
