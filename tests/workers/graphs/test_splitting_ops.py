"""Which ops a stage calls, found without calling them."""

from __future__ import annotations

from typing import Any

import torch

from workers.attention.attention_op import attention
from workers.attention.kv_cache_update_op import kv_cache_update
from workers.graphs.splitting_ops import Input, OpCall, OpStage, Result, list_ops

ATTENTION, UPDATE = (getattr(torch.ops.lockstep, op.__name__).default for op in (attention, kv_cache_update))


def _update_and_attend(values: list[Any]) -> list[Any]:
    query, key, value, output = values
    written = UPDATE(key, value, "layer")
    ATTENTION(query, key, value, output, "layer", written)
    return [written]


def test_update_and_attention() -> None:
    """Outside of a forward context, which both ops need to run."""
    update = OpCall(UPDATE, (Input(1), Input(2), "layer"))
    attend = OpCall(ATTENTION, (Input(0), Input(1), Input(2), Input(3), "layer", Result(0)))
    assert list_ops(_update_and_attend, [None] * 4) == OpStage((update, attend), (0,))


def test_known_inputs_are_passed_as_they_are() -> None:
    def run(values: list[Any]) -> list[Any]:
        return [UPDATE(values[0], values[0], values[1])]

    call = OpCall(UPDATE, (Input(0), Input(0), "named"))
    assert list_ops(run, [None, "named"]) == OpStage((call,), (0,))


def test_what_is_more_than_ops_stays_whole() -> None:
    outside = torch.ones(2)

    def uses_outside(values: list[Any]) -> list[Any]:
        return [UPDATE(values[0], outside, "layer")]

    def gives_input(values: list[Any]) -> list[Any]:
        return [values[0]]

    def gives_several(values: list[Any]) -> list[Any]:
        return list(values[0].split(1))

    def takes_list(values: list[Any]) -> list[Any]:
        return [torch.cat([values[0], values[0]])]

    for run in (uses_outside, gives_input, gives_several, takes_list):
        assert list_ops(run, [None]) is None
