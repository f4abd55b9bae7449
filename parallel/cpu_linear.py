"""``linear``: F.linear, but quick on CPUs where that is slow.

Slow is: a few tokens in any dtype, and any number of tokens in bf16 and fp16 on CPUs that have no instructions for
them, where F.linear goes at a tenth of the fp32 rate. Three ways to compute the op ``lockstep::cpu_linear``:

- ``native/linear.c``, once :func:`use_native` has compiled it, up to :data:`MOST_NATIVE_TOKENS`;
- by blocks: some weight rows are converted to fp32, few enough to stay in cache, and multiplied, rounding at the end;
- F.linear, where it is the quickest.

Bits: within the first way, a token's result depends neither on the other tokens nor on the number of threads. Where
that way has a bound, a batch that crosses it changes the way, and with it the order of the sums. Layers call
:func:`linear`; nothing here knows ranks.
"""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from parallel.library import register_op
from parallel.native.build import NativeBuildError
from parallel.native.kernels import DTYPE_CODES, load_kernels

log = logging.getLogger("lockstep")

SOURCE = Path(__file__).parent / "native" / "linear.c"

BLOCK_BYTES = 2 * 1024 * 1024
"""fp32 bytes of one converted block of weight rows."""

FEW_TOKENS = 3
"""Up to here the time is that of reading the weights once, which F.linear does well enough without a C compiler."""


def _dtypes_without_instructions() -> tuple[torch.dtype, ...]:
    """The 16-bit dtypes for which oneDNN has no kernels on this CPU, so that F.linear falls back to a slow loop."""
    slow: list[torch.dtype] = []
    for dtype, query in ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported")):
        supported = getattr(torch.ops.mkldnn, query, None) if torch.backends.mkldnn.is_available() else None
        if supported is None or not supported():
            slow.append(dtype)
    return tuple(slow)


SLOW_DTYPES = _dtypes_without_instructions()

MOST_NATIVE_TOKENS = {
    dtype: sys.maxsize if dtype in SLOW_DTYPES else 16 if dtype == torch.float32 else 8 for dtype in DTYPE_CODES
}
"""From there on F.linear overtakes the kernel, which it never does without instructions for the dtype."""

_PACK = struct.Struct("9q").pack
"""``product`` of native/linear.c."""

_WIDE = DTYPE_CODES[torch.float32]


class _Native:
    """The kernel an op without arguments for it has to find."""

    call: Callable[[bytes], int] | None = None
    refused: bool = False


def use_native(library_dir: str) -> bool:
    """Compute with ``native/linear.c`` from now on, by as many threads as torch now uses. Once per process is enough.

    Call it before a model is traced, since it decides what fp32 layers become in a graph; and again after
    ``torch.set_num_threads``.

    Args:
        library_dir: where compiled libraries are kept.

    Returns:
        whether it could be compiled; if not, says so once in the log, and everything works, slower.
    """
    try:
        call = load_kernels(SOURCE, library_dir).lockstep_linear
    except NativeBuildError as error:
        if not _Native.refused:
            log.warning("linear layers go without the C kernel, several times slower for few tokens: %s", error)
        _Native.refused = True
        return False
    _Native.call = call
    return True


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False
) -> torch.Tensor:
    """``x @ weight.T + bias``, ``[..., N]``; all of one dtype.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]``.
        wide: give the fp32 sums, not rounded to x's dtype.
    """
    wide = wide and x.dtype != torch.float32
    if x.is_cpu and (wide or x.dtype in SLOW_DTYPES or _Native.call is not None):
        return torch.ops.lockstep.cpu_linear(x, weight, bias, wide)
    if not wide:
        return F.linear(x, weight, bias)
    product = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias


def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """:func:`linear` for CPU tensors of any floating dtype, the quickest way there is for this many tokens."""
    if x.dim() != 2:
        rows = cpu_linear(x.reshape(-1, x.shape[-1]), weight, bias, wide)
        return rows.view(*x.shape[:-1], weight.shape[0])
    out = _multiply_natively(x, weight, bias, wide)
    if out is not None:
        return out
    if not wide and (x.dtype not in SLOW_DTYPES or x.shape[0] <= FEW_TOKENS):
        return F.linear(x, weight, bias)
    return _multiply_by_blocks(x, weight, bias, torch.float32 if wide else x.dtype)


def _multiply_natively(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool
) -> torch.Tensor | None:
    """By the kernel, x ``[T, K]``; None if there is none, or it does not take these tensors or is not the quickest.

    Written for speed: a step of one token calls this a hundred times, and each time the memory stands idle.
    """
    call, dtype = _Native.call, x.dtype
    (tokens, width), (count, depth) = x.shape, weight.shape
    # What is wrong with the tensors, if something is, F.linear will say.
    if call is None or not 0 < tokens <= MOST_NATIVE_TOKENS.get(dtype, 0) or weight.dtype != dtype:
        return None
    if not width == depth > 0 or not weight.is_contiguous():
        return None
    if bias is not None and not (bias.dtype == dtype and bias.is_contiguous() and bias.numel() == count):
        return None
    x = x.contiguous()
    out = torch.empty((tokens, count), dtype=torch.float32, device="cpu") if wide else x.new_empty((tokens, count))
    places = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    code = DTYPE_CODES[dtype]
    if call(_PACK(*places, tokens, count, width, code, _WIDE if wide else code)):
        raise MemoryError(f"no memory to widen {tokens} tokens of {width} numbers for a linear layer")
    return out


def _multiply_by_blocks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    (tokens, width), count = x.shape, weight.shape[0]
    step = max(1, min(count, BLOCK_BYTES // (4 * max(width, 1))))
    x = x.float()
    block = torch.empty((step, width), dtype=torch.float32)
    product = torch.empty((tokens, step), dtype=torch.float32)
    out = torch.empty((tokens, count), dtype=out_dtype)
    for begin in range(0, count, step):
        part = weight[begin : begin + step]
        size = part.shape[0]
        summed = torch.mm(x, block[:size].copy_(part).t(), out=product[:, :size])
        if bias is not None:
            summed += bias[begin : begin + size]
        out[:, begin : begin + size] = summed
    return out


def _cpu_linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32 if wide else x.dtype)


register_op("cpu_linear", cpu_linear, fake=_cpu_linear_fake, dispatch_key="CPU")
