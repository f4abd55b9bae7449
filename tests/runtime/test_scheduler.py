"""The scheduler alone, in front of a fake executor that checks every plan and recomputes every output."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from runtime.block_pool import BlockPool
from runtime.config import SamplingParams
from runtime.errors import ProtocolError, RequestError
from runtime.protocol import SampledToken, StepPlan, StepResult
from runtime.request import Request, RequestStatus
from runtime.scheduler import Scheduler
from tests.runtime.fake_executor import FakeExecutor, expected_output

VOCAB = 1000


@dataclass
class Bench:
    """A scheduler and a fake executor of the same sizes, with a loop like the engine's; requests end by length only."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    requests: list[Request] = field(default_factory=list[Request])

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            BlockPool(self.num_blocks, self.block_size),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        self.executor = FakeExecutor(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            vocab_size=VOCAB,
        )

    def add(self, num_prompt: int, max_tokens: int) -> Request:
        req_id = len(self.requests)
        prompt = tuple((req_id * 101 + position * 13) % VOCAB for position in range(num_prompt))
        request = Request(req_id, prompt, SamplingParams(max_tokens=max_tokens, seed=req_id))
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def submit(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.executor.submit(plan)
        return plan

    def collect(self) -> None:
        for request, token in self.scheduler.update(self.executor.collect()):
            assert not token.error
            if len(request.output_token_ids) == request.sampling.max_tokens:
                self.scheduler.finish(request)

    def step(self) -> StepPlan | None:
        plan = self.submit()
        if plan is not None:
            self.collect()
        return plan

    def run(self, at_most: int = 10_000) -> list[StepPlan]:
        plans: list[StepPlan] = []
        while (plan := self.step()) is not None:
            plans.append(plan)
            assert len(plans) < at_most, "the scheduler goes in circles"
        return plans

    def check_outputs(self) -> None:
        for request in self.requests:
            expected = expected_output(request.prompt_token_ids, request.sampling, VOCAB, request.sampling.max_tokens)
            assert request.output_token_ids == expected, f"request {request.req_id}"
        assert all(request.status is RequestStatus.FINISHED for request in self.requests)
        assert self.scheduler.pool.num_used == self.scheduler.num_running == self.scheduler.num_waiting == 0


def shares(plan: StepPlan | None) -> dict[int, int]:
    return {} if plan is None else {share.req_id: share.num_tokens for share in plan.scheduled}


def test_one_request_step_by_step() -> None:
    bench = Bench(block_size=4)
    bench.add(num_prompt=6, max_tokens=4)
    plans = bench.run()
    assert [shares(plan) for plan in plans] == [{0: 6}, {0: 1}, {0: 1}, {0: 1}]
    assert [len(plan.new) for plan in plans] == [1, 0, 0, 0]
    assert [[len(share.new_block_ids) for share in plan.scheduled] for plan in plans] == [[2], [0], [0], [1]]
    bench.check_outputs()


def test_mixed_lengths_all_come_out_right() -> None:
    bench = Bench(num_blocks=200)
    generator = random.Random(1)
    for _ in range(40):
        bench.add(generator.randrange(1, 90), generator.randrange(1, 30))
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    bench.check_outputs()


def test_long_prompt_is_computed_beside_decodes() -> None:
    """Every running decode gets its token in every step, however long the prompt that came after it."""
    bench = Bench(max_num_batched_tokens=10)
    bench.add(4, 30)
    bench.add(3, 30)
    bench.step()
    bench.add(50, 5)
    chunks: list[int] = []
    while len(bench.requests[2].output_token_ids) < 5:
        now = shares(bench.step())
        assert now[0] == now[1] == 1
        chunks.append(now[2])
    assert chunks == [8, 8, 8, 8, 8, 8, 2, 1, 1, 1, 1]
    bench.run()
    bench.check_outputs()


def test_prefills_share_a_step_oldest_first() -> None:
    bench = Bench(max_num_batched_tokens=16)
    for num_prompt in (5, 20, 8):
        bench.add(num_prompt, 3)
    plans = [shares(plan) for plan in bench.run()]
    assert plans[:3] == [{0: 5, 1: 11}, {0: 1, 1: 9, 2: 6}, {0: 1, 1: 1, 2: 2}]
    bench.check_outputs()


def test_no_more_than_max_num_seqs_and_first_come_first_served() -> None:
    bench = Bench(max_num_seqs=3)
    for _ in range(9):
        bench.add(2, 4)
    started = [new.req_id for plan in bench.run() for new in plan.new]
    assert started == list(range(9))
    bench.check_outputs()


def test_small_requests_do_not_overtake_a_large_one() -> None:
    bench = Bench(num_blocks=10, block_size=4)
    bench.add(20, 8)
    bench.step()
    bench.add(30, 4)  # Has to wait for the first to end.
    for _ in range(20):
        bench.add(1, 2)
    started = [new.req_id for plan in bench.run() for new in plan.new]
    assert started == sorted(started)
    bench.check_outputs()


# ---- preemption


def crowded(generator: random.Random) -> Bench:
    bench = Bench(num_blocks=20, block_size=2, max_num_seqs=6, max_num_batched_tokens=12)
    for _ in range(30):
        bench.add(generator.randrange(1, 12), generator.randrange(1, 28))
    return bench


def test_preempted_requests_give_the_same_outputs() -> None:
    bench = crowded(random.Random(2))
    bench.run()
    assert bench.scheduler.num_preemptions >= 20
    assert sum(request.num_preemptions for request in bench.requests) == bench.scheduler.num_preemptions
    bench.check_outputs()


def test_the_newest_is_preempted_and_waits_at_the_head() -> None:
    bench = Bench(num_blocks=8, block_size=2, max_num_seqs=3)
    for num_prompt in (3, 3, 3):
        bench.add(num_prompt, 8)
    plan = bench.step()
    while plan is not None and not plan.dropped:
        plan = bench.step()
    assert plan is not None and plan.dropped == (2,)
    assert shares(plan).keys() == {0, 1}
    later = bench.add(1, 1)
    back = [new.req_id for plan in bench.run() for new in plan.new]
    assert back.index(2) < back.index(later.req_id)
    bench.check_outputs()


def test_nobody_starts_who_would_be_preempted_at_once() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    bench.add(5, 19)
    bench.step()
    bench.add(24, 3)  # Would fit now, but then neither could get its next block.
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    bench.check_outputs()


def test_the_oldest_is_never_preempted() -> None:
    bench = crowded(random.Random(3))
    while any(request.status is not RequestStatus.FINISHED for request in bench.requests):
        oldest = next(request for request in bench.requests if request.status is not RequestStatus.FINISHED)
        before = (oldest.num_preemptions, oldest.num_computed)
        bench.step()
        assert oldest.num_preemptions == before[0], "the oldest request lost its blocks"
        assert oldest.num_computed > before[1] or oldest.status is RequestStatus.FINISHED
    bench.check_outputs()


def test_a_request_that_fills_the_cache_alone_runs() -> None:
    bench = Bench(num_blocks=6, block_size=4)
    bench.add(20, 5)
    bench.add(1, 24)
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(20, 6), (25, 1), (1, 25)])
def test_a_request_that_never_fits_is_refused_with_numbers(num_prompt: int, max_tokens: int) -> None:
    bench = Bench(num_blocks=6, block_size=4)
    with pytest.raises(RequestError, match=rf"{num_prompt} tokens .*max_tokens {max_tokens} needs 7 KV blocks.* has 6"):
        bench.add(num_prompt, max_tokens)
    assert bench.scheduler.num_waiting == 0


