"""Embedding and LM head in one process: tying, and who holds which tokens. Over ranks: test_layers_over_ranks.py."""

from __future__ import annotations

import pytest
import torch

from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.group import single_rank_group
from tests.parallel.sources import Recorded, random
from tests.parallel.unconnected import unconnected_group

ALONE = single_rank_group(torch.device("cpu"))


def test_a_tied_head_follows_the_embedding_through_materialising() -> None:
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
    with pytest.raises(ValueError, match=r"lm_head \(101, 8\) cannot share .* \(100, 8\)"):
        head.tie_weights(VocabParallelEmbedding(100, 8, group=ALONE))


def test_an_uneven_vocabulary_is_held_completely_and_alike_by_both_ends() -> None:
    held: list[int] = []
    for rank in range(4):
        embedding = VocabParallelEmbedding(1003, 8, group=unconnected_group(rank, 4))
        head = ParallelLMHead(1003, 8, group=unconnected_group(rank, 4))
        assert head.vocab_shard == embedding.vocab_shard
        assert head.weight.shape == (head.vocab_shard.size, 8)
        held += range(head.vocab_shard.start, head.vocab_shard.stop)
    assert held == list(range(1003))
