"""The KV cache: what a block costs is what is allocated, on every rank."""

from __future__ import annotations

import pytest
import torch

from parallel.group import TensorParallelGroup, single_rank_group
from runtime.common.model_config import ModelConfig
from tests.dist.ranks import run_ranks
from workers.kv_cache import KVCacheSpec, allocate_kv_cache
from workers.models.registry import build_model

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", hidden_size=96, intermediate_size=64, num_layers=3, num_heads=9, num_kv_heads=3,
    head_dim=16, vocab_size=64, max_position_embeddings=32,
)  # fmt: skip


def measure(group: TensorParallelGroup, dtype: str = "bfloat16") -> list[int]:
    """(bytes of a block, KV heads) of this rank, after comparing with what is allocated."""
    model = build_model(CONFIG, group=group, dtype=getattr(torch, dtype))
    spec = KVCacheSpec.from_model(model, 8)
    caches = allocate_kv_cache(spec, 5, group.device)
    assert list(caches) == list(model.attention_layers)
    assert sum(cache.nbytes for cache in caches.values()) == 5 * spec.bytes_per_block
    assert all(cache.shape[0] == 5 and not cache.any() for cache in caches.values())
    return [spec.bytes_per_block, next(iter(model.attention_layers.values())).num_kv_heads]


def test_block_holds_keys_and_values_of_all_layers() -> None:
    group = single_rank_group(torch.device("cpu"))
    assert measure(group) == [3 * 2 * 3 * 8 * 16 * 2, 3]
    assert measure(group, "float32")[0] == 2 * measure(group)[0]


def test_ranks_with_uneven_heads() -> None:
    per_head = 3 * 2 * 8 * 16 * 2
    assert run_ranks(measure, 2) == [[2 * per_head, 2], [per_head, 1]]


def test_no_blocks() -> None:
    model = build_model(CONFIG, group=single_rank_group(torch.device("cpu")), dtype=torch.float32)
    with pytest.raises(ValueError, match="at least one block; got num_blocks=0"):
        allocate_kv_cache(KVCacheSpec.from_model(model, 8), 0, torch.device("cpu"))
