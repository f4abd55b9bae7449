"""Embedding and LM head in one process: tying and vocabulary shards. Over ranks: test_layers_over_ranks.py."""

from __future__ import annotations

import pytest
import torch

from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.group import TensorParallelGroup, single_rank_group
from tests.parallel.sources import Recorded, random
from tests.parallel.unconnected import ConstantCollectives, unconnected_group

ALONE = single_rank_group(torch.device("cpu"))


def test_a_tied_head_uses_the_materialized_embedding() -> None:
    model = torch.nn.Module()
    with torch.device("meta"):
        model.lm_head = ParallelLMHead(101, 8, group=ALONE)
        model.embed_tokens = VocabParallelEmbedding(101, 8, group=ALONE)
    model.lm_head.tie_weights(model.embed_tokens)
    model.to_empty(device="cpu")
    assert [name for name, _ in model.named_parameters()] == ["embed_tokens.weight"]
    assert model.lm_head.weight is model.embed_tokens.weight
    model.embed_tokens.weight.loader.load(Recorded(random(101, 8, seed=1)))
    hidden = random(3, 8, seed=2)
    torch.testing.assert_close(model.lm_head(hidden), hidden @ random(101, 8, seed=1).T)


def test_tying_to_another_shape_is_refused() -> None:
    head = ParallelLMHead(101, 8, group=ALONE, prefix="lm_head")
    with pytest.raises(ValueError, match=r"lm_head \(101, 8\) .* cannot share .* \(100, 8\)"):
        head.tie_weights(VocabParallelEmbedding(100, 8, group=ALONE))
    second_of_two = unconnected_group(1, 2)
    head = ParallelLMHead(300, 8, group=second_of_two, multiple=128)
    with pytest.raises(ValueError, match=r"Shard\(start=128, size=172\) cannot share .* Shard\(start=144, size=156\)"):
        head.tie_weights(VocabParallelEmbedding(300, 8, group=second_of_two))


def test_embedding_and_head_have_equal_shards_of_an_uneven_vocabulary() -> None:
    held: list[int] = []
    for rank in range(4):
        embedding = VocabParallelEmbedding(1003, 8, group=unconnected_group(rank, 4))
        head = ParallelLMHead(1003, 8, group=unconnected_group(rank, 4))
        assert head.vocab_shard == embedding.vocab_shard
        assert head.weight.shape == (head.vocab_shard.size, 8)
        held += range(head.vocab_shard.start, head.vocab_shard.stop)
    assert held == list(range(1003))


def test_the_lookup_passes_opcheck() -> None:
    group = TensorParallelGroup("embedding", 0, 2, torch.device("cpu"), ConstantCollectives(0, 2))
    weight, ids = random(5, 4, seed=1), torch.tensor([0, 3, 9])
    torch.library.opcheck(torch.ops.lockstep.vocab_embedding.default, (ids, weight, 10, 1, "embedding"))
    group.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_lookup_of_a_group_aligned_vocabulary(rank: int) -> None:
    group = TensorParallelGroup("embedding", rank, 2, torch.device("cpu"), ConstantCollectives(rank, 2))
    embedding = VocabParallelEmbedding(300, 4, group=group, multiple=128)
    table, ids = random(300, 4, seed=1), torch.arange(300)
    embedding.weight.loader.load(Recorded(table))
    held = (ids < 128) == (rank == 0)
    # The all-reduce of the fake group doubles what this rank has.
    assert torch.equal(embedding(ids), torch.where(held[:, None], 2 * table, 0))
    group.close()
