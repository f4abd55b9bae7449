"""Rotary embedding equals transformers' bit for bit, for every kind of scaling and dtype."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from runtime.common.model_config import RopeConfig
from workers.layers.rotary import RotaryEmbedding, inverse_frequencies, rotate

LLAMA3 = RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)
CONFIGS = {
    "default": (RopeConfig(10000.0), {}),
    "linear": (RopeConfig(500.0, "linear", 4.0), {"factor": 4.0}),
    "llama3": (
        LLAMA3,
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_equals_transformers(kind: str, dtype: torch.dtype) -> None:
    config, parameters = CONFIGS[kind]
    rope = {"rope_type": kind, "rope_theta": config.theta, **parameters}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=512, rope_parameters=rope)
    )
    assert inverse_frequencies(config, 32).equal(theirs.inv_freq)

    with torch.device("meta"):
        ours = RotaryEmbedding(config, 32, 512, dtype=dtype)
    ours.fill_buffers(torch.device("cpu"))
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 63, 64, 300, 511])
    query, key = torch.randn(7, 4, 32).to(dtype), torch.randn(7, 2, 32).to(dtype)
    expected = apply_rotary_pos_emb(query, key, *theirs(query, positions[None])[:2], unsqueeze_dim=2)
    assert rotate(query, *ours(positions)).equal(expected[0][0])
    assert rotate(key, *ours(positions)).equal(expected[1][0])


def test_llama3_slows_only_slow_pairs() -> None:
    ratio = inverse_frequencies(RopeConfig(10000.0), 32) / inverse_frequencies(LLAMA3, 32)
    assert ratio[0] == 1.0
    assert ratio[-1] == 8.0
    assert bool((ratio.diff() >= 0).all())


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="'yarn' is unknown; supported: default, linear, llama3"):
        inverse_frequencies(RopeConfig(kind="yarn"), 32)
