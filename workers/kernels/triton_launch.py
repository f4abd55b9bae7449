"""Triton kernels in files that import without Triton, which is optional and is needed on a GPU only.

An op's file holds its kernel as a function under :func:`kernel`. Triton is imported when the first one is launched:
the name ``tl``, which kernels use and which a type checker is shown under ``TYPE_CHECKING``, is put into the
kernel's module then. What ops there are, and when a layer takes the kernel, is ``fused.py``'s.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


class Part:
    """A function that kernels of the same module call and that is compiled into them; use it as a decorator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """For the type checker: by the time a kernel runs, Triton's own object stands in this one's place."""
        raise TypeError(f"{self.function.__name__} is part of Triton kernels and cannot be called from Python")


class Kernel:
    """One Triton kernel; ``kernel[grid](*arguments, **settings)`` launches it.

    Args:
        function: its source, a module's own function.
        varying: integer arguments that change from step to step. Triton compiles anew for values 1 and multiples of
            16 of all others, which would stall a step that is the first with such a value.
    """

    def __init__(self, function: Callable[..., None], varying: tuple[str, ...] = ()) -> None:
        self.function = function
        self.varying = varying

    @functools.cached_property
    def jit(self) -> Any:
        """Triton's own object for this kernel; for the interpreter if TRITON_INTERPRET was set before the first use.

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
    """Make a function a :class:`Kernel`."""
    return functools.partial(Kernel, varying=varying)


@functools.cache
def triton_is_installed() -> bool:
    """Whether kernels can be launched, given a device; Triton is not imported to find out."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:  # An import hook that forbids it, as good as its absence.
        return False


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least ``number``: sizes of blocks are such."""
    return 1 << max(0, number - 1).bit_length()
