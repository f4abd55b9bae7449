"""Continuous batching: which requests run in the next step, and how many of each one's tokens.

``schedule`` makes a plan, ``update`` takes its result. ``schedule`` never looks at a sampled token, so the plan of step
n + 1 can be made while step n runs. Which blocks are free is ``block_pool.py``'s; when a request has ended is
``engine.py``'s, which then calls ``finish``.

The policy, first come first served:

- Every running request that has one token to compute (decode) gets it. Requests with more (prefill) share the rest of
  ``max_num_batched_tokens``, oldest first, so a long prompt is computed in chunks beside the decodes.
- A waiting request starts once there are blocks for all its known tokens and one more for each running request, so
  that it is not thrown out again by their next tokens. Nobody overtakes the oldest waiting one.
- When a decode needs a block and none is free, the newest running request gives up all of its (preemption): it waits
  at the head of the queue and is computed again from its tokens. Running requests are thus always older than waiting
  ones, and the oldest, which fits the cache alone, always advances.

Everything follows from the calls made; there is no clock and no chance in here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from runtime.block_pool import BlockPool
from runtime.errors import ProtocolError, RequestError
from runtime.protocol import NewRequest, SampledToken, ScheduledRequest, StepPlan, StepResult
from runtime.request import Request, RequestStatus


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list[ScheduledRequest])
    new: list[NewRequest] = field(default_factory=list[NewRequest])
    sampled: list[Request] = field(default_factory=list[Request])


class Scheduler:
    """Requests that wait, requests that run, and the plans for them.

    Attributes:
        pool: the KV blocks.
        num_preemptions: how many there were since the start.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Request] = (
            deque()
        )  # Both are in order of arrival, and all running came before all waiting.
        self._running: list[Request] = []
        self._dropped: list[int] = []
        self._outstanding: deque[tuple[int, list[Request]]] = deque()
        self._last_step = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: it could not even run alone.
        """
        prompt, output = len(request.prompt_token_ids), request.sampling.max_tokens
        # The last token is returned and never computed, so it needs no place.
        needed, existing = self.pool.blocks_for(prompt + output - 1), self.pool.num_blocks
        if needed > existing:
            capacity = existing * self.pool.block_size
            raise RequestError(
                f"a prompt of {prompt} tokens with max_tokens {output} needs {needed} KV blocks of "
                f"{self.pool.block_size} tokens, the KV cache has {existing}; ask for at most {capacity + 1} tokens in "
                "all (a smaller max_tokens, a shorter prompt), or raise --kv-cache-memory or --gpu-memory-utilization"
            )
        self._waiting.append(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is; its blocks are free at once, workers hear of it with the next plan."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._release(request)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED

    def schedule(self) -> StepPlan | None:
        """The next plan, or None if there is nothing to compute."""
        draft = _Draft(self._max_num_batched_tokens)
        for request in list(self._running):
            if request.status is RequestStatus.RUNNING and request.num_uncomputed == 1 and self._make_room(request):
                self._schedule(request, 1, draft)
        for request in self._running:
            if request.num_uncomputed > 1:
                self._schedule(request, min(request.num_uncomputed, draft.budget), draft)
        self._admit(draft)  # Never of one that was just preempted: it is at the head, and lacks the block it lost.
        if not draft.scheduled:
            return None
        self._last_step += 1
        self._outstanding.append((self._last_step, draft.sampled))
        plan = StepPlan(self._last_step, tuple(draft.scheduled), tuple(draft.new), tuple(self._dropped))
        self._dropped = []
        return plan

    def update(self, result: StepResult) -> list[tuple[Request, SampledToken]]:
        """Take the result of the oldest plan without one; gives the tokens of requests that have not ended meanwhile.

        Raises:
            ProtocolError: it is the result of another plan.
        """
        step_id, sampled = self._outstanding[0] if self._outstanding else (None, [])
        tokens = {token.req_id: token for token in result.tokens}
        if result.step_id != step_id or tokens.keys() != {request.req_id for request in sampled}:
            raise ProtocolError(
                f"the result of step {result.step_id} with tokens for requests {sorted(tokens)} came where that of "
                f"step {step_id} for {sorted(request.req_id for request in sampled)} was due"
            )
        self._outstanding.popleft()
        updated: list[tuple[Request, SampledToken]] = []
        for request in sampled:
            request.num_pending -= 1
            if request.status is not RequestStatus.FINISHED:
                token = tokens[request.req_id]
                if not token.error:
                    request.output_token_ids.append(token.token_id)
                updated.append((request, token))
        return updated

    def _admit(self, draft: _Draft) -> None:
        """Start waiting requests, oldest first, as long as sequences, tokens and blocks last."""
        while self._waiting and len(self._running) < self._max_num_seqs and draft.budget > 0:
            request = self._waiting[0]
            needed = self.pool.blocks_for(request.num_tokens)
            if request.num_pending or needed + len(self._running) > self.pool.num_free:
                return  # A preempted request whose last token is still on its way cannot be described to the workers.
            self._waiting.popleft()
            self._running.append(request)
            request.status = RequestStatus.RUNNING
            known = (*request.prompt_token_ids, *request.output_token_ids)
            draft.new.append(NewRequest(request.req_id, known, len(request.prompt_token_ids), request.sampling))
            self._schedule(request, min(request.num_uncomputed, draft.budget), draft)

    def _schedule(self, request: Request, num_tokens: int, draft: _Draft) -> None:
        """Put ``num_tokens`` more of a request into the plan, with the blocks that all its known tokens need."""
        if num_tokens == 0:
            return
        new_blocks = self.pool.allocate(self.pool.blocks_for(request.num_tokens) - len(request.block_ids))
        request.block_ids.extend(new_blocks)
        request.num_computed += num_tokens
        if request.num_computed == request.num_tokens:
            request.num_pending += 1
            draft.sampled.append(request)
        draft.scheduled.append(ScheduledRequest(request.req_id, num_tokens, tuple(new_blocks)))
        draft.budget -= num_tokens

    def _make_room(self, request: Request) -> bool:
        """Preempt the newest until there are blocks for ``request``; False if it had to go itself."""
        while self.pool.blocks_for(request.num_tokens) - len(request.block_ids) > self.pool.num_free:
            victim = self._running.pop()
            victim.status = RequestStatus.WAITING
            victim.num_computed = 0
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self._release(victim)
            self._waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []
        self._dropped.append(request.req_id)
