"""The engine: takes prompts, makes steps, gives outputs. One thread calls it.

Two plans are under way at a time: while the ranks carry out one, the next lies at their door, made before the tokens
of the first are known. So the ranks wait for the driver only if it needs longer than a whole step. A call of
:meth:`Engine.step` fills that queue, takes the oldest result, ends what its tokens end, fills the queue again, and
only then makes text and outputs.

The engine decides what is a valid request and when it is over; who runs when is ``scheduler.py``'s, what ranks do is
behind ``executor.py``. Requests fail one by one. When a rank fails, the group is started again and every request goes
on from the tokens it has, with the tokens it would have had; when that is used up, they all fail and the engine ends.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque

from runtime.common.config import EngineConfig
from runtime.common.errors import EngineClosedError, EngineError, InputError, LockstepError, RankError, RequestError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import StepResult
from runtime.engine.block_pool import BlockPool
from runtime.engine.input_processor import CheckedRequest, RequestLimits
from runtime.engine.output_processor import PromptState, SampleState
from runtime.engine.request import Request, RequestOutput, Transcript, derive_seed
from runtime.engine.scheduler import Scheduler
from runtime.engine.stats import EngineSnapshot, EngineStats
from runtime.executor.interface import MAX_OUTSTANDING, Executor
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger("lockstep")

RESTART_WINDOW_SECONDS = 600.0
"""So long a failure counts against ``EngineConfig.max_restarts``."""

MODEL_STATS = ("prepare", "forward", "sample")
"""What rank 0 reports as its own time for a step."""


class Engine:
    """Continues prompts over one worker group.

    Args:
        config: resolved: nothing in it is "auto".
        model_config: what the checkpoint says.
        tokenizer: makes text of tokens; None where only token ids are wanted (stop strings are refused then).
        executor: a group that is ready for steps. The engine does not start it, but restarts and closes it.
        num_kv_blocks: KV blocks that every rank has.

    Attributes:
        failure: the error that ended the engine; None while it is well.
        limits: makes of a prompt and its parameters what :meth:`add` takes; any thread may ask.
        scheduler: requests waiting and running, KV blocks used.
        stats: see :class:`~runtime.engine.stats.EngineStats`; other threads take a :meth:`snapshot`.
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
        self.scheduler = Scheduler(
            BlockPool(num_kv_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.stats = EngineStats()
        self._config = config
        self._max_model_len = config.max_model_len
        self.limits = RequestLimits.of(config, model_config, has_tokenizer=tokenizer is not None)
        self._eos_token_ids = frozenset(model_config.eos_token_ids)
        self._tokenizer = tokenizer
        self._executor = executor
        self._prompts: dict[int, PromptState] = {}
        self._samples: dict[int, tuple[PromptState, SampleState]] = {}
        self._touched: dict[int, PromptState] = {}  # Prompts with something to report.
        self._num_samples = 0
        self._in_flight: deque[tuple[int, float]] = deque()  # Tokens of each outstanding plan, and when it was sent.
        self._last_result = 0.0
        self._failures: list[float] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether there is a request that has not ended."""
        return bool(self._prompts)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do: a request, or a plan under way for requests that have ended."""
        return bool(self._prompts or self._in_flight)

    @property
    def max_num_seqs(self) -> int:
        """Most samples that can run at once."""
        return self._config.max_num_seqs

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt + output a request can have here, by the model's length and by the KV cache."""
        pool = self.scheduler.pool
        return min(self._max_model_len, pool.num_blocks * pool.block_size + 1)

    # ---- requests

    def add(self, checked: CheckedRequest, *, final_only: bool = False) -> int:
        """Queue a request; gives the number that its outputs carry.

        Args:
            checked: from :attr:`limits`. Without a seed of its own, one is made of the config's seed and of how many
                requests came before.
            final_only: whether only the last output is wanted, which spares the work for the others.

        Raises:
            RequestError: it can never fit the KV cache. Nothing was queued.
            EngineError: the engine has ended.
        """
        self._check_alive()
        params, token_ids = checked.params, checked.token_ids
        req_id = self.stats.requests
        seed = derive_seed(self._config.seed, req_id) if params.seed is None else params.seed
        salt = self._salt(req_id, checked)
        entry = PromptState(req_id, token_ids, checked.prompt, time.monotonic())
        entry.final_only = final_only and not params.stop  # A stop string is found in the text alone.
        entry.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        for index in range(params.n):
            # The first of n samples is the one that n = 1 would give, and tells the others about the prompt.
            changes = {"n": 1, "seed": derive_seed(seed, index), "prompt_logprobs": None} if index else {"seed": seed}
            own = dataclasses.replace(params, **{"n": 1, **changes})
            request = Request(self._num_samples + index, token_ids, own, priority=checked.priority, cache_salt=salt)
            request.leader = entry.samples[0].request if index else None
            self.scheduler.add(request)  # All n need the same room, so either the first is refused or none.
            transcript = Transcript(logprobs=None if params.logprobs is None else [])
            entry.samples.append(SampleState(index, request, transcript))
        self._num_samples += params.n
        self._prompts[req_id] = entry
        self._samples.update({sample.request.req_id: (entry, sample) for sample in entry.samples})
        self.stats.requests += 1
        self.stats.prompt_tokens += len(token_ids)
        return req_id

    def _salt(self, req_id: int, checked: CheckedRequest) -> bytes | None:
        """Whose KV blocks a request may share: without prefix caching nobody's, but the samples of one prompt do."""
        if self._config.enable_prefix_caching:
            return checked.cache_salt.encode("utf-8", "surrogatepass")
        return req_id.to_bytes(8, "little") if checked.params.n > 1 else None

    def abort(self, req_id: int) -> RequestOutput | None:
        """End a request and free its KV blocks; gives its last output, or None if it has ended or never was."""
        entry = self._prompts.get(req_id)
        if entry is None:
            return None
        self._end(entry, "abort")
        del self._touched[req_id]
        return self._report(entry)

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Make one step; gives an output for every request that has something new.

        There may be none, e.g. while prompts are computed, or after the worker group was started again. If that is
        not to be, every unfinished request is given with ``finish_reason`` "error" and the engine has ended:
        :attr:`failure` is set, and later calls raise it.

        Raises:
            EngineError: the engine has ended.
        """
        self._check_alive()
        try:
            try:
                self._advance()
            except LockstepError as error:
                self._fail(error)
            return self._reports()
        except BaseException as error:
            self._abandon(error)
            raise

    def wait(self, wakeup: int, timeout: float | None = None) -> bool:
        """While there is no work: sleep until file descriptor ``wakeup`` is readable; whether it is.

        A rank that dies meanwhile is noticed, and the group is started again.

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

    def _advance(self) -> None:
        """Carry the plans forward by one result. The order is the point: see the module's docstring."""
        started = time.thread_time()
        self._fill()
        if self._in_flight:
            result = self._collect()
            if result is not None:
                self._take(result)
                self._fill()
        elif self._prompts and not self._touched:
            raise EngineError(f"a bug: {len(self._prompts)} requests have not ended, but there is nothing to compute")
        self.stats.driver_seconds += time.thread_time() - started

    def _fill(self) -> None:
        """Send plans until enough are under way or there is nothing to plan."""
        while len(self._in_flight) < MAX_OUTSTANDING:
            plan = self.scheduler.schedule()
            if plan is None:
                return
            try:
                self._executor.submit(plan)
            except RankError as error:
                self._recover(error)  # The plan is lost with the group; the next one begins anew.
                continue
            self._in_flight.append((plan.num_tokens, time.perf_counter()))
            if plan.new:
                now = time.monotonic()
                for new in plan.new:
                    entry, _ = self._samples[new.req_id]
                    entry.scheduled = entry.scheduled or now

    def _collect(self) -> StepResult | None:
        """The oldest plan's result; None if the group had to be started again."""
        try:
            result = self._executor.collect()
        except RankError as error:
            self._recover(error)
            return None
        num_tokens, sent = self._in_flight.popleft()
        now, stats = time.perf_counter(), self.stats
        stats.steps += 1
        stats.step_seconds += now - max(sent, self._last_result)  # A plan that waits for another one costs nothing.
        stats.model_seconds += sum(result.stats.get(name, 0.0) for name in MODEL_STATS)
        stats.computed_tokens += num_tokens
        self._last_result = now
        return result

    def _take(self, result: StepResult) -> None:
        """Hand out new tokens, and end at once what they end, so that the next plan leaves it out."""
        now = time.monotonic()
        updates = self.scheduler.update(result)
        for part in result.prompt_logprobs:
            if (found := self._samples.get(part.req_id)) is not None:
                found[0].take_prompt_logprobs(part)
        for request, token in updates:
            entry, sample = self._samples[request.req_id]
            self._touched[entry.req_id] = entry
            reason = sample.take(token, self._eos_token_ids)
            if token.error:
                self.stats.broken += token.broken
            else:
                self.stats.generated_tokens += 1
                entry.first_token = entry.first_token or now
            if reason is not None:
                self._release(sample)

    def _release(self, sample: SampleState) -> None:
        """Take an ended sample from the scheduler: its KV blocks are free, tokens that still come are ignored."""
        if self._samples.pop(sample.request.req_id, None) is not None:
            self.scheduler.finish(sample.request)

    def _end(self, entry: PromptState, reason: str, error: str = "") -> None:
        """End every sample of a prompt that has not ended."""
        for sample in entry.samples:
            if sample.finish_reason is None:
                sample.end(reason, error)
                self._release(sample)
        self._touched[entry.req_id] = entry

    def _reports(self) -> list[RequestOutput]:
        """The outputs of all prompts that have something new."""
        touched, self._touched = self._touched, {}
        return [self._report(entry) for entry in touched.values() if not entry.final_only or entry.finished]

    def _report(self, entry: PromptState) -> RequestOutput:
        """Make the text of what was taken, end what a stop string ends, and give what is new."""
        for sample in entry.samples:
            if sample.closed:
                continue
            try:
                sample.read(self._tokenizer, entry.token_ids)
            except Exception as error:  # Whatever a tokenizer does with these tokens is this request's problem alone.
                log.exception("the tokens of request %d cannot be made text", entry.req_id)
                sample.end("error", f"its tokens cannot be made text: {type(error).__name__}: {error}")
            if sample.finish_reason is not None:
                self._release(sample)
                sample.closed = True
                self.stats.finished[sample.finish_reason] += 1
        output = entry.output()
        if output.finished:
            del self._prompts[entry.req_id]
        return output

    # ---- failure and end

    def _recover(self, error: RankError) -> None:
        """Start the failed group again and queue everything anew. Raises the error that ends the engine instead."""
        self._in_flight.clear()
        refused = ""
        while True:
            now = time.monotonic()
            recent = [at for at in self._failures if now - at < RESTART_WINDOW_SECONDS]
            if len(recent) >= self._config.max_restarts:
                if recent:
                    log.error(
                        "the worker group failed %d times within %g s: no more restarts (--max-restarts is %d)",
                        len(recent) + 1,
                        RESTART_WINDOW_SECONDS,
                        self._config.max_restarts,
                    )
                raise error
            self._failures = [*recent, now]
            log.error("%s", error)
            number, allowed = len(self._failures), self._config.max_restarts
            log.warning("restart %d of %d; %d requests will go on", number, allowed, len(self._prompts))
            try:
                num_kv_blocks = self._executor.restart()
                break
            except RankError as again:
                error = again
            except (InputError, EngineClosedError) as refusal:
                raise error from refusal  # Trying again would not help.
            except LockstepError as refusal:
                if str(refusal) == refused:
                    raise error from refusal  # E.g. a launcher that starts every rank but once.
                refused = str(refusal)
                log.error("the worker group could not be restarted: %s", refused)
        self._start_over(num_kv_blocks)

    def _start_over(self, num_kv_blocks: int) -> None:
        """Every request that has not ended waits again, for a group that knows of none."""
        self.stats.restarts += 1
        self.scheduler.reset(BlockPool(num_kv_blocks, self._config.block_size))
        for entry, sample in list(self._samples.values()):
            try:
                self.scheduler.check(sample.request)
            except RequestError as error:
                sample.end("error", f"the worker group came back from a failure with a smaller KV cache: {error}")
                self._release(sample)
                self._touched[entry.req_id] = entry

    def _fail(self, error: LockstepError) -> None:
        """The engine has ended, and so has every request."""
        self.failure = error
        self._in_flight.clear()
        for entry in list(self._prompts.values()):
            self._end(entry, "error", str(error))

    def _abandon(self, error: BaseException) -> None:
        """A step ended by Ctrl-C or a bug: plans may be under way whose answers nobody reads. No step can follow."""
        self._in_flight.clear()
        if isinstance(error, Exception):
            why = f"the engine has a bug and cannot go on ({type(error).__name__}: {error}); make a new one"
        else:
            why = "a step was interrupted, so the engine cannot go on; make a new one"
        self.failure = self.failure or EngineError(why)

    def close(self) -> None:
        """Abort everything, end the executor and the tokenizer's helper. May be called twice."""
        for req_id in list(self._prompts):
            self.abort(req_id)
        self._in_flight.clear()
        self.failure = self.failure or EngineClosedError("this engine was closed; make a new one")
        self._executor.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # It is raised again and again; its traceback must not grow.

    # ---- metrics

    def snapshot(self) -> EngineSnapshot:
        """How things stand. Cheap, and safe to call from any thread."""
        scheduler, pool, failure = self.scheduler, self.scheduler.pool, self.failure
        counts = {name: getattr(self.stats, name) for name in _COUNTS}
        return EngineSnapshot(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=pool.num_used / pool.num_blocks,
            prefix_queried_tokens=pool.queried_tokens,
            prefix_hit_tokens=pool.hit_tokens,
            preemptions=scheduler.num_preemptions,
            finished=dict(self.stats.finished),
            failure="" if failure is None else str(failure),
            **counts,
        )


_COUNTS = tuple(field.name for field in dataclasses.fields(EngineStats) if field.name != "finished")
