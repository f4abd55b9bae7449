"""Replays of a model in stages: bits, what FULL takes apart, what the table keeps."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from parallel.group import TensorParallelGroup, single_rank_group
from runtime.common.config import GraphMode
from tests.checkpoints import tiny_checkpoint
from tests.dist.ranks import run_ranks
from tests.workers.graphs.hand_made import hand_made_model
from tests.workers.graphs.rank import Rank, compare_with_none
from tests.workers.graphs.test_replay import WAYS
from workers.attention.attention_op import attention
from workers.attention.kv_cache_update_op import kv_cache_update
from workers.compile.compiled_model import CompiledModel, Stage
from workers.graphs.staged import StagedTapes, last_uses

CPU = torch.device("cpu")


def _compare(group: TensorParallelGroup, folder: str, dtype: str) -> list[str]:
    return compare_with_none(group, folder, dtype, "FULL_AND_PIECEWISE", hand_made_model)


@pytest.mark.parametrize(("dtype", "tp_size"), [("bfloat16", 1), ("float32", 2)])
def test_bits_are_those_of_none(dtype: str, tp_size: int) -> None:
    ways = run_ranks(_compare, tp_size, str(tiny_checkpoint("llama")), dtype)
    assert ways == [WAYS["FULL_AND_PIECEWISE"]] * tp_size


def test_a_split_model_is_right_without_graphs() -> None:
    """Trap d. Its subgraphs are the model's own ops, so even the bits are the same."""
    folder = tiny_checkpoint("qwen3")
    split, whole = (
        Rank(folder, single_rank_group(CPU), "float32", GraphMode.NONE, **given)
        for given in ({"compiled": hand_made_model}, {})
    )
    for step in ([(0, 5), (1, 3)], [(0, 1), (1, 1)]):
        assert torch.equal(split.step(step).hidden, whole.step(step).hidden)


def test_full_calls_the_functions_behind_the_ops() -> None:
    called: list[str] = []

    def write(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> torch.Tensor:
        called.append(f"write {layer_name}")
        return kv_cache_update(key, value, layer_name)

    def attend(*args: Any) -> None:
        called.append(f"attend {args[4]}")
        attention(*args)

    ops = torch.ops.lockstep
    direct = {ops.kv_cache_update.default: write, ops.attention.default: attend}
    rank = Rank(
        tiny_checkpoint("llama"), single_rank_group(CPU), "float32", GraphMode.FULL_AND_PIECEWISE,
        compiled=hand_made_model, direct=direct,
    )  # fmt: skip
    rank.graphs.capture()
    assert rank.step([(0, 2)]).choice.mode is GraphMode.PIECEWISE
    assert not called
    assert rank.step([(0, 1)]).choice.mode is GraphMode.FULL
    assert called == [f"{what} {layer}" for layer in rank.model.attention_layers for what in ("write", "attend")]


def _model(*stages: Stage, output: int, bound: dict[int, Any] | None = None) -> CompiledModel:
    """Over values 0 (input_ids), 1 (positions) and what stages make."""
    values = 1 + max(index for stage in stages for index in (*stage.inputs, *stage.outputs))
    return CompiledModel(
        stages=stages, num_values=values, bound=bound or {}, inputs={"input_ids": 0, "positions": 1},
        num_tokens_index=None, output=output,
    )  # fmt: skip


def test_values_are_dropped_at_their_last_use() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    def run(values: list[Any]) -> list[Any]:
        alive.append([ref() is not None for ref in made])
        result = values[0] + 1
        values.clear()
        made.append(weakref.ref(result))
        return [result]

    chain = [Stage("subgraph", str(n), run, (0 if n == 0 else n + 1,), (n + 2,)) for n in range(3)]
    model = _model(*chain, output=4)
    assert last_uses(model) == [(), (2,), (3,)]
    tape = StagedTapes(model, {}).tape(False, torch.arange(4), torch.arange(4))
    for _ in range(2):
        made.clear()
        alive.clear()
        assert torch.equal(tape(), torch.arange(4) + 3)
        # A stage's input is alive while it runs, what came before is gone.
        assert alive == [[], [True], [False, True]]
        assert all(ref() is None for ref in made)
