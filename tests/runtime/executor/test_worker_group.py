"""Plans under way, waiting while idle and restarts, over ranks that are played by the test itself: no process is made.

What real processes do when they die is ``test_failures.py``'s and ``test_restart.py``'s.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.common.channel import Channel, ChannelClosedError, channel_pair
from runtime.common.config import EngineConfig
from runtime.common.errors import (
    EngineClosedError,
    EngineError,
    LockstepGuardError,
    RankDiedError,
    RankRaisedError,
    RankTimeoutError,
)
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import (
    ExceptionKind,
    NewRequest,
    RankException,
    SampledToken,
    ScheduledRequest,
    StepPlan,
    StepResult,
    digest,
    pack,
    pack_exception,
    pack_tokens,
    unpack,
)
from runtime.common.sampling_params import SamplingParams
from runtime.executor.interface import MAX_OUTSTANDING
from runtime.executor.launcher import StartedRank
from runtime.executor.supervisor import LONG_FRAME_BYTES, Supervisor
from runtime.executor.worker_group import WorkerGroup

MODEL = ModelConfig("LlamaForCausalLM", 8, 8, 1, 1, 1, 8, 100, 2048)
SAMPLING = SamplingParams(seed=1)
FOUND: dict[str, Any] = {
    "device": {"device": "pretended"},
    "group": {"collectives": "none"},
    "weights": {"bytes_read": 0},
    "kv_cache_size": 7,
    "compile": {"compiled_subgraphs": 0, "distinct_subgraphs": 0, "cache_hits": 0, "subgraphs": 0, "mode": "NONE"},
    "use_compiled": [],
    "capture": {"graphs": 0},
    "ready": {"config": "same"},
}
"""What a rank answers to the start-up RPCs."""


class FakeRank:
    """Both sides of a rank without a process: the supervisor's handle of it, and what the test makes it say."""

    def __init__(self, rank: int) -> None:
        self.rank, self.host, self.pid = rank, "here", 1000 + rank
        self.code: int | None = None
        self.ours, theirs = channel_pair()
        self.channel = Channel(theirs)
        self._ended, self._end = socket.socketpair()

    def fileno(self) -> int:
        return self._ended.fileno()

    def returncode(self) -> int | None:
        return self.code

    def signal(self, number: int) -> None:
        pass

    def kill(self) -> None:
        self.die(-9)

    def wait(self, timeout: float) -> bool:
        return self.code is not None

    def close(self) -> None:
        self._ended.close()
        self._end.close()

    # ---- what the test makes it do

    def start_up(self) -> None:
        """Say hello and answer every start-up method, from a thread of its own."""
        facts = {"pid": self.pid, "host": self.host, "host_id": "one"}
        self.channel.send(pack(["hello", self.rank, facts]))
        method = ""
        with contextlib.suppress(ChannelClosedError):
            while method != "ready":
                frame = self.channel.recv(timeout=20.0)
                _, number, method, _ = unpack(frame)
                self.channel.send(pack(["ok", number, digest(frame), FOUND.get(method)]))

    def read(self) -> tuple[int, str]:
        """The next plan's step id, and its digest."""
        frame = self.channel.recv(timeout=20.0)
        return int(unpack(frame)[1]), digest(frame)

    def answer(self, step: tuple[int, str], size: int = 0) -> None:
        tokens = (SampledToken(self.rank, step[0], error="x" * size),)
        self.channel.send(pack(["ok", *step, pack_tokens(StepResult(step[0], tokens))]))

    def fail(self, step: tuple[int, str], kind: ExceptionKind = ExceptionKind.INTERNAL) -> None:
        raised = RankException(kind, "ValueError", f"in step {step[0]}", "Traceback of it")
        self.channel.send(pack_exception(step[0], raised))

    def die(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.channel.close()
            self._end.send(b"x")


class FakeLauncher:
    """A launcher of played ranks."""

    name = "fake"

    def __init__(self, size: int) -> None:
        self.size = size
        self.supports_restart, self.restart_hint = True, ""
        self.groups: list[list[FakeRank]] = []
        self.configs: list[EngineConfig] = []
        self.policies: list[int] = []  # The scheduling policy that processes would inherit.
        self.released = self.closed = 0
        self.broken: Exception | None = None

    @property
    def ranks(self) -> list[FakeRank]:
        return self.groups[-1]

    def start(self, config: EngineConfig, model: object, timeout: float) -> list[StartedRank]:
        self.policies.append(os.sched_getscheduler(0))
        if self.broken is not None:
            raise self.broken
        self.groups.append([FakeRank(rank) for rank in range(self.size)])
        self.configs.append(config)
        for rank in self.ranks:
            threading.Thread(target=rank.start_up, daemon=True).start()
        return [StartedRank(rank, rank.ours) for rank in self.ranks]

    def release(self) -> None:
        self.released += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def begin() -> Iterator[Callable[..., tuple[Supervisor, FakeLauncher]]]:
    """Starts a supervisor over played ranks, and closes it after the test."""
    with contextlib.ExitStack() as stack:

        def start(size: int = 2, **settings: Any) -> tuple[Supervisor, FakeLauncher]:
            launcher = FakeLauncher(size)
            supervisor = Supervisor(launcher, EngineConfig(tensor_parallel_size=size, **settings), MODEL)
            supervisor.start()
            stack.callback(close, supervisor, launcher)
            return supervisor, launcher

        yield start


@pytest.fixture
def bell() -> Iterator[tuple[int, int]]:
    """A pipe: its end to wait for, and its end to ring."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def close(supervisor: Supervisor, launcher: FakeLauncher) -> None:
    for ranks in launcher.groups:
        for rank in ranks:
            rank.die(0)
    supervisor.close()


def plan(step: int, tokens: int = 1) -> StepPlan:
    new = (NewRequest(step, tuple(range(1000, 1000 + tokens)), 1, SAMPLING),) if tokens > 1 else ()
    return StepPlan(step, (ScheduledRequest(1, 1),), new)


# ---- two plans under way


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
        second.answer(step)  # rank 1 is done with both before rank 0 begins
    for step in (1, 2):
        first.answer(first.read())
        result = supervisor.collect()
        assert result.step_id == step
        assert [(t.req_id, t.token_id) for t in result.tokens] == [(0, step)]  # rank 0's answer
    with pytest.raises(EngineError, match="no plan is outstanding"):
        supervisor.collect()
    supervisor.submit(plan(3))  # neither mistake has ended the group


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


def test_an_answer_nobody_asked_for_is_a_divergence(begin, bell):
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
    second.answer(second.read())  # it went on; nobody believes it any more
    first.fail(first.read(), kind=ExceptionKind.COLLECTIVE)  # a consequence, not the cause
    with pytest.raises(RankRaisedError) as caught:
        supervisor.collect()
    assert caught.value.rank == 1 and caught.value.stage == "step 1"
    assert "in step 1" in str(caught.value) and "Traceback of it" in str(caught.value)
    with pytest.raises(RankRaisedError):
        supervisor.submit(plan(3))
    assert all(rank.code is not None for rank in launcher.ranks)  # the group has ended
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


def test_the_deadline_of_a_plan_begins_when_the_one_before_is_answered(begin):
    supervisor, launcher = begin(step_timeout=0.6)
    supervisor.submit(plan(1))
    supervisor.submit(plan(2))
    steps = [(rank.read(), rank.read()) for rank in launcher.ranks]
    timer = threading.Timer(0.4, lambda: [rank.answer(own[0]) for rank, own in zip(launcher.ranks, steps, strict=True)])
    timer.start()
    assert supervisor.collect().step_id == 1
    begun = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"--step-timeout.*silent: ranks 0, 1") as caught:
        supervisor.collect()
    assert time.monotonic() - begun > 0.55  # not 0.2, what is left since it was sent
    assert caught.value.stage == "step 2"


def test_the_driver_gives_way_only_while_it_waits_and_restarted_ranks_do_not_inherit_that(begin, monkeypatch):
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


def test_answers_that_are_there_count_though_the_driver_looks_late(begin):
    supervisor, launcher = begin(step_timeout=0.1)
    supervisor.submit(plan(1))
    for rank in launcher.ranks:
        rank.answer(rank.read())
    with pytest.raises(TimeoutError):
        launcher.ranks[0].channel.recv(timeout=0.3)  # the driver does something else for longer than the deadline
    assert supervisor.collect().step_id == 1


def test_a_long_plan_waits_until_no_rank_is_blocked_in_a_long_answer(begin):
    """Both are larger than any socket's buffer: sent at the same time, neither side would ever read."""
    supervisor, launcher = begin()
    long = 4_000_000

    def live(rank: FakeRank) -> None:
        rank.answer(rank.read(), size=long)
        rank.answer(rank.read())

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in launcher.ranks]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    supervisor.submit(plan(1))
    supervisor.submit(plan(2, tokens=long))
    with pytest.raises(EngineError, match="2 plans are outstanding"):
        supervisor.submit(plan(3))  # one of them has been read, but not collected
    results = [supervisor.collect(), supervisor.collect()]
    assert [result.step_id for result in results] == [1, 2]
    assert len(results[0].tokens[0].error) == long
    assert time.monotonic() - begun < 20  # a stalled frame ends a channel after 30 s
    for thread in threads:
        thread.join(5)
    assert long > LONG_FRAME_BYTES


