"""What the opaque ops of a forward pass read and cannot be given as arguments: metadata, layers, KV caches.

Ambient state in the only form allowed: set by a ``with`` statement around one forward pass, never nested, cleared
even when the pass fails. A rank runs one forward pass at a time, on one thread.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from workers.attention.base import AttentionMetadata

if TYPE_CHECKING:
    from workers.layers.attention import Attention


@dataclass
class ForwardContext:
    """One forward pass.

    Attributes:
        metadata: which tokens belong to which request, and where their keys and values are.
        layers: attention layers by name.
        kv_caches: each layer's cache, by the same name.
        shared: what an attention backend works out from the metadata once, for all layers of this pass.
    """

    metadata: AttentionMetadata
    layers: Mapping[str, Attention]
    kv_caches: Mapping[str, torch.Tensor]
    shared: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])


class _Ambient:
    """Holds the context of the pass that is running, if one is."""

    current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Generator[ForwardContext]:
    """Make ``context`` the one that ops read, for the duration of the ``with`` block.

    Raises:
        RuntimeError: a forward pass is already running.
    """
    if _Ambient.current is not None:
        raise RuntimeError("a forward pass was begun inside another one; end the first before the second")
    _Ambient.current = context
    try:
        yield context
    finally:
        _Ambient.current = None


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass.

    Raises:
        RuntimeError: there is none: an op that needs it was called outside of ``with forward_context(...)``.
    """
    if _Ambient.current is None:
        raise RuntimeError("no forward pass is running; call the model inside `with forward_context(...)`")
    return _Ambient.current
