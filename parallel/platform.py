"""What differs between kinds of device: its name, dispatch key, collectives, and whether attention is one opaque op.

``detect_platform`` says what this machine offers; ``platform_for`` what a given device needs (a CUDA machine can
also run on its CPU). Kernels and their selection live with the ops, not here.
"""

from __future__ import annotations

import functools

import torch


class Platform:
    """A kind of device. The base class promises nothing; a subclass states what holds for its device.

    Attributes:
        name: for people and for cache keys.
        device_type: as ``torch.device(...).type`` gives it.
        dispatch_key: the key under which ops are registered.
        collective_backends: implementations of the collectives, best first (see ``parallel/collectives/``).
    """

    name: str = "unknown"
    device_type: str = "cpu"
    dispatch_key: str = "CompositeExplicitAutograd"
    collective_backends: tuple[str, ...] = ("gloo",)

    def opaque_attention_op(self) -> bool:
        """Whether attention is called as a registered op, at which a compiled graph can be split.

        Where it is not, attention calls its Python functions directly and the graph has nothing to split at.
        """
        return False


class CpuPlatform(Platform):
    """The CPU, as a full backend."""

    name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    collective_backends = ("shm", "gloo")

    def opaque_attention_op(self) -> bool:
        """True: the CPU compiles piecewise too."""
        return True


class CudaPlatform(Platform):
    """NVIDIA GPUs (and what presents itself as one)."""

    name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    collective_backends = ("nccl", "gloo")

    def opaque_attention_op(self) -> bool:
        """True: the graph is split at attention, whose kernels CUDA graphs cannot always hold."""
        return True


@functools.cache
def detect_platform() -> Platform:
    """The best platform of this machine: CUDA if torch sees a device, else the CPU. Looked up once per process."""
    return CudaPlatform() if torch.cuda.is_available() else CpuPlatform()


def platform_for(device: torch.device) -> Platform:
    """The platform that a device belongs to.

    Raises:
        ValueError: a device type without a platform.
    """
    for platform in (CpuPlatform(), CudaPlatform()):
        if device.type == platform.device_type:
            return platform
    raise ValueError(f"no platform for device {str(device)!r}; there is one for cpu and one for cuda")
