"""Rotary position embedding: a table of cosines and sines, and the rotation of a head's two halves by them."""

from __future__ import annotations

import math

import torch
from torch import nn

from runtime.common.model_config import RopeConfig
from workers.kernels.ops.rotary_embedding import rotary_embedding, rotate

__all__ = ["RotaryEmbedding", "inverse_frequencies", "rotary_embedding", "rotate"]


class RotaryEmbedding(nn.Module):
    """Looks up the rotation of each position; one serves all layers of a model.

    The table is fp32 and not a parameter: like one it is empty on the meta device, and :meth:`fill_buffers` computes it
    when the weights come.

    Args:
        config: base, and how angles are scaled.
        head_dim: size of a head, even.
        max_positions: positions 0 to this (excluded) can be asked for.
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
        # Always on the CPU: another device's pow or cos may differ in the last bit, and ranks must not.
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
        ValueError: a kind of scaling that is not known here.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return plain
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3_scaled(plain, config)
    raise ValueError(f"rope kind {config.kind!r} is unknown; there are default, linear, llama3")


def _llama3_scaled(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Keep the pairs that turn often within the original context, slow those that hardly turn by ``factor``.

    Those between are a mixture, linear in the number of turns.
    """
    wavelengths = 2 * math.pi / plain
    turns = config.original_max_position_embeddings / wavelengths
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    mixed = (1 - kept) * plain / config.factor + kept * plain
    slow = wavelengths > config.original_max_position_embeddings / config.low_freq_factor
    fast = wavelengths < config.original_max_position_embeddings / config.high_freq_factor
    return torch.where(fast, plain, torch.where(slow, plain / config.factor, mixed))
