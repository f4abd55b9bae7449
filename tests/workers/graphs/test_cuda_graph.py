"""CUDA graphs on a fake device: what is captured, in which order and memory, and replayed."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallel.group import single_rank_group
from runtime.common.config import GraphMode
from tests.checkpoints import tiny_checkpoint
from tests.workers.graphs.fake_cuda import FakeCuda, fake_cuda
from tests.workers.graphs.rank import STEPS, Outcome, Rank, run_model
from tests.workers.graphs.split_model import split_model
from workers.attention.triton_paged import TritonPagedAttention
from workers.compile.compiled_model import CompiledModel, Stage
from workers.graphs import cuda_graph
from workers.graphs.cuda_graph import CudaGraphs
from workers.graphs.dispatcher import Captured, CaptureSizes, Dispatch
from workers.graphs.graph_runner import CaptureError, GraphRunner

__all__ = ["fake_cuda"]

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
LAYERS = 3


class Capturable(TritonPagedAttention):
    """The backend for GPUs; its kernels' CPU forms, called as ops, read the metadata's tensors at every replay."""

    def write_kv(self, step: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        torch.ops.lockstep.kv_cache_write(key, value, kv_cache, step.slot_mapping)

    def forward(self, step: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, output: Any) -> None:
        m = step
        torch.ops.lockstep.paged_attention(
            query, kv_cache, output, m.block_table, m.seq_lens, m.query_start_loc, m.num_reqs, m.max_query_len,
            m.max_seq_len, layer.scale, layer.sliding_window or 0,
        )  # fmt: skip


class DeviceRank(Rank):
    """A rank whose graphs are CUDA graphs, on tensors of the CPU."""

    def __init__(self, mode: GraphMode, sizes: CaptureSizes, forward: Any = split_model) -> None:
        super().__init__(
            tiny_checkpoint("llama"), single_rank_group(CPU), "float32", GraphMode.NONE, forward=forward, sizes=sizes
        )
        for layer in self.model.attention_layers.values():
            layer.backend = Capturable()
        runner = self.graphs
        self.graphs = GraphRunner(
            runner._forward,
            mode=mode,
            sizes=sizes,
            buffers=self.buffers,
            make_context=runner._make_context,
            device=CUDA,
        )

    def capture(self) -> None:
        self.graphs.warm_up()
        self.graphs.capture()


def chain(run: Callable[[list[Any]], list[Any]] = lambda values: [values[0].float() + 1]) -> CompiledModel:
    """Three subgraphs, each of which takes what the one before it gave; the first takes the token ids."""
    stages = [Stage("subgraph", str(n), run, (0 if n == 0 else n + 1,), (n + 2,)) for n in range(3)]
    return CompiledModel(
        stages=stages, num_values=5, bound={}, inputs={"input_ids": 0, "positions": 1}, num_tokens_index=None, output=4
    )


SIZES = CaptureSizes(decode=(1, 2, 4), mixed=(3, 8))


def test_subgraphs_are_captured_largest_first_from_one_pool(fake_cuda: FakeCuda) -> None:
    rank = DeviceRank(GraphMode.FULL_AND_PIECEWISE, SIZES)
    rank.graphs.warm_up()
    assert fake_cuda.graphs == 0
    done: list[tuple[int, int]] = []
    keys = rank.graphs.capture(lambda *progress: done.append(progress))
    full, piecewise = GraphMode.FULL, GraphMode.PIECEWISE
    assert keys == (
        Dispatch(piecewise, 8), Dispatch(full, 4), Dispatch(piecewise, 3), Dispatch(full, 2), Dispatch(full, 1),
    )  # fmt: skip
    assert done == [(n, 5) for n in range(1, 6)]
    assert fake_cuda.graphs == 3 + 2 * (LAYERS + 1)
    assert set(fake_cuda.pools) == {"pool 1"}
    assert set(fake_cuda.modes) == {"thread_local"}
    (stream,) = set(fake_cuda.streams)
    assert stream is not fake_cuda.current
    assert stream in fake_cuda.current.waited_for
    assert fake_cuda.events[:3] == [("synchronize", 0), ("empty_cache", 0), ("pool", 0)]
    assert fake_cuda.events[-1] == ("synchronize", 0)
    assert rank.graphs.captured == Captured((1, 2, 4), (3, 8))


def test_replays_have_the_bits_of_none(fake_cuda: FakeCuda) -> None:
    rank, plain = (DeviceRank(mode, SIZES) for mode in (GraphMode.FULL_AND_PIECEWISE, GraphMode.NONE))
    rank.capture()
    choices: list[str] = []
    for step in STEPS:
        fake_cuda.events.clear()
        found = _padded_step(rank, step)
        expected = plain.step(step, found.choice.size)
        assert torch.equal(found.hidden, expected.hidden), f"{step} as {found.choice} differs from NONE"
        assert not found.padding.isnan().any()
        replayed = [number for what, number in fake_cuda.events if what == "replay"]
        assert len(replayed) == {"FULL": 1, "PIECEWISE": LAYERS + 1, "NONE": 0}[found.choice.mode.value]
        choices.append(f"{found.choice.mode.value} {found.choice.size}")
    assert choices == ["NONE 15", "FULL 4", "PIECEWISE 8", "FULL 4", "NONE 20", "FULL 1", "PIECEWISE 8", "PIECEWISE 3"]


def test_warming_up_and_capturing_attend_but_write_no_key(fake_cuda: FakeCuda) -> None:
    """Attention kernels are compiled when they are first launched, which has to be before the first request."""
    rank = DeviceRank(GraphMode.FULL_AND_PIECEWISE, CaptureSizes((2,), (8, 40)))
    seen: list[tuple[int, int, int, int]] = []

    class Watched(Capturable):
        def write_kv(self, step: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
            m = step
            seen.append((m.slot_mapping.shape[0], m.num_reqs, m.max_query_len, m.max_seq_len))
            super().write_kv(step, key, value, kv_cache)

    rank.buffers.max_model_len = 16
    for layer in rank.model.attention_layers.values():
        layer.backend = Watched()
    rank.graphs.warm_up()
    warmed = list(dict.fromkeys(seen))
    assert warmed == [(40, 1, 16, 16), (8, 1, 8, 8), (2, 2, 1, 16)]
    rank.graphs.capture()
    assert list(dict.fromkeys(seen)) == warmed
    assert all(bool(cache.isnan().all()) for cache in rank.kv_caches.values())


def _padded_step(rank: Rank, step: Any) -> Outcome:
    """A step as a CUDA machine runs it: what the buffers hold for requests that only pad the batch counts too."""
    lengths = [length for _, length in step]
    size = rank.graphs.choose(sum(lengths), len(step), 1 if set(lengths) == {1} else None).size
    starts, seq_lens = rank.buffers.query_start_loc.tensor, rank.buffers.seq_lens.tensor
    starts[len(step) + 1 : size + 1] = sum(lengths)
    seq_lens[len(step) : size] = 0
    return rank.step(step)


def test_a_module_is_captured_whole(fake_cuda: FakeCuda) -> None:
    rank, plain = (DeviceRank(mode, SIZES, run_model) for mode in (GraphMode.FULL, GraphMode.NONE))
    rank.capture()
    assert fake_cuda.graphs == 3
    step = [(0, 1), (1, 1), (2, 1)]
    found = _padded_step(rank, step)
    assert found.choice == Dispatch(GraphMode.FULL, 4)
    assert torch.equal(found.hidden, plain.step(step, 4).hidden)


def test_graphs_do_not_hold_what_subgraphs_made(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool owns a subgraph's results; they are held until their last use, then their memory is reused."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    def run(values: list[Any]) -> list[Any]:
        alive.append([ref() is not None for ref in made])
        result = values[0].float() + 1
        if fake_cuda.capturing:
            made.append(weakref.ref(result))
        return [result]

    rank = DeviceRank(GraphMode.NONE, SIZES, lambda _: chain())
    graphs = CudaGraphs(chain(run), rank.graphs._inputs, rank.graphs._make_context, CUDA)
    key = Dispatch(GraphMode.PIECEWISE, 4)
    with torch.inference_mode():
        graphs.warm_up(key)
        alive.clear()
        with graphs.capturing():
            graphs.capture(key)
        assert alive == [[], [True], [False, True]]
        gc.collect()
        assert not any(ref() for ref in made)
        tokens, _ = rank.graphs._inputs.tokens(4)
        metadata = rank.graphs._inputs.dummy_decode(4)
        tokens.copy_(torch.arange(4))
        assert torch.equal(graphs.replay(key, metadata), torch.arange(4.0) + 3)


def test_results_of_ops_are_put_where_subgraphs_look_for_them(fake_cuda: FakeCuda) -> None:
    """A stage of ops may give tensors of its own; a captured subgraph reads a fixed address."""

    def double(values: list[Any]) -> list[Any]:
        return [values[0] * 2]

    def add_one(values: list[Any]) -> list[Any]:
        return [values[0] + 1.0]

    stages = [Stage("subgraph", "p", add_one, (0,), (2,)), Stage("op", "o", double, (2,), (3,))]
    longer = [*stages, Stage("subgraph", "q", add_one, (3,), (4,))]
    for cut, output, expected in ((stages, 3, [2.0, 4.0]), (longer, 4, [3.0, 5.0])):
        model = CompiledModel(
            stages=cut, num_values=5, bound={}, inputs={"input_ids": 0, "positions": 1}, num_tokens_index=None,
            output=output,
        )  # fmt: skip
        rank = DeviceRank(GraphMode.PIECEWISE, CaptureSizes((), (2,)), lambda _, model=model: model)
        rank.capture()
        metadata = rank.graphs._inputs.dummy_decode(2)
        rank.graphs._inputs.tokens(2)[0].copy_(torch.tensor([0, 1]))
        assert rank.graphs.run(Dispatch(GraphMode.PIECEWISE, 2), metadata).tolist() == expected


@pytest.mark.parametrize("fail_at", [0, 3, 5, 8])
def test_a_failed_capture_leaves_nothing(fake_cuda: FakeCuda, fail_at: int) -> None:
    rank = DeviceRank(GraphMode.FULL_AND_PIECEWISE, SIZES, lambda _: chain())
    fake_cuda.fail_at = fail_at
    rank.graphs.warm_up()
    with pytest.raises(CaptureError, match=r"graph of \d tokens could not be captured: RuntimeError: operation failed"):
        rank.graphs.capture()
    assert fake_cuda.alive == 0
    assert fake_cuda.capturing is None
    assert rank.graphs.captured == Captured()
    assert gc.isenabled()
    assert rank.step([(0, 1)]).choice == Dispatch(GraphMode.NONE, 1)


def test_an_error_within_a_capture_ends_it(fake_cuda: FakeCuda) -> None:
    class Breaks(nn.Module):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if fake_cuda.capturing:
                raise ValueError("cannot be captured")
            return input_ids.float()[:, None]

    rank = DeviceRank(GraphMode.FULL, SIZES, lambda _: Breaks())
    rank.graphs.warm_up()
    with pytest.raises(CaptureError, match="FULL graph of 4 tokens could not be captured: ValueError: cannot be"):
        rank.graphs.capture()
    assert fake_cuda.capturing is None
    assert fake_cuda.alive == 0


def test_discarding_frees_the_graphs_and_their_pool(fake_cuda: FakeCuda) -> None:
    rank = DeviceRank(GraphMode.FULL, SIZES, lambda _: chain())
    rank.capture()
    assert fake_cuda.alive == 3
    rank.graphs.discard()
    assert fake_cuda.alive == 0
    assert fake_cuda.events[-1] == ("empty_cache", 0)
    assert rank.step([(0, 1)]).choice.mode is GraphMode.NONE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_unowned_memory(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
        interface = memory.__cuda_array_interface__
        assert interface["typestr"] == "|u1"
        address, read_only = interface["data"]
        assert not read_only
        buffer = (ctypes.c_uint8 * interface["shape"][0]).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    whole = torch.arange(24).view(4, 6).to(dtype)
    for tensor in (whole, whole[:, 1:3], whole.t(), whole[2], torch.empty(0, 3, dtype=dtype)):
        alias = cuda_graph.unowned(tensor)
        assert torch.equal(alias, tensor)
        assert alias.stride() == tensor.stride()
        assert alias.dtype == dtype
        assert not tensor.numel() or alias.data_ptr() == tensor.data_ptr()
        assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata
