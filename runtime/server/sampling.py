"""From the fields that both APIs share to the engine's sampling parameters."""

from __future__ import annotations

import json
from typing import Any

from runtime.common.sampling_params import SamplingParams, StructuredOutputs
from runtime.server.errors import BodyError

_AS_THEY_ARE = (
    "n min_tokens temperature top_p min_p presence_penalty frequency_penalty repetition_penalty seed ignore_eos "
    "prompt_logprobs"
).split()


def sampling_params(body: dict[str, Any], *, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """The parameters in a checked body.

    Args:
        body: after ``validate.check_body``.
        max_tokens: the fields that say so differ between the APIs.
        logprobs: the same.

    Raises:
        InputError: fields contradict each other.
    """
    fields: dict[str, Any] = {name: body[name] for name in _AS_THEY_ARE if name in body}
    if "stop" in body:
        fields["stop"] = (body["stop"],) if isinstance(body["stop"], str) else tuple(body["stop"])
    if "stop_token_ids" in body:
        fields["stop_token_ids"] = tuple(body["stop_token_ids"])
    if "top_k" in body:
        fields["top_k"] = max(0, body["top_k"])
    if "logit_bias" in body:
        fields["logit_bias"] = tuple((int(token_id), bias) for token_id, bias in body["logit_bias"].items())
    return SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, structured_outputs=structured_outputs(body), **fields
    )


def structured_outputs(body: dict[str, Any]) -> StructuredOutputs | None:
    """What ``response_format`` or ``structured_outputs`` asks for. Raises :class:`InputError` if both do."""
    form: dict[str, Any] = body.get("response_format", {"type": "text"})
    own = body.get("structured_outputs")
    if own is not None and form["type"] != "text":
        raise BodyError(
            "response_format and structured_outputs both say what the output has to match; give one of them",
            param="structured_outputs",
        )
    if own is not None:
        given = {name: value for name, value in own.items() if value is not None and value is not False}
        if isinstance(given.get("choice"), list):
            given["choice"] = tuple(given["choice"])
        return StructuredOutputs(**given)
    if form["type"] == "json_object":
        return StructuredOutputs(json_object=True)
    if form["type"] == "json_schema":
        return StructuredOutputs(json=json.dumps(form["json_schema"]["schema"]))
    return None


def check_stream_options(body: dict[str, Any]) -> bool:
    """Whether a stream ends with its usage. Raises :class:`BodyError` where there is no stream, or one that cannot."""
    if not body.get("stream"):
        if "stream_options" in body:
            raise BodyError("stream_options needs stream: true", param="stream_options")
        return False
    if "prompt_logprobs" in body:
        raise BodyError("prompt_logprobs come with the whole answer; leave out stream", param="prompt_logprobs")
    return bool(body.get("stream_options", {}).get("include_usage"))
