"""``linear``: F.linear, but quick for bf16 and fp16 on CPUs that have no instructions for them.

There, F.linear multiplies two tokens and more at a tenth of the fp32 rate. The op ``lockstep::cpu_linear`` converts a
block of weight rows to fp32, small enough to stay in cache, multiplies, and rounds once at the end. Everywhere else
``linear`` is F.linear. Layers call this; nothing here knows ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel.library import register_op

BLOCK_BYTES = 2 * 1024 * 1024
"""fp32 bytes of one converted block of weight rows."""

FEW_TOKENS = 3
"""Up to here the time is that of reading the weights once, which F.linear does well."""


def _dtypes_without_instructions() -> tuple[torch.dtype, ...]:
    """The 16-bit dtypes for which oneDNN has no kernels on this CPU, so that F.linear falls back to a slow loop."""
    slow: list[torch.dtype] = []
    for dtype, query in ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported")):
        supported = getattr(torch.ops.mkldnn, query, None) if torch.backends.mkldnn.is_available() else None
        if supported is None or not supported():
            slow.append(dtype)
    return tuple(slow)


SLOW_DTYPES = _dtypes_without_instructions()


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False
) -> torch.Tensor:
    """``x @ weight.T + bias``: x ``[..., K]``, weight ``[N, K]``, bias ``[N]``, result ``[..., N]``; one dtype.

    Args:
        wide: give the fp32 sums, not rounded to x's dtype.
    """
    wide = wide and x.dtype != torch.float32
    if x.device.type == "cpu" and (wide or x.dtype in SLOW_DTYPES):
        return torch.ops.lockstep.cpu_linear(x, weight, bias, wide)
    if not wide:
        return F.linear(x, weight, bias)
    product = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias


def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """:func:`linear` by blocks in fp32, for CPU tensors of any floating dtype."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= FEW_TOKENS and not wide:
        return F.linear(x, weight, bias)
    tokens, width = rows.shape
    count = weight.shape[0]
    step = max(1, min(count, BLOCK_BYTES // (4 * max(width, 1))))
    rows = rows.float()
    block = torch.empty(step, width)
    product = torch.empty(tokens, step)
    out = x.new_empty(tokens, count, dtype=torch.float32 if wide else x.dtype)
    for begin in range(0, count, step):
        part = weight[begin : begin + step]
        size = part.shape[0]
        summed = torch.mm(rows, block[:size].copy_(part).t(), out=product[:, :size])
        if bias is not None:
            summed += bias[begin : begin + size]
        out[:, begin : begin + size] = summed
    return out.reshape(*x.shape[:-1], count)


def _cpu_linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32 if wide else x.dtype)


register_op("cpu_linear", cpu_linear, fake=_cpu_linear_fake, dispatch_key="CPU")
