"""What a step says about its requests, and what an attention backend has to offer.

Three methods and one flag, each used in one place. The model gives each attention layer its backend; the ops in
``workers/kernels/ops/`` call it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from workers.forward_context import ForwardContext
    from workers.layers.attention import Attention


@dataclass(frozen=True)
class AttentionMetadata:
    """The flattened batch of one step. R requests, T tokens, T_padded rows.

    Attributes:
        num_tokens: T; rows after it are padding.
        num_reqs: R.
        max_query_len: most new tokens of a request in this step.
        max_seq_len: longest context, the new tokens included.
        slot_mapping: int64 [T_padded], where a token's keys and values go: block * block_size + offset, or -1 for
            nowhere.
        block_table: int32 [>= R, max_blocks], the blocks of each request in order; entries past its context are
            never read.
        seq_lens: int32 [>= R], tokens of each request in the cache once this step has written its own.
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
        layer: Attention,
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
