"""What ``lockstep bench ops`` prints: the cost of a call, and kernels beside what their card could do."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ops import Work, bench_calls, bench_kernels


def test_direct_registration_is_cheaper_to_call() -> None:
    cost = {row["registration"]: row["microseconds"] for row in bench_calls(calls=100)}
    assert set(cost) == {"direct", "custom_op", "none"}
    assert cost["none"] < cost["direct"] < cost["custom_op"]


def test_shares_of_the_ceilings() -> None:
    def run() -> None:
        pass

    moves = Work("a", "", run, nbytes=1000, flops=10).row(2.0, bandwidth=1000.0, rate=1000.0)
    assert (moves["bound"], moves["share"]) == ("memory", 0.5)
    computes = Work("a", "", run, nbytes=10, flops=3000).row(4.0, bandwidth=1000.0, rate=1000.0)
    assert (computes["bound"], computes["share"]) == ("matrix", 0.75)


def test_every_kernel_has_a_row() -> None:
    rows = bench_kernels(
        "cpu", torch.bfloat16, measure=lambda run: 1.0, tokens=[3], batches={"one": [(20, 1)]}, copied=1000, matrix=8
    )
    assert [row.get("op", row["bench"]) for row in rows] == [
        "ceiling", "silu_and_mul", "rms_norm", "fused_add_rms_norm", "rotary_embedding", "kv_cache_write",
        "paged_attention",
    ]  # fmt: skip
    assert rows[0]["gb_per_s"] == pytest.approx(2e6 / 1e9, abs=0.1)
    assert rows[1]["microseconds"] == 1000.0
