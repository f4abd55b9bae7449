"""What an attention backend has to offer.

Three methods and one flag, each used in one place. The model gives each attention layer its backend; the ops in
``workers/kernels/ops/`` call it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from workers.forward_context import AttentionLayer, ForwardContext


class AttentionBackend(ABC):
    """How keys and values are kept, and how a step attends to them."""

    writes_kv_in_forward: ClassVar[bool] = False
    """Whether :meth:`forward` stores the new keys and values itself, so that no KV-update op runs before it."""

    capturable: ClassVar[bool] = False
    """Whether a step launches the same kernels whatever the batch holds, reading nothing back to the host, so that a
    CUDA graph can hold it."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """The shape of one layer's cache; dimension 0 is blocks. Called by ``workers/kv_cache.py``."""

    @abstractmethod
    def write_kv(self, context: ForwardContext, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store a step's keys and values, [T_padded, num_kv_heads, head_dim], in their slots.

        Called by the KV-update op. Tokens with slot -1 are stored nowhere.
        """

    @abstractmethod
    def forward(
        self,
        context: ForwardContext,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write every request's attention into ``output``, zeros into the padded rows. Called by the attention op.

        Args:
            context: of the running forward pass.
            layer: says scale and window.
            query: [T_padded, num_heads, head_dim], rotated.
            key: [T_padded, num_kv_heads, head_dim], this step's own, rotated.
            value: like ``key``.
            kv_cache: of this layer; already holds this step's keys and values unless ``writes_kv_in_forward``.
            output: [T_padded, num_heads, head_dim].
        """
