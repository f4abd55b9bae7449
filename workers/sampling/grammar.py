"""Structured output on rank 0: compiled grammars, and the grammar matcher of each request.

``runtime/common/grammar.py`` translates a request's parameters to a grammar; ``sampler.py`` applies the masks. The
other ranks receive tokens only. Errors of a grammar are RequestErrors: the request ends and the rank continues.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from runtime.common.errors import RequestError
from runtime.common.grammar import PREFIX, error_of, make_llg_tokenizer, make_matcher, no_panic, to_grammar
from runtime.common.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED_GRAMMARS = 32
"""Compiled grammars that are cached, for requests with the same grammar such as the other samples of a prompt."""

STEP_SECONDS = 10.0
"""Time for compiling grammars within one step; after it, requests with another new grammar are refused. The other
ranks wait in a collective meanwhile, which must not time out."""


class GrammarCompiler:
    """Compiles grammars, and makes matchers for them.

    Args:
        checkpoint: folder of the tokenizer; read at the first request with a grammar.
        eos_token_ids: tokens that are allowed when an output is complete.
        vocab_size: of the model.
    """

    def __init__(self, checkpoint: str, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._checkpoint = checkpoint
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_error = ""
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._step_seconds = 0.0

    def begin_step(self) -> None:
        """Begin a new step, with its own :data:`STEP_SECONDS`."""
        self._step_seconds = 0.0

    def make_matcher(self, outputs: StructuredOutputs, token_ids: Sequence[int]) -> GrammarMatcher:
        """A matcher of a grammar that has accepted ``token_ids``, the output so far.

        Raises:
            RequestError: the grammar cannot be compiled, or the output does not match it.
        """
        started = time.perf_counter()
        try:
            matcher = GrammarMatcher(self._copy_compiled(outputs), self._eos(), self._vocab_size)
            matcher.accept_all(token_ids)
            return matcher
        finally:
            self._step_seconds += time.perf_counter() - started

    def _copy_compiled(self, outputs: StructuredOutputs) -> LLMatcher:
        """A copy of the compiled grammar, at its beginning."""
        compiled = self._compiled.get(outputs)
        if compiled is None:
            if self._step_seconds > STEP_SECONDS:
                raise RequestError(
                    f"so many grammars had to be made ready at once that it took more than {STEP_SECONDS:g} s; try "
                    "again, or use the same grammar for more requests"
                )
            compiled = make_matcher(self._load_tokenizer(), to_grammar(outputs))
            if error := error_of(compiled):
                raise RequestError(f"{PREFIX}{error}")
            self._compiled[outputs] = compiled
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(outputs)
        return compiled.deep_copy()

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer_error:
            raise RequestError(self._tokenizer_error)
        if self._tokenizer is None:
            try:
                self._tokenizer = make_llg_tokenizer(self._checkpoint, self._eos_token_ids, self._vocab_size)
            except RequestError as error:
                self._tokenizer_error = str(error)  # The file does not change: the next request gets the same error.
                raise
        return self._tokenizer

    def _eos(self) -> frozenset[int]:
        return frozenset(self._load_tokenizer().eos_tokens)


class GrammarMatcher:
    """Position of one request's output in its grammar.

    Args:
        matcher: llguidance's, not shared with another request.
        eos_token_ids: tokens that end an output.
        vocab_size: of the model.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size

    def allowed_tokens(self) -> npt.NDArray[np.uint8]:
        """Bitmask of the tokens that may come next, at least one; a complete output allows EOS tokens only.

        Returns:
            uint8 [ceil(vocab_size / 8)], one bit per token, the lowest bit first.

        Raises:
            RequestError: the grammar has become too expensive, or allows no token of the model.
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
        """Advance by one sampled token.

        Raises:
            RequestError: the grammar does not allow the token, or has become too expensive.
        """
        # After EOS only EOS follows, which is not part of the grammar: the driver ends the output.
        if not self._matcher.is_stopped():
            with no_panic():
                self._matcher.consume_token(token_id)
            self._check()

    def accept_all(self, token_ids: Sequence[int]) -> None:
        """Advance by a whole output. Raises RequestError as :meth:`accept`."""
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
