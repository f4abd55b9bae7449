"""What a rank answers with a step, beside what the runner gives."""

from __future__ import annotations

from typing import Any, cast

import pytest

from runtime.channel import Channel, ChannelClosedError
from runtime.config import EngineConfig
from runtime.model_config import ModelConfig
from runtime.protocol import ScheduledRequest, StepPlan, StepResult, pack, pack_plan, unpack, unpack_tokens
from workers import worker as worker_module
from workers.worker import RankInfo, Worker


class Script:
    """A channel that gives these frames at these times, and keeps the answers."""

    def __init__(self, clock: list[float], frames: list[tuple[float, bytes]]) -> None:
        self.clock = clock
        self.frames = frames
        self.answers: list[list[Any]] = []

    def recv(self) -> bytes:
        if not self.frames:
            raise ChannelClosedError("the end")
        self.clock[0], frame = self.frames.pop(0)
        return frame

    def send(self, frame: bytes) -> None:
        self.answers.append(unpack(frame))


def test_a_step_says_how_long_its_plan_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    step = [pack_plan(StepPlan(number, (ScheduledRequest(0, 1),))) for number in range(4)]
    call = pack(["call", 9, "no such verb", {}])
    script = Script(clock, [(5.0, step[0]), (8.0, step[1]), (20.0, call), (30.0, step[2]), (31.25, step[3])])

    def execute(plan: StepPlan) -> StepResult:
        clock[0] += 1.0
        return StepResult(plan.step_id, stats={"forward": 1.0})

    monkeypatch.setattr(worker_module.time, "perf_counter", lambda: clock[0])
    worker = Worker(RankInfo(0, 1, 0, 1, 1), EngineConfig(), cast("ModelConfig", None), cast("Channel", script))
    monkeypatch.setattr(worker, "_execute", execute)
    worker.serve()
    steps = [unpack_tokens(answer[1], answer[3]) for answer in script.answers if answer[0] == "ok"]
    assert [result.stats["forward"] for result in steps] == [1.0] * 4
    # The first plan followed no step, nor did the third; the second came 2 s after the answer to the first.
    assert [result.stats["wait"] for result in steps] == [0.0, 2.0, 0.0, 0.25]
