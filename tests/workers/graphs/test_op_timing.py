"""Seconds within ops: a sum over the ops of one forward pass, whose result stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.group import single_rank_group
from runtime.common.config import GraphMode
from tests.checkpoints import tiny_checkpoint
from tests.workers.graphs.rank import Rank, run_model
from tests.workers.graphs.split_model import split_model
from workers.graphs import cpu_replay, op_timing
from workers.graphs.op_timing import op_seconds

CPU = torch.device("cpu")


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that advances by one second at every reading."""
    read: list[float] = []

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            read.append(float(len(read)))
            return read[-1]

    monkeypatch.setattr(cpu_replay, "time", Clock)
    monkeypatch.setattr(op_timing, "time", Clock)
    return read


@pytest.mark.parametrize(("forward", "mode"), [(run_model, GraphMode.NONE), (split_model, GraphMode.FULL)])
def test_each_op_counts_once(forward: Any, mode: GraphMode, ticks: list[float]) -> None:
    rank = Rank(tiny_checkpoint("llama"), single_rank_group(CPU), "float32", mode, forward=forward)
    rank.graphs.capture()
    plan = rank.plan([(0, 1)])
    rank.buffers.update_requests(plan)
    metadata, choice = rank.buffers.fill(plan, 1).metadata, rank.graphs.choose(1, 1, 1)
    expected = rank.graphs.run(choice, metadata).clone()
    assert not ticks, "a step reads no clock"
    seconds = rank.graphs.op_seconds(choice, metadata)
    layers = len(rank.model.attention_layers)
    # The ops of a compiled model are its subgraphs and its splitting ops.
    if mode is GraphMode.FULL:
        assert seconds == sum(len(stage.ops) or 1 for stage in split_model(rank.model).stages)
    else:
        assert seconds > 10 * layers
    assert seconds == len(ticks) / 2
    assert torch.equal(rank.graphs.run(choice, metadata), expected)


def test_a_compiled_function_is_one_op(ticks: list[float]) -> None:
    tokens = torch.arange(3)
    assert op_seconds(lambda ids, positions: ids + positions, tokens, tokens, full=False, direct={}) == 1
