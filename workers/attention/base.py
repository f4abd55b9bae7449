"""The interface of attention backends.

A model has one backend, shared by its attention layers; ``registry.py`` selects it. Once per step the forward context
calls :meth:`AttentionBackend.prepare_step`; the KV-update and attention ops pass what it returned to
:meth:`AttentionBackend.write_kv` and :meth:`AttentionBackend.forward` of every layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import torch

from workers.forward_context import AttentionLayer, AttentionMetadata

Step = TypeVar("Step")
"""What a backend derives from the metadata of one step."""


class AttentionBackend(ABC, Generic[Step]):
    """KV-cache layout, KV writes and attention, for every layer of a model.

    The class variables state what a backend requires; ``registry.py`` checks them before it makes one.
    """

    device_types: ClassVar[tuple[str, ...]] = ()
    """Device types it runs on; empty: all."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    """Dtypes of queries and cache; empty: all."""

    max_head_dim: ClassVar[int | None] = None
    """Largest size of one head; None: any."""

    writes_kv_in_forward: ClassVar[bool] = False
    """Whether :meth:`forward` stores the new keys and values itself, so that no KV-update op runs before it."""

    capturable: ClassVar[bool] = False
    """Whether a CUDA graph can contain it: the kernels launched do not depend on the batch, and nothing is read back
    to the host."""

    @classmethod
    def missing(cls) -> str:
        """The dependency that is not available on this machine, e.g. a compiler; "" if none is."""
        return ""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's KV cache; dimension 0 is blocks."""

    @abstractmethod
    def prepare_step(self, metadata: AttentionMetadata) -> Step:
        """Derive from the metadata what all layers of a step share.

        Called once per step, before the forward pass or the graph replay, in every graph mode. A backend whose FULL
        graphs read buffers of its own refills them here.
        """

    @abstractmethod
    def write_kv(self, step: Step, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store a step's keys and values, [T_padded, num_kv_heads, head_dim], in their slots.

        Called by the KV-update op. Tokens with slot -1 are not stored.

        Raises:
            KVCacheBoundsError: a slot lies outside the cache. Backends that cannot read the slots on the host skip
                such a token instead.
        """

    @abstractmethod
    def forward(
        self,
        step: Step,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write the attention of every request into ``output``, and zeros into the rows of padding.

        Called by the attention op.

        Args:
            step: from :meth:`prepare_step`.
            layer: gives scale and window.
            query: [T_padded, num_heads, head_dim], rotated.
            key: [T_padded, num_kv_heads, head_dim], this step's own, rotated.
            value: like ``key``.
            kv_cache: of this layer; already holds this step's keys and values unless ``writes_kv_in_forward``.
            output: [T_padded, num_heads, head_dim].

        Raises:
            KVCacheBoundsError: a block id lies outside the cache, where the backend can read it on the host.
        """
