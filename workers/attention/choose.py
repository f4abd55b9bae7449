"""Which attention backend computes on a device. The backends themselves know nothing of one another.

A backend's module is imported only where it is chosen: one needs Triton, another a C compiler.
"""

from __future__ import annotations

import torch

from workers.attention.base import AttentionBackend
from workers.attention.torch_paged import TorchPagedAttention


def choose_backend(device: torch.device, *, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The best backend that can attend here; plain torch where no kernel can.

    Args:
        device: where the rank computes.
        dtype: of queries and cache.
        head_dim: size of one head.
    """
    if device.type == "cpu":
        return _cpu_backend(dtype, head_dim)
    return TorchPagedAttention()


def _cpu_backend(dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    return TorchPagedAttention()
