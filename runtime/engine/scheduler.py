"""Continuous batching: which requests run in the next step, and how many of each one's tokens.

``schedule`` makes a plan, ``update`` takes its result. ``schedule`` never looks at a sampled token, so the plan of step
n + 1 can be made while step n runs. Which blocks are free or hold what is ``block_pool.py``'s; when a request has ended
is ``engine.py``'s, which then calls ``finish``.

The policy. Requests are ordered by priority, those of one priority by arrival; "first" and "last" mean this order:

- Every running request that has one token to compute (decode) gets it. Requests with more (prefill) and those that
  wait share the rest of ``max_num_batched_tokens``, first ones first, so a long prompt is computed in chunks beside
  the decodes.
- A waiting request starts once there are blocks for all its known tokens and one more for each running request, so
  that it is not thrown out again by their next tokens. Nobody overtakes the first waiting one, except while it waits
  for the sample that computes its prompt.
- When a decode needs a block and none is free, it stands still if somebody's last token is on its way. Otherwise the
  last running request gives up all of its blocks (preemption): it waits again and is computed again from its tokens.
  So the first running request, which fits the cache alone, always advances; and since nobody starts before the first
  waiting one, that one's turn comes. Nobody is thrown out for somebody who waits: a better priority is the next to
  start, it has no right to run at once.

Prefix cache: full blocks are offered under the hash of their tokens when a plan that computes them is made. Plans run
in order, and within a step every layer writes all keys and values before it reads any, so from then on every plan, even
the same one, may use them; it makes no difference that the request which fills them is preempted or ends before the
plan has run. A block with sampled tokens has no hash before they came back. Nobody writes into a shared block: only
full blocks are shared, and a request's next token always goes behind them.

Everything follows from the calls made; there is no clock and no chance in here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from runtime.common.errors import ProtocolError, RequestError
from runtime.common.protocol import NewRequest, SampledToken, ScheduledRequest, StepPlan, StepResult
from runtime.engine.block_pool import BlockPool
from runtime.engine.prefix_cache import extend_hashes
from runtime.engine.request import Request, RequestStatus

_order = attrgetter("order")


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
        """``max_num_batched_tokens`` is at least ``max_num_seqs``, so that every running request can get a token."""
        self.pool = pool
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[Request] = []  # Both are kept in order.
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
        self.check(request)
        insort(self._waiting, request, key=_order)

    def check(self, request: Request) -> None:
        """Whether the KV cache can hold a request when it runs alone; to be asked of each again after :meth:`reset`.

        Raises:
            RequestError: it cannot.
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

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is; its blocks are free at once, workers hear of it with the next plan."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._release(request)
        elif request.status is RequestStatus.WAITING:
            del self._waiting[self._waiting.index(request, bisect_left(self._waiting, request.order, key=_order))]
        request.status = RequestStatus.FINISHED

    def schedule(self) -> StepPlan | None:
        """The next plan, or None if there is nothing to compute."""
        draft = _Draft(self._max_num_batched_tokens)
        preemptions = self.num_preemptions
        prefills: deque[Request] = deque()
        for request in list(self._running):
            uncomputed = request.num_uncomputed
            if uncomputed > 1:
                prefills.append(request)
            elif uncomputed and request.status is RequestStatus.RUNNING and self._make_room(request):
                self._schedule(request, 1, draft)
        # Where blocks were just taken from somebody, nobody starts: least of all he himself, in this very plan.
        self._fill(draft, prefills, may_admit=self.num_preemptions == preemptions)
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
                if token.error:
                    # What it computed is not to be trusted, and nobody else shall fail with it.
                    self.pool.forget(request.block_hashes)
                else:
                    request.output_token_ids.append(token.token_id)
                    self._offer(request)
                updated.append((request, token))
        return updated

    def reset(self, pool: BlockPool) -> None:
        """Begin again over a worker group that was just restarted and knows nothing: every request waits, in order.

        Plans without a result are forgotten, so their tokens are sampled again; step ids go on counting. A smaller
        pool may not hold every request any more: the caller asks :meth:`check` of each and finishes those that fail,
        before the next plan.

        Args:
            pool: a new one. Its counters go on from the old one's.
        """
        pool.queried_tokens += self.pool.queried_tokens
        pool.hit_tokens += self.pool.hit_tokens
        pool.evictions += self.pool.evictions
        self.pool = pool
        self._waiting = sorted([*self._running, *self._waiting], key=_order)
        self._running = []
        self._dropped = []
        self._outstanding.clear()
        for request in self._waiting:
            request.num_pending = 0
            self._make_wait(request)

    def _fill(self, draft: _Draft, prefills: deque[Request], *, may_admit: bool) -> None:
        """Give what the decodes left of the plan to prefills, if they still run, and to waiting requests, in order."""
        index = 0  # Of the first waiting request that was not passed by.
        while draft.budget > 0:
            waiting = self._waiting[index] if may_admit and index < len(self._waiting) else None
            if prefills and (waiting is None or prefills[0].order < waiting.order):
                request = prefills.popleft()
                if request.status is RequestStatus.RUNNING:
                    self._schedule(request, min(request.num_uncomputed, draft.budget), draft)
            elif waiting is None:
                return
            elif waiting.waits_for_leader:
                index += 1
            elif (hits := self._room_for(waiting)) is None:
                may_admit = False
            else:
                del self._waiting[index]
                self._start(waiting, hits, draft)

    def _room_for(self, request: Request) -> list[int] | None:
        """The cached blocks a request would start with, perhaps none; None if it cannot start now."""
        if request.num_pending or len(self._running) >= self._max_num_seqs:
            return None  # A preempted request whose last token is still on its way cannot be described to the workers.
        pool, hits = self.pool, self._find(request)
        # Blocks that somebody holds are there already; those that nobody holds are about to be held, and count.
        needed = pool.blocks_for(request.num_tokens) - len(hits) + pool.count_free(hits)
        return hits if needed + len(self._running) <= pool.num_free else None

    def _start(self, request: Request, hits: list[int], draft: _Draft) -> None:
        """Make a request run that begins with the blocks ``hits``."""
        insort(self._running, request, key=_order)
        request.status = RequestStatus.RUNNING
        # Shared before anything is allocated: an eviction could take them otherwise.
        self.pool.share(hits)
        request.block_ids = list(hits)
        request.num_offered = len(hits)
        request.num_computed = len(hits) * self.pool.block_size
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached = request.num_computed
            if _may_take(request):
                self.pool.queried_tokens += len(request.prompt_token_ids)
                self.pool.hit_tokens += request.num_cached
        known, num_prompt = (*request.prompt_token_ids, *request.output_token_ids), len(request.prompt_token_ids)
        draft.new.append(NewRequest(request.req_id, known, num_prompt, request.sampling, request.num_computed))
        self._schedule(request, min(request.num_uncomputed, draft.budget), draft, hits)

    def _schedule(self, request: Request, num_tokens: int, draft: _Draft, shared: Sequence[int] = ()) -> None:
        """Put ``num_tokens`` more of a request into the plan, with the blocks that all its known tokens need.

        ``shared`` are blocks it has got already, and the workers have not heard of.
        """
        known = request.num_tokens
        missing = self.pool.blocks_for(known) - len(request.block_ids)
        new_blocks = self.pool.allocate(missing) if missing else []
        request.block_ids.extend(new_blocks)
        request.num_computed += num_tokens
        self._offer(request)
        if request.num_computed == known:
            request.num_pending += 1
            draft.sampled.append(request)
        draft.scheduled.append(ScheduledRequest(request.req_id, num_tokens, (*shared, *new_blocks)))
        draft.budget -= num_tokens

    def _make_room(self, request: Request) -> bool:
        """Preempt the last until there are blocks for ``request``; False if it had to go itself, or has to stand still.

        Nobody goes who is in the plan already: those are decodes before ``request``.
        """
        while self.pool.blocks_for(request.num_tokens) - len(request.block_ids) > self.pool.num_free:
            if any(other.num_uncomputed == 0 for other in self._running):
                # One whose last token is on its way gives up its blocks with it, a step or two from now: cheaper to
                # wait for than to compute somebody again. Nobody starts before that, as no block is free.
                return False
            victim = self._running.pop()
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self._release(victim)
            self._make_wait(victim)
            insort(self._waiting, victim, key=_order)
            if victim is request:
                return False
        return True

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        self._dropped.append(request.req_id)
        request.block_ids = []

    def _make_wait(self, request: Request) -> None:
        """Let a request begin again from its tokens; whoever holds its blocks, it does not."""
        request.status = RequestStatus.WAITING
        request.block_ids = []
        request.num_computed = 0
        request.num_offered = 0

    def _find(self, request: Request) -> list[int]:
        """The blocks that a request's tokens begin with, as far as they are in the cache; never all of its tokens."""
        if not _may_take(request):
            return []
        # The last token is always computed, since the next one is sampled from what that gives.
        count = (request.num_known - 1) // self.pool.block_size
        extend_hashes(request, count, self.pool.block_size)
        return self.pool.find(request.block_hashes[:count])

    def _offer(self, request: Request) -> None:
        """Let others find the blocks that are full of known tokens once the plans made so far have run."""
        if request.cache_salt is None:
            return
        count = min(request.num_computed, request.num_known) // self.pool.block_size
        if count > request.num_offered:
            extend_hashes(request, count, self.pool.block_size)
            for index in range(request.num_offered, count):
                self.pool.offer(request.block_ids[index], request.block_hashes[index])
            request.num_offered = count


def _may_take(request: Request) -> bool:
    """Whether a request may begin with blocks that another one computed."""
    # Log-probabilities of the prompt come from computing every token of it.
    return request.cache_salt is not None and request.sampling.prompt_logprobs is None
