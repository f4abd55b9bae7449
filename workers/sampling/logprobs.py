"""Log-probabilities: of sampled tokens from whole rows on rank 0, and of prompt tokens from every rank's shard.

They are of the unprocessed logits. A request's sampling parameters say how many are returned: ``sampler.py`` reads
``logprobs`` for outputs, ``workers/batch.py`` reads ``prompt_logprobs`` and lists the rows of a step to score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from parallel.group import TensorParallelGroup
from parallel.shard import Shard
from runtime.common.protocol import PromptLogprobs
from workers.batch import PromptSpan
from workers.sampling import native_sampling

MAX_PROMPT_LOGITS = 2**24
"""Largest number of prompt logits scored at once, over all ranks; more rows are scored in several rounds."""

TopLogprobs = tuple[tuple[int, float], ...]
"""Token ids and their log-probabilities, the likeliest first."""


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[tuple[float, TopLogprobs]]:
    """The log-probability of one token of each row, and the likeliest tokens.

    Args:
        logits: float32 [n, V].
        token_ids: int64 [n]; those below 0 stand for 0.
        num_top: how many of the likeliest tokens to return, at most V.
    """
    num_top = min(num_top, logits.shape[-1])
    found = native_sampling.logprobs(logits, token_ids, num_top)
    if found is None:
        logprobs = logits.log_softmax(dim=-1)
        own = logprobs.gather(-1, token_ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        values, ids = logprobs.topk(num_top, dim=-1)
        found = own, ids, values
    return _to_lists(*found)


def _to_lists(own: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> list[tuple[float, TopLogprobs]]:
    top = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        (logprob, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, (row_ids, row_values) in zip(own.tolist(), top, strict=True)
    ]


class PromptScorer:
    """Computes log-probabilities of prompt tokens. Scoring is a collective call.

    Args:
        group: the tensor-parallel group.
        shard: this rank's shard of the vocabulary.
        vocab_size: of the whole vocabulary.
    """

    def __init__(self, group: TensorParallelGroup, shard: Shard, vocab_size: int) -> None:
        self._group = group
        self._shard = shard
        self._vocab_size = vocab_size
        self._rows_per_round = max(1, MAX_PROMPT_LOGITS // vocab_size)

    def score(
        self,
        hidden: torch.Tensor,
        spans: Sequence[PromptSpan],
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[PromptLogprobs]:
        """Log-probabilities of the spans' tokens, on rank 0; nothing on the other ranks.

        Args:
            hidden: [tokens of the step or more, hidden_size].
            spans: at least one, in the same order on every rank.
            compute_logits: [n, hidden_size] -> this rank's logits [n, V_local].

        Returns:
            one entry for each span that is finite. The request of a span that is not is marked ``non_finite``.
        """
        span_rows = [row for span in spans for row in range(span.first_row, span.first_row + len(span.token_ids))]
        rows = torch.tensor(span_rows, device=hidden.device)
        token_ids = torch.tensor([t for span in spans for t in span.token_ids], device=hidden.device)
        num_top = min(max(span.request.params.prompt_logprobs or 0 for span in spans), self._vocab_size)
        found: list[tuple[float, TopLogprobs]] = []
        for first in range(0, len(rows), self._rows_per_round):
            some = slice(first, first + self._rows_per_round)
            logits = compute_logits(hidden.index_select(0, rows[some]))
            found += self._score_rows(logits, token_ids[some], num_top)
        if self._group.rank != 0:
            return []
        results: list[PromptLogprobs] = []
        scores = iter(found)
        for span in spans:
            wanted = span.request.params.prompt_logprobs or 0
            scored = [(token_id, *next(scores)) for token_id in span.token_ids]
            entries = tuple((token_id, logprob, top[:wanted]) for token_id, logprob, top in scored)
            if all(math.isfinite(logprob) for _, logprob, _ in entries):
                results.append(PromptLogprobs(span.request.req_id, span.start, entries))
            else:
                span.request.non_finite = True
        return results

    def _score_rows(
        self, local_logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> list[tuple[float, TopLogprobs]]:
        """As :func:`compute_logprobs`, from shards [n, V_local]: rank 0 gathers candidates and logsumexps."""
        shard, local = self._shard, local_logits.float()
        total = local.logsumexp(dim=-1, keepdim=True)
        local_ids = (token_ids - shard.start).unsqueeze(-1)
        own = local.gather(-1, local_ids.clamp(0, shard.size - 1))
        own = own.masked_fill((local_ids < 0) | (local_ids >= shard.size), float("-inf"))
        values, ids = local.topk(min(num_top, shard.size), dim=-1)
        padding = (0, num_top - values.shape[-1])  # A small shard: candidates have one shape on all ranks.
        values = functional.pad(values, padding, value=float("-inf"))
        ids = functional.pad(ids + shard.start, padding)
        floats = torch.cat((total, own, values), dim=-1).view(torch.int32)
        candidates = self._group.gather(  # [ranks, n, 2 + 2 * num_top]
            torch.cat((floats, ids.to(torch.int32)), dim=-1)
        )
        if candidates is None:
            return []
        floats = candidates[..., : 2 + num_top].contiguous().view(torch.float32)
        total = floats[..., 0].logsumexp(dim=0)
        own = floats[..., 1].amax(dim=0) - total
        values = torch.cat(tuple(floats[..., 2:]), dim=-1)
        values, order = values.topk(num_top, dim=-1)
        ids = torch.cat(tuple(candidates[..., 2 + num_top :]), dim=-1).gather(-1, order)
        return _to_lists(own, ids, values - total.unsqueeze(-1))
