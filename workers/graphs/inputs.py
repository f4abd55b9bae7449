"""The static inputs that graphs are bound to, and dummy batches in them for warm-up, capture and profiling.

The tensors are those of ``workers/batch.py``, refilled in place for every step; nothing here copies them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.batch import BatchBuffers
from workers.forward_context import AttentionMetadata, ForwardContext

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""input_ids [T], positions [T] -> hidden states [T, hidden_size], inside a forward context."""

MakeContext = Callable[[AttentionMetadata], ForwardContext]
"""The forward context of a step with this metadata."""


class StaticInputs:
    """The batch buffers, and dummy batches in them. A dummy batch writes no KV: its slots are -1.

    Attributes:
        tokens: input_ids and positions at a padded size, see :meth:`workers.batch.BatchBuffers.tokens`.
    """

    def __init__(self, buffers: BatchBuffers) -> None:
        self._buffers = buffers
        self.tokens = buffers.tokens

    def dummy_prompt(self, size: int) -> AttentionMetadata:
        """Fill the buffers with one request's first ``size`` tokens, at most ``max_model_len``; other rows are padding.

        Attention reads whatever block 0 holds.
        """
        self._clear(size)
        length = min(size, self._buffers.max_model_len)
        self._buffers.block_table.tensor[:1].zero_()
        self._buffers.seq_lens.tensor[:1].fill_(length)
        self._buffers.query_start_loc.tensor[1:2].fill_(length)
        return AttentionMetadata(
            num_tokens=length,
            num_reqs=1,
            max_query_len=length,
            max_seq_len=length,
            slot_mapping=self._buffers.slot_mapping.tensor[:size],
            block_table=self._buffers.block_table.tensor[:1],
            seq_lens=self._buffers.seq_lens.tensor[:1],
            query_start_loc=self._buffers.query_start_loc.tensor[:2],
        )

    def dummy_decode(self, size: int) -> AttentionMetadata:
        """Clear the buffers; returns the metadata of every decode batch that is padded to ``size``.

        It has as many requests as rows, the maximum context length and the whole buffers, so a graph that is captured
        with it serves all those batches. A request that only pads a batch has ``seq_lens`` 0 and no tokens in
        ``query_start_loc``.
        """
        self._clear(size)
        return AttentionMetadata(
            num_tokens=size,
            num_reqs=size,
            max_query_len=1,
            max_seq_len=self._buffers.max_model_len,
            slot_mapping=self._buffers.slot_mapping.tensor[:size],
            block_table=self._buffers.block_table.tensor[:size],
            seq_lens=self._buffers.seq_lens.tensor[:size],
            query_start_loc=self._buffers.query_start_loc.tensor[: size + 1],
        )

    def _clear(self, size: int) -> None:
        for static in (self._buffers.input_ids, self._buffers.positions):
            static.tensor[:size].zero_()
        self._buffers.slot_mapping.tensor[:size].fill_(-1)
        for static in (self._buffers.seq_lens, self._buffers.query_start_loc):
            static.tensor.zero_()
