"""Collectives through shared memory: the default of CPU groups on one host.

``shm.c`` moves and sums the data; it is called through ctypes, which releases the GIL. This module has the deadlines,
the error messages and the set-up; ``segment.py`` creates, names and maps the memory.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import torch
from typing_extensions import override

from parallel.collectives.base import (
    CollectiveCall,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    HostCollectives,
    Operation,
    describe_mismatch,
    format_ranks,
)
from parallel.collectives.segment import (
    Segment,
    Vote,
    attach_segment,
    create_segment,
    remove_stale_segments,
    segment_name,
)
from parallel.toolchain import NativeBuildError, load_library

SOURCE = Path(__file__).parent / "shm.c"

SLOT_BYTES = 256 * 1024
"""Size of a chunk of a longer message. There are two slots per rank; both stay in a core's cache."""

_OK, _AGAIN, _MISMATCH, _ABORTED, _LEFT = range(5)


class _Descriptor(ctypes.Structure):
    """The parameters of a call, which ranks compare: ``descriptor`` of shm.c."""

    _fields_ = (("what", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("epoch", ctypes.c_uint64))


class _State(ctypes.Structure):
    """``call`` of shm.c."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_uint64),
        ("round", ctypes.c_uint64),
        ("spins", ctypes.c_uint64),
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("called", _Descriptor),
        ("done", ctypes.c_uint64),
        ("posted", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
    )


class NoLibraryError(CollectiveError):
    """Some ranks could not build or load the C library. It is raised on all ranks, so that they fall back together."""


class SharedMemoryCollectives(HostCollectives):
    """Collectives through a mapped segment.

    Args:
        group: the group's name, for messages.
        rank: this rank.
        size: the number of ranks.
        segment: mapped by all ranks; closed with this object.
        library: the compiled ``shm.c``.
        timeout: seconds to wait for the other ranks in one collective.
    """

    backend = "shm"

    def __init__(
        self, group: str, rank: int, size: int, segment: Segment, library: ctypes.CDLL, timeout: float
    ) -> None:
        super().__init__(rank, size)
        self._group = group
        self._segment = segment
        self._timeout = timeout
        self._number = 0
        self._ended = ""
        self._library = _declare(library)
        self._collective = library.lockstep_collective
        enough_cores = len(os.sched_getaffinity(0)) >= size
        # With fewer cores than ranks, a waiting rank yields its core early instead of spinning.
        self._state = _State(
            base=segment.address,
            slot_bytes=segment.slot_bytes,
            spins=2000 if enough_cores else 50,
            rank=rank,
            size=size,
        )
        self._pointer = ctypes.byref(self._state)

    @override
    def run(self, call: CollectiveCall, source: torch.Tensor, target: torch.Tensor | None) -> None:
        if self._ended:
            raise CollectiveError(f"rank {self.rank} cannot call {call}: group {self._group!r} {self._ended}")
        self._number += 1
        state = self._state
        state.source = source.data_ptr()
        state.target = None if target is None else target.data_ptr()
        state.called.what = call.operation | call.dtype << 8 | call.root << 16
        state.called.bytes = call.nbytes
        state.called.epoch = call.epoch
        state.done = 0
        state.posted = 0
        status = self._collective(self._pointer)
        if status != _OK:
            self._wait(call, status)

    @override
    def close(self) -> None:
        if self._segment.address:
            self._library.lockstep_leave(self._pointer)
            self._segment.close()
            self._segment.address = 0
        self._ended = self._ended or "is closed"

    def _wait(self, call: CollectiveCall, status: int) -> None:
        """Continue a call until it is complete or has failed; a failure ends the group for every rank."""
        deadline = time.monotonic() + self._timeout
        try:
            while status == _AGAIN:
                if time.monotonic() > deadline:
                    raise self._timed_out(call)
                status = self._collective(self._pointer)
            if status != _OK:
                raise self._failed(call, status)
        except BaseException as error:
            # An interrupt ends the group too: other ranks wait for the call that this rank has published.
            self._library.lockstep_abort(self._pointer)
            self._ended = f"was aborted after {type(error).__name__}: {error}"
            raise

    def _timed_out(self, call: CollectiveCall) -> CollectiveTimeout:
        missing = self._find_missing()
        return CollectiveTimeout(
            f"{format_ranks(missing)} did not join {call} (collective {self._number} of group {self._group!r}) within "
            f"{self._timeout:g} s; rank {self.rank} timed out. The missing rank is dead, hung, or skipped a collective",
            missing,
        )

    def _failed(self, call: CollectiveCall, status: int) -> CollectiveError:
        where = f"{call} (collective {self._number} of group {self._group!r})"
        if status == _MISMATCH:
            return CollectiveMismatch(
                describe_mismatch({r: self._called_by(r) for r in range(self.size)}, self._number)
            )
        if status == _ABORTED:
            who = self._library.lockstep_aborted(self._pointer) - 1
            return CollectiveError(
                f"rank {self.rank} cannot finish {where}: rank {who} aborted the group; see its error"
            )
        left = tuple(r for r in self._find_missing() if self._library.lockstep_has_left(self._pointer, r))
        return CollectiveError(
            f"rank {self.rank} cannot finish {where}: {format_ranks(left)} has closed the group", left
        )

    def _find_missing(self) -> tuple[int, ...]:
        """The ranks that have not joined the current round."""
        wanted = self._state.round + 1
        return tuple(r for r in range(self.size) if self._library.lockstep_round(self._pointer, r) < wanted)

    def _called_by(self, rank: int) -> CollectiveCall:
        descriptor = _Descriptor()
        self._library.lockstep_descriptor(self._pointer, rank, ctypes.byref(descriptor))
        what = descriptor.what
        return CollectiveCall(Operation(what & 0xFF), what >> 8 & 0xFF, what >> 16, descriptor.bytes, descriptor.epoch)


def open_shared_memory(
    group: str,
    rank: int,
    size: int,
    *,
    run_id: str,
    library_dir: str,
    timeout: float,
    slot_bytes: int = SLOT_BYTES,
) -> SharedMemoryCollectives:
    """Rendezvous with the other ranks of this host in a new segment.

    Args:
        group: the group's name.
        rank: this rank; rank 0 creates the segment.
        size: the number of ranks.
        run_id: contains a live pid; different for every start.
        library_dir: where compiled C libraries are cached.
        timeout: seconds to wait for the others at the rendezvous and in every collective.
        slot_bytes: longest chunk, a multiple of 4096.

    Raises:
        NoLibraryError: some rank has no library; raised on all ranks.
        CollectiveTimeout: some ranks did not join.
        CollectiveError: not enough space in /dev/shm, or the run id was used before.
    """
    name = segment_name(run_id, group)
    library, reason = None, ""
    try:
        library = load_library(SOURCE, library_dir)
    except NativeBuildError as error:
        reason = str(error)
    if rank == 0:
        remove_stale_segments()
        segment = create_segment(name, size, slot_bytes)
    else:
        segment = attach_segment(name, size, slot_bytes, timeout)
    try:
        votes = segment.vote(rank, Vote.READY if library else Vote.NO_LIBRARY, timeout)
        without = tuple(other for other, vote in enumerate(votes) if vote is not Vote.READY)
        if without or library is None:
            raise NoLibraryError(f"{format_ranks(without)} has no library for shared memory. {reason}".rstrip())
        return SharedMemoryCollectives(group, rank, size, segment, library, timeout)
    except BaseException:
        segment.close()
        raise


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.POINTER(_State)
    library.lockstep_collective.argtypes = (pointer,)
    library.lockstep_round.argtypes = (pointer, ctypes.c_uint32)
    library.lockstep_round.restype = ctypes.c_uint64
    library.lockstep_has_left.argtypes = (pointer, ctypes.c_uint32)
    library.lockstep_descriptor.argtypes = (pointer, ctypes.c_uint32, ctypes.POINTER(_Descriptor))
    library.lockstep_descriptor.restype = None
    library.lockstep_leave.argtypes = (pointer,)
    library.lockstep_leave.restype = None
    library.lockstep_abort.argtypes = (pointer,)
    library.lockstep_abort.restype = None
    library.lockstep_aborted.argtypes = (pointer,)
    library.lockstep_aborted.restype = ctypes.c_uint64
    return library
