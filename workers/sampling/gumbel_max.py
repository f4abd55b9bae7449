"""Samples one token from each whole row of logits: temperature, top-k, top-p, min-p, and the Gumbel-max trick.

A sample from softmax(logits) is the argmax of logits plus standard Gumbel noise. The noise is a hash of (seed of the
request, index of the output token, token id), not a generator with a state, so batch composition, preemption, replay
and the kind of device do not change it. Rows are independent. Logits are processed before (``sampler.py``); on a CPU
the C kernel of ``native_sampling.py`` computes the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.nn import functional

from runtime.common.sampling_params import SamplingParams
from workers.sampling import native_sampling

NON_FINITE = -1
"""Token id of a row whose logits are not finite."""

NUCLEUS_WIDTH = 1024
"""Candidates considered first for top-p without top-k. The whole row is sorted only if these do not suffice."""

BLOCK = 64
"""Neighbouring tokens that are sampled together first, where all tokens are candidates."""

TIES = 32
"""Candidates considered beyond top-k, to include those that equal the last one."""


def sample_tokens(
    logits: torch.Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Sampled token ids, int64 [n]; NON_FINITE for rows that are not finite. May modify ``logits``.

    Args:
        logits: float32 [n, V]; -inf for masked tokens.
        params: of the n rows.
        keys: noise keys of the n rows, from :func:`noise_key`.
    """
    sampled = native_sampling.sample_tokens(
        logits,
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        keys,
    )
    if sampled is not None:
        return sampled
    largest = logits.amax(dim=-1, keepdim=True)  # Propagates NaN.
    token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    greedy = [row for row, p in enumerate(params) if p.greedy]
    random = [row for row, p in enumerate(params) if not p.greedy]
    if greedy:
        token_ids[greedy] = select_rows(logits, greedy).argmax(dim=-1)
    if random:
        # The largest logit becomes 0 first, so that a tiny temperature can only overflow the others.
        scaled = select_rows(logits, random).sub_(select_rows(largest, random))
        scaled.div_(_column([params[row].temperature for row in random], logits.device))
        sampler = _GumbelMaxSampler(scaled, [params[row] for row in random], [keys[row] for row in random])
        token_ids[random] = sampler.sample()
    return torch.where(largest.squeeze(-1).isfinite(), token_ids, NON_FINITE)


