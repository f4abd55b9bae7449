"""``/v1/completions``: prompts and sampling parameters of a body, and the response or events of the outputs.

Independent of HTTP: :func:`create_completion` and :func:`stream_completion` raise the errors of ``errors.py`` and are
cancelled when the client disconnects.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.common.sampling_params import SamplingParams
from runtime.engine.request import CompletionOutput, GenerateRequest, RequestOutput
from runtime.server.app_state import AppState
from runtime.server.errors import BodyError
from runtime.server.generation import Usage, generate, generate_final
from runtime.server.logprobs import CompletionLogprobs, prompt_logprobs
from runtime.server.sampling import includes_usage, sampling_params
from runtime.server.schemas import CompletionRequest

DEFAULT_MAX_TOKENS = 16
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CompletionCall:
    """A body with its prompts tokenized and its contradictions refused.

    Attributes:
        requests: one for each prompt, all with the same parameters.
        max_tokens: the body's, None if it has none.
        echo: whether each text begins with its prompt.
        returns_prompt_logprobs: whether the body has ``prompt_logprobs``, which echo computes too.
        scores_only: ``max_tokens`` is 0: the response has only the prompt, though the engine always generates a token.
    """

    id: str
    model: str
    created: int
    requests: tuple[GenerateRequest, ...]
    max_tokens: int | None
    returns_prompt_logprobs: bool
    echo: bool
    scores_only: bool
    logprobs: int | None
    include_usage: bool

    @property
    def head(self) -> dict[str, Any]:
        """The first fields of every object of the response."""
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def choice_index(self, prompt: int, sample: int) -> int:
        """OpenAI's index of a choice: samples are numbered across all prompts."""
        return prompt * self.requests[0].params.n + sample


async def read_completion(state: AppState, body: CompletionRequest, *, request_id: str) -> CompletionCall:
    """Check a body and tokenize its prompts. Raises :class:`~runtime.common.errors.LockstepError`."""
    model = state.model_name(body.model)
    include_usage = includes_usage(body)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    n, echo, logprobs = body.n or 1, bool(body.echo), body.logprobs
    if max_tokens == 0 and not echo:
        raise BodyError("max_tokens is 0; allowed: 1 or more, or 0 together with echo", param="max_tokens")
    if body.best_of not in (None, n):
        raise BodyError(f"best_of is {body.best_of}; it can only be the same as n, or left out", param="best_of")
    scored = max(logprobs, body.prompt_logprobs or 0) if echo and logprobs is not None else None
    params = sampling_params(body, max_tokens=max(1, max_tokens), logprobs=logprobs, prompt_logprobs=scored)
    given = _prompt_list(body)
    limit = state.config.max_queued_requests
    if len(given) * n > limit:
        raise BodyError(
            f"{len(given)} prompts with n {n} are {len(given) * n} samples; allowed in one body: "
            f"{limit} (--max-queued-requests); send several",
            param="prompt",
        )
    requests = await state.run_in_thread(_tokenize, state, body, given, params)
    return CompletionCall(
        id=f"cmpl-{request_id}",
        model=model,
        created=int(time.time()),
        requests=requests,
        max_tokens=body.max_tokens,
        returns_prompt_logprobs=body.prompt_logprobs is not None,
        echo=echo,
        scores_only=max_tokens == 0,
        logprobs=logprobs,
        include_usage=include_usage,
    )


def _prompt_list(body: CompletionRequest) -> Sequence[str | list[int]]:
    """The prompts of a body that may have one or several."""
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _tokenize(
    state: AppState, body: CompletionRequest, given: Sequence[str | list[int]], params: SamplingParams
) -> tuple[GenerateRequest, ...]:
    """The engine's requests: texts are tokenized, token ids that an echo returns are decoded. Runs in a thread."""
    special = body.add_special_tokens is not False
    requests: list[GenerateRequest] = []
    for prompt in given:
        if isinstance(prompt, str):
            token_ids, text = state.encode(prompt, add_special_tokens=special), prompt
        else:
            token_ids, text = prompt, state.tokenizer.decode(prompt, False) if body.echo else None
        requests.append(
            GenerateRequest(
                token_ids, params, prompt=text, priority=body.priority or 0, cache_salt=body.cache_salt or ""
            )
        )
    return tuple(requests)


async def create_completion(state: AppState, body: CompletionRequest, *, request_id: str) -> dict[str, Any]:
    """The response to a body. Raises LockstepError: see ``errors.error_reply``."""
    call = await read_completion(state, body, request_id=request_id)
    outputs = await generate_final(state, call.requests, max_tokens=call.max_tokens)
    if call.requests[0].params.prompt_logprobs is None:
        return _response(state, call, outputs)
    return await state.run_in_thread(_response, state, call, outputs)  # Up to twenty entries for each prompt token.


