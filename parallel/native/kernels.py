"""Loads our CPU kernels: C libraries that share one pool of threads, and the codes by which they know dtypes.

What a kernel computes is its own module's matter (``parallel/cpu_linear.py``, ``workers/attention/native_cpu.py``).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from parallel.native.build import load_library

POOL = Path(__file__).parent / "pool.c"

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As in native/numbers.h."""


def load_kernels(source: Path, directory: str) -> ctypes.CDLL:
    """The compiled kernels of ``source``, with torch's number of threads at their disposal from now on.

    The pool's threads are its own, not torch's: those wait for each other at every step, which takes whole time
    slices where cores are short, and would be a second set wherever torch brings an OpenMP library of its own.

    Args:
        source: a C file that includes native/pool.h.
        directory: see :func:`parallel.native.build.load_library`.

    Raises:
        NativeBuildError: there is no compiler, or it failed.
    """
    # Loaded twice, it is still one library with one pool: that is how libraries of one process are.
    pool = load_library(POOL, directory)
    library = load_library(source, directory)
    pool.lockstep_pool_threads(torch.get_num_threads())
    library.lockstep_share_pool(ctypes.cast(pool.lockstep_parallel, ctypes.c_void_p))
    return library
