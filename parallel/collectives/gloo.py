"""Collectives over gloo: for CPU ranks on several hosts or without a C compiler, and the reference in tests.

Every collective is an all-gather of bytes whose sums each rank forms in rank order: slower than gloo's own all-reduce
for large messages, but with the same bits as shared memory. gloo aborts the process if sizes differ between ranks, so
a first frame of fixed size carries the parameters of each rank's call.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from typing_extensions import override

from parallel.collectives.base import (
    DTYPES,
    CollectiveCall,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    HostCollectives,
    Operation,
    describe_mismatch,
    format_ranks,
)
from parallel.collectives.store import LOOPBACK

HEADER_BYTES = 64
FRAME_BYTES = 16 * 1024
"""Bytes of the message that are sent with the header; only longer messages need a second all-gather."""

_GRACE_SECONDS = 1.0
"""How long a rank whose collective timed out waits for the other ranks to report that theirs did."""


class GlooCollectives(HostCollectives):
    """Collectives over gloo's TCP connections, without torch's global process group.

    Args:
        group: the group's name, for messages.
        rank: this rank.
        size: the number of ranks.
        store: for the rendezvous, and to find which ranks are missing after a timeout.
        timeout: seconds to wait for the others at the rendezvous and in every collective.
        same_host: connect over loopback only.

    Raises:
        CollectiveTimeout: some ranks did not join.
    """

    backend = "gloo"

    def __init__(self, group: str, rank: int, size: int, store: Store, timeout: float, same_host: bool) -> None:
        super().__init__(rank, size)
        self._group = group
        self._store = store
        self._timeout = timeout
        self._number = 0
        self._ended = ""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [gloo.create_device(hostname=LOOPBACK) if same_host else gloo.create_default_device()]
        self._mark_present("start")
        try:
            self._process_group = gloo(store, rank, size, options)
        except RuntimeError as error:
            missing = self._find_absent("start")
            text = f"{format_ranks(missing)} of {size} did not join within {timeout:g} s" if missing else str(error)
            raise CollectiveTimeout(f"gloo group {group!r}: {text}; rank {rank} timed out", missing) from error

    @override
    def run(self, call: CollectiveCall, source: torch.Tensor, target: torch.Tensor | None) -> None:
        if self._ended:
            raise CollectiveError(f"rank {self.rank} cannot call {call}: group {self._group!r} {self._ended}")
        self._number += 1
        try:
            self._run(call, source, target)
        except BaseException as error:
            self._ended = f"was aborted after {type(error).__name__}: {error}"
            raise

    @override
    def close(self) -> None:
        if self._ended != "is closed":
            self._ended = "is closed"
            del self._process_group

    def _run(self, call: CollectiveCall, source: torch.Tensor, target: torch.Tensor | None) -> None:
        payload = source.reshape(-1).view(torch.uint8)
        frame = torch.zeros(HEADER_BYTES + FRAME_BYTES, dtype=torch.uint8, device="cpu")
        frame[:HEADER_BYTES].view(torch.int64)[:5] = torch.tensor(
            [call.operation, call.dtype, call.root, call.nbytes, call.epoch], device="cpu"
        )
        first, rest = payload[:FRAME_BYTES], payload[FRAME_BYTES:]
        frame[HEADER_BYTES : HEADER_BYTES + first.numel()] = first
        frames = self._gather(call, frame)
        self._check([f[:HEADER_BYTES].view(torch.int64).tolist() for f in frames])
        if not call.nbytes:
            return
        flat = None if target is None else target.view(torch.uint8).reshape(-1, call.nbytes)
        end = HEADER_BYTES + first.numel()
        _deliver(call, [f[HEADER_BYTES:end] for f in frames], None if flat is None else flat[:, :FRAME_BYTES])
        if rest.numel():
            parts = self._gather(call, rest)
            _deliver(call, parts, None if flat is None else flat[:, FRAME_BYTES:])

    def _gather(self, call: CollectiveCall, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            self._process_group.allgather([parts], [part]).wait()
        except RuntimeError as error:
            raise self._failed(call, error) from error
        return parts

    def _check(self, headers: list[list[int]]) -> None:
        calls = {
            rank: CollectiveCall(Operation(operation), dtype, root, nbytes, epoch)
            for rank, (operation, dtype, root, nbytes, epoch, *_) in enumerate(headers)
        }
        if len(set(calls.values())) > 1:
            raise CollectiveMismatch(describe_mismatch(calls, self._number))

    def _failed(self, call: CollectiveCall, error: RuntimeError) -> CollectiveError:
        """The error of a failed gloo call. gloo does not name the missing ranks: those that waited are in the store."""
        where = f"{call} (collective {self._number} of group {self._group!r})"
        if "imed out" not in str(error):
            return CollectiveError(f"rank {self.rank} cannot finish {where}: a peer has disconnected ({error})")
        key = f"late/{self._number}"
        self._mark_present(key)
        deadline = time.monotonic() + _GRACE_SECONDS
        while (missing := self._find_absent(key)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return CollectiveTimeout(
            f"{format_ranks(missing) if missing else 'some rank'} did not join {where} within {self._timeout:g} s; "
            f"rank {self.rank} timed out. The missing rank is dead, hung, or skipped a collective",
            missing,
        )

    def _mark_present(self, what: str) -> None:
        self._store.set(f"{what}/{self.rank}", "present")

    def _find_absent(self, what: str) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if not self._store.check([f"{what}/{rank}"]))


def _deliver(call: CollectiveCall, parts: list[torch.Tensor], target: torch.Tensor | None) -> None:
    """Combine the tensors of the ranks, uint8 ``[n]`` each, into ``target``, uint8 ``[1 or size, n]``."""
    if target is None:
        return
    if call.operation is Operation.ALL_REDUCE:
        dtype = DTYPES[call.dtype]
        total = parts[0].view(dtype).to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part.view(dtype)
        target[0] = total.to(dtype).view(torch.uint8)
    elif call.operation is Operation.BROADCAST:
        target[0] = parts[call.root]
    else:
        for rank, part in enumerate(parts):
            target[rank] = part
