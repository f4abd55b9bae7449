"""The ``decode`` section of ``device_check.py``: time of decode steps of a large random model, eager and in graphs.

It drives the runner of one rank directly, without engine and channels.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.device_sections import TINY_CPU, Job, Report
from benchmarks.ops import median_milliseconds
from benchmarks.random_model import RandomRunner, llama_config
from benchmarks.roofline import read_bandwidth
from parallel.group import single_rank_group
from runtime.common.config import EngineConfig, GraphMode, resolve
from runtime.common.model_config import ModelConfig, load_model_config
from runtime.common.protocol import NewRequest, ScheduledRequest, StepPlan
from runtime.common.sampling_params import SamplingParams
from workers.compile.levels import EAGER, CompileSettings
from workers.runner import ModelRunner

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip

STEPS = 20
"""Timed decode steps; the first three warm up."""

LAUNCH_EXAMPLE = {"layers": 32, "kernels_per_layer": 15, "launch_us": 5.0, "eager_launch_ms": 2.4}
"""An example of launch overhead: 32 layers of 15 kernels at 5 us each. The report repeats it with measured numbers."""


@dataclass(frozen=True)
class Sizes:
    """Batch sizes, tokens of a prompt, the maximum context length, and the model's dtype."""

    batches: tuple[int, ...]
    prompt_tokens: int
    max_model_len: int
    dtype: str


SIZES = {"cuda": Sizes((1, 8, 64), 128, 1024, "bfloat16"), "cpu": Sizes((1, 3), 5, 64, "float32")}


def decode(job: Job, report: Report) -> None:
    """Measure time, memory bandwidth and launches of decode steps. All modes run; failures are raised together."""
    sizes = SIZES[job.device]
    runner = _make_runner(job, sizes, report)
    driver = Driver(runner)
    bandwidth = _memory_bandwidth(job.device)
    report["memory_bandwidth_gb_per_s"] = round(bandwidth / 1e9, 1)
    report["steps"], report["launches"] = list[Report](), dict[str, Any]()
    made: dict[str, list[int]] = {}
    failures: list[str] = []
    for mode, forward, settings in _modes(job, runner, report):
        try:
            _use(runner, forward, settings)
            made[mode] = []
            for batch in sizes.batches:
                seconds, tokens = driver.decode(batch, sizes.prompt_tokens)
                made[mode] += tokens
                moved = _bytes_moved(runner.model_config, runner.dtype.itemsize, batch, sizes.prompt_tokens + STEPS)
                report["steps"].append(
                    {
                        "mode": mode,
                        "batch": batch,
                        "step_ms": round(seconds * 1e3, 3),
                        "tokens_per_s": round(batch / seconds, 1),
                        "share_of_bandwidth": round(moved / bandwidth / seconds, 3),
                    }
                )
            report["launches"][mode] = driver.launches()
        except Exception as error:  # noqa: BLE001 - raised with the others after all modes
            failures.append(f"{mode}: {type(error).__name__}: {error}")
    report["tokens_as_eager"] = {
        mode: sum(a == b for a, b in zip(tokens, made["eager"], strict=True)) / len(tokens)
        for mode, tokens in made.items()
        if "eager" in made and len(tokens) == len(made["eager"])
    }
    if not failures:
        report["launch_overhead"] = _launch_overhead(job.device, report)
        failures += _other_tokens(made, compiled=job.compile)
    if failures:
        raise AssertionError("\n".join(failures))


