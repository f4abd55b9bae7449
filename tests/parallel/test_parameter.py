"""Filling parameters: the right slice, nothing but the slice, and an account of what is missing."""

from __future__ import annotations

import pytest
import torch

from parallel.group import TensorParallelGroup, single_rank_group
from parallel.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    ShapeError,
)
from parallel.shard import BLOCK
from tests.parallel.sources import Recorded, random
from tests.parallel.unconnected import unconnected_group

CPU = torch.device("cpu")


def materialised(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer with memory, filled with NaN, so that what is not loaded shows."""
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.fill_(torch.nan)
    return layer


@pytest.fixture
def second_of_two() -> TensorParallelGroup:
    return unconnected_group(rank=1, size=2)


def test_merged_holds_its_slice_of_gate_and_then_of_up(second_of_two: TensorParallelGroup) -> None:
    gate, up = random(64, 8, seed=1), random(64, 8, seed=2)
    mine = torch.cat([gate[32:], up[32:]])
    with torch.device("meta"):
        layer = MergedColumnParallelLinear(8, [64, 64], group=second_of_two, prefix="mlp.gate_up_proj")
    materialised(layer)
    assert layer.weight.loader.missing() == ["mlp.gate_up_proj.weight[0]", "mlp.gate_up_proj.weight[1]"]
    layer.weight.loader.load(Recorded(up), 1)
    assert layer.weight.loader.missing() == ["mlp.gate_up_proj.weight[0]"]
    layer.weight.loader.load(Recorded(gate), 0)
    assert layer.weight.loader.missing() == []
    torch.testing.assert_close(layer.weight.data, mine, rtol=0, atol=0)

    materialised(layer).weight.loader.load(Recorded(torch.cat([gate, up])))
    torch.testing.assert_close(layer.weight.data, mine, rtol=0, atol=0)


def test_qkv_from_three_tensors_or_from_one_fused(second_of_two: TensorParallelGroup) -> None:
    q, k, v = random(9 * 4, 8, seed=1), random(3 * 4, 8, seed=2), random(3 * 4, 8, seed=3)
    # The second of two ranks has the last of three KV groups.
    mine = torch.cat([q[24:], k[8:], v[8:]])
    layer = materialised(QKVParallelLinear(8, 4, 9, 3, group=second_of_two))
    for shard_id, tensor in (("v", v), ("q", q), ("k", k)):
        layer.weight.loader.load(Recorded(tensor), shard_id)
    torch.testing.assert_close(layer.weight.data, mine, rtol=0, atol=0)

    materialised(layer).weight.loader.load(Recorded(torch.cat([q, k, v])))
    torch.testing.assert_close(layer.weight.data, mine, rtol=0, atol=0)


def test_only_the_slice_is_read(second_of_two: TensorParallelGroup) -> None:
    row = materialised(RowParallelLinear(64, 8, group=second_of_two, bias=True))
    weight, bias = Recorded(random(8, 64, seed=1)), Recorded(random(8, seed=2))
    row.weight.loader.load(weight)
    row.bias.loader.load(bias)
    assert weight.reads == [(slice(0, 8), slice(32, 64))]
    assert bias.reads == [(slice(0, 8),)]

    merged = materialised(MergedColumnParallelLinear(8, [64, 32], group=second_of_two))
    fused = Recorded(random(96, 8, seed=3))
    merged.weight.loader.load(fused)
    assert fused.reads == [(slice(32, 64), slice(0, 8)), (slice(64 + 16, 96), slice(0, 8))]


def test_the_loader_survives_a_new_parameter_object() -> None:
    with torch.device("meta"):
        layer = ColumnParallelLinear(8, BLOCK, group=single_rank_group(CPU), bias=True)
    with pytest.raises(RuntimeError, match="meta device; materialise"):
        layer.weight.loader.load(Recorded(random(BLOCK, 8, seed=1)))
    layer.to_empty(device="cpu")
    layer.weight.loader.load(Recorded(random(BLOCK, 8, seed=1)))
    torch.testing.assert_close(layer.weight.data, random(BLOCK, 8, seed=1))
    assert layer.to(torch.float64).weight.loader.missing() == []
    assert layer.bias.loader.missing() == ["bias"]


def test_another_dtype_is_converted() -> None:
    layer = materialised(ColumnParallelLinear(8, 4, group=single_rank_group(CPU), dtype=torch.bfloat16))
    tensor = random(4, 8, seed=1)
    layer.weight.loader.load(Recorded(tensor))
    assert torch.equal(layer.weight.data, tensor.bfloat16())


@pytest.mark.parametrize("shape", [(64, 9), (63, 8), (64,), (64, 8, 1)])
def test_a_wrong_shape_names_tensor_expected_and_found(shape: tuple[int, ...]) -> None:
    layer = materialised(ColumnParallelLinear(8, 64, group=single_rank_group(CPU), prefix="q_proj"))
    with pytest.raises(ShapeError) as caught:
        layer.weight.loader.load(Recorded(torch.zeros(shape), "layers.0.q_proj.weight"))
    for part in ("layers.0.q_proj.weight", str(list(shape)), "[64, 8]"):
        assert part in str(caught.value)
    assert layer.weight.loader.missing() == ["q_proj.weight"]


def test_an_unknown_piece_names_the_known_ones() -> None:
    layer = materialised(QKVParallelLinear(8, 4, 2, 2, group=single_rank_group(CPU)))
    with pytest.raises(ValueError, match=r"no partition 'x'.*'q', 'k', 'v'"):
        layer.weight.loader.load(Recorded(torch.zeros(8, 8)), "x")