# ---- ends from outside


def test_aborts_anywhere_free_everything_and_disturb_nobody() -> None:
    generator = random.Random(4)
    bench = crowded(generator)
    aborted: set[int] = set()
    while (plan := bench.step()) is not None:
        assert not aborted & shares(plan).keys()
        alive = [request for request in bench.requests if request.status is not RequestStatus.FINISHED]
        if alive and generator.random() < 0.2:
            victim = generator.choice(alive)
            bench.scheduler.finish(victim)
            aborted.add(victim.req_id)
    assert len(aborted) > 5
    bench.requests = [request for request in bench.requests if request.req_id not in aborted]
    bench.check_outputs()


def test_workers_hear_of_an_end_with_the_next_plan() -> None:
    bench = Bench()
    bench.add(3, 1)
    bench.run()
    assert bench.executor.live == {0}
    bench.add(3, 2)
    plan = bench.step()
    assert plan is not None and plan.dropped == (0,)
    assert bench.executor.live == {1}


# ---- planning ahead


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("make", [lambda: crowded(random.Random(5)), Bench], ids=["crowded", "roomy"])
def test_steps_can_be_planned_before_the_last_has_ended(make: Callable[[], Bench], ahead: int) -> None:
    """So many plans are always under way while the next is made: nothing comes out differently."""
    bench = make()
    generator = random.Random(6)
    while len(bench.requests) < 40:
        bench.add(generator.randrange(1, 12), generator.randrange(1, 28))
    under_way = 0
    while (plan := bench.submit()) is not None or under_way:
        under_way += plan is not None
        if under_way > ahead or plan is None:
            bench.collect()
            under_way -= 1
    bench.check_outputs()


def test_an_end_found_while_the_next_step_runs_is_ignored_there() -> None:
    bench = Bench()
    first, second = bench.add(3, 10), bench.add(3, 10)
    bench.submit()
    bench.submit()
    [(request, _), _] = bench.scheduler.update(bench.executor.collect())
    bench.scheduler.finish(request)
    assert request is first
    assert [request for request, _ in bench.scheduler.update(bench.executor.collect())] == [second]
    assert len(first.output_token_ids) == 1
    bench.requests = [second]
    bench.run()
    bench.check_outputs()


# ---- answers


def plans_of(bench: Bench) -> Sequence[StepPlan]:
    bench.run()
    return bench.executor.plans


def test_same_calls_give_same_plans() -> None:
    assert plans_of(crowded(random.Random(7))) == plans_of(crowded(random.Random(7)))


@pytest.mark.parametrize(
    "result",
    [StepResult(2, (SampledToken(0, 5),)), StepResult(1, ()), StepResult(1, (SampledToken(9, 5),))],
    ids=["another step", "no token", "another request"],
)
def test_the_result_of_another_plan_is_refused(result: StepResult) -> None:
    bench = Bench()
    bench.add(3, 2)
    bench.submit()
    with pytest.raises(ProtocolError, match=r"step 1 for \[0\] was due"):
        bench.scheduler.update(result)
    bench.collect()
    bench.run()
    bench.check_outputs()


def test_a_result_nobody_asked_for_is_refused() -> None:
    with pytest.raises(ProtocolError, match="step None"):
        Bench().scheduler.update(StepResult(1, ()))
