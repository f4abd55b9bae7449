"""Input processor: checks a generation request against the model's limits and makes its sequences.

Everything here may be called from any thread; errors name the numbers. Whether sampling parameters are consistent is
checked by ``SamplingParams`` itself, whether a request fits the KV cache by ``scheduler.py``.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Iterable
from typing import Any, cast

from runtime.common.config import EngineConfig
from runtime.common.errors import RequestError
from runtime.common.model_config import ModelConfig
from runtime.engine.request import (
    GenerateRequest,
    RequestState,
    SequenceOutput,
    SequenceState,
    derive_seed,
)

MAX_PRIORITY = 2**31 - 1
MAX_SALT_CHARACTERS = 1024


class InputProcessor:
    """Checks requests and turns them into engine state. It has no state of its own.

    Args:
        config: resolved engine configuration.
        model: the model's configuration.
        has_tokenizer: whether the engine has a tokenizer; without one, stop strings are refused.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, *, has_tokenizer: bool) -> None:
        self._max_model_len = config.max_model_len or 0
        self._vocab_size = model.vocab_size
        self._has_tokenizer = has_tokenizer
        self._seed = config.seed
        self._prefix_caching = config.enable_prefix_caching

    def process(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its prompt as a tuple and ``max_tokens`` limited to what ``max_model_len`` leaves.

        Takes microseconds, except for structured outputs, whose grammar is compiled for a trial.

        Raises:
            RequestError: the request can never run.
        """
        params, token_ids = request.params, _as_ids("the prompt", request.prompt_token_ids)
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
                f"leaves of max_model_len {self._max_model_len}",
                param="min_tokens",
            )
        self._check_ids("the prompt", token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids, param="stop_token_ids")
        self._check_ids("logit_bias", tuple(token_id for token_id, _ in params.logit_bias), param="logit_bias")
        if params.stop and not self._has_tokenizer:
            raise RequestError(
                "stop strings need a tokenizer, and this engine has none; use stop_token_ids", param="stop"
            )
        _check_queueing(request.priority, request.cache_salt)
        if params.structured_outputs is not None:
            # Loads llguidance, which no other request needs.
            from runtime.text.grammar_check import check_structured

            check_structured(params.structured_outputs)
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
        return dataclasses.replace(request, prompt_token_ids=token_ids, params=params)

    def make_state(self, request: GenerateRequest, *, req_id: int, first_seq_id: int) -> RequestState:
        """State of a processed request with its ``n`` sequences, numbered from ``first_seq_id``.

        A request without a seed gets one derived from the config's seed and ``req_id``.
        """
        params, token_ids = request.params, tuple(request.prompt_token_ids)
        state = RequestState(req_id, request, time.monotonic())
        state.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        seed = derive_seed(self._seed, req_id) if params.seed is None else params.seed
        salt = self._salt(request, req_id)
        for index in range(params.n):
            # The first of n sequences equals that of n = 1; it alone reports the prompt's logprobs.
            changes = {"n": 1, "seed": derive_seed(seed, index), "prompt_logprobs": None} if index else {"seed": seed}
            state.sequences.append(
                SequenceState(
                    first_seq_id + index,
                    token_ids,
                    dataclasses.replace(params, **{"n": 1, **changes}),
                    priority=request.priority,
                    cache_salt=salt,
                    parent=state.sequences[0] if index else None,
                    index=index,
                    output=SequenceOutput(logprobs=None if params.logprobs is None else []),
                )
            )
        return state

    def _salt(self, request: GenerateRequest, req_id: int) -> bytes | None:
        """Salt of the prefix hashes; without prefix caching, a unique one if ``n`` is more than 1, else None."""
        if self._prefix_caching:
            return request.cache_salt.encode("utf-8", "surrogatepass")
        return req_id.to_bytes(8, "little") if request.params.n > 1 else None

    def _check_ids(self, what: str, token_ids: tuple[int, ...], param: str | None = None) -> None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            return
        position, token_id = next((p, t) for p, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
        raise RequestError(
            f"{what} has token id {token_id} at position {position}; this model's vocabulary has {self._vocab_size} "
            f"tokens, 0 to {self._vocab_size - 1}",
            param=param,
        )


def _check_queueing(priority: Any, cache_salt: Any) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority is {priority!r:.80}; allowed: {-MAX_PRIORITY} to {MAX_PRIORITY}, lower goes first",
            param="priority",
        )
    if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_CHARACTERS:
        raise RequestError(
            f"cache_salt takes a text of at most {MAX_SALT_CHARACTERS} characters; got {cache_salt!r:.80}",
            param="cache_salt",
        )


def _as_ids(what: str, values: Iterable[int]) -> tuple[int, ...]:
    """The values as plain ints (arrays of integers are fine). Raises :class:`RequestError` for anything else."""
    if isinstance(cast("Any", values), (str, bytes)):
        raise RequestError(f"{what} has to be a sequence of token ids, whole numbers; got {type(values).__name__}")
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise RequestError(f"{what} has to be a sequence of token ids, whole numbers; got {values!r:.80}") from None
