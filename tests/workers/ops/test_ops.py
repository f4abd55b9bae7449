"""The attention and KV-update ops: torch's own checks of schema and fake, and their plain references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from workers.attention.base import AttentionMetadata
from workers.attention.torch_paged import TorchPagedAttention
from workers.forward_context import ForwardContext, forward_context
from workers.layers.attention import Attention
from workers.ops.attention import attention_reference
from workers.ops.kv_cache_update import kv_cache_update_reference

KV_HEADS, HEADS, HEAD_DIM, BLOCK = 2, 6, 16, 4
ops = torch.ops.lockstep


@pytest.fixture
def context() -> Iterator[ForwardContext]:
    """A pass over one request of 5 new tokens and one of 1 new after 2 cached, and two rows of padding."""
    torch.manual_seed(0)
    layer = Attention(HEADS, KV_HEADS, HEAD_DIM, dtype=torch.float32, backend=TorchPagedAttention(), prefix="layer")
    metadata = AttentionMetadata(
        num_tokens=6,
        num_reqs=2,
        max_query_len=5,
        max_seq_len=5,
        slot_mapping=torch.tensor([8, 9, 10, 11, 4, 2, -1, -1]),
        block_table=torch.tensor([[2, 1], [0, 0]], dtype=torch.int32),
        seq_lens=torch.tensor([5, 3], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 5, 6], dtype=torch.int32),
    )
    cache = torch.randn(3, 2, KV_HEADS, BLOCK, HEAD_DIM)
    with forward_context(ForwardContext(metadata, {"layer": layer}, {"layer": cache})) as active:
        yield active


def inputs(tokens: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    query, key, value = (torch.randn(tokens, h, HEAD_DIM, generator=generator) for h in heads)
    return query, key, value


def test_attention_passes_opcheck(context: ForwardContext) -> None:
    query, key, value = inputs()
    written = ops.kv_cache_update(key, value, "layer")
    for last in (written, None):
        torch.library.opcheck(ops.attention.default, (query, key, value, torch.empty_like(query), "layer", last))


def test_kv_cache_update_passes_opcheck(context: ForwardContext) -> None:
    _, key, value = inputs()
    torch.library.opcheck(ops.kv_cache_update.default, (key, value, "layer"))


def test_schemas_say_what_is_written() -> None:
    arguments = {a.name: a for a in ops.attention.default._schema.arguments}
    assert [n for n, a in arguments.items() if a.alias_info and a.alias_info.is_write] == ["output", "output_scale"]
    assert ops.attention.default._schema.returns == []
    assert str(ops.kv_cache_update.default._schema).endswith("-> Tensor")


def test_update_equals_its_reference(context: ForwardContext) -> None:
    _, key, value = inputs()
    expected = context.kv_caches["layer"].clone()
    kv_cache_update_reference(key, value, expected, context.metadata.slot_mapping)
    written = ops.kv_cache_update(key, value, "layer")
    assert written.shape == (0,)
    assert context.kv_caches["layer"].equal(expected)


def test_attention_equals_its_reference(context: ForwardContext) -> None:
    query, key, value = inputs()
    cached = context.kv_caches["layer"].clone()
    output = torch.full_like(query, float("nan"))
    ops.attention(query, key, value, output, "layer", ops.kv_cache_update(key, value, "layer"))
    first = attention_reference(query[:5], key[:5], value[:5], scale=HEAD_DIM**-0.5, window=None)
    torch.testing.assert_close(output[:5], first)
    keys, values = (
        torch.cat((cached[0, part, :, :2].transpose(0, 1), new[5:6])) for part, new in ((0, key), (1, value))
    )
    torch.testing.assert_close(
        output[5:6], attention_reference(query[5:6], keys, values, scale=HEAD_DIM**-0.5, window=None)
    )
    assert output[6:].equal(torch.zeros_like(output[6:]))


def test_reference_equals_torch() -> None:
    query, key, value = inputs(9)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    whole = attention_reference(query, key, value, scale=HEAD_DIM**-0.5, window=None)
    torch.testing.assert_close(whole, expected)
    last = attention_reference(query[6:], key, value, scale=HEAD_DIM**-0.5, window=None)
    torch.testing.assert_close(last, expected[6:])


def test_quantized_output_is_refused(context: ForwardContext) -> None:
    query, key, value = inputs()
    with pytest.raises(NotImplementedError, match="layer: TorchPagedAttention does not quantize"):
        ops.attention(query, key, value, torch.empty_like(query), "layer", None, torch.ones(1))


def test_outside_of_a_forward_pass() -> None:
    query, key, value = inputs()
    with pytest.raises(RuntimeError, match="no forward pass is running"):
        ops.attention(query, key, value, torch.empty_like(query), "layer")
