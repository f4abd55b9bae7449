"""``/v1/chat/completions``: the prompt that the chat template renders, and the response or events of the outputs.

Tools reach the template; the response is not parsed for tool calls. Independent of HTTP, as ``completions.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from runtime.common.sampling_params import MAX_OUTPUT_TOKENS
from runtime.engine.request import CompletionOutput, GenerateRequest, RequestOutput
from runtime.server.app_state import AppState
from runtime.server.completions import DONE
from runtime.server.errors import BodyError
from runtime.server.generation import Usage, generate, generate_final
from runtime.server.logprobs import chat_logprobs, prompt_logprobs
from runtime.server.sampling import includes_usage, sampling_params
from runtime.server.schemas import ChatCompletionRequest, TokenizeChatRequest


@dataclass(frozen=True)
class ChatCall:
    """A body with its prompt rendered and tokenized.

    Attributes:
        max_tokens: the body's, None if it has none.
        top_logprobs: alternatives for each token; None: no logprobs.
    """

    id: str
    model: str
    created: int
    request: GenerateRequest
    max_tokens: int | None
    top_logprobs: int | None
    include_usage: bool

    def head(self, kind: str) -> dict[str, Any]:
        """The first fields of every object of the response."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


async def read_chat(state: AppState, body: ChatCompletionRequest, *, request_id: str) -> ChatCall:
    """Check a body, render and tokenize its messages. Raises :class:`~runtime.common.errors.LockstepError`."""
    model = state.model_name(body.model)
    include_usage = includes_usage(body)
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if top_logprobs is None and body.top_logprobs is not None:
        raise BodyError("top_logprobs needs logprobs: true", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens not in (None, max_tokens):
        raise BodyError(
            f"max_completion_tokens {max_tokens} and max_tokens {body.max_tokens} differ; give one of them",
            param="max_tokens",
        )
    # Parameters are checked before the template is rendered, which takes longest.
    params = sampling_params(body, max_tokens=max_tokens or MAX_OUTPUT_TOKENS, logprobs=top_logprobs)
    prompt, token_ids = await state.run_in_thread(render_prompt, state, body)
    if max_tokens is None:
        room = state.engine.max_total_tokens - len(token_ids)
        params = dataclasses.replace(params, max_tokens=max(1, params.min_tokens, room))
    request = GenerateRequest(
        token_ids, params, prompt=prompt, priority=body.priority or 0, cache_salt=body.cache_salt or ""
    )
    return ChatCall(f"chatcmpl-{request_id}", model, int(time.time()), request, max_tokens, top_logprobs, include_usage)


def render_prompt(state: AppState, body: ChatCompletionRequest | TokenizeChatRequest) -> tuple[str, list[int]]:
    """Render the messages of a body: the prompt and its token ids. Runs in a thread. Raises InputError."""
    unused = isinstance(body, ChatCompletionRequest) and body.tool_choice == "none"
    text = state.tokenizer.apply_chat_template(
        [_template_message(message, index) for index, message in enumerate(body.messages)],
        add_generation_prompt=body.add_generation_prompt is not False,
        tools=None if unused else body.tools or None,
    )
    # The template has written the special tokens already.
    return text, state.encode(text, add_special_tokens=False)


def _template_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: its content is one text, arguments of tool calls are objects."""
    result = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        result["content"] = "\n".join(part["text"] for part in content)
    elif content is None:
        result["content"] = ""  # Templates concatenate contents.
    if message.get("tool_calls"):
        result["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call, f"messages[{index}]")}}
            for call in message["tool_calls"]
        ]
    return result


def _arguments(call: dict[str, Any], where: str) -> Any:
    text = call["function"]["arguments"]
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BodyError(
            f"the arguments of a tool call in {where} are {text[:60]!r}; they have to be a JSON object, as text",
            param=f"{where}.tool_calls",
        )
    return value


async def create_chat_completion(state: AppState, body: ChatCompletionRequest, *, request_id: str) -> dict[str, Any]:
    """The response to a body. Raises LockstepError: see ``errors.error_reply``."""
    call = await read_chat(state, body, request_id=request_id)
    (output,) = await generate_final(state, [call.request], max_tokens=call.max_tokens)
    if call.request.params.prompt_logprobs is None:
        return _response(state, call, output)
    return await state.run_in_thread(_response, state, call, output)  # Up to twenty entries for each prompt token.


def _response(state: AppState, call: ChatCall, output: RequestOutput) -> dict[str, Any]:
    usage = Usage()
    usage.update(0, output)
    response: dict[str, Any] = {
        **call.head("chat.completion"),
        "choices": [_choice(state, call, sample) for sample in output.outputs],
        "usage": usage.to_dict(),
    }
    if call.request.params.prompt_logprobs is not None and output.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, state.texts)
    return response


def _choice(state: AppState, call: ChatCall, sample: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if call.top_logprobs is not None:
        logprobs = chat_logprobs(sample.logprobs or (), state.texts, call.top_logprobs)
    return {
        "index": sample.index,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason,
    }


async def stream_chat_completion(
    state: AppState, body: ChatCompletionRequest, *, request_id: str
) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of a response.

    Raises:
        LockstepError: see ``errors.error_reply``. Errors of the body are raised before the first event.
    """
    call = await read_chat(state, body, request_id=request_id)
    head = f'data: {json.dumps(call.head("chat.completion.chunk"))[:-1]}, "choices": ['
    tail = '], "usage": null}\n\n' if call.include_usage else "]}\n\n"
    usage = Usage()
    started: set[int] = set()
    finished: set[int] = set()
    async with contextlib.aclosing(generate(state, [call.request], max_tokens=call.max_tokens)) as outputs:
        async for _, output in outputs:
            usage.update(0, output)
            events: list[str] = []
            for sample in output.outputs:
                if sample.index in finished:
                    continue
                if sample.index not in started:
                    started.add(sample.index)
                    delta = '{"role": "assistant", "content": "", "refusal": null}'
                    events.append(f"{head}{_delta(sample.index, delta)}{tail}")
                if sample.finish_reason is not None:
                    finished.add(sample.index)
                events += [f"{head}{choice}{tail}" for choice in _new_choices(state, call, sample)]
            if events:
                yield "".join(events).encode()
    if call.include_usage:
        yield f'{head}], "usage": {json.dumps(usage.to_dict())}}}\n\n'.encode()
    yield DONE


def _new_choices(state: AppState, call: ChatCall, sample: CompletionOutput) -> list[str]:
    """The choices with the new text and tokens of a sample, as JSON. Called for each token, so it builds no dict.

    OpenAI's last chunk of a sample has the finish reason and an empty delta.
    """
    choices: list[str] = []
    text, logprobs = sample.new_text, "null"
    if call.top_logprobs is not None and sample.new_logprobs:
        logprobs = json.dumps(chat_logprobs(sample.new_logprobs, state.texts, call.top_logprobs))
    if text or logprobs != "null":
        choices.append(_delta(sample.index, f'{{"content": {json.dumps(text)}}}', logprobs))
    if sample.finish_reason is not None:
        choices.append(_delta(sample.index, "{}", reason=json.dumps(sample.finish_reason)))
    return choices


def _delta(index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
    return f'{{"index": {index}, "delta": {delta}, "logprobs": {logprobs}, "finish_reason": {reason}}}'
