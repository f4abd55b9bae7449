"""The model runner: the rows that graphs read, memory for the KV cache, and the states that a step leaves."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from parallel.group import single_rank_group
from runtime.common.config import EngineConfig, GraphMode, resolve
from runtime.common.errors import ConfigError
from runtime.common.model_config import load_model_config
from runtime.common.protocol import NewRequest, ScheduledRequest, StepPlan
from runtime.common.sampling_params import SamplingParams
from tests.checkpoints import prompts, tiny_checkpoint
from tests.workers.graphs.split_model import compile_without_inductor
from workers import runner as runner_module
from workers.forward_context import AttentionMetadata
from workers.graphs.dispatcher import Dispatch
from workers.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=50)
BLOCKS_PER_REQUEST = 4


def make_runner(*, ranks_on_host: int = 1, load: bool = True, **settings: Any) -> ModelRunner:
    folder = str(tiny_checkpoint())
    model = load_model_config(folder)
    settings = {"max_model_len": 32, "block_size": 8, "max_num_seqs": 6, "optimization_level": 0} | settings
    config = resolve(EngineConfig(model=folder, **settings), model, device="cpu", executor="local")
    runner = ModelRunner(config, model, single_rank_group(torch.device("cpu")), ranks_on_host=ranks_on_host)
    if load:
        runner.load_model()
    return runner


def ready_runner(**settings: Any) -> ModelRunner:
    """A runner after every start-up stage; with a graph mode, its model is traced and split but not compiled."""
    level = 2 if "cudagraph_mode" in settings else 0
    runner = make_runner(**{"optimization_level": level} | settings)
    runner.allocate(24)
    with patch("workers.compile.compiler.compile_model", compile_without_inductor):
        forward, _, compiled = runner.compile()
    runner.use(forward, compiled)
    runner.warm_up()
    runner.capture()
    return runner


def prefill(req_ids: range, dropped: tuple[int, ...] = ()) -> StepPlan:
    new = [NewRequest(i, tuple(prompts(5 + i)[0]), 5 + i, GREEDY) for i in req_ids]
    blocks = [tuple(range(BLOCKS_PER_REQUEST * i, BLOCKS_PER_REQUEST * (i + 1))) for i in req_ids]
    scheduled = [ScheduledRequest(r.req_id, len(r.token_ids), b) for r, b in zip(new, blocks, strict=True)]
    return StepPlan(1, tuple(scheduled), tuple(new), dropped)


def decode(step: int, req_ids: range) -> StepPlan:
    return StepPlan(step, tuple(ScheduledRequest(i, 1) for i in req_ids))


def tokens_of(runner: ModelRunner, plan: StepPlan) -> list[int]:
    return [token.token_id for token in runner.execute(plan).tokens]


def test_an_under_full_decode_graph_reads_cleared_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ready_runner(cudagraph_mode="FULL", cudagraph_capture_sizes=(5,))
    plain = ready_runner(cudagraph_mode="NONE")
    seen: list[tuple[Dispatch, list[int], list[int], list[int]]] = []
    run = runner.graphs.run

    def recorded(choice: Dispatch, metadata: AttentionMetadata) -> torch.Tensor:
        rows = metadata.seq_lens, metadata.query_start_loc, metadata.slot_mapping
        seen.append((choice, *(tensor.tolist() for tensor in rows)))  # The buffers are refilled by the next step.
        return run(choice, metadata)

    monkeypatch.setattr(runner.graphs, "run", recorded)
    for plan in (prefill(range(5)), decode(2, range(5)), decode(3, range(3))):
        assert tokens_of(runner, plan) == tokens_of(plain, plan)
    assert [choice for choice, *_ in seen[1:]] == [Dispatch(GraphMode.FULL, 5)] * 2
    _, seq_lens, query_start_loc, slot_mapping = seen[2]
    assert seq_lens == [7, 8, 9, 0, 0]
    assert query_start_loc == [0, 1, 2, 3, 3, 3]
    assert slot_mapping[3:] == [-1, -1]


def test_requests_are_added_and_dropped_in_one_place() -> None:
    runner = ready_runner(enforce_eager=True)
    first = runner.execute(prefill(range(2)))
    assert [token.req_id for token in first.tokens] == [0, 1]
    assert [r.output for r in runner.buffers.requests.values()] == [[token.token_id] for token in first.tokens]
    runner.execute(prefill(range(2, 3), dropped=(0, 1)))
    assert list(runner.buffers.requests) == [2]
    held = [value for holder in (runner.sampler, runner.prompt_scorer) for value in vars(holder).values()]
    assert not [value for value in held if isinstance(value, dict)]


def test_use_warns_about_capture_sizes_that_no_step_has() -> None:
    runner = make_runner(max_num_batched_tokens=16, cudagraph_capture_sizes=(4, 99))
    runner.allocate(4)
    forward, _, settings = runner.compile()
    assert "capture sizes 99 are larger than any step" in runner.use(forward, settings)


# ---- memory for the KV cache


def test_kv_blocks_are_bounded_by_what_sequences_can_fill() -> None:
    runner = make_runner(kv_cache_memory=2**30)
    assert runner.affordable_kv_blocks() == 6 * 4


def test_kv_blocks_are_bounded_by_memory() -> None:
    runner = make_runner(kv_cache_memory=1)
    with pytest.raises(ConfigError, match="hold no block of"):
        runner.affordable_kv_blocks()
    per_block = runner.kv_spec.bytes_per_block
    runner = make_runner(kv_cache_memory=3 * per_block + 1)
    assert runner.affordable_kv_blocks() == 3


def test_ranks_of_a_host_share_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "available_memory", lambda: 8000)
    assert make_runner(load=False)._free_memory_for_kv() == 2000
    assert make_runner(load=False, ranks_on_host=4)._free_memory_for_kv() == 500


class FakeCudaMemory:
    """The memory of a CUDA device, in units: 1000 in total, 100 used by other processes.

    This process holds weights of 300, and of 5 while the runner holds a KV cache; torch's allocator keeps what it has
    ever used. Loading has peaked at 700.
    """

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runner = runner
        self.peak = 700
        self.steps = 0
        for name in ("reset_peak_memory_stats", "mem_get_info", "memory_reserved", "memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(runner, "device", torch.device("cuda"))
        monkeypatch.setattr(runner, "allocate", self.allocate)
        monkeypatch.setattr(runner, "_run_largest_steps", self.run_largest_steps)

    def memory_allocated(self, device: torch.device) -> int:
        return 300 + 5 * len(self._runner.kv_caches)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.memory_allocated(device)

    def memory_reserved(self, device: torch.device) -> int:
        return 720

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 1000 - 100 - 720, 1000

    def allocate(self, num_blocks: int) -> None:
        assert num_blocks == 1
        self._runner.kv_caches = {"layer": torch.empty(0)}

    def run_largest_steps(self) -> None:
        self.steps += 1
        self.peak = max(self.peak, self.memory_allocated(torch.device("cuda")) + 120)


def test_a_gpu_gives_the_kv_cache_what_weights_and_the_largest_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(load=False, gpu_memory_utilization=0.9)
    memory = FakeCudaMemory(runner, monkeypatch)
    # 900 of 1000 may be used; 100 are other processes', 300 weights; the steps peak at 125 above the weights.
    assert runner._free_memory_for_kv() == 900 - 100 - 300 - 125
    assert memory.steps == 1
    assert not runner.kv_caches


def test_a_full_gpu_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(load=False, gpu_memory_utilization=0.5)
    FakeCudaMemory(runner, monkeypatch)
    assert runner._free_memory_for_kv() == 0
