"""Bindings of the CPU kernels: C libraries that share one thread pool, their dtype codes and their argument structs.

A kernel takes one packed struct. Each library exports the sizes of its structs, and a library whose sizes differ from
those of its Python callers is refused: a field added on one side only would be read as garbage.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from parallel.toolchain import NativeBuildError, load_library

log = logging.getLogger("lockstep")

CSRC = Path(__file__).parent / "csrc"

POOL = CSRC / "pool.c"

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The enum of csrc/numbers.h."""


class KernelLibrary:
    """The kernels of one C source, optional: without a C compiler the callers use PyTorch ops.

    Args:
        source: see :func:`load_kernels`.
        structs: see :func:`load_kernels`.
        without: the consequence of not having them, for the warning.

    Attributes:
        library: None until :meth:`use` has loaded it.
        warned: whether the warning about a failed build was logged.
    """

    def __init__(self, source: Path, structs: Mapping[str, int], without: str) -> None:
        self.library: ctypes.CDLL | None = None
        self.warned = False
        self._source = source
        self._structs = structs
        self._without = without

    def use(self, directory: str) -> bool:
        """Load the kernels, building them if necessary, and use them from now on with torch's number of threads.

        Args:
            directory: where compiled libraries are kept.

        Returns:
            whether they are loaded. If they cannot be built, one warning is logged.
        """
        try:
            self.library = load_kernels(self._source, directory, self._structs)
        except NativeBuildError as error:
            if not self.warned:
                log.warning("%s: %s", self._without, error)
            self.warned = True
            return False
        return True

    def is_used(self) -> bool:
        """Whether :meth:`use` has loaded them."""
        return self.library is not None

    def loaded(self) -> ctypes.CDLL:
        """The loaded library.

        Raises:
            RuntimeError: :meth:`use` has not loaded it.
        """
        if self.library is None:
            raise RuntimeError(f"the kernels of {self._source.name} are not loaded")
        return self.library


def load_kernels(source: Path, directory: str, structs: Mapping[str, int]) -> ctypes.CDLL:
    """Load the kernels of a C source and connect them to the thread pool, sized to torch's number of threads.

    The pool is separate from torch's OpenMP threads. Those meet at a barrier after every loop, which costs whole time
    slices when cores are oversubscribed, and a second OpenMP runtime would bring a second set of threads.

    Args:
        source: a C file that includes csrc/pool.h.
        directory: see :func:`parallel.toolchain.load_library`.
        structs: sizes in bytes of the structs that Python packs, by their C names.

    Raises:
        NativeBuildError: there is no compiler, or it failed.
        StructSizeError: a struct has another size in C.
    """
    # The dynamic loader returns the same library for the same file, so all kernels of a process share one pool.
    pool = load_library(POOL, directory)
    library = load_library(source, directory, structs=structs)
    pool.lockstep_pool_threads(torch.get_num_threads())
    library.lockstep_share_pool(ctypes.cast(pool.lockstep_parallel_for, ctypes.c_void_p))
    return library
