"""Output processor: keeps the unfinished requests, finishes their sequences, detokenizes, and builds outputs.

Tokens are processed in two phases, so that detokenization never delays the next plan: ``apply_tokens`` finishes
sequences by token id or length; ``make_outputs`` later detokenizes what was appended and searches stop strings.
``engine.py`` decides the order. A finished sequence is removed from the scheduler at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence, Set

from runtime.common.protocol import PromptLogprobs, SampledToken, StepResult
from runtime.engine.request import (
    CompletionOutput,
    RequestOutput,
    RequestState,
    RequestTimes,
    SequenceState,
    TokenLogprob,
)
from runtime.engine.scheduler import Scheduler
from runtime.engine.stats import EngineStats
from runtime.text.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer

log = logging.getLogger("lockstep")


class OutputProcessor:
    """Turns step results into outputs of unfinished requests.

    Args:
        tokenizer: None: outputs have token ids and no text.
        eos_token_ids: tokens that finish a sequence unless it ignores them.
        scheduler: finished sequences are removed from it.
        stats: counts generated tokens and finished sequences.

    Attributes:
        states: unfinished requests by number.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, eos_token_ids: Set[int], scheduler: Scheduler, stats: EngineStats
    ) -> None:
        self.states: dict[int, RequestState] = {}
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._scheduler = scheduler
        self._stats = stats
        self._state_of: dict[int, RequestState] = {}  # By the id of an unfinished sequence.
        self._updated: dict[int, RequestState] = {}  # Requests that have something to report.

    @property
    def has_updates(self) -> bool:
        """Whether a request has something to report."""
        return bool(self._updated)

    def add(self, state: RequestState) -> None:
        """Register a request whose sequences were added to the scheduler."""
        self.states[state.req_id] = state
        self._state_of.update((sequence.seq_id, state) for sequence in state.sequences)

    def mark_scheduled(self, seq_ids: Iterable[int]) -> None:
        """Record when requests were first scheduled."""
        now = time.monotonic()
        for seq_id in seq_ids:
            state = self._state_of[seq_id]
            state.scheduled = state.scheduled or now

    def apply_tokens(self, result: StepResult, updates: Sequence[tuple[SequenceState, SampledToken]]) -> None:
        """Record a step's tokens, and remove at once the sequences they finish, so that the next plan leaves them out.

        Args:
            result: of the step.
            updates: what the scheduler's ``update`` returned for it.
        """
        now = time.monotonic()
        for part in result.prompt_logprobs:
            if (state := self._state_of.get(part.req_id)) is not None:
                _append_prompt_logprobs(state, part)
        for sequence, token in updates:
            state = self._state_of[sequence.seq_id]
            self._updated[state.req_id] = state
            self._apply_token(sequence, token)
            if token.error:
                self._stats.broken += token.broken
            else:
                self._stats.generated_tokens += 1
                state.first_token = state.first_token or now
            if sequence.finish_reason is not None:
                self._release(sequence)

    def finish_sequence(self, sequence: SequenceState, reason: str, error: str = "") -> None:
        """Finish a sequence unless it is finished; its request has something to report."""
        if sequence.finish_reason is None:
            state = self._state_of[sequence.seq_id]
            self._updated[state.req_id] = state
            sequence.finish(reason, error)
            self._release(sequence)

    def finish_all(self, reason: str, error: str = "") -> None:
        """Finish every sequence of every request."""
        for state in self.states.values():
            for sequence in state.sequences:
                self.finish_sequence(sequence, reason, error)

    def abort(self, state: RequestState) -> RequestOutput:
        """Finish every sequence of a request with "abort"; returns its last output."""
        for sequence in state.sequences:
            self.finish_sequence(sequence, "abort")
        self._updated.pop(state.req_id, None)
        return self._make_output(state)

    def make_outputs(self) -> list[RequestOutput]:
        """The outputs of all requests that have something new."""
        updated, self._updated = self._updated, {}
        return [self._make_output(state) for state in updated.values() if not state.final_only or state.finished]

    def _release(self, sequence: SequenceState) -> None:
        """Remove a finished sequence from the scheduler: its blocks are free, its in-flight tokens are ignored."""
        if self._state_of.pop(sequence.seq_id, None) is not None:
            self._scheduler.finish(sequence)

    def _apply_token(self, sequence: SequenceState, token: SampledToken) -> None:
        """Record the logprob of a token that the scheduler appended, and finish the sequence if the token does."""
        if token.error:
            sequence.finish("error", token.error)
            return
        token_id, params, output = token.token_id, sequence.sampling, sequence.output
        if output.logprobs is not None:
            # A rank always reports what was requested; a list with a gap would shift every later entry.
            logprob = float("nan") if token.logprob is None else token.logprob
            output.logprobs.append(TokenLogprob(token_id, logprob, token.top_logprobs))
        num_output = len(output.token_ids)
        # With structured outputs, the grammar permits an end-of-sequence token only where the output is complete.
        heeds_eos = not params.ignore_eos or params.structured_outputs is not None
        stops = (heeds_eos and token_id in self._eos_token_ids) or token_id in params.stop_token_ids
        if stops and num_output > params.min_tokens:
            sequence.num_hidden = 1
            sequence.finish("stop")
        elif num_output >= params.max_tokens:
            sequence.finish("length")

    def _make_output(self, state: RequestState) -> RequestOutput:
        """Detokenize what was appended, finish sequences at stop strings, and return what is new.

        An error of the tokenizer finishes that sequence with "error" and affects no other.
        """
        for sequence in state.sequences:
            if sequence.is_complete:
                continue
            try:
                self._detokenize(sequence)
            except Exception as error:
                log.exception("request %d: detokenization failed", state.req_id)
                sequence.finish("error", f"its tokens cannot be made text: {type(error).__name__}: {error}")
            if sequence.finish_reason is not None:
                self._release(sequence)
                sequence.is_complete = True
                self._stats.finished[sequence.finish_reason] += 1
        finished = state.finished
        if finished:
            del self.states[state.req_id]
        return RequestOutput(
            req_id=state.req_id,
            prompt_token_ids=state.sequences[0].prompt_token_ids,
            outputs=tuple([_completion(sequence) for sequence in state.sequences]),
            finished=finished,
            times=RequestTimes(
                state.arrived, state.first_token, time.monotonic() if finished else None, state.scheduled
            ),
            prompt=state.request.prompt,
            num_cached_tokens=state.sequences[0].num_cached,
            prompt_logprobs=state.prompt_logprobs,
        )

    def _detokenize(self, sequence: SequenceState) -> None:
        """Append the text of new tokens, all of it if the sequence has finished; a stop string finishes it."""
        if self._tokenizer is None:
            return
        params, output = sequence.sampling, sequence.output
        if sequence.detokenizer is None:
            sequence.detokenizer = IncrementalDetokenizer(self._tokenizer, sequence.prompt_token_ids)
            sequence.stop_checker = StopChecker(params.stop) if params.stop else None
        detokenizer, checker = sequence.detokenizer, sequence.stop_checker
        new = output.token_ids[sequence.num_detokenized : len(output.token_ids) - sequence.num_hidden]
        if checker is None:
            output.add_text(detokenizer.append(new) if new else "")
        else:
            for num_output, token_id in enumerate(new, sequence.num_detokenized + 1):
                text = detokenizer.append((token_id,))
                output.add_text(checker.append(text, may_stop=num_output > params.min_tokens))
                if checker.stopped:
                    break
        sequence.num_detokenized = len(output.token_ids)
        if sequence.finish_reason is not None and not (checker is not None and checker.stopped):
            rest = detokenizer.finish()
            output.add_text(rest if checker is None else checker.finish(rest))
        if checker is not None and checker.stopped and sequence.finish_reason in (None, "length"):
            sequence.finish("stop")


def _completion(sequence: SequenceState) -> CompletionOutput:
    """The output of one sequence; marks its tokens and text as reported."""
    old_tokens, old_texts = sequence.num_reported_tokens, sequence.num_reported_texts
    sequence.num_reported_tokens = len(sequence.output.token_ids)
    sequence.num_reported_texts = len(sequence.output.texts)
    return CompletionOutput(
        sequence.index,
        sequence.output,
        sequence.num_reported_tokens,
        sequence.num_reported_texts,
        sequence.finish_reason,
        sequence.error,
        old_tokens,
        old_texts,
    )


def _append_prompt_logprobs(state: RequestState, part: PromptLogprobs) -> None:
    """Append the entries that are missing: positions computed twice are reported twice.

    Rank 0 omits entries that are not finite, and the sequence finishes with an error at its first token, so
    entries after such a gap are dropped.
    """
    known = state.prompt_logprobs
    if known is None or part.start > len(known):
        return
    known.extend(TokenLogprob(*entry) for entry in part.tokens[len(known) - part.start :])
