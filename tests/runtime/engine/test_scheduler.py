"""The scheduler alone, in front of a fake executor that checks every plan and recomputes every output."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from runtime.common.errors import ProtocolError, RequestError
from runtime.common.protocol import SampledToken, StepPlan, StepResult
from runtime.engine.request import SequenceStatus
from tests.runtime.engine.scheduler_bench import Bench, shares


def test_one_request_step_by_step() -> None:
    bench = Bench(block_size=4)
    bench.add(6, max_tokens=4)
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
    assert back.index(2) < back.index(later.seq_id)
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
    while any(request.status is not SequenceStatus.FINISHED for request in bench.requests):
        oldest = next(request for request in bench.requests if request.status is not SequenceStatus.FINISHED)
        before = (oldest.num_preemptions, oldest.num_computed)
        bench.step()
        assert oldest.num_preemptions == before[0], "the oldest request lost its blocks"
        assert oldest.num_computed > before[1] or oldest.status is SequenceStatus.FINISHED
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
        alive = [request for request in bench.requests if request.status is not SequenceStatus.FINISHED]
        if alive and generator.random() < 0.2:
            victim = generator.choice(alive)
            bench.scheduler.finish(victim)
            aborted.add(victim.seq_id)
    assert len(aborted) > 5
    bench.requests = [request for request in bench.requests if request.seq_id not in aborted]
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
    bench.executor.max_outstanding = ahead + 1
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


# ---- priorities


def test_better_priorities_start_first_and_equals_as_they_came() -> None:
    bench = Bench(max_num_seqs=1)
    for priority in (3, 0, -2, 3, 0, -2):
        bench.add(3, 2, priority=priority)
    assert [new.req_id for plan in bench.run() for new in plan.new] == [2, 5, 1, 4, 0, 3]
    bench.check_outputs()


def test_the_worst_priority_is_preempted_whenever_it_came() -> None:
    bench = Bench(num_blocks=8, block_size=2, max_num_seqs=3)
    for priority in (0, 5, 1):
        bench.add(3, 8, priority=priority)
    dropped = [req_id for plan in bench.run() for req_id in plan.dropped]
    assert dropped[0] == 1 and bench.requests[0].num_preemptions == 0
    bench.check_outputs()


def test_a_better_priority_gets_the_tokens_of_a_step_before_a_running_prefill() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add(30, 2, priority=1)
    assert shares(bench.step()) == {0: 8}
    bench.add(12, 2)
    assert [shares(bench.step()) for _ in range(3)] == [{1: 8}, {1: 4, 0: 4}, {1: 1, 0: 7}]
    bench.run()
    bench.check_outputs()


def test_a_better_priority_that_does_not_fit_is_not_overtaken() -> None:
    bench = Bench(num_blocks=10, block_size=4)
    bench.add(20, 8, priority=2)
    bench.step()
    bench.add(30, 4, priority=1)
    for _ in range(20):
        bench.add(1, 2, priority=1)
    assert [new.req_id for plan in bench.run() for new in plan.new] == list(range(1, 22))
    bench.check_outputs()


# ---- samples of one prompt


def test_samples_start_when_the_first_has_computed_the_prompt() -> None:
    bench = Bench(max_num_batched_tokens=16)
    parent = bench.add(41, 3)
    for _ in range(2):
        bench.add(parent.prompt_token_ids, 3, parent=parent)
    plans = bench.run()
    # The prompt is computed once, its last token by each of them.
    assert [shares(plan) for plan in plans[:3]] == [{0: 16}, {0: 16}, {0: 9, 1: 1, 2: 1}]
    assert [request.num_cached for request in bench.requests] == [0, 40, 40]
    bench.check_outputs()


def test_a_sample_waits_for_its_leader_and_others_go_ahead() -> None:
    bench = Bench(max_num_batched_tokens=16)
    parent = bench.add(30, 3, priority=3)
    sample = bench.add(parent.prompt_token_ids, 3, parent=parent)
    other = bench.add(3, 3, priority=1)
    assert shares(bench.step()) == {other.seq_id: 3, parent.seq_id: 13}
    assert shares(bench.step()) == {other.seq_id: 1, parent.seq_id: 15}
    assert sample.status is SequenceStatus.WAITING
    bench.run()
    assert sample.num_cached == 28
    bench.check_outputs()


def test_a_sample_whose_leader_has_ended_starts() -> None:
    bench = Bench(max_num_batched_tokens=8)
    parent = bench.add(20, 3)
    sample = bench.add(parent.prompt_token_ids, 3, parent=parent)
    bench.step()
    bench.scheduler.finish(parent)
    bench.run()
    assert sample.num_cached == 8
    bench.requests = [sample]
    bench.check_outputs()


def test_a_preempted_leader_holds_up_nobody_for_ever() -> None:
    bench = Bench(num_blocks=9, block_size=2, max_num_seqs=4, max_num_batched_tokens=4)
    bench.add(4, 14, priority=0)
    parent = bench.add(7, 6, priority=9)
    bench.add(parent.prompt_token_ids, 6, parent=parent, priority=1)
    bench.add(parent.prompt_token_ids, 6, parent=parent, priority=9)
    bench.run()
    assert parent.num_preemptions > 0
    bench.check_outputs()


# ---- a group that was started again


@pytest.mark.parametrize("under_way", [0, 1, 2])
def test_after_a_reset_everything_is_said_again_to_workers_who_know_nothing(under_way: int) -> None:
    bench = crowded(random.Random(8))
    for _ in range(12):
        bench.step()
    for _ in range(under_way):
        assert bench.submit() is not None
    ended = bench.unfinished[0]
    bench.scheduler.finish(ended)  # The old workers would have been told.
    last_step = bench.executor.plans[-1].step_id
    said = {request.seq_id: list(request.output_token_ids) for request in bench.unfinished}
    evictions = bench.scheduler.pool.evictions
    bench.restart()
    assert bench.scheduler.num_running == 0 and bench.scheduler.num_waiting == len(said)
    plan = bench.step()
    assert plan is not None and plan.step_id == last_step + 1 and plan.dropped == ()
    assert [new.num_computed for new in plan.new] == [0] * len(plan.new)
    assert [new.req_id for new in plan.new] == sorted(said)[: len(plan.new)], "in order of arrival, as ever"
    bench.run()
    assert bench.scheduler.pool.evictions >= evictions
    assert all(bench.requests[req_id].output_token_ids[: len(tokens)] == tokens for req_id, tokens in said.items())
    bench.requests.remove(ended)
    bench.check_outputs()


def test_nothing_found_before_a_reset_is_found_after_it() -> None:
    """Also not what a plan would have computed that was under way."""
    bench = Bench()
    first = bench.add(20, 4)
    bench.submit()
    bench.restart()
    second = bench.add(first.prompt_token_ids, 4)
    plan = bench.step()
    assert plan is not None and [new.num_computed for new in plan.new] == [0, 16], "the second finds the first's"
    bench.run()
    assert (first.num_cached, second.num_cached) == (0, 16)
    assert (bench.scheduler.pool.queried_tokens, bench.scheduler.pool.hit_tokens) == (40, 16), "counters never fall"
    bench.check_outputs()


def test_a_smaller_pool_after_a_reset_refuses_who_no_longer_fits() -> None:
    bench = Bench(num_blocks=10, block_size=4)
    large, small = bench.add(20, 8), bench.add(3, 4)
    bench.step()
    bench.restart(num_blocks=5)
    with pytest.raises(RequestError, match=r"needs 7 KV blocks .* has 5"):
        bench.scheduler.check(large)
    bench.scheduler.check(small)
    bench.scheduler.finish(large)
    bench.run()
    bench.requests = [small]
    bench.check_outputs()


def test_a_preempted_request_starts_again_only_when_its_tokens_are_back() -> None:
    bench = Bench(num_blocks=7, block_size=2)
    first, second = bench.add(3, 10), bench.add(5, 8)
    while not second.num_preemptions:
        bench.submit()
        if bench.executor.num_outstanding == 2 and not second.num_preemptions:
            bench.collect()
    assert second.num_in_flight_tokens == 1
    bench.scheduler.finish(first)  # Now there is room.
    assert bench.submit() is None, "its last token is unknown here, so NewRequest cannot have it"
    while bench.executor.num_outstanding:
        bench.collect()
    bench.run()
    bench.requests = [second]
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
