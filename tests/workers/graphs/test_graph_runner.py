"""The graph runner: what is captured in which order, and what a step is run as (bits: the other tests here)."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from parallel.group import single_rank_group
from runtime.common.config import GraphMode
from tests.checkpoints import tiny_checkpoint
from tests.workers.graphs.rank import SIZES, STEPS, Rank
from workers.graphs.dispatcher import Captured, Dispatch

CPU = torch.device("cpu")
FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE


def rank(mode: GraphMode, **settings: Any) -> Rank:
    return Rank(tiny_checkpoint("llama"), single_rank_group(CPU), "float32", mode, **settings)


@pytest.mark.parametrize(
    ("mode", "captured"),
    [
        (NONE, Captured()),
        (PIECEWISE, Captured(piecewise=SIZES.mixed)),
        (FULL, Captured(full=SIZES.decode)),
        (GraphMode.FULL_DECODE_ONLY, Captured(full=SIZES.decode)),
        (GraphMode.FULL_AND_PIECEWISE, Captured(SIZES.decode, SIZES.mixed)),
    ],
)
def test_each_mode_captures_its_halves_largest_first(mode: GraphMode, captured: Captured) -> None:
    runner = rank(mode).graphs
    assert runner.captured == Captured(), "nothing before capture"
    progress: list[tuple[int, int]] = []
    keys = runner.capture(lambda *numbers: progress.append(numbers))
    assert runner.captured == captured
    assert keys == runner.keys
    assert set(keys) == {Dispatch(FULL, n) for n in captured.full} | {
        Dispatch(PIECEWISE, n) for n in captured.piecewise
    }
    assert [key.size for key in keys] == sorted((key.size for key in keys), reverse=True)
    assert progress == [(n, len(keys)) for n in range(1, len(keys) + 1)]
    assert gc.isenabled()


def test_steps_before_capture_and_after_discarding_run_as_none() -> None:
    first = rank(GraphMode.FULL_AND_PIECEWISE)
    assert first.step(STEPS[0]).choice == Dispatch(NONE, 15)
    first.graphs.capture()
    assert first.step(STEPS[1]).choice == Dispatch(FULL, 4)
    first.graphs.discard()
    assert first.step(STEPS[1]).choice == Dispatch(NONE, 3)
    first.graphs.capture()
    assert first.step(STEPS[1]).choice == Dispatch(FULL, 4)


def test_padding_writes_no_key_and_its_rows_are_no_request() -> None:
    """Of a cache full of NaN only the slots of real tokens are written, and no NaN reaches a result."""
    padded = rank(GraphMode.FULL_AND_PIECEWISE)
    padded.graphs.capture()
    for step in STEPS[:2]:
        outcome = padded.step(step)
        assert outcome.padding.shape[0] == 1
        assert not outcome.hidden.isnan().any()
        assert not outcome.padding.isnan().any()
    written = sum(length for step in STEPS[:2] for _, length in step)
    for cache in padded.kv_caches.values():
        slots = (~cache.isnan()).all(dim=-1).all(dim=2).all(dim=1)
        assert int(slots.sum()) == written


def test_describe_names_the_captured_sizes() -> None:
    runner = rank(GraphMode.FULL_AND_PIECEWISE).graphs
    assert runner.describe() == {"full_graphs": "", "piecewise_graphs": ""}
    runner.capture()
    assert runner.describe() == {"full_graphs": "1,2,4,8", "piecewise_graphs": "1,3,8,16"}


def test_buffers_of_another_size_are_noticed() -> None:
    one = rank(FULL)
    one.graphs.capture()
    plan = one.plan([(0, 1), (1, 1), (2, 1)])
    one.buffers.update_requests(plan)
    batch = one.buffers.fill(plan, 3)
    with pytest.raises(AssertionError, match="filled to 3 rows, the step runs with 4"):
        one.graphs.run(one.graphs.choose(3, 3, 1), batch.metadata)
