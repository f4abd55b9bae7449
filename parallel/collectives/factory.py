"""Selects and opens the implementation of a group's collectives."""

from __future__ import annotations

import logging
import os

import torch

from parallel.collectives.base import CollectiveError, Collectives
from parallel.collectives.segment import DIRECTORY
from parallel.collectives.shared_memory import NoLibraryError, open_shared_memory
from parallel.group_spec import GroupSpec
from parallel.platform import platform_for

logger = logging.getLogger("lockstep")


def open_collectives(spec: GroupSpec, device: torch.device) -> Collectives:
    """Open the backend that ``spec.backend`` names; "auto" selects the fastest that the device and hosts support.

    Every rank selects the same backend: the choice depends on values that are equal on all ranks, and if one rank
    cannot use shared memory, all ranks are notified and fall back together.

    Raises:
        CollectiveError: the backend cannot be opened.
        ValueError: the backend does not support the device or the hosts.
    """
    backend = _choose(spec, device)
    if backend == "shm":
        try:
            return open_shared_memory(
                spec.name,
                spec.rank,
                spec.size,
                run_id=spec.run_id,
                library_dir=spec.library_dir,
                timeout=spec.timeout,
            )
        except NoLibraryError as error:
            if spec.backend != "auto":
                raise
            logger.warning("rank %d: collectives fall back to gloo, which is slower: %s", spec.rank, error)
            backend = "gloo"
    return _open_distributed(backend, spec, device)


def _choose(spec: GroupSpec, device: torch.device) -> str:
    backend = spec.backend
    if backend == "auto":
        usable = {"gloo": True, "nccl": device.type == "cuda", "shm": spec.same_host and os.path.isdir(DIRECTORY)}
        return next(name for name in platform_for(device).collective_backends if usable[name])
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"nccl needs CUDA devices, and rank {spec.rank} is on {device}: use auto, shm or gloo")
    if backend == "shm" and not spec.same_host:
        raise ValueError("shm needs all ranks on one host, and these are on several: use auto or gloo")
    return backend


def _open_distributed(backend: str, spec: GroupSpec, device: torch.device) -> Collectives:
    # Imported here, so that a shared-memory group starts without torch.distributed.
    from parallel.collectives.gloo import GlooCollectives
    from parallel.collectives.nccl import NcclCollectives
    from parallel.collectives.store import open_store

    try:
        store = open_store(
            spec.init_method,
            spec.rank,
            spec.size,
            prefix=f"{spec.run_id}/{spec.name}",
            same_host=spec.same_host,
            timeout=spec.timeout,
        )
    except RuntimeError as error:
        raise CollectiveError(f"rank {spec.rank} cannot open the store {spec.init_method}: {error}") from error
    if backend == "nccl":
        return NcclCollectives(spec.rank, spec.size, store, device, spec.timeout)
    return GlooCollectives(spec.name, spec.rank, spec.size, store, spec.timeout, spec.same_host)
