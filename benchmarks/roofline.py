"""What this machine could do at best: memory bandwidth, and how many bytes one decode step has to read."""

from __future__ import annotations

import math
import time

import torch

from runtime.common.checkpoint import Checkpoint
from runtime.common.model_config import ModelConfig

BUFFER_BYTES = 512 * 1024 * 1024


def read_bandwidth(device: str, repeats: int = 7) -> float:
    """Bytes per second that all cores together (or the GPU) read from memory; the best of several sums over 512 MiB."""
    buffer = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        buffer.sum().item()
        best = min(best, time.perf_counter() - started)
    return BUFFER_BYTES / best


def decode_step_bytes(checkpoint: Checkpoint, model: ModelConfig, dtype: str) -> int:
    """Bytes of weights that one decode step reads over all ranks together.

    Every weight once, but of an untied input embedding only the rows of the step's tokens, which do not count.
    """
    elements = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    if not model.tie_word_embeddings:
        elements -= model.vocab_size * model.hidden_size
    return elements * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
