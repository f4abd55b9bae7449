"""The engine: takes prompts, makes steps, gives outputs. One thread calls it.

A step is: ask the scheduler for a plan, have the executor carry it out, look at every new token and say which samples
have ended. The engine decides what is a valid request and when it is over; who runs when is ``scheduler.py``'s, what
ranks do is behind ``executor.py``. Requests fail one by one; a failure of the executor fails them all and ends the
engine.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.block_pool import BlockPool
from runtime.config import EngineConfig, SamplingParams
from runtime.errors import EngineClosedError, EngineError, LockstepError, RequestError
from runtime.executor import Executor
from runtime.model_config import ModelConfig
from runtime.protocol import SampledToken
from runtime.request import (
    FINISH_REASONS,
    CompletionOutput,
    Request,
    RequestOutput,
    RequestTimes,
    TokenLogprob,
    Transcript,
    derive_seed,
)
from runtime.scheduler import Scheduler
from runtime.tokenizer import TextStream, Tokenizer


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made, for metrics. Each of ``n`` samples counts its own tokens and its own end.

    Attributes:
        computed_tokens: tokens that went through the model: of prompts, of decodes, and again after preemptions.
        step_seconds: from the moment a plan was sent until its result was there, summed.
        finished: ended samples by finish reason.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))


@dataclass(eq=False, slots=True)
class _Sample:
    """One sample of a prompt: the scheduler's request, what it has produced, and how much of that was reported."""

    index: int
    request: Request
    text: TextStream
    transcript: Transcript = field(default_factory=Transcript)
    finish_reason: str | None = None
    error: str = ""
    reported_tokens: int = 0
    reported_texts: int = 0


@dataclass(eq=False, slots=True)
class _Prompt:
    """What ``add_request`` was called with, and its samples."""

    req_id: int
    token_ids: tuple[int, ...]
    text: str | None
    samples: list[_Sample]
    arrived: float
    first_token: float | None = None


