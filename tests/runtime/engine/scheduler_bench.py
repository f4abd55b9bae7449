"""A scheduler in front of a fake executor, with a loop like the engine's, for the tests of scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.common.protocol import StepPlan
from runtime.common.sampling_params import SamplingParams
from runtime.engine.block_pool import BlockPool
from runtime.engine.request import SequenceState, SequenceStatus
from runtime.engine.scheduler import Scheduler
from tests.runtime.engine.fake_executor import FakeExecutor, expected_output

VOCAB = 1000


@dataclass
class Bench:
    """A scheduler and a fake executor of the same sizes; requests end by length, or when a test ends them."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    requests: list[SequenceState] = field(default_factory=list[SequenceState])

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

    @property
    def unfinished(self) -> list[SequenceState]:
        """Those added and not ended, as they came."""
        return [request for request in self.requests if request.status is not SequenceStatus.FINISHED]

    def add(
        self, prompt: int | Sequence[int], max_tokens: int, params: dict[str, Any] | None = None, **fields: Any
    ) -> SequenceState:
        """Queue a prompt, given as its tokens, or as its length and then unlike any other; ``fields``: its state's."""
        seq_id = len(self.requests)
        if isinstance(prompt, int):
            prompt = [(seq_id * 101 + position * 13) % VOCAB for position in range(prompt)]
        sampling = SamplingParams(max_tokens=max_tokens, seed=seq_id, **(params or {}))
        request = SequenceState(seq_id, tuple(prompt), sampling, **fields)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def submit(self) -> StepPlan | None:
        """Plan and submit, if there is anything to plan."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.executor.submit(plan)
        return plan

    def collect(self) -> None:
        """Take the oldest result, and end requests that are complete."""
        for request, token in self.scheduler.update(self.executor.collect()):
            assert not token.error
            if len(request.output_token_ids) == request.sampling.max_tokens:
                self.scheduler.finish(request)

    def step(self) -> StepPlan | None:
        """One plan and its result."""
        plan = self.submit()
        if plan is not None:
            self.collect()
        return plan

    def run(self, at_most: int = 10_000) -> list[StepPlan]:
        """Step until there is nothing to do; gives the plans."""
        plans: list[StepPlan] = []
        while (plan := self.step()) is not None:
            plans.append(plan)
            assert len(plans) < at_most, "the scheduler goes in circles"
        return plans

    def restart(self, num_blocks: int | None = None) -> None:
        """What the engine does after a rank has failed."""
        self.executor.num_blocks = num_blocks or self.num_blocks
        self.scheduler.reset(BlockPool(self.executor.restart(), self.block_size))

    def check_outputs(self) -> None:
        """Every request has ended with what it says when it runs alone, and nothing is left."""
        for request in self.requests:
            expected = expected_output(request.prompt_token_ids, request.sampling, VOCAB, request.sampling.max_tokens)
            assert request.output_token_ids == expected, f"request {request.seq_id}"
        assert not self.unfinished
        self.check_empty()

    def check_empty(self) -> None:
        """No sequence waits or runs, and every block is free."""
        assert self.scheduler.pool.num_used == self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks


def shares(plan: StepPlan | None) -> dict[int, int]:
    """How many tokens of each request are in a plan."""
    return {} if plan is None else {share.req_id: share.num_tokens for share in plan.scheduled}
