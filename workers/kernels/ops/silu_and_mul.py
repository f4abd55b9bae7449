"""The gated activation: ``silu(first half) * second half`` of the last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from workers.kernels import elementwise
from workers.kernels.custom_op import fused_op
from workers.kernels.triton_launch import kernel

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024
"""Elements per program: 8 per thread, 16 bytes in half precision."""


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """[..., 2d] -> [..., d], in x's dtype: a half-precision silu is rounded before the product."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul_fake(x: torch.Tensor) -> torch.Tensor:
    """Shape and dtype of the result."""
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


@kernel()
def _silu_and_mul(x, out, width, BLOCK: tl.constexpr):
    """Program (row, chunk) computes ``BLOCK`` elements of a row of [rows, 2 * width]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + at, product.to(up.dtype), mask=inside)


def silu_and_mul_triton(x: torch.Tensor) -> torch.Tensor:
    """One launch."""
    out = silu_and_mul_fake(x)
    if out.numel():
        width = out.shape[-1]
        grid = (out.numel() // width, -(-width // BLOCK))
        _silu_and_mul[grid](x.contiguous(), out, width, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)
    return out


silu_and_mul = fused_op(
    "silu_and_mul", silu_and_mul_reference, silu_and_mul_triton, silu_and_mul_fake, native=elementwise.silu_and_mul
)
