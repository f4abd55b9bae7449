"""An executor without workers: it keeps a KV cache of numbers and computes tokens from what it reads there.

A slot holds a token's position, the token, and a digest of all tokens up to it, as keys and values depend on all of
them. A token written through one request's block table and overwritten through another's, a shared block that holds
something else or was never filled, a block that was never announced, or a position computed twice or not at all, gives
another output than :func:`expected_output`, or an assertion.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.common.errors import LockstepError
from runtime.common.protocol import (
    NewRequest,
    PromptLogprobs,
    SampledToken,
    StepPlan,
    StepResult,
    pack,
    pack_plan,
    pack_tokens,
    unpack,
    unpack_plan,
    unpack_tokens,
)
from runtime.common.sampling_params import SamplingParams
from runtime.executor.interface import MAX_OUTSTANDING

_MODULUS = 2**61 - 1


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


_Slot = tuple[int, int, int]
"""Position, token, digest of all tokens up to it."""


@dataclass
class _Live:
    """A request as a worker would keep it; ``content`` is what its slots have to hold."""

    new: NewRequest
    token_ids: list[int]
    num_computed: int
    content: list[_Slot] = field(default_factory=list[_Slot])
    block_ids: list[int] = field(default_factory=list[int])

    def know(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            before = self.content[-1][2] if self.content else 0
            digest = (before * 1_000_003 + token_id + 1) % _MODULUS
            self.content.append((len(self.content), token_id, digest))


class FakeExecutor:
    """Implements ``runtime.executor.interface.Executor`` and checks every plan.

    A plan is carried out when it is submitted, its result waits for ``collect``. Nothing here is of another thread's
    making, but for :attr:`failure`, which a test may set at any time.

    Attributes:
        plans: all plans, in order, also those before a restart.
        scripted: tokens to answer instead of the model's, by request, from the front.
        broken: requests whose next token is an error.
        failure: raised by ``collect`` and ``wait`` until the group is restarted.
        submit_failure: raised by ``submit`` until the group is restarted.
        failing_steps: raised by the ``collect`` of that step id, once each.
        restart_failures: raised by the next calls of ``restart``, from the front, one each.
        restarts: how often the group was restarted; failed attempts do not count.
        waits: calls of ``wait``.
        max_outstanding: plans that may be submitted and not collected.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, vocab_size: int
    ) -> None:
        self.plans: list[StepPlan] = []
        self.scripted: dict[int, list[int]] = {}
        self.broken: set[int] = set()
        self.failure: BaseException | None = None
        self.submit_failure: BaseException | None = None
        self.failing_steps: dict[int, BaseException] = {}
        self.restart_failures: list[LockstepError] = []
        self.restarts = 0
        self.waits = 0
        self.closed = 0
        self.num_blocks = num_blocks
        self.max_outstanding = MAX_OUTSTANDING
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._vocab_size = vocab_size
        self._cache: dict[int, _Slot] = {}
        self._live: dict[int, _Live] = {}
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Carry out the plan, as it arrives after packing."""
        if self.submit_failure is not None:
            raise self.submit_failure
        plan = unpack_plan(unpack(pack_plan(plan)))
        assert len(self._results) < self.max_outstanding, f"{len(self._results)} plans are outstanding already"
        last = self.plans[-1].step_id if self.plans else 0
        # A plan that was made and could not be submitted any more is the only one that may be missing.
        assert plan.step_id == last + 1 or (self.restarts and plan.step_id > last), "step ids count up by one"
        self.plans.append(plan)
        self._apply(plan)
        # As on the ranks: in every layer all keys and values of the step are written before any are read.
        for share in plan.scheduled:
            self._write(share.req_id, share.num_tokens)
        tokens = [token for share in plan.scheduled if (token := self._read(share.req_id))]
        prompts = [entry for share in plan.scheduled if (entry := self._prompt(share.req_id, share.num_tokens))]
        result = StepResult(plan.step_id, tuple(tokens), {"forward": 1e-6}, tuple(prompts))
        self._results.append(unpack_tokens(plan.step_id, _unpacked(result)))

    def collect(self) -> StepResult:
        """The result of the oldest plan without one."""
        if self.failure is not None:
            raise self.failure
        assert self._results, "there is no plan to collect the result of"
        error = self.failing_steps.pop(self._results[0].step_id, None)
        if error is not None:
            self.failure = error
            raise error
        return self._results.popleft()

    def wait(self, wakeup: int, timeout: float | None = None) -> bool:
        """Sleep until ``wakeup`` is readable; a failure that was set is noticed before and afterwards."""
        assert not self._results, "the engine sleeps while a plan is outstanding"
        self.waits += 1
        for seconds in (0.0, timeout):
            if self.failure is not None:
                raise self.failure
            if select.select([wakeup], [], [], seconds)[0]:
                break
        else:
            return False
        if self.failure is not None:
            raise self.failure
        return True

    def restart(self) -> int:
        """Forget everything, failures included; gives the number of blocks, which a test may have changed."""
        if self.restart_failures:
            raise self.restart_failures.pop(0)
        self.failure = self.submit_failure = None
        self.restarts += 1
        self._cache.clear()
        self._live.clear()
        self._results.clear()
        return self.num_blocks

    def close(self) -> None:
        """Count the call."""
        self.closed += 1

    @property
    def live(self) -> set[int]:
        """Requests that the fake worker keeps."""
        return set(self._live)

    @property
    def num_outstanding(self) -> int:
        """Plans whose result was not collected."""
        return len(self._results)

    def _apply(self, plan: StepPlan) -> None:
        for req_id in plan.dropped:
            assert req_id in self._live, f"request {req_id} was dropped, but is not known"
            del self._live[req_id]
        for new in plan.new:
            assert new.req_id not in self._live, f"request {new.req_id} is new, but known"
            assert new.sampling.seed is not None, "the engine sets every seed"
            assert 0 <= new.num_computed < len(new.token_ids), "the last token is always computed"
            assert new.num_computed % self._block_size == 0, "only full blocks are shared"
            self._live[new.req_id] = _Live(new, list(new.token_ids), new.num_computed)
            self._live[new.req_id].know(new.token_ids)
        shares = [share.req_id for share in plan.scheduled]
        assert shares and len(set(shares)) == len(shares), f"empty, or a request twice: {shares}"
        assert len(self._live) <= self._max_num_seqs, f"{len(self._live)} requests at once"
        assert plan.num_tokens <= self._max_num_batched_tokens, f"{plan.num_tokens} tokens in a step"
        assert set(shares) <= self.live, "a request was scheduled that was not announced"
        assert {new.req_id for new in plan.new} <= set(shares), "a new request is not part of its first step"
        for share in plan.scheduled:
            self._live[share.req_id].block_ids.extend(share.new_block_ids)
        self._check_owners()

    def _check_owners(self) -> None:
        """A block may be held by several requests at the same position only, with the same tokens up to its end."""
        owners: dict[int, tuple[int, _Live]] = {}
        for req_id, live in self._live.items():
            assert len(set(live.block_ids)) == len(live.block_ids), f"request {req_id} has a block twice"
            for index, block in enumerate(live.block_ids):
                assert 0 <= block < self.num_blocks, f"block {block} is outside the cache"
                other_index, other = owners.setdefault(block, (index, live))
                if other is live:
                    continue
                last = (index + 1) * self._block_size - 1
                assert other_index == index and last < min(len(live.content), len(other.content)), (
                    f"block {block} is shared by {req_id} and {other.new.req_id}, but is not full, or of another place"
                )
                assert live.content[last] == other.content[last], f"two live requests share block {block} by mistake"

    def _write(self, req_id: int, num_tokens: int) -> None:
        live = self._live[req_id]
        end = live.num_computed + num_tokens
        assert num_tokens > 0 and end <= len(live.token_ids), f"request {req_id}: {num_tokens} tokens to {end}"
        for position in range(live.num_computed, end):
            self._cache[self._slot(live, position)] = live.content[position]
        live.num_computed = end

    def _read(self, req_id: int) -> SampledToken | None:
        """Attention looks at all tokens so far, so they have to be there; gives a token if no known one is left."""
        live = self._live[req_id]
        stored = [self._cache.get(self._slot(live, position)) for position in range(live.num_computed)]
        assert stored == live.content[: live.num_computed], f"request {req_id}: its cache holds something else"
        if live.num_computed < len(live.token_ids):
            return None
        if req_id in self.broken:
            return self._answer(live, SampledToken(req_id, 0, error="not finite", broken=True))
        sampling = live.new.sampling
        script = self.scripted.get(req_id)
        token_id = script.pop(0) if script else next_token(live.token_ids, sampling, self._vocab_size)
        if sampling.logprobs is None:
            return self._answer(live, SampledToken(req_id, token_id))
        return self._answer(live, SampledToken(req_id, token_id, -float(token_id), ((token_id, -float(token_id)),)))

    def _answer(self, live: _Live, token: SampledToken) -> SampledToken:
        live.token_ids.append(token.token_id)
        live.know([token.token_id])
        return token

    def _prompt(self, req_id: int, num_tokens: int) -> PromptLogprobs | None:
        """For those that want it: each prompt token of this step but the first of all, with logprob -(its id)."""
        live = self._live[req_id]
        if live.new.sampling.prompt_logprobs is None:
            return None
        # A row says how likely the token after it is.
        start = live.num_computed - num_tokens + 1
        tokens = live.token_ids[start : min(live.num_computed + 1, live.new.num_prompt_tokens)]
        if not tokens:
            return None
        return PromptLogprobs(req_id, start, tuple((t, -float(t), ((t, -float(t)),)) for t in tokens))

    def _slot(self, live: _Live, position: int) -> int:
        return live.block_ids[position // self._block_size] * self._block_size + position % self._block_size


def _unpacked(result: StepResult) -> object:
    """The value of an "ok" message as it arrives after packing."""
    return unpack(pack(["ok", pack_tokens(result)]))[1]
