"""``/v1/completions``: a parsed body to prompts and parameters, the engine's outputs to a response or to its events.

Nothing here knows HTTP: :func:`create_completion` and :func:`stream_completion` raise the errors of ``errors.py`` and
are cancelled when nobody wants the answer any more.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.engine.request import CompletionOutput, RequestOutput
from runtime.server.errors import BodyError
from runtime.server.logprobs import CompletionLogprobs, prompt_logprobs
from runtime.server.sampling import check_stream_options, sampling_params
from runtime.server.schemas import COMPLETION
from runtime.server.serving import Job, Prompt, Serving, Usage
from runtime.server.validate import check_body

DEFAULT_MAX_TOKENS = 16
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CompletionCall:
    """One body, understood.

    Attributes:
        echo: whether each text begins with its prompt.
        stated_prompt_logprobs: whether ``prompt_logprobs`` were asked for by name, not only as part of an echo.
        scores_only: ``max_tokens`` 0: only the prompt is wanted, though the engine always generates a token.
    """

    id: str
    model: str
    created: int
    job: Job
    stated_prompt_logprobs: bool
    echo: bool
    scores_only: bool
    logprobs: int | None
    include_usage: bool

    @property
    def head(self) -> dict[str, Any]:
        """What every object of the response begins with."""
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def choice_index(self, prompt: int, sample: int) -> int:
        """OpenAI numbers the samples of all prompts through."""
        return prompt * self.job.params.n + sample


async def read_completion(serving: Serving, body: Any, *, request_id: str) -> CompletionCall:
    """Check a parsed body and tokenize its prompts. Raises :class:`~runtime.common.errors.LockstepError`."""
    body = check_body(body, COMPLETION)
    model = serving.model_name(body.get("model"))
    include_usage = check_stream_options(body)
    max_tokens, echo, logprobs = body.get("max_tokens", DEFAULT_MAX_TOKENS), body.get("echo", False), None
    if max_tokens == 0 and not echo:
        raise BodyError("max_tokens is 0; allowed: 1 or more, or 0 together with echo", param="max_tokens")
    if body.get("best_of", body.get("n", 1)) != body.get("n", 1):
        raise BodyError(f"best_of is {body['best_of']}; it can only be the same as n, or left out", param="best_of")
    stated = "prompt_logprobs" in body
    if "logprobs" in body:
        logprobs = int(body["logprobs"])
        if echo:
            body["prompt_logprobs"] = max(logprobs, body.get("prompt_logprobs", 0))
    params = sampling_params(body, max_tokens=max(1, max_tokens), logprobs=logprobs)
    num_prompts = len(body["prompt"]) if _is_list_of_prompts(body["prompt"]) else 1
    limit = serving.config.max_queued_requests
    if num_prompts * params.n > limit:
        raise BodyError(
            f"{num_prompts} prompts with n {params.n} are {num_prompts * params.n} samples; allowed in one body: "
            f"{limit} (--max-queued-requests); send several",
            param="prompt",
        )
    prompts = await serving.in_thread(_prompts, serving, body)
    job = Job(prompts, params, body.get("max_tokens"), body.get("priority", 0), body.get("cache_salt", ""))
    return CompletionCall(
        f"cmpl-{request_id}", model, int(time.time()), job, stated, echo, max_tokens == 0, logprobs, include_usage
    )


def _is_list_of_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


def _prompts(serving: Serving, body: dict[str, Any]) -> tuple[Prompt, ...]:
    """Runs in a thread."""
    given = body["prompt"]
    special = body.get("add_special_tokens", True)
    prompts: list[Prompt] = []
    for prompt in given if _is_list_of_prompts(given) else [given]:
        if isinstance(prompt, str):
            prompts.append(Prompt(serving.encode(prompt, add_special_tokens=special), prompt))
        else:
            prompts.append(Prompt(prompt, serving.tokenizer.decode(prompt, False) if body.get("echo") else None))
    return tuple(prompts)


async def create_completion(serving: Serving, body: Any, *, request_id: str) -> dict[str, Any]:
    """The response to a parsed body. Raises LockstepError: see ``errors.error_reply``."""
    call = await read_completion(serving, body, request_id=request_id)
    outputs = await serving.finish(call.job)
    if call.job.params.prompt_logprobs is None:
        return _response(serving, call, outputs)
    return await serving.in_thread(_response, serving, call, outputs)  # Twenty entries for each token of long prompts.


def _response(serving: Serving, call: CompletionCall, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    usage = Usage()
    choices: list[dict[str, Any]] = []
    for index, output in enumerate(outputs):
        usage.see(index, output)
        choices += [_choice(serving, call, index, output, sample) for sample in output.outputs]
    return {
        **call.head,
        "choices": choices,
        "usage": usage.to_dict(completion_tokens=0 if call.scores_only else None),
    }


def _choice(
    serving: Serving, call: CompletionCall, index: int, output: RequestOutput, sample: CompletionOutput
) -> dict[str, Any]:
    text = "" if call.scores_only else sample.text
    logprobs = None
    if call.logprobs is not None:
        shape = CompletionLogprobs(serving.texts, call.logprobs)
        token_ids, tokens = _echoed(call, output) if call.echo else ([], [])
        if not call.scores_only:
            token_ids, tokens = [*token_ids, *sample.token_ids], [*tokens, *(sample.logprobs or ())]
        logprobs = shape.take(token_ids, tokens)
    choice: dict[str, Any] = {
        "index": call.choice_index(index, sample.index),
        "text": (call.job.prompts[index].text or "") + text if call.echo else text,
        "logprobs": logprobs,
        "finish_reason": "length" if call.scores_only else sample.finish_reason,
    }
    if call.stated_prompt_logprobs and output.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, serving.texts)
    return choice


def _echoed(call: CompletionCall, output: RequestOutput) -> tuple[list[int], list[Any]]:
    """The prompt's tokens and what is known of their likelihood."""
    return list(output.prompt_token_ids), list(output.prompt_logprobs or [None] * len(output.prompt_token_ids))


