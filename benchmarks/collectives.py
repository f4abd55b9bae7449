"""Benchmark of collectives on CPU: microseconds of an all-reduce through shared memory and through gloo.

"gloo" is torch's own all-reduce; "gloo-ordered" is the fallback of this project, which has the bits of shared memory.
The three alternate, size by size and round by round, so that load on the machine affects all of them; ``microseconds``
is the median over all calls of all rounds, measured on rank 0.

    python -m benchmarks.collectives            # JSON lines
    lockstep bench collectives --json           # the same
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.collectives.gloo import GlooCollectives
from parallel.collectives.shared_memory import open_shared_memory
from parallel.collectives.store import open_store

SIZES = (2048, 16384, 262144)
ROUNDS = 9
TIMEOUT = 60.0


def bench_collectives(
    tp_size: int = 2, sizes: Sequence[int] = SIZES, repeats: int = 100, library_dir: str = ""
) -> list[dict[str, Any]]:
    """Measure a bf16 all-reduce between ``tp_size`` processes, which this function starts and ends.

    Args:
        tp_size: the number of ranks, 2 or more.
        sizes: of the messages, in bytes.
        repeats: calls per round and size.
        library_dir: where compiled C libraries are cached; default: a temporary folder.

    Returns:
        A row ``{"op", "bytes", "ranks", "backend", "microseconds"}`` per size and backend; those of "shm" also have
        ``"times_faster_than_gloo"``.

    Raises:
        ValueError: fewer than two ranks.
        RuntimeError: a rank failed; the message is its standard error.
    """
    if tp_size < 2:
        raise ValueError(f"a collective needs two ranks; tp_size is {tp_size}")
    with tempfile.TemporaryDirectory(prefix="bench-collectives-") as folder:
        job = {
            "size": tp_size, "sizes": list(sizes), "repeats": repeats, "store": f"file://{folder}/store",
            "run_id": f"{os.getpid()}-{secrets.token_hex(4)}", "library_dir": library_dir or folder,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.collectives"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [*command, json.dumps({**job, "rank": rank})],
                env=environment,
                cwd=Path(__file__).resolve().parents[1],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(tp_size)
        ]
        try:
            answers = [rank.communicate(timeout=TIMEOUT * 5) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for number, rank in enumerate(ranks):
        if rank.returncode:
            raise RuntimeError(f"rank {number} ended with {rank.returncode}:\n{answers[number][1]}")
    return json.loads(answers[0][0])


def main() -> None:
    """Print a JSON line per row."""
    for row in bench_collectives():
        print(json.dumps(row))


def _run_rank(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure on one rank; only the rows of rank 0 are used."""
    rank, size = job["rank"], job["size"]
    shared = open_shared_memory(
        "bench", rank, size, run_id=job["run_id"], library_dir=job["library_dir"], timeout=TIMEOUT
    )
    store = open_store(job["store"], rank, size, prefix="ours", same_host=True, timeout=TIMEOUT)
    ordered = GlooCollectives("bench", rank, size, store, TIMEOUT, same_host=True)
    dist.init_process_group("gloo", init_method=f"{job['store']}-torch", rank=rank, world_size=size)

    def torch_gloo(x: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        dist.all_reduce(result)
        return result

    backends = {"shm": shared.all_reduce, "gloo": torch_gloo, "gloo-ordered": ordered.all_reduce}
    rows: list[dict[str, Any]] = []
    for nbytes in job["sizes"]:
        x = torch.randn(nbytes // 2).to(torch.bfloat16)
        times: dict[str, list[float]] = {name: [] for name in backends}
        for _ in range(ROUNDS):
            for name, all_reduce in backends.items():
                times[name] += _seconds(all_reduce, x, job["repeats"], shared.barrier)
        found = {name: statistics.median(values) * 1e6 for name, values in times.items()}
        for name, microseconds in found.items():
            row = {"op": "all_reduce", "bytes": nbytes, "ranks": size, "backend": name}
            row["microseconds"] = round(microseconds, 2)
            if name == "shm":
                row["times_faster_than_gloo"] = round(found["gloo"] / microseconds, 1)
            rows.append(row)
    shared.barrier()
    dist.destroy_process_group()
    ordered.close()
    shared.close()
    return rows


def _seconds(
    all_reduce: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, repeats: int, barrier: Callable[[], None]
) -> list[float]:
    """Seconds of each of ``repeats`` calls after a barrier."""
    all_reduce(x)
    barrier()
    times = [time.perf_counter()]
    for _ in range(repeats):
        all_reduce(x)
        times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(_run_rank(json.loads(sys.argv[1]))))
    else:
        main()
