"""Registry of attention backends by the names that ``--attention-backend`` takes.

A backend's module is imported only when it is selected or considered.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from runtime.common.errors import ConfigError
from workers.attention.base import AttentionBackend

BACKENDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cpu": ("workers.attention.cpu_paged", "CpuPagedAttention"),
        "triton": ("workers.attention.triton_paged", "TritonPagedAttention"),
        "torch": ("workers.attention.torch_paged", "TorchPagedAttention"),
    }
)
"""Module and class by name; "auto" takes the first usable one. The names are those of the config's choices."""


def create_backend(name: str, device: torch.device, *, dtype: torch.dtype, head_dim: int) -> AttentionBackend[Any]:
    """The attention backend of a model.

    Args:
        name: a key of :data:`BACKENDS`, or "auto".
        device: where the rank computes.
        dtype: of queries and cache.
        head_dim: size of one head.

    Raises:
        ConfigError: the backend is unknown, or cannot run on this device, with this dtype or head size, or without a
            dependency that is missing.
    """
    reasons = {known: unusable(load_class(known), device, dtype=dtype, head_dim=head_dim) for known in BACKENDS}
    usable = [known for known, reason in reasons.items() if not reason]
    if name == "auto":
        name = usable[0]
    if name not in usable:
        reason = reasons.get(name, "no backend has this name")
        raise ConfigError(
            f"attention_backend {name!r} cannot be used here: {reason}; allowed: {', '.join(['auto', *usable])}"
        )
    return load_class(name)()


def load_class(name: str) -> type[AttentionBackend[Any]]:
    """The class of a backend."""
    module, cls = BACKENDS[name]
    return getattr(importlib.import_module(module), cls)


def backend_name(backend: AttentionBackend[Any]) -> str:
    """The registered name of a backend; its class name if it has none."""
    cls = type(backend)
    names = {entry: name for name, entry in BACKENDS.items()}
    return names.get((cls.__module__, cls.__name__), cls.__name__)


def unusable(backend: type[AttentionBackend[Any]], device: torch.device, *, dtype: torch.dtype, head_dim: int) -> str:
    """The requirement that is not met, in words; "" if all are."""
    if backend.device_types and device.type not in backend.device_types:
        return f"it runs on {' or '.join(backend.device_types)}, and this rank computes on {device.type}"
    if backend.dtypes and dtype not in backend.dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in backend.dtypes)
        return f"it computes in {allowed}, and the model's dtype is {str(dtype).removeprefix('torch.')}"
    if backend.max_head_dim is not None and head_dim > backend.max_head_dim:
        return f"it takes heads of at most {backend.max_head_dim}, and the model's have {head_dim}"
    return backend.missing()