def _response(state: AppState, call: CompletionCall, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    usage = Usage()
    choices: list[dict[str, Any]] = []
    for index, output in enumerate(outputs):
        usage.update(index, output)
        choices += [_choice(state, call, index, output, sample) for sample in output.outputs]
    return {
        **call.head,
        "choices": choices,
        "usage": usage.to_dict(completion_tokens=0 if call.scores_only else None),
    }


def _choice(
    state: AppState, call: CompletionCall, index: int, output: RequestOutput, sample: CompletionOutput
) -> dict[str, Any]:
    text = "" if call.scores_only else sample.text
    logprobs = None
    if call.logprobs is not None:
        formatter = CompletionLogprobs(state.texts, call.logprobs)
        token_ids, tokens = _echoed(call, output) if call.echo else ([], [])
        if not call.scores_only:
            token_ids, tokens = [*token_ids, *sample.token_ids], [*tokens, *(sample.logprobs or ())]
        logprobs = formatter.format(token_ids, tokens)
    choice: dict[str, Any] = {
        "index": call.choice_index(index, sample.index),
        "text": (call.requests[index].prompt or "") + text if call.echo else text,
        "logprobs": logprobs,
        "finish_reason": "length" if call.scores_only else sample.finish_reason,
    }
    if call.returns_prompt_logprobs and output.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, state.texts)
    return choice


def _echoed(call: CompletionCall, output: RequestOutput) -> tuple[list[int], list[Any]]:
    """The prompt's tokens and their logprobs."""
    return list(output.prompt_token_ids), list(output.prompt_logprobs or [None] * len(output.prompt_token_ids))


async def stream_completion(state: AppState, body: CompletionRequest, *, request_id: str) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of a response.

    Raises:
        LockstepError: see ``errors.error_reply``. Errors of the body are raised before the first event.
    """
    call = await read_completion(state, body, request_id=request_id)
    head = f"data: {json.dumps(call.head)[:-1]}, "
    tail = ', "usage": null}\n\n' if call.include_usage else "}\n\n"
    usage = Usage()
    samples: dict[int, _SampleEvents] = {}
    async with contextlib.aclosing(generate(state, call.requests, max_tokens=call.max_tokens)) as outputs:
        async for index, output in outputs:
            usage.update(index, output)
            events: list[str] = []
            for sample in output.outputs:
                number = call.choice_index(index, sample.index)
                if number not in samples:
                    samples[number] = _SampleEvents(state, call, number, index)
                if choice := samples[number].next(output, sample):
                    events.append(f'{head}"choices": [{choice}]{tail}')
            if events:
                yield "".join(events).encode()
    if call.include_usage:
        total = json.dumps(usage.to_dict(completion_tokens=0 if call.scores_only else None))
        yield f'{head}"choices": [], "usage": {total}}}\n\n'.encode()
    yield DONE


class _SampleEvents:
    """Formats the events of one sample. Called for each token, so it builds no dict unless there are logprobs."""

    def __init__(self, state: AppState, call: CompletionCall, number: int, prompt: int) -> None:
        self._call = call
        self._number = number
        self._prompt_text = call.requests[prompt].prompt or ""
        self._echo = call.echo
        self._ended = False
        self._formatter = None if call.logprobs is None else CompletionLogprobs(state.texts, call.logprobs)

    def next(self, output: RequestOutput, sample: CompletionOutput) -> str | None:
        """The choice with the new text and tokens, as JSON; None if there are none."""
        has_tokens = sample.num_tokens > sample.old_tokens
        if self._ended or not (has_tokens or sample.finish_reason):
            return None
        self._ended = sample.finish_reason is not None
        text = "" if self._call.scores_only else sample.new_text
        token_ids: list[int] = []
        tokens: list[Any] = []
        if self._echo:
            # The first event has the echo: the whole prompt has been computed.
            text = self._prompt_text + text
            token_ids, tokens = _echoed(self._call, output)
            self._echo = False
        logprobs = "null"
        if self._formatter is not None:
            if not self._call.scores_only:
                token_ids, tokens = [*token_ids, *sample.new_token_ids], [*tokens, *(sample.new_logprobs or ())]
            logprobs = json.dumps(self._formatter.format(token_ids, tokens))
        elif not (text or self._ended):
            return None  # The text of these tokens is not complete.
        reason = "length" if self._call.scores_only and self._ended else sample.finish_reason
        return (
            f'{{"index": {self._number}, "text": {json.dumps(text)}, "logprobs": {logprobs}, '
            f'"finish_reason": {json.dumps(reason)}}}'
        )
