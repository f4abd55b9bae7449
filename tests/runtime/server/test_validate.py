"""Bodies: what is JSON that we take, and what matches the published schemas; jsonschema is the judge."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from typing import Any

import jsonschema
import pytest

from runtime.server import schemas
from runtime.server.errors import BodyError
from runtime.server.validate import check_body
from runtime.server.wire import MAX_BRACKETS, MAX_COMMAS, MAX_DEPTH, parse

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMAS = {
    "completion": (schemas.COMPLETION, {"prompt": "x"}),
    "chat": (schemas.CHAT, {"messages": MESSAGES}),
    "tokenize": (schemas.TOKENIZE, {"prompt": "x"}),
    "detokenize": (schemas.DETOKENIZE, {"tokens": [1]}),
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 5, 2**40, -(2**40), 2**70, 0.5, 1.0, 2.0, 1e300),
    *("", "a", "none", "text", "x" * 2000),
    *([], ["a"], [""], [1], [1, 2.0], [1, "a"], [[1], [2]], [[1], []], [None], ["a"] * 20, [-1], [2**31], [True]),
    *({}, {"5": 1}, {"5": 101}, {"a": 1}, {"type": "text"}, {"type": "json_schema"}, {"include_usage": True}),
    *({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, {"json": {}}, {"json": 5}, {"choice": []}),
    *(MESSAGES, [{"role": "x"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "user"}]),
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"type": "function", "function": {"name": "f", "parameters": {}}}],
]  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_agrees_with_jsonschema(name: str) -> None:
    schema, base = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    fields = sorted({key for option in schema.get("anyOf", [schema]) for key in option["properties"]} | {"unknown"})
    rng = random.Random(5)
    bodies = [{**base, field: value} for field in fields for value in VALUES]
    bodies += [{field: rng.choice(VALUES) for field in rng.sample(fields, min(3, len(fields)))} for _ in range(1000)]
    taken = 0
    for body in bodies:
        try:
            check_body(body, schema)
            ours = True
        except BodyError as error:
            assert str(error) and len(str(error)) < 1000
            ours = False
        assert ours == judge.is_valid(body), body
        taken += ours
    assert taken > len(fields)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 10**9, "n is 1000000000; allowed: 1 to 128"),
        ("n", "2", "n is text: '2'; it takes a whole number"),
        ("n", True, "n is a truth value: True"),
        ("temperature", -0.5, r"temperature is -0.5; allowed: 0 to 100"),
        ("temprature", 1, "unknown field 'temprature'; did you mean 'temperature'"),
        ("suffix", "x", "suffix is text: 'x'"),
        ("prompt", ["a"] * 100_000, "prompt has 100000 entries; allowed: 1 to 1024"),
        ("prompt", [["a"]], r"prompt\[0\]\[0\] is text: 'a'; it takes a whole number"),
        ("prompt", [1, -1], "prompt holds -1; allowed: 0 to"),
        ("prompt", ["a", 5], r"prompt\[1\] is a whole number: 5; it takes text"),
        ("prompt", {}, "prompt is an object: 0 entries; it takes a text, a list of texts, a list of token ids"),
        ("stop", ["x"] * 17, "stop has 17 entries; allowed: 0 to 16"),
        ("stop", "x" * 5000, "stop has 5000 characters; allowed: 1 to 1024"),
        ("logit_bias", {"5": 101}, r"logit_bias.5 is 101; allowed: -100 to 100"),
        ("logit_bias", {"x": 1}, r"a name in logit_bias is 'x'; it takes a token id"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema is missing"),
        ("stream_options", {"usage": True}, "unknown field 'stream_options.usage'"),
        ("priority", 1.5, "priority is a number: 1.5; it takes a whole number"),
    ],
)
def test_errors_name_the_field_and_what_it_takes(field: str, value: Any, message: str) -> None:
    with pytest.raises(BodyError, match=message):
        check_body({"prompt": "x", field: value}, schemas.COMPLETION)


def test_null_is_absent_and_whole_floats_are_whole() -> None:
    assert check_body({"prompt": "x", "seed": None, "n": 2.0}, schemas.COMPLETION) == {"prompt": "x", "n": 2}
    with pytest.raises(BodyError, match="the body is a list"):
        check_body([], schemas.COMPLETION)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "Infinity is no number"),
        (b"\xff", r"not UTF-8 \(byte 0\)"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b"1" * 5000, "not JSON"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"nested deeper than {MAX_DEPTH}"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, f"nested deeper than {MAX_DEPTH}"),
        (b"[" * 1_000_000, f"1000000 lists and objects; allowed: {MAX_BRACKETS}"),
        (b"[" + b"[]," * 1_000_000 + b"1]", "1000001 lists and objects"),
        (b"[" + b"1," * (MAX_COMMAS + 1) + b"1]", f"more than {MAX_COMMAS + 1} entries"),
        (b'["' + b'\\"[' * 1_000_000, "not JSON"),
    ],
)
def test_refuses_bodies_quickly_and_in_little_memory(body: bytes, message: str) -> None:
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(BodyError, match=message):
            parse(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 2.0  # Quadratic work would take hours.
    assert peak < 3 * len(body) + 1_000_000


def test_brackets_in_strings_do_not_count() -> None:
    value = {"a": "[{" * 1000 + '"\\', "b": [[1]] * 100, "c": "\\"}
    assert parse(json.dumps(value).encode()) == value
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert parse(json.dumps(deep).encode()) == deep
