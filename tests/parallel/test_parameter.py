"""Filling parameters: the right slice, nothing but the slice, by layout, and the record of what is missing."""

from __future__ import annotations

import pytest
import torch

from parallel.group import TensorParallelGroup, single_rank_group
from parallel.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel.parameter import (
    PER_CHANNEL,
    PLAIN,
    SCALAR,
    WHOLE,
    DtypeError,
    Layout,
    ParallelModule,
    ParameterLoader,
    Partition,
    ShapeError,
    WeightShard,
)
from parallel.shard import BLOCK, Shard, ShardError, split, split_heads
from tests.parallel.sources import Recorded, random
from tests.parallel.unconnected import unconnected_group

CPU = torch.device("cpu")


def materialized(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer with memory, filled with NaN, so that unloaded elements are visible."""
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
    materialized(layer)
    assert layer.weight.loader.missing() == ["mlp.gate_up_proj.weight[0]", "mlp.gate_up_proj.weight[1]"]
    layer.weight.loader.load(Recorded(up), 1)
    assert layer.weight.loader.missing() == ["mlp.gate_up_proj.weight[0]"]
    layer.weight.loader.load(Recorded(gate), 0)
    assert layer.weight.loader.missing() == []
    torch.testing.assert_close(layer.weight.data, mine, rtol=0, atol=0)

    materialized(layer).weight.loader.load(Recorded(torch.cat([gate, up])))
    torch.testing.assert_close(layer.weight.data, mine, rtol=0, atol=0)


def test_qkv_from_three_tensors_or_from_one_fused(second_of_two: TensorParallelGroup) -> None:
    q, k, v = random(9 * 4, 8, seed=1), random(3 * 4, 8, seed=2), random(3 * 4, 8, seed=3)
    # The second of two ranks has the last of three KV groups.
    mine = torch.cat([q[24:], k[8:], v[8:]])
    layer = materialized(QKVParallelLinear(8, 4, 9, 3, group=second_of_two))
    for shard_id, tensor in (("v", v), ("q", q), ("k", k)):
        layer.weight.loader.load(Recorded(tensor), shard_id)
    torch.testing.assert_close(layer.weight.data, mine, rtol=0, atol=0)

    materialized(layer).weight.loader.load(Recorded(torch.cat([q, k, v])))
    torch.testing.assert_close(layer.weight.data, mine, rtol=0, atol=0)


def test_only_the_slice_is_read(second_of_two: TensorParallelGroup) -> None:
    row = materialized(RowParallelLinear(64, 8, group=second_of_two, bias=True))
    weight, bias = Recorded(random(8, 64, seed=1)), Recorded(random(8, seed=2))
    row.weight.loader.load(weight)
    row.bias.loader.load(bias)
    assert weight.reads == [(slice(0, 8), slice(32, 64))]
    assert bias.reads == [(slice(0, 8),)]

    merged = materialized(MergedColumnParallelLinear(8, [64, 32], group=second_of_two))
    fused = Recorded(random(96, 8, seed=3))
    merged.weight.loader.load(fused)
    assert fused.reads == [(slice(32, 64), slice(0, 8)), (slice(64 + 16, 96), slice(0, 8))]


def test_the_loader_survives_a_new_parameter_object() -> None:
    with torch.device("meta"):
        layer = ColumnParallelLinear(8, BLOCK, group=single_rank_group(CPU), bias=True)
    with pytest.raises(RuntimeError, match="meta device; materialize"):
        layer.weight.loader.load(Recorded(random(BLOCK, 8, seed=1)))
    layer.to_empty(device="cpu")
    layer.weight.loader.load(Recorded(random(BLOCK, 8, seed=1)))
    torch.testing.assert_close(layer.weight.data, random(BLOCK, 8, seed=1))
    assert layer.to(torch.float64).weight.loader.missing() == []
    assert layer.bias.loader.missing() == ["bias"]


def test_another_dtype_is_converted() -> None:
    layer = materialized(ColumnParallelLinear(8, 4, group=single_rank_group(CPU), dtype=torch.bfloat16))
    tensor = random(4, 8, seed=1)
    layer.weight.loader.load(Recorded(tensor))
    assert torch.equal(layer.weight.data, tensor.bfloat16())


@pytest.mark.parametrize("shape", [(64, 9), (63, 8), (64,), (64, 8, 1)])
def test_a_wrong_shape_names_tensor_expected_and_found(shape: tuple[int, ...]) -> None:
    layer = materialized(ColumnParallelLinear(8, 64, group=single_rank_group(CPU), prefix="q_proj"))
    with pytest.raises(ShapeError) as caught:
        layer.weight.loader.load(Recorded(torch.zeros(shape), "layers.0.q_proj.weight"))
    for part in ("layers.0.q_proj.weight", str(list(shape)), "[64, 8]"):
        assert part in str(caught.value)
    assert layer.weight.loader.missing() == ["q_proj.weight"]


def test_an_unknown_partition_names_the_known_ones() -> None:
    layer = materialized(QKVParallelLinear(8, 4, 2, 2, group=single_rank_group(CPU)))
    with pytest.raises(ValueError, match=r"no partition 'x'.*'q', 'k', 'v'"):
        layer.weight.loader.load(Recorded(torch.zeros(8, 8)), "x")


GROUP = 8


def weight_shard(kind: str, rank: int, size: int) -> WeightShard:
    """A rank's part of a weight whose borders lie between groups of GROUP elements."""
    if kind == "column":
        return WeightShard((Partition(None, 88, split(88, size, multiple=GROUP)[rank]),), Shard(0, 40), 40)
    if kind == "row":
        return WeightShard((Partition(None, 48, Shard(0, 48)),), split(88, size, multiple=GROUP)[rank], 88)
    if kind == "merged":
        sizes = (88, 56)
        shards = [split(total, size, multiple=GROUP)[rank] for total in sizes]
        partitions = tuple(Partition(i, *pair) for i, pair in enumerate(zip(sizes, shards, strict=True)))
        return WeightShard(partitions, Shard(0, 40), 40)
    heads = split_heads(9, 3, size)[rank]
    q, kv = heads.q.scaled(16), heads.kv.scaled(16)
    return WeightShard((Partition("q", 144, q), Partition("k", 48, kv), Partition("v", 48, kv)), Shard(0, 40), 40)


LAYOUTS = {
    "plain": PLAIN,
    "plain, input first": Layout(input_first=True),
    "per channel": PER_CHANNEL,
    "per channel, two dimensions": Layout(1, WHOLE),
    "per input": Layout(None, 1),
    "per group": Layout(1, GROUP),
    "per group, input first": Layout(1, GROUP, input_first=True),
    "block": Layout(GROUP, GROUP),
    "packed input": Layout(1, 4),
    "packed output, input first": Layout(4, 1, input_first=True),
    "scalar": SCALAR,
}


def whole_tensor(layout: Layout, rows: int, columns: int, seed: int) -> torch.Tensor:
    blocks = [(rows, layout.output_block), (columns, layout.input_block)]
    shape = [1 if block == WHOLE else -(-size // block) for size, block in blocks if block]
    return random(*(shape[::-1] if layout.input_first else shape or (1,)), seed=seed)


def expected_slice(layout: Layout, tensor: torch.Tensor, rows: Shard, columns: Shard) -> torch.Tensor:
    """Entries by element, sliced by element, then one element of each entry: independent of the loader's arithmetic."""
    if layout == SCALAR:
        return tensor.reshape(1)
    blocks = [(layout.output_block, rows), (layout.input_block, columns)]
    blocks = [(block, shard) for block, shard in blocks if block]
    for dim, (block, shard) in enumerate(blocks[::-1] if layout.input_first else blocks):
        if block == WHOLE:
            continue
        by_element = tensor.repeat_interleave(block, dim)
        inside = by_element.narrow(dim, shard.start, min(shard.size, by_element.shape[dim] - shard.start))
        tensor = inside.index_select(dim, torch.arange(0, inside.shape[dim], block))
    return tensor


def loaded(layout: Layout, shard: WeightShard, sources: dict[object, torch.Tensor]) -> torch.Tensor:
    module = ParallelModule("layer")
    module.add_parameter("scale", ParameterLoader(module, "scale", shard, layout), torch.float32)
    module.scale.fill_(torch.nan)
    for shard_id, tensor in sources.items():
        module.scale.loader.load(Recorded(tensor), shard_id)
    assert module.scale.loader.missing() == []
    return module.get_parameter("scale").data


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", ["column", "row", "merged", "qkv"])
def test_every_layout_is_the_slice_of_the_whole_tensor(kind: str, layout: Layout) -> None:
    for size in (1, 2, 3):
        for rank in range(size):
            shard = weight_shard(kind, rank, size)
            tensors = {
                p.shard_id: whole_tensor(layout, p.total, shard.input_size, seed)
                for seed, p in enumerate(shard.partitions)
            }
            if layout.output_block is None and layout is not SCALAR:
                tensors = dict.fromkeys(tensors, tensors[shard.partitions[0].shard_id])  # the same inputs
            parts = [expected_slice(layout, tensors[p.shard_id], p.shard, shard.input_shard) for p in shard.partitions]
            dim = 1 if layout.input_first else 0
            stacks = layout.output_block is not None or layout is SCALAR
            expected = torch.cat(parts, dim) if stacks else parts[0]
            assert torch.equal(loaded(layout, shard, tensors), expected), (size, rank)
            if stacks and len(parts) > 1:
                fused = torch.cat([*tensors.values()], 0 if layout is SCALAR else dim)
                assert torch.equal(loaded(layout, shard, {None: fused}), expected), (size, rank)


def test_one_scalar_serves_all_partitions_and_may_have_a_dimension() -> None:
    shard = weight_shard("qkv", 1, 2)
    for scalar in (torch.tensor(3.0), torch.tensor([3.0])):
        assert loaded(SCALAR, shard, {None: scalar}).tolist() == [3.0] * 3
        assert loaded(SCALAR, shard, dict.fromkeys("qkv", scalar)).tolist() == [3.0] * 3


@pytest.mark.parametrize(("layout", "name"), [(Layout(1, GROUP), "row"), (Layout(GROUP, GROUP), "column")])
def test_a_shard_that_divides_a_group_is_refused(layout: Layout, name: str) -> None:
    shards = split(88, 3, align=1)
    partition = Partition(None, 88, shards[1] if name == "column" else Shard(0, 88))
    shard = WeightShard((partition,), shards[1] if name == "row" else Shard(0, 88), 88)
    with pytest.raises(ShardError, match=r"layer.scale: the shard of elements 29 to 58 divides a group of 8"):
        ParameterLoader(ParallelModule("layer"), "scale", shard, layout)


@pytest.mark.parametrize(
    ("own", "other", "accepted"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float16, True),
        (torch.int32, torch.int32, True),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, True),
        (torch.int32, torch.float32, False),
        (torch.bfloat16, torch.int8, False),
        (torch.bfloat16, torch.float8_e4m3fn, False),
        (torch.float8_e4m3fn, torch.bfloat16, False),
        (torch.int8, torch.uint8, False),
    ],
)
def test_only_plain_floats_are_converted(own: torch.dtype, other: torch.dtype, accepted: bool) -> None:
    module = ParallelModule("layer")
    module.add_parameter("packed", ParameterLoader(module, "packed", weight_shard("row", 0, 1)), own)
    assert module.packed.loader.accepts(other) is accepted
    source = Recorded(torch.ones(48, 88).to(other))
    if accepted:
        module.packed.loader.load(source)
        assert torch.equal(module.packed.float(), torch.ones(48, 88))
    else:
        with pytest.raises(DtypeError, match=f"stored as {other}; layer.packed holds {own}"):
            module.packed.loader.load(source)


def test_a_shape_is_checked_without_reading() -> None:
    layer = ColumnParallelLinear(8, 64, group=single_rank_group(CPU), prefix="q_proj")
    layer.weight.loader.check_shape("stored", (64, 8))
    with pytest.raises(ShapeError, match=r"stored has shape \[64, 9\]; q_proj.weight needs \[64, 8\]"):
        layer.weight.loader.check_shape("stored", (64, 9))
