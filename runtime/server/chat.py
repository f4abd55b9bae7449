"""``/v1/chat/completions``: messages through the checkpoint's chat template, outputs to a response or to its events.

Tools reach the template; what the model says is never parsed for calls. Nothing here knows HTTP, as in
``completions.py``.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from runtime.engine.request import CompletionOutput, RequestOutput
from runtime.server.completions import DONE
from runtime.server.errors import BodyError
from runtime.server.logprobs import chat_logprobs, prompt_logprobs
from runtime.server.sampling import check_stream_options, sampling_params
from runtime.server.schemas import CHAT, MAX_OUTPUT_TOKENS
from runtime.server.serving import Job, Prompt, Serving, Usage
from runtime.server.validate import check_body


@dataclass(frozen=True)
class ChatCall:
    """One body, understood. ``top_logprobs``: alternatives for each token; None: no logprobs."""

    id: str
    model: str
    created: int
    job: Job
    top_logprobs: int | None
    include_usage: bool

    def head(self, kind: str) -> dict[str, Any]:
        """What every object of the response begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


async def read_chat(serving: Serving, body: Any, *, request_id: str) -> ChatCall:
    """Check a parsed body, render and tokenize its messages. Raises :class:`~runtime.common.errors.LockstepError`."""
    body = check_body(body, CHAT)
    model = serving.model_name(body.get("model"))
    include_usage = check_stream_options(body)
    top_logprobs = int(body.get("top_logprobs", 0)) if body.get("logprobs") else None
    if top_logprobs is None and "top_logprobs" in body:
        raise BodyError("top_logprobs needs logprobs: true", param="top_logprobs")
    asked = body.get("max_completion_tokens", body.get("max_tokens"))
    if asked != body.get("max_tokens", asked):
        raise BodyError(
            f"max_completion_tokens {asked} and max_tokens {body['max_tokens']} differ; give one of them",
            param="max_tokens",
        )
    # Checked before the template runs, which is the dear part.
    params = sampling_params(body, max_tokens=asked or MAX_OUTPUT_TOKENS, logprobs=top_logprobs)
    prompt = await serving.in_thread(render_prompt, serving, body)
    if asked is None:
        params = serving.with_all_room(params, prompt)
    job = Job((prompt,), params, asked, body.get("priority", 0), body.get("cache_salt", ""))
    return ChatCall(f"chatcmpl-{request_id}", model, int(time.time()), job, top_logprobs, include_usage)


def render_prompt(serving: Serving, body: dict[str, Any]) -> Prompt:
    """The prompt of a checked body with messages. Runs in a thread. Raises InputError."""
    tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
    text = serving.tokenizer.apply_chat_template(
        [_plain(message, index) for index, message in enumerate(body["messages"])],
        add_generation_prompt=body.get("add_generation_prompt", True),
        tools=tools,
    )
    # The template has written the special tokens already.
    return Prompt(serving.encode(text, add_special_tokens=False), text)


def _plain(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: its content one text, the arguments of tool calls objects."""
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(part["text"] for part in content)
    elif content is None:
        plain["content"] = ""  # Templates add contents to each other.
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call, f"messages[{index}]")}}
            for call in message["tool_calls"]
        ]
    return plain


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


async def create_chat_completion(serving: Serving, body: Any, *, request_id: str) -> dict[str, Any]:
    """The response to a parsed body. Raises LockstepError: see ``errors.error_reply``."""
    call = await read_chat(serving, body, request_id=request_id)
    (output,) = await serving.finish(call.job)
    if call.job.params.prompt_logprobs is None:
        return _response(serving, call, output)
    return await serving.in_thread(_response, serving, call, output)  # Twenty entries for each token of a long prompt.


def _response(serving: Serving, call: ChatCall, output: RequestOutput) -> dict[str, Any]:
    usage = Usage()
    usage.see(0, output)
    response: dict[str, Any] = {
        **call.head("chat.completion"),
        "choices": [_choice(serving, call, sample) for sample in output.outputs],
        "usage": usage.to_dict(),
    }
    if call.job.params.prompt_logprobs is not None and output.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, serving.texts)
    return response


def _choice(serving: Serving, call: ChatCall, sample: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if call.top_logprobs is not None:
        logprobs = chat_logprobs(sample.logprobs or (), serving.texts, call.top_logprobs)
    return {
        "index": sample.index,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason,
    }


async def stream_chat_completion(serving: Serving, body: Any, *, request_id: str) -> AsyncGenerator[bytes]:
    """The events of a streamed response, ready to send. An error before the first one raises at the first step.

    Raises:
        LockstepError: see ``errors.error_reply``.
    """
    call = await read_chat(serving, body, request_id=request_id)
    head = f'data: {json.dumps(call.head("chat.completion.chunk"))[:-1]}, "choices": ['
    tail = '], "usage": null}\n\n' if call.include_usage else "]}\n\n"
    usage = Usage()
    begun: set[int] = set()
    ended: set[int] = set()
    async with contextlib.aclosing(serving.run(call.job)) as outputs:
        async for _, output in outputs:
            usage.see(0, output)
            events: list[str] = []
            for sample in output.outputs:
                if sample.index in ended:
                    continue
                if sample.index not in begun:
                    begun.add(sample.index)
                    delta = '{"role": "assistant", "content": "", "refusal": null}'
                    events.append(f"{head}{_delta(sample.index, delta)}{tail}")
                if sample.finish_reason is not None:
                    ended.add(sample.index)
                events += [f"{head}{choice}{tail}" for choice in _news(serving, call, sample)]
            if events:
                yield "".join(events).encode()
    if call.include_usage:
        yield f'{head}], "usage": {json.dumps(usage.to_dict())}}}\n\n'.encode()
    yield DONE


def _news(serving: Serving, call: ChatCall, sample: CompletionOutput) -> list[str]:
    """The choices, as JSON, that tell what is new about a sample. Called once a token, so it makes no dictionaries.

    OpenAI's last chunk of a sample has the reason of its end, and an empty delta.
    """
    choices: list[str] = []
    text, logprobs = sample.new_text, "null"
    if call.top_logprobs is not None and sample.new_logprobs:
        logprobs = json.dumps(chat_logprobs(sample.new_logprobs, serving.texts, call.top_logprobs))
    if text or logprobs != "null":
        choices.append(_delta(sample.index, f'{{"content": {json.dumps(text)}}}', logprobs))
    if sample.finish_reason is not None:
        choices.append(_delta(sample.index, "{}", reason=json.dumps(sample.finish_reason)))
    return choices


def _delta(index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
    return f'{{"index": {index}, "delta": {delta}, "logprobs": {logprobs}, "finish_reason": {reason}}}'
