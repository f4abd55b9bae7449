"""Errors of bodies: OpenAI's param and code, and a message with the value and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from runtime.server import validation
from runtime.server.errors import BodyError
from runtime.server.schemas import ChatCompletionRequest, CompletionRequest


def refusal(**body: Any) -> BodyError:
    with pytest.raises(BodyError) as caught:
        CompletionRequest.model_validate({"prompt": "x", **body})
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 10**9, "n is 1000000000; allowed: 1 to 128"),
        ("n", "2", "n is text: '2'; it takes a whole number"),
        ("n", True, "n is a truth value: True"),
        ("temperature", -0.5, r"temperature is -0.5; allowed: 0 to 100"),
        ("temprature", 1, "unknown field 'temprature'; did you mean 'temperature'"),
        ("suffix", "x", "suffix is text: 'x'"),
        ("prompt", ["a"] * 100_000, "prompt has 100000 entries; allowed: at most 1024"),
        ("prompt", [["a"]], r"prompt\[0\]\[0\] is text: 'a'; it takes a whole number"),
        ("prompt", [1, -1], r"prompt\[1\] is -1; allowed: at least 0"),
        ("prompt", ["a", 5], r"prompt\[1\] is a whole number: 5; it takes text"),
        ("prompt", {}, "prompt is an object: 0 entries; it takes a text, a list of texts, a list of token ids"),
        ("stop", ["x"] * 17, "stop has 17 entries; allowed: at most 16"),
        ("stop", "x" * 5000, "stop has 5000 characters; allowed: at most 1024"),
        ("logit_bias", {"5": 101}, "logit_bias.5 is 101; allowed: at most 100"),
        ("logit_bias", {"x": 1}, "logit_bias.x is text: 'x'; it takes a token id"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema is missing"),
        ("stream_options", {"usage": True}, "unknown field 'stream_options.usage'"),
        ("temperature", True, "temperature is a truth value: True; it takes a number"),
        ("temperature", 10**400, r"temperature is a whole number: 10+\.\.\.; it takes a number"),
        ("temperature", float("nan"), "temperature is a number: nan; it takes a finite number"),
        ("response_format", {"type": "xml"}, "response_format.type is 'xml'; allowed: 'text', 'json_object'"),
        ("response_format", {}, "response_format.type is missing"),
        ("cache_salt", "x" * 1025, "cache_salt has 1025 characters; allowed: at most 1024"),
        ("cache_salt", "\ud83d", r"cache_salt is not valid Unicode: '\\ud83d'"),
        ("\ud83d", 1, r"the body is not valid Unicode: '\\ud83d'"),
        ("priority", 1.5, "priority is a number: 1.5; it takes a whole number"),
    ],
)
def test_messages_have_the_field_the_value_and_what_is_allowed(field: str, value: Any, message: str) -> None:
    error = refusal(**{field: value})
    assert re.match(message, str(error)), error
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"n": 0}, "n", "invalid_value"),
        ({"n": "2"}, "n", "invalid_type"),
        ({"stop": ["a", ""]}, "stop[1]", "too_short"),
        ({"stop": 5}, "stop", "invalid_type"),
        ({"prompt": [[1], [1, -1]]}, "prompt[1][1]", "invalid_value"),
        ({"prompt": ["x"] * 1025}, "prompt", "too_long"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_type"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "too_long"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format.json_schema.name", "missing"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "invalid_type"),
        ({"x" * 200: 1}, "x" * 100, "unknown"),
    ],
)  # fmt: skip
def test_param_is_the_path_of_the_value(body: dict[str, Any], param: str, code: str) -> None:
    error = refusal(**body)
    assert (error.param, error.code, error.status) == (param, code, 400)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "x"}, "messages[1].role"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
         "messages[1].tool_calls[0].function.arguments"),
        (5, "messages[1]"),
    ],
)  # fmt: skip
def test_param_of_a_message(message: Any, param: str) -> None:
    with pytest.raises(BodyError) as caught:
        ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}, message]})
    assert caught.value.param == param


def test_an_unknown_field_is_reported_before_a_missing_one() -> None:
    with pytest.raises(BodyError, match="unknown field 'promt'; did you mean 'prompt'"):
        CompletionRequest.model_validate({"promt": "x"})
    for body, kind in (([], "a list"), (None, "null"), ("x", "text")):
        with pytest.raises(BodyError, match=f"the body is {kind}.*; it takes an object"):
            CompletionRequest.model_validate(body)


@pytest.mark.parametrize(
    "body",
    [
        {str(n): 1 for n in range(100_000)},
        {"prompt": [1, *["a"] * 100_000]},
        {"stop": ["a", *[5] * 100_000]},
        {"logit_bias": {str(n): "a" for n in range(100_000)}},
        {"structured_outputs": {str(n): 1 for n in range(100_000)}},
    ],
    ids=["fields", "token-ids", "stop", "logit-bias", "nested-fields"],
)
def test_number_of_collected_errors_is_bounded(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    convert = validation.body_error

    def count(model: Any, error: Any, value: Any) -> BodyError:
        counts.append(error.error_count())
        return convert(model, error, value)

    monkeypatch.setattr(validation, "body_error", count)
    refusal(**body)
    assert counts == [1]
