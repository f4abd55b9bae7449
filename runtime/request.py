"""A request on its way through the engine, and what users get of it.

:class:`Request` is the scheduler's record of one sample: mutable, never handed out. :class:`RequestOutput` is the
public result: what one call of ``Engine.step`` found out about one prompt, with everything before it. How a prompt
should be continued is ``config.SamplingParams``; what workers are told is ``protocol.NewRequest``.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field

from runtime.config import MAX_SEED, SamplingParams

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
        block_ids: the KV blocks it holds, in order; empty while it waits.
        num_computed: tokens whose keys and values the plans made so far put into the cache.
        num_pending: tokens that those plans sample, but that have not come back yet. They count as known: what is to
            be done next does not depend on which tokens they are.
        num_preemptions: how often it lost its blocks and had to start again.
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
    """Everything one sample has produced. Only ever appended to, so outputs can share it instead of copying it."""

    token_ids: list[int] = field(default_factory=list[int])
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])

    def add_text(self, text: str) -> None:
        """Append a piece of text, if there is any."""
        if text:
            self.texts.append(text)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt: all of it so far, and what the last step added.

    Attributes:
        index: which of the ``n`` samples.
        transcript, num_tokens, num_texts: where everything is kept, and how much of it there was at this moment.
        finish_reason: one of :data:`FINISH_REASONS`; None while it goes on.
        error: what went wrong if ``finish_reason`` is "error".
        new_token_ids, new_text, new_logprobs: since the last output. Text lags behind tokens where a character, or
            what may become a stop string, is not complete.
    """

    index: int
    transcript: Transcript = field(repr=False)
    num_tokens: int
    num_texts: int
    finish_reason: str | None = None
    error: str = ""
    new_token_ids: tuple[int, ...] = ()
    new_text: str = ""
    new_logprobs: tuple[TokenLogprob, ...] | None = None

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
        return None if self.new_logprobs is None else self.transcript.logprobs[: self.num_tokens]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of ``time.monotonic``; None: not yet."""

    arrived: float
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's result so far. ``text``, ``token_ids``, ``finish_reason`` and the like are the first sample's.

    Attributes:
        req_id: what ``Engine.add_request`` gave.
        index: the position of the prompt among those given together.
        prompt: the prompt's text, None where only token ids were given.
        outputs: all ``SamplingParams.n`` samples.
        finished: whether every sample has ended.
    """

    req_id: int
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    times: RequestTimes
    prompt: str | None = None
    index: int = 0

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


def derive_seed(seed: int, number: int) -> int:
    """The seed of the ``number``-th thing under ``seed``: the same on every machine, unrelated to its neighbours."""
    data = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & MAX_SEED