async def stream_completion(serving: Serving, body: Any, *, request_id: str) -> AsyncGenerator[bytes]:
    """The events of a streamed response, ready to send. An error before the first one raises at the first step.

    Raises:
        LockstepError: see ``errors.error_reply``.
    """
    call = await read_completion(serving, body, request_id=request_id)
    head = f"data: {json.dumps(call.head)[:-1]}, "
    tail = ', "usage": null}\n\n' if call.include_usage else "}\n\n"
    usage = Usage()
    samples: dict[int, _SampleEvents] = {}
    async with contextlib.aclosing(serving.run(call.job)) as outputs:
        async for index, output in outputs:
            usage.see(index, output)
            events: list[str] = []
            for sample in output.outputs:
                number = call.choice_index(index, sample.index)
                if number not in samples:
                    samples[number] = _SampleEvents(serving, call, number, index)
                if choice := samples[number].next(output, sample):
                    events.append(f'{head}"choices": [{choice}]{tail}')
            if events:
                yield "".join(events).encode()
    if call.include_usage:
        total = json.dumps(usage.to_dict(completion_tokens=0 if call.scores_only else None))
        yield f'{head}"choices": [], "usage": {total}}}\n\n'.encode()
    yield DONE


class _SampleEvents:
    """The choices of one sample's events, as JSON. Called once a token: no dictionaries where there are no logprobs."""

    def __init__(self, serving: Serving, call: CompletionCall, number: int, prompt: int) -> None:
        self._call = call
        self._number = number
        self._prompt_text = call.job.prompts[prompt].text or ""
        self._echo = call.echo
        self._ended = False
        self._shape = None if call.logprobs is None else CompletionLogprobs(serving.texts, call.logprobs)

    def next(self, output: RequestOutput, sample: CompletionOutput) -> str | None:
        """The choice that tells what is new; None if nothing is."""
        has_tokens = sample.num_tokens > sample.old_tokens
        if self._ended or not (has_tokens or sample.finish_reason):
            return None
        self._ended = sample.finish_reason is not None
        text = "" if self._call.scores_only else sample.new_text
        token_ids: list[int] = []
        tokens: list[Any] = []
        if self._echo:
            # With the first token, since the whole prompt has been computed by then.
            text = self._prompt_text + text
            token_ids, tokens = _echoed(self._call, output)
            self._echo = False
        logprobs = "null"
        if self._shape is not None:
            if not self._call.scores_only:
                token_ids, tokens = [*token_ids, *sample.new_token_ids], [*tokens, *(sample.new_logprobs or ())]
            logprobs = json.dumps(self._shape.take(token_ids, tokens))
        elif not (text or self._ended):
            return None  # The text of these tokens is not certain yet.
        reason = "length" if self._call.scores_only and self._ended else sample.finish_reason
        return (
            f'{{"index": {self._number}, "text": {json.dumps(text)}, "logprobs": {logprobs}, '
            f'"finish_reason": {json.dumps(reason)}}}'
        )
