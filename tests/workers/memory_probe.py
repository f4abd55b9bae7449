"""How much anonymous memory loading takes, measured in a rank process: run by ``test_weights.py``."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.group import TensorParallelGroup
from runtime.common.checkpoint import inspect_checkpoint
from runtime.common.model_config import load_model_config
from workers import weights
from workers.models.decoder import DecoderForCausalLM
from workers.models.registry import build_model


def anonymous_bytes() -> int:
    """Memory of this process that is not a mapping of a file: what it would cost to keep it in RAM."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line 'Anonymous:'")


def measure_loading(group: TensorParallelGroup, warm_up: str, folder: str) -> dict[str, int]:
    """Bytes held, read, of the largest slice, and of the highest growth, seen while each slice is in memory.

    Args:
        group: the ranks.
        warm_up: a small checkpoint, loaded first so that nothing is measured that only the first load takes.
        folder: the checkpoint to measure.
    """
    _load(group, warm_up)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, peak, largest = anonymous_bytes(), 0, 0
    read = weights._Slices.read

    def observed(self: Any, *slices: slice) -> torch.Tensor:
        nonlocal peak, largest
        part = read(self, *slices)
        peak, largest = max(peak, anonymous_bytes() - before), max(largest, part.nbytes)
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights._Slices, "read", observed)
        model, report = _load(group, folder)
    return {
        "held": sum(p.nbytes for p in model.parameters()),
        "read": report.bytes_read,
        "total": report.bytes_total,
        "largest": largest,
        "peak": peak,
    }


def _load(group: TensorParallelGroup, folder: str) -> tuple[DecoderForCausalLM, weights.LoadReport]:
    model = build_model(load_model_config(folder), group=group, dtype=torch.float32)
    return model, weights.load_weights(model, inspect_checkpoint(folder), device=group.device)
