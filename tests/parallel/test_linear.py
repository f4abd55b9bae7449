"""Linear layers in one process: shapes, options and the quantization seam. Over ranks: test_layers_over_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.group import TensorParallelGroup, single_rank_group
from parallel.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel.linear_method import LinearInput, LinearMethod, QuantizedTensor, UnquantizedLinearMethod
from parallel.parameter import PER_CHANNEL, ParallelModule, ParameterLoader, WeightShard
from parallel.shard import Shard, ShardError
from tests.dist.ranks import run_ranks
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


def test_disable_tp_holds_full_weights_and_runs_no_collective() -> None:
    group = unconnected_group(1, 3)  # a collective in it would fail
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
    with pytest.raises(ShardError, match=r"o_proj: .* do not divide 8 elements over 2 ranks"):
        RowParallelLinear(8, 8, group=unconnected_group(0, 2), shards=shards, prefix="o_proj")


class _Doubled(UnquantizedLinearMethod):
    """A method that keeps its weight elsewhere, as quantization does."""

    def apply(
        self,
        layer: ParallelModule,
        x: LinearInput,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        return F.linear(x, layer.doubled, bias)

    def process_after_loading(self, layer: ParallelModule) -> None:
        layer.doubled = layer.weight.data * 2


class _Config:
    input_multiple = 1
    output_multiple = 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def get_linear_method(self, layer_kind: str, prefix: str) -> LinearMethod | None:
        self.calls.append((layer_kind, prefix))
        return _Doubled() if prefix == "b" else None


def test_a_quantization_config_chooses_the_method_by_kind_and_name() -> None:
    config = _Config()
    plain = ColumnParallelLinear(8, 16, group=ALONE, quant_config=config, prefix="a")
    doubled = RowParallelLinear(8, 16, group=ALONE, quant_config=config, prefix="b", bias=True)
    MergedColumnParallelLinear(8, [16], group=ALONE, quant_config=config, prefix="c")
    QKVParallelLinear(8, 4, 2, 2, group=ALONE, quant_config=config, prefix="d")
    ParallelLMHead(16, 8, group=ALONE, quant_config=config, prefix="e")
    assert config.calls == [("column", "a"), ("row", "b"), ("merged", "c"), ("qkv", "d"), ("lm_head", "e")]
    for layer in (plain, doubled):
        layer.weight.loader.load(Recorded(random(16, 8, seed=1)))
        layer.process_after_loading()
    doubled.bias.loader.load(Recorded(random(16, seed=2)))
    x = random(3, 8, seed=3)
    torch.testing.assert_close(plain(x)[0], F.linear(x, random(16, 8, seed=1)))
    torch.testing.assert_close(doubled(x)[0], F.linear(x, 2 * random(16, 8, seed=1), random(16, seed=2)))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_no_layer_divides_a_group(rank: int) -> None:
    group = unconnected_group(rank, 3)
    column = ColumnParallelLinear(8, 1000, group=group, multiple=128)
    merged = MergedColumnParallelLinear(8, [512, 1000], group=group, multiple=128)
    qkv = QKVParallelLinear(8, 64, 32, 8, group=group, multiple=128)
    row = RowParallelLinear(1000, 8, group=group, multiple=128)
    embedding = VocabParallelEmbedding(1000, 8, group=group, multiple=128)
    head = ParallelLMHead(1000, 8, group=group, multiple=128)
    shards = [p.shard for layer in (column, merged, qkv, embedding, head) for p in layer.weight_shard.partitions]
    for shard in (*shards, row.weight_shard.input_shard):
        assert shard.start % 128 == 0
        assert shard.stop % 128 == 0 or rank == 2
    assert row.weight_shard.input_shard == column.weight_shard.partitions[0].shard
    assert head.vocab_shard == embedding.vocab_shard


def test_queries_may_have_a_multiple_of_their_own() -> None:
    layers = [QKVParallelLinear(8, 64, 6, 3, group=unconnected_group(rank, 3), q_multiple=128) for rank in range(3)]
    assert [(layer.q_size, layer.kv_size) for layer in layers] == [(128, 64)] * 3
    layers = [QKVParallelLinear(8, 64, 8, 1, group=unconnected_group(rank, 3), q_multiple=128) for rank in range(3)]
    assert [(layer.q_size, layer.kv_size) for layer in layers] == [(256, 64), (128, 64), (128, 64)]
    with pytest.raises(ShardError, match=r"sizes that work: 1 to 2$"):
        QKVParallelLinear(8, 64, 6, 3, group=unconnected_group(0, 3), multiple=128)


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelLMHead])
def test_too_few_groups_for_the_ranks_are_refused(layer: type[ParallelModule]) -> None:
    sizes = (300, 300)
    with pytest.raises(ShardError, match=r"300 elements in groups of 128 .* sizes that work: 1 to 3$"):
        layer(*sizes, group=unconnected_group(0, 4), multiple=128)


class _Int8(LinearMethod):
    """Weights and activations in int8 with one scale for each output channel and token, as W8A8 checkpoints have.

    Takes plain activations or quantized ones, and returns a quantized product where ``quantize_output`` is set.
    """

    def __init__(self, quantize_output: bool = False) -> None:
        self.quantize_output = quantize_output

    def create_parameters(self, layer: ParallelModule, shard: WeightShard, dtype: torch.dtype) -> None:
        layer.add_parameter("weight", ParameterLoader(layer, "weight", shard), torch.int8)
        layer.add_parameter("scale", ParameterLoader(layer, "scale", shard, PER_CHANNEL), dtype)

    def apply(
        self,
        layer: ParallelModule,
        x: LinearInput,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> LinearInput:
        values, scale = x if isinstance(x, QuantizedTensor) else quantize(x)
        y = F.linear(values.float(), layer.weight.float()) * layer.get_parameter("scale") * scale
        y = y if bias is None else y + bias
        return quantize(y) if self.quantize_output else y

    def process_after_loading(self, layer: ParallelModule) -> None:
        pass


def quantize(x: torch.Tensor) -> QuantizedTensor:
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return QuantizedTensor((x / scale).round().to(torch.int8), scale)


class _Int8Config(_Config):
    def get_linear_method(self, layer_kind: str, prefix: str) -> LinearMethod | None:
        return _Int8(quantize_output=prefix == "first")


def int8_mlp(group: TensorParallelGroup) -> list[float]:
    options: dict[str, Any] = {"group": group, "quant_config": _Int8Config()}
    first = ColumnParallelLinear(8, 50, prefix="first", **options)
    second = RowParallelLinear(50, 6, prefix="second", **options)
    for layer, shape in ((first, (50, 8)), (second, (6, 50))):
        layer.weight.loader.load(Recorded((random(*shape, seed=shape[0]) * 40).to(torch.int8)))
        layer.scale.loader.load(Recorded(random(shape[0], seed=shape[1]).abs() / 100))
    hidden, _ = first(quantize(random(3, 8, seed=1)))
    assert isinstance(hidden, QuantizedTensor)
    assert hidden.values.dtype == torch.int8
    return second(hidden)[0].flatten().tolist()


def test_layers_pass_quantized_activations_to_their_method() -> None:
    alone = torch.tensor(int8_mlp(ALONE))
    for size in (2, 3):
        for found in run_ranks(int8_mlp, size):
            # Each rank scales its own part of the hidden activations, so the rounding differs a little.
            torch.testing.assert_close(torch.tensor(found), alone, rtol=0, atol=0.02 * float(alone.abs().max()))


def test_a_quantized_activation_without_a_method_for_it_is_refused() -> None:
    layer = ColumnParallelLinear(8, 16, group=ALONE, prefix="q_proj")
    with pytest.raises(TypeError, match="q_proj needs a plain tensor"):
        layer(quantize(random(3, 8, seed=1)))
