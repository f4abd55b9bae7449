"""Launches of Triton kernels from modules that import without Triton, an optional library that only GPUs need.

An op's module decorates its kernel with :func:`kernel`. Triton is imported at the first launch, which also binds the
name ``tl`` in the kernel's module; type checkers see its import under ``TYPE_CHECKING``. When a layer uses a kernel is
``custom_op.py``'s.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


class Part:
    """Decorator of a device function: kernels of the same module call it, and Triton inlines it into them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """For the type checker only: at the first launch, Triton's object replaces this one in the module."""
        raise TypeError(
            f"{self.function.__name__} is a device function of Triton kernels and cannot be called from Python"
        )


class Kernel:
    """One Triton kernel; ``kernel[grid](*arguments, **settings)`` launches it.

    Args:
        function: its source, a module's own function.
        varying: integer arguments that change from step to step. Triton specialises all others for the value 1 and
            for multiples of 16, and the compilation would stall the first step with such a value.
    """

    def __init__(self, function: Callable[..., None], varying: tuple[str, ...] = ()) -> None:
        self.function = function
        self.varying = varying

    @functools.cached_property
    def jit(self) -> Any:
        """The ``triton.jit`` function; an interpreted one if TRITON_INTERPRET was set before the first use.

        Raises:
            ModuleNotFoundError: Triton is not installed.
        """
        triton: Any = importlib.import_module("triton")
        names = self.function.__globals__
        names["tl"] = importlib.import_module("triton.language")
        for name in self.function.__code__.co_names:
            if isinstance(part := names.get(name), Part):
                names[name] = triton.jit(part.function)
        return triton.jit(self.function, do_not_specialize=list(self.varying))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return self.jit[grid]


def kernel(*, varying: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """Decorator that makes a function a :class:`Kernel`."""
    return functools.partial(Kernel, varying=varying)


@functools.cache
def triton_is_installed() -> bool:
    """Whether Triton is installed; does not import it."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:  # An import hook refuses it.
        return False


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``, as Triton's block sizes have to be."""
    return 1 << max(0, number - 1).bit_length()
