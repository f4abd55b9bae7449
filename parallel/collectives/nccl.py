"""Collectives over NCCL, for ranks with a CUDA device each. They run on the current stream and can be captured.

NCCL's sum has the same bits on every rank, but not those of the host implementations. Parameters are not compared
across ranks; after the timeout NCCL's watchdog detects a missing rank and ends the process.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from typing_extensions import override

from parallel.collectives.base import CollectiveError, Collectives


class NcclCollectives(Collectives):
    """Collectives between CUDA devices, without torch's global process group.

    Args:
        rank: this rank.
        size: the number of ranks.
        store: for the rendezvous.
        device: of this rank; it has to be the current one.
        timeout: seconds to wait for the others.

    Raises:
        CollectiveError: this torch has no NCCL.
    """

    backend = "nccl"

    def __init__(self, rank: int, size: int, store: Store, device: torch.device, timeout: float) -> None:
        super().__init__(rank, size)
        if not dist.is_nccl_available():
            raise CollectiveError("this torch was built without NCCL; use a CUDA build, or gloo")
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        self._process_group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._device = device
        # The first collective creates the communicator, which must not happen during graph capture.
        self.barrier()

    @override
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        result = x.clone(memory_format=torch.contiguous_format)
        self._process_group.allreduce([result]).wait()
        return result

    @override
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        result = x.new_empty((self.size, *x.shape))
        self._process_group._allgather_base(result, x.contiguous()).wait()
        return result

    @override
    def gather(self, x: torch.Tensor, dst: int) -> torch.Tensor | None:
        result = self.all_gather(x)
        return result if self.rank == dst else None

    @override
    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        result = x.clone(memory_format=torch.contiguous_format)
        self._process_group.broadcast([result], options).wait()
        return result

    @override
    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self._device))
        torch.cuda.current_stream(self._device).synchronize()

    @override
    def close(self) -> None:
        if self._process_group is not None:
            self._process_group.shutdown()
            self._process_group = None
