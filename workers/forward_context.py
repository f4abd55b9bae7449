"""The forward context: step metadata, attention layers and KV caches that opaque ops read during a forward pass.

Ops cannot take these as arguments, since a captured graph would bind them. The context is ambient state in one form
only: set by a ``with`` statement around one forward pass, never nested, and cleared even if the pass raises. A rank
runs one forward pass at a time, on one thread. This module imports no other module of ``workers/``: attention layers
and backends are known here by the attributes that ops use (:class:`AttentionLayer`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """The flattened batch of one step. R requests, T tokens, T_padded rows.

    Attributes:
        num_tokens: T; rows after it are padding.
        num_reqs: R.
        max_query_len: largest number of new tokens of a request in this step.
        max_seq_len: longest context, including the new tokens.
        slot_mapping: int64 [T_padded], KV cache slot of each token: block * block_size + offset; -1 for tokens whose
            keys and values are not stored.
        block_table: int32 [>= R, max_blocks], the block ids of each request in order; entries past its context are
            never read.
        seq_lens: int32 [>= R], tokens of each request in the KV cache after this step's writes.
        query_start_loc: int32 [>= R + 1]; request r owns rows query_start_loc[r] to query_start_loc[r + 1], the last
            tokens of its context.
    """

    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


class AttentionOps(Protocol):
    """The methods of an attention backend that the forward context, the KV-update op and the attention op call."""

    def prepare_step(self, metadata: AttentionMetadata) -> Any:
        """Derive from the metadata what all layers of a step share."""

    def write_kv(self, step: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Store a step's keys and values, [T_padded, num_kv_heads, head_dim], in their slots."""

    def forward(
        self,
        step: Any,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write the attention of every request into ``output``, and zeros into the padded rows."""


class AttentionLayer(Protocol):
    """The attributes of an attention layer that ops and attention backends read.

    Attributes:
        num_heads: query heads of this rank.
        num_kv_heads: KV heads of this rank.
        head_dim: size of one head.
        scale: factor of the attention scores.
        sliding_window: number of tokens that a token attends to, including itself; None: all before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None

    @property
    def backend(self) -> AttentionOps:
        """The attention backend of this layer."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """The context of one forward pass; :meth:`for_step` builds it.

    Attributes:
        metadata: the flattened batch.
        layers: attention layers by name.
        kv_caches: each layer's KV cache, by the same name.
        steps: what each attention backend of these layers prepared for this step.
    """

    metadata: AttentionMetadata
    layers: Mapping[str, AttentionLayer]
    kv_caches: Mapping[str, torch.Tensor]
    steps: Mapping[AttentionOps, Any]

    @classmethod
    def for_step(
        cls,
        metadata: AttentionMetadata,
        layers: Mapping[str, AttentionLayer],
        kv_caches: Mapping[str, torch.Tensor],
    ) -> ForwardContext:
        """Prepare every attention backend of the layers for a step, once each.

        The runner calls this once per step in every graph mode, also before a FULL graph is replayed.
        """
        backends = dict.fromkeys(layer.backend for layer in layers.values())
        return cls(metadata, layers, kv_caches, {backend: backend.prepare_step(metadata) for backend in backends})


class _Current:
    """Holds the context of the running forward pass, if any."""

    context: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Generator[ForwardContext]:
    """Set the context that ops read, for the duration of the ``with`` block.

    Raises:
        RuntimeError: another forward pass is running.
    """
    if _Current.context is not None:
        raise RuntimeError("a forward pass was begun inside another one; end the first before the second")
    _Current.context = context
    try:
        yield context
    finally:
        _Current.context = None


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass.

    Raises:
        RuntimeError: no forward pass is running: an op was called outside of ``with forward_context(...)``.
    """
    if _Current.context is None:
        raise RuntimeError("no forward pass is running; call the model inside `with forward_context(...)`")
    return _Current.context
