"""The sampler: from the last hidden rows' logits to one token per request, the same on every rank.

The vocabulary is sharded over the ranks, so no rank holds a whole row of logits. Rows that need argmax only exchange
one (value, token id) pair per rank; each rank takes the largest of the gathered candidates. All other rows are gathered
on rank 0, which samples and broadcasts the tokens. Which path a row takes depends on its request's parameters alone,
never on data, so all ranks enter the same collectives.

On rank 0 a row is processed in this order: logit bias, penalties, suppressed tokens before ``min_tokens``, the mask of
its grammar (``grammar.py``); then a token is sampled (``gumbel_max.py``). Log-probabilities are of unprocessed logits.
Requests are :class:`workers.batch.RequestState`: the sampler keeps no state of its own for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from parallel.group import TensorParallelGroup
from parallel.shard import Shard
from runtime.common.errors import RequestError
from runtime.common.protocol import SampledToken
from workers.batch import RequestState
from workers.sampling.grammar import GrammarCompiler
from workers.sampling.gumbel_max import NON_FINITE, noise_key, sample_tokens, select_rows
from workers.sampling.logprobs import TopLogprobs, compute_logprobs

NON_FINITE_MESSAGE = (
    "the model gave logits that are not finite (NaN or infinity) for this request; other requests are not affected. "
    "If this happens again, weights or dtype are at fault: try --dtype float32"
)

MAX_GATHERED = 2**25
"""Largest number of logits gathered at once; more rows are gathered in several rounds, which bounds memory."""

_BITS = torch.arange(256).unsqueeze(-1) >> torch.arange(8)
_MASK_BIAS = torch.zeros(256, 8).masked_fill_(_BITS & 1 == 0, float("-inf"))
"""[256, 8]: for each byte of a bitmask, the bias added to the logits of its eight tokens."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The token of one row, or NON_FINITE, and its log-probabilities if requested."""

    token_id: int
    logprob: float | None = None
    top: TopLogprobs = ()


