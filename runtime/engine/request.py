"""A request on its way through the engine, and what users get of it.

:class:`Request` is the scheduler's record of one sample: mutable, never handed out. :class:`RequestOutput` is the
public result: what one call of ``Engine.step`` found out about one prompt, with everything before it. How a prompt
should be continued is ``config.SamplingParams``; what workers are told is ``protocol.NewRequest``.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field, replace

from runtime.common.config import MAX_SEED
from runtime.common.sampling_params import SamplingParams

FINISH_REASONS = ("stop", "length", "abort", "error")
"""Why a sample ended: an end-of-sequence token, stop token or stop string; its length; the user; something failed."""


class RequestStatus(enum.Enum):
    """Where a request stands: not yet (or no longer) in the KV cache, in it, or done with."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One sample of one prompt, as the scheduler keeps it.

    Attributes:
        req_id: its number on the ranks, ascending in order of arrival.
        sampling: with a seed and a ``max_tokens`` that fits the model.
        priority: lower goes first; of equals, the one that came first.
        cache_salt: only requests with the same salt share KV blocks; None: this one takes none and offers none.
        leader: the first of several samples of one prompt. The others start once its prompt is computed, so that they
            find its blocks.
        block_ids: the KV blocks it holds, in order; empty while it waits. Others may hold the first of them too.
        num_computed: tokens whose keys and values are in the cache once the plans made so far have run.
        num_pending: tokens that those plans sample, but that have not come back yet. They count as known: what is to
            be done next does not depend on which tokens they are.
        num_preemptions: how often it lost its blocks and had to start again.
        num_cached: prompt tokens that were in the KV cache already when it first started.
        was_admitted: whether it has ever started.
        block_hashes: of its first full blocks of known tokens, as far as they were needed (``prefix_cache.py``).
        num_offered: how many blocks at the front of ``block_ids`` were taken from or offered to the prefix cache.
    """

    req_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=list[int])
    status: RequestStatus = RequestStatus.WAITING
    block_ids: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_pending: int = 0
    num_preemptions: int = 0
    priority: int = 0
    cache_salt: bytes | None = b""
    leader: Request | None = field(default=None, repr=False)
    num_cached: int = 0
    was_admitted: bool = False
    block_hashes: list[bytes] = field(default_factory=list[bytes], repr=False)
    num_offered: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Its place among all requests: the smallest goes first and is preempted last."""
        return self.priority, self.req_id

    @property
    def waits_for_leader(self) -> bool:
        """Whether the first sample of its prompt has still to compute that prompt."""
        leader = self.leader
        if leader is None or leader.status is RequestStatus.FINISHED:
            return False
        return leader.num_computed < len(leader.prompt_token_ids)

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output whose ids are known here: those pending are not."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, those still pending included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next plans have to compute: 1 in decode, more in prefill, 0 when nothing is left to do."""
        if len(self.output_token_ids) + self.num_pending >= self.sampling.max_tokens:
            return 0
        return self.num_tokens - self.num_computed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One output token and how likely the model found it, before temperature, penalties and cuts.

    Attributes:
        logprob: natural logarithm of its probability.
        top: the likeliest tokens and their logprobs, best first, as many as ``SamplingParams.logprobs`` asks for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Transcript:
    """Everything one sample has produced. Only ever appended to, so outputs can share it instead of copying it, and
    other threads may read what an output says is there.

    Attributes:
        logprobs: one entry for each token; None unless asked for.
    """

    token_ids: list[int] = field(default_factory=list[int])
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] | None = None

    def add_text(self, text: str) -> None:
        """Append a piece of text, if there is any."""
        if text:
            self.texts.append(text)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt: all of it so far, and what is new in it.

    What is new is a range of the transcript, so nothing is copied before somebody reads it. Text lags behind tokens
    where a character, or what may become a stop string, is not complete.

    Attributes:
        index: which of the ``n`` samples.
        transcript, num_tokens, num_texts: where everything is kept, and how much of it there was at this moment.
        old_tokens, old_texts: how much of that earlier outputs had already.
        finish_reason: one of :data:`FINISH_REASONS`; None while it goes on.
        error: what went wrong if ``finish_reason`` is "error".
    """

    index: int
    transcript: Transcript = field(repr=False)
    num_tokens: int
    num_texts: int
    finish_reason: str | None = None
    error: str = ""
    old_tokens: int = 0
    old_texts: int = 0

    @property
    def token_ids(self) -> list[int]:
        """All tokens, the one that ended the sample included."""
        return self.transcript.token_ids[: self.num_tokens]

    @property
    def text(self) -> str:
        """The whole text, without special tokens and without what ended it."""
        return "".join(self.transcript.texts[: self.num_texts])

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One entry for each of ``token_ids``; None unless asked for."""
        logprobs = self.transcript.logprobs
        return None if logprobs is None else logprobs[: self.num_tokens]

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """The tokens since the last output."""
        return tuple(self.transcript.token_ids[self.old_tokens : self.num_tokens])

    @property
    def new_text(self) -> str:
        """The text since the last output."""
        return "".join(self.transcript.texts[self.old_texts : self.num_texts])

    @property
    def new_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry for each of ``new_token_ids``; None unless asked for."""
        logprobs = self.transcript.logprobs
        return None if logprobs is None else tuple(logprobs[self.old_tokens : self.num_tokens])


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of ``time.monotonic``; None: not yet.

    Attributes:
        scheduled: the first plan with any of it was sent.
    """

    arrived: float
    first_token: float | None = None
    finished: float | None = None
    scheduled: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's result so far. ``text``, ``token_ids``, ``finish_reason`` and the like are the first sample's.

    Attributes:
        req_id: what ``Engine.add`` gave.
        index: the position of the prompt among those given together.
        prompt: the prompt's text, None where only token ids were given.
        outputs: all ``SamplingParams.n`` samples.
        finished: whether every sample has ended.
        num_cached_tokens: tokens at the front of the prompt that an earlier request had already computed.
        prompt_logprobs: None for the prompt's first token, then one entry for each; None unless asked for. Complete
            when the first output token is there.
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
        """This output, with what was new in an ``earlier`` one that nobody has read counted as new."""
        outputs = tuple(
            replace(now, old_tokens=before.old_tokens, old_texts=before.old_texts)
            for now, before in zip(self.outputs, earlier.outputs, strict=True)
        )
        return replace(self, outputs=outputs)


def derive_seed(seed: int, number: int) -> int:
    """The seed of the ``number``-th thing under ``seed``: the same on every machine, unrelated to its neighbours."""
    data = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & MAX_SEED
