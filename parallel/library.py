"""Registration of custom ops, directly on a ``torch.library.Library``.

``torch.library.custom_op`` costs several microseconds more per call. The schema is inferred from the Python signature,
so an op is one annotated function and, where it is traced, one fake. The ops are defined elsewhere: collectives in
``group.py``, kernels in ``workers/kernels/ops/``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library, infer_schema

from parallel.platform import detect_platform

NAMESPACE = "lockstep"

LIBRARY = Library(NAMESPACE, "FRAGMENT")
"""The default library. As a fragment, it lets other code add ops to the namespace with a library of its own."""

_PYTHON: dict[tuple[str, str, str], tuple[weakref.ref[Library], Callable[..., Any]]] = {}
"""Registered implementations: (namespace, name, dispatch key) -> (library, function)."""


def register_op(
    name: str,
    func: Callable[..., Any],
    *,
    mutates_args: Sequence[str] = (),
    fake: Callable[..., Any] | None = None,
    target_library: Library | None = None,
    dispatch_key: str | Sequence[str] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Define an op and its implementation.

    Args:
        name: without the namespace; the op becomes ``torch.ops.<namespace>.<name>``.
        func: the implementation. Its type hints are the schema.
        mutates_args: names of the arguments it writes. The compiler may reorder or remove an op whose writes are not
            declared. An op that only writes must return None.
        fake: computes shape and dtype of the result without data; required where the op is traced.
        target_library: the library to register on; the op exists as long as that object. Default: :data:`LIBRARY`.
        dispatch_key: one key or several, all with this implementation; default: the platform's.
        tags: ``torch.Tag`` values of the op.

    Raises:
        RuntimeError: the name is taken.
        ValueError: a parameter without a type hint, or one that the schema language cannot express.
    """
    library = LIBRARY if target_library is None else target_library
    keys = (detect_platform().dispatch_key,) if dispatch_key is None else dispatch_key
    keys = (keys,) if isinstance(keys, str) else tuple(keys)
    library.define(name + infer_schema(func, mutates_args=tuple(mutates_args)), tags=tuple(tags))
    for key in keys:
        add_implementation(name, func, dispatch_key=key, target_library=library)
    if fake is not None:
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


def add_implementation(
    name: str, func: Callable[..., Any], *, dispatch_key: str, target_library: Library | None = None
) -> None:
    """Register an implementation of an existing op for another dispatch key.

    Raises:
        RuntimeError: the op is unknown, or has an implementation for that key from the same library.
    """
    library = LIBRARY if target_library is None else target_library
    library.impl(name, func, dispatch_key=dispatch_key)
    _PYTHON[library.ns, name, dispatch_key] = weakref.ref(library), func


def python_implementations(dispatch_key: str) -> dict[Any, Callable[..., Any]]:
    """The Python implementation of each op of this namespace for one dispatch key, by overload.

    Calling it directly saves the dispatcher's 5 microseconds in compiled code and in a replay, where the tensors are
    known and neither autograd nor tracing is active.
    """
    found: dict[Any, Callable[..., Any]] = {}
    for (namespace, name, key), (library, func) in _PYTHON.items():
        # The op of a library that was deleted no longer exists.
        if key == dispatch_key and namespace == NAMESPACE and library() is not None:
            found[getattr(torch.ops.lockstep, name).default] = func
    return found


def dispatch_keys() -> tuple[str, ...]:
    """Dispatch keys of an op with one implementation for the platform's device and the CPU of the same machine."""
    return tuple(dict.fromkeys((detect_platform().dispatch_key, "CPU")))
