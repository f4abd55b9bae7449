"""What calling an op costs, by how it is registered; on a GPU also every kernel against what the card could do.

The calls take turns, round by round, so that a busy neighbour hits all of them. A kernel's ``share`` is of the memory
bandwidth or the matrix rate measured on the same card in the same run, whichever bounds it.

    python -m benchmarks.ops            # JSON lines
    lockstep bench ops --json           # the same
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.library import Library, custom_op

from benchmarks.kernel_checks import make_paged
from parallel.library import register_op
from workers.kernels.ops import kv_cache_write, paged_attention, rms_norm, rotary_embedding, silu_and_mul
from workers.kernels.triton_launch import triton_is_installed

CALLS = 2000
ROUNDS = 15

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 16
"""Of a Llama with eight billion parameters."""


def bench_ops(calls: int = CALLS) -> list[dict[str, Any]]:
    """Rows of op calls, then, where there is a CUDA device and Triton, rows of kernels.

    Args:
        calls: of one op in one round.
    """
    rows = bench_calls(calls)
    return rows + bench_kernels() if torch.cuda.is_available() and triton_is_installed() else rows


# ---- the cost of a call


def bench_calls(calls: int) -> list[dict[str, Any]]:
    """Microseconds to call an op that does nothing, shaped like attention: it writes an argument, returns None.

    It is registered as ours are, by ``custom_op``, and not at all: a plain Python function.
    """
    x, out = torch.empty(1, 8), torch.empty(1, 8)
    ops: dict[str, Callable[..., None]] = {
        "direct": torch.ops.lockstep_bench.nothing,
        "custom_op": _by_decorator,
        "none": _nothing,
    }
    times: dict[str, list[float]] = {name: [] for name in ops}
    with torch.inference_mode():
        for op in ops.values():
            op(x, out, "layer")
        for _ in range(ROUNDS):
            for name, op in ops.items():
                started = time.perf_counter()
                for _ in range(calls):
                    op(x, out, "layer")
                times[name].append((time.perf_counter() - started) / calls)
    found = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    return [
        {
            "bench": "op_call",
            "registration": name,
            "microseconds": round(microseconds, 3),
            "times_cheaper_than_custom_op": round(found["custom_op"] / microseconds, 2),
        }
        for name, microseconds in found.items()
    ]


# ---- kernels against the card

Measure = Callable[[Callable[[], Any]], float]
"""Milliseconds of a call."""

Requests = Sequence[tuple[int, int]]
"""Of each request the tokens cached before and the new ones."""

TOKENS = (64, 2048)

BATCHES: dict[str, Requests] = {
    "1 x 1 new, 8192 keys": [(8191, 1)],
    "8 x 1 new, 2048 keys": [(2047, 1)] * 8,
    "64 x 1 new, 1024 keys": [(1023, 1)] * 64,
    "8 x 512 new, 512 keys": [(0, 512)] * 8,
    "1 x 2048 new, 8192 keys": [(6144, 2048)],
}


def median_milliseconds(run: Callable[[], Any]) -> float:
    """By the device's events, with a cold L2 cache."""
    testing: Any = importlib.import_module("triton.testing")
    return float(testing.do_bench(run, warmup=10, rep=50, return_mode="median"))


@dataclass(frozen=True)
class Work:
    """One kernel call, and the least it has to do.

    Attributes:
        op: the op's name.
        sizes: what it is called with, for people.
        run: the call.
        nbytes: read and written, each tensor once.
        flops: of matrix products.
    """

    op: str
    sizes: str
    run: Callable[[], Any]
    nbytes: int
    flops: int = 0

    def row(self, seconds: float, bandwidth: float, rate: float) -> dict[str, Any]:
        """What it achieved, beside bytes and operations per second that the card can do."""
        by_memory, by_rate = self.nbytes / bandwidth, self.flops / rate
        return {
            "bench": "kernel",
            "op": self.op,
            "sizes": self.sizes,
            "microseconds": round(seconds * 1e6, 2),
            "gb_per_s": round(self.nbytes / seconds / 1e9, 1),
            "tflop_per_s": round(self.flops / seconds / 1e12, 1),
            "bound": "memory" if by_memory >= by_rate else "matrix",
            "share": round(max(by_memory, by_rate) / seconds, 3),
        }


