"""Draws and log-probabilities of whole rows of logits by our C kernel: what rank 0 uses on CPUs with a C compiler.

Plain torch makes a dozen passes over a row for what takes two. The plain forms are in ``drawing.py`` and
``logprobs.py``; what happens to a row before a token is drawn is ``sampler.py``'s. Each function here gives None for
tensors that the kernel does not take, or if it was not loaded; the plain form then computes.
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
    "sampling runs without the C kernel, milliseconds slower for each row",
)
use_native = _Native.use


def draw(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
    keys: Sequence[tuple[int, int]],
) -> torch.Tensor | None:
    """A token for each row: but for rounding the same as ``drawing.choose_tokens`` draws with torch.

    A row's token depends on nothing but the row and its own settings, to the bit.

    Args:
        logits: float32 [n, V], with penalties, biases and masks applied; not changed.
        temperatures: of the n rows; 0 takes the likeliest token, the lowest of equals.
        top_ks: how many of the likeliest stay, and all that equal the last of them; 0 for all.
        top_ps: the likeliest of what top-k leaves stay, up to this probability and with all that equal the last of
            them; 1 for all.
        min_ps: of these, those stay that have at least this share of the likeliest token's probability; 0 for all.
        keys: what the noise depends on besides token ids, see ``noise.noise_key``.

    Returns:
        int64 [n]: token ids, -1 for rows whose largest logit is not finite or that have a NaN.

    Raises:
        ValueError: there is not one of everything for each row.
        MemoryError: there is no memory for a row's candidates.
    """
    library = _Native.library
    if library is None or not _is_taken(logits):
        return None
    rows = logits.shape[0]
    settings = list(zip(temperatures, top_ps, min_ps, top_ks, keys, strict=True))
    if len(settings) != rows:
        raise ValueError(f"there are {rows} rows to draw from, but settings for {len(settings)}")
    choices = b"".join(_PARAMS.pack(*numbers, *key) for *numbers, key in settings)
    token_ids = torch.empty(rows, dtype=torch.int64, device="cpu")
    _check(library.lockstep_draw(_describe(logits, token_ids), choices), rows)
    return token_ids


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Log-probabilities of one token and of the likeliest ones of each row: what log_softmax, gather and topk give.

    Args:
        logits: float32 [n, V].
        token_ids: int64 [n], of the tokens; those below 0 stand for 0.
        most: how many of the likeliest tokens to list, at most V of them.

    Returns:
        float32 [n], those of the tokens; and of the likeliest ones, in order and of equals the lowest id first, ids in
        int64 and log-probabilities in float32, [n, min(most, V)]. A row whose largest logit is not finite, or that has
        a NaN, gives NaN.

    Raises:
        ValueError: token_ids are not n ids of the vocabulary.
        MemoryError: there is no memory for a row's candidates.
    """
    library = _Native.library
    if library is None or not _is_taken(logits):
        return None
    rows, width = logits.shape
    tokens = token_ids.to("cpu", torch.int64).clamp(min=0).contiguous()
    if tokens.shape != (rows,) or (rows and int(tokens.max()) >= width):
        raise ValueError(f"{tuple(tokens.shape)} token ids are not {rows} ids of a vocabulary of {width}")
    own = torch.empty(rows, dtype=torch.float32, device="cpu")
    top = torch.empty((rows, max(0, min(most, width))), dtype=torch.float32, device="cpu")
    top_ids = torch.empty_like(top, dtype=torch.int64)
    _check(library.lockstep_logprobs(_describe(logits, tokens, own, top, top_ids)), rows)
    return own, top_ids, top


def _is_taken(logits: torch.Tensor) -> bool:
    fits = logits.dim() == 2 and 0 < logits.shape[1] <= MAX_WIDTH
    return fits and logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1


def _describe(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    own: torch.Tensor | None = None,
    top: torch.Tensor | None = None,
    top_ids: torch.Tensor | None = None,
) -> bytes:
    """``logits_args`` of csrc/sampling.c, good for as long as these tensors live."""
    places = (0 if tensor is None else tensor.data_ptr() for tensor in (own, top, top_ids))
    most = 0 if top is None else top.shape[1]
    return _LOGITS.pack(
        logits.data_ptr(), token_ids.data_ptr(), *places, len(logits), logits.stride(0), logits.shape[1], most
    )


def _check(lacked_memory: int, rows: int) -> None:
    if lacked_memory:
        raise MemoryError(f"no memory to draw from {rows} rows of logits")
