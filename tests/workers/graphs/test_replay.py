"""The CPU replay: the bits of NONE at the same size, without model code, at every TP size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel.group import single_rank_group
from runtime.common.config import GraphMode
from tests.checkpoints import tiny_checkpoint
from tests.dist.ranks import run_ranks
from tests.workers.graphs.rank import SIZES, Rank, compare_with_none, no_model_code
from workers.graphs.dispatcher import Captured
from workers.graphs.graph_runner import CaptureError
from workers.graphs.sizes import CaptureSizes

CPU = torch.device("cpu")

WAYS = {
    "FULL_AND_PIECEWISE": [
        "PIECEWISE 16", "FULL 4", "PIECEWISE 8", "FULL 4", "NONE 20", "FULL 1", "FULL 8", "PIECEWISE 3",
    ],
    "PIECEWISE": [
        "PIECEWISE 16", "PIECEWISE 3", "PIECEWISE 8", "PIECEWISE 8", "NONE 20", "PIECEWISE 1", "PIECEWISE 8",
        "PIECEWISE 3",
    ],
}  # fmt: skip


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_module_are_those_of_none(dtype: str, tp_size: int) -> None:
    folder = str(tiny_checkpoint("llama"))
    ways = run_ranks(compare_with_none, tp_size, folder, dtype, "FULL_AND_PIECEWISE")
    assert ways == [WAYS["FULL_AND_PIECEWISE"]] * tp_size


@pytest.mark.parametrize("kind", ["llama-tied", "llama-bias", "qwen2-window", "qwen3-bias"])
def test_every_form_of_model(kind: str) -> None:
    ways = compare_with_none(single_rank_group(CPU), str(tiny_checkpoint(kind)), "float32", "PIECEWISE")
    assert ways == WAYS["PIECEWISE"]


def test_poison_is_noticed() -> None:
    """The test above would prove nothing if model code could run unnoticed."""
    rank = Rank(tiny_checkpoint("llama"), single_rank_group(CPU), "float32", GraphMode.NONE)
    with no_model_code(rank.model), pytest.raises(AssertionError, match="model code ran"):
        rank.step([(0, 3)])


def test_capturing_writes_no_key_and_exchanges_nothing() -> None:
    """Rank 0 of a group of two captures while rank 1 does nothing: it must not wait, and may fail alone."""
    assert run_ranks(_capture_on_rank_0, 2, str(tiny_checkpoint("llama")), collective_timeout=5.0) == [True, True]


def _capture_on_rank_0(group: Any, folder: str) -> bool:
    rank = Rank(folder, group, "float32", GraphMode.FULL_AND_PIECEWISE)
    if group.rank == 0:
        rank.graphs.capture()
    return all(bool(cache.isnan().all()) for cache in rank.kv_caches.values())


def test_sizes_share_their_memory() -> None:
    def arena_bytes(sizes: tuple[int, ...]) -> int:
        rank = Rank(
            tiny_checkpoint("llama"),
            single_rank_group(CPU),
            "float32",
            GraphMode.FULL,
            sizes=CaptureSizes(sizes, sizes),
        )
        rank.graphs.capture()
        return rank.graphs._graphs._arena._block.numel()

    assert arena_bytes((1, 2, 4, 8)) == arena_bytes((8,)) < 8 * 96 * 4 * 60


def test_result_is_a_static_buffer() -> None:
    rank = Rank(tiny_checkpoint("llama"), single_rank_group(CPU), "float32", GraphMode.FULL_AND_PIECEWISE)
    rank.graphs.capture()
    addresses = set[int]()
    for step in ([(0, 1)], [(0, 1), (1, 1)], [(0, 7)]):
        plan = rank._plan(step)
        rank.buffers.update_requests(plan)
        choice = rank.graphs.choose(sum(n for _, n in step), len(step), 1 if step[0][1] == 1 else None)
        addresses.add(rank.graphs.run(choice, rank.buffers.fill(plan, choice.size).metadata).data_ptr())
    assert len(addresses) == 1


class Stateful(nn.Module):
    """Does something else in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        hidden = input_ids.float()[:, None]
        return hidden * 2 if self.passes % 2 else hidden + 1


class Foreign(nn.Module):
    """Reads what a library computed where no dispatcher saw it."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(input_ids.numpy() * 2.0)[:, None] + 1


class Branches(nn.Module):
    """Branches on what is in a tensor."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return input_ids.float()[:, None] if bool(positions.sum() > 0) else positions.float()[:, None]


class ReadsItem(nn.Module):
    """Takes a number out of a tensor."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return input_ids.float()[:, None] * positions[0].item()


class ReadsList(nn.Module):
    """Takes numbers out of a tensor in a way that no dispatcher sees."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return input_ids.float()[:, None] * sum(positions.tolist())


class Selects(nn.Module):
    """Makes a tensor whose size depends on values."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return input_ids.float()[positions > 0][:, None]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Stateful(), "FULL graph of 8 tokens .* called other ops when it ran a second time"),
        (Foreign(), "makes anew in every pass"),
        (Branches(), "aten.is_nonzero.default, whose result depends on the values"),
        (ReadsItem(), "called aten.item.default, whose result depends on the values"),
        (ReadsList(), "called aten.mul.* with other arguments when it ran a second time"),
        (Selects(), "whose result depends on the values"),
    ],
)
def test_what_cannot_be_replayed_is_refused_and_nothing_remains(model: nn.Module, message: str) -> None:
    rank = Rank(tiny_checkpoint("llama"), single_rank_group(CPU), "float32", GraphMode.FULL, compiled=lambda _: model)
    with pytest.raises(CaptureError, match=message):
        rank.graphs.capture()
    assert rank.graphs.captured == Captured()
    assert rank.step([(0, 1)]).choice.mode is GraphMode.NONE


def test_compiled_functions_are_called_not_recorded() -> None:
    """The ops inside compiled code are invisible to a recorder; calling it is the replay."""
    calls: list[int] = []

    class Compiled(nn.Module):
        _orig_mod = None

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            calls.append(input_ids.shape[0])
            return input_ids.float()[:, None]

    for compiled in (Compiled(), Compiled().forward):
        rank = Rank(
            tiny_checkpoint("llama"), single_rank_group(CPU), "float32", GraphMode.FULL,
            compiled=lambda _, compiled=compiled: compiled,
        )  # fmt: skip
        rank.graphs.capture()
        calls.clear()
        rank.step([(0, 1), (1, 1), (2, 1)])
        assert calls == [4]


def test_direct_functions_stand_for_ops() -> None:
    from workers.attention.attention_op import attention

    called: list[str] = []

    def direct(*args: Any) -> None:
        called.append(args[4])
        attention(*args)

    folder = tiny_checkpoint("llama")
    op = torch.ops.lockstep.attention.default
    ranks = [
        Rank(folder, single_rank_group(CPU), "float32", GraphMode.FULL, direct=given) for given in ({}, {op: direct})
    ]
    for rank in ranks:
        rank.graphs.capture()
    assert not called
    plain, quick = (rank.step([(0, 1), (1, 1)]).hidden for rank in ranks)
    assert torch.equal(plain, quick)
    assert called == list(ranks[1].model.attention_layers)


def test_sizes_of_the_tests_cover_what_they_claim() -> None:
    assert SIZES.decode[-1] < SIZES.mixed[-1]