def _make_runner(job: Job, sizes: Sizes, report: Report) -> RandomRunner:
    """A runner whose model has as many layers as fit in half of the device's memory."""
    shape = dict(LLAMA_8B if job.on_gpu else TINY_CPU)
    if job.on_gpu:
        free, _ = torch.cuda.mem_get_info()
        attention = 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"]) * shape["head_dim"]
        layer_bytes = 2 * (attention + 3 * shape["intermediate_size"]) * shape["hidden_size"]
        shape["num_hidden_layers"] = max(1, min(shape["num_hidden_layers"], free // 2 // layer_bytes))
    folder = job.folder / "large"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(llama_config(shape) | {"torch_dtype": sizes.dtype}))
    model = load_model_config(folder)
    report["model"] = shape | {"dtype": sizes.dtype, "layers_of_the_whole": LLAMA_8B["num_hidden_layers"]}
    most = max(sizes.batches)
    config = EngineConfig(
        model=str(folder),
        device=job.device,
        dtype=sizes.dtype,
        max_model_len=sizes.max_model_len,
        max_num_seqs=most,
        max_num_batched_tokens=most * sizes.prompt_tokens,
        cudagraph_capture_sizes=sizes.batches,
        cache_dir=job.cache,
    )
    runner = RandomRunner(
        resolve(config, model, device=job.device, executor="local"),
        model,
        single_rank_group(torch.device("cuda:0" if job.on_gpu else "cpu")),
        ranks_on_host=1,
    )
    runner.load_model()
    runner.allocate(most * -(-sizes.max_model_len // config.block_size))
    return runner


def _modes(job: Job, runner: RandomRunner, report: Report) -> list[tuple[str, Any, CompileSettings]]:
    """The name, the forward and the compile settings of each mode. A CPU captures graphs of a compiled model only."""
    eager = ("eager", runner.model, EAGER)
    if not job.compile:
        full = ("FULL", runner.model, replace(EAGER, graph_mode=GraphMode.FULL))
        return [eager, full] if job.on_gpu else [eager]
    forward, compiled, settings = runner.compile()
    report["compile"] = {"seconds": round(compiled.seconds, 1), "distinct_pieces": compiled.distinct_subgraphs}
    modes = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)
    return [eager, *((mode.value, forward, replace(settings, graph_mode=mode)) for mode in modes)]


def _use(runner: ModelRunner, forward: Any, settings: CompileSettings) -> None:
    """Make the runner use ``forward`` and its graphs, captured before a step is timed."""
    runner.graphs.discard()
    if warning := runner.use(forward, settings):
        raise AssertionError(warning)
    runner.graphs.warm_up()
    runner.graphs.capture()


def _other_tokens(made: dict[str, list[int]], *, compiled: bool) -> list[str]:
    """A line for each mode whose tokens differ from another mode's of the same code; compiled and eager code differ."""
    same = {mode: tokens for mode, tokens in made.items() if not (compiled and mode == "eager")}
    (first, wanted), *others = same.items()
    return [f"the tokens of {mode} differ from those of {first}" for mode, tokens in others if tokens != wanted]


class Driver:
    """Runs batches of decoding requests on a runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._steps = itertools.count(1)
        self._requests = itertools.count()
        self._live: tuple[int, ...] = ()

    def decode(self, batch: int, prompt_tokens: int) -> tuple[float, list[int]]:
        """Median seconds of a decode step of ``batch`` requests, and all sampled tokens."""
        noise = random.Random(batch)
        each = -(-(prompt_tokens + STEPS + 2) // self._runner.config.block_size)
        greedy = SamplingParams(max_tokens=STEPS + 2, temperature=0.0, ignore_eos=True, seed=0)
        new: list[NewRequest] = []
        scheduled: list[ScheduledRequest] = []
        for number, req_id in enumerate(itertools.islice(self._requests, batch)):
            prompt = tuple(noise.randrange(3, 1000) for _ in range(prompt_tokens))
            new.append(NewRequest(req_id, prompt, prompt_tokens, greedy))
            blocks = tuple(range(number * each, (number + 1) * each))
            scheduled.append(ScheduledRequest(req_id, prompt_tokens, blocks))
        tokens = self._run(StepPlan(next(self._steps), tuple(scheduled), tuple(new), self._live))
        self._live = tuple(request.req_id for request in new)
        times: list[float] = []
        for _ in range(STEPS):
            started = time.perf_counter()
            tokens += self.step()
            times.append(time.perf_counter() - started)
        return statistics.median(times[3:]), tokens

    def step(self) -> list[int]:
        """Decode one token of every request."""
        return self._run(StepPlan(next(self._steps), tuple(ScheduledRequest(req, 1) for req in self._live)))

    def _run(self, plan: StepPlan) -> list[int]:
        result = self._runner.execute(plan)
        if wrong := [token.error for token in result.tokens if token.error]:
            raise AssertionError(f"step {plan.step_id}: {wrong[0]}")
        return [token.token_id for token in result.tokens]

    def launches(self) -> dict[str, int]:
        """Kernels, graphs, copies and fills that one decode step of the last batch launches; on the CPU, its ops."""
        on_gpu = self._runner.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
            self.step()
        names = Counter(event.name for event in profiled.events() or ())
        if not on_gpu:
            return {"ops": sum(count for name, count in names.items() if name.startswith(("aten::", "lockstep::")))}
        kinds = {"kernels": "LaunchKernel", "graphs": "GraphLaunch", "copies": "Memcpy", "fills": "Memset"}
        asked = {name: count for name, count in names.items() if name.startswith("cu")}
        return {kind: sum(count for name, count in asked.items() if part in name) for kind, part in kinds.items()}


def _bytes_moved(model: ModelConfig, itemsize: int, batch: int, context: int) -> int:
    """Bytes that a decode step has to read: every weight but the input embedding once, and the keys and values."""
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim * model.hidden_size
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    cached = 2 * batch * context * model.num_kv_heads * model.head_dim
    return (model.num_layers * (layer + cached) + model.vocab_size * model.hidden_size) * itemsize


def _memory_bandwidth(device: str) -> float:
    """Bytes per second: on a GPU the maximum of reading and copying 2 GiB, by the device's clock."""
    if device == "cpu":
        return read_bandwidth(device, repeats=1)
    source = torch.empty(2**31, dtype=torch.uint8, device=device).random_().view(torch.float32)
    target = torch.empty_like(source)
    calls: list[tuple[Callable[[], Any], int]] = [(source.sum, 1), (lambda: target.copy_(source), 2)]
    return max(times * source.nbytes / median_milliseconds(call) * 1e3 for call, times in calls)


def _launch_overhead(device: str, report: Report) -> Report:
    """Launches of an eager step times the cost of one, and the time that a FULL graph saves at the smallest batch."""
    seconds = _launch_seconds(device)
    launches = {mode: sum(counts.values()) for mode, counts in report["launches"].items()}
    batch = min(row["batch"] for row in report["steps"])
    step_ms = {row["mode"]: row["step_ms"] for row in report["steps"] if row["batch"] == batch}
    return {
        "example": LAUNCH_EXAMPLE,
        "launch_us": round(seconds * 1e6, 2),
        "launches_per_step": launches,
        "predicted_eager_launch_ms": round(launches["eager"] * seconds * 1e3, 3),
        "step_ms": step_ms,
        "saved_by_full_ms": round(step_ms["eager"] - step_ms["FULL"], 3) if "FULL" in step_ms else None,
    }


def _launch_seconds(device: str, launches: int = 500) -> float:
    """Seconds of the host to launch one small kernel; on the CPU, to run one small op."""
    x = torch.zeros(1, device=device)
    times: list[float] = []
    for _ in range(7):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(launches):
            x.add_(1.0)
        times.append((time.perf_counter() - started) / launches)
    return statistics.median(times)
