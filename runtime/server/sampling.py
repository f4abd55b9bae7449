"""Sampling parameters of a request body: the fields that both completion APIs share."""

from __future__ import annotations

import json
from typing import Any

from runtime.common.sampling_params import SamplingParams, StructuredOutputs
from runtime.server.errors import BodyError
from runtime.server.schemas import GenerationBody, JsonSchemaFormat

_SAME_NAME = (
    "n min_tokens temperature top_p min_p presence_penalty frequency_penalty repetition_penalty seed ignore_eos "
    "prompt_logprobs stop stop_token_ids"
).split()
"""Fields that are passed on as they are."""


def sampling_params(
    body: GenerationBody, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The sampling parameters of a body.

    Args:
        body: a validated body.
        max_tokens: ``max_tokens``, whose field differs between the APIs.
        logprobs: ``logprobs``, likewise.
        prompt_logprobs: overrides the body's.

    Raises:
        InputError: fields contradict each other.
    """
    fields: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs
    if body.top_k is not None:
        fields["top_k"] = max(0, body.top_k)
    if body.logit_bias is not None:
        fields["logit_bias"] = tuple((int(token_id), bias) for token_id, bias in body.logit_bias.items())
    return SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, structured_outputs=structured_outputs(body), **fields
    )


def structured_outputs(body: GenerationBody) -> StructuredOutputs | None:
    """The constraint in ``response_format`` or ``structured_outputs``. Raises :class:`InputError` if both have one."""
    form, own = body.response_format, body.structured_outputs
    if form is not None and form.type == "text":
        form = None
    if own is not None and form is not None:
        raise BodyError(
            "response_format and structured_outputs both say what the output has to match; give one of them",
            param="structured_outputs",
        )
    if own is not None:
        given = {name: value for name, value in own.model_dump(by_alias=True).items() if value not in (None, False)}
        return StructuredOutputs(**given)
    if isinstance(form, JsonSchemaFormat):
        return StructuredOutputs(json=json.dumps(form.json_schema.schema_))
    return None if form is None else StructuredOutputs(json_object=True)


def includes_usage(body: GenerationBody) -> bool:
    """Whether the last event of a stream has the usage.

    Raises:
        BodyError: there are stream options without a stream, or fields that a stream cannot have.
    """
    if not body.stream:
        if body.stream_options is not None:
            raise BodyError("stream_options needs stream: true", param="stream_options")
        return False
    if body.prompt_logprobs is not None:
        raise BodyError("prompt_logprobs are part of a whole response; leave out stream", param="prompt_logprobs")
    return body.stream_options is not None and bool(body.stream_options.include_usage)