def test_what_was_read_early_is_lost_with_its_group(begin):
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


# ---- idle


def test_wait_sleeps_until_it_is_woken_or_its_time_is_over(begin, bell):
    supervisor, _ = begin()
    assert supervisor.wait(bell[0], 0.05) is False
    threading.Timer(0.1, os.write, (bell[1], b"x")).start()
    assert supervisor.wait(bell[0]) is True
    assert supervisor.wait(bell[0], 0.0) is True  # it is the caller's to read
    os.read(bell[0], 1)
    assert supervisor.wait(bell[0], 0.0) is False
    supervisor.submit(plan(1))  # nothing of it stays behind


def test_a_death_while_idle_ends_the_wait(begin, bell):
    supervisor, launcher = begin()
    threading.Timer(0.1, launcher.ranks[1].die, (-9,)).start()
    begun = time.monotonic()
    with pytest.raises(RankDiedError, match="rank 1 on here failed: killed by signal 9") as caught:
        supervisor.wait(bell[0])
    assert time.monotonic() - begun < 5
    assert caught.value.stage == ""
    with pytest.raises(RankDiedError):
        supervisor.submit(plan(1))


# ---- restart


def test_a_restart_forgets_what_was_under_way(begin):
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
    assert supervisor.restart() == FOUND["kv_cache_size"]
    assert launcher.ranks is not old and supervisor.rank_pids == [1000, 1001]
    for step in (3, 4):
        supervisor.submit(plan(step))
    for rank in launcher.ranks:
        for step in (3, 4):
            assert rank.read()[0] == step  # nothing older came
    assert launcher.closed == 0


def test_an_injected_fault_has_happened_once(begin):
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
    assert supervisor.restart() == FOUND["kv_cache_size"]
    supervisor.submit(plan(1))


def test_a_restart_the_launcher_cannot_do_keeps_the_cause_and_its_exit_code(begin, bell):
    from launch.torchrun_launcher import TorchrunLauncher

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