class Sampler:
    """Samples the next token of each request. Construction and sampling are collective calls.

    Args:
        group: the tensor-parallel group.
        vocab_shard: this rank's shard of the vocabulary.
        vocab_size: of the whole vocabulary.
        device: of the logits.
        eos_token_ids: tokens that end an output that matches a grammar; with a request's stop tokens, those that
            ``min_tokens`` suppresses.
        checkpoint: folder with the tokenizer, read for requests with a grammar only.

    Raises:
        ValueError: the ranks' shards do not form the vocabulary in rank order.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        vocab_shard: Shard,
        vocab_size: int,
        device: torch.device,
        *,
        eos_token_ids: Sequence[int] = (),
        checkpoint: str = "",
    ) -> None:
        self._group = group
        self._shard = vocab_shard
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = GrammarCompiler(checkpoint, eos_token_ids, vocab_size)
        own = torch.tensor([vocab_shard.start, vocab_shard.size], device=device)
        self._shards = [Shard(start, size) for start, size in group.all_gather(own).tolist()]
        ends = [0, *(shard.stop for shard in self._shards)]
        if [shard.start for shard in self._shards] != ends[:-1] or ends[-1] != vocab_size:
            raise ValueError(f"the ranks hold {self._shards} of a vocabulary of {vocab_size}: not all of it, in order")

    def sample(self, local_logits: torch.Tensor, requests: Sequence[RequestState]) -> list[SampledToken]:
        """Sample the next token of each request and append it to the request, on every rank.

        Args:
            local_logits: [n, V_local], this rank's shard of each row, in any floating dtype; sampling is in float32.
            requests: the n requests of the rows, in the same order on every rank.

        Returns:
            on rank 0 the n results, on the others nothing. A row whose logits are not finite, or whose grammar has
            failed, gets token 0 and an error.
        """
        if local_logits.shape != (len(requests), self._shard.size):
            raise ValueError(
                f"rank {self._group.rank} got logits {tuple(local_logits.shape)} for {len(requests)} requests and "
                f"{self._shard.size} tokens of the vocabulary"
            )
        sampled: list[_Sampled] = [_Sampled(NON_FINITE)] * len(requests)
        greedy = [row for row, request in enumerate(requests) if request.argmax_only]
        if greedy:
            logits = local_logits if len(greedy) == len(requests) else select_rows(local_logits, greedy)
            for row, token_id in zip(greedy, self._argmax(logits), strict=True):
                sampled[row] = _Sampled(token_id)
        if len(greedy) < len(requests):
            self._sample_on_rank_0(local_logits, requests, sampled)
        for request, token in zip(requests, sampled, strict=True):
            _append(request, token.token_id)
        if self._group.rank != 0:
            return []
        return [_result(request, token) for request, token in zip(requests, sampled, strict=True)]

    def _argmax(self, local_logits: torch.Tensor) -> list[int]:
        """The argmax of each row, the lowest id of equals, on every rank; NON_FINITE for rows that are not finite."""
        # max() propagates NaN and returns the first of equals, within a shard as well as among the ranks below.
        values, indices = local_logits.max(dim=-1)
        candidate = torch.stack((values.float().view(torch.int32), (indices + self._shard.start).to(torch.int32)))
        candidates = self._group.all_gather(candidate)
        values, ranks = candidates[:, 0].view(torch.float32).max(dim=0)
        token_ids = candidates[:, 1].gather(0, ranks.unsqueeze(0)).squeeze(0)
        return torch.where(values.isfinite(), token_ids, NON_FINITE).tolist()

    def _sample_on_rank_0(
        self, local_logits: torch.Tensor, requests: Sequence[RequestState], sampled: list[_Sampled]
    ) -> None:
        """Sample the rows that need whole logits, in rounds of bounded memory, into ``sampled``."""
        rows = [row for row, request in enumerate(requests) if not request.argmax_only]
        if any(requests[row].params.structured_outputs is not None for row in rows):
            self._grammars.begin_step()
        rows_per_round = max(1, MAX_GATHERED // self._vocab_size)
        for first in range(0, len(rows), rows_per_round):
            some = rows[first : first + rows_per_round]
            tokens = self._sample_round(select_rows(local_logits, some), [requests[row] for row in some])
            for row, token in zip(some, tokens, strict=True):
                sampled[row] = token

    def _sample_round(self, local_logits: torch.Tensor, requests: Sequence[RequestState]) -> list[_Sampled]:
        """Gather the rows on rank 0, sample there, and broadcast the token ids."""
        # Before the gather: a GPU computes the logits meanwhile.
        masks = self._grammar_masks(requests) if self._group.rank == 0 else None
        logits = self._gather(local_logits)
        token_ids = torch.empty(len(requests), dtype=torch.int64, device=self._device)
        with_logprobs: dict[int, _Sampled] = {}
        if logits is not None:
            rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
            raw = logits[rows]  # A copy.
            for row, request in enumerate(requests):
                if not request.prepared:
                    self._prepare(request)
                _process_logits(logits[row], request)
            if masks is not None:
                _apply_masks(logits, *masks)
            keys = [noise_key(request.params.seed or 0, request.num_output) for request in requests]
            token_ids = sample_tokens(logits, [request.params for request in requests], keys)
            if rows:
                with_logprobs = _add_logprobs(raw, token_ids, rows, requests)
        received = self._group.broadcast(token_ids).tolist()
        return [with_logprobs.get(row, _Sampled(token_id)) for row, token_id in enumerate(received)]

    def _gather(self, local_logits: torch.Tensor) -> torch.Tensor | None:
        """Whole rows in float32 [n, V] on rank 0, a copy; None on the others."""
        if self._group.size == 1:
            return local_logits.to(torch.float32, copy=True)
        padding = max(shard.size for shard in self._shards) - self._shard.size
        if padding:
            local_logits = functional.pad(local_logits, (0, padding), value=float("-inf"))
        gathered = self._group.gather(local_logits)
        if gathered is None:
            return None
        parts = [part[:, : shard.size] for part, shard in zip(gathered, self._shards, strict=True)]
        return torch.cat(parts, dim=-1).float()

    def _prepare(self, request: RequestState) -> None:
        """Build the tensors with which the request's logits are processed, from its tokens so far."""
        params, output = request.params, request.output
        suppressed = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and suppressed:
            request.suppressed_ids = torch.tensor(sorted(suppressed), device=self._device)
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            bias = torch.tensor(biases, dtype=torch.float32, device=self._device)
            request.bias = torch.tensor(ids, device=self._device), bias
        if params.penalized:
            request.seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            request.seen[torch.from_numpy(request.token_ids[: request.num_tokens]).to(self._device)] = True
            counted = torch.tensor(output, dtype=torch.int64, device=self._device)
            request.output_counts = torch.bincount(counted, minlength=self._vocab_size).float()
        request.prepared = True

    def _grammar_masks(self, requests: Sequence[RequestState]) -> tuple[list[int], torch.Tensor] | None:
        """The rows with a grammar, and their bitmasks: uint8 [rows, ceil(V / 8)]; None if there is no such row.

        A request whose grammar fails is marked failed and left out.
        """
        rows: list[int] = []
        masks: list[torch.Tensor] = []
        for row, request in enumerate(requests):
            outputs = request.params.structured_outputs
            if outputs is None or request.failure:
                continue
            try:
                if request.matcher is None:
                    request.matcher = self._grammars.make_matcher(outputs, request.output)
                masks.append(torch.from_numpy(request.matcher.allowed_tokens()))
                rows.append(row)
            except RequestError as error:
                request.failure = str(error)
        return (rows, torch.stack(masks).to(self._device)) if rows else None


