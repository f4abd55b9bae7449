"""The noise that draws tokens: a pure function of (seed of the request, index of the output token, token id).

A hash computes it and not a generator with a state, so batch company, preemption, replay and the kind of device leave
it alone. Adding it to log-probabilities and taking the largest is a draw from the distribution (``drawing.py``).
"""

from __future__ import annotations

import hashlib

import torch


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


def noise_key(seed: int, index: int) -> tuple[int, int]:
    """Two signed 32-bit numbers: the key of the noise of output token ``index`` of a request."""
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return _int32(bits & 0xFFFFFFFF), _int32(bits >> 32)


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1).bitwise_xor_(x)


def _int32(bits: int) -> int:
    """The signed number with these 32 bits."""
    return bits - 2**32 if bits >= 2**31 else bits
