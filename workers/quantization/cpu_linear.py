"""The CPU linear method and its op ``lockstep::cpu_linear``: the fastest implementation for dtype and token count.

F.linear is slow for few tokens in any dtype, and for any number of tokens in bf16 and fp16 on CPUs without
instructions for them, where it reaches a tenth of the fp32 rate. The op has three implementations:

- the C kernel ``linear.c``, once :func:`use_native` has loaded it, up to :data:`MAX_NATIVE_TOKENS` tokens;
- blocked: as many weight rows as fit in cache are converted to fp32 and multiplied; results are rounded at the end;
- F.linear, where it is the fastest.

Batch invariance: within the C kernel, a token's result depends neither on the other tokens nor on the number of
threads. Where the kernel has a token limit, a batch that crosses it changes the implementation and the summation
order.
"""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from typing_extensions import override

from parallel.library import register_op
from parallel.linear_method import LinearInput, UnquantizedLinearMethod
from parallel.parameter import ParallelModule
from parallel.toolchain import NativeBuildError
from workers.kernels.bindings import CSRC, DTYPE_CODES, load_kernels

log = logging.getLogger("lockstep")

SOURCE = CSRC / "linear.c"

BLOCK_BYTES = 2 * 1024 * 1024
"""Size of one block of weight rows in fp32."""

FEW_TOKENS = 3
"""Up to this number of tokens F.linear is bound by reading the weights once, and is used where there is no C kernel."""


def _dtypes_without_instructions() -> tuple[torch.dtype, ...]:
    """The 16-bit dtypes without oneDNN kernels on this CPU, for which F.linear uses a slow generic loop."""
    slow: list[torch.dtype] = []
    for dtype, query in ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported")):
        supported = getattr(torch.ops.mkldnn, query, None) if torch.backends.mkldnn.is_available() else None
        if supported is None or not supported():
            slow.append(dtype)
    return tuple(slow)


SLOW_DTYPES = _dtypes_without_instructions()

MAX_NATIVE_TOKENS = {
    dtype: sys.maxsize if dtype in SLOW_DTYPES else 16 if dtype == torch.float32 else 8 for dtype in DTYPE_CODES
}
"""The C kernel's token limit by dtype: above it F.linear is faster. No limit for dtypes without CPU instructions."""

_PACK = struct.Struct("9q")
"""``linear_args`` of linear.c."""


class _Native:
    """The loaded C kernel, which the op's signature cannot carry.

    Attributes:
        call: takes a packed descriptor and returns 0, or 1 if out of memory; None until it is loaded.
        warned: whether the warning about a failed build was logged.
    """

    call: Callable[[bytes], int] | None = None
    warned: bool = False


def use_native(library_dir: str) -> bool:
    """Load the C kernel and use it from now on, with as many threads as torch uses now.

    Call it once per process before a model is traced, because it decides which op fp32 layers become in a graph; call
    it again after ``torch.set_num_threads``.

    Args:
        library_dir: where compiled libraries are kept.

    Returns:
        whether the kernel is loaded. If it cannot be built, one warning is logged and the op stays slower.
    """
    try:
        call = load_kernels(SOURCE, library_dir, {"linear_args": _PACK.size}).lockstep_linear
    except NativeBuildError as error:
        if not _Native.warned:
            log.warning("linear layers run without the C kernel, several times slower for few tokens: %s", error)
        _Native.warned = True
        return False
    _Native.call = call
    return True


def uses_op(dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """Whether ``lockstep::cpu_linear`` computes products of CPU tensors of ``dtype``; if not, F.linear is faster."""
    return out_dtype is not dtype or dtype in SLOW_DTYPES or _Native.call is not None


def cpu_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``x @ weight.T + bias`` for CPU tensors of any one floating dtype.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        out_dtype: x's dtype, or ``torch.float32`` for the fp32 sums without a final rounding.

    Returns:
        ``[..., N]`` in ``out_dtype``.
    """
    if x.dim() != 2:
        rows = cpu_linear(x.reshape(-1, x.shape[-1]), weight, bias, out_dtype)
        return rows.view(*x.shape[:-1], weight.shape[0])
    out = _multiply_natively(x, weight, bias, out_dtype)
    if out is not None:
        return out
    if out_dtype is x.dtype and (x.dtype not in SLOW_DTYPES or x.shape[0] <= FEW_TOKENS):
        return F.linear(x, weight, bias)
    return _multiply_by_blocks(x, weight, bias, out_dtype)


def _multiply_natively(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor | None:
    """The product by the C kernel, x ``[T, K]``; None if it is not loaded, not suited to the tensors or not faster.

    A decode step calls this for every linear layer of the model, so its overhead counts.
    """
    call, dtype = _Native.call, x.dtype
    (tokens, width), (count, depth) = x.shape, weight.shape
    # Invalid tensors are left to F.linear, which reports them.
    if call is None or not 0 < tokens <= MAX_NATIVE_TOKENS.get(dtype, 0) or weight.dtype != dtype:
        return None
    if not width == depth > 0 or not weight.is_contiguous():
        return None
    if bias is not None and not (bias.dtype == dtype and bias.is_contiguous() and bias.numel() == count):
        return None
    x = x.contiguous()
    shape = (tokens, count)
    out = x.new_empty(shape) if out_dtype is dtype else torch.empty(shape, dtype=out_dtype, device="cpu")
    addresses = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    if call(_PACK.pack(*addresses, tokens, count, width, DTYPE_CODES[dtype], DTYPE_CODES[out_dtype])):
        raise MemoryError(f"no memory to convert {tokens} tokens of {width} elements to fp32 for a linear layer")
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
        rows = weight[begin : begin + step]
        size = rows.shape[0]
        sums = torch.mm(x, block[:size].copy_(rows).t(), out=product[:, :size])
        if bias is not None:
            sums += bias[begin : begin + size]
        out[:, begin : begin + size] = sums
    return out


def _cpu_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


register_op("cpu_linear", cpu_linear, fake=_cpu_linear_fake, dispatch_key="CPU")


class CpuLinearMethod(UnquantizedLinearMethod):
    """A plain weight on a CPU, multiplied by the op ``lockstep::cpu_linear`` or by F.linear, whichever is faster."""

    @override
    def apply(
        self,
        layer: ParallelModule,
        x: LinearInput,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if isinstance(x, torch.Tensor) and uses_op(x.dtype, out_dtype or x.dtype):
            return torch.ops.lockstep.cpu_linear(x, layer.weight, bias, out_dtype or x.dtype)
        return super().apply(layer, x, bias, out_dtype=out_dtype)
