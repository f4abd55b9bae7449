"""``lockstep bench throughput``: many requests of mixed length and settings at once, offline."""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.shares import shares
from benchmarks.workload import make_work, token_prompt
from launch.llm import LLM
from runtime.common.sampling_params import SamplingParams

WARM_UP_TOKENS = 4


def bench_throughput(
    model: str,
    engine: dict[str, Any],
    *,
    num_prompts: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    seed: int,
) -> dict[str, Any]:
    """One row: requests and tokens per second over all of them, and the shares that ``shares.py`` explains."""
    works = make_work(num_prompts, input_len, output_len, seed)
    chance = random.Random(f"{seed}/tokens")
    with LLM(model, **engine) as llm:
        prompts = [token_prompt(work, llm.model_config.vocab_size, chance) for work in works]
        others = [token_prompt(work, llm.model_config.vocab_size, chance) for work in works]
        llm.generate(others, [SamplingParams(max_tokens=WARM_UP_TOKENS, **work.sampling) for work in works])
        params = [SamplingParams(max_tokens=work.output_tokens, ignore_eos=True, **work.sampling) for work in works]
        before = llm.engine.snapshot()
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=True)
        seconds = time.perf_counter() - started
        after = llm.engine.snapshot()
        config = llm.config
    steps = after.steps - before.steps
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "model": model,
        "tensor_parallel_size": config.tensor_parallel_size,
        "num_prompts": num_prompts,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": round(seconds, 3),
        "requests_per_s": round(num_prompts / seconds, 3),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / seconds, 2),
        "output_tokens_per_s": round(output_tokens / seconds, 2),
        **shares(after.model_seconds - before.model_seconds, after.step_seconds - before.step_seconds, seconds),
        "steps": steps,
        "step_ms": round(1e3 * seconds / steps, 3),
        "preemptions": after.preemptions - before.preemptions,
        "errors": sum(output.finish_reason == "error" for output in outputs),
        "executor": config.distributed_executor_backend,
        "mode": config.cudagraph_mode,
        "dtype": config.dtype,
    }
