"""Platforms: the properties of a kind of device that the rest of the code depends on.

:func:`detect_platform` gives the platform of this machine, :func:`platform_for` that of a device (a machine with CUDA
can also run on its CPU). Kernels are selected by the ops, not here.
"""

from __future__ import annotations

import functools

import torch


class Platform:
    """A kind of device. The base class has the most restrictive defaults; a subclass describes one device.

    Attributes:
        name: for messages and cache keys.
        device_type: ``torch.device(...).type`` of its devices.
        dispatch_key: the key under which ops are registered.
        collective_backends: implementations of the collectives, best first (see ``parallel/collectives/``).
    """

    name: str = "unknown"
    device_type: str = "cpu"
    dispatch_key: str = "CompositeExplicitAutograd"
    collective_backends: tuple[str, ...] = ("gloo",)

    def opaque_attention_op(self) -> bool:
        """Whether attention is called as a registered op, at which a compiled graph can be split.

        If not, attention calls its Python functions directly and the graph has no splitting ops.
        """
        return False


class CpuPlatform(Platform):
    """CPUs."""

    name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    collective_backends = ("shm", "gloo")

    def opaque_attention_op(self) -> bool:
        """True: CPU graphs are compiled piecewise."""
        return True


class CudaPlatform(Platform):
    """CUDA devices: NVIDIA GPUs, and others that torch presents as such."""

    name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    collective_backends = ("nccl", "gloo")

    def opaque_attention_op(self) -> bool:
        """True: graphs are split at attention, whose kernels cannot always be captured in a CUDA graph."""
        return True


@functools.cache
def detect_platform() -> Platform:
    """The platform of this machine: CUDA if torch finds a device, else CPU. Cached for the process."""
    return CudaPlatform() if torch.cuda.is_available() else CpuPlatform()


def platform_for(device: torch.device) -> Platform:
    """The platform of a device.

    Raises:
        ValueError: a device type without a platform.
    """
    for platform in (CpuPlatform(), CudaPlatform()):
        if device.type == platform.device_type:
            return platform
    raise ValueError(f"no platform for device {str(device)!r}; supported: cpu, cuda")
