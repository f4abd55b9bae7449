"""Sampling and log-probabilities of whole rows of logits by the C kernel ``csrc/sampling.c``, for CPUs.

The kernel makes two passes over a row, the torch versions in ``gumbel_max.py`` and ``logprobs.py`` a dozen. Each
function here returns None for tensors that the kernel does not support, or if the kernel was not loaded; the caller
then computes with torch. Logits are processed before (``sampler.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from workers.kernels.bindings import CSRC, KernelLibrary

SOURCE = CSRC / "sampling.c"

MAX_WIDTH = 2**30
"""Longest row: ids of tokens and of their blocks are 32 bits."""

_LOGITS = struct.Struct("@9q")
_PARAMS = struct.Struct("@3dq2i")
"""``logits_args`` and ``sampling_params`` of csrc/sampling.c."""

_Native = KernelLibrary(
    SOURCE,
    {"logits_args": _LOGITS.size, "sampling_params": _PARAMS.size},
    "sampling falls back to torch, milliseconds slower for each row",
)
use_native = _Native.use


def sample_tokens(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
    keys: Sequence[tuple[int, int]],
) -> torch.Tensor | None:
    """Sample one token per row: up to rounding the same token as ``gumbel_max.sample_tokens`` computes with torch.

    A row's token depends on the row and its own parameters only, bit for bit.

    Args:
        logits: float32 [n, V], processed and masked; not modified.
        temperatures: of the n rows; 0 is argmax, the lowest id of equals.
        top_ks: number of the likeliest tokens that are kept, and all that equal the last of them; 0: all.
        top_ps: of those, the likeliest up to this probability are kept, and all that equal the last of them; 1: all.
        min_ps: of those, tokens with at least this share of the likeliest token's probability are kept; 0: all.
        keys: noise keys, from ``gumbel_max.noise_key``.

    Returns:
        int64 [n]: token ids, -1 for rows whose largest logit is not finite or that have a NaN.

    Raises:
        ValueError: the arguments are not of the same length.
        MemoryError: a row's candidates could not be allocated.
    """
    library = _Native.library
    if library is None or not _is_supported(logits):
        return None
    rows = logits.shape[0]
    settings = list(zip(temperatures, top_ps, min_ps, top_ks, keys, strict=True))
    if len(settings) != rows:
        raise ValueError(f"there are {rows} rows to sample from, but settings for {len(settings)}")
    choices = b"".join(_PARAMS.pack(*numbers, *key) for *numbers, key in settings)
    token_ids = torch.empty(rows, dtype=torch.int64, device="cpu")
    _check(library.lockstep_sample(_describe(logits, token_ids), choices), rows)
    return token_ids


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Log-probabilities of one token per row and of the likeliest tokens: log_softmax, gather and topk in one call.

    Args:
        logits: float32 [n, V].
        token_ids: int64 [n]; those below 0 stand for 0.
        num_top: number of the likeliest tokens to return, at most V.

    Returns:
        log-probabilities of ``token_ids``, float32 [n]; ids (int64) and log-probabilities (float32) of the likeliest
        tokens in order, of equals the lowest id first, [n, min(num_top, V)] each. A row whose largest logit is not
        finite, or that has a NaN, gives NaN.

    Raises:
        ValueError: token_ids are not n ids of the vocabulary.
        MemoryError: a row's candidates could not be allocated.
    """
    library = _Native.library
    if library is None or not _is_supported(logits):
        return None
    rows, width = logits.shape
    tokens = token_ids.to("cpu", torch.int64).clamp(min=0).contiguous()
    if tokens.shape != (rows,) or (rows and int(tokens.max()) >= width):
        raise ValueError(f"{tuple(tokens.shape)} token ids are not {rows} ids of a vocabulary of {width}")
    own = torch.empty(rows, dtype=torch.float32, device="cpu")
    top = torch.empty((rows, max(0, min(num_top, width))), dtype=torch.float32, device="cpu")
    top_ids = torch.empty_like(top, dtype=torch.int64)
    _check(library.lockstep_logprobs(_describe(logits, tokens, own, top, top_ids)), rows)
    return own, top_ids, top


def _is_supported(logits: torch.Tensor) -> bool:
    fits = logits.dim() == 2 and 0 < logits.shape[1] <= MAX_WIDTH
    return fits and logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1


def _describe(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    own: torch.Tensor | None = None,
    top: torch.Tensor | None = None,
    top_ids: torch.Tensor | None = None,
) -> bytes:
    """``logits_args`` of csrc/sampling.c, valid for as long as these tensors live."""
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (own, top, top_ids))
    num_top = 0 if top is None else top.shape[1]
    return _LOGITS.pack(
        logits.data_ptr(), token_ids.data_ptr(), *addresses, len(logits), logits.stride(0), logits.shape[1], num_top
    )


def _check(out_of_memory: int, rows: int) -> None:
    if out_of_memory:
        raise MemoryError(f"no memory to sample from {rows} rows of logits")
