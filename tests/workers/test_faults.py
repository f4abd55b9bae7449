"""Fault injection: parsing, the runner that fails, and plans corrupted on the way in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.group import single_rank_group
from runtime.common.config import EngineConfig, resolve
from runtime.common.errors import ConfigError
from runtime.common.model_config import load_model_config
from runtime.common.protocol import NewRequest, ScheduledRequest, StepPlan, pack, pack_plan, unpack, unpack_plan
from runtime.common.sampling_params import SamplingParams
from tests.checkpoints import tiny_checkpoint
from workers.faults import Fault, FaultyRunner, InjectedFaultError, corrupt_plans, parse_fault


def faulty_runner(kind: str, step: int = 0) -> FaultyRunner:
    model = load_model_config(tiny_checkpoint())
    config = EngineConfig(model=str(tiny_checkpoint()), max_model_len=32, enforce_eager=True)
    config = resolve(config, model, device="cpu", executor="local")
    fault = Fault(0, kind, step)
    return FaultyRunner(fault, config, model, single_rank_group(torch.device("cpu")), ranks_on_host=1)


def prefill(step: int) -> StepPlan:
    new = tuple(NewRequest(i, (3, 4, 5), 3, SamplingParams(temperature=0.0, seed=0)) for i in (2 * step, 2 * step + 1))
    return StepPlan(step, tuple(ScheduledRequest(r.req_id, 3, (r.req_id,)) for r in new), new)


def test_a_fault_is_parsed() -> None:
    assert parse_fault("rank=1,step=10,kind=exit") == Fault(1, "exit", 10)
    assert parse_fault("kind=slow:0.5") == Fault(0, "slow", 0, 0.5)


@pytest.mark.parametrize("text", ["rank=1", "kind=unheard-of", "kind=exit,host=3", "kind=exit,rank=one", "kind=slow:x"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"LOCKSTEP_FAULT='{text}'"):
        parse_fault(text)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("load_fail", lambda runner: runner.load_model()),
        ("compile_fail", lambda runner: runner.compile()),
        ("capture_fail", lambda runner: runner.capture()),
    ],
)
def test_a_start_up_stage_fails(kind: str, call: Any) -> None:
    with pytest.raises(InjectedFaultError, match=f"injected fault: {kind}"):
        call(faulty_runner(kind))


def test_raise_applies_from_its_step_on() -> None:
    runner = faulty_runner("raise", step=3)
    runner.load_model()
    runner.allocate(16)
    assert len(runner.execute(prefill(2)).tokens) == 2
    for step in (3, 4):
        with pytest.raises(InjectedFaultError, match=f"injected fault: raise at step {step}"):
            runner.execute(prefill(step))


def test_nan_applies_to_the_first_row_of_its_step_only() -> None:
    runner = faulty_runner("nan", step=2)
    runner.load_model()
    runner.allocate(16)
    broken = [[token.broken for token in runner.execute(prefill(step)).tokens] for step in (1, 2, 3)]
    assert broken == [[False, False], [True, False], [False, False]]


def test_corrupted_plans_parse_to_the_same_plan() -> None:
    plan = prefill(5)
    frames = [pack_plan(prefill(4)), pack(["call", 9, "ready", {}]), pack_plan(plan)]
    received = corrupt_plans(iter(list(frames)).__next__, Fault(0, "corrupt_plan", step=5))
    assert [received(), received()] == frames[:2]
    corrupted = received()
    assert corrupted != frames[2]
    assert unpack_plan(unpack(corrupted)) == plan


def test_other_faults_leave_frames_alone() -> None:
    def receive() -> bytes:
        return b""

    assert corrupt_plans(receive, Fault(0, "exit")) is receive