class Engine:
    """Continues prompts over one worker group.

    Args:
        config: resolved: nothing in it is "auto".
        model_config: what the checkpoint says.
        tokenizer: makes text of tokens; None where only token ids are wanted (stop strings are refused then).
        executor: a group that is ready for steps. The engine does not start it, but closes it.
        num_kv_blocks: KV blocks that every rank has.

    Attributes:
        failure: the error that ended the engine; None while it is well.
        scheduler: for metrics: requests waiting and running, KV blocks used, preemptions.
        stats: see :class:`EngineStats`.
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
            raise EngineError("the engine takes a resolved config; pass it through runtime.config.resolve first")
        self.failure: LockstepError | None = None
        self.scheduler = Scheduler(
            BlockPool(num_kv_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.stats = EngineStats()
        self._max_model_len = config.max_model_len
        self._seed = config.seed
        self._vocab_size = model_config.vocab_size
        self._eos_token_ids = frozenset(model_config.eos_token_ids)
        self._tokenizer = tokenizer
        self._executor = executor
        self._prompts: dict[int, _Prompt] = {}
        self._samples: dict[int, tuple[_Prompt, _Sample]] = {}
        self._num_samples = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether there is a request that has not ended."""
        return bool(self._prompts)

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt + output a request can have here, by the model's length and by the KV cache."""
        pool = self.scheduler.pool
        return min(self._max_model_len, pool.num_blocks * pool.block_size + 1)

    def add_request(
        self, prompt_token_ids: Iterable[int], params: SamplingParams | None = None, *, prompt: str | None = None
    ) -> int:
        """Queue a prompt; gives the number that its outputs carry.

        Args:
            prompt_token_ids: ids within the vocabulary, at least one.
            params: how to continue it. ``max_tokens`` is cut to what ``max_model_len`` leaves. Without a seed, one is
                made of the config's seed and of how many requests came before.
            prompt: its text, for the output.

        Raises:
            RequestError: it can never run. Nothing was queued.
            EngineError: the engine has ended.
        """
        self._check_alive()
        token_ids = _as_ids("the prompt", prompt_token_ids)
        params = self._checked(token_ids, params or SamplingParams())
        req_id = self.stats.requests
        seed = derive_seed(self._seed, req_id) if params.seed is None else params.seed
        entry = _Prompt(req_id, token_ids, prompt, [], time.monotonic())
        for index in range(params.n):
            # The first of n samples is the one that n = 1 would give.
            own = dataclasses.replace(params, n=1, seed=derive_seed(seed, index) if index else seed)
            request = Request(self._num_samples + index, token_ids, own)
            self.scheduler.add(request)  # All n need the same room, so either the first is refused or none.
            entry.samples.append(_Sample(index, request, TextStream(self._tokenizer, token_ids, params.stop)))
        self._num_samples += params.n
        self._prompts[req_id] = entry
        self._samples.update({sample.request.req_id: (entry, sample) for sample in entry.samples})
        self.stats.requests += 1
        self.stats.prompt_tokens += len(token_ids)
        return req_id

    def step(self) -> list[RequestOutput]:
        """Make one step; gives an output for every request that has something new.

        If the executor fails, every unfinished request is given with ``finish_reason`` "error" and the engine has
        ended: :attr:`failure` is set, and later calls raise it.

        Raises:
            EngineError: the engine has ended.
        """
        self._check_alive()
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        started = time.perf_counter()
        try:
            self._executor.submit(plan)
            updates = self.scheduler.update(self._executor.collect())
        except LockstepError as error:
            return self._fail(error)
        except BaseException:
            # Ctrl-C, or a bug: the plan may be under way, and nobody will read its answer. No step can follow.
            self.failure = EngineError("a step was interrupted, so the engine cannot go on; make a new one")
            raise
        self.stats.steps += 1
        self.stats.step_seconds += time.perf_counter() - started
        self.stats.computed_tokens += plan.num_tokens
        touched: dict[int, _Prompt] = {}
        for request, token in updates:
            entry, sample = self._samples[request.req_id]
            entry.first_token = entry.first_token or time.monotonic()
            self._take(sample, token)
            touched[entry.req_id] = entry
        return [self._report(entry) for entry in touched.values()]

    def abort(self, req_id: int) -> RequestOutput | None:
        """End a request and free its KV blocks; gives its last output, or None if it has ended or never was."""
        entry = self._prompts.get(req_id)
        return None if entry is None else self._end(entry, "abort")

    def close(self) -> None:
        """Abort everything, end the executor and the tokenizer's helper. May be called twice."""
        for req_id in list(self._prompts):
            self.abort(req_id)
        self.failure = self.failure or EngineClosedError("this engine was closed; make a new one")
        self._executor.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _checked(self, token_ids: tuple[int, ...], params: SamplingParams) -> SamplingParams:
        """The parameters with ``max_tokens`` cut to the model's length. Raises :class:`RequestError`."""
        if not token_ids:
            raise RequestError("the prompt has no tokens; give at least one")
        room = self._max_model_len - len(token_ids)
        if room < 1:
            raise RequestError(
                f"a prompt of {len(token_ids)} tokens leaves no room for output: max_model_len is "
                f"{self._max_model_len}, so it may have {self._max_model_len - 1}; shorten it or raise --max-model-len"
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens {params.min_tokens} is more than the {room} tokens that a prompt of {len(token_ids)} "
                f"leaves of max_model_len {self._max_model_len}"
            )
        for what, ids in (("the prompt", token_ids), ("stop_token_ids", params.stop_token_ids)):
            for position, token_id in enumerate(ids):
                if not 0 <= token_id < self._vocab_size:
                    raise RequestError(
                        f"{what} has token id {token_id} at position {position}; this model's vocabulary has "
                        f"{self._vocab_size} tokens, 0 to {self._vocab_size - 1}"
                    )
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
        return dataclasses.replace(params, max_tokens=min(params.max_tokens, room))

    def _take(self, sample: _Sample, token: SampledToken) -> None:
        """Add a new token to its sample, and end the sample if it says so."""
        if token.error:
            self._finish(sample, "error", token.error)
            return
        self.stats.generated_tokens += 1
        sample.transcript.token_ids.append(token.token_id)
        if token.logprob is not None:
            sample.transcript.logprobs.append(TokenLogprob(token.token_id, token.logprob, token.top_logprobs))
        params = sample.request.sampling
        num_output = len(sample.transcript.token_ids)
        may_stop = num_output > params.min_tokens
        ends_text = not params.ignore_eos and token.token_id in self._eos_token_ids
        if may_stop and (ends_text or token.token_id in params.stop_token_ids):
            self._finish(sample, "stop")
            return
        sample.transcript.add_text(sample.text.append(token.token_id, may_stop=may_stop))
        if sample.text.stopped:
            self._finish(sample, "stop")
        elif num_output >= params.max_tokens:
            self._finish(sample, "length")

    def _finish(self, sample: _Sample, reason: str, error: str = "") -> None:
        """End a sample: its text is complete, its KV blocks are free."""
        sample.transcript.add_text(sample.text.finish())
        sample.finish_reason = reason
        sample.error = error
        self.scheduler.finish(sample.request)
        del self._samples[sample.request.req_id]
        self.stats.finished[reason] += 1

    def _end(self, entry: _Prompt, reason: str, error: str = "") -> RequestOutput:
        """End every sample of a prompt that has not ended, and report it."""
        for sample in entry.samples:
            if sample.finish_reason is None:
                self._finish(sample, reason, error)
        return self._report(entry)

    def _fail(self, error: LockstepError) -> list[RequestOutput]:
        """The executor has failed: so has every request that has not ended, and the engine."""
        self.failure = error
        return [self._end(entry, "error", str(error)) for entry in list(self._prompts.values())]

    def _report(self, entry: _Prompt) -> RequestOutput:
        """What is new about a prompt since the last report. A prompt all of whose samples have ended is forgotten."""
        finished = all(sample.finish_reason is not None for sample in entry.samples)
        if finished:
            del self._prompts[entry.req_id]
        return RequestOutput(
            req_id=entry.req_id,
            prompt_token_ids=entry.token_ids,
            outputs=tuple(_completion(sample) for sample in entry.samples),
            finished=finished,
            times=RequestTimes(entry.arrived, entry.first_token, time.monotonic() if finished else None),
            prompt=entry.text,
        )


def _completion(sample: _Sample) -> CompletionOutput:
    """The sample as it is now; what is new since the last call is marked as such."""
    transcript = sample.transcript
    tokens, texts = sample.reported_tokens, sample.reported_texts
    sample.reported_tokens, sample.reported_texts = len(transcript.token_ids), len(transcript.texts)
    wants_logprobs = sample.request.sampling.logprobs is not None
    return CompletionOutput(
        index=sample.index,
        transcript=transcript,
        num_tokens=sample.reported_tokens,
        num_texts=sample.reported_texts,
        finish_reason=sample.finish_reason,
        error=sample.error,
        new_token_ids=tuple(transcript.token_ids[tokens:]),
        new_text="".join(transcript.texts[texts:]),
        new_logprobs=tuple(transcript.logprobs[tokens:]) if wants_logprobs else None,
    )


def _as_ids(what: str, values: Iterable[int]) -> tuple[int, ...]:
    """The values as plain ints (arrays of integers are fine). Raises :class:`RequestError` for anything else."""
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise RequestError(f"{what} has to be a sequence of token ids, whole numbers; got {values!r:.80}") from None
