"""The synchronous engine: queues requests, makes steps, returns outputs. One thread calls it.

Two steps are in flight at a time: while the ranks execute step n, step n+1 is already queued on them, planned before
the tokens of step n are known. So the ranks wait for the driver only if it needs longer than a whole step.
:meth:`Engine.step` submits steps until that queue is full, collects the oldest result, finishes what its tokens
finish, fills the queue again, and only then detokenizes and builds outputs.

Scheduling is ``scheduler.py``'s, request checks are ``input_processor.py``'s, text is ``output_processor.py``'s, and
the ranks are behind ``executor/interface.py``. A request that fails affects no other. When a rank fails, the worker
group is restarted (``recovery.py``) and every request continues from its tokens, with the tokens it would have had;
when no restart is left, all requests fail and the engine ends.
"""

from __future__ import annotations

import time
from collections import deque

from runtime.common.config import EngineConfig
from runtime.common.errors import EngineClosedError, EngineError, LockstepError, RankError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import StepResult
from runtime.engine.block_pool import BlockPool
from runtime.engine.input_processor import InputProcessor
from runtime.engine.output_processor import OutputProcessor
from runtime.engine.recovery import RestartPolicy
from runtime.engine.request import GenerateRequest, RequestOutput
from runtime.engine.scheduler import Scheduler
from runtime.engine.stats import EngineSnapshot, EngineStats, take_snapshot
from runtime.executor.interface import MAX_OUTSTANDING, Executor
from runtime.text.tokenizer import Tokenizer

MODEL_STATS = ("prepare", "forward", "sample")
"""Names of rank 0's own times in a step's result."""


