"""Registration of custom ops, straight on a ``torch.library.Library``.

``torch.library.custom_op`` would do as well, at several microseconds more for every call. The schema comes from the
Python signature, so an op is one annotated function and, where it is traced, one fake. The ops themselves live
elsewhere: collectives in ``group.py``, kernels in ``workers/kernels/ops/``.
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
"""Where ops go that name no library of their own. A fragment: others can add ops to the namespace with theirs."""


_PYTHON: dict[tuple[str, str, str], tuple[weakref.ref[Library], Callable[..., Any]]] = {}
"""What was registered: namespace, name, dispatch key -> the library it was added to, and the function."""


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
        mutates_args: names of the arguments it writes. One that is not named may be reordered or dropped by the
            compiler. An op that only writes must return None.
        fake: computes shape and dtype of the result without data; needed where the op is traced.
        target_library: the library to register on. The op lives as long as that object; default: for ever.
        dispatch_key: one key or several, all with this implementation; default: the platform's.
        tags: what else the compiler may know about it.

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
    """Give an op that exists an implementation for one more kind of device.

    Raises:
        RuntimeError: the op is unknown, or has an implementation for that key from the same library.
    """
    library = LIBRARY if target_library is None else target_library
    library.impl(name, func, dispatch_key=dispatch_key)
    _PYTHON[library.ns, name, dispatch_key] = weakref.ref(library), func


def python_implementations(dispatch_key: str) -> dict[Any, Callable[..., Any]]:
    """The Python function behind each of our ops for one kind of device, by overload.

    Calling it saves the dispatcher's 5 microseconds where nothing but the implementation is wanted: in a replay whose
    tensors are known.
    """
    found: dict[Any, Callable[..., Any]] = {}
    for (namespace, name, key), (library, func) in _PYTHON.items():
        # An op of a library that is gone is gone, too.
        if key == dispatch_key and namespace == NAMESPACE and library() is not None:
            found[getattr(torch.ops.lockstep, name).default] = func
    return found


def dispatch_keys() -> tuple[str, ...]:
    """Keys for an op whose one implementation serves the platform's device and the CPU of the same machine."""
    return tuple(dict.fromkeys((detect_platform().dispatch_key, "CPU")))
