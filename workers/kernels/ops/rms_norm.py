"""RMS normalization, alone and after the residual addition: two ops, one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.kernels import elementwise
from workers.kernels.custom_op import fused_op
from workers.kernels.triton_launch import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last dimension: fp32 inside, rounded to x's dtype before the weight.

    Args:
        x: [..., d].
        weight: [d], of x's dtype.
        eps: added to the mean square.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Shape and dtype of the result."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def fused_add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), the sum rounded to x's dtype before normalization."""
    stream = x + residual
    return rms_norm_reference(stream, weight, eps), stream


def fused_add_rms_norm_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the results."""
    return rms_norm_fake(x, weight, eps), rms_norm_fake(x, weight, eps)


@kernel()
def _rms_norm(
    x, residual, weight, out, stream, eps, heads, stride_token, stride_head, width,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i computes row i of ``out``: head ``i % heads`` of token ``i // heads``. With ADD, inputs are dense."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row // heads * stride_token + row % heads * stride_head + at, mask=inside, other=0.0)
    dtype = value.dtype
    if ADD:
        other = tl.load(residual + row * width + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(stream + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, ((wide * scale).to(dtype).to(tl.float32) * factor).to(dtype), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One launch. x may be a view of heads in a wider projection, [T, heads, d]."""
    out = rms_norm_fake(x, weight, eps)
    if x.dim() != 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, 1, x.shape[-1])
    _launch(x, None, weight, eps, out, None)
    return out


def fused_add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""
    out, stream = fused_add_rms_norm_fake(x, residual, weight, eps)
    _launch(x.contiguous().view(-1, 1, x.shape[-1]), residual.contiguous(), weight, eps, out, stream)
    return out, stream


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    stream: torch.Tensor | None,
) -> None:
    """Launch one program per row of ``x``, [T, heads, d]."""
    tokens, heads, width = x.shape
    if not x.numel():
        return
    block = next_power_of_2(width)
    _rms_norm[(tokens * heads,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if stream is None else stream,
        eps,
        heads,
        x.stride(0),
        x.stride(1),
        width,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        enable_fp_fusion=False,
    )


rms_norm = fused_op("rms_norm", rms_norm_reference, rms_norm_triton, rms_norm_fake, native=elementwise.rms_norm)
fused_add_rms_norm = fused_op(
    "fused_add_rms_norm",
    fused_add_rms_norm_reference,
    fused_add_rms_norm_triton,
    fused_add_rms_norm_fake,
    native=elementwise.fused_add_rms_norm,
)
