"""Linear layers in one process: shapes, traps and options. Against nn.Linear over ranks: test_layers_over_ranks.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel.group import single_rank_group
from parallel.linear import (
    ColumnParallelLinear,
    LinearMethod,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    WeightShard,
)
from parallel.parameter import ParallelModule
from parallel.shard import Shard, ShardError
from tests.parallel.sources import Recorded, random
from tests.parallel.unconnected import unconnected_group

ALONE = single_rank_group(torch.device("cpu"))


def test_sizes_of_an_8b_llama_mlp() -> None:
    with torch.device("meta"):
        gate_up = MergedColumnParallelLinear(4096, [14336] * 2, group=ALONE, dtype=torch.bfloat16)
        down = RowParallelLinear(14336, 4096, group=ALONE, dtype=torch.bfloat16)
        x = torch.empty(256, 4096, dtype=torch.bfloat16)
        y, _ = gate_up(x)
        assert y.shape == (256, 28672)
        assert down(y[:, :14336])[0].shape == (256, 4096)
    parameters = [*gate_up.parameters(), *down.parameters()]
    assert sum(p.numel() for p in parameters) == 176_160_768
    assert sum(p.nbytes for p in parameters) == 352_321_536


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_hold_half_of_each_weight(rank: int) -> None:
    group = unconnected_group(rank, 2)
    with torch.device("meta"):
        gate_up = MergedColumnParallelLinear(4096, [14336] * 2, group=group)
        down = RowParallelLinear(14336, 4096, group=group)
        assert gate_up(torch.empty(256, 4096))[0].shape == (256, 14336)
    assert gate_up.weight.shape == (14336, 4096)
    assert gate_up.local_output_sizes == (7168, 7168)
    assert down.weight.shape == (4096, 7168)


def test_disable_tp_holds_everything_and_exchanges_nothing() -> None:
    group = unconnected_group(1, 3)  # an exchange in it would fail
    layers = [
        ColumnParallelLinear(8, 96, group=group, disable_tp=True, gather_output=True),
        MergedColumnParallelLinear(8, [48, 48], group=group, disable_tp=True),
        QKVParallelLinear(8, 8, 8, 2, group=group, disable_tp=True),
        RowParallelLinear(8, 96, group=group, disable_tp=True, bias=True),
    ]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.loader.load(Recorded(random(*parameter.shape, seed=1)))
        x = random(5, 8, seed=2)
        torch.testing.assert_close(layer(x)[0], F.linear(x, random(96, 8, seed=1), _full_bias(layer)))


def _full_bias(layer: torch.nn.Module) -> torch.Tensor | None:
    return None if layer.bias is None else random(96, seed=1)


def test_head_shard_of_each_rank() -> None:
    layers = [QKVParallelLinear(576, 64, 9, 3, group=unconnected_group(rank, 4)) for rank in range(4)]
    assert [(layer.head_shard.q.size, layer.head_shard.kv.start) for layer in layers] == [
        (2, 0),
        (1, 0),
        (3, 1),
        (3, 2),
    ]
    assert [(layer.q_size, layer.kv_size) for layer in layers] == [(128, 64), (64, 64), (192, 64), (192, 64)]
    assert layers[0].weight.shape == (128 + 64 + 64, 576)


@pytest.mark.parametrize("shards", [(Shard(0, 4),), (Shard(0, 4), Shard(5, 3)), (Shard(0, 4), Shard(4, 3))])
def test_row_shards_that_do_not_cover_the_input_are_refused(shards: tuple[Shard, ...]) -> None:
    with pytest.raises(ShardError, match=r"o_proj: .* do not cut 8 elements over 2 ranks"):
        RowParallelLinear(8, 8, group=unconnected_group(0, 2), shards=shards, prefix="o_proj")


class _Doubled(LinearMethod):
    """A method that keeps its weight elsewhere, as quantization does."""

    def create_parameters(self, layer: ParallelModule, shard: WeightShard, dtype: torch.dtype) -> None:
        UnquantizedLinearMethod().create_parameters(layer, shard, dtype)

    def apply(
        self,
        layer: ParallelModule,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        return F.linear(x, layer.doubled, bias)

    def process_after_loading(self, layer: ParallelModule) -> None:
        layer.doubled = layer.weight.data * 2


class _Config:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def get_linear_method(self, layer_kind: str, prefix: str) -> LinearMethod | None:
        self.asked.append((layer_kind, prefix))
        return _Doubled() if prefix == "b" else None


def test_a_quantization_config_chooses_the_method_by_kind_and_name() -> None:
    config = _Config()
    plain = ColumnParallelLinear(8, 16, group=ALONE, quant_config=config, prefix="a")
    doubled = RowParallelLinear(8, 16, group=ALONE, quant_config=config, prefix="b", bias=True)
    MergedColumnParallelLinear(8, [16], group=ALONE, quant_config=config, prefix="c")
    QKVParallelLinear(8, 4, 2, 2, group=ALONE, quant_config=config, prefix="d")
    assert config.asked == [("column", "a"), ("row", "b"), ("merged", "c"), ("qkv", "d")]
    for layer in (plain, doubled):
        layer.weight.loader.load(Recorded(random(16, 8, seed=1)))
        layer.process_after_loading()
    doubled.bias.loader.load(Recorded(random(16, seed=2)))
    x = random(3, 8, seed=3)
    torch.testing.assert_close(plain(x)[0], F.linear(x, random(16, 8, seed=1)))
    torch.testing.assert_close(doubled(x)[0], F.linear(x, 2 * random(16, 8, seed=1), random(16, seed=2)))
