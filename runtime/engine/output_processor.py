"""A prompt while the engine works on it: its samples, what they have produced, and how much of that was reported.

Tokens come in two halves, so that making text never keeps the next plan waiting: ``SampleState.take`` adds a token and
says whether its id ends the sample, ``SampleState.read`` later makes text of what was taken and searches stop strings.
Which of them is called when, and what ending a sample means for others, is ``engine.py``'s.
"""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field

from runtime.common.protocol import PromptLogprobs, SampledToken
from runtime.engine.request import CompletionOutput, Request, RequestOutput, RequestTimes, TokenLogprob, Transcript
from runtime.text.tokenizer import TextStream, Tokenizer


@dataclass(eq=False, slots=True)
class SampleState:
    """One sample of a prompt.

    Attributes:
        request: the scheduler's record of it.
        finish_reason: why it has ended; None while it goes on.
        closed: whether its end is complete: all its text is made, and it was counted.
    """

    index: int
    request: Request
    transcript: Transcript
    finish_reason: str | None = None
    error: str = ""
    closed: bool = False
    _stream: TextStream | None = None
    _num_read: int = 0
    _num_silent: int = 0  # Tokens at the end that are not part of the text: the one that stopped it.
    _reported_tokens: int = 0
    _reported_texts: int = 0

    def take(self, token: SampledToken, eos_token_ids: Set[int]) -> str | None:
        """Add a new token; gives why the sample ends with it, or None if it goes on."""
        if token.error:
            self.end("error", token.error)
            return self.finish_reason
        token_id, params = token.token_id, self.request.sampling
        transcript = self.transcript
        transcript.token_ids.append(token_id)
        if transcript.logprobs is not None:
            # A worker always reports what it was asked for; a list with a gap would shift everything after it.
            logprob = float("nan") if token.logprob is None else token.logprob
            transcript.logprobs.append(TokenLogprob(token_id, logprob, token.top_logprobs))
        num_output = len(transcript.token_ids)
        # What has to match a grammar is complete where the grammar allows nothing but an end.
        heeds_eos = not params.ignore_eos or params.structured_outputs is not None
        ends = (heeds_eos and token_id in eos_token_ids) or token_id in params.stop_token_ids
        if ends and num_output > params.min_tokens:
            self._num_silent = 1
            self.end("stop")
        elif num_output >= params.max_tokens:
            self.end("length")
        return self.finish_reason

    def end(self, reason: str, error: str = "") -> None:
        """Say why the sample has ended. Its text may still be incomplete."""
        self.finish_reason = reason
        self.error = error

    def read(self, tokenizer: Tokenizer | None, prompt_token_ids: tuple[int, ...]) -> None:
        """Make text of the tokens taken since, all of it if the sample has ended; a stop string ends the sample."""
        if tokenizer is None:
            return
        params, token_ids = self.request.sampling, self.transcript.token_ids
        stream = self._stream
        if stream is None:
            stream = self._stream = TextStream(tokenizer, prompt_token_ids, params.stop)
        end = len(token_ids) - self._num_silent
        if params.stop:
            for position in range(self._num_read, end):
                may_stop = position + 1 > params.min_tokens
                self.transcript.add_text(stream.append(token_ids[position], may_stop=may_stop))
        else:
            self.transcript.add_text(stream.extend(token_ids[self._num_read : end]))
        self._num_read = len(token_ids)
        if self.finish_reason is not None:
            self.transcript.add_text(stream.finish())
        if stream.stopped and self.finish_reason in (None, "length"):
            self.end("stop")

    def output(self) -> CompletionOutput:
        """The sample as it is now; what is new since the last call counts as new."""
        transcript = self.transcript
        old_tokens, old_texts = self._reported_tokens, self._reported_texts
        self._reported_tokens = len(transcript.token_ids)
        self._reported_texts = len(transcript.texts)
        return CompletionOutput(
            self.index,
            transcript,
            self._reported_tokens,
            self._reported_texts,
            self.finish_reason,
            self.error,
            old_tokens,
            old_texts,
        )


@dataclass(eq=False, slots=True)
class PromptState:
    """What ``Engine.add`` was called with, and its samples. Times are of ``time.monotonic``."""

    req_id: int
    token_ids: tuple[int, ...]
    text: str | None
    arrived: float
    samples: list[SampleState] = field(default_factory=list[SampleState])
    scheduled: float | None = None
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    final_only: bool = False
    """Only the last output is wanted, and nothing in the text can end a sample: until then no text is made."""

    def take_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Add what is not there yet: positions that were computed twice are reported twice.

        Rank 0 leaves out what is not finite, and such a sample ends with an error at its first token: what comes after
        the gap is of no use.
        """
        known = self.prompt_logprobs
        if known is None or part.start > len(known):
            return
        known.extend(TokenLogprob(*entry) for entry in part.tokens[len(known) - part.start :])

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    def output(self) -> RequestOutput:
        """What is new about the prompt since the last call."""
        finished = self.finished
        return RequestOutput(
            req_id=self.req_id,
            prompt_token_ids=self.token_ids,
            outputs=tuple([sample.output() for sample in self.samples]),
            finished=finished,
            times=RequestTimes(self.arrived, self.first_token, time.monotonic() if finished else None, self.scheduled),
            prompt=self.text,
            num_cached_tokens=self.samples[0].request.num_cached,
            prompt_logprobs=self.prompt_logprobs,
        )
