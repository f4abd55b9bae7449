"""What the engine counts, and the reading of it that other threads may take. Metrics names are the server's."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.engine.request import FINISH_REASONS


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made, for metrics. Each of ``n`` samples counts its own tokens and its own end.

    Attributes:
        computed_tokens: tokens that went through the model: of prompts, of decodes, and again after preemptions.
        steps: plans whose result came back.
        step_seconds: wall time in which at least one plan was under way.
        model_seconds: rank 0's own time for the steps: preparing, forward pass and sampling.
        driver_seconds: CPU time of the engine's thread for making, packing and sending plans, and for unpacking and
            taking results; neither waiting nor making text.
        finished: ended samples by finish reason.
        broken: samples that ended because their logits were not finite.
        restarts: how often the worker group was started again.
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
    """The engine at one moment: what it holds now, and :class:`EngineStats` so far.

    Attributes:
        num_running, num_waiting: samples with and without KV blocks.
        kv_usage: share of the KV blocks in use, 0 to 1.
        prefix_queried_tokens, prefix_hit_tokens: prompt tokens looked up in the prefix cache, and found there.
        preemptions: how often a sample lost its KV blocks to another one.
        failure: what ended the engine; "" while it is well.
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
