"""The MLP: its options, equality with three nn.Linear at every TP size, and the sizes of an 8B Llama."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallel.group import TensorParallelGroup, single_rank_group
from parallel.linear_method import LinearInput, UnquantizedLinearMethod
from parallel.parameter import ParallelModule
from tests.dist.ranks import run_ranks
from workers.layers.mlp import MLP, SiluAndMul

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, TOKENS = 24, 101, 7


class InMemory:
    """A checkpoint tensor that is already in memory."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def read(self, *slices: slice) -> torch.Tensor:
        return self.tensor[slices]


@functools.cache
def reference(bias: bool) -> nn.ModuleDict:
    """Three plain layers with the same random weights in every process."""
    torch.manual_seed(0)
    sizes = {
        "gate": (HIDDEN, INTERMEDIATE),
        "up": (HIDDEN, INTERMEDIATE),
        "down": (INTERMEDIATE, HIDDEN),
    }
    return nn.ModuleDict({name: nn.Linear(*size, bias=bias) for name, size in sizes.items()})


def expected_output(x: torch.Tensor, bias: bool) -> torch.Tensor:
    layers = reference(bias)
    return layers["down"](nn.functional.silu(layers["gate"](x)) * layers["up"](x)).detach()


def make_input() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def make_mlp(group: TensorParallelGroup, bias: bool = False, fused: bool = False, **options: Any) -> MLP:
    """An MLP filled with the reference's weights, from separate or already fused checkpoint tensors."""
    mlp = MLP(HIDDEN, INTERMEDIATE, "silu", bias=bias, prefix="m", group=group, dtype=torch.float32, **options)
    layers = reference(bias)
    for kind in ("weight", "bias") if bias else ("weight",):
        gate, up, down = (getattr(layers[name], kind).detach() for name in ("gate", "up", "down"))
        target = getattr(mlp.gate_up_proj, kind).loader
        if fused:
            target.load(InMemory("gate_up", torch.cat((gate, up))), None)
        else:
            target.load(InMemory("up", up), 1)
            target.load(InMemory("gate", gate), 0)
        getattr(mlp.down_proj, kind).loader.load(InMemory("down", down), None)
    return mlp


def run_mlp(group: TensorParallelGroup, bias: bool, options: dict[str, Any]) -> dict[str, Any]:
    mlp = make_mlp(group, bias, **options)
    gate_up, unused = mlp.gate_up_proj(make_input())
    assert unused is None
    return {"output": mlp(make_input()).flatten().tolist(), "gate_up_columns": gate_up.shape[1]}


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_three_linear_layers(tp_size: int, bias: bool) -> None:
    expected = expected_output(make_input(), bias)
    for fused in (False, True):
        results = run_ranks(run_mlp, tp_size, bias, {"fused": fused})
        for result in results:
            torch.testing.assert_close(torch.tensor(result["output"]).view_as(expected), expected)
        assert sum(result["gate_up_columns"] for result in results) == 2 * INTERMEDIATE


@pytest.mark.parametrize("bias", [False, True])
def test_partial_sums_add_up_without_reduction(bias: bool) -> None:
    results = run_ranks(run_mlp, 3, bias, {"reduce_results": False})
    expected = expected_output(make_input(), bias)
    parts = [torch.tensor(result["output"]).view_as(expected) for result in results]
    torch.testing.assert_close(sum(parts), expected)
    assert not torch.allclose(parts[0], expected, atol=1e-2)


def test_disable_tp_computes_the_full_output_on_every_rank() -> None:
    expected = expected_output(make_input(), True)
    for result in run_ranks(run_mlp, 2, True, {"disable_tp": True}):
        assert result["gate_up_columns"] == 2 * INTERMEDIATE
        torch.testing.assert_close(torch.tensor(result["output"]).view_as(expected), expected)


def shapes_on_meta(group: TensorParallelGroup) -> dict[str, list[int]]:
    with torch.device("meta"):
        mlp = MLP(4096, 14336, "silu", prefix="model.layers.0.mlp", group=group, dtype=torch.bfloat16)
        gate_up, _ = mlp.gate_up_proj(torch.empty(256, 4096, dtype=torch.bfloat16))
        activated = SiluAndMul()(gate_up)
        output = mlp(torch.empty(256, 4096, dtype=torch.bfloat16)) if group.size == 1 else activated
    parameters = {name: list(p.shape) for name, p in mlp.named_parameters()}
    bytes_held = [sum(p.nbytes for p in mlp.parameters())]
    return {
        **parameters, "gate_up": list(gate_up.shape), "activated": list(activated.shape), "output": list(output.shape),
        "bytes": bytes_held,
    }  # fmt: skip


def test_sizes_of_an_8b_llama() -> None:
    found = shapes_on_meta(single_rank_group(CPU))
    assert (found["gate_up"], found["activated"], found["output"]) == ([256, 28672], [256, 14336], [256, 4096])
    assert (found["gate_up_proj.weight"], found["down_proj.weight"]) == ([28672, 4096], [4096, 14336])
    assert found["bytes"] == [2 * 176_160_768]


def test_two_ranks_hold_half_of_each_weight() -> None:
    for found in run_ranks(shapes_on_meta, 2):
        assert (found["gate_up"], found["activated"]) == ([256, 14336], [256, 7168])
        assert (found["gate_up_proj.weight"], found["down_proj.weight"]) == ([14336, 4096], [4096, 7168])


def test_names_of_parameters() -> None:
    mlp = make_mlp(single_rank_group(CPU))
    assert [p.loader.label for p in mlp.parameters()] == ["m.gate_up_proj.weight", "m.down_proj.weight"]


def test_other_activation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        MLP(8, 16, "gelu", group=single_rank_group(CPU), dtype=torch.float32)


class HalvingMethod(UnquantizedLinearMethod):
    """A stand-in for a quantized method: its input is twice the activation, and its product halves it again."""

    def apply(
        self,
        layer: ParallelModule,
        x: LinearInput,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return super().apply(layer, x / 2, bias, out_dtype=out_dtype)


class FusingMethod(HalvingMethod):
    """The same with a kernel that activates and doubles at once."""

    calls = 0

    def fused_activation(self, activation: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
        def fused(x: torch.Tensor) -> torch.Tensor:
            FusingMethod.calls += 1
            return activation(x) * 2

        return fused if isinstance(activation, SiluAndMul) else None


class OnlyDown:
    """Quantizes row-parallel layers with one method."""

    input_multiple = 1
    output_multiple = 1

    def __init__(self, method: UnquantizedLinearMethod) -> None:
        self.method = method

    def get_linear_method(self, layer_kind: str, prefix: str) -> UnquantizedLinearMethod | None:
        assert prefix in ("m.gate_up_proj", "m.down_proj"), prefix
        return self.method if layer_kind == "row" else None


def test_fused_activation_of_a_quantized_down_projection() -> None:
    group, x = single_rank_group(CPU), make_input()
    fused = make_mlp(group, quant_config=OnlyDown(FusingMethod()))
    torch.testing.assert_close(fused(x), expected_output(x, False))
    assert FusingMethod.calls == 1
    plain = make_mlp(group, quant_config=OnlyDown(HalvingMethod()))
    torch.testing.assert_close(plain(x), expected_output(x, False) / 2)