def _process_logits(logits: torch.Tensor, request: RequestState) -> None:
    """Apply logit bias, penalties and suppressed tokens to one row [V], in place."""
    params = request.params
    if request.bias is not None:
        ids, biases = request.bias
        logits.index_add_(0, ids, biases)
    if request.seen is not None and request.output_counts is not None:
        if params.repetition_penalty != 1.0:
            less = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(request.seen, less, logits))
        logits -= params.frequency_penalty * request.output_counts
        logits -= params.presence_penalty * (request.output_counts > 0)
    if request.suppressed_ids is not None and request.num_output < params.min_tokens:
        logits[request.suppressed_ids] = float("-inf")


def _apply_masks(logits: torch.Tensor, rows: list[int], masks: torch.Tensor) -> None:
    """Mask the given rows of ``logits`` [n, V] in place by bitmasks, uint8 [rows, ceil(V / 8)]."""
    # Adding is much faster than masked_fill, and keeps NaN and infinity, so that such a row is still detected.
    biases = functional.embedding(masks.to(torch.int32), _MASK_BIAS.to(masks.device))
    for row, bias in zip(rows, biases.view(len(rows), -1), strict=True):
        logits[row] += bias[: logits.shape[-1]]


def _append(request: RequestState, token_id: int) -> None:
    """Append a sampled token, or token 0 for NON_FINITE, to the request: tokens, grammar and penalty counts."""
    if request.matcher is not None and not request.failure and token_id != NON_FINITE:
        try:
            request.matcher.accept(token_id)
        except RequestError as error:
            request.failure = str(error)
    token_id = max(token_id, 0)
    request.append_token(token_id)
    if request.seen is not None and request.output_counts is not None:
        request.seen[token_id] = True
        request.output_counts[token_id] += 1


def _result(request: RequestState, sampled: _Sampled) -> SampledToken:
    """The result that rank 0 sends to the driver."""
    if request.failure:
        return SampledToken(request.req_id, 0, error=request.failure)
    if request.non_finite or sampled.token_id == NON_FINITE:
        return SampledToken(request.req_id, 0, error=NON_FINITE_MESSAGE, broken=True)
    return SampledToken(request.req_id, sampled.token_id, sampled.logprob, sampled.top)


def _add_logprobs(
    raw: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[int], requests: Sequence[RequestState]
) -> dict[int, _Sampled]:
    """By row, the tokens with log-probabilities of the rows that request them and are finite.

    Args:
        raw: [len(rows), V], unprocessed logits of these rows.
        token_ids: int64 [n], sampled tokens of all rows.
        rows: indices into ``requests``, at least one.
        requests: of all rows.
    """
    chosen = token_ids[rows]
    num_top = max(requests[row].params.logprobs or 0 for row in rows)
    found = compute_logprobs(raw, chosen, num_top)
    return {
        row: _Sampled(token_id, logprob, top[: requests[row].params.logprobs])
        for row, token_id, (logprob, top) in zip(rows, chosen.tolist(), found, strict=True)
        if token_id != NON_FINITE
    }
