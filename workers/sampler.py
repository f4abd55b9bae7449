"""From the last hidden rows' logits to one token for each request, the same on every rank.

The vocabulary is cut over the ranks, so no rank sees a whole row of logits. Plain greedy rows need none: each rank
offers its best (value, token) pair and every rank takes the best offer. All other rows are gathered on rank 0, which
samples and tells the others. Which of the two a row takes follows from its request's parameters alone, never from
data, so all ranks enter the same collectives.

Noise is a pure function of (seed of the request, index of the output token, token id), computed by a hash and not by
a generator with a state: batch company, preemption, replay and the kind of device leave it alone. Adding Gumbel noise
to log-probabilities and taking the largest is a draw from the distribution.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from parallel.group import TensorParallelGroup
from parallel.shard import Shard
from runtime.config import SamplingParams
from runtime.protocol import NewRequest, SampledToken

BROKEN = -1
"""Stands for the token of a row whose logits are not finite, where a list of ids has no other way to say it."""

BROKEN_TEXT = (
    "the model gave logits that are not finite (NaN or infinity) for this request; other requests are not affected. "
    "If this happens again, weights or dtype are at fault: try --dtype float32"
)

MAX_GATHERED = 2**25
"""Logits gathered at once; more rows go in several rounds, so that memory stays bounded."""

NUCLEUS_WIDTH = 1024
"""Candidates looked at first for a top-p without top-k. Only where they do not suffice is the whole row sorted."""

BLOCK = 64
"""Neighbouring tokens that are drawn from together first, where all are candidates."""

TIES = 32
"""Candidates looked at beyond top-k, to see that none of the same value is left out."""


@dataclass(slots=True)
class _State:
    """What sampling has to know of one request.

    Attributes:
        num_output: output tokens so far: the index of the next one.
        barred: ids that may not be sampled before ``min_tokens``, int64; None if there are none.
        seen: whether a token is in prompt or output, bool [V]; None without penalties, and on all ranks but 0.
        counts: how often it is in the output, float32 [V]; None likewise.
    """

    params: SamplingParams
    num_output: int
    barred: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether only the likeliest token is wanted, and nothing else about the row."""
        params = self.params
        return params.greedy and params.logprobs is None and not params.penalized and params.min_tokens == 0


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Rank 0's choice for one gathered row."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Samples for the requests it was told of. Making one, and sampling, are collective: every rank does the same.

    Args:
        group: the ranks.
        vocab_shard: this rank's part of the vocabulary.
        vocab_size: of the whole.
        device: where the logits are.
        eos_token_ids: tokens that ``min_tokens`` keeps from being sampled, besides a request's own stop tokens.

    Raises:
        ValueError: the ranks' shards are not neighbours that make up the vocabulary.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        vocab_shard: Shard,
        vocab_size: int,
        device: torch.device,
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._group = group
        self._shard = vocab_shard
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self._states: dict[int, _State] = {}
        own = torch.tensor([vocab_shard.start, vocab_shard.size], device=device)
        self._shards = [Shard(start, size) for start, size in group.all_gather(own).tolist()]
        ends = [0, *(shard.stop for shard in self._shards)]
        if [shard.start for shard in self._shards] != ends[:-1] or ends[-1] != vocab_size:
            raise ValueError(f"the ranks hold {self._shards} of a vocabulary of {vocab_size}: not all of it, in order")

    def add(self, request: NewRequest) -> None:
        """Take a request that was not known, or that was dropped: its tokens so far are prompt and output."""
        params = request.sampling
        output = request.token_ids[request.num_prompt_tokens :]
        state = _State(params, len(output))
        barred = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and barred:
            state.barred = torch.tensor(sorted(barred), device=self._device)
        if params.penalized and self._group.rank == 0:
            state.seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            state.seen[torch.tensor(request.token_ids, device=self._device)] = True
            ids = torch.tensor(output, dtype=torch.int64, device=self._device)
            state.counts = torch.bincount(ids, minlength=self._vocab_size).float()
        self._states[request.req_id] = state

    def drop(self, req_id: int) -> None:
        """Forget a request."""
        self._states.pop(req_id, None)

    def sample(self, local_logits: torch.Tensor, req_ids: Sequence[int]) -> tuple[list[int], list[SampledToken] | None]:
        """Choose the next token of each request, and count it to its output.

        Args:
            local_logits: [n, V_local], this rank's part of each row, in any floating dtype; sampling is in float32.
            req_ids: the n requests the rows belong to, in the same order on every rank.

        Returns:
            the n token ids, on every rank; and what rank 0 reports of them, None on the others. A row that is not
            finite gives token 0 and an error.
        """
        if local_logits.shape != (len(req_ids), self._shard.size):
            raise ValueError(
                f"rank {self._group.rank} got logits {tuple(local_logits.shape)} for {len(req_ids)} requests and "
                f"{self._shard.size} tokens of the vocabulary"
            )
        states = [self._states[req_id] for req_id in req_ids]
        drawn: list[_Drawn] = [_Drawn(BROKEN)] * len(states)
        plain = [row for row, state in enumerate(states) if state.plain]
        others = [row for row, state in enumerate(states) if not state.plain]
        if plain:
            for row, token_id in zip(plain, self._best(_rows(local_logits, plain)), strict=True):
                drawn[row] = _Drawn(token_id)
        at_once = max(1, MAX_GATHERED // self._vocab_size)
        for first in range(0, len(others), at_once):
            rows = others[first : first + at_once]
            chosen = self._draw_on_rank_0(_rows(local_logits, rows), [states[row] for row in rows])
            for row, draw in zip(rows, chosen, strict=True):
                drawn[row] = draw
        token_ids = [max(draw.token_id, 0) for draw in drawn]
        for state, token_id in zip(states, token_ids, strict=True):
            _count(state, token_id)
        if self._group.rank != 0:
            return token_ids, None
        return token_ids, [
            SampledToken(req_id, max(d.token_id, 0), d.logprob, d.top, BROKEN_TEXT if d.token_id == BROKEN else "")
            for req_id, d in zip(req_ids, drawn, strict=True)
        ]

    def _best(self, local_logits: torch.Tensor) -> list[int]:
        """The likeliest token of each row, the lowest of equals, on every rank; BROKEN for rows that are not finite."""
        # max() carries a NaN along and gives the first of equals, within a shard as well as among the ranks below.
        values, places = local_logits.max(dim=-1)
        offer = torch.stack((values.float().view(torch.int32), (places + self._shard.start).to(torch.int32)))
        offers = self._group.all_gather(offer)
        values, ranks = offers[:, 0].view(torch.float32).max(dim=0)
        token_ids = offers[:, 1].gather(0, ranks.unsqueeze(0)).squeeze(0)
        return torch.where(values.isfinite(), token_ids, BROKEN).tolist()

    def _draw_on_rank_0(self, local_logits: torch.Tensor, states: Sequence[_State]) -> list[_Drawn]:
        """Gather the rows on rank 0 and sample there. The other ranks learn the tokens only."""
        logits = self._gather(local_logits)
        token_ids = torch.empty(len(states), dtype=torch.int64, device=self._device)
        details: dict[int, _Drawn] = {}
        if logits is not None:
            wanted = [row for row, state in enumerate(states) if state.params.logprobs is not None]
            logprobs = _rows(logits, wanted).log_softmax(dim=-1) if wanted else None
            token_ids = self._choose(logits, states)
            if logprobs is not None:
                details = _details(logprobs, _rows(token_ids, wanted), wanted, states)
        told = self._group.broadcast(token_ids).tolist()
        return [details.get(row, _Drawn(token_id)) for row, token_id in enumerate(told)]

    def _gather(self, local_logits: torch.Tensor) -> torch.Tensor | None:
        """Whole rows in float32 [n, V] on rank 0, its own to change; None on the others."""
        widest = max(shard.size for shard in self._shards)
        padding = widest - self._shard.size
        gathered = self._group.gather(functional.pad(local_logits, (0, padding), value=float("-inf")))
        if gathered is None:
            return None
        parts = [part[:, : shard.size] for part, shard in zip(gathered, self._shards, strict=True)]
        return torch.cat(parts, dim=-1).float()

    def _choose(self, logits: torch.Tensor, states: Sequence[_State]) -> torch.Tensor:
        """Token ids, int64 [n], of whole rows [n, V], which are changed; BROKEN for rows that are not finite."""
        for row, state in enumerate(states):
            _penalize(logits[row], state)
        largest = logits.amax(dim=-1, keepdim=True)  # Carries a NaN along, too.
        token_ids = torch.empty(len(states), dtype=torch.int64, device=self._device)
        greedy = [row for row, state in enumerate(states) if state.params.greedy]
        random = [row for row, state in enumerate(states) if not state.params.greedy]
        if greedy:
            token_ids[greedy] = _rows(logits, greedy).argmax(dim=-1)
        if random:
            # The likeliest token becomes 0 first, so that a tiny temperature overflows nothing but the others.
            scaled = _rows(logits, random).sub_(_rows(largest, random))
            scaled.div_(self._column([states[row].params.temperature for row in random]))
            token_ids[random] = self._draw(scaled, [states[row] for row in random])
        return torch.where(largest.squeeze(-1).isfinite(), token_ids, BROKEN)

    def _draw(self, scaled: torch.Tensor, states: Sequence[_State]) -> torch.Tensor:
        """Sampled token ids, int64 [n], of rows [n, V] of log-weights whose largest is 0."""
        token_ids = torch.empty(len(states), dtype=torch.int64, device=self._device)
        whole = [row for row, state in enumerate(states) if not _is_cut(state.params)]
        if whole:
            chosen = [states[row] for row in whole]
            token_ids[whole] = self._pick_from_all(self._cut_min_p(_rows(scaled, whole), chosen), chosen)
        cut = [row for row, state in enumerate(states) if _is_cut(state.params)]
        width = TIES + max((states[row].params.top_k or NUCLEUS_WIDTH for row in cut), default=0)
        while cut:
            cut = self._draw_cut(scaled, cut, states, min(width, self._vocab_size), token_ids)
            width *= 8
        return token_ids

    def _draw_cut(
        self, scaled: torch.Tensor, rows: list[int], states: Sequence[_State], width: int, token_ids: torch.Tensor
    ) -> list[int]:
        """Draw rows that have a top-k or top-p among their ``width`` likeliest tokens, into ``token_ids``.

        Returns:
            the rows for which ``width`` was not certainly enough.
        """
        chosen = [states[row] for row in rows]
        logits = _rows(scaled, rows)
        values, ids = logits.topk(width, dim=-1)
        threshold = self._threshold(values, logits.logsumexp(dim=-1, keepdim=True), chosen)
        # Cutting by value, not by place, keeps all of several equals: their order among themselves is chance.
        kept = values.masked_fill(values < threshold, float("-inf"))
        token_ids[rows] = self._pick(self._cut_min_p(kept, chosen), ids.to(torch.int32), chosen)
        if width == self._vocab_size:
            return []
        sure = (values[:, -1:] < threshold).squeeze(-1).tolist()
        return [row for row, enough in zip(rows, sure, strict=True) if not enough]

    def _threshold(self, values: torch.Tensor, total: torch.Tensor, states: Sequence[_State]) -> torch.Tensor:
        """The smallest value [n, 1] that top-k and then top-p leave of rows sorted downwards [n, width].

        Args:
            values: scaled logits, the likeliest first.
            total: logsumexp of the whole rows [n, 1].
            states: of the n rows.
        """
        width = values.shape[-1]
        top_k = torch.tensor([[s.params.top_k or self._vocab_size] for s in states], device=self._device)
        kth = values.gather(-1, top_k.clamp(max=width) - 1).masked_fill(top_k > width, float("-inf"))
        kept = values.masked_fill(values < kth, float("-inf"))
        # Top-p counts among what top-k has left; without top-k that is the whole row.
        total = torch.where(top_k > width, total, kept.logsumexp(dim=-1, keepdim=True))
        shares = (kept - total).exp()
        before = shares.cumsum(dim=-1) - shares
        top_p = self._column([state.params.top_p for state in states])
        last = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1) - 1
        nucleus = kept.gather(-1, last).masked_fill(top_p >= 1.0, float("-inf"))
        return torch.maximum(kth, nucleus)

    def _cut_min_p(self, values: torch.Tensor, states: Sequence[_State]) -> torch.Tensor:
        """The rows without tokens less likely than ``min_p`` times the likeliest, whose value is 0."""
        if not any(state.params.min_p for state in states):
            return values
        return values.masked_fill(values < self._column([s.params.min_p for s in states]).log(), float("-inf"))

    def _pick(self, values: torch.Tensor, ids: torch.Tensor, states: Sequence[_State]) -> torch.Tensor:
        """A draw from each row's distribution: int64 [n] of log-weights of candidates and their int32 ids, [n, m]."""
        best = (values + gumbel_noise(self._noise_keys(states), ids)).argmax(dim=-1, keepdim=True)
        return ids.gather(-1, best).squeeze(-1).long()

    def _pick_from_all(self, values: torch.Tensor, states: Sequence[_State]) -> torch.Tensor:
        """The same where all tokens are candidates: first a block of them, then one of the block.

        It is the same distribution with noise for one number in 64, and noise is what takes the time.
        """
        weights = functional.pad(values, (0, -self._vocab_size % BLOCK), value=float("-inf")).exp_()
        blocks = weights.view(len(states), -1, BLOCK)
        numbers = torch.arange(blocks.shape[1], dtype=torch.int32, device=self._device).expand(len(states), -1)
        # For the noise, blocks are numbered after the tokens, so that no block's is a token's.
        after = self._vocab_size
        block = self._pick(blocks.sum(dim=-1).log(), numbers + after, states).sub_(after).unsqueeze(-1)
        ids = block * BLOCK + torch.arange(BLOCK, device=self._device)
        return self._pick(weights.gather(-1, ids).log(), ids.to(torch.int32), states)

    def _noise_keys(self, states: Sequence[_State]) -> torch.Tensor:
        keys = [_noise_key(state.params.seed or 0, state.num_output) for state in states]
        return torch.tensor(keys, dtype=torch.int32, device=self._device)

    def _column(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self._device).unsqueeze(-1)


