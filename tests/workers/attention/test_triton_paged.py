"""The Triton backend's plumbing with its ops' plain-torch implementations; the kernels are tests/workers/kernels/'s."""

from __future__ import annotations

import pytest
import torch

from workers.attention.registry import create_backend
from workers.attention.torch_paged import TorchPagedAttention
from workers.attention.triton_paged import TritonPagedAttention
from workers.forward_context import AttentionMetadata, ForwardContext, forward_context
from workers.layers.attention import Attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 16, 4

MIXED = AttentionMetadata(
    num_tokens=7,
    num_reqs=3,
    max_query_len=4,
    max_seq_len=9,
    slot_mapping=torch.tensor([20, 4, 5, 6, 7, 17, 18, -1, -1]),
    block_table=torch.tensor([[2, 0, 5], [1, 0, 0], [3, 4, 0]], dtype=torch.int32),
    seq_lens=torch.tensor([9, 4, 7], dtype=torch.int32),
    query_start_loc=torch.tensor([0, 1, 5, 7], dtype=torch.int32),
)
"""A request that decodes, a prompt, a chunk after 5 cached tokens, and two rows of padding."""

CAPTURED = AttentionMetadata(
    num_tokens=4,
    num_reqs=4,
    max_query_len=1,
    max_seq_len=12,
    slot_mapping=torch.tensor([20, 6, -1, -1]),
    block_table=torch.tensor([[2, 0, 5], [1, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.int32),
    seq_lens=torch.tensor([9, 3, 0, 0], dtype=torch.int32),
    query_start_loc=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
)
"""Two requests that decode in a graph for four."""


def attend(
    backend: TorchPagedAttention | TritonPagedAttention, metadata: AttentionMetadata, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output for random inputs, always the same, and the cache afterwards."""
    generator = torch.Generator().manual_seed(0)
    layer = Attention(
        HEADS, KV_HEADS, HEAD_DIM, dtype=torch.float32, backend=backend, prefix="a", sliding_window=window
    )
    cache = torch.randn(backend.kv_cache_shape(6, BLOCK, KV_HEADS, HEAD_DIM), generator=generator)
    rows = metadata.slot_mapping.shape[0]
    inputs = (torch.randn(rows, heads, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with forward_context(ForwardContext.for_step(metadata, {"a": layer}, {"a": cache})):
        return layer(*inputs), cache


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("metadata", [MIXED, CAPTURED], ids=["mixed", "captured"])
def test_equals_the_torch_backend(metadata: AttentionMetadata, window: int | None) -> None:
    output, cache = attend(TritonPagedAttention(), metadata, window)
    real = 2 if metadata is CAPTURED else metadata.num_tokens
    plain = AttentionMetadata(
        **vars(metadata) | {"num_tokens": real, "num_reqs": 2 if metadata is CAPTURED else metadata.num_reqs}
    )
    expected, expected_cache = attend(TorchPagedAttention(), plain, window)
    torch.testing.assert_close(output, expected)
    assert cache.equal(expected_cache)
    assert output[:real].all()
    assert not output[real:].any()


def test_choice_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(device: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> type:
        return type(create_backend("auto", torch.device(device), dtype=dtype, head_dim=head_dim))

    monkeypatch.setattr("workers.attention.triton_paged.triton_is_installed", lambda: True)
    assert chosen("cuda") is TritonPagedAttention
    assert chosen("cpu") is not TritonPagedAttention
    assert chosen("cuda", torch.float64) is TorchPagedAttention
    assert chosen("cuda", head_dim=512) is TorchPagedAttention
    monkeypatch.setattr("workers.attention.triton_paged.triton_is_installed", lambda: False)
    assert chosen("cuda") is TorchPagedAttention


def test_a_graph_can_hold_it() -> None:
    assert TritonPagedAttention.capturable
    assert not TorchPagedAttention.capturable
