"""Bindings of the C kernels for norms, rotary embedding and activation, which eager CPU steps use.

PyTorch makes several passes and allocations for each of these ops, which for one token is overhead: two thirds of a
layer's time outside its linear layers. ``custom_op.py`` selects between these kernels and the PyTorch references. Each
function returns None for tensors that its kernel does not support; the reference then computes them.
"""

from __future__ import annotations

import struct

import torch

from workers.kernels.bindings import CSRC, DTYPE_CODES, KernelLibrary

SOURCE = CSRC / "elementwise.c"

MAX_WIDTH = 32768
"""Longest row of a norm: a thread's stack holds two of them."""

_NORM = struct.Struct("5q6qd")
_ROTARY = struct.Struct("6q5q6q")
_ACTIVATION = struct.Struct("2q3q")

_library = KernelLibrary(
    SOURCE,
    {"norm_args": _NORM.size, "rotary_args": _ROTARY.size, "activation_args": _ACTIVATION.size},
    "norms and activations run without C kernels, slower in eager mode",
)
use_native, is_used = _library.use, _library.is_used


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """``rms_norm.rms_norm_reference``; x may be a view of heads in a wider projection, [T, heads, d]."""
    library, width, dims = _library.library, x.shape[-1], x.dim()
    if library is None or dims not in (2, 3) or not _is_norm(x, weight) or x.stride(-1) != 1:
        return None
    heads, head_stride = (1, 0) if dims == 2 else (x.shape[1], x.stride(1))
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    addresses = x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0
    library.lockstep_rms_norm(
        _NORM.pack(*addresses, x.shape[0], heads, width, x.stride(0), head_stride, DTYPE_CODES[x.dtype], eps)
    )
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``rms_norm.fused_add_rms_norm_reference``."""
    library = _library.library
    if library is None or x.dim() != 2 or not _is_norm(x, weight) or not x.is_contiguous():
        return None
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        return None
    out, stream = torch.empty_like(x), torch.empty_like(x)
    tokens, width = x.shape
    addresses = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), stream.data_ptr()
    library.lockstep_rms_norm(_NORM.pack(*addresses, tokens, 1, width, width, 0, DTYPE_CODES[x.dtype], eps))
    return out, stream


def _is_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    width = x.shape[-1]
    fits = 0 < width <= MAX_WIDTH and x.dtype in DTYPE_CODES
    return fits and weight.shape == (width,) and weight.dtype == x.dtype and weight.is_contiguous()


def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``rotary_embedding.rotary_embedding_reference``; query and key may be views into a wider projection."""
    library, dtype = _library.library, query.dtype
    if library is None or dtype not in DTYPE_CODES or not dtype == key.dtype == cos.dtype == sin.dtype:
        return None
    (tokens, heads, head_dim), half = query.shape, cos.shape[-1]
    if head_dim != 2 * half or cos.shape != (tokens, 1, half) or sin.shape != cos.shape or key.shape[2] != head_dim:
        return None
    strides = query.stride(), key.stride(), cos.stride(), sin.stride()
    if any(stride[2] != 1 for stride in strides):
        return None
    query_out = torch.empty((tokens, heads, head_dim), dtype=dtype, device="cpu")
    key_out = torch.empty(key.shape, dtype=dtype, device="cpu")
    addresses = [tensor.data_ptr() for tensor in (query, key, cos, sin, query_out, key_out)]
    steps = *strides[0][:2], *strides[1][:2], strides[2][0], strides[3][0]
    library.lockstep_rotary_embedding(
        _ROTARY.pack(*addresses, tokens, heads, key.shape[1], half, DTYPE_CODES[dtype], *steps)
    )
    return query_out, key_out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor | None:
    """``silu_and_mul.silu_and_mul_reference``."""
    library = _library.library
    if library is None or x.dim() != 2 or x.dtype not in DTYPE_CODES or not x.is_contiguous() or x.shape[1] % 2:
        return None
    tokens, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty((tokens, width))
    library.lockstep_silu_and_mul(_ACTIVATION.pack(x.data_ptr(), out.data_ptr(), tokens, width, DTYPE_CODES[x.dtype]))
    return out