def gumbel_noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [n, m], a function of a row's key and a token's id.

    Args:
        keys: int32 [n, 2].
        ids: int32 [n, m].
    """
    # A multiply-xorshift hash (the constants are Ellis's "lowbias32") of the id, keyed before and within. int32
    # multiplication wraps; shifts are made logical by a mask. 31 bits make a uniform number whose smallest values,
    # which decide who wins, are the finest.
    mixed = ids * _int32(0x9E3779B1) + keys[:, :1]
    mixed = _xor_shift(mixed, 16).mul_(_int32(0x7FEB352D)).bitwise_xor_(keys[:, 1:])
    mixed = _xor_shift(mixed, 15).mul_(_int32(0x846CA68B))
    mixed = _xor_shift(mixed, 16).bitwise_and_(0x7FFFFFFF)
    uniform = mixed.float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1).bitwise_xor_(x)


def _int32(bits: int) -> int:
    """The signed number with these 32 bits."""
    return bits - 2**32 if bits >= 2**31 else bits


def _noise_key(seed: int, index: int) -> tuple[int, int]:
    """Two 32-bit numbers for the noise of output token ``index`` of a request."""
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return _int32(bits & 0xFFFFFFFF), _int32(bits >> 32)


def _penalize(logits: torch.Tensor, state: _State) -> None:
    """Change one row [V] in place: penalties for tokens that were there, and no end before ``min_tokens``."""
    params = state.params
    if state.seen is not None and state.counts is not None:
        if params.repetition_penalty != 1.0:
            less = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(state.seen, less, logits))
        logits -= params.frequency_penalty * state.counts
        logits -= params.presence_penalty * (state.counts > 0)
    if state.barred is not None and state.num_output < params.min_tokens:
        logits[state.barred] = float("-inf")


def _count(state: _State, token_id: int) -> None:
    """Count a sampled token to the request's output."""
    state.num_output += 1
    if state.seen is not None and state.counts is not None:
        state.seen[token_id] = True
        state.counts[token_id] += 1


