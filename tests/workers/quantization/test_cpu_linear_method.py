"""The CPU linear method: which products go through the op, and what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from parallel.embedding import ParallelLMHead
from parallel.group import single_rank_group
from parallel.linear import ColumnParallelLinear
from parallel.linear_method import UnquantizedLinearMethod
from tests.parallel.sources import Recorded, random
from workers.quantization import cpu_linear
from workers.quantization.cpu_linear import CpuLinearMethod
from workers.quantization.registry import get_quant_config

CPU = torch.device("cpu")


def make_layer(dtype: torch.dtype) -> ColumnParallelLinear:
    config = get_quant_config(None, CPU)
    layer = ColumnParallelLinear(8, 6, group=single_rank_group(CPU), bias=True, quant_config=config, dtype=dtype)
    layer.weight.loader.load(Recorded(random(6, 8, seed=1)))
    layer.bias.loader.load(Recorded(random(6, seed=2)))
    return layer


def calls_of_the_op(layer: ColumnParallelLinear, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> int:
    traced = make_fx(lambda x: layer.method.apply(layer, x, layer.bias, out_dtype=out_dtype), tracing_mode="fake",
                     _allow_non_fake_inputs=True)(x)  # fmt: skip
    targets = [node.target for node in traced.graph.nodes]
    return targets.count(torch.ops.lockstep.cpu_linear.default)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_products_go_through_the_op_where_it_is_faster(
    kernel: bool, slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_linear._Native, "call", None)
    monkeypatch.setattr(cpu_linear, "SLOW_DTYPES", (torch.bfloat16,) if slow else ())
    assert not kernel or cpu_linear.use_native(str(tmp_path))
    x = random(5, 8, seed=3)
    assert calls_of_the_op(make_layer(torch.float32), x) == kernel
    assert calls_of_the_op(make_layer(torch.float32), x, torch.float32) == kernel
    assert calls_of_the_op(make_layer(torch.bfloat16), x.bfloat16()) == (kernel or slow)
    assert calls_of_the_op(make_layer(torch.bfloat16), x.bfloat16(), torch.float32) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_equals_the_default_method(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    layer, x = make_layer(dtype), random(5, 8, seed=3, dtype=dtype)
    found = layer.method.apply(layer, x, layer.bias, out_dtype=out_dtype)
    expected = UnquantizedLinearMethod().apply(layer, x, layer.bias, out_dtype=out_dtype)
    assert found.dtype == expected.dtype == (out_dtype or dtype)
    torch.testing.assert_close(found, expected)


def test_a_head_multiplies_by_the_configured_method_into_fp32() -> None:
    config = get_quant_config(None, CPU)
    head = ParallelLMHead(6, 8, group=single_rank_group(CPU), quant_config=config, dtype=torch.bfloat16)
    assert isinstance(head.method, CpuLinearMethod)
    head.weight.loader.load(Recorded(random(6, 8, seed=1)))
    hidden = random(3, 8, seed=2, dtype=torch.bfloat16)
    found = head(hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.linear(hidden.float(), head.weight.float()))
