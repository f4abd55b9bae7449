"""The factory methods of the decoder: a family whose layers differ, against plain torch, and the quantization seam."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel.group import TensorParallelGroup, single_rank_group
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.linear_method import LinearMethod, UnquantizedLinearMethod
from parallel.parameter import (
    PER_CHANNEL,
    Layout,
    ParallelModule,
    ParameterLoader,
    WeightShard,
    replicated_vector,
)
from parallel.shard import ShardError
from runtime.common.model_config import ModelConfig, RopeConfig
from tests.dist.ranks import run_ranks
from tests.parallel.sources import Recorded, random
from tests.parallel.unconnected import unconnected_group
from tests.workers.models.harness import ModelStepper
from workers.models.decoder import DecoderForCausalLM
from workers.models.registry import build_model
from workers.weights import HasBuffers

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", hidden_size=32, intermediate_size=48, num_layers=4, num_heads=6, num_kv_heads=3,
    head_dim=8, vocab_size=80, max_position_embeddings=64, rms_norm_eps=1e-5, qk_norm=True,
)  # fmt: skip
TOKENS = [5, 71, 3, 3, 40, 12, 66, 9, 0, 23, 31]
WINDOW = 4


class OnePlusNorm(ParallelModule):
    """``x / rms(x) * (1 + weight)``."""

    def __init__(self, size: int, eps: float, prefix: str) -> None:
        super().__init__(prefix)
        self.eps = eps
        loader = ParameterLoader(self, "weight", replicated_vector(size), PER_CHANNEL)
        self.add_parameter("weight", loader, torch.float32)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)
        return normed if residual is None else (normed, total)


class GeluMLP(nn.Module):
    """``down(gelu(up(x)))``."""

    def __init__(self, group: TensorParallelGroup, prefix: str) -> None:
        super().__init__()
        sizes = CONFIG.hidden_size, CONFIG.intermediate_size
        self.up_proj = ColumnParallelLinear(*sizes, group=group, prefix=f"{prefix}.up_proj")
        self.down_proj = RowParallelLinear(*sizes[::-1], group=group, prefix=f"{prefix}.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)[0]))[0]


class MixedForCausalLM(DecoderForCausalLM):
    """Odd layers have another rotary base, a window and an MLP without a gate; every norm multiplies by 1 + weight."""

    def make_norm(self, size: int, prefix: str) -> nn.Module:
        return OnePlusNorm(size, self.config.rms_norm_eps, prefix)

    def make_mlp(self, layer: int, prefix: str) -> nn.Module:
        return GeluMLP(self.context.group, prefix) if layer % 2 else super().make_mlp(layer, prefix)

    def rope_config(self, layer: int) -> RopeConfig:
        return RopeConfig(theta=100.0) if layer % 2 else super().rope_config(layer)

    def sliding_window(self, layer: int) -> int | None:
        return WINDOW if layer % 2 else None


def weight(name: str, *shape: int) -> torch.Tensor:
    """The same random weight on every rank."""
    return random(*shape, seed=zlib.crc32(name.encode())) / (shape[-1] ** 0.5 if len(shape) > 1 else 4)


def whole_shape(model: nn.Module, name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    layer = model.get_submodule(name.rpartition(".")[0])
    shard = getattr(layer, "weight_shard", None)
    if shard is None:
        return tuple(parameter.shape)
    rows = sum(partition.total for partition in shard.partitions)
    return (rows,) if parameter.dim() == 1 else (rows, shard.input_size)


def mixed_logits(group: TensorParallelGroup) -> list[float]:
    with torch.device("meta"):
        model = MixedForCausalLM(CONFIG, group=group, dtype=torch.float32)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        parameter.loader.load(Recorded(weight(name, *whole_shape(model, name, parameter))))
    for module in model.modules():
        if isinstance(module, HasBuffers):
            module.fill_buffers(CPU)
    stepper = ModelStepper(model, group)
    parts = [stepper.step([(0, tokens)]) for tokens in (TOKENS[:7], TOKENS[7:8], TOKENS[8:])]
    return torch.cat(parts).flatten().tolist()


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x ``[T, heads, head_dim]``, its halves rotated by position."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[0])[:, None, None] / theta ** (torch.arange(half) / half)
    a, b = x.split(half, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def reference_logits() -> torch.Tensor:
    """The same model in plain torch, all tokens at once, without a cache."""
    hidden, heads, kv_heads, dim = CONFIG.hidden_size, CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), 1 + weight(f"{name}.weight", x.shape[-1]), CONFIG.rms_norm_eps)

    def linear(x: torch.Tensor, name: str, size: int) -> torch.Tensor:
        return x @ weight(f"{name}.weight", size, x.shape[-1]).T

    x = weight("model.embed_tokens.weight", CONFIG.vocab_size, hidden)[TOKENS]
    past = torch.arange(len(TOKENS))[:, None] - torch.arange(len(TOKENS))
    for layer in range(CONFIG.num_layers):
        odd, name = layer % 2 == 1, f"model.layers.{layer}"
        normed = norm(x, f"{name}.input_layernorm")
        qkv = linear(normed, f"{name}.self_attn.qkv_proj", (heads + 2 * kv_heads) * dim).unflatten(-1, (-1, dim))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        theta = 100.0 if odd else CONFIG.rope.theta
        q = rotate(norm(q, f"{name}.self_attn.q_norm"), theta)
        k = rotate(norm(k, f"{name}.self_attn.k_norm"), theta)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        visible = (past >= 0) & (past < (WINDOW if odd else len(TOKENS)))
        attended = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), attn_mask=visible)
        x = x + linear(attended.transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj", hidden)
        normed, mlp = norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp"
        if odd:
            inner = F.gelu(linear(normed, f"{mlp}.up_proj", CONFIG.intermediate_size))
        else:
            gate, up = linear(normed, f"{mlp}.gate_up_proj", 2 * CONFIG.intermediate_size).chunk(2, dim=-1)
            inner = F.silu(gate) * up
        x = x + linear(inner, f"{mlp}.down_proj", hidden)
    return linear(norm(x, "model.norm"), "lm_head", CONFIG.vocab_size)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_a_family_whose_layers_differ_equals_plain_torch(tp_size: int) -> None:
    expected = reference_logits()
    for found in run_ranks(mixed_logits, tp_size):
        torch.testing.assert_close(torch.tensor(found).view_as(expected), expected, rtol=1e-4, atol=1e-4)


def test_layers_with_equal_rotary_configs_share_a_table() -> None:
    with torch.device("meta"):
        mixed = MixedForCausalLM(CONFIG, group=single_rank_group(CPU), dtype=torch.float32)
    assert [rotary.config.theta for rotary in mixed.model.rotary_embs] == [CONFIG.rope.theta, 100.0]
    plain = build_model(CONFIG, group=single_rank_group(CPU), dtype=torch.float32)
    assert len(plain.model.rotary_embs) == 1


class GroupedMethod(UnquantizedLinearMethod):
    """A plain weight with a scale for each group of inputs and outputs, which is not used."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def create_parameters(self, layer: ParallelModule, shard: WeightShard, dtype: torch.dtype) -> None:
        super().create_parameters(layer, shard, dtype)
        layer.add_parameter("scale", ParameterLoader(layer, "scale", shard, self.layout), dtype)


