"""What the engine takes: one request's prompt and parameters against the model's limits, before anything is queued.

Everything here may be called by any thread, and refuses with numbers. Whether parameters make sense by themselves is
``config.py``'s; whether a request fits the KV cache is ``scheduler.py``'s.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from runtime.common.config import EngineConfig
from runtime.common.errors import RequestError
from runtime.common.model_config import ModelConfig
from runtime.common.sampling_params import SamplingParams

MAX_PRIORITY = 2**31 - 1
MAX_SALT_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can run. ``params.max_tokens`` is cut to what ``max_model_len`` leaves."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What decides whether a request can run."""

    max_model_len: int
    vocab_size: int
    has_tokenizer: bool

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, *, has_tokenizer: bool) -> RequestLimits:
        """The limits of a resolved config."""
        return cls(config.max_model_len or 0, model.vocab_size, has_tokenizer)

    def check(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> CheckedRequest:
        """The request as the engine takes it. Quick, but for structured outputs, whose grammar is tried.

        Raises:
            RequestError: it can never run.
        """
        token_ids = _as_ids("the prompt", prompt_token_ids)
        if not token_ids:
            raise RequestError("the prompt has no tokens; give at least one")
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise RequestError(
                f"a prompt of {len(token_ids)} tokens leaves no room for output: max_model_len is "
                f"{self.max_model_len}, so it may have {self.max_model_len - 1}; shorten it or raise --max-model-len"
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens {params.min_tokens} is more than the {room} tokens that a prompt of {len(token_ids)} "
                f"leaves of max_model_len {self.max_model_len}"
            )
        self._check_ids("the prompt", token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", tuple(token_id for token_id, _ in params.logit_bias))
        if params.stop and not self.has_tokenizer:
            raise RequestError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
        _check_queueing(priority, cache_salt)
        if params.structured_outputs is not None:
            from runtime.text.grammar_check import (
                check_structured,  # It loads llguidance, which only such requests need.
            )

            check_structured(params.structured_outputs)
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
        return CheckedRequest(token_ids, params, prompt, priority, cache_salt)

    def _check_ids(self, what: str, token_ids: tuple[int, ...]) -> None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            return
        position, token_id = next((p, t) for p, t in enumerate(token_ids) if not 0 <= t < self.vocab_size)
        raise RequestError(
            f"{what} has token id {token_id} at position {position}; this model's vocabulary has {self.vocab_size} "
            f"tokens, 0 to {self.vocab_size - 1}"
        )


def _check_queueing(priority: Any, cache_salt: Any) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority is {priority!r:.80}; allowed: {-MAX_PRIORITY} to {MAX_PRIORITY}, lower goes first"
        )
    if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_CHARACTERS:
        raise RequestError(
            f"cache_salt takes a text of at most {MAX_SALT_CHARACTERS} characters; got {cache_salt!r:.80}"
        )


def _as_ids(what: str, values: Iterable[int]) -> tuple[int, ...]:
    """The values as plain ints (arrays of integers are fine). Raises :class:`RequestError` for anything else."""
    if isinstance(cast("Any", values), (str, bytes)):
        raise RequestError(f"{what} has to be a sequence of token ids, whole numbers; got {type(values).__name__}")
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise RequestError(f"{what} has to be a sequence of token ids, whole numbers; got {values!r:.80}") from None
