"""Which schemas, expressions and grammars are taken, which are refused and why, and that none can harm the driver."""

from __future__ import annotations

import builtins
import json
import re
import threading
from typing import Any

import pytest

from runtime.common.errors import RequestError
from runtime.common.sampling_params import StructuredOutputs
from runtime.text import grammar_check as structured
from runtime.text.grammar_check import check_structured

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


GOOD: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": json.dumps(PERSON)},
    {"json": True},
    {"json": {"$schema": "http://json-schema.org/draft-07/schema#", "title": "t", "description": "d", "default": 1}},
    {"json": {"anyOf": [{"type": "string"}, {"type": "null"}], "discriminator": {"propertyName": "k"}}},
    {"json": {"oneOf": [{"type": "string", "pattern": "^[a-z]{3}$"}, {"type": "integer", "multipleOf": 7}]}},
    {"json": {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}},
    {"json_object": True},
    {"regex": r"\d{4}-\d\d"},
    {"regex": "()"},
    {"choice": ("yes", 'say "no"\n', "ü😀", "\x00")},
    {"grammar": 'start: "a" b*\nb: "b" | "c"'},
    {"grammar": 'root ::= "a" tail\ntail ::= "b" tail | "c"'},
]


@pytest.mark.parametrize("outputs", GOOD, ids=lambda outputs: str(outputs)[:60])
def test_what_can_be_followed_is_taken(outputs: dict[str, Any]) -> None:
    check_structured(StructuredOutputs(**outputs))


PANICS = r"((([^a])|(b|\w|\s))|((\p{L})|\w)|(bab){0,1000}|\s.)"
"""A defect of the library: found by random expressions."""

BAD: list[tuple[dict[str, Any], str]] = [
    ({"json": "{"}, "not JSON"),
    ({"json": "[1]"}, "an object"),
    ({"json": False}, "an object"),
    ({"json": '{"items":' * 20000 + "{}" + "}" * 20000}, "recursion"),
    ({"json": '{"items":' * 500 + "{}" + "}" * 500}, "recursion limit"),
    ({"json": '{"const":' + "9" * 10000 + "}"}, "not JSON"),
    ({"json": '{"const": NaN}'}, "cannot be used"),
    ({"json": '{"const": "\\ud800"}'}, "cannot be used"),
    ({"json": {"type": "objec"}}, "objec"),
    ({"json": {"enum": []}}, "Unsatisfiable"),
    ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
    ({"json": {"$ref": "#"}}, "nothing matches"),
    ({"json": {"$ref": "http://example.org/schema"}}, "example.org"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
    ({"json": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}}, "use anyOf"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": r"a(?=b)"}, "look-ahead"),
    ({"regex": r"[^\s\S]"}, "nothing matches"),
    ({"regex": PANICS}, "llguidance has failed"),
    ({"regex": PANICS + "|x{1000}y{1000}"}, "llguidance has failed"),
    ({"regex": "\ud800"}, "surrogate"),
    ({"choice": ("a", "\udc00")}, "surrogate"),
    ({"grammar": "start: undefined_rule"}, "undefined_rule"),
    ({"grammar": "no grammar at all"}, "structured output cannot be followed"),
    ({"grammar": 'start: "a" <|im_end|>'}, "special tokens"),
    ({"grammar": 'root ::= "a" | missing'}, "missing"),
    ({"grammar": "root ::= \\"}, "not GBNF"),
    ({"grammar": "root ::= " + "(" * 5000}, "recursion"),
    ({"grammar": 'root ::= "a"\n' + "#" * 20000}, "20013"),
]


@pytest.mark.parametrize(("outputs", "reason"), BAD, ids=lambda value: str(value)[:50])
def test_what_cannot_be_followed_is_refused_with_the_reason(outputs: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        check_structured(StructuredOutputs(**outputs))
    assert "<state>" not in str(caught.value)
    assert len(str(caught.value)) < 500


HOSTILE = {
    "states for ever": {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}})?b*$"} for i in range(20)]},
    "stack overflow": {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=list(HOSTILE))
def test_what_would_hang_or_crash_is_refused_too(schema: dict[str, Any]) -> None:
    """Each would end the driver, or keep it for ever, if it were tried there."""
    schema.setdefault("$defs", {}).setdefault("d4000", {})
    with pytest.raises(RequestError, match=r"too long|preparing it took"):
        check_structured(StructuredOutputs(json=json.dumps(schema)))


def test_what_takes_long_to_prepare_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = StructuredOutputs(regex="a slow one")
    monkeypatch.setattr(structured, "MAX_BUILD_SECONDS", -1.0)
    with pytest.raises(RequestError, match="preparing it took"):
        check_structured(outputs)
    monkeypatch.undo()
    check_structured(outputs)  # Only what is good is remembered.


def test_a_hard_schema_is_tried_once_only(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = StructuredOutputs(json={"type": "string", "pattern": "^tried once$"})
    check_structured(outputs)

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a process was started again")

    monkeypatch.setattr(structured.subprocess, "run", refuse)
    check_structured(outputs)


def test_keywords_that_hide_are_found() -> None:
    hidden = '{"allO\\u0066": [{"type": "string", "pattern": "a"}]}'
    assert not structured._is_simple(StructuredOutputs(json=hidden))
    assert not structured._is_simple(StructuredOutputs(regex="a" * 20000))
    assert structured._is_simple(StructuredOutputs(json=PERSON))
    for regex, simple in ((r"\d{4}-\d\d(a{2,5})*", True), ("((a{500}){500}){500}", False), ("a{1,99999999}", False)):
        assert structured._is_simple(StructuredOutputs(regex=regex)) == simple


def test_threads_can_check_at_once() -> None:
    def check(number: int) -> None:
        check_structured(StructuredOutputs(json={"type": "string", "pattern": f"^{number}$"}))
        done.append(number)

    done: list[int] = []
    threads = [threading.Thread(target=check, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(done) == [0, 1, 2]


def test_a_schema_cannot_change_our_settings() -> None:
    lax = {"x-guidance": {"whitespace_flexible": True, "lenient": True}, **PERSON}
    with pytest.raises(RequestError, match="uniqueItems"):
        check_structured(StructuredOutputs(json=lax | {"uniqueItems": True}))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "llguidance":
            raise ImportError("No module named 'llguidance'")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RequestError, match=r"pip install 'lockstep\[serve\]'"):
        check_structured(StructuredOutputs(json_object=True))