class GroupedConfig:
    """Quantizes every layer in groups of that many inputs and outputs."""

    def __init__(self, input_multiple: int, output_multiple: int) -> None:
        self.input_multiple = input_multiple
        self.output_multiple = output_multiple
        self.calls: list[tuple[str, str]] = []

    def get_linear_method(self, layer_kind: str, prefix: str) -> LinearMethod | None:
        self.calls.append((layer_kind, prefix))
        return GroupedMethod(Layout(self.output_multiple, self.input_multiple))


def test_the_quantization_config_reaches_every_layer() -> None:
    config = GroupedConfig(1, 1)
    build_model(CONFIG, group=single_rank_group(CPU), dtype=torch.float32, quant_config=config)
    kinds = {
        "self_attn.qkv_proj": "qkv",
        "self_attn.o_proj": "row",
        "mlp.gate_up_proj": "merged",
        "mlp.down_proj": "row",
    }
    layers = [(kind, f"model.layers.{layer}.{name}") for layer in range(4) for name, kind in kinds.items()]
    assert config.calls == [*layers, ("lm_head", "lm_head")]


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("multiples", [(32, 1), (16, 1), (8, 8), (1, 16), (16, 16)])
def test_shards_keep_quantization_groups_from_one_layer_to_the_next(tp_size: int, multiples: tuple[int, int]) -> None:
    config = dataclasses.replace(CONFIG, num_heads=12, num_kv_heads=6, intermediate_size=112, vocab_size=112)
    for rank in range(tp_size):
        # A scale that does not fit a shard is refused when the layer is made.
        model = build_model(
            config, group=unconnected_group(rank, tp_size), dtype=torch.float32, quant_config=GroupedConfig(*multiples)
        )
        layers: Any = model.model.layers
        for layer in layers:
            gate, up = layer.mlp.gate_up_proj.weight_shard.partitions
            assert gate.shard == up.shard == layer.mlp.down_proj.weight_shard.input_shard
            query = layer.self_attn.qkv_proj.weight_shard.partitions[0]
            assert query.shard == layer.self_attn.o_proj.weight_shard.input_shard


def test_a_model_whose_groups_do_not_fit_the_ranks_is_refused() -> None:
    with pytest.raises(ShardError, match=r"6 query heads cannot be divided into 3 parts; sizes that work: 1 to 2$"):
        build_model(CONFIG, group=unconnected_group(0, 3), dtype=torch.float32, quant_config=GroupedConfig(8, 16))
