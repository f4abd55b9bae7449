"""How ``bench latency`` and ``bench throughput`` get their figures from runs and counters of a stand-in."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any, Self

import pytest

import benchmarks.latency
import benchmarks.throughput
from benchmarks.latency import bench_latency
from benchmarks.throughput import bench_throughput
from benchmarks.workload import SETTINGS
from runtime.common.sampling_params import SamplingParams

PREFILL, STEP = 2.0, 0.5
"""Seconds that the stand-in takes for a prompt's first token, and for each later one."""

MODEL_SHARE, DRIVER_CPU = 0.75, 0.001
VOCAB = 50


@dataclasses.dataclass
class Counters:
    """What the benches read of an EngineSnapshot."""

    steps: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    driver_seconds: float = 0.0
    preemptions: int = 0


class FakeLLM:
    """Takes known times by a clock of its own."""

    used: list[tuple[list[list[int]], list[SamplingParams]]]
    now: list[float]

    def __init__(self, model: str, **engine: Any) -> None:
        self.config = types.SimpleNamespace(
            model=model, dtype="float32", device="cpu", tensor_parallel_size=1,
            distributed_executor_backend="local", cudagraph_mode="NONE",
        )  # fmt: skip
        self.model_config = types.SimpleNamespace(vocab_size=VOCAB)
        self.engine = self
        self._counters = Counters()

    def snapshot(self) -> Counters:
        return dataclasses.replace(self._counters)

    def measure_step(self) -> dict[str, float]:
        return {"forward": 0.3, "ops": 0.2}

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams], *, progress: bool = False
    ) -> list[Any]:
        several = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        type(self).used.append((prompts, several))
        tokens = max(one.max_tokens for one in several)
        seconds = PREFILL + STEP * (tokens - 1)
        type(self).now[0] += seconds
        self._counters.steps += tokens
        self._counters.step_seconds += seconds
        self._counters.model_seconds += MODEL_SHARE * seconds
        self._counters.driver_seconds += DRIVER_CPU * tokens
        return [
            types.SimpleNamespace(prompt_token_ids=prompt, token_ids=[0] * one.max_tokens, finish_reason="length")
            for prompt, one in zip(prompts, several, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeLLM]]:
    fake = type("FakeLLM", (FakeLLM,), {"used": [], "now": [0.0]})
    for module in (benchmarks.latency, benchmarks.throughput):
        monkeypatch.setattr(module, "LLM", fake)
    monkeypatch.setattr(benchmarks.latency, "inspect_checkpoint", lambda folder: None)
    monkeypatch.setattr(benchmarks.latency, "decode_step_bytes", lambda *_: 1_000_000)
    monkeypatch.setattr(benchmarks.latency, "read_bandwidth", lambda device: 10_000_000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: fake.now[0])
    yield fake


def test_latency_separates_prefill_step_model_and_driver(llm: type[FakeLLM]) -> None:
    one, four = bench_latency("tiny", {}, batches=(1, 4), prompt_tokens=6, new_tokens=11)
    assert (one["batch"], one["decode_tokens_per_s"], one["prefill_tokens_per_s"]) == (1, 2.0, 3.0)
    assert (four["batch"], four["decode_tokens_per_s"], four["prefill_tokens_per_s"]) == (4, 8.0, 12.0)
    assert four["roofline_fraction"] == pytest.approx(0.1 / STEP)
    for row in (one, four):
        assert row["decode_step_ms"] == pytest.approx(1e3 * STEP)
        assert row["driver_channel_ms"] == pytest.approx(1e3 * (1 - MODEL_SHARE) * STEP)
        assert row["driver_cpu_ms"] == pytest.approx(1e3 * DRIVER_CPU)
        assert row["overhead_ms"] == pytest.approx(100)


def test_latency_of_a_single_token_has_no_step(llm: type[FakeLLM]) -> None:
    (row,) = bench_latency("tiny", {}, batches=(1,), prompt_tokens=6, new_tokens=1)
    assert row["decode_tokens_per_s"] is None
    assert "driver_channel_ms" not in row


def test_throughput_counts_tokens_and_shares(llm: type[FakeLLM]) -> None:
    row = bench_throughput("tiny", {}, num_prompts=8, input_len=(3, 9), output_len=(2, 5), seed=1)
    prompts, params = llm.used[-1]
    assert all(3 <= len(prompt) <= 9 for prompt in prompts)
    assert all(0 <= token < VOCAB for prompt in prompts for token in prompt)
    assert all(2 <= one.max_tokens <= 5 and one.ignore_eos for one in params)
    assert len({one.seed for one in params}) == len(prompts)
    assert [one.temperature for one in params] == [how["temperature"] for how in SETTINGS] * 2
    assert row["prompt_tokens"] == sum(map(len, prompts))
    assert row["output_tokens"] == sum(one.max_tokens for one in params)
    assert row["output_tokens_per_s"] == pytest.approx(row["output_tokens"] / row["seconds"], rel=0.01)
    assert (row["model_share"], row["driver_share"], row["busy_share"]) == (MODEL_SHARE, 1 - MODEL_SHARE, 1.0)
    assert row["errors"] == 0


def test_throughput_asks_the_same_for_the_same_seed_and_does_not_warm_the_cache(llm: type[FakeLLM]) -> None:
    for seed in (1, 1, 2):
        bench_throughput("tiny", {}, num_prompts=4, input_len=(8, 8), output_len=(2, 5), seed=seed)
    warm_up, first, _, again, _, other = llm.used
    assert first == again
    assert first != other
    assert not {tuple(prompt) for prompt in warm_up[0]} & {tuple(prompt) for prompt in first[0]}
