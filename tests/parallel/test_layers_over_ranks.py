"""Every parallel layer over real ranks against one nn.Linear or nn.Embedding, at even and uneven sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.group import TensorParallelGroup
from parallel.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel.shard import Shard, split_heads
from tests.dist.ranks import run_ranks
from tests.parallel.sources import Recorded, random

HIDDEN = 48
TOKENS = 7
SIZES = [1, 2, 3, 4]


def filled(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Module:
    """The layer, made on the meta device, with memory and weights."""
    layer.to_empty(device="cpu")
    layer.weight.loader.load(Recorded(weight))
    if bias is not None:
        layer.bias.loader.load(Recorded(bias))
    return layer


def column_parallel(group: TensorParallelGroup, width: int) -> None:
    x, weight, bias = random(TOKENS, HIDDEN, seed=0), random(width, HIDDEN, seed=1), random(width, seed=2)
    expected = F.linear(x, weight, bias)
    with torch.device("meta"):
        local = ColumnParallelLinear(HIDDEN, width, group=group, bias=True)
        whole = ColumnParallelLinear(HIDDEN, width, group=group, bias=True, gather_output=True)
    shard = local.weight_shard.partitions[0].shard
    y, bias_output = filled(local, weight, bias)(x)
    assert bias_output is None
    torch.testing.assert_close(y, expected[:, shard.start : shard.stop])
    torch.testing.assert_close(filled(whole, weight, bias)(x)[0], expected)


def mlp(group: TensorParallelGroup, width: int, reduce_results: bool) -> None:
    x, gate_up = random(TOKENS, HIDDEN, seed=0), random(2 * width, HIDDEN, seed=1)
    down, bias = random(HIDDEN, width, seed=2), random(HIDDEN, seed=3)
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    expected = F.linear(F.silu(gate) * up, down, bias)
    with torch.device("meta"):
        first = MergedColumnParallelLinear(HIDDEN, [width, width], group=group)
        second = RowParallelLinear(width, HIDDEN, group=group, bias=True, reduce_results=reduce_results)
    gate, up = filled(first, gate_up)(x)[0].split(first.local_output_sizes, dim=-1)
    y, _ = filled(second, down, bias)(F.silu(gate) * up)
    assert second.bias.loader.missing() == []
    if not reduce_results:
        if group.size > 1:
            assert not torch.allclose(y, expected)
        y = group.all_reduce(y)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


def attention_projections(group: TensorParallelGroup, heads: int, kv_heads: int) -> None:
    head_dim = 8
    x, bias = random(TOKENS, HIDDEN, seed=0), random((heads + 2 * kv_heads) * head_dim, seed=2)
    qkv, out = random((heads + 2 * kv_heads) * head_dim, HIDDEN, seed=1), random(HIDDEN, heads * head_dim, seed=3)
    q, k, v = F.linear(x, qkv, bias).split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    cut = split_heads(heads, kv_heads, group.size)
    with torch.device("meta"):
        first = QKVParallelLinear(HIDDEN, head_dim, heads, kv_heads, group=group, bias=True)
        shards = tuple(Shard(c.q.start * head_dim, c.q.size * head_dim) for c in cut)
        second = RowParallelLinear(heads * head_dim, HIDDEN, group=group, shards=shards)
    y, _ = filled(first, qkv, bias)(x)
    mine_q, mine_k, mine_v = y.split([first.q_size, first.kv_size, first.kv_size], dim=-1)
    kv = slice(first.head_shard.kv.start * head_dim, first.head_shard.kv.stop * head_dim)
    torch.testing.assert_close(mine_k, k[:, kv])
    torch.testing.assert_close(mine_v, v[:, kv])
    torch.testing.assert_close(filled(second, out)(mine_q)[0], F.linear(q, out), rtol=1e-4, atol=1e-3)


def vocabulary(group: TensorParallelGroup, vocab_size: int) -> None:
    weight, bias = random(vocab_size, HIDDEN, seed=1), random(vocab_size, seed=2)
    ids = torch.tensor([0, vocab_size - 1, 5, 300, 300, 17, vocab_size // 2])
    reference = nn.Embedding.from_pretrained(weight)
    with torch.device("meta"):
        embedding = VocabParallelEmbedding(vocab_size, HIDDEN, group=group, prefix="embed_tokens")
        head = ParallelLMHead(vocab_size, HIDDEN, group=group, bias=True)
        tied = ParallelLMHead(vocab_size, HIDDEN, group=group)
    tied.tie_weights(embedding)
    hidden = filled(embedding, weight)(ids)
    assert torch.equal(hidden, reference(ids))
    assert torch.equal(embedding(ids.int()), reference(ids))
    mine = slice(head.vocab_shard.start, head.vocab_shard.stop)
    torch.testing.assert_close(filled(head, weight, bias)(hidden), F.linear(hidden, weight, bias)[:, mine])
    torch.testing.assert_close(tied(hidden), F.linear(hidden, weight)[:, mine])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", [64, 50])
def test_column_parallel(size: int, width: int) -> None:
    run_ranks(column_parallel, size, width)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", [192, 100])
@pytest.mark.parametrize("reduce_results", [True, False])
def test_merged_and_row_parallel_add_the_bias_once(size: int, width: int, reduce_results: bool) -> None:
    run_ranks(mlp, size, width, reduce_results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
def test_qkv_and_output_projection_by_kv_group(size: int, heads: tuple[int, int]) -> None:
    run_ranks(attention_projections, size, *heads)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab_size", [1003, 1024])
def test_embedding_and_lm_head(size: int, vocab_size: int) -> None:
    run_ranks(vocabulary, size, vocab_size)


def traced(group: TensorParallelGroup) -> str:
    embedding = VocabParallelEmbedding(64, HIDDEN, group=group)
    gate_up = MergedColumnParallelLinear(HIDDEN, [64, 64], group=group)
    down = RowParallelLinear(64, HIDDEN, group=group, bias=True, reduce_results=False)
    column = ColumnParallelLinear(HIDDEN, 64, group=group, gather_output=True)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(embedding(ids))[0].chunk(2, dim=-1)
        return column(down(F.silu(gate) * up)[0])[0]

    return make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.arange(5)).code


def test_a_traced_graph_is_the_same_on_every_rank() -> None:
    # All ranks share compiled subgraphs, so a graph must not contain a rank.
    first, second = run_ranks(traced, 2)
    assert "lockstep.all_reduce" in first
    assert first == second