class _GumbelMaxSampler:
    """Samples from rows [n, V] of log-weights whose largest is 0."""

    def __init__(self, scaled: torch.Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]) -> None:
        self._scaled = scaled
        self._params = params
        self._keys = torch.tensor(keys, dtype=torch.int32, device=scaled.device)
        self._device = scaled.device
        self._vocab_size = scaled.shape[-1]

    def sample(self) -> torch.Tensor:
        """Sampled token ids, int64 [n]."""
        params = self._params
        token_ids = torch.empty(len(params), dtype=torch.int64, device=self._device)
        whole = [row for row, p in enumerate(params) if not _is_truncated(p)]
        if whole:
            token_ids[whole] = self._sample_all(self._apply_min_p(select_rows(self._scaled, whole), whole), whole)
        truncated = [row for row, p in enumerate(params) if _is_truncated(p)]
        width = TIES + max((params[row].top_k or NUCLEUS_WIDTH for row in truncated), default=0)
        while truncated:
            truncated = self._sample_top(truncated, min(width, self._vocab_size), token_ids)
            width *= 8
        return token_ids

    def _sample_top(self, rows: list[int], width: int, token_ids: torch.Tensor) -> list[int]:
        """Sample rows with top-k or top-p among their ``width`` likeliest tokens, into ``token_ids``.

        Returns:
            the rows for which ``width`` may have been too small.
        """
        logits = select_rows(self._scaled, rows)
        values, ids = logits.topk(width, dim=-1)
        threshold = self._threshold(values, logits.logsumexp(dim=-1, keepdim=True), rows)
        # A threshold on the value keeps all of several equal tokens; topk orders equals arbitrarily.
        kept = values.masked_fill(values < threshold, float("-inf"))
        token_ids[rows] = self._gumbel_argmax(self._apply_min_p(kept, rows), ids.to(torch.int32), rows)
        if width == self._vocab_size:
            return []
        complete = (values[:, -1:] < threshold).squeeze(-1).tolist()
        return [row for row, enough in zip(rows, complete, strict=True) if not enough]

    def _threshold(self, values: torch.Tensor, total: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The smallest value [n, 1] that top-k and then top-p keep of rows in descending order [n, width].

        Args:
            values: scaled logits, the largest first.
            total: logsumexp of the whole rows [n, 1].
            rows: the n rows.
        """
        width = values.shape[-1]
        top_k = torch.tensor([[self._params[row].top_k or self._vocab_size] for row in rows], device=self._device)
        kth = values.gather(-1, top_k.clamp(max=width) - 1).masked_fill(top_k > width, float("-inf"))
        kept = values.masked_fill(values < kth, float("-inf"))
        # Top-p is a share of what top-k has kept; without top-k that is the whole row.
        total = torch.where(top_k > width, total, kept.logsumexp(dim=-1, keepdim=True))
        probabilities = (kept - total).exp()
        before = probabilities.cumsum(dim=-1) - probabilities
        top_p = _column([self._params[row].top_p for row in rows], self._device)
        last = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1) - 1
        nucleus = kept.gather(-1, last).masked_fill(top_p >= 1.0, float("-inf"))
        return torch.maximum(kth, nucleus)

    def _apply_min_p(self, values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Mask tokens less likely than ``min_p`` times the likeliest, whose value is 0."""
        min_ps = [self._params[row].min_p for row in rows]
        if not any(min_ps):
            return values
        return values.masked_fill(values < _column(min_ps, self._device).log(), float("-inf"))

    def _gumbel_argmax(self, values: torch.Tensor, ids: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """A sample of each row, int64 [n], from candidates' log-weights and their int32 ids, both [n, m]."""
        keys = select_rows(self._keys, list(rows))
        best = (values + gumbel_noise(keys, ids)).argmax(dim=-1, keepdim=True)
        return ids.gather(-1, best).squeeze(-1).long()

    def _sample_all(self, values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """A sample of each row where all tokens are candidates: first a block of tokens, then one of its tokens.

        The distribution is the same with noise for one number in 64, and the noise dominates the cost.
        """
        weights = functional.pad(values, (0, -self._vocab_size % BLOCK), value=float("-inf")).exp_()
        blocks = weights.view(len(rows), -1, BLOCK)
        numbers = torch.arange(blocks.shape[1], dtype=torch.int32, device=self._device).expand(len(rows), -1)
        # For the noise, blocks are numbered after the tokens, so that a block and a token never share noise.
        after = self._vocab_size
        block = self._gumbel_argmax(blocks.sum(dim=-1).log(), numbers + after, rows).sub_(after).unsqueeze(-1)
        ids = block * BLOCK + torch.arange(BLOCK, device=self._device)
        return self._gumbel_argmax(weights.gather(-1, ids).log(), ids.to(torch.int32), rows)


def gumbel_noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [n, m], a function of each row's key and each token id.

    Args:
        keys: int32 [n, 2].
        ids: int32 [n, m].
    """
    # A multiply-xorshift hash (the constants are Ellis's "lowbias32") of the id, keyed before and within. int32
    # multiplication wraps; shifts are made logical by a mask. 31 bits make a uniform number with the finest
    # resolution at the smallest values, which decide the argmax.
    mixed = ids * _int32(0x9E3779B1) + keys[:, :1]
    mixed = _xor_shift(mixed, 16).mul_(_int32(0x7FEB352D)).bitwise_xor_(keys[:, 1:])
    mixed = _xor_shift(mixed, 15).mul_(_int32(0x846CA68B))
    mixed = _xor_shift(mixed, 16).bitwise_and_(0x7FFFFFFF)
    uniform = mixed.float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def noise_key(seed: int, index: int) -> tuple[int, int]:
    """The noise key of output token ``index`` of a request: two signed 32-bit numbers."""
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return _int32(bits & 0xFFFFFFFF), _int32(bits >> 32)


def select_rows(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Rows of ``x`` in ascending order; ``x`` itself, not a copy, if these are all of them."""
    return x if len(rows) == x.shape[0] else x[torch.tensor(rows, device=x.device)]


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1).bitwise_xor_(x)


def _int32(bits: int) -> int:
    """The signed number with these 32 bits."""
    return bits - 2**32 if bits >= 2**31 else bits


def _is_truncated(params: SamplingParams) -> bool:
    """Whether top-k or top-p restricts the candidates to the likeliest tokens."""
    return params.top_k > 0 or params.top_p < 1.0


def _column(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device).unsqueeze(-1)