def _details(
    logprobs: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[int], states: Sequence[_State]
) -> dict[int, _Drawn]:
    """What is reported of the rows that want logprobs, unless they are broken.

    Args:
        logprobs: [len(rows), V], of the raw logits.
        token_ids: int64 [len(rows)], the tokens that were chosen.
        rows: their places among ``states``.
        states: of all rows.
    """
    own = logprobs.gather(-1, token_ids.clamp(min=0).unsqueeze(-1)).squeeze(-1).tolist()
    most = max(states[row].params.logprobs or 0 for row in rows)
    values, ids = (found.tolist() for found in logprobs.topk(min(most, logprobs.shape[-1]), dim=-1))
    details: dict[int, _Drawn] = {}
    for at, (row, token_id) in enumerate(zip(rows, token_ids.tolist(), strict=True)):
        if token_id != BROKEN:
            top = tuple(zip(ids[at], values[at], strict=True))
            details[row] = _Drawn(token_id, own[at], top[: states[row].params.logprobs])
    return details


def _is_cut(params: SamplingParams) -> bool:
    """Whether the candidates are the likeliest ones only, so that they have to be found first."""
    return params.top_k > 0 or params.top_p < 1.0


def _rows(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of ``x``; ``x`` itself if it is all of them, in order."""
    return x if len(rows) == x.shape[0] else x[torch.tensor(rows, device=x.device)]
