"""Rotary position embedding: the table of cosines and sines, and the rotation of heads by it."""

from __future__ import annotations

import math

import torch
from torch import nn

from runtime.common.model_config import RopeConfig
from workers.kernels.ops.rotary_embedding import rotary_embedding, rotate

__all__ = ["RotaryEmbedding", "inverse_frequencies", "rotary_embedding", "rotate"]


class RotaryEmbedding(nn.Module):
    """Looks up the rotation of each position; layers with equal configurations share one.

    The fp32 table is a buffer: it has no memory on the meta device, and :meth:`fill_buffers` computes it when the
    weights are loaded.

    Args:
        config: base and scaling of the angles.
        head_dim: size of a head, even.
        max_positions: positions are 0 to this, excluded.
        dtype: of the result.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.max_positions = max_positions
        self.dtype = dtype
        self.table: torch.Tensor
        self.register_buffer("table", torch.empty(max_positions, head_dim), persistent=False)

    def fill_buffers(self, device: torch.device) -> None:
        """Compute the table on ``device``: [max_positions, head_dim], cosines in the first half, then sines."""
        # Always on the CPU: pow and cos of another device may differ in the last bit, and ranks must agree.
        positions = torch.arange(self.max_positions, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * inverse_frequencies(self.config, self.head_dim)
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for int64 positions [T]: two of [T, 1, head_dim / 2], for :func:`rotary_embedding`."""
        cos, sin = self.table.index_select(0, positions).to(self.dtype).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, fp32 [head_dim / 2].

    Raises:
        ValueError: an unknown kind of scaling.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return plain
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3_scaled(plain, config)
    raise ValueError(f"rope kind {config.kind!r} is unknown; supported: default, linear, llama3")


def _llama3_scaled(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1 scaling by the number of turns that a pair makes within the original context.

    Pairs with many turns keep their frequency, those with few are divided by ``factor``, and those between are
    interpolated linearly in the number of turns.
    """
    wavelengths = 2 * math.pi / plain
    turns = config.original_max_position_embeddings / wavelengths
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    mixed = (1 - kept) * plain / config.factor + kept * plain
    slow = wavelengths > config.original_max_position_embeddings / config.low_freq_factor
    fast = wavelengths < config.original_max_position_embeddings / config.high_freq_factor
    return torch.where(fast, plain, torch.where(slow, plain / config.factor, mixed))
