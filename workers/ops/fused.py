"""Ops that fuse what plain torch computes in several steps, and which form a layer gets.

Three cases, decided in one place for all such ops:

- On a GPU, eagerly: the op, whose CUDA implementation is one Triton launch.
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
from workers.ops.kernel import triton_is_installed

P = ParamSpec("P")
R = TypeVar("R")


def fused_op(
    name: str,
    reference: Callable[P, R],
    kernel: Callable[P, R],
    fake: Callable[P, R],
    *,
    mutates_args: Sequence[str] = (),
) -> Callable[P, R]:
    """Register ``torch.ops.lockstep.<name>`` and give the function that layers call.

    Args:
        name: of the op.
        reference: plain torch; the first argument is a tensor. Also the op's implementation on CPU.
        kernel: the same by Triton; the op's implementation on CUDA. Without Triton the reference stands there too.
        fake: shapes and dtypes of the result, contiguous.
        mutates_args: names of the arguments that are written.
    """
    register_op(name, reference, mutates_args=mutates_args, fake=fake, dispatch_key="CPU")
    add_implementation(name, kernel if triton_is_installed() else reference, dispatch_key="CUDA")
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    @functools.wraps(reference)
    def choose(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if torch.compiler.is_compiling() or not (isinstance(first, torch.Tensor) and first.is_cuda):
            return reference(*args, **kwargs)
        return op(*args, **kwargs)

    return choose
