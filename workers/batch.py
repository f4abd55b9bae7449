"""Request states of a rank, and the static buffers that hold the input of one forward pass.

A worker keeps one :class:`RequestState` per live request; step plans are deltas to it. States are added and dropped in
:meth:`BatchBuffers.update_requests` only; the sampler and the prompt scorer read the same states. The buffers are
allocated once at the largest size of a step and refilled in place, so that captured graphs can be bound to them;
dimension 0 is *tokens of the step*, never requests. ``runner.py`` runs the model and the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime.common.errors import ProtocolError
from runtime.common.protocol import NewRequest, StepPlan
from workers.forward_context import AttentionMetadata

PADDING_SLOT = -1
"""Slot of the tokens that pad the batch to a captured size: their keys and values are not stored."""


class TokenMatcher(Protocol):
    """Position of an output in its grammar (:class:`workers.sampling.grammar.GrammarMatcher`)."""

    def allowed_tokens(self) -> npt.NDArray[np.uint8]:
        """Bitmask of the tokens that may come next."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by one sampled token."""


class RequestState:
    """State of one live request: tokens, KV blocks, sampling parameters and sampling state.

    The fields from ``prepared`` on belong to the sampler. It fills them on rank 0 only, when the request is first
    sampled with more than argmax.

    Attributes:
        req_id: the engine's number for the request.
        params: sampling parameters.
        num_prompt_tokens: how many of ``token_ids`` are the prompt.
        token_ids: int64 [capacity]; the first ``num_tokens`` are known.
        num_computed: tokens whose keys and values are in the cache.
        block_ids: int32 [max_blocks]; the first ``num_blocks`` are its KV blocks in order.
        argmax_only: whether the next token is the argmax of the logits, with nothing to adjust or report.
        prepared: whether the sampler has filled the fields below.
        suppressed_ids: int64, token ids that are suppressed before ``min_tokens``.
        bias: token ids, int64, and their logit biases, float32.
        seen: bool [vocab_size], tokens in prompt or output, for the repetition penalty.
        output_counts: float32 [vocab_size], occurrences in the output, for frequency and presence penalties.
        matcher: position of the output in its grammar.
        failure: why the grammar ends the request; empty if it does not.
        non_finite: whether prompt logits of the request were not finite.
    """

    def __init__(self, new: NewRequest, max_model_len: int, max_blocks: int) -> None:
        self.req_id = new.req_id
        self.params = new.sampling
        self.num_prompt_tokens = new.num_prompt_tokens
        self.token_ids = np.zeros(max_model_len + 1, dtype=np.int64)
        self.num_tokens = len(new.token_ids)
        self.token_ids[: self.num_tokens] = new.token_ids
        self.num_computed = new.num_computed
        self.block_ids = np.zeros(max_blocks, dtype=np.int32)
        self.num_blocks = 0
        self.argmax_only = (
            self.params.greedy
            and self.params.logprobs is None
            and not self.params.penalized
            and self.params.min_tokens == 0
            and not self.params.logit_bias
            and self.params.structured_outputs is None
        )
        self.prepared = False
        self.suppressed_ids: torch.Tensor | None = None
        self.bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self.seen: torch.Tensor | None = None
        self.output_counts: torch.Tensor | None = None
        self.matcher: TokenMatcher | None = None
        self.failure = ""
        self.non_finite = False

    @property
    def num_output(self) -> int:
        """Number of output tokens: the index of the next one."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output(self) -> list[int]:
        """The output tokens."""
        return self.token_ids[self.num_prompt_tokens : self.num_tokens].tolist()

    def append_token(self, token_id: int) -> None:
        """Append a sampled token."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def append_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Append KV blocks to the block table."""
        end = self.num_blocks + len(block_ids)
        self.block_ids[self.num_blocks : end] = block_ids
        self.num_blocks = end


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive rows of a step whose next tokens are prompt tokens with requested log-probabilities.

    Attributes:
        request: the request.
        first_row: row of the flattened batch that predicts the first of ``token_ids``.
        start: index in the prompt of the first of ``token_ids``.
        token_ids: the predicted prompt tokens.
    """

    request: RequestState
    first_row: int
    start: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Input of one step.

    Attributes:
        metadata: the flattened batch, for attention.
        num_tokens: tokens of the step, without padding.
        sample_rows: int64 [n], rows of the hidden states whose next token is sampled.
        sample_requests: the n requests of those rows.
        prompt_spans: rows whose prompt log-probabilities are reported.
    """

    metadata: AttentionMetadata
    num_tokens: int
    sample_rows: torch.Tensor
    sample_requests: list[RequestState]
    prompt_spans: list[PromptSpan]


