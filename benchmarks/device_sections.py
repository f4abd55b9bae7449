"""The sections of ``device_check.py`` that check results, kernels and greedy tokens, and the kernels' rooflines.

A section fills a report and raises if a check fails. ``device_decode.py`` has the section of decode steps.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_checks import CHECKS
from benchmarks.ops import bench_kernels
from benchmarks.random_model import write_checkpoint
from launch.llm import LLM
from runtime.common.sampling_params import SamplingParams

Report = dict[str, Any]
"""The results of a section; kept if the section fails later."""


@dataclass(frozen=True)
class Job:
    """The settings of one section.

    Attributes:
        device: "cuda" or "cpu".
        folder: for its files.
        compile: whether to compile; if not, PIECEWISE is left out.
    """

    device: str
    folder: Path
    compile: bool

    @property
    def cache(self) -> str:
        """The folder of compiled code that all sections share."""
        return str(self.folder.parent / "cache")

    @property
    def on_gpu(self) -> bool:
        """Whether the sizes are those of a real model."""
        return self.device == "cuda"


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
    report["largest_error"] = errors = dict[str, float]()
    report["cases"], failures = 0, list[str]()
    dtypes = (torch.bfloat16, torch.float32, torch.float16) if job.on_gpu else (torch.float32,)
    for dtype, (name, sizes) in itertools.product(dtypes, KERNELS if job.on_gpu else SMALL_KERNELS):
        torch.manual_seed(report["cases"])
        report["cases"] += 1
        key = f"{name} {str(dtype).removeprefix('torch.')}"
        try:
            errors[key] = max(errors.get(key, 0.0), CHECKS[name](job.device, dtype, **sizes))
        except Exception as error:  # noqa: BLE001 - raised with the others after all checks
            failures.append(f"{key} {sizes}: {type(error).__name__}: {error}")
    if failures:
        raise AssertionError("\n".join(failures))


def rooflines(job: Job, report: Report) -> None:
    """Every kernel's share of the memory bandwidth or the matrix rate."""
    if job.on_gpu:
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
    elif job.on_gpu:
        modes["FULL"] = {"cudagraph_mode": "FULL", "compile_mode": "NONE"}
    folder = _tiny_checkpoint(job)
    _compare({mode: _generate(job, folder, report, mode, **settings) for mode, settings in modes.items()}, report)


def tensor_parallel(job: Job, report: Report) -> None:
    """Two ranks generate the tokens of one rank. On a machine with one GPU, both ranks use it."""
    folder = _tiny_checkpoint(job)
    found = {
        f"TP {size}": _generate(
            job, folder, report, f"TP {size}", enforce_eager=True, tensor_parallel_size=size, collectives="gloo"
        )
        for size in (1, 2)
    }
    _compare(found, report)


def _tiny_checkpoint(job: Job) -> Path:
    return write_checkpoint(job.folder / "tiny", TINY if job.on_gpu else TINY_CPU)


def _generate(job: Job, folder: Path, report: Report, name: str, **settings: Any) -> list[list[int]]:
    """Tokens of prompts of different lengths that start together, so that steps of every kind occur."""
    lengths = random.Random(0)
    prompts = [[lengths.randrange(3, 1000) for _ in range(length)] for length in (1, 40, 7, 130, 16, 33, 2)]
    params = [SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True) for new in (24, 20, 16, 12, 24, 8, 20)]
    started = time.perf_counter()
    fixed: dict[str, Any] = {
        "device": job.device, "dtype": "float32", "distributed_executor_backend": "local", "max_num_seqs": 8,
        "max_num_batched_tokens": 64, "max_model_len": 256, "kv_cache_memory": 64 * 2**20,
        "cudagraph_capture_sizes": (1, 2, 4, 8, 64), "cache_dir": job.cache,
    }  # fmt: skip
    with LLM(str(folder), progress=False, **fixed | settings) as llm:
        report.setdefault("startup_s", {})[name] = round(time.perf_counter() - started, 2)
        return [output.token_ids for output in llm.generate(prompts, params)]


def _compare(found: Mapping[str, Sequence[Sequence[int]]], report: Report) -> None:
    """Raise unless all runs generated the same tokens."""
    (first, wanted), *others = found.items()
    report["compared"] = list(found)
    report["tokens"] = sum(map(len, wanted))
    for name, got in others:
        for number, (a, b) in enumerate(zip(wanted, got, strict=True)):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            if at is not None:
                raise AssertionError(f"{name} differs from {first} at token {at} of prompt {number}: {b[at]}, {a[at]}")
