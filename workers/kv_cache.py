"""The paged KV cache of one rank: what a block costs, and the tensors.

How many blocks there are is decided by the driver (the minimum over ranks); which request holds which block is
``runtime/engine/block_pool.py``'s; how a block is laid out is the attention backend's.
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
    """The layers that keep keys and values, and how many tokens a block of each holds.

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
        """Bytes of one block in all layers of this rank."""
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
        raise ValueError(f"a KV cache has at least one block; {num_blocks} were asked for")
    return {name: _zeros(spec.shape_of(name, num_blocks), layer.dtype, device) for name, layer in spec.layers.items()}


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that, on the CPU, cost memory and time only once they are written.

    ``torch.zeros`` writes all of them: seconds at start-up for a cache of which most requests use little. NumPy asks
    the kernel for zero pages instead.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
