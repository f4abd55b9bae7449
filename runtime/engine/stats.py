"""Engine counters, and the snapshot of them that other threads read. Names of metrics are the server's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from runtime.common.errors import LockstepError
from runtime.engine.request import FINISH_REASONS
from runtime.engine.scheduler import Scheduler


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made. Each of ``n`` sequences counts its own tokens and its own finish.

    Attributes:
        computed_tokens: tokens that went through the model: prefill, decode, and recomputation after preemptions.
        steps: steps whose result came back.
        step_seconds: wall time with at least one step in flight.
        model_seconds: rank 0's own time for the steps: preparing, forward pass and sampling.
        driver_seconds: CPU time of the engine's thread for making, packing and sending plans, and for unpacking and
            applying results; neither waiting nor detokenizing.
        finished: finished sequences by finish reason.
        broken: sequences that finished because their logits were not finite.
        restarts: how often the worker group was restarted.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    driver_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    broken: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at one moment: gauges, and :class:`EngineStats` so far.

    Attributes:
        num_running, num_waiting: sequences with and without KV blocks.
        kv_usage: share of the KV blocks in use, 0 to 1.
        prefix_queried_tokens, prefix_hit_tokens: prompt tokens looked up in the prefix cache, and found there.
        preemptions: how often a sequence was preempted.
        failure: what ended the engine; "" while it runs.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    restarts: int
    requests: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    steps: int
    step_seconds: float
    model_seconds: float
    driver_seconds: float
    finished: dict[str, int]
    broken: int
    failure: str


_COUNTERS = tuple(each.name for each in dataclasses.fields(EngineStats) if each.name != "finished")


def take_snapshot(stats: EngineStats, scheduler: Scheduler, failure: LockstepError | None) -> EngineSnapshot:
    """The snapshot of an engine with these counters, this scheduler and this failure."""
    pool = scheduler.pool
    counters = {name: getattr(stats, name) for name in _COUNTERS}
    return EngineSnapshot(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        kv_usage=pool.num_used / pool.num_blocks,
        prefix_queried_tokens=pool.queried_tokens,
        prefix_hit_tokens=pool.hit_tokens,
        preemptions=scheduler.num_preemptions,
        finished=dict(stats.finished),
        failure="" if failure is None else str(failure),
        **counters,
    )
