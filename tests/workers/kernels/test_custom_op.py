"""Which form of an op a layer gets: the kernel's op on a GPU, plain torch elsewhere and under a compiler."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.kernels.conftest import REPOSITORY
from workers.layers.mlp import SiluAndMul
from workers.layers.norm import RMSNorm
from workers.layers.rotary import rotary_embedding

NAMES = ("silu_and_mul", "rms_norm", "fused_add_rms_norm", "rotary_embedding")


def computation(name: str, device: str) -> Callable[[], Any]:
    """What a decoder computes with the op of that name."""
    x = torch.ones(3, 8, device=device)
    if name == "silu_and_mul":
        return functools.partial(SiluAndMul(), x)
    if name == "rotary_embedding":
        query, key = (torch.ones(3, heads, 8, device=device) for heads in (4, 2))
        return functools.partial(rotary_embedding, query, key, *torch.ones(2, 3, 1, 4, device=device))
    norm = RMSNorm(8, 1e-5, dtype=torch.float32)
    norm.weight = torch.nn.Parameter(torch.ones(8, device=device), requires_grad=False)
    return functools.partial(norm, x, x) if name == "fused_add_rms_norm" else functools.partial(norm, x)


class Recorded(TorchDispatchMode):
    """The names of the ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gets_the_op_and_a_cpu_plain_torch(name: str) -> None:
    ran: dict[str, list[str]] = {}
    for device in ("cuda", "cpu"):
        with FakeTensorMode(), Recorded() as recorded:
            computation(name, device)()
        ran[device] = recorded.names
    assert f"lockstep.{name}" in ran["cuda"]
    assert not [op for op in ran["cuda"] if op in ("aten.mul.Tensor", "aten.silu", "aten.rsqrt")]
    assert not [op for op in ran["cpu"] if op.startswith("lockstep")]


@pytest.mark.parametrize("name", NAMES)
def test_a_compiler_gets_plain_torch(name: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compute = computation(name, "cpu")
    torch.compile(lambda: compute(), backend=keep, fullgraph=True)()
    assert len(graphs) == 1
    assert "lockstep" not in graphs[0].code


@pytest.mark.parametrize("name", [*NAMES, "kv_cache_write", "paged_attention"])
def test_the_op_has_both_implementations(name: str) -> None:
    importlib.import_module(f"workers.kernels.ops.{name.removeprefix('fused_add_')}")
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lockstep::{name}", key)


def test_triton_is_not_imported_before_a_kernel_is_launched() -> None:
    code = "import sys, workers.attention.triton_paged, workers.models.registry; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=60)
