"""An executor without workers: it keeps a KV cache of numbers and computes tokens from what it reads there.

A token written through one request's block table and overwritten through another's, a block that was never announced,
or a position computed twice or not at all, gives another output than :func:`expected_output`, or an assertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.config import SamplingParams
from runtime.protocol import NewRequest, SampledToken, StepPlan, StepResult, pack_plan, unpack, unpack_plan


def next_token(token_ids: Sequence[int], sampling: SamplingParams, vocab_size: int) -> int:
    """What the fake model says after ``token_ids``: it depends on every one of them, their order, and the seed."""
    state = (sampling.seed or 0) % 1_000_003
    for token_id in token_ids:
        state = (state * 31 + token_id * 7 + 11) % 1_000_003
    return state % vocab_size


def expected_output(prompt: Sequence[int], sampling: SamplingParams, vocab_size: int, count: int) -> list[int]:
    """The first ``count`` tokens the fake model continues a prompt with, undisturbed."""
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known, sampling, vocab_size))
    return known[len(prompt) :]


@dataclass
class _Live:
    """A request as a worker would keep it."""

    new: NewRequest
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list[int])
    num_computed: int = 0


class FakeExecutor:
    """Implements ``runtime.executor.Executor`` and checks every plan.

    Attributes:
        plans: all plans, in order.
        scripted: tokens to answer instead of the model's, by request, from the front.
        broken: requests whose next token is an error.
        failure: raised by the next ``collect``.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, vocab_size: int
    ) -> None:
        self.plans: list[StepPlan] = []
        self.scripted: dict[int, list[int]] = {}
        self.broken: set[int] = set()
        self.failure: BaseException | None = None
        self.closed = 0
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._vocab_size = vocab_size
        self._cache: dict[int, tuple[int, int]] = {}
        self._live: dict[int, _Live] = {}
        self._results: list[StepResult] = []

    def submit(self, plan: StepPlan) -> None:
        """Carry out the plan, as it arrives after packing."""
        plan = unpack_plan(unpack(pack_plan(plan)))
        assert plan.step_id == (self.plans[-1].step_id + 1 if self.plans else 1), "step ids count up by one"
        self.plans.append(plan)
        self._apply(plan)
        tokens = [token for share in plan.scheduled if (token := self._compute(share.req_id, share.num_tokens))]
        self._results.append(StepResult(plan.step_id, tuple(tokens)))

    def collect(self) -> StepResult:
        """The result of the oldest plan without one."""
        if self.failure is not None:
            raise self.failure
        return self._results.pop(0)

    def close(self) -> None:
        """Count the call."""
        self.closed += 1

    @property
    def live(self) -> set[int]:
        """Requests that the fake worker keeps."""
        return set(self._live)

    def _apply(self, plan: StepPlan) -> None:
        for req_id in plan.dropped:
            assert req_id in self._live, f"request {req_id} was dropped, but is not known"
            del self._live[req_id]
        for new in plan.new:
            assert new.req_id not in self._live, f"request {new.req_id} is new, but known"
            assert new.sampling.seed is not None, "the engine sets every seed"
            self._live[new.req_id] = _Live(new, list(new.token_ids))
        shares = [share.req_id for share in plan.scheduled]
        assert shares and len(set(shares)) == len(shares), f"empty, or a request twice: {shares}"
        assert len(self._live) <= self._max_num_seqs, f"{len(self._live)} requests at once"
        assert plan.num_tokens <= self._max_num_batched_tokens, f"{plan.num_tokens} tokens in a step"
        assert set(shares) <= self.live, "a request was scheduled that was not announced"
        assert {new.req_id for new in plan.new} <= set(shares), "a new request is not part of its first step"
        for share in plan.scheduled:
            self._live[share.req_id].block_ids.extend(share.new_block_ids)
        owned = [block for live in self._live.values() for block in live.block_ids]
        assert len(set(owned)) == len(owned), "two live requests share a block"
        assert all(0 <= block < self._num_blocks for block in owned), "a block outside the cache"

    def _compute(self, req_id: int, num_tokens: int) -> SampledToken | None:
        live = self._live[req_id]
        end = live.num_computed + num_tokens
        assert num_tokens > 0 and end <= len(live.token_ids), f"request {req_id}: {num_tokens} tokens to {end}"
        for position in range(live.num_computed, end):
            self._cache[self._slot(live, position)] = (position, live.token_ids[position])
        live.num_computed = end
        if end < len(live.token_ids):
            return None
        stored = [self._cache[self._slot(live, position)] for position in range(end)]
        assert [position for position, _ in stored] == list(range(end)), f"request {req_id}: its cache was overwritten"
        if req_id in self.broken:
            live.token_ids.append(0)
            return SampledToken(req_id, 0, error="not finite")
        sampling = live.new.sampling
        script = self.scripted.get(req_id)
        token_id = script.pop(0) if script else next_token([t for _, t in stored], sampling, self._vocab_size)
        live.token_ids.append(token_id)
        if sampling.logprobs is None:
            return SampledToken(req_id, token_id)
        return SampledToken(req_id, token_id, -float(token_id), ((token_id, -float(token_id)),))

    def _slot(self, live: _Live, position: int) -> int:
        return live.block_ids[position // self._block_size] * self._block_size + position % self._block_size
