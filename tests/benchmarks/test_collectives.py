"""The benchmark of the collectives: its rows and its arguments."""

from __future__ import annotations

import pytest

from benchmarks.collectives import bench_collectives


@pytest.mark.slow
def test_rows_of_the_benchmark() -> None:
    rows = bench_collectives(tp_size=2, sizes=(2048, 16384), repeats=20)
    assert [(row["bytes"], row["backend"]) for row in rows] == [
        (nbytes, backend) for nbytes in (2048, 16384) for backend in ("shm", "gloo", "gloo-ordered")
    ]
    for row in rows:
        assert {"op": "all_reduce", "ranks": 2}.items() <= row.items()
        assert row["microseconds"] > 0
        assert (row["backend"] == "shm") == ("times_faster_than_gloo" in row)


def test_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="two ranks"):
        bench_collectives(tp_size=1)
