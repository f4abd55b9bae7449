"""Models of request bodies: they accept the bodies that their published JSON schemas accept, by jsonschema."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from runtime.server import schemas
from runtime.server.errors import BodyError

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "completion": (schemas.CompletionRequest, {"prompt": "x"}),
    "chat": (schemas.ChatCompletionRequest, {"messages": MESSAGES}),
    "tokenize": (schemas.TokenizeRequest, {"prompt": "x"}),
    "detokenize": (schemas.DetokenizeRequest, {"tokens": [1]}),
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


@pytest.mark.parametrize("name", BODIES)
def test_models_agree_with_their_published_schemas(name: str) -> None:
    annotation, base = BODIES[name]
    model = TypeAdapter[Any](annotation)
    schema = model.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    objects = (
        [schema["$defs"][each["$ref"].split("/")[-1]] for each in schema["oneOf"]] if "oneOf" in schema else [schema]
    )
    fields = sorted({key for option in objects for key in option["properties"]} | {"unknown"})
    rng = random.Random(5)
    bodies = [{**base, field: value} for field in fields for value in VALUES]
    bodies += [{field: rng.choice(VALUES) for field in rng.sample(fields, min(3, len(fields)))} for _ in range(1000)]
    accepted = 0
    for body in bodies:
        try:
            model.validate_python(body)
            valid = True
        except BodyError as error:
            assert str(error) and len(str(error)) < 1000
            valid = False
        assert valid == judge.is_valid(body), body
        accepted += valid
    assert accepted > len(fields)


def test_null_is_absent_and_whole_floats_are_whole_numbers() -> None:
    body = schemas.CompletionRequest.model_validate({"prompt": [1, 2.0], "seed": None, "n": 2.0})
    assert (body.prompt, body.seed, body.n) == ([1, 2], None, 2) and isinstance(body.n, int)


def test_templates_receive_messages_and_tools_as_sent() -> None:
    message = {"content": "x", "thinking": 5, "role": "user"}
    tool = {"type": "function", "function": {"parameters": {"b": 1, "a": 2}, "name": "f"}}
    body = schemas.ChatCompletionRequest.model_validate({"messages": [message], "tools": [tool]})
    assert [list(each) for each in body.messages] == [["content", "thinking", "role"]]
    assert body.messages == [message] and str(body.tools) == str([tool])
