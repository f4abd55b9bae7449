"""What rank 0 keeps of requests whose output has to match something: where in the grammar each is, what may come next.

The grammar itself is made by ``runtime/common/grammar.py``; masks are applied by ``sampler.py``. Other ranks learn
tokens only. Nothing here raises anything but RequestError for what a request asks: the request ends, the rank goes on.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.common.errors import RequestError
from runtime.common.grammar import PREFIX, error_of, make_llg_tokenizer, make_matcher, no_panic, to_grammar
from runtime.common.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_GRAMMARS = 32
"""Grammars kept ready for the next request with the same one, e.g. the other samples of a prompt."""

STEP_SECONDS = 10.0
"""Making grammars ready may take this long within one step; then requests with yet another one are refused. The
others wait in a collective meanwhile, and must not give up."""

Bits: TypeAlias = "npt.NDArray[np.uint8]"
"""For each token of the model's vocabulary one bit, whether it may come next: 8 tokens a byte, the lowest bit first."""


class Grammars:
    """Begins to follow grammars.

    Args:
        checkpoint: folder whose tokenizer says what tokens stand for; read when the first request needs it.
        eos_token_ids: tokens that may come when an output is complete.
        vocab_size: of the model.
    """

    def __init__(self, checkpoint: str, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._checkpoint = checkpoint
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._unusable = ""
        self._ready: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._step_seconds = 0.0

    def begin_step(self) -> None:
        """Say that a new step begins, which may take :data:`STEP_SECONDS` again."""
        self._step_seconds = 0.0

    def follow(self, outputs: StructuredOutputs, token_ids: Sequence[int]) -> Follower:
        """Follow a grammar from its beginning to behind ``token_ids``, the output so far.

        Raises:
            RequestError: the grammar cannot be followed, or the output does not match it.
        """
        started = time.perf_counter()
        try:
            follower = Follower(self._matcher(outputs), self._eos(), self._vocab_size)
            follower.accept_all(token_ids)
            return follower
        finally:
            self._step_seconds += time.perf_counter() - started

    def _matcher(self, outputs: StructuredOutputs) -> LLMatcher:
        """A matcher of one's own, at the beginning."""
        ready = self._ready.get(outputs)
        if ready is None:
            if self._step_seconds > STEP_SECONDS:
                raise RequestError(
                    f"so many grammars had to be made ready at once that it took more than {STEP_SECONDS:g} s; try "
                    "again, or use the same grammar for more requests"
                )
            ready = make_matcher(self._load_tokenizer(), to_grammar(outputs))
            if error := error_of(ready):
                raise RequestError(f"{PREFIX}{error}")
            self._ready[outputs] = ready
            if len(self._ready) > KEPT_GRAMMARS:
                self._ready.popitem(last=False)
        self._ready.move_to_end(outputs)
        return ready.deep_copy()

    def _load_tokenizer(self) -> LLTokenizer:
        if self._unusable:
            raise RequestError(self._unusable)
        if self._tokenizer is None:
            try:
                self._tokenizer = make_llg_tokenizer(self._checkpoint, self._eos_token_ids, self._vocab_size)
            except RequestError as error:
                self._unusable = str(error)  # It would be as bad the next time.
                raise
        return self._tokenizer

    def _eos(self) -> frozenset[int]:
        return frozenset(self._load_tokenizer().eos_tokens)


class Follower:
    """One request's place in its grammar.

    Args:
        matcher: its own.
        eos_token_ids: tokens that end an output.
        vocab_size: of the model.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size

    def allowed(self) -> Bits:
        """Which tokens may come next, at least one of them. When nothing may follow, only an end.

        Raises:
            RequestError: following the grammar became too expensive.
        """
        with no_panic():
            mask = self._matcher.compute_bitmask()
        bits = np.frombuffer(mask, np.uint8)[: -(-self._vocab_size // 8)].copy()
        self._check()
        if rest := self._vocab_size % 8:
            bits[-1] &= (1 << rest) - 1
        if not bits.any():
            raise RequestError("structured output cannot go on: no token of this model continues it")
        return bits

    def accept(self, token_id: int) -> None:
        """Take the token that was sampled.

        Raises:
            RequestError: the grammar does not allow it, or following it became too expensive.
        """
        # After an end there are only more of them: the output has ended for the driver, or soon will have.
        if not self._matcher.is_stopped():
            with no_panic():
                self._matcher.consume_token(token_id)
            self._check()

    def accept_all(self, token_ids: Sequence[int]) -> None:
        """Take an output again. Raises RequestError as :meth:`accept`."""
        end = next((at for at, token_id in enumerate(token_ids) if token_id in self._eos_token_ids), len(token_ids))
        if end:
            with no_panic():
                self._matcher.consume_tokens(list(token_ids[:end]))
            self._check()
        for token_id in token_ids[end:]:
            self.accept(token_id)

    def _check(self) -> None:
        if error := error_of(self._matcher):
            raise RequestError(f"structured output cannot go on: {error}")