def bench_kernels(
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    *,
    measure: Measure = median_milliseconds,
    tokens: Sequence[int] = TOKENS,
    batches: Mapping[str, Requests] = BATCHES,
    copied: int = 2**31,
    matrix: int = 8192,
) -> list[dict[str, Any]]:
    """Every kernel against the memory bandwidth or the matrix rate, whichever bounds it.

    Args:
        device: what to measure.
        dtype: of everything.
        measure: how long a call takes.
        tokens: of the steps in which the kernels that only move data are measured.
        batches: for attention, by what they are called.
        copied: bytes that the bandwidth is measured with.
        matrix: size of the product that the rate is measured with.
    """
    source = torch.empty(copied, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    bandwidth = 2 * copied / measure(lambda: target.copy_(source)) * 1e3
    a, b = (torch.randn(matrix, matrix, dtype=dtype, device=device) for _ in "ab")
    rate = 2 * matrix**3 / measure(lambda: a @ b) * 1e3
    ceiling = {"bench": "ceiling", "gb_per_s": round(bandwidth / 1e9, 1), "tflop_per_s": round(rate / 1e12, 1)}
    works = [work for count in tokens for work in small_work(device, dtype, count)]
    works += [attention_work(device, dtype, name, requests) for name, requests in batches.items()]
    return [ceiling, *(work.row(measure(work.run) / 1e3, bandwidth, rate) for work in works)]


def small_work(device: str, dtype: torch.dtype, rows: int) -> list[Work]:
    """The kernels that only move data, for a step of so many tokens."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    gate_up, weight = random(rows, 2 * INTERMEDIATE), random(HIDDEN)
    x, residual = random(rows, HIDDEN), random(rows, HIDDEN)
    query, key, value = random(rows, HEADS + 2 * KV_HEADS, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = random(rows, 1, HEAD_DIM).chunk(2, dim=-1)
    cache = random(-(-rows // BLOCK_SIZE), 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    slots = torch.randperm(rows, device=device)
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "silu_and_mul": (lambda: silu_and_mul.silu_and_mul_triton(gate_up), 3 * rows * INTERMEDIATE),
        "rms_norm": (lambda: rms_norm.rms_norm_triton(x, weight, 1e-5), 2 * rows * HIDDEN),
        "fused_add_rms_norm": (
            lambda: rms_norm.fused_add_rms_norm_triton(x, residual, weight, 1e-5),
            4 * rows * HIDDEN,
        ),
        "rotary_embedding": (
            lambda: rotary_embedding.rotary_embedding_triton(query, key, cos, sin),
            2 * (query.numel() + key.numel()),
        ),
        "kv_cache_write": (lambda: kv_cache_write.kv_cache_write_triton(key, value, cache, slots), 4 * key.numel()),
    }
    return [Work(name, f"{rows} tokens", run, moved * dtype.itemsize) for name, (run, moved) in calls.items()]


def attention_work(device: str, dtype: torch.dtype, name: str, requests: Requests) -> Work:
    """Attention of a batch: keys and values are read once, and every (query, key) pair is two products of a head."""
    case = make_paged(device, dtype, requests, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE)
    arguments = case.arguments(scale=HEAD_DIM**-0.5, window=0)
    keys = sum(cached + new for cached, new in requests)
    pairs = sum(new * cached + new * (new + 1) // 2 for cached, new in requests)
    return Work(
        "paged_attention",
        name,
        lambda: paged_attention.paged_attention_triton(**arguments),
        2 * (keys * KV_HEADS * HEAD_DIM + case.query.numel()) * dtype.itemsize,
        4 * pairs * HEADS * HEAD_DIM,
    )


# ---- the op whose calls are measured


def _nothing(x: torch.Tensor, out: torch.Tensor, name: str) -> None:
    """Does nothing."""


_LIBRARY = Library("lockstep_bench", "FRAGMENT")
register_op("nothing", _nothing, mutates_args=("out",), target_library=_LIBRARY, dispatch_key="CPU")
_by_decorator = custom_op("lockstep_bench::nothing_by_decorator", mutates_args=("out",))(_nothing)


def main() -> None:
    """Print a JSON line per row."""
    for row in bench_ops():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
