"""A generation request, the engine's state of it, and the outputs that clients read.

:class:`GenerateRequest` is the frozen request that every entry point (LLM, AsyncLLM, server, run-batch) builds and
hands to ``Engine.add``. :class:`RequestState` and :class:`SequenceState` are the engine's mutable state, one for a
request and one for each of its ``n`` sequences; they are never handed out. :class:`RequestOutput` is the public result
of a step for one request. Sampling parameters are ``runtime/common/sampling_params.py``'s, messages to workers
``runtime/common/protocol.py``'s.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from runtime.common.config import MAX_SEED
from runtime.common.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runtime.text.tokenizer import IncrementalDetokenizer, StopChecker

FINISH_REASONS = ("stop", "length", "abort", "error")
"""Why a sequence finished: an end-of-sequence token, stop token or stop string; its length; the client; a failure."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and how to continue it.

    Attributes:
        prompt_token_ids: ids within the vocabulary, at least one. Any sequence of integers is accepted; a request that
            :class:`~runtime.engine.input_processor.InputProcessor` returns has a tuple of ints.
        params: sampling parameters.
        prompt: the text of the prompt, copied into the outputs; None where only token ids are known.
        request_id: the name for ``AsyncEngine.abort``; None: the engine generates one.
        priority: lower is scheduled first; equal priorities are served in order of arrival.
        cache_salt: requests share KV blocks of a common prefix only with requests of the same salt.
        final_only: whether only the last output is delivered, which saves the work for the others.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str = ""
    final_only: bool = False


