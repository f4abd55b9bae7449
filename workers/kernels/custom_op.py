"""Custom ops: registration of fused kernels, and the selection between kernel and PyTorch reference at every call.

- Eager on a GPU: the op, whose CUDA implementation is one Triton launch.
- Eager on a CPU, if ``elementwise.py`` has loaded its C kernels: the op, whose CPU implementation is one C call.
- Eager elsewhere: the PyTorch reference.
- While a compiler traces, on any device: the PyTorch reference. Inductor fuses it into one kernel together with its
  neighbours (the residual addition, the split of a projection, a norm per head), which an opaque op would prevent.
  These are the norm and activation fusions of -O1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from parallel.library import NAMESPACE, add_implementation, register_op
from workers.kernels import elementwise
from workers.kernels.triton_launch import triton_is_installed

P = ParamSpec("P")
R = TypeVar("R")


def fused_op(
    name: str,
    reference: Callable[P, R],
    kernel: Callable[P, R],
    fake: Callable[P, R],
    *,
    native: Callable[P, R | None] | None = None,
    mutates_args: Sequence[str] = (),
) -> Callable[P, R]:
    """Register ``torch.ops.lockstep.<name>`` and return the function that layers call.

    Args:
        name: of the op.
        reference: the op in PyTorch; its first argument is a tensor.
        kernel: launches the Triton kernel; the op's CUDA implementation. Without Triton the reference is.
        fake: shapes and dtypes of the result, contiguous.
        native: calls the C kernel, or returns None for unsupported tensors, which the reference then computes.
            The op's CPU implementation.
        mutates_args: names of the arguments that are written.
    """

    @functools.wraps(reference)
    def on_cpu(*args: P.args, **kwargs: P.kwargs) -> R:
        result = None if native is None else native(*args, **kwargs)
        return reference(*args, **kwargs) if result is None else result

    register_op(name, on_cpu, mutates_args=mutates_args, fake=fake, dispatch_key="CPU")
    add_implementation(name, kernel if triton_is_installed() else reference, dispatch_key="CUDA")
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    @functools.wraps(reference)
    def choose(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if torch.compiler.is_compiling() or not isinstance(first, torch.Tensor):
            return reference(*args, **kwargs)
        if first.is_cuda or (first.is_cpu and native is not None and elementwise.is_used()):
            return op(*args, **kwargs)
        return reference(*args, **kwargs)

    return choose
