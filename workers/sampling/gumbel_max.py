"""One token from each whole row of logits: temperature, top-k, top-p, min-p, and the draw itself.

What is done to a row before (penalties, biases, masks) and who holds it is ``sampler.py``'s; the noise is
``noise.py``'s. Rows do not depend on each other. On a CPU the kernel of ``native_sampling.py`` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from runtime.common.sampling_params import SamplingParams
from workers.sampling import native_sampling
from workers.sampling.gumbel_noise import gumbel_noise

BROKEN = -1
"""Stands for the token of a row whose logits are not finite, where a list of ids has no other way to say it."""

NUCLEUS_WIDTH = 1024
"""Candidates looked at first for a top-p without top-k. Only where they do not suffice is the whole row sorted."""

BLOCK = 64
"""Neighbouring tokens that are drawn from together first, where all are candidates."""

TIES = 32
"""Candidates looked at beyond top-k, to see that none of the same value is left out."""


def choose_tokens(
    logits: torch.Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Token ids, int64 [n], of whole rows of logits, which may be changed; BROKEN for rows that are not finite.

    Args:
        logits: float32 [n, V]; -inf for tokens that cannot come.
        params: of the n rows.
        keys: of their noise, see ``noise.noise_key``.
    """
    drawn = native_sampling.draw(
        logits,
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        keys,
    )
    if drawn is not None:
        return drawn
    largest = logits.amax(dim=-1, keepdim=True)  # Carries a NaN along, too.
    token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    greedy = [row for row, p in enumerate(params) if p.greedy]
    random = [row for row, p in enumerate(params) if not p.greedy]
    if greedy:
        token_ids[greedy] = rows_of(logits, greedy).argmax(dim=-1)
    if random:
        # The likeliest token becomes 0 first, so that a tiny temperature overflows nothing but the others.
        scaled = rows_of(logits, random).sub_(rows_of(largest, random))
        scaled.div_(_column([params[row].temperature for row in random], logits.device))
        drawer = _Drawer(scaled, [params[row] for row in random], [keys[row] for row in random])
        token_ids[random] = drawer.draw()
    return torch.where(largest.squeeze(-1).isfinite(), token_ids, BROKEN)


class _Drawer:
    """Draws from rows [n, V] of log-weights whose largest is 0."""

    def __init__(self, scaled: torch.Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]) -> None:
        self._scaled = scaled
        self._params = params
        self._keys = torch.tensor(keys, dtype=torch.int32, device=scaled.device)
        self._device = scaled.device
        self._vocab_size = scaled.shape[-1]

    def draw(self) -> torch.Tensor:
        """Sampled token ids, int64 [n]."""
        params = self._params
        token_ids = torch.empty(len(params), dtype=torch.int64, device=self._device)
        whole = [row for row, p in enumerate(params) if not _is_cut(p)]
        if whole:
            token_ids[whole] = self._pick_from_all(self._cut_min_p(rows_of(self._scaled, whole), whole), whole)
        cut = [row for row, p in enumerate(params) if _is_cut(p)]
        width = TIES + max((params[row].top_k or NUCLEUS_WIDTH for row in cut), default=0)
        while cut:
            cut = self._draw_cut(cut, min(width, self._vocab_size), token_ids)
            width *= 8
        return token_ids

    def _draw_cut(self, rows: list[int], width: int, token_ids: torch.Tensor) -> list[int]:
        """Draw rows that have a top-k or top-p among their ``width`` likeliest tokens, into ``token_ids``.

        Returns:
            the rows for which ``width`` was not certainly enough.
        """
        logits = rows_of(self._scaled, rows)
        values, ids = logits.topk(width, dim=-1)
        threshold = self._threshold(values, logits.logsumexp(dim=-1, keepdim=True), rows)
        # Cutting by value, not by place, keeps all of several equals: their order among themselves is chance.
        kept = values.masked_fill(values < threshold, float("-inf"))
        token_ids[rows] = self._pick(self._cut_min_p(kept, rows), ids.to(torch.int32), rows)
        if width == self._vocab_size:
            return []
        sure = (values[:, -1:] < threshold).squeeze(-1).tolist()
        return [row for row, enough in zip(rows, sure, strict=True) if not enough]

    def _threshold(self, values: torch.Tensor, total: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The smallest value [n, 1] that top-k and then top-p leave of rows sorted downwards [n, width].

        Args:
            values: scaled logits, the likeliest first.
            total: logsumexp of the whole rows [n, 1].
            rows: the n rows.
        """
        width = values.shape[-1]
        most = [[self._params[row].top_k or self._vocab_size] for row in rows]
        top_k = torch.tensor(most, device=self._device)
        kth = values.gather(-1, top_k.clamp(max=width) - 1).masked_fill(top_k > width, float("-inf"))
        kept = values.masked_fill(values < kth, float("-inf"))
        # Top-p counts among what top-k has left; without top-k that is the whole row.
        total = torch.where(top_k > width, total, kept.logsumexp(dim=-1, keepdim=True))
        shares = (kept - total).exp()
        before = shares.cumsum(dim=-1) - shares
        top_p = _column([self._params[row].top_p for row in rows], self._device)
        last = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1) - 1
        nucleus = kept.gather(-1, last).masked_fill(top_p >= 1.0, float("-inf"))
        return torch.maximum(kth, nucleus)

    def _cut_min_p(self, values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The rows without tokens less likely than ``min_p`` times the likeliest, whose value is 0."""
        shares = [self._params[row].min_p for row in rows]
        if not any(shares):
            return values
        return values.masked_fill(values < _column(shares, self._device).log(), float("-inf"))

    def _pick(self, values: torch.Tensor, ids: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """A draw from each row's distribution: int64 [n] of log-weights of candidates and their int32 ids, [n, m]."""
        keys = rows_of(self._keys, list(rows))
        best = (values + gumbel_noise(keys, ids)).argmax(dim=-1, keepdim=True)
        return ids.gather(-1, best).squeeze(-1).long()

    def _pick_from_all(self, values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The same where all tokens are candidates: first a block of them, then one of the block.

        It is the same distribution with noise for one number in 64, and noise is what takes the time.
        """
        weights = functional.pad(values, (0, -self._vocab_size % BLOCK), value=float("-inf")).exp_()
        blocks = weights.view(len(rows), -1, BLOCK)
        numbers = torch.arange(blocks.shape[1], dtype=torch.int32, device=self._device).expand(len(rows), -1)
        # For the noise, blocks are numbered after the tokens, so that no block's is a token's.
        after = self._vocab_size
        block = self._pick(blocks.sum(dim=-1).log(), numbers + after, rows).sub_(after).unsqueeze(-1)
        ids = block * BLOCK + torch.arange(BLOCK, device=self._device)
        return self._pick(weights.gather(-1, ids).log(), ids.to(torch.int32), rows)


def rows_of(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of ``x``; ``x`` itself if it is all of them, in order."""
    return x if len(rows) == x.shape[0] else x[torch.tensor(rows, device=x.device)]


def _is_cut(params: SamplingParams) -> bool:
    """Whether the candidates are the likeliest ones only, so that they have to be found first."""
    return params.top_k > 0 or params.top_p < 1.0


def _column(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device).unsqueeze(-1)
