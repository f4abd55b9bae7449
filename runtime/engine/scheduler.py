"""Continuous batching scheduler: which sequences run in the next step, and how many tokens of each.

``schedule`` returns the scheduler output, a :class:`~runtime.common.protocol.StepPlan`; ``update`` applies its result.
``schedule`` never reads a sampled token, so the plan of step n+1 is made while step n runs. Free and cached blocks are
``block_pool.py``'s; ``engine.py`` decides when a sequence is finished and then calls ``finish``.

Policy. Sequences are ordered by priority, within a priority by arrival; "first" and "last" mean this order:

- Every running sequence with one token to compute (decode) gets it. Sequences with more (prefill) and waiting sequences
  share the rest of ``max_num_batched_tokens``, first ones first, so a long prompt is computed in chunks beside the
  decodes.
- A waiting sequence is admitted if there are blocks for all its known tokens and one more for each running sequence, so
  that their next tokens do not preempt it again. No sequence overtakes the first waiting one, except while that one
  waits for its parent to compute the prompt.
- When a decode needs a block and none is free, it stalls while another sequence's last token is in flight. Otherwise
  the last running sequence is preempted: it gives up all of its blocks, waits again, and is recomputed from its tokens.
  So the first running sequence, which fits the cache alone, always advances; and since no sequence is admitted before
  the first waiting one, that one is admitted eventually. A waiting sequence never preempts a running one: a better
  priority is the next to be admitted.

Prefix cache: full blocks are cached under the hash of their tokens when a plan that computes them is made. Plans run
in order, and within a step every layer writes all keys and values before it reads any, so from then on every plan, even
the same one, may use them; preemption or the end of the sequence that fills them does not matter. A block with sampled
tokens has no hash before those came back. Shared blocks are never written: only full blocks are shared, and a
sequence's next token always goes behind them.

Everything follows from the calls made; neither a clock nor randomness is used.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from runtime.common.errors import ProtocolError, RequestError
from runtime.common.protocol import NewRequest, SampledToken, ScheduledRequest, StepPlan, StepResult
from runtime.engine.block_pool import BlockPool, extend_hashes
from runtime.engine.request import SequenceState, SequenceStatus

_order = attrgetter("order")


@dataclass(slots=True)
class _PlanBuilder:
    """The plan under construction; ``budget`` is in tokens."""

    budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list[ScheduledRequest])
    new: list[NewRequest] = field(default_factory=list[NewRequest])
    sampled: list[SequenceState] = field(default_factory=list[SequenceState])


class Scheduler:
    """Waiting and running sequences, and the plans for them.

    Attributes:
        pool: the KV blocks.
        num_preemptions: preemptions since the start.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """``max_num_batched_tokens`` is at least ``max_num_seqs``, so that every running sequence can get a token."""
        self.pool = pool
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[SequenceState] = []  # Both are sorted by order.
        self._running: list[SequenceState] = []
        self._dropped: list[int] = []
        self._in_flight: deque[tuple[int, list[SequenceState]]] = deque()
        self._last_step = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without KV blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with KV blocks."""
        return len(self._running)

    def add(self, sequence: SequenceState) -> None:
        """Queue a new sequence.

        Raises:
            RequestError: the KV cache cannot hold it even alone.
        """
        self.check(sequence)
        insort(self._waiting, sequence, key=_order)

    def check(self, sequence: SequenceState) -> None:
        """Check that the KV cache can hold a sequence that runs alone.

        Raises:
            RequestError: it cannot.
        """
        prompt, output = len(sequence.prompt_token_ids), sequence.sampling.max_tokens
        # The last token is returned and never computed, so it needs no slot.
        needed, existing = self.pool.blocks_for(prompt + output - 1), self.pool.num_blocks
        if needed > existing:
            capacity = existing * self.pool.block_size
            raise RequestError(
                f"a prompt of {prompt} tokens with max_tokens {output} needs {needed} KV blocks of "
                f"{self.pool.block_size} tokens, the KV cache has {existing}; ask for at most {capacity + 1} tokens in "
                "all (a smaller max_tokens, a shorter prompt), or raise --kv-cache-memory or --gpu-memory-utilization"
            )

    def finish(self, sequence: SequenceState) -> None:
        """Remove a sequence in any state; its blocks are free at once, the next plan drops it on the ranks."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._release(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            del self._waiting[self._waiting.index(sequence, bisect_left(self._waiting, sequence.order, key=_order))]
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> StepPlan | None:
        """The next plan, or None if there is nothing to compute."""
        builder = _PlanBuilder(self._max_num_batched_tokens)
        preemptions = self.num_preemptions
        prefills: deque[SequenceState] = deque()
        for sequence in list(self._running):
            uncomputed = sequence.num_uncomputed
            if uncomputed > 1:
                prefills.append(sequence)
            elif uncomputed and sequence.status is SequenceStatus.RUNNING and self._ensure_blocks(sequence):
                self._schedule(sequence, 1, builder)
        # After a preemption, no sequence is admitted in this step, least of all the preempted one.
        self._schedule_rest(builder, prefills, may_admit=self.num_preemptions == preemptions)
        if not builder.scheduled:
            return None
        self._last_step += 1
        self._in_flight.append((self._last_step, builder.sampled))
        plan = StepPlan(self._last_step, tuple(builder.scheduled), tuple(builder.new), tuple(self._dropped))
        self._dropped = []
        return plan

    def update(self, result: StepResult) -> list[tuple[SequenceState, SampledToken]]:
        """Apply the result of the oldest in-flight plan; returns the tokens of sequences that are not finished.

        Raises:
            ProtocolError: it is the result of another plan.
        """
        step_id, sampled = self._in_flight[0] if self._in_flight else (None, [])
        tokens = {token.req_id: token for token in result.tokens}
        if result.step_id != step_id or tokens.keys() != {sequence.seq_id for sequence in sampled}:
            raise ProtocolError(
                f"the result of step {result.step_id} with tokens for requests {sorted(tokens)} came where that of "
                f"step {step_id} for {sorted(sequence.seq_id for sequence in sampled)} was due"
            )
        self._in_flight.popleft()
        updated: list[tuple[SequenceState, SampledToken]] = []
        for sequence in sampled:
            sequence.num_in_flight_tokens -= 1
            if sequence.status is not SequenceStatus.FINISHED:
                token = tokens[sequence.seq_id]
                if token.error:
                    # The content of its blocks is not trustworthy: no other sequence may reuse them.
                    self.pool.evict(sequence.block_hashes)
                else:
                    sequence.output_token_ids.append(token.token_id)
                    _cache_blocks(self.pool, sequence)
                updated.append((sequence, token))
        return updated

    def reset(self, pool: BlockPool) -> list[tuple[SequenceState, RequestError]]:
        """Queue every sequence again, in order, for a worker group that was just restarted.

        In-flight plans are discarded, so their tokens are sampled again; step ids continue.

        Args:
            pool: a new pool, perhaps smaller. Its counters continue from the old one's.

        Returns:
            Sequences that the new pool cannot hold, with the reasons; the caller finishes them before the next plan.
        """
        pool.queried_tokens += self.pool.queried_tokens
        pool.hit_tokens += self.pool.hit_tokens
        pool.evictions += self.pool.evictions
        self.pool = pool
        self._waiting = sorted([*self._running, *self._waiting], key=_order)
        self._running = []
        self._dropped = []
        self._in_flight.clear()
        for sequence in self._waiting:
            sequence.num_in_flight_tokens = 0
            self._requeue(sequence)
        refused: list[tuple[SequenceState, RequestError]] = []
        for sequence in self._waiting:
            try:
                self.check(sequence)
            except RequestError as error:
                refused.append((sequence, error))
        return refused

    def _schedule_rest(self, builder: _PlanBuilder, prefills: deque[SequenceState], *, may_admit: bool) -> None:
        """Give the rest of the token budget to running prefills and to waiting sequences, in order."""
        index = 0  # Of the first waiting sequence that does not wait for its parent.
        while builder.budget > 0:
            waiting = self._waiting[index] if may_admit and index < len(self._waiting) else None
            if prefills and (waiting is None or prefills[0].order < waiting.order):
                sequence = prefills.popleft()
                if sequence.status is SequenceStatus.RUNNING:
                    self._schedule(sequence, min(sequence.num_uncomputed, builder.budget), builder)
            elif waiting is None:
                return
            elif waiting.waits_for_parent:
                index += 1
            elif (hits := self._admissible_hits(waiting)) is None:
                may_admit = False
            else:
                del self._waiting[index]
                self._admit(waiting, hits, builder)

    def _admissible_hits(self, sequence: SequenceState) -> list[int] | None:
        """The cached blocks a sequence would be admitted with, perhaps none; None if it cannot be admitted now."""
        if sequence.num_in_flight_tokens or len(self._running) >= self._max_num_seqs:
            return None  # A preempted sequence with a token in flight: that token's id is not known for NewRequest.
        pool, hits = self.pool, _lookup(self.pool, sequence)
        # Referenced hits cost nothing; hits without a reference are free blocks that this sequence takes.
        needed = pool.blocks_for(sequence.num_tokens) - len(hits) + pool.count_free(hits)
        return hits if needed + len(self._running) <= pool.num_free else None

    def _admit(self, sequence: SequenceState, hits: list[int], builder: _PlanBuilder) -> None:
        """Admit a sequence whose first blocks are the cached blocks ``hits``."""
        insort(self._running, sequence, key=_order)
        sequence.status = SequenceStatus.RUNNING
        # Before any allocation, which could evict them.
        self.pool.incref(hits)
        sequence.block_ids = list(hits)
        sequence.num_cached_blocks = len(hits)
        sequence.num_computed = len(hits) * self.pool.block_size
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached = sequence.num_computed
            if _uses_prefix_cache(sequence):
                self.pool.queried_tokens += len(sequence.prompt_token_ids)
                self.pool.hit_tokens += sequence.num_cached
        known, num_prompt = (*sequence.prompt_token_ids, *sequence.output_token_ids), len(sequence.prompt_token_ids)
        builder.new.append(NewRequest(sequence.seq_id, known, num_prompt, sequence.sampling, sequence.num_computed))
        self._schedule(sequence, min(sequence.num_uncomputed, builder.budget), builder, hits)

    def _schedule(
        self, sequence: SequenceState, num_tokens: int, builder: _PlanBuilder, shared: Sequence[int] = ()
    ) -> None:
        """Add ``num_tokens`` of a sequence to the plan, with the blocks that all its known tokens need.

        ``shared`` are cached blocks it was admitted with, which the plan has to announce too.
        """
        known = sequence.num_tokens
        missing = self.pool.blocks_for(known) - len(sequence.block_ids)
        new_blocks = self.pool.allocate(missing) if missing else []
        sequence.block_ids.extend(new_blocks)
        sequence.num_computed += num_tokens
        _cache_blocks(self.pool, sequence)
        if sequence.num_computed == known:
            sequence.num_in_flight_tokens += 1
            builder.sampled.append(sequence)
        builder.scheduled.append(ScheduledRequest(sequence.seq_id, num_tokens, (*shared, *new_blocks)))
        builder.budget -= num_tokens

    def _ensure_blocks(self, sequence: SequenceState) -> bool:
        """Preempt last sequences until there are blocks for ``sequence``; False if it was preempted itself, or stalls.

        Sequences that are in the plan are not preempted: those are decodes before ``sequence``.
        """
        while self.pool.blocks_for(sequence.num_tokens) - len(sequence.block_ids) > self.pool.num_free:
            if any(other.num_uncomputed == 0 for other in self._running):
                # A sequence whose last token is in flight frees its blocks within two steps: cheaper to wait for
                # than to recompute a preempted one. No sequence is admitted before, as no block is free.
                return False
            victim = self._running.pop()
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self._release(victim)
            self._requeue(victim)
            insort(self._waiting, victim, key=_order)
            if victim is sequence:
                return False
        return True

    def _release(self, sequence: SequenceState) -> None:
        self.pool.free(sequence.block_ids)
        self._dropped.append(sequence.seq_id)
        sequence.block_ids = []

    def _requeue(self, sequence: SequenceState) -> None:
        """Set a sequence without blocks to be computed again from its tokens."""
        sequence.status = SequenceStatus.WAITING
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.num_cached_blocks = 0


def _uses_prefix_cache(sequence: SequenceState) -> bool:
    """Whether a sequence may reuse blocks that another one computed."""
    # Prompt logprobs require that every prompt token is computed.
    return sequence.cache_salt is not None and sequence.sampling.prompt_logprobs is None


def _lookup(pool: BlockPool, sequence: SequenceState) -> list[int]:
    """Cached blocks of a sequence's prefix, never for all of its tokens."""
    if not _uses_prefix_cache(sequence):
        return []
    # The last token is always computed, since the next one is sampled from what that gives.
    count = (sequence.num_known - 1) // pool.block_size
    extend_hashes(sequence, count, pool.block_size)
    return pool.lookup(sequence.block_hashes[:count])


def _cache_blocks(pool: BlockPool, sequence: SequenceState) -> None:
    """Cache the blocks that are full of known tokens once all plans made so far have run."""
    if sequence.cache_salt is None:
        return
    count = min(sequence.num_computed, sequence.num_known) // pool.block_size
    if count > sequence.num_cached_blocks:
        extend_hashes(sequence, count, pool.block_size)
        for index in range(sequence.num_cached_blocks, count):
            pool.cache(sequence.block_ids[index], sequence.block_hashes[index])
        sequence.num_cached_blocks = count
