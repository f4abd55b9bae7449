"""The ops: torch's own checks of schema and fake, and their plain references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from workers.attention.torch_paged import TorchPagedAttention
from workers.forward_context import AttentionMetadata, ForwardContext, forward_context
from workers.kernels.ops import rms_norm, rotary_embedding, silu_and_mul
from workers.kernels.ops.kv_cache_write import kv_cache_write_reference
from workers.kernels.ops.paged_attention import attention_reference, paged_attention_reference
from workers.layers.attention import Attention

KV_HEADS, HEADS, HEAD_DIM, BLOCK = 2, 6, 16, 4
ops = torch.ops.lockstep
REGISTERED = (rms_norm, rotary_embedding, silu_and_mul)  # whose import registers the ops


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
    with forward_context(ForwardContext.for_step(metadata, {"layer": layer}, {"layer": cache})) as active:
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
    kv_cache_write_reference(key, value, expected, context.metadata.slot_mapping)
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


def test_fused_ops_pass_opcheck() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    heads = torch.randn(3, 6, HEAD_DIM)
    cos, sin = torch.randn(3, 1, HEAD_DIM).chunk(2, dim=-1)
    calls: dict[str, tuple[torch.Tensor | float, ...]] = {
        "silu_and_mul": (x,),
        "rms_norm": (x, weight, 1e-5),
        "fused_add_rms_norm": (x, torch.randn(3, 8), weight, 1e-5),
        "rotary_embedding": (heads[:, :4], heads[:, 4:], cos, sin),
    }
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(ops, name).default, arguments)


def test_cache_ops_pass_opcheck(context: ForwardContext) -> None:
    query, key, value = inputs()
    cache = torch.randn_like(context.kv_caches["layer"])
    torch.library.opcheck(ops.kv_cache_write.default, (key, value, cache, context.metadata.slot_mapping))
    torch.library.opcheck(
        ops.paged_attention.default, (query, cache, torch.empty_like(query), *step_of(context.metadata), 0.5, 3)
    )


def step_of(metadata: AttentionMetadata) -> tuple[torch.Tensor | int, ...]:
    """The arguments of ``paged_attention`` that describe a step."""
    tensors = (metadata.block_table, metadata.seq_lens, metadata.query_start_loc)
    return (*tensors, metadata.num_reqs, metadata.max_query_len, metadata.max_seq_len)


def test_paged_reference_equals_attention(context: ForwardContext) -> None:
    query, key, value = inputs()
    expected, output = torch.empty_like(query), torch.full_like(query, float("nan"))
    ops.attention(query, key, value, expected, "layer", ops.kv_cache_update(key, value, "layer"))
    paged_attention_reference(query, context.kv_caches["layer"], output, *step_of(context.metadata), HEAD_DIM**-0.5, 0)
    torch.testing.assert_close(output, expected)


def test_references_equal_torch() -> None:
    x, weight, residual = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected)
    normed, stream = ops.fused_add_rms_norm(x - residual, residual, weight, 1e-5)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(stream, x)
    torch.testing.assert_close(ops.silu_and_mul(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