class SequenceStatus(enum.Enum):
    """State of a sequence in the scheduler: without KV blocks, with KV blocks, or removed."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability, before temperature, penalties and truncation.

    Attributes:
        logprob: natural logarithm of its probability.
        top: (token id, logprob) pairs of the likeliest tokens, best first, as many as ``SamplingParams.logprobs`` says.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceOutput:
    """Tokens, text and logprobs of one sequence. Append-only, so that outputs share it instead of copying it and other
    threads may read the part that an output covers.

    Attributes:
        texts: consecutive chunks of the text.
        logprobs: one entry for each token; None unless requested.
    """

    token_ids: list[int] = field(default_factory=list[int])
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] | None = None

    def add_text(self, text: str) -> None:
        """Append a chunk of text, unless it is empty."""
        if text:
            self.texts.append(text)


@dataclass(eq=False, slots=True)
class SequenceState:
    """State of one of a request's ``n`` sequences: its tokens, its KV blocks, and its output.

    Attributes:
        seq_id: its number in step plans (the protocol's ``req_id``), ascending in order of arrival.
        sampling: parameters with a seed, and with ``max_tokens`` within the model's length.
        priority: lower is scheduled first; equal priorities are served in order of arrival.
        cache_salt: only sequences with the same salt share KV blocks; None: no prefix caching.
        parent: the first sequence of the same request. The others start after the parent's prompt is computed and
            reuse its blocks. None for the parent itself.
        index: its position among the request's ``n`` sequences.
        output: tokens and text generated so far.
        block_ids: KV blocks in order; empty while it waits. Leading blocks may be shared.
        num_computed: tokens whose keys and values are in the cache once all plans made so far have run.
        num_in_flight_tokens: tokens that in-flight steps sample. They count as known: the next plan does not depend on
            their ids.
        num_preemptions: how often it was preempted.
        num_cached: prompt tokens found in the prefix cache when it was first admitted.
        was_admitted: whether it has ever been admitted.
        block_hashes: prefix hashes of its leading full blocks of known tokens, as far as needed.
        num_cached_blocks: leading blocks of ``block_ids`` that are registered in the prefix cache.
        finish_reason: one of :data:`FINISH_REASONS`; None while it is unfinished.
        error: what failed if ``finish_reason`` is "error".
        is_complete: whether it is finished, detokenized to the end and counted in the stats.
        detokenizer, stop_checker: made with the first text; ``stop_checker`` only with stop strings.
        num_detokenized: output tokens that were passed to the detokenizer.
        num_hidden: tokens at the end that are not part of the text: the stop token.
        num_reported_tokens, num_reported_texts: how much of ``output`` earlier outputs have covered.
    """

    seq_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: bytes | None = b""
    parent: SequenceState | None = field(default=None, repr=False)
    index: int = 0
    output: SequenceOutput = field(default_factory=SequenceOutput)
    # Scheduling.
    status: SequenceStatus = SequenceStatus.WAITING
    block_ids: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    num_cached: int = 0
    was_admitted: bool = False
    block_hashes: list[bytes] = field(default_factory=list[bytes], repr=False)
    num_cached_blocks: int = 0
    # Output.
    finish_reason: str | None = None
    error: str = ""
    is_complete: bool = False
    detokenizer: IncrementalDetokenizer | None = field(default=None, repr=False)
    stop_checker: StopChecker | None = field(default=None, repr=False)
    num_detokenized: int = 0
    num_hidden: int = 0
    num_reported_tokens: int = 0
    num_reported_texts: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the scheduling order: the smallest is scheduled first and preempted last."""
        return self.priority, self.seq_id

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.output.token_ids

    @property
    def waits_for_parent(self) -> bool:
        """Whether the parent sequence has not computed the prompt yet."""
        parent = self.parent
        if parent is None or parent.status is SequenceStatus.FINISHED:
            return False
        return parent.num_computed < len(parent.prompt_token_ids)

    @property
    def num_known(self) -> int:
        """Prompt and output tokens whose ids the driver has; in-flight tokens do not count."""
        return len(self.prompt_token_ids) + len(self.output.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, in-flight tokens included."""
        return len(self.prompt_token_ids) + len(self.output.token_ids) + self.num_in_flight_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that later plans have to compute: 1 in decode, more in prefill, 0 when all of them are in flight."""
        if len(self.output.token_ids) + self.num_in_flight_tokens >= self.sampling.max_tokens:
            return 0
        return self.num_tokens - self.num_computed

    def finish(self, reason: str, error: str = "") -> None:
        """Record why it finished. Its text may still be incomplete."""
        self.finish_reason = reason
        self.error = error


@dataclass(eq=False, slots=True)
class RequestState:
    """State of one request and its sequences. Times are in seconds of ``time.monotonic``.

    Attributes:
        req_id: the number that ``Engine.add`` returned and the outputs carry.
        request: as the input processor returned it.
        arrived: when it was queued.
        scheduled: when the first plan with one of its tokens was submitted.
        first_token: when its first output token came back.
        prompt_logprobs: None for the first prompt token, then one entry for each; None unless requested.
    """

    req_id: int
    request: GenerateRequest
    arrived: float
    sequences: list[SequenceState] = field(default_factory=list[SequenceState])
    scheduled: float | None = None
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def final_only(self) -> bool:
        """Whether only the last output is delivered. A stop string is found in the text alone, so it needs all."""
        return self.request.final_only and not self.request.params.stop

    @property
    def finished(self) -> bool:
        """Whether every sequence has finished."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence of a request: everything generated so far, and the part that is new.

    Both are ranges of the shared :class:`SequenceOutput`, so nothing is copied before it is read. Text lags behind
    tokens while a character is incomplete or the end of the text may become a stop string.

    Attributes:
        index: position among the ``n`` sequences.
        generated: the shared tokens and text.
        num_tokens, num_texts: how much of ``generated`` this output covers.
        old_tokens, old_texts: how much of it earlier outputs covered.
        finish_reason: one of :data:`FINISH_REASONS`; None while unfinished.
        error: what failed if ``finish_reason`` is "error".
    """

    index: int
    generated: SequenceOutput = field(repr=False)
    num_tokens: int
    num_texts: int
    finish_reason: str | None = None
    error: str = ""
    old_tokens: int = 0
    old_texts: int = 0

    @property
    def token_ids(self) -> list[int]:
        """All tokens, including the one that finished the sequence."""
        return self.generated.token_ids[: self.num_tokens]

    @property
    def text(self) -> str:
        """The whole text, without special tokens, stop token and stop string."""
        return "".join(self.generated.texts[: self.num_texts])

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One entry for each of ``token_ids``; None unless requested."""
        logprobs = self.generated.logprobs
        return None if logprobs is None else logprobs[: self.num_tokens]

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """The tokens since the last output."""
        return tuple(self.generated.token_ids[self.old_tokens : self.num_tokens])

    @property
    def new_text(self) -> str:
        """The text since the last output."""
        return "".join(self.generated.texts[self.old_texts : self.num_texts])

    @property
    def new_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry for each of ``new_token_ids``; None unless requested."""
        logprobs = self.generated.logprobs
        return None if logprobs is None else tuple(logprobs[self.old_tokens : self.num_tokens])


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Timestamps of a request, in seconds of ``time.monotonic``; None: not yet.

    Attributes:
        scheduled: the first plan with one of its tokens was submitted.
    """

    arrived: float
    first_token: float | None = None
    finished: float | None = None
    scheduled: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Result of a request so far. ``text``, ``token_ids``, ``finish_reason`` and the like are the first sequence's.

    Attributes:
        req_id: the number that ``Engine.add`` returned.
        index: position of the prompt in the call of ``LLM.generate``.
        prompt: text of the prompt; None where only token ids are known.
        outputs: all ``SamplingParams.n`` sequences.
        finished: whether every sequence has finished.
        num_cached_tokens: leading prompt tokens found in the prefix cache.
        prompt_logprobs: None for the first prompt token, then one entry for each; None unless requested. Complete
            with the first output token.
    """

    req_id: int
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    times: RequestTimes
    prompt: str | None = None
    index: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """See :attr:`CompletionOutput.text`."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """See :attr:`CompletionOutput.token_ids`."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """See :class:`CompletionOutput`."""
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str:
        """See :class:`CompletionOutput`."""
        return self.outputs[0].error

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """See :attr:`CompletionOutput.logprobs`."""
        return self.outputs[0].logprobs

    def merged_with(self, earlier: RequestOutput) -> RequestOutput:
        """This output; what was new in an unread ``earlier`` output counts as new again."""
        outputs = tuple(
            replace(now, old_tokens=before.old_tokens, old_texts=before.old_texts)
            for now, before in zip(self.outputs, earlier.outputs, strict=True)
        )
        return replace(self, outputs=outputs)


def derive_seed(seed: int, number: int) -> int:
    """The ``number``-th seed derived from ``seed``: equal on every machine, uncorrelated between numbers."""
    data = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & MAX_SEED
