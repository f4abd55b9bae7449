"""Random calls of the scheduler, thousands of them: what has to hold after each, and what has to come out at the end.

The executor checks every plan and what every cached block holds; here every choice of the scheduler is checked against
its rules, written once more and plainly.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from runtime.common.protocol import StepPlan
from runtime.engine.request import SequenceState, SequenceStatus
from tests.runtime.engine.fake_executor import expected_output
from tests.runtime.engine.scheduler_bench import VOCAB, Bench, shares


@dataclass(frozen=True)
class Kind:
    """What a random run may contain.

    Attributes:
        salts: each prompt gets one of them.
        stop: chance that a token ends its request.
    """

    num_blocks: int = 120
    block_size: int = 4
    max_num_seqs: int = 6
    max_num_batched_tokens: int = 24
    salts: tuple[bytes | None, ...] = (b"",)
    priorities: tuple[int, ...] = (0,)
    most_samples: int = 1
    stop: float = 0.0
    abort: float = 0.0
    restart: float = 0.0
    broken: float = 0.0


NUM_RUNS = 16
"""Of each kind: one to three thousand plans in all."""

TINY = {"num_blocks": 16, "block_size": 2, "max_num_batched_tokens": 12}

KINDS = {
    "roomy": Kind(),
    "crowded": Kind(**TINY),
    "crowded, no cache": Kind(**TINY, salts=(None,)),
    "crowded, salts": Kind(**TINY, salts=(b"", b"a", None)),
    "priorities": Kind(**TINY, priorities=(-1, 0, 0, 7)),
    "samples": Kind(**TINY, most_samples=4),
    "ends": Kind(**TINY, stop=0.03, abort=0.03),
    "restarts": Kind(**TINY, restart=0.03),
    "one token at a time": Kind(num_blocks=13, block_size=1, max_num_seqs=3, max_num_batched_tokens=3),
    "everything": Kind(
        **TINY, salts=(b"", b"", b"a", None), priorities=(0, 0, 1), most_samples=3, stop=0.05, abort=0.05, restart=0.01,
        broken=0.02,
    ),
}  # fmt: skip


@dataclass
class Run:
    """One random run over a scheduler with up to two plans under way."""

    kind: Kind
    generator: random.Random
    cut: set[int] = field(default_factory=set[int])
    """Requests that ended before their length."""

    def __post_init__(self) -> None:
        kind = self.kind
        self.bench = Bench(kind.num_blocks, kind.block_size, kind.max_num_seqs, kind.max_num_batched_tokens)
        longest = kind.num_blocks * kind.block_size
        # Prompts begin alike in several ways, so that runs of blocks are found whole, in part and not at all.
        self.beginnings = [[self.generator.randrange(VOCAB) for _ in range(longest)] for _ in range(3)]
        self.longest = longest
        self.restarts = 0

    def add(self) -> None:
        generator = self.generator
        total = generator.randint(2, self.longest + 1)
        length = generator.randint(1, min(total - 1, 40))
        own = generator.choice((0, 1, 5))
        prompt = generator.choice(self.beginnings)[: max(length - own, 0)]
        prompt = prompt + [generator.randrange(VOCAB) for _ in range(length - len(prompt))]
        max_tokens = generator.randint(1, min(total - length, 25))
        parent = None
        salt = generator.choice(self.kind.salts)
        params = {"prompt_logprobs": 0} if generator.random() < 0.1 else {}
        for _ in range(generator.randint(1, self.kind.most_samples)):
            priority = generator.choice(self.kind.priorities)  # Of its own, which the engine never does: still right.
            request = self.bench.add(prompt, max_tokens, params, parent=parent, cache_salt=salt, priority=priority)
            parent = parent or request

    def end(self, request: SequenceState) -> None:
        self.bench.scheduler.finish(request)
        self.cut.add(request.seq_id)

    def submit(self) -> bool:
        """Make a plan, check it, and submit it, if there is something to plan."""
        before = [r for r in self.bench.unfinished if r.status is SequenceStatus.RUNNING]
        ending = any(r.num_uncomputed == 0 for r in before)
        decodes = [r for r in before if r.num_uncomputed == 1]
        best = min((r for r in before if r.num_uncomputed), key=lambda r: r.order, default=None)
        blocked = {r for r in self.bench.unfinished if r.waits_for_parent}
        plan = self.bench.submit()
        lost = [r for r in before if r.status is not SequenceStatus.RUNNING]
        now = set(shares(plan))
        # A long prompt never holds up those who are past theirs; and the first of all advances.
        still = [r for r in decodes if r.seq_id not in now and r not in lost]
        started = [self.bench.requests[new.req_id] for new in plan.new] if plan is not None else []
        before_it = best is not None and any(r.order < best.order for r in started)
        assert best is None or best.seq_id in now or best in still or (before_it and best not in decodes)
        if ending or still:
            # Blocks are about to be freed: no sequence is preempted, and a decode without a block stalls.
            assert not (ending and lost)
            assert any(r.num_uncomputed == 0 for r in before)
            assert all(self.bench.scheduler.pool.blocks_for(r.num_tokens) > len(r.block_ids) for r in still)
            assert not (still and self.bench.scheduler.pool.num_free)
        kept = [r.order for r in before if r not in lost]
        assert all(victim.order > other for victim in lost for other in kept), "another sequence had to be preempted"
        assert not (lost and started), "blocks were taken from one for another that starts"
        self._check_starts(started, blocked)
        running = [r for r in self.bench.unfinished if r.status is SequenceStatus.RUNNING]
        assert self.bench.scheduler.pool.num_used == len({block for r in running for block in r.block_ids})
        assert self.bench.scheduler.num_running == len(running)
        return plan is not None

    def _check_starts(self, started: list[SequenceState], blocked: set[SequenceState]) -> None:
        """No sequence is admitted before an earlier waiting one, unless that one waited for its parent."""
        for waiting in self.bench.unfinished:
            # Its parent may have got there in this plan: in time only if it was looked at first.
            parent = waiting.parent
            passed_by = parent is not None and waiting in blocked and parent.order > waiting.order
            if waiting.status is SequenceStatus.WAITING and not waiting.waits_for_parent and not passed_by:
                assert all(r.order < waiting.order for r in started), f"request {waiting.seq_id} was overtaken"
        for request in started:
            assert not request.waits_for_parent
            if request.cache_salt is None or request.sampling.prompt_logprobs is not None:
                assert request.num_cached == 0

    def collect(self) -> None:
        """Take a result; a token may be the last by its number, or by chance, as a stop string would."""
        for request, token in self.bench.scheduler.update(self.bench.executor.collect()):
            if token.error:
                self.bench.executor.broken.discard(request.seq_id)
                self.end(request)
            elif len(request.output_token_ids) == request.sampling.max_tokens:
                self.bench.scheduler.finish(request)
            elif self.generator.random() < self.kind.stop:
                self.end(request)

    def disturb(self) -> None:
        """An abort, a failure, or numbers that are not finite."""
        generator, alive = self.generator, self.bench.unfinished
        if alive and generator.random() < self.kind.abort:
            self.end(generator.choice(alive))
        if alive and generator.random() < self.kind.broken:
            self.bench.executor.broken.add(generator.choice(alive).seq_id)
        if generator.random() < self.kind.restart:
            self.bench.restart()
            self.restarts += 1

    def go(self, num_prompts: int) -> None:
        """Add prompts at random moments and go on until nothing is left."""
        executor, steps = self.bench.executor, 0
        while True:
            if num_prompts and self.generator.random() < 0.4:
                num_prompts -= 1
                self.add()
            may_submit = executor.num_outstanding < executor.max_outstanding
            # The engine fills up first; other orders have to be right as well.
            planned = may_submit and self.generator.random() < 0.8 and self.submit()
            if not planned and executor.num_outstanding:
                self.collect()
            elif not planned and not num_prompts and not self.submit():
                break
            self.disturb()
            steps += 1
            assert steps < 20_000, "the scheduler goes in circles"
        self.check()

    def check(self) -> None:
        for request in self.bench.requests:
            expected = expected_output(request.prompt_token_ids, request.sampling, VOCAB, len(request.output_token_ids))
            assert request.output_token_ids == expected, f"request {request.seq_id}"
            assert request.seq_id in self.cut or len(expected) == request.sampling.max_tokens
        assert not self.bench.unfinished, "a sequence starved"
        self.bench.check_empty()


@pytest.mark.parametrize("name", KINDS)
def test_any_sequence_of_calls_keeps_the_rules_and_changes_no_output(name: str) -> None:
    preemptions = found = restarts = plans = 0
    for seed in range(NUM_RUNS):
        run = Run(KINDS[name], random.Random(f"{name} {seed}"))
        run.go(40)
        preemptions += run.bench.scheduler.num_preemptions
        found += run.bench.scheduler.pool.hit_tokens
        plans += len(run.bench.executor.plans)
        restarts += run.restarts
    assert plans > 800
    assert (preemptions >= 20) == (name != "roomy")
    assert (found > 100) == (KINDS[name].salts != (None,))
    assert (restarts > 10) == (KINDS[name].restart > 0)


def test_the_oldest_is_through_in_a_bounded_number_of_steps() -> None:
    """Whatever comes after it. So each request's turn comes: the number of those before it never grows."""
    kind = Kind(**TINY)
    run = Run(kind, random.Random(9))
    bench, oldest, steps, longest = run.bench, -1, 0, 0
    for _ in range(3000):
        if len(bench.unfinished) < 30:
            run.add()
        bench.step()
        first = bench.unfinished[0]
        steps = steps + 1 if first.seq_id == oldest else 0
        oldest, longest = first.seq_id, max(longest, steps)
        # It gets what the others' decodes leave of each step, and a token in each afterwards.
        chunk = kind.max_num_batched_tokens - (kind.max_num_seqs - 1)
        assert steps <= -(-len(first.prompt_token_ids) // chunk) + first.sampling.max_tokens, "the oldest stalls"
    assert longest > 10 and bench.scheduler.num_preemptions >= 20
    while bench.step() is not None:
        pass
    run.check()


def test_a_bad_priority_is_served_when_the_better_ones_are() -> None:
    """However many better ones are ahead, and however often they threw it out: no request is lost."""
    run = Run(Kind(**TINY), random.Random(10))
    bench = run.bench
    poor = bench.add(10, 12, priority=100)
    for turn in range(600):
        if turn < 300 and len(bench.unfinished) < 4:
            bench.add(run.generator.randint(1, 12), run.generator.randint(1, 12), priority=turn % 3)
        bench.step()
    assert poor.num_preemptions > 1 and not bench.unfinished
    run.check()


def test_the_same_calls_make_the_same_plans() -> None:
    def plans() -> list[StepPlan]:
        run = Run(KINDS["everything"], random.Random(11))
        run.go(20)
        return run.bench.executor.plans

    assert plans() == plans()
