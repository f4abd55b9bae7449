"""WorkerGroup: plans in flight, the lockstep guard, failures, deadlines and the idle wait, over fake ranks.

Failures of real processes are in ``scenarios/test_failures.py``.
"""

from __future__ import annotations

import os
import threading

import pytest

from runtime.common.errors import LockstepGuardError, RankDiedError, RankRaisedError, RankTimeoutError
from runtime.common.protocol import ExceptionKind, pack
from runtime.executor import worker_group
from runtime.executor.worker_group import WorkerGroup
from tests.runtime.executor.fakes import plan


class FakeClock:
    """The clock of ``worker_group.py``, which advances only when the test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(worker_group, "time", self)

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("what", ["number", "digest"])
def test_the_guard_holds_for_both_plans(begin, what: str):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    supervisor.submit(plan(2))
    for rank in launcher.ranks:
        one, two = rank.read(), rank.read()
        rank.answer(one)
        wrong = (one[0], two[1]) if what == "number" else (two[0], one[1])
        rank.answer(wrong if rank.rank == 1 else two)
    assert supervisor.collect().step_id == 1
    with pytest.raises(LockstepGuardError) as caught:
        supervisor.collect()
    assert caught.value.rank == 1 and caught.value.stage == "step 2"


def test_an_answer_without_a_message_in_flight_is_a_divergence(begin, bell):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    for rank in launcher.ranks:
        step = rank.read()
        rank.answer(step)
        if rank.rank == 1:
            rank.answer(step)
    assert supervisor.collect().step_id == 1
    with pytest.raises(LockstepGuardError, match="no message was in flight") as caught:
        supervisor.wait(bell[0])
    assert caught.value.rank == 1


def test_a_failure_of_the_first_plan_is_named_by_its_step_though_the_second_was_sent(begin):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    supervisor.submit(plan(2))
    first, second = launcher.ranks
    second.fail(second.read())
    second.answer(second.read())  # Ignored: the rank has failed.
    first.fail(first.read(), kind=ExceptionKind.COLLECTIVE)  # A consequence, not the cause.
    with pytest.raises(RankRaisedError) as caught:
        supervisor.collect()
    assert caught.value.rank == 1 and caught.value.stage == "step 1"
    assert "in step 1" in str(caught.value) and "Traceback of it" in str(caught.value)
    with pytest.raises(RankRaisedError):
        supervisor.submit(plan(3))
    assert all(rank.code is not None for rank in launcher.ranks)  # The group has ended.
    assert launcher.released and not launcher.closed


def test_a_plan_for_a_rank_that_is_marked_as_failed_raises_its_failure(begin):
    """Rank 1's end is observed together with the last missing answer, so that the step succeeds."""
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    first, second = launcher.ranks
    second.answer(second.read())
    second.die(-9)
    first.channel.send(pack(["progress", "ready", 1, 2]))  # The first messages read are this and rank 1's answer,
    first.answer(first.read())  # the next this and rank 1's end.
    assert supervisor.collect().step_id == 1
    with pytest.raises(RankDiedError) as caught:
        supervisor.submit(plan(2))
    assert (caught.value.rank, caught.value.returncode) == (1, -9)


@pytest.mark.parametrize(
    ("frame", "text"),
    [(pack(["ok"]), "'ok' instead of an answer"), (pack(["hello", 1, {}]), "'hello' instead"), (b"\xc1", "malformed")],
)
def test_a_message_that_is_not_an_answer_is_a_divergence(begin, frame: bytes, text: str):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    launcher.ranks[1].channel.send(frame)
    with pytest.raises(LockstepGuardError, match=text) as caught:
        supervisor.collect()
    assert caught.value.rank == 1 and caught.value.stage == "step 1"


def test_an_answer_of_another_kind_is_a_divergence(begin):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    rank = launcher.ranks[1]
    rank.channel.send(pack(["done", *rank.read(), None]))
    with pytest.raises(LockstepGuardError, match="'done' instead of an answer"):
        supervisor.collect()


def test_a_malformed_exception_is_a_divergence(begin):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    launcher.ranks[0].channel.send(pack(["error", 1, "ValueError", "text"]))
    with pytest.raises(LockstepGuardError, match="not an exception of a rank"):
        supervisor.collect()


def test_a_death_after_its_answer_leaves_that_answer_good(begin):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    supervisor.submit(plan(2))
    first, second = launcher.ranks
    second.answer(second.read())
    second.die(-9)
    first.answer(first.read())
    assert supervisor.collect().step_id == 1
    with pytest.raises(RankDiedError) as caught:
        supervisor.collect()
    assert (caught.value.rank, caught.value.returncode, caught.value.stage) == (1, -9, "step 2")


def test_a_plan_that_cannot_be_sent_names_the_step_that_failed(begin):
    supervisor, launcher = begin()
    supervisor.submit(plan(1))
    launcher.ranks[1].die(-11)
    with pytest.raises(RankDiedError) as caught:
        supervisor.submit(plan(2))
    assert (caught.value.rank, caught.value.returncode, caught.value.stage) == (1, -11, "step 1")


def test_the_deadline_of_a_plan_begins_when_the_one_before_is_answered(begin, monkeypatch):
    clock = FakeClock(monkeypatch)
    supervisor, launcher = begin(step_timeout=60)
    supervisor.submit(plan(1))
    supervisor.submit(plan(2))
    for rank in launcher.ranks:
        rank.answer(rank.read())
    clock.now += 40
    assert supervisor.collect().step_id == 1
    waited: list[float] = []

    def wait_in_vain(group: WorkerGroup, seconds: float) -> set[int]:
        waited.append(seconds)
        clock.now += seconds
        return set()

    monkeypatch.setattr(WorkerGroup, "_read_ready", wait_in_vain)
    with pytest.raises(RankTimeoutError, match=r"--step-timeout.*silent: ranks 0, 1") as caught:
        supervisor.collect()
    assert waited[0] == 60  # Not 20, which is left since it was sent.
    assert caught.value.stage == "step 2"


def test_answers_that_have_arrived_count_after_the_deadline(begin, monkeypatch):
    clock = FakeClock(monkeypatch)
    supervisor, launcher = begin(step_timeout=60)
    supervisor.submit(plan(1))
    for rank in launcher.ranks:
        rank.answer(rank.read())
    clock.now += 1000
    assert supervisor.collect().step_id == 1


def test_wait_sleeps_until_it_is_woken_or_its_time_is_over(begin, bell):
    supervisor, _ = begin()
    assert supervisor.wait(bell[0], 0.05) is False
    threading.Thread(target=os.write, args=(bell[1], b"x")).start()
    assert supervisor.wait(bell[0]) is True
    assert supervisor.wait(bell[0], 0.0) is True  # The byte is the caller's to read.
    os.read(bell[0], 1)
    assert supervisor.wait(bell[0], 0.0) is False
    supervisor.submit(plan(1))  # The descriptor is not registered any more.


def test_a_death_while_idle_ends_the_wait(begin, bell):
    supervisor, launcher = begin()
    threading.Thread(target=launcher.ranks[1].die, args=(-9,)).start()
    with pytest.raises(RankDiedError, match="rank 1 on here failed: killed by signal 9") as caught:
        supervisor.wait(bell[0])
    assert caught.value.stage == ""
    with pytest.raises(RankDiedError):
        supervisor.submit(plan(1))
