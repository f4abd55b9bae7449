"""The per-step hook of attention backends is called once per step, before the forward pass, in every graph mode."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from parallel.group import single_rank_group
from runtime.common.config import GraphMode
from tests.checkpoints import tiny_checkpoint
from tests.workers.graphs.fake_cuda import FakeCuda, fake_cuda
from tests.workers.graphs.rank import STEPS, Rank
from tests.workers.graphs.test_cuda_graph import DeviceRank
from workers.forward_context import AttentionMetadata
from workers.graphs.dispatcher import CaptureSizes

__all__ = ["fake_cuda"]

MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


def check(rank: Rank) -> set[str]:
    """Run the steps and count the calls of ``prepare_step`` and ``forward``. Returns the modes that were dispatched."""
    (backend,) = {layer.backend for layer in rank.model.attention_layers.values()}
    calls: list[AttentionMetadata | str] = []
    prepare, forward = backend.prepare_step, backend.forward

    def counted(metadata: AttentionMetadata) -> object:
        calls.append(metadata)
        return prepare(metadata)

    def noted(*arguments: object) -> None:
        calls.append("forward")
        forward(*arguments)

    modes: set[str] = set()
    with patch.object(backend, "prepare_step", counted), patch.object(backend, "forward", noted):
        for step in STEPS:
            calls.clear()
            modes.add(rank.step(step).choice.mode.value)
            prepared = [call for call in calls if isinstance(call, AttentionMetadata)]
            assert len(prepared) == 1
            assert prepared[0].num_tokens == sum(length for _, length in step)
            assert calls[0] is prepared[0], "attention ran before the backend was prepared"
    return modes


@pytest.mark.parametrize("mode", MODES)
def test_on_the_cpu(mode: str) -> None:
    rank = Rank(tiny_checkpoint("llama"), single_rank_group(torch.device("cpu")), "float32", GraphMode.parse(mode))
    rank.graphs.capture()
    expected = {"FULL_DECODE_ONLY": "FULL", "FULL_AND_PIECEWISE": "FULL"}.get(mode, mode)
    assert expected in check(rank)


def test_before_a_cuda_graph_of_the_whole_model_is_replayed(fake_cuda: FakeCuda) -> None:
    """No Python of the backend runs within such a replay, so what it reads has to be prepared before."""
    rank = DeviceRank(GraphMode.FULL_AND_PIECEWISE, CaptureSizes((1, 2, 4), (3, 8)))
    backend = next(iter(rank.model.attention_layers.values())).backend
    for layer in rank.model.attention_layers.values():
        layer.backend = backend
    rank.capture()
    assert check(rank) == {"NONE", "FULL", "PIECEWISE"}
