"""From the last hidden rows' logits to one token for each request, the same on every rank.

The vocabulary is cut over the ranks, so no rank sees a whole row of logits. Plain greedy rows need none: each rank
offers its best (value, token) pair and every rank takes the best offer. All other rows are gathered on rank 0, which
samples and tells the others. Which of the two a row takes follows from its request's parameters alone, never from
data, so all ranks enter the same collectives.

On rank 0 a row goes through, in this order: biases, penalties, no end before ``min_tokens``, what a grammar allows
(``structured.py``); then a token is drawn (``drawing.py``). Reported log-probabilities are of the row as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from parallel.group import TensorParallelGroup
from parallel.shard import Shard
from runtime.common.errors import RequestError
from runtime.common.protocol import NewRequest, SampledToken
from runtime.common.sampling_params import SamplingParams
from workers.sampling.grammar import Follower, Grammars
from workers.sampling.gumbel_max import BROKEN, choose_tokens, rows_of
from workers.sampling.gumbel_noise import noise_key
from workers.sampling.logprobs import Pairs, logprobs_of

BROKEN_TEXT = (
    "the model gave logits that are not finite (NaN or infinity) for this request; other requests are not affected. "
    "If this happens again, weights or dtype are at fault: try --dtype float32"
)

MAX_GATHERED = 2**25
"""Logits gathered at once; more rows go in several rounds, so that memory stays bounded."""

_BYTES = torch.arange(256).unsqueeze(-1) >> torch.arange(8)
_CHANGES = torch.zeros(256, 8).masked_fill_(_BYTES & 1 == 0, float("-inf"))
"""For each byte of a mask, what is added to the logits of its eight tokens."""


@dataclass(slots=True)
class _State:
    """What sampling has to know of one request. All but the first two are rank 0's alone, or None if not needed.

    Attributes:
        num_output: output tokens so far: the index of the next one.
        barred: ids that may not be sampled before ``min_tokens``, int64.
        biased: ids that have a bias, int64, and the biases, float32.
        seen: whether a token is in prompt or output, bool [V].
        counts: how often it is in the output, float32 [V].
        output: the output so far, for a grammar that is not followed yet.
        follower: where in its grammar the output is.
        failure: why the request cannot go on, where that is its grammar.
        broken: whether it has had logits that are not finite.
    """

    params: SamplingParams
    num_output: int
    barred: torch.Tensor | None = None
    biased: tuple[torch.Tensor, torch.Tensor] | None = None
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    output: tuple[int, ...] = ()
    follower: Follower | None = None
    failure: str = ""
    broken: bool = False

    @property
    def plain(self) -> bool:
        """Whether only the likeliest token is wanted, and nothing else about the row."""
        params = self.params
        return (
            params.greedy
            and params.logprobs is None
            and not params.penalized
            and params.min_tokens == 0
            and not params.logit_bias
            and params.structured_outputs is None
        )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Rank 0's choice for one row."""

    token_id: int
    logprob: float | None = None
    top: Pairs = ()


