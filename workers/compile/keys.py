"""Cache keys of compiled code: hashes of everything that it depends on, and of no rank.

Ranks with equal shapes share artifacts. Another torch version, processor, source or setting has other keys.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import parallel
import workers
from runtime.common.protocol import pack

FORMAT = 2
"""Incremented when the meaning of a key or the form of an artifact changes."""

TRACED_FOLDERS = ("attention", "compile", "kernels", "layers", "models", "quantization")
"""The folders of ``workers/`` that a model's graph depends on."""


def cache_key(*parts: Any) -> str:
    """The key of plain values: numbers, strings, bytes, lists, dicts."""
    return hashlib.blake2b(pack([FORMAT, *parts]), digest_size=20).hexdigest()


def environment(device: torch.device) -> dict[str, Any]:
    """What compiled code depends on besides its graph: versions, device, number of threads."""
    facts: dict[str, Any] = {
        "python": sys.implementation.cache_tag,
        "torch": torch.__version__,
        "torch_commit": str(torch.version.git_version),
        "device": device.type,
        "machine": platform.machine(),
        # Parallel loops of CPU code contain the number of threads.
        "threads": torch.get_num_threads(),
        "cpu": cpu_features(),
    }
    if device.type == "cuda":
        facts["capability"] = list(torch.cuda.get_device_capability(device))
        facts["device_name"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
        facts["triton"] = _version("triton")
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def cpu_features() -> str:
    """A hash of the instruction sets that Linux lists for this CPU, and of those that torch uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "CPU part"))})
    return cache_key(features, torch.backends.cpu.get_cpu_capability())


def source_hash(model: nn.Module) -> str:
    """A hash of the sources that a trace depends on: our model code, and the files of every module's class."""
    roots = [Path(next(iter(package.__path__))) for package in (parallel, workers)]
    folders = [roots[0], *(roots[1] / name for name in TRACED_FOLDERS)]
    torch_folder = Path(torch.__file__).parent
    others: set[Path] = set()
    for kind in {type(module) for module in model.modules()}:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        path = None if file is None else Path(file)
        if path is not None and not any(path.is_relative_to(known) for known in (torch_folder, *folders)):
            others.add(path)
    return cache_key(*[_folder_hash(folder) for folder in folders], *_contents(sorted(others)))


@functools.cache
def _folder_hash(folder: Path) -> str:
    files = sorted(path for pattern in ("*.py", "*.c") for path in folder.rglob(pattern))
    return cache_key([str(path.relative_to(folder)) for path in files], *_contents(files))


def _contents(files: Iterable[Path]) -> list[bytes]:
    return [path.read_bytes() for path in files]


def model_shape(model: nn.Module) -> list[Any]:
    """The properties of a built model that its trace contains: classes, tensors, attention layers, groups."""
    modules = [[name, f"{type(m).__module__}.{type(m).__qualname__}"] for name, m in model.named_modules()]
    tensors = [
        [name, list(tensor.shape), list(tensor.stride()), str(tensor.dtype), str(tensor.device)]
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    layers: dict[str, Any] = getattr(model, "attention_layers", {})
    attention = [
        [name, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.opaque, type(layer.backend).__qualname__]
        for name, layer in layers.items()
    ]
    groups: list[Any] = [module.group for module in model.modules() if hasattr(module, "group")]
    return [modules, tensors, attention, sorted({(group.name, group.size) for group in groups})]
