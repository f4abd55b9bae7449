"""Ops that fuse what plain torch computes in several steps, and which form a layer gets.

Four cases, decided in one place for all such ops:

- On a GPU, eagerly: the op, whose CUDA implementation is one Triton launch.
- On a CPU, eagerly, where ``elementwise.py`` has loaded its C kernels: the op, whose CPU implementation is one C call.
- Elsewhere, eagerly: the plain torch form.
- While a compiler traces, on any device: the plain torch form. Inductor fuses it into one kernel by itself, and with
  it what stands beside it (the residual addition, the split of a projection, a norm per head), which an op that it
  cannot look into would keep apart. This is what the "norm and activation fusions" of -O1 are.
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
    """Register ``torch.ops.lockstep.<name>`` and give the function that layers call.

    Args:
        name: of the op.
        reference: plain torch; the first argument is a tensor.
        kernel: the same by Triton; the op's implementation on CUDA. Without Triton the reference stands there too.
        fake: shapes and dtypes of the result, contiguous.
        native: the same by C; gives None for tensors it does not take. The op's implementation on CPU, with
            ``reference`` for those.
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
