"""The CPU replay: the bits of NONE at the same size, without model code, at every TP size."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from parallel.group import TensorParallelGroup, single_rank_group
from runtime.common.config import GraphMode
from tests.checkpoints import tiny_checkpoint
from tests.dist.ranks import run_ranks
from tests.workers.graphs.rank import SIZES, Rank, compare_with_none, no_model_code, run_model
from workers.attention.attention_op import attention
from workers.attention.kv_cache_update_op import kv_cache_update
from workers.compile.compiled_model import CompiledModel, Stage
from workers.graphs.cpu_replay import OpLists

CPU = torch.device("cpu")

CHOICES = {
    "FULL_AND_PIECEWISE": [
        "PIECEWISE 16", "FULL 4", "PIECEWISE 8", "FULL 4", "NONE 20", "FULL 1", "FULL 8", "PIECEWISE 3",
    ],
    "PIECEWISE": [
        "PIECEWISE 16", "PIECEWISE 3", "PIECEWISE 8", "PIECEWISE 8", "NONE 20", "PIECEWISE 1", "PIECEWISE 8",
        "PIECEWISE 3",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "tp_size"), [("bfloat16", 1), ("float32", 2), ("bfloat16", 3)])
def test_bits_are_those_of_none(dtype: str, tp_size: int) -> None:
    choices = run_ranks(compare_with_none, tp_size, str(tiny_checkpoint("llama")), dtype, "FULL_AND_PIECEWISE")
    assert choices == [CHOICES["FULL_AND_PIECEWISE"]] * tp_size


@pytest.mark.parametrize("kind", ["llama-bias", "qwen2-window", "qwen3-bias"])
def test_every_form_of_model(kind: str) -> None:
    choices = compare_with_none(single_rank_group(CPU), str(tiny_checkpoint(kind)), "float32", "PIECEWISE")
    assert choices == CHOICES["PIECEWISE"]


def test_the_check_of_model_code_notices_model_code() -> None:
    """Without this the tests above would pass if model code ran in a replay."""
    rank = Rank(tiny_checkpoint("llama"), single_rank_group(CPU), "float32", GraphMode.NONE, forward=run_model)
    with no_model_code(rank.model), pytest.raises(AssertionError, match="model code ran"):
        rank.step([(0, 3)])


def test_a_split_model_without_graphs_equals_the_model() -> None:
    folder = tiny_checkpoint("qwen3")
    split = Rank(folder, single_rank_group(CPU), "float32", GraphMode.NONE)
    whole = Rank(folder, single_rank_group(CPU), "float32", GraphMode.NONE, forward=run_model)
    for step in ([(0, 5), (1, 3)], [(0, 1), (1, 1)]):
        # Not the same bits: eager layers may call C kernels that a trace does not contain.
        torch.testing.assert_close(split.step(step).hidden, whole.step(step).hidden, rtol=1e-4, atol=1e-4)


def test_a_capture_writes_no_kv_and_executes_no_collective() -> None:
    """Rank 0 of two captures while rank 1 does nothing: a collective on rank 0 would time out."""
    assert run_ranks(_capture_on_rank_0, 2, str(tiny_checkpoint("llama")), collective_timeout=5.0) == [True, True]


def _capture_on_rank_0(group: TensorParallelGroup, folder: str) -> bool:
    rank = Rank(folder, group, "float32", GraphMode.FULL_AND_PIECEWISE)
    if group.rank == 0:
        rank.graphs.capture()
    return all(bool(cache.isnan().all()) for cache in rank.kv_caches.values())


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
    folder = tiny_checkpoint("llama")
    rank = Rank(folder, single_rank_group(CPU), "float32", GraphMode.FULL_AND_PIECEWISE, direct=direct)
    rank.graphs.capture()
    assert rank.step([(0, 2)]).choice.mode is GraphMode.PIECEWISE
    assert not called
    assert rank.step([(0, 1)]).choice.mode is GraphMode.FULL
    layers = rank.model.attention_layers
    expected = ("attend",) if next(iter(layers.values())).backend.writes_kv_in_forward else ("write", "attend")
    assert called == [f"{what} {layer}" for layer in layers for what in expected]


def test_values_are_dropped_at_their_last_use() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    def run(values: list[Any]) -> list[Any]:
        alive.append([ref() is not None for ref in made])
        result = values[0] + 1
        values.clear()
        made.append(weakref.ref(result))
        return [result]

    stages = [Stage("subgraph", str(n), run, (0 if n == 0 else n + 1,), (n + 2,)) for n in range(3)]
    model = CompiledModel(
        stages=stages, num_values=5, bound={}, inputs={"input_ids": 0, "positions": 1}, num_tokens_index=None, output=4
    )
    ops = OpLists(model, {}).make(False, torch.arange(4), torch.arange(4))
    for _ in range(2):
        made.clear()
        alive.clear()
        assert torch.equal(ops(), torch.arange(4) + 3)
        # A stage's input is alive while the stage runs, earlier values are freed.
        assert alive == [[], [True], [False, True]]
        assert all(ref() is None for ref in made)


def test_the_sizes_of_these_tests_have_more_tokens_than_decode_batches() -> None:
    assert SIZES.decode[-1] < SIZES.mixed[-1]
