"""The paged KV cache of one rank: bytes per block, and the cache tensors.

The driver sets the number of blocks (the minimum over ranks), ``runtime/engine/block_pool.py`` assigns blocks to
requests, and the attention backend defines the layout of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from workers.layers.attention import Attention
from workers.models.decoder import DecoderForCausalLM


@dataclass(frozen=True)
class KVCacheSpec:
    """The attention layers that have a KV cache, and the block size.

    Attributes:
        layers: attention layers by name, with this rank's heads.
        block_size: tokens in a block.
    """

    layers: Mapping[str, Attention]
    block_size: int

    @classmethod
    def from_model(cls, model: DecoderForCausalLM, block_size: int) -> KVCacheSpec:
        """The spec of a model's attention layers."""
        return cls(dict(model.attention_layers), block_size)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, summed over the layers of this rank."""
        return sum(math.prod(self._shape(layer, 1)) * layer.dtype.itemsize for layer in self.layers.values())

    def shape_of(self, name: str, num_blocks: int) -> tuple[int, ...]:
        """The shape of one layer's cache."""
        return self._shape(self.layers[name], num_blocks)

    def _shape(self, layer: Attention, num_blocks: int) -> tuple[int, ...]:
        return layer.backend.kv_cache_shape(num_blocks, self.block_size, layer.num_kv_heads, layer.head_dim)


def allocate_kv_cache(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> dict[str, torch.Tensor]:
    """One tensor of zeros per layer, by the layer's name; dimension 0 is blocks.

    Raises:
        ValueError: fewer than one block.
    """
    if num_blocks < 1:
        raise ValueError(f"a KV cache has at least one block; got num_blocks={num_blocks}")
    return {name: _zeros(spec.shape_of(name, num_blocks), layer.dtype, device) for name, layer in spec.layers.items()}


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros; on the CPU its pages are allocated at the first write.

    ``torch.zeros`` writes the whole tensor, which takes seconds at start-up; NumPy maps zero pages instead.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
