"""``lockstep bench latency``: tokens per second of prefill and decode for fixed batches of synthetic prompts."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.roofline import decode_step_bytes, read_bandwidth
from launch.llm import LLM
from runtime.common.checkpoint import inspect_checkpoint
from runtime.common.sampling_params import SamplingParams

REPEATS = 3
"""Each figure is the median of so many runs, after one that warms up."""


DETAILS = ("forward", "ops", "overhead", "driver_channel", "driver_cpu")
"""Milliseconds of a decode step that a row may have."""


class _Times(NamedTuple):
    """Seconds of a run, or of one step of it: all in all, without rank 0's own, and the driver's CPU time.

    The difference is taken within a run: those of different runs lie further apart than it is large.
    """

    wall: float
    rest: float
    driver: float


def bench_latency(
    model: str, engine: dict[str, Any], *, batches: Sequence[int], prompt_tokens: int, new_tokens: int
) -> Iterator[dict[str, Any]]:
    """One row per batch size, all on one engine.

    Decode tokens per second are ``(new_tokens - 1) * batch / (time of all - time of the first)``; prefill tokens per
    second are ``prompt_tokens * batch / time of the first``. The roofline fraction is the time that reading every
    weight once would take at this machine's memory bandwidth, measured here too, over the time of a decode step. On the
    CPU, ``overhead_ms`` is the forward pass less the time within its ops.

    ``driver_channel_ms`` is the time of a decode step less rank 0's own time for it (preparing, forward pass,
    sampling): what driver and channel cost a step. ``driver_cpu_ms`` is the CPU time that the driver works for one: it
    schedules, packs, sends, unpacks and takes the result. As long as the ranks have a plan waiting, most of the second
    is not part of the first.
    """
    # The prompts repeat, and every run has to compute all of them.
    settings: dict[str, Any] = {"enable_prefix_caching": False, **engine}
    with LLM(model, **settings) as llm:
        random_state = random.Random(0)
        longest = max(batches)
        prompts = [
            [random_state.randrange(llm.model_config.vocab_size) for _ in range(prompt_tokens)] for _ in range(longest)
        ]
        rows: list[dict[str, Any]] = []
        for batch in batches:
            _run(llm, prompts[:batch], min(new_tokens, 4))
            first = _median([_run(llm, prompts[:batch], 1) for _ in range(REPEATS)])
            total = _median([_run(llm, prompts[:batch], new_tokens) for _ in range(REPEATS)])
            step = _Times(*((a - b) / max(1, new_tokens - 1) for a, b in zip(total, first, strict=True)))
            rows.append({"batch": batch, "first": first.wall, "step": step.wall, **_inside(llm, new_tokens)})
            if new_tokens > 1:
                rows[-1] |= {"driver_channel": step.rest, "driver_cpu": step.driver}
        step_bytes = decode_step_bytes(inspect_checkpoint(llm.config.model), llm.model_config, llm.config.dtype)
        config, size = llm.config, llm.config.tensor_parallel_size
    # The ranks are gone: nothing else reads memory while its bandwidth is measured.
    bandwidth = read_bandwidth(config.device) * (size if config.device == "cuda" else 1)
    for row in rows:
        yield {
            "model": model,
            "tensor_parallel_size": size,
            "batch": row["batch"],
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "decode_tokens_per_s": round(row["batch"] / row["step"], 2) if new_tokens > 1 else None,
            "prefill_tokens_per_s": round(row["batch"] * prompt_tokens / row["first"], 2),
            "roofline_fraction": round(step_bytes / bandwidth / row["step"], 4) if new_tokens > 1 else None,
            "executor": config.distributed_executor_backend,
            "mode": config.cudagraph_mode,
            "dtype": config.dtype,
            "decode_step_ms": round(1e3 * row["step"], 3),
            **{f"{name}_ms": round(1e3 * row[name], 3) for name in DETAILS if name in row},
            "memory_bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        }


def _inside(llm: LLM, new_tokens: int) -> dict[str, float]:
    """Of the last decode step, on the CPU: its forward pass, the ops in it, and the difference, which is Python."""
    if new_tokens < 2 or llm.config.device != "cpu":
        return {}
    found = llm.measure_step()
    return {**found, "overhead": found["forward"] - found["ops"]}


def _run(llm: LLM, prompts: list[list[int]], new_tokens: int) -> _Times:
    """Continue the prompts greedily by exactly so many tokens."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    before = llm.engine.snapshot()
    started = time.perf_counter()
    llm.generate(prompts, params)
    wall = time.perf_counter() - started
    after = llm.engine.snapshot()
    model = after.model_seconds - before.model_seconds
    return _Times(wall, wall - model, after.driver_seconds - before.driver_seconds)


def _median(runs: Sequence[_Times]) -> _Times:
    """Of each figure by itself."""
    return _Times(*map(statistics.median, zip(*runs, strict=True)))
