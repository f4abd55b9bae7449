"""The rank harness itself: results in order, tracebacks shown, nothing that hangs."""

from __future__ import annotations

import time

import pytest
import torch

from parallel.group import TensorParallelGroup
from tests.dist.ranks import RanksFailed, run_ranks, try_ranks


def place(group: TensorParallelGroup, *args: object) -> list[object]:
    return [group.rank, group.size, *args]


def fail_on_one(group: TensorParallelGroup) -> None:
    if group.rank == 1:
        raise ArithmeticError("on purpose")
    group.all_reduce(torch.ones(1))


def hang_on_one(group: TensorParallelGroup) -> str:
    while group.rank == 1:
        time.sleep(0.05)
    return "done"


def test_results_come_in_rank_order_with_the_arguments() -> None:
    assert run_ranks(place, 3, "a", [1.5]) == [[rank, 3, "a", [1.5]] for rank in range(3)]
    assert run_ranks("tests.dist.test_ranks:place", 1) == [[0, 1]]


def test_a_failure_shows_the_traceback_of_its_rank() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_on_one, 2)
    text = str(caught.value)
    assert "--- rank 1 of 2 ---" in text
    assert 'raise ArithmeticError("on purpose")' in text
    assert "rank 1 has closed the group" in text  # what the other rank saw
    assert run_ranks(place, 2) == [[0, 2], [1, 2]]


def test_a_hang_is_killed() -> None:
    first, second = try_ranks(hang_on_one, 2, timeout=4.0)
    assert first.value == "done"
    assert "no answer within 4 s" in second.error
