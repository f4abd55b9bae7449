"""The sections of ``device_check.py``: each fills a report, and raises where something is not as it has to be."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernel_checks import CHECKS
from benchmarks.ops import bench_kernels
from benchmarks.random_model import RandomRunner, llama_config, weight_bytes, write_checkpoint
from benchmarks.roofline import read_bandwidth
from launch.llm import LLM
from parallel.group import single_rank_group
from runtime.config import EngineConfig, SamplingParams, resolve
from runtime.model_config import ModelConfig, load_model_config
from runtime.protocol import NewRequest, ScheduledRequest, StepPlan
from workers.compile.levels import CompileMode, CompileSettings
from workers.runner import ModelRunner

Report = dict[str, Any]
"""What a section found; kept also if the section fails later."""


@dataclass(frozen=True)
class Job:
    """Where a section works.

    Attributes:
        device: "cuda" or "cpu".
        folder: for its files.
        compile: whether to compile; without it there are no pieces, hence no PIECEWISE.
    """

    device: str
    folder: Path
    compile: bool


# ---- every kernel against its reference

MIXED = [(700, 1), (0, 300), (15, 1), (16, 1), (0, 1), (100, 33), (4000, 1), (64, 2)]

KERNELS: list[tuple[str, dict[str, Any]]] = [
    *(("silu_and_mul", {"rows": rows, "width": 14336}) for rows in (1, 257)),
    *(("rms_norm", {"rows": rows, "width": 4096}) for rows in (1, 257)),
    ("rms_norm", {"rows": 33, "width": 128, "heads": 40}),
    *(("fused_add_rms_norm", {"rows": rows, "width": width}) for rows, width in ((1, 8192), (257, 576))),
    *(("rotary_embedding", {"rows": 257, "heads": 32, "kv_heads": 8, "head_dim": size}) for size in (128, 80)),
    *(("kv_cache_write", {"rows": 257, "kv_heads": 3, "head_dim": size, "block_size": 16}) for size in (64, 128)),
    *(
        (
            check,
            {"requests": MIXED, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
            | {"padded_rows": 5}
            | ({"window": window} if check == "paged_attention" else {}),
        )
        for check, heads, kv_heads, head_dim, block_size, window in (
            ("paged_attention", 32, 8, 128, 16, 0),
            ("paged_attention", 9, 3, 64, 32, 7),
            ("paged_attention", 8, 1, 96, 16, 1000),
            ("paged_attention", 4, 4, 256, 16, 0),
            ("company", 32, 8, 128, 16, 0),
        )
    ),
]

SMALL_KERNELS: list[tuple[str, dict[str, Any]]] = [
    ("silu_and_mul", {"rows": 3, "width": 250}),
    ("fused_add_rms_norm", {"rows": 3, "width": 96}),
    (
        "paged_attention",
        {"requests": [(20, 1), (3, 5)], "heads": 6, "kv_heads": 2, "head_dim": 64, "block_size": 16},
    ),
]
"""For the CPU, where Triton interprets."""


def kernels(job: Job, report: Report) -> None:
    """Every kernel in every dtype. All cases run; the failures are raised together."""
    on_gpu = job.device == "cuda"
    report["largest_error"] = errors = dict[str, float]()
    report["cases"], failures = 0, list[str]()
    dtypes = (torch.bfloat16, torch.float32, torch.float16) if on_gpu else (torch.float32,)
    for dtype, (name, sizes) in itertools.product(dtypes, KERNELS if on_gpu else SMALL_KERNELS):
        torch.manual_seed(report["cases"])
        report["cases"] += 1
        key = f"{name} {str(dtype).removeprefix('torch.')}"
        try:
            errors[key] = max(errors.get(key, 0.0), CHECKS[name](job.device, dtype, **sizes))
        except Exception as error:
            failures.append(f"{key} {sizes}: {type(error).__name__}: {error}")
    if failures:
        raise AssertionError("\n".join(failures))


def rooflines(job: Job, report: Report) -> None:
    """Every kernel against memory bandwidth or matrix rate."""
    if job.device == "cuda":
        report["rows"] = bench_kernels()
    else:
        report["rows"] = bench_kernels(
            "cpu", torch.float32, measure=lambda run: 1.0, tokens=[4], batches={"one": [(20, 1)]}, copied=64, matrix=8
        )


# ---- greedy tokens

TINY = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip
TINY_CPU = TINY | {"hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 2, "head_dim": 16}


def tokens(job: Job, report: Report) -> None:
    """Greedy tokens of a random model, eager and in every graph mode, through the whole engine."""
    modes: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}}
    if job.compile:
        modes |= {mode: {"cudagraph_mode": mode} for mode in ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")}
    else:
        modes["FULL"] = {"cudagraph_mode": "FULL", "compile_mode": "NONE"}
    folder = _tiny_checkpoint(job)
    _compare({mode: _generate(job, folder, report, mode, **settings) for mode, settings in modes.items()}, report)


def tensor_parallel(job: Job, report: Report) -> None:
    """Two ranks, on a machine with one GPU both on it, have the tokens of one."""
    folder = _tiny_checkpoint(job)
    found = {
        f"TP {size}": _generate(
            job, folder, report, f"TP {size}", enforce_eager=True, tensor_parallel_size=size, collectives="gloo"
        )
        for size in (1, 2)
    }
    _compare(found, report)


def _tiny_checkpoint(job: Job) -> Path:
    return write_checkpoint(job.folder / "tiny", TINY if job.device == "cuda" else TINY_CPU)


def _generate(job: Job, folder: Path, report: Report, name: str, **settings: Any) -> list[tuple[int, ...]]:
    """Tokens of prompts that start together and end apart, so that steps are of all kinds."""
    lengths = random.Random(0)
    prompts = [[lengths.randrange(3, 1000) for _ in range(length)] for length in (1, 40, 7, 130, 16, 33, 2)]
    params = [
        SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True) for new in (24, 20, 16, 12, 24, 8, 20)
    ]
    started = time.perf_counter()
    fixed: dict[str, Any] = {
        "device": job.device, "dtype": "float32", "distributed_executor_backend": "local", "max_num_seqs": 8,
        "max_num_batched_tokens": 64, "max_model_len": 256, "kv_cache_memory": 64 * 2**20,
        "cudagraph_capture_sizes": (1, 2, 4, 8, 64), "cache_dir": str(job.folder / "cache"),
    }  # fmt: skip
    with LLM(str(folder), progress=False, **fixed | settings) as llm:
        report.setdefault("startup_s", {})[name] = round(time.perf_counter() - started, 2)
        return [output.token_ids for output in llm.generate(prompts, params)]


def _compare(found: Mapping[str, Sequence[Sequence[int]]], report: Report) -> None:
    """Raise unless all ways gave the same tokens."""
    (first, wanted), *others = found.items()
    report["compared"] = list(found)
    report["tokens"] = sum(map(len, wanted))
    for name, got in others:
        for number, (a, b) in enumerate(zip(wanted, got, strict=True)):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            if at is not None:
                raise AssertionError(f"{name} differs from {first} at token {at} of prompt {number}: {b[at]}, {a[at]}")


# ---- decode steps of a large model

LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
BATCHES = (1, 8, 64)
PROMPT_TOKENS = 128
STEPS = 20
ROW_52 = {"layers": 32, "kernels_per_layer": 15, "launch_us": 5.0, "eager_launch_ms": 2.4}
"""The example that this section repeats with measured numbers."""


def decode(job: Job, report: Report) -> None:
    """Time, memory bandwidth and launches of decode steps: eager, compiled, and in both kinds of graphs."""
    runner = _large_runner(job, report)
    eager = CompileSettings(0, CompileMode.NONE, "NONE", ())
    ways: dict[str, tuple[Any, CompileSettings]] = {"eager": (runner.model, eager)}
    ways["FULL"] = (runner.model, replace(eager, graph_mode="FULL"))
    if job.compile:
        forward, compiled, settings = runner.compile()
        report["compile"] = {"seconds": round(compiled.seconds, 1), "distinct_pieces": compiled.distinct_pieces}
        ways |= {mode: (forward, replace(settings, graph_mode=mode)) for mode in ("NONE", "PIECEWISE", "FULL")}
    bandwidth = read_bandwidth(job.device) if job.device == "cuda" else 1e10
    report["memory_bandwidth_gb_per_s"] = round(bandwidth / 1e9, 1)
    report["steps"], report["launches"] = list[Report](), dict[str, Any]()
    made: dict[str, dict[int, list[int]]] = {}
    drive = _Driver(runner)
    for mode, (forward, settings) in ways.items():
        if warning := runner.use(forward, settings):
            raise AssertionError(f"{mode}: {warning}")
        runner.graphs.warm_up()
        runner.graphs.capture()
        made[mode] = {}
        for batch in BATCHES if job.device == "cuda" else (1, 3):
            seconds, made[mode][batch] = drive.decode(batch, PROMPT_TOKENS if job.device == "cuda" else 5)
            report["steps"].append(_step_row(runner, mode, batch, seconds, bandwidth))
        report["launches"][mode] = drive.launches()
    report["row_52"] = _launch_overhead(job, report)
    # The same code on the same sizes has to give the same bits, whatever holds it; eager is other code.
    same = {mode: tokens for mode, tokens in made.items() if mode != "eager"}
    if any(tokens != next(iter(same.values())) for tokens in same.values()):
        raise AssertionError(f"the modes {', '.join(same)} made different tokens")


def _large_runner(job: Job, report: Report) -> RandomRunner:
    """The model on the device, with as many layers as fit half of its memory."""
    sizes = dict(LARGE if job.device == "cuda" else TINY_CPU)
    if job.device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        layer = 2 * (2 * (32 + 8) * 128 + 3 * 14336) * 4096
        sizes["num_hidden_layers"] = max(1, min(sizes["num_hidden_layers"], int(free / 2) // layer))
    folder = job.folder / "large"
    folder.mkdir(parents=True)
    dtype = "bfloat16" if job.device == "cuda" else "float32"
    (folder / "config.json").write_text(json.dumps(llama_config(sizes) | {"torch_dtype": dtype}))
    model = load_model_config(folder)
    report |= {"layers": model.num_layers, "layers_asked": LARGE["num_hidden_layers"], "dtype": dtype}
    batches = BATCHES if job.device == "cuda" else (1, 3)
    config = EngineConfig(
        model=str(folder), device=job.device, dtype=dtype, max_model_len=256, max_num_seqs=max(batches),
        max_num_batched_tokens=max(batches) * PROMPT_TOKENS, cudagraph_capture_sizes=batches,
        cache_dir=str(job.folder / "cache"),
    )  # fmt: skip
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    runner = RandomRunner(
        resolve(config, model, device=job.device, executor="local"),
        model, single_rank_group(device), ranks_on_host=1, faults=None,
    )  # fmt: skip
    runner.load_model()
    runner.allocate(max(batches) * -(-256 // config.block_size))
    return runner


class _Driver:
    """Feeds a runner batches of requests that all decode together."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._step = itertools.count(1)
        self._request = itertools.count()
        self._live: tuple[int, ...] = ()

    def decode(self, batch: int, prompt_tokens: int) -> tuple[float, list[int]]:
        """Median seconds of a decode step, and all tokens, of ``batch`` requests after their prompts."""
        noise = random.Random(batch)
        runner, size = self._runner, self._runner.config.block_size
        per_request = -(-(prompt_tokens + STEPS + 8) // size)
        ids = tuple(itertools.islice(self._request, batch))
        greedy = SamplingParams(max_tokens=STEPS + 8, temperature=0.0, ignore_eos=True, seed=0)
        new = [
            NewRequest(req, tuple(noise.randrange(3, 1000) for _ in range(prompt_tokens)), prompt_tokens, greedy)
            for req in ids
        ]
        blocks = (tuple(range(n * per_request, (n + 1) * per_request)) for n in range(batch))
        scheduled = tuple(ScheduledRequest(req, prompt_tokens, own) for req, own in zip(ids, blocks, strict=True))
        made = self._run(StepPlan(next(self._step), scheduled, tuple(new), self._live))
        self._live = ids
        times: list[float] = []
        for _ in range(STEPS):
            started = time.perf_counter()
            made += self.step()
            times.append(time.perf_counter() - started)
        del runner
        return statistics.median(times[3:]), made

    def step(self) -> list[int]:
        """One more token for every request."""
        return self._run(StepPlan(next(self._step), tuple(ScheduledRequest(req, 1) for req in self._live)))

    def _run(self, plan: StepPlan) -> list[int]:
        result = self._runner.execute(plan)
        if wrong := [token.error for token in result.tokens if token.error]:
            raise AssertionError(f"step {plan.step_id}: {wrong[0]}")
        return [token.token_id for token in result.tokens]

    def launches(self) -> dict[str, int]:
        """What the host asks of the device in one decode step of the last batch; on the CPU, ops."""
        on_gpu = self._runner.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as profiled:
            self.step()
        names = Counter(event.name for event in profiled.events() or ())
        if not on_gpu:
            return {"ops": sum(count for name, count in names.items() if name.startswith(("aten::", "lockstep::")))}
        kinds = {"kernels": "LaunchKernel", "graphs": "GraphLaunch", "copies": "Memcpy", "fills": "Memset"}
        asked = {name: count for name, count in names.items() if name.startswith(("cuda", "cu"))}
        return {kind: sum(count for name, count in asked.items() if part in name) for kind, part in kinds.items()}


def _step_row(runner: ModelRunner, mode: str, batch: int, seconds: float, bandwidth: float) -> Report:
    moved = weight_bytes(runner.model_config, runner.dtype.itemsize)
    return {
        "mode": mode,
        "batch": batch,
        "step_ms": round(seconds * 1e3, 3),
        "tokens_per_s": round(batch / seconds, 1),
        "share_of_bandwidth": round(moved / bandwidth / seconds, 3),
    }


def _launch_overhead(job: Job, report: Report) -> Report:
    """Launches of an eager step times the cost of one, beside what a graph really saves."""
    cost = _launch_seconds(job.device)
    times = {(row["mode"], row["batch"]): row["step_ms"] for row in report["steps"]}
    batch = min(batch for _, batch in times)
    launches = sum(report["launches"]["eager"].values())
    return {
        "example": ROW_52,
        "launches_per_eager_step": launches,
        "launches_per_full_step": sum(report["launches"]["FULL"].values()),
        "launch_us": round(cost * 1e6, 2),
        "predicted_launch_ms": round(launches * cost * 1e3, 3),
        "eager_step_ms": times["eager", batch],
        "full_step_ms": times["FULL", batch],
        "saved_ms": round(times["eager", batch] - times["FULL", batch], 3),
    }


def _launch_seconds(device: str, launches: int = 500) -> float:
    """Seconds that the host takes to launch one tiny kernel (on the CPU: to call one tiny op)."""
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


SECTIONS: dict[str, Callable[[Job, Report], None]] = {
    "kernels": kernels,
    "tokens": tokens,
    "tensor_parallel": tensor_parallel,
    "decode": decode,
    "rooflines": rooflines,
}