class StaticBuffer:
    """A device tensor and the host array it is copied from; on CPU both are the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.array = self._host.numpy()
        self.tensor = torch.zeros(shape, dtype=dtype, device=device) if pinned else self._host

    def upload(self, length: int) -> torch.Tensor:
        """Copy the first ``length`` rows to the device, asynchronously; returns them there."""
        if self.tensor is not self._host:
            self.tensor[:length].copy_(self._host[:length], non_blocking=True)
        return self.tensor[:length]


class BatchBuffers:
    """The static input buffers of a rank, and its request states.

    Args:
        max_num_tokens: largest number of tokens in a step, including padding.
        max_num_reqs: largest number of requests in a step.
        max_model_len: largest number of tokens of a request.
        block_size: tokens in one KV block.
        num_blocks: blocks of the KV cache.
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self.max_num_tokens = max_num_tokens
        self.requests: dict[int, RequestState] = {}
        self.input_ids = StaticBuffer((max_num_tokens,), torch.int64, device)
        self.positions = StaticBuffer((max_num_tokens,), torch.int64, device)
        self.slot_mapping = StaticBuffer((max_num_tokens,), torch.int64, device)
        self.block_table = StaticBuffer((max_num_reqs, self.max_blocks), torch.int32, device)
        self.seq_lens = StaticBuffer((max_num_reqs,), torch.int32, device)
        self.query_start_loc = StaticBuffer((max_num_reqs + 1,), torch.int32, device)
        self.sample_rows = StaticBuffer((max_num_reqs,), torch.int64, device)

    def update_requests(self, plan: StepPlan) -> None:
        """Apply a plan's delta: drop requests, add new ones, and append new blocks to block tables.

        Raises:
            ProtocolError: the plan schedules a request that was never added here, because an earlier plan was missed;
                or it assigns a block that the KV cache does not have, which no kernel may read or write.
        """
        for req_id in plan.dropped:
            self.requests.pop(req_id, None)
        for new in plan.new:
            self.requests[new.req_id] = RequestState(new, self.max_model_len, self.max_blocks)
        for scheduled in plan.scheduled:
            if scheduled.req_id not in self.requests:
                raise ProtocolError(f"step {plan.step_id} schedules request {scheduled.req_id}, never announced here")
            if new_ids := scheduled.new_block_ids:
                if min(new_ids) < 0 or max(new_ids) >= self.num_blocks:
                    outside = next(block_id for block_id in new_ids if not 0 <= block_id < self.num_blocks)
                    raise ProtocolError(
                        f"step {plan.step_id} assigns KV block {outside} to request {scheduled.req_id}; the KV cache "
                        f"has {self.num_blocks} blocks, 0 to {self.num_blocks - 1}"
                    )
                self.requests[scheduled.req_id].append_blocks(new_ids)

    def tokens(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's inputs at a padded size: input_ids and positions, int64 [size] each."""
        return self.input_ids.tensor[:size], self.positions.tensor[:size]

    def fill(self, plan: StepPlan, padded_tokens: int, padded_reqs: int = 0) -> Batch:
        """Write one step into the buffers and advance ``num_computed`` of every scheduled request.

        Args:
            plan: already given to :meth:`update_requests`.
            padded_tokens: size of dimension 0, at least ``plan.num_tokens``; the padding gets slot -1.
            padded_reqs: number of requests that a captured graph reads; those beyond the plan's get no tokens and a
                context of 0.

        Returns:
            the batch; its tensors are views of the buffers, valid until the next call.

        Raises:
            ProtocolError: the plan schedules tokens that the request does not have.
        """
        start, num_reqs = 0, len(plan.scheduled)
        sample_requests: list[RequestState] = []
        prompt_spans: list[PromptSpan] = []
        max_query_len = max_seq_len = 0
        self.query_start_loc.array[0] = 0
        for row, (req_id, num_tokens, _) in enumerate(plan.scheduled):
            request = self.requests[req_id]
            if request.params.prompt_logprobs is not None:
                prompt_spans.extend(_prompt_spans(request, start, num_tokens))
            end = start + num_tokens
            self._fill_request(request, row, start, end, plan.step_id)
            if request.num_computed == request.num_tokens:
                self.sample_rows.array[len(sample_requests)] = end - 1
                sample_requests.append(request)
            max_query_len, max_seq_len = max(max_query_len, num_tokens), max(max_seq_len, request.num_computed)
            start = end
        table_rows = max(num_reqs, padded_reqs)
        self._fill_padding(start, padded_tokens, num_reqs, table_rows)
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
        sample_rows = self.sample_rows.upload(len(sample_requests))
        return Batch(metadata, start, sample_rows, sample_requests, prompt_spans)

    def _fill_request(self, request: RequestState, row: int, start: int, end: int, step_id: int) -> None:
        """Write the next ``end - start`` tokens of the request in table row ``row``, and count them as computed."""
        first, last = request.num_computed, request.num_computed + end - start
        if last > request.num_tokens:
            raise ProtocolError(
                f"step {step_id} wants tokens {first} to {last} of request {request.req_id}, which has "
                f"{request.num_tokens} here"
            )
        if last > request.num_blocks * self.block_size:
            raise ProtocolError(
                f"step {step_id} computes token {last} of request {request.req_id}, whose {request.num_blocks} KV "
                f"blocks hold {request.num_blocks * self.block_size}"
            )
        positions = np.arange(first, last)
        self.input_ids.array[start:end] = request.token_ids[first:last]
        self.positions.array[start:end] = positions
        blocks = request.block_ids[positions // self.block_size].astype(np.int64)
        self.slot_mapping.array[start:end] = blocks * self.block_size + positions % self.block_size
        self.block_table.array[row, : request.num_blocks] = request.block_ids[: request.num_blocks]
        self.seq_lens.array[row] = last
        self.query_start_loc.array[row + 1] = end
        request.num_computed = last

    def _fill_padding(self, num_tokens: int, padded_tokens: int, num_reqs: int, padded_reqs: int) -> None:
        """Clear what an earlier step has left in the rows of padding."""
        self.seq_lens.array[num_reqs:padded_reqs] = 0
        self.query_start_loc.array[num_reqs + 1 : padded_reqs + 1] = num_tokens
        self.input_ids.array[num_tokens:padded_tokens] = 0
        self.positions.array[num_tokens:padded_tokens] = 0
        self.slot_mapping.array[num_tokens:padded_tokens] = PADDING_SLOT


def _prompt_spans(request: RequestState, first_row: int, num_tokens: int) -> list[PromptSpan]:
    """The span of the request's next ``num_tokens`` tokens, not yet computed; none if they predict output only."""
    # The row of token i predicts token i + 1; that of the last prompt token predicts the output.
    start = request.num_computed + 1
    token_ids = request.token_ids[start : min(start + num_tokens, request.num_prompt_tokens)].tolist()
    return [PromptSpan(request, first_row, start, tuple(token_ids))] if token_ids else []
