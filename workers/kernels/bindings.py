"""Loads our CPU kernels: C libraries that share one pool of threads, and the codes by which they know dtypes.

What a kernel computes is documented in the module that calls it (``workers/quantization/cpu_linear.py``, ...).
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from parallel.toolchain import NativeBuildError, load_library

log = logging.getLogger("lockstep")

CSRC = Path(__file__).parent / "csrc"

POOL = CSRC / "pool.c"

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As in csrc/numbers.h."""


class OptionalKernels:
    """The kernels of one source, for code that is called without a word about where libraries are kept.

    Args:
        source: see :func:`load_kernels`.
        without: what goes on without them, and how, for the one warning.

    Attributes:
        library: once :meth:`use` has loaded it.
        refused: whether the warning was given.
    """

    def __init__(self, source: Path, without: str) -> None:
        self.library: ctypes.CDLL | None = None
        self.refused = False
        self._source = source
        self._without = without

    def use(self, directory: str) -> bool:
        """Compute with them from now on, by as many threads as torch now uses.

        Args:
            directory: where compiled libraries are kept.

        Returns:
            whether they could be compiled; if not, says so once in the log.
        """
        try:
            self.library = load_kernels(self._source, directory)
        except NativeBuildError as error:
            if not self.refused:
                log.warning("%s: %s", self._without, error)
            self.refused = True
            return False
        return True

    def is_used(self) -> bool:
        """Whether :meth:`use` has loaded them."""
        return self.library is not None


def load_kernels(source: Path, directory: str) -> ctypes.CDLL:
    """The compiled kernels of ``source``, with torch's number of threads at their disposal from now on.

    The pool's threads are its own, not torch's: those wait for each other at every step, which takes whole time
    slices where cores are short, and would be a second set wherever torch brings an OpenMP library of its own.

    Args:
        source: a C file that includes csrc/pool.h.
        directory: see :func:`parallel.toolchain.load_library`.

    Raises:
        NativeBuildError: there is no compiler, or it failed.
    """
    # Loaded twice, it is still one library with one pool: that is how libraries of one process are.
    pool = load_library(POOL, directory)
    library = load_library(source, directory)
    pool.lockstep_pool_threads(torch.get_num_threads())
    library.lockstep_share_pool(ctypes.cast(pool.lockstep_parallel, ctypes.c_void_p))
    return library
