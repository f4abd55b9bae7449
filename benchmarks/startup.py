"""``lockstep bench startup``: seconds of every start-up stage, and what a rank had to read, of one start."""

from __future__ import annotations

import time
from typing import Any

from launch.llm import LLM
from runtime.common.checkpoint import inspect_checkpoint


def bench_startup(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    """One row: a second per stage, their sum with everything around them, and the ranks' loading reports.

    ``largest_rank_read_fraction`` is what the rank that read most took from the checkpoint, as a share of its bytes:
    1 / TP plus what every rank needs whole.
    """
    started = time.perf_counter()
    with LLM(model, **engine) as llm:
        total = time.perf_counter() - started
        report = llm.startup
        config = llm.config
    checkpoint_bytes = inspect_checkpoint(config.model).total_bytes
    most_read = max(weights["bytes_read"] for weights in report.weights)
    return {
        "model": model,
        "tensor_parallel_size": config.tensor_parallel_size,
        "executor": config.distributed_executor_backend,
        "mode": config.cudagraph_mode,
        **{f"{stage}_s": round(seconds, 3) for stage, seconds in report.seconds.items()},
        "total_s": round(total, 3),
        "checkpoint_bytes": checkpoint_bytes,
        "largest_rank_bytes_read": most_read,
        "largest_rank_read_fraction": round(most_read / checkpoint_bytes, 4),
        "largest_rank_peak_bytes": max(weights["peak_rss"] for weights in report.weights),
        "compiled_pieces": report.compiled_subgraphs,
        "distinct_pieces": report.distinct_subgraphs,
        "cache_hits": report.cache_hits,
    }