class Engine:
    """Continuous batching over one worker group.

    Args:
        config: resolved: nothing in it is "auto".
        model_config: the model's configuration.
        tokenizer: None where only token ids are wanted; stop strings are refused then.
        executor: a group that is ready for steps. The engine restarts and closes it, but does not start it.
        num_kv_blocks: KV blocks on every rank.

    Attributes:
        failure: the error that ended the engine; None while it runs.
        input_processor: checks requests; may be called from any thread.
        max_num_seqs: most sequences that can run at once.
        scheduler: waiting and running sequences, KV blocks in use.
        stats: counters; other threads read a :meth:`snapshot`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        executor: Executor,
        num_kv_blocks: int,
    ) -> None:
        if config.max_model_len is None:
            raise EngineError("the engine takes a resolved config; pass it through runtime.common.config.resolve first")
        self.failure: LockstepError | None = None
        self.input_processor = InputProcessor(config, model_config, has_tokenizer=tokenizer is not None)
        self.max_num_seqs = config.max_num_seqs
        self.scheduler = Scheduler(
            BlockPool(num_kv_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.stats = EngineStats()
        self._max_model_len = config.max_model_len
        self._tokenizer = tokenizer
        self._outputs = OutputProcessor(tokenizer, frozenset(model_config.eos_token_ids), self.scheduler, self.stats)
        self._executor = executor
        self._restart_policy = RestartPolicy(executor, config.max_restarts)
        self._num_sequences = 0
        self._in_flight: deque[tuple[int, float]] = deque()  # Tokens of each in-flight step, and when it was submitted.
        self._last_result = 0.0

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._outputs.states)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do: an unfinished request, or a step in flight for finished ones."""
        return bool(self._outputs.states or self._in_flight)

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt plus output of a request, by the model's length and by the KV cache."""
        pool = self.scheduler.pool
        return min(self._max_model_len, pool.num_blocks * pool.block_size + 1)

    # ---- requests

    def add(self, request: GenerateRequest, *, processed: bool = False) -> int:
        """Queue a request; returns the number that its outputs carry.

        Args:
            request: what to generate.
            processed: whether ``request`` was returned by :attr:`input_processor`, e.g. in the client's thread.

        Raises:
            RequestError: it can never run, e.g. it does not fit the KV cache. Nothing was queued.
            EngineError: the engine has ended.
        """
        self._check_alive()
        if not processed:
            request = self.input_processor.process(request)
        req_id = self.stats.requests
        state = self.input_processor.make_state(request, req_id=req_id, first_seq_id=self._num_sequences)
        for sequence in state.sequences:
            self.scheduler.add(sequence)  # All n need the same blocks, so either the first is refused or none.
        self._outputs.add(state)
        self._num_sequences += len(state.sequences)
        self.stats.requests += 1
        self.stats.prompt_tokens += len(request.prompt_token_ids)
        return req_id

    def abort(self, req_id: int) -> RequestOutput | None:
        """Finish a request and free its KV blocks; returns its last output, or None if it is unknown or finished."""
        state = self._outputs.states.get(req_id)
        return None if state is None else self._outputs.abort(state)

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Make one step; returns an output for every request that has something new.

        The list may be empty, e.g. while prompts are computed, or after the worker group was restarted. If no restart
        is left, it has every unfinished request with ``finish_reason`` "error" and the engine has ended:
        :attr:`failure` is set, and later calls raise it.

        Raises:
            EngineError: the engine has ended.
        """
        self._check_alive()
        try:
            try:
                self._step()
            except LockstepError as error:
                self._fail(error)
            return self._outputs.make_outputs()
        except BaseException as error:
            self._abandon(error)
            raise

    def wait(self, wakeup: int, timeout: float | None = None) -> bool:
        """While there is no work: sleep until file descriptor ``wakeup`` is readable; returns whether it is.

        A rank that dies meanwhile is noticed, and the group is restarted.

        Raises:
            EngineError: the engine has ended, perhaps now.
        """
        self._check_alive()
        try:
            return self._executor.wait(wakeup, timeout)
        except RankError as error:
            try:
                self._recover(error)
            except LockstepError as final:
                self._fail(final)
                raise
            return False
        except LockstepError as error:
            self._fail(error)
            raise

    def _step(self) -> None:
        """Advance the in-flight steps by one result. The order matters: see the module's docstring."""
        started = time.thread_time()
        self._submit_steps()
        if self._in_flight:
            result = self._collect()
            if result is not None:
                self._outputs.apply_tokens(result, self.scheduler.update(result))
                self._submit_steps()
        elif self._outputs.states and not self._outputs.has_updates:
            raise EngineError(f"internal error: {len(self._outputs.states)} unfinished requests, none schedulable")
        self.stats.driver_seconds += time.thread_time() - started

    def _submit_steps(self) -> None:
        """Submit plans until enough are in flight or there is nothing to schedule."""
        while len(self._in_flight) < MAX_OUTSTANDING:
            plan = self.scheduler.schedule()
            if plan is None:
                return
            try:
                self._executor.submit(plan)
            except RankError as error:
                self._recover(error)  # The plan is lost with the group; the next one starts from the tokens.
                continue
            self._in_flight.append((plan.num_tokens, time.perf_counter()))
            if plan.new:
                self._outputs.mark_scheduled(new.req_id for new in plan.new)

    def _collect(self) -> StepResult | None:
        """The oldest plan's result; None if the group was restarted instead."""
        try:
            result = self._executor.collect()
        except RankError as error:
            self._recover(error)
            return None
        num_tokens, sent = self._in_flight.popleft()
        now, stats = time.perf_counter(), self.stats
        stats.steps += 1
        stats.step_seconds += now - max(sent, self._last_result)  # Queueing behind another step costs no time.
        stats.model_seconds += sum(result.stats.get(name, 0.0) for name in MODEL_STATS)
        stats.computed_tokens += num_tokens
        self._last_result = now
        return result

    # ---- failure and end

    def _recover(self, error: RankError) -> None:
        """Restart the failed group and queue every sequence again. Raises the error that ends the engine instead."""
        self._in_flight.clear()
        num_kv_blocks = self._restart_policy.restart(error, len(self._outputs.states))
        self.stats.restarts += 1
        for sequence, refusal in self.scheduler.reset(BlockPool(num_kv_blocks, self.scheduler.pool.block_size)):
            why = f"the worker group came back from a failure with a smaller KV cache: {refusal}"
            self._outputs.finish_sequence(sequence, "error", why)

    def _fail(self, error: LockstepError) -> None:
        """End the engine and every request with ``error``."""
        self.failure = error
        self._in_flight.clear()
        self._outputs.finish_all("error", str(error))

    def _abandon(self, error: BaseException) -> None:
        """End the engine after Ctrl-C or an internal error within a step: results of in-flight steps are not read."""
        self._in_flight.clear()
        if isinstance(error, Exception):
            why = f"internal error in the engine: {type(error).__name__}: {error}; make a new engine"
        else:
            why = "a step was interrupted, which ended the engine; make a new engine"
        self.failure = self.failure or EngineError(why)

    def close(self) -> None:
        """Abort all requests, close the executor and the tokenizer. May be called twice."""
        for req_id in list(self._outputs.states):
            self.abort(req_id)
        self._in_flight.clear()
        self.failure = self.failure or EngineClosedError("this engine was closed; make a new engine")
        self._executor.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # It is raised again and again; its traceback must not grow.

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges at this moment. Cheap, and safe to call from any thread."""
        return take_snapshot(self.stats, self.scheduler, self.failure)
