"""Supervisor: outstanding plans, long plans, restarts and the end, over fake ranks.

Restarts of real processes are in ``scenarios/test_restart.py``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest

from launch.torchrun_launcher import TorchrunLauncher
from runtime.common import channel as channel_module
from runtime.common.errors import EngineClosedError, EngineError, RankDiedError, RankRaisedError
from runtime.executor.interface import MAX_OUTSTANDING
from runtime.executor.supervisor import LONG_FRAME_BYTES
from runtime.executor.worker_group import WorkerGroup
from tests.runtime.executor.fakes import START_UP_ANSWERS, FakeRank, plan


def test_two_plans_are_answered_in_order_and_a_third_is_refused(begin):
    supervisor, launcher = begin()
    assert MAX_OUTSTANDING == 2
    for step in (1, 2):
        supervisor.submit(plan(step))
    with pytest.raises(EngineError, match="2 plans are outstanding"):
        supervisor.submit(plan(3))
    first, second = launcher.ranks
    steps = [second.read(), second.read()]
    for step in steps:
        second.answer(step)  # Rank 1 finishes both before rank 0 begins.
    for step in (1, 2):
        first.answer(first.read())
        result = supervisor.collect()
        assert result.step_id == step
        assert [(t.req_id, t.token_id) for t in result.tokens] == [(0, step)]  # Rank 0's answer.
    with pytest.raises(EngineError, match="no plan is outstanding"):
        supervisor.collect()
    supervisor.submit(plan(3))  # Neither mistake has ended the group.


def test_the_driver_waits_under_sched_batch_which_restarted_ranks_do_not_inherit(begin, monkeypatch):
    supervisor, launcher = begin()
    waited: list[int] = []
    gather = WorkerGroup.gather

    def watched(group: WorkerGroup) -> list[Any]:
        waited.append(os.sched_getscheduler(0))
        return gather(group)

    monkeypatch.setattr(WorkerGroup, "gather", watched)
    supervisor.submit(plan(1))
    for rank in launcher.ranks:
        rank.answer(rank.read())
    supervisor.collect()
    assert waited == [os.SCHED_BATCH] and os.sched_getscheduler(0) == os.SCHED_OTHER
    supervisor.submit(plan(2))
    launcher.ranks[1].die(-9)
    with pytest.raises(RankDiedError):
        supervisor.collect()
    supervisor.restart()
    assert launcher.policies == [os.SCHED_OTHER] * 2


def test_a_long_plan_waits_until_no_rank_is_blocked_in_a_long_answer(begin, monkeypatch):
    """Both exceed any socket buffer: sent at the same time, neither side would ever read."""
    monkeypatch.setattr(channel_module, "STALLED_FRAME_SECONDS", 5.0)  # Ends a deadlock, and the test with it.
    supervisor, launcher = begin()
    long = 4_000_000

    def live(rank: FakeRank) -> None:
        rank.answer(rank.read(), size=long)
        rank.answer(rank.read())

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in launcher.ranks]
    for thread in threads:
        thread.start()
    supervisor.submit(plan(1))
    supervisor.submit(plan(2, tokens=long))
    with pytest.raises(EngineError, match="2 plans are outstanding"):
        supervisor.submit(plan(3))  # One has been read, but not collected.
    results = [supervisor.collect(), supervisor.collect()]
    assert [result.step_id for result in results] == [1, 2]
    assert len(results[0].tokens[0].error) == long
    for thread in threads:
        thread.join(5)
    assert long > LONG_FRAME_BYTES


def test_results_read_early_are_lost_with_their_group(begin):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    for rank in launcher.ranks:
        rank.answer(rank.read())
    launcher.ranks[1].die(3)
    with pytest.raises(RankDiedError, match="step 2"):
        supervisor.submit(plan(2, tokens=LONG_FRAME_BYTES))
    with pytest.raises(RankDiedError):
        supervisor.collect()
    supervisor.restart()
    with pytest.raises(EngineError, match="no plan is outstanding"):
        supervisor.collect()


def test_a_restart_discards_plans_in_flight(begin):
    supervisor, launcher = begin()
    for step in (1, 2):
        supervisor.submit(plan(step))
    old = launcher.ranks
    for rank in old:
        rank.answer(rank.read())
    old[0].die(3)
    with contextlib.suppress(RankDiedError):
        supervisor.collect()
        supervisor.collect()
    assert supervisor.restart() == START_UP_ANSWERS["kv_cache_size"]
    assert launcher.ranks is not old and supervisor.rank_pids == [1000, 1001]
    for step in (3, 4):
        supervisor.submit(plan(step))
    for rank in launcher.ranks:
        for step in (3, 4):
            assert rank.read()[0] == step  # No older plan.
    assert launcher.closed == 0


def test_a_restart_does_not_inject_the_fault_again(begin):
    supervisor, launcher = begin(fault="rank=1,step=1,kind=exit")
    launcher.ranks[1].die(3)
    with pytest.raises(RankDiedError):
        supervisor.submit(plan(1))
        supervisor.collect()
    supervisor.restart()
    assert [config.fault for config in launcher.configs] == ["rank=1,step=1,kind=exit", ""]
    assert launcher.configs[0].run_dir != launcher.configs[1].run_dir


def test_a_restart_that_fails_may_be_tried_again(begin, bell):
    supervisor, launcher = begin()
    launcher.ranks[0].die(1)
    with pytest.raises(RankDiedError):
        supervisor.wait(bell[0])
    launcher.broken = EngineError("no room")
    with pytest.raises(EngineError, match="no room"):
        supervisor.restart()
    with pytest.raises(EngineError, match="no room"):
        supervisor.submit(plan(1))
    launcher.broken = None
    assert supervisor.restart() == START_UP_ANSWERS["kv_cache_size"]
    supervisor.submit(plan(1))


def test_an_unsupported_restart_keeps_the_cause_and_its_exit_code(begin, bell):
    supervisor, launcher = begin()
    launcher.supports_restart = False
    launcher.restart_hint = TorchrunLauncher.restart_hint
    launcher.ranks[1].die(-9)
    with pytest.raises(RankDiedError):
        supervisor.wait(bell[0])
    with pytest.raises(EngineError, match="--max-restarts N") as caught:
        supervisor.restart()
    assert "rank 1 on here failed: killed by signal 9 (SIGKILL)" in str(caught.value)
    assert caught.value.exit_code == 137
    assert len(launcher.groups) == 1


def test_after_close_there_is_no_restart(begin):
    supervisor, launcher = begin()
    for rank in launcher.ranks:
        rank.die(0)
    supervisor.close()
    supervisor.close()
    assert launcher.closed == 1
    for forbidden in (supervisor.restart, supervisor.collect, lambda: supervisor.submit(plan(1))):
        with pytest.raises(EngineClosedError):
            forbidden()


def test_a_collective_rpc_is_sent_between_steps(begin):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    for rank in launcher.ranks:
        rank.answer(rank.read())
        rank.serve({"measure_step": {"forward": float(rank.rank)}}, last="measure_step")
    assert supervisor.collective_rpc("measure_step", repeats=3) == [{"forward": 0.0}, {"forward": 1.0}]
    assert [rank.calls[-1] for rank in launcher.ranks] == [("measure_step", {"repeats": 3})] * 2
    assert supervisor.collect().step_id == 1


def test_a_failed_collective_rpc_ends_the_group(begin):
    supervisor, launcher = begin()
    launcher.ranks[1].serve({"measure_step": ValueError("no step")}, last="measure_step")
    with pytest.raises(RankRaisedError, match="ValueError: no step"):
        supervisor.collective_rpc("measure_step", repeats=1)
    with pytest.raises(RankRaisedError):
        supervisor.submit(plan(1))