class Sampler:
    """Samples for the requests it was told of. Making one, and sampling, are collective: every rank does the same.

    Args:
        group: the ranks.
        vocab_shard: this rank's part of the vocabulary.
        vocab_size: of the whole.
        device: where the logits are.
        eos_token_ids: tokens that ``min_tokens`` keeps from being sampled, besides a request's own stop tokens, and
            that end what matches a grammar.
        checkpoint: folder of the tokenizer, which only requests with a grammar need.

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
        checkpoint: str = "",
    ) -> None:
        self._group = group
        self._shard = vocab_shard
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = Grammars(checkpoint, eos_token_ids, vocab_size)
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
        self._states[request.req_id] = state
        if self._group.rank != 0:
            return
        barred = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and barred:
            state.barred = torch.tensor(sorted(barred), device=self._device)
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            state.biased = torch.tensor(ids, device=self._device), self._floats(biases)
        if params.penalized:
            state.seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            state.seen[torch.tensor(request.token_ids, device=self._device)] = True
            ids = torch.tensor(output, dtype=torch.int64, device=self._device)
            state.counts = torch.bincount(ids, minlength=self._vocab_size).float()
        if params.structured_outputs is not None:
            state.output = output

    def drop(self, req_id: int) -> None:
        """Forget a request."""
        self._states.pop(req_id, None)

    def mark_broken(self, req_id: int) -> None:
        """On rank 0: the model gave this request logits that are not finite, if not those of its next token."""
        self._states[req_id].broken = True

    def sample(self, local_logits: torch.Tensor, req_ids: Sequence[int]) -> tuple[list[int], list[SampledToken] | None]:
        """Choose the next token of each request, and count it to its output.

        Args:
            local_logits: [n, V_local], this rank's part of each row, in any floating dtype; sampling is in float32.
            req_ids: the n requests the rows belong to, in the same order on every rank.

        Returns:
            the n token ids, on every rank; and what rank 0 reports of them, None on the others. A row that is not
            finite, or whose grammar cannot be followed, gives token 0 and an error.
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
            for row, token_id in zip(plain, self._best(rows_of(local_logits, plain)), strict=True):
                drawn[row] = _Drawn(token_id)
        self._grammars.begin_step()
        at_once = max(1, MAX_GATHERED // self._vocab_size)
        for first in range(0, len(others), at_once):
            rows = others[first : first + at_once]
            chosen = self._draw_on_rank_0(rows_of(local_logits, rows), [states[row] for row in rows])
            for row, draw in zip(rows, chosen, strict=True):
                drawn[row] = draw
        for state, draw in zip(states, drawn, strict=True):
            _count(state, draw.token_id)
        token_ids = [max(draw.token_id, 0) for draw in drawn]
        if self._group.rank != 0:
            return token_ids, None
        reports = zip(req_ids, drawn, states, strict=True)
        return token_ids, [_report(req_id, draw, state) for req_id, draw, state in reports]

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
        # Before the rows: a GPU computes them meanwhile.
        masks = self._masks(states) if self._group.rank == 0 else None
        logits = self._gather(local_logits)
        token_ids = torch.empty(len(states), dtype=torch.int64, device=self._device)
        details: dict[int, _Drawn] = {}
        if logits is not None:
            wanted = [row for row, state in enumerate(states) if state.params.logprobs is not None]
            raw = logits[wanted]  # A copy.
            for row, state in enumerate(states):
                _adjust(logits[row], state)
            if masks is not None:
                _apply_masks(logits, *masks)
            keys = [noise_key(state.params.seed or 0, state.num_output) for state in states]
            token_ids = choose_tokens(logits, [state.params for state in states], keys)
            if wanted:
                details = _details(raw, token_ids, wanted, states)
        told = self._group.broadcast(token_ids).tolist()
        return [details.get(row, _Drawn(token_id)) for row, token_id in enumerate(told)]

    def _gather(self, local_logits: torch.Tensor) -> torch.Tensor | None:
        """Whole rows in float32 [n, V] on rank 0, its own to change; None on the others."""
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

    def _masks(self, states: Sequence[_State]) -> tuple[list[int], torch.Tensor] | None:
        """The rows that follow a grammar, and what each allows: uint8 [rows, V / 8], a bit for each token.

        A request that cannot go on fails, and is not among them.
        """
        rows: list[int] = []
        masks: list[torch.Tensor] = []
        for row, state in enumerate(states):
            outputs = state.params.structured_outputs
            if outputs is None or state.failure:
                continue
            try:
                if state.follower is None:
                    state.follower = self._grammars.follow(outputs, state.output)
                    state.output = ()
                masks.append(torch.from_numpy(state.follower.allowed()))
                rows.append(row)
            except RequestError as error:
                state.failure = str(error)
        return (rows, torch.stack(masks).to(self._device)) if rows else None

    def _floats(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self._device)


def _adjust(logits: torch.Tensor, state: _State) -> None:
    """Change one row [V] in place: biases, penalties for tokens that were there, no end before ``min_tokens``."""
    params = state.params
    if state.biased is not None:
        ids, biases = state.biased
        logits.index_add_(0, ids, biases)
    if state.seen is not None and state.counts is not None:
        if params.repetition_penalty != 1.0:
            less = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(state.seen, less, logits))
        logits -= params.frequency_penalty * state.counts
        logits -= params.presence_penalty * (state.counts > 0)
    if state.barred is not None and state.num_output < params.min_tokens:
        logits[state.barred] = float("-inf")


def _apply_masks(logits: torch.Tensor, rows: list[int], masks: torch.Tensor) -> None:
    """In some rows of ``logits`` [n, V], in place, leave only what their masks, uint8 [rows, V / 8], allow."""
    # Adding is much quicker than filling by a mask, and leaves what is not finite so: such a row is found broken.
    changes = functional.embedding(masks.to(torch.int32), _CHANGES.to(masks.device))
    for row, change in zip(rows, changes.view(len(rows), -1), strict=True):
        logits[row] += change[: logits.shape[-1]]


def _count(state: _State, token_id: int) -> None:
    """Count a sampled token, or BROKEN, to the request's output."""
    if state.follower is not None and not state.failure and token_id != BROKEN:
        try:
            state.follower.accept(token_id)
        except RequestError as error:
            state.failure = str(error)
    state.num_output += 1
    if state.seen is not None and state.counts is not None:
        state.seen[max(token_id, 0)] = True
        state.counts[max(token_id, 0)] += 1


def _report(req_id: int, draw: _Drawn, state: _State) -> SampledToken:
    """What the driver hears of a row."""
    if state.failure:
        return SampledToken(req_id, 0, error=state.failure)
    if state.broken or draw.token_id == BROKEN:
        return SampledToken(req_id, 0, error=BROKEN_TEXT, broken=True)
    return SampledToken(req_id, draw.token_id, draw.logprob, draw.top)


def _details(
    raw: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[int], states: Sequence[_State]
) -> dict[int, _Drawn]:
    """What is reported of the rows that want logprobs, unless they are broken.

    Args:
        raw: [len(rows), V], their logits as they came.
        token_ids: int64 [n], the tokens that were chosen for all rows.
        rows: places among ``states``, at least one.
        states: of all rows.
    """
    chosen = token_ids[rows]
    most = max(states[row].params.logprobs or 0 for row in rows)
    found = logprobs_of(raw, chosen, most)
    return {
        row: _Drawn(token_id, logprob, top[: states[row].params.logprobs])
        for row, token_id, (logprob, top) in zip(rows, chosen.tolist(), found, strict=True)
        if token_id != BROKEN
    }
