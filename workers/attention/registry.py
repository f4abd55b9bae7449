"""Which attention backend computes on a device. The backends themselves know nothing of one another.

A backend's module is imported only where it is chosen: one needs Triton, another a C compiler.
"""

from __future__ import annotations

import torch

from workers.attention.base import AttentionBackend
from workers.attention.torch_paged import TorchPagedAttention
from workers.kernels.triton_launch import triton_is_installed


def choose_backend(device: torch.device, *, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The best backend that can attend here; plain torch where no kernel can.

    Args:
        device: where the rank computes.
        dtype: of queries and cache.
        head_dim: size of one head.
    """
    if device.type == "cpu":
        return _cpu_backend(dtype, head_dim)
    if device.type == "cuda" and triton_is_installed():
        from workers.attention.triton_paged import DTYPES, MAX_HEAD_DIM, TritonPagedAttention

        if dtype in DTYPES and head_dim <= MAX_HEAD_DIM:
            return TritonPagedAttention()
    return TorchPagedAttention()


def _cpu_backend(dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    from workers.attention.cpu_paged import native_backend

    return native_backend(dtype, head_dim) or TorchPagedAttention()
