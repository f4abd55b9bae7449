"""The attention layer: which ops it calls, when, and in which order (the numbers are tested in ../attention/)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workers.attention.torch_paged import TorchPagedAttention
from workers.forward_context import AttentionMetadata, ForwardContext, forward_context
from workers.layers.attention import Attention


class Recorder(TorchDispatchMode):
    """Names of the ops of ours that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lockstep":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class WritesItself(TorchPagedAttention):
    """A backend whose forward stores keys and values."""

    writes_kv_in_forward = True

    def forward(self, step, layer, query, key, value, kv_cache, output) -> None:  # type: ignore[no-untyped-def]
        self.write_kv(step, key, value, kv_cache)
        super().forward(step, layer, query, key, value, kv_cache, output)


def run(layer: Attention) -> tuple[torch.Tensor, list[str]]:
    """The layer's output for two requests with one cached token each, and the ops that it called."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    cache = torch.randn(layer.backend.kv_cache_shape(4, 2, 2, 8))
    metadata = AttentionMetadata(
        num_tokens=2,
        num_reqs=2,
        max_query_len=1,
        max_seq_len=2,
        slot_mapping=torch.tensor([3, 7]),
        block_table=torch.tensor([[1], [3]], dtype=torch.int32),
        seq_lens=torch.tensor([2, 2], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
    )
    with forward_context(ForwardContext.for_step(metadata, {"a": layer}, {"a": cache})), Recorder() as recorder:
        return layer(query, key, value), recorder.names


def make(backend: TorchPagedAttention, opaque: bool | None = None) -> Attention:
    return Attention(4, 2, 8, dtype=torch.float32, backend=backend, prefix="a", opaque=opaque)


def test_update_then_attention() -> None:
    output, names = run(make(TorchPagedAttention()))
    assert names == ["lockstep::kv_cache_update", "lockstep::attention"]
    assert output.shape == (2, 32)


def test_no_update_where_the_backend_stores_itself() -> None:
    output, names = run(make(WritesItself()))
    assert names == ["lockstep::attention"]
    assert output.equal(run(make(TorchPagedAttention()))[0])


@pytest.mark.parametrize("backend", [TorchPagedAttention(), WritesItself()])
def test_functions_are_called_directly_where_the_platform_wants_no_op(backend: TorchPagedAttention) -> None:
    output, names = run(make(backend, opaque=False))
    assert names == []
    assert output.equal(run(make(backend))[0])


def test_impossible_heads() -> None:
    with pytest.raises(ValueError, match="x: 5 query heads are not whole groups of 2"):
        Attention(5, 2, 8, dtype=torch.float32, backend=TorchPagedAttention(), prefix="x")
