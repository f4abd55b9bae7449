"""From a StepPlan to the tensors one forward pass reads: per-request state, and the static buffers.

A worker keeps for every live request its tokens, how many of them are computed, and its KV blocks; plans are deltas to
that. The buffers are allocated once at the largest size a step can have and refilled in place, so a captured graph
can be bound to them; dimension 0 is *tokens of the step*, never requests. Running the model and sampling are
``runner.py``'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runtime.common.errors import ProtocolError
from runtime.common.protocol import NewRequest, StepPlan
from workers.forward_context import AttentionMetadata

PADDING_SLOT = -1
"""The slot of tokens that only fill the batch up to a captured size: never written to the KV cache."""


class RequestState:
    """One live request as a worker knows it.

    Attributes:
        token_ids: int64 [capacity]; the first ``num_tokens`` are known.
        num_computed: how many of them have their keys and values in the cache.
        block_ids: int32 [max_blocks]; the first ``num_blocks`` are its KV blocks in order.
    """

    def __init__(self, new: NewRequest, max_model_len: int, max_blocks: int) -> None:
        self.token_ids = np.zeros(max_model_len + 1, dtype=np.int64)
        self.num_tokens = len(new.token_ids)
        self.token_ids[: self.num_tokens] = new.token_ids
        self.num_computed = new.num_computed
        self.block_ids = np.zeros(max_blocks, dtype=np.int32)
        self.num_blocks = 0

    def append_token(self, token_id: int) -> None:
        """Add the token that was sampled for this request."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def append_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Add KV blocks at the end of the block table."""
        end = self.num_blocks + len(block_ids)
        self.block_ids[self.num_blocks : end] = block_ids
        self.num_blocks = end


@dataclass(frozen=True)
class Batch:
    """One step's input, ready to run.

    Attributes:
        metadata: what attention reads.
        num_tokens: tokens of the step, without padding.
        sample_rows: int64 [n], rows of the hidden states whose next token is wanted.
        sample_req_ids: the n requests those rows belong to.
    """

    metadata: AttentionMetadata
    num_tokens: int
    sample_rows: torch.Tensor
    sample_req_ids: list[int]


class _Mirror:
    """A device tensor with a host array in front of it; on CPU the two are the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.array = self._host.numpy()
        self.tensor = torch.zeros(shape, dtype=dtype, device=device) if pinned else self._host

    def upload(self, length: int) -> torch.Tensor:
        """The first ``length`` rows on the device, after the host's values were written."""
        if self.tensor is not self._host:
            self.tensor[:length].copy_(self._host[:length], non_blocking=True)
        return self.tensor[:length]


class BatchBuffers:
    """The static buffers of a rank and the requests whose steps they hold.

    Args:
        max_num_tokens: most tokens in one step, padding included.
        max_num_reqs: most requests in one step.
        max_model_len: most tokens of one request.
        block_size: tokens in one KV block.
    """

    def __init__(
        self, *, max_num_tokens: int, max_num_reqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self.max_num_tokens = max_num_tokens
        self.requests: dict[int, RequestState] = {}
        self.input_ids = _Mirror((max_num_tokens,), torch.int64, device)
        self.positions = _Mirror((max_num_tokens,), torch.int64, device)
        self.slot_mapping = _Mirror((max_num_tokens,), torch.int64, device)
        self.block_table = _Mirror((max_num_reqs, self.max_blocks), torch.int32, device)
        self.seq_lens = _Mirror((max_num_reqs,), torch.int32, device)
        self.query_start_loc = _Mirror((max_num_reqs + 1,), torch.int32, device)
        self.sample_rows = _Mirror((max_num_reqs,), torch.int64, device)

    def apply(self, plan: StepPlan) -> None:
        """Take in what a plan says about requests: those to forget, the new ones, and new blocks.

        Raises:
            ProtocolError: the plan names a request this rank does not know: it has missed an earlier plan.
        """
        for req_id in plan.dropped:
            self.requests.pop(req_id, None)
        for new in plan.new:
            self.requests[new.req_id] = RequestState(new, self.max_model_len, self.max_blocks)
        for scheduled in plan.scheduled:
            if scheduled.req_id not in self.requests:
                raise ProtocolError(f"step {plan.step_id} schedules request {scheduled.req_id}, never announced here")
            if scheduled.new_block_ids:
                self.requests[scheduled.req_id].append_blocks(scheduled.new_block_ids)

    def fill(self, plan: StepPlan, padded_tokens: int, padded_reqs: int = 0) -> Batch:
        """Write one step into the buffers and advance every scheduled request.

        Args:
            plan: already given to :meth:`apply`.
            padded_tokens: size of dimension 0, at least ``plan.num_tokens``; the tail gets slot -1.
            padded_reqs: requests that a captured graph reads; those beyond the plan's get no tokens and no context.

        Returns:
            the batch, whose tensors are views of the buffers, valid until the next call.
        """
        start, num_reqs = 0, len(plan.scheduled)
        sample_req_ids: list[int] = []
        max_query_len = max_seq_len = 0
        self.query_start_loc.array[0] = 0
        for row, scheduled in enumerate(plan.scheduled):
            request = self.requests[scheduled.req_id]
            first, last = request.num_computed, request.num_computed + scheduled.num_tokens
            if last > request.num_tokens:
                raise ProtocolError(
                    f"step {plan.step_id} wants tokens {first} to {last} of request {scheduled.req_id}, which has "
                    f"{request.num_tokens} here"
                )
            end = start + scheduled.num_tokens
            positions = np.arange(first, last)
            self.input_ids.array[start:end] = request.token_ids[first:last]
            self.positions.array[start:end] = positions
            blocks = request.block_ids[positions // self.block_size].astype(np.int64)
            self.slot_mapping.array[start:end] = blocks * self.block_size + positions % self.block_size
            self.block_table.array[row, : request.num_blocks] = request.block_ids[: request.num_blocks]
            self.seq_lens.array[row] = last
            self.query_start_loc.array[row + 1] = end
            if last == request.num_tokens:
                self.sample_rows.array[len(sample_req_ids)] = end - 1
                sample_req_ids.append(scheduled.req_id)
            request.num_computed = last
            max_query_len, max_seq_len = max(max_query_len, scheduled.num_tokens), max(max_seq_len, last)
            start = end
        table_rows = max(num_reqs, padded_reqs)
        self.seq_lens.array[num_reqs:table_rows] = 0
        self.query_start_loc.array[num_reqs + 1 : table_rows + 1] = start
        self.input_ids.array[start:padded_tokens] = 0
        self.positions.array[start:padded_tokens] = 0
        self.slot_mapping.array[start:padded_tokens] = PADDING_SLOT
        self.input_ids.upload(padded_tokens)
        self.positions.upload(padded_tokens)
        metadata = AttentionMetadata(
            num_tokens=start,
            num_reqs=num_reqs,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            slot_mapping=self.slot_mapping.upload(padded_tokens),
            block_table=self.block_table.upload(table_rows)[:, : -(-max_seq_len // self.block_size)],
            seq_lens=self.seq_lens.upload(table_rows),
            query_start_loc=self.query_start_loc.upload(table_rows + 1),
        )
        return Batch(metadata, start, self.sample_rows.upload(len(sample_req_ids)), sample_req_ids)
