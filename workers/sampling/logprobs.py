"""Log-probabilities: of sampled tokens from whole rows on rank 0, and of a prompt's tokens from every rank's shard.

They are of the raw logits, whatever sampling does to those afterwards. Which requests want any is decided by
``sampler.py`` for outputs, and here for prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from parallel.group import TensorParallelGroup
from parallel.shard import Shard
from runtime.common.protocol import NewRequest, PromptLogprobs, StepPlan
from workers.sampling import native_sampling

MAX_SCORED = 2**24
"""Logits of prompt tokens looked at together, over all ranks; more rows go in several rounds: memory stays bounded."""

Pairs = tuple[tuple[int, float], ...]
"""Token ids and their log-probabilities, best first."""


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> list[tuple[float, Pairs]]:
    """The log-probability of one token of each row, and the likeliest ones.

    Args:
        logits: float32 [n, V].
        token_ids: int64 [n]; those below 0 stand for 0.
        most: how many of the likeliest to give; no more than V are.
    """
    most = min(most, logits.shape[-1])
    found = native_sampling.logprobs(logits, token_ids, most)
    if found is None:
        logprobs = logits.log_softmax(dim=-1)
        own = logprobs.gather(-1, token_ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        values, ids = logprobs.topk(most, dim=-1)
        found = own, ids, values
    return _listed(*found)


def _listed(own: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> list[tuple[float, Pairs]]:
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        (mine, tuple(zip(row_ids, row_values, strict=True)))
        for mine, (row_ids, row_values) in zip(own.tolist(), tops, strict=True)
    ]


class KnownTokens(Protocol):
    """What is asked of a worker's record of a request (``batch.py``)."""

    num_computed: int
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Rows of one step whose next tokens are a prompt's.

    Attributes:
        first_row: in the step's flattened batch.
        start: index in the prompt of the token that the first row is about.
        token_ids: the tokens that the rows are about.
        most: how many of the likeliest tokens to report with each.
    """

    req_id: int
    first_row: int
    start: int
    token_ids: tuple[int, ...]
    most: int


class PromptScorer:
    """Reports how likely the tokens of prompts were. Scoring is collective: every rank does the same.

    Args:
        group: the ranks.
        shard: this rank's part of the vocabulary.
        vocab_size: of the whole.
    """

    def __init__(self, group: TensorParallelGroup, shard: Shard, vocab_size: int) -> None:
        self._group = group
        self._shard = shard
        self._vocab_size = vocab_size
        self._rows_at_once = max(1, MAX_SCORED // vocab_size)
        self._wanted: dict[int, tuple[int, int]] = {}

    def add(self, request: NewRequest) -> None:
        """Take a request that was not known, or that was dropped."""
        if request.sampling.prompt_logprobs is not None:
            self._wanted[request.req_id] = request.num_prompt_tokens, request.sampling.prompt_logprobs

    def drop(self, req_id: int) -> None:
        """Forget a request."""
        self._wanted.pop(req_id, None)

    def spans(self, plan: StepPlan, requests: Mapping[int, KnownTokens]) -> list[PromptSpan]:
        """The rows of a step that are wanted; to be asked before the step counts its tokens as computed."""
        spans: list[PromptSpan] = []
        row = 0
        for scheduled in plan.scheduled:
            wanted = self._wanted.get(scheduled.req_id)
            if wanted is not None:
                num_prompt_tokens, most = wanted
                request = requests[scheduled.req_id]
                # The row of token i is about token i + 1; the last one of the prompt is about the output.
                start = request.num_computed + 1
                token_ids = request.token_ids[start : min(start + scheduled.num_tokens, num_prompt_tokens)].tolist()
                if token_ids:
                    spans.append(PromptSpan(scheduled.req_id, row, start, tuple(token_ids), most))
            row += scheduled.num_tokens
        return spans

    def score(
        self,
        hidden: torch.Tensor,
        spans: Sequence[PromptSpan],
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[PromptLogprobs]:
        """Log-probabilities of what :meth:`spans` gave; nothing on ranks other than 0.

        Args:
            hidden: [tokens of the step or more, hidden_size].
            spans: at least one, in the same order on every rank.
            compute_logits: [n, hidden_size] -> this rank's logits [n, V_local].

        Returns:
            one entry for each span. A row that is not finite has NaN, see :func:`is_finite`.
        """
        places = [row for span in spans for row in range(span.first_row, span.first_row + len(span.token_ids))]
        rows = torch.tensor(places, device=hidden.device)
        token_ids = torch.tensor([t for span in spans for t in span.token_ids], device=hidden.device)
        most = min(max(span.most for span in spans), self._vocab_size)
        found: list[tuple[float, Pairs]] = []
        for first in range(0, len(rows), self._rows_at_once):
            some = slice(first, first + self._rows_at_once)
            logits = compute_logits(hidden.index_select(0, rows[some]))
            found += self._score_rows(logits, token_ids[some], most)
        if self._group.rank != 0:
            return []
        reports: list[PromptLogprobs] = []
        rest = iter(found)
        for span in spans:
            scores = [(t, *next(rest)) for t in span.token_ids]
            entries = tuple((t, logprob, top[: span.most]) for t, logprob, top in scores)
            reports.append(PromptLogprobs(span.req_id, span.start, entries))
        return reports

    def _score_rows(self, local_logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> list[tuple[float, Pairs]]:
        """As :func:`logprobs_of`, from shards [n, V_local]: each rank offers its best, and what they sum to."""
        shard, local = self._shard, local_logits.float()
        total = local.logsumexp(dim=-1, keepdim=True)
        places = (token_ids - shard.start).unsqueeze(-1)
        own = local.gather(-1, places.clamp(0, shard.size - 1))
        own = own.masked_fill((places < 0) | (places >= shard.size), float("-inf"))
        values, ids = local.topk(min(most, shard.size), dim=-1)
        lacking = (0, most - values.shape[-1])  # A small shard, so that offers have one shape.
        values = functional.pad(values, lacking, value=float("-inf"))
        ids = functional.pad(ids + shard.start, lacking)
        numbers = torch.cat((total, own, values), dim=-1).view(torch.int32)
        offers = self._group.gather(  # [ranks, n, 2 + 2 * most]
            torch.cat((numbers, ids.to(torch.int32)), dim=-1)
        )
        if offers is None:
            return []
        numbers = offers[..., : 2 + most].contiguous().view(torch.float32)
        total = numbers[..., 0].logsumexp(dim=0)
        own = numbers[..., 1].amax(dim=0) - total
        values = torch.cat(tuple(numbers[..., 2:]), dim=-1)
        values, order = values.topk(most, dim=-1)
        ids = torch.cat(tuple(offers[..., 2 + most :]), dim=-1).gather(-1, order)
        return _listed(own, ids, values - total.unsqueeze(-1))


def is_finite(report: PromptLogprobs) -> bool:
    """Whether the model gave numbers for every token of a report."""
    return all(np.isfinite(logprob) for _, logprob, _ in report.tokens)
