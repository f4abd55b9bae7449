"""The static tensors that graphs are bound to, and the metadata that stands in them while graphs are captured.

The tensors are those of ``workers/batch.py``, refilled in place for every step; nothing here copies them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.batch import BatchBuffers
from workers.forward_context import AttentionMetadata, ForwardContext

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""input_ids [T], positions [T] -> hidden states [T, hidden_size]."""

MakeContext = Callable[[AttentionMetadata], ForwardContext]
"""The forward context of a step with this metadata."""


class StaticInputs:
    """Views of the buffers at a padded size, and batches for capturing that belong to no request."""

    def __init__(self, buffers: BatchBuffers) -> None:
        self._buffers = buffers

    def tokens(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids and positions, int64 [size] each."""
        return self._buffers.input_ids.tensor[:size], self._buffers.positions.tensor[:size]

    def idle(self, size: int, token: int = 0) -> AttentionMetadata:
        """Make the buffers hold ``size`` rows of padding and nothing else: no key or value will be written.

        All rows are the same ``token`` at the position of that number.
        """
        self._clear(size, token)
        return AttentionMetadata(
            num_tokens=0,
            num_reqs=0,
            max_query_len=0,
            max_seq_len=0,
            slot_mapping=self._buffers.slot_mapping.tensor[:size],
            block_table=self._buffers.block_table.tensor[:0],
            seq_lens=self._buffers.seq_lens.tensor[:0],
            query_start_loc=self._buffers.query_start_loc.tensor[:1],
        )

    def prompt(self, size: int) -> AttentionMetadata:
        """Make the buffers hold one request's first ``size`` tokens, or as many as a request can have, none of which
        has a slot: attention computes, on whatever the first block holds, and no key or value will be written.
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

    def decode(self, size: int) -> AttentionMetadata:
        """The metadata of every decode batch padded to ``size``: as many requests as rows, the longest context there
        can be, and the whole buffers, so that a graph captured with it serves them all. Clears the buffers.

        A request that only pads the batch has ``seq_lens`` 0, and ``query_start_loc`` stays where it is.
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

    def _clear(self, size: int, token: int = 0) -> None:
        for static in (self._buffers.input_ids, self._buffers.positions):
            static.tensor[:size].fill_(token)
        self._buffers.slot_mapping.tensor[:size].fill_(-1)
        for static in (self._buffers.seq_lens, self._buffers.query_start_loc):
            static.tensor.zero_()
