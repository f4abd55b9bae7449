"""Checks a parsed JSON body against the schema that the server also publishes, so that the two cannot differ.

Understands the keywords that ``schemas.py`` uses and no others. Errors name the field, what it takes and what it got.
There is no pydantic here: the schemas say exactly what is allowed, messages are ours, and ``lockstep run-batch`` needs
no web framework. What fields mean together is said where they are used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from runtime.server.errors import BodyError

Schema = dict[str, Any]

_NAMES = {
    "null": "null",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "an object",
}


def check_body(value: Any, schema: Schema) -> dict[str, Any]:
    """The body without fields that are null, whole numbers as ints.

    Raises:
        BodyError: it does not match ``schema``.
    """
    if not isinstance(value, dict):
        raise BodyError(f"the body is {_kind(value)}; it has to be a JSON object", code="invalid_type")
    checked = _check(cast("dict[str, Any]", value), schema, "")
    return {name: item for name, item in checked.items() if item is not None}


def _check(value: Any, schema: Schema, path: str) -> Any:
    """``value`` as it is to be used, or BodyError."""
    if "anyOf" in schema:
        return _check_any(value, schema, path)
    types = _types(schema)
    kind = _type_of(value)
    if kind == "number" and "integer" in types and "number" not in types and float(value).is_integer():
        value, kind = int(value), "integer"  # JSON has one kind of number: 1.0 is whole.
    if not _fits(kind, schema):
        raise BodyError(
            f"{path} is {_kind(value)}: {_short(value)}; it takes {_expected(schema)}", param=path, code="invalid_type"
        )
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(map(repr, schema["enum"]))
        raise BodyError(f"{path} is {_short(value)}; allowed: {allowed}", param=path, code="invalid_value")
    if kind in ("integer", "number"):
        _check_range(value, schema, path, "")
    elif kind == "string":
        _check_length(len(value), schema, path, "characters", "minLength", "maxLength")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            raise BodyError(f"{path} is {_short(value)}; it takes {_expected(schema)}", param=path)
    elif kind == "array":
        return _check_list(value, schema, path)
    elif kind == "object":
        return _check_object(value, schema, path)
    return value


def _check_list(value: list[Any], schema: Schema, path: str) -> list[Any]:
    _check_length(len(value), schema, path, "entries", "minItems", "maxItems")
    items: Schema = schema.get("items", {})
    if items.get("type") == "integer" and value and set(map(type, value)) == {int}:
        for number in (min(value), max(value)):  # A prompt of token ids: thousands, checked at once.
            _check_range(number, items, path, " holds")
        return value
    return [_check(item, items, f"{path}[{index}]") for index, item in enumerate(value)] if items else value


def _check_object(value: dict[str, Any], schema: Schema, path: str) -> dict[str, Any]:
    _check_length(len(value), schema, path, "fields", "minProperties", "maxProperties")
    known: dict[str, Schema] = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    names: Schema = schema.get("propertyNames", {})
    result: dict[str, Any] = {}
    for name, item in value.items():
        where = f"{path}.{name}" if path else name
        if name in known:
            result[name] = _check(item, known[name], where)
        elif others is False:
            raise BodyError(f"unknown field {where[:100]!r}{_nearest(name, known)}", param=where[:100], code="unknown")
        else:
            if names:
                _check(name, names, f"a name in {path}")
            result[name] = _check(item, others, where) if isinstance(others, dict) else item
    for name in schema.get("required", ()):
        if name not in value:
            where = f"{path}.{name}" if path else name
            raise BodyError(f"{where} is missing; it takes {_expected(known[name])}", param=where, code="missing")
    return result


def _check_any(value: Any, schema: Schema, path: str) -> Any:
    """The first alternative of the value's own type decides; if there are several, the first that it matches."""
    options: Sequence[Schema] = schema["anyOf"]
    kind = _type_of(value)
    fitting = [option for option in options if _fits(kind, option)]
    if kind == "array" and value:
        # Of several lists the one that takes such entries is meant: 10^5 texts are too many texts, not wrong numbers.
        inner = _type_of(value[0])
        fitting = [option for option in fitting if _fits(inner, option.get("items", {}))] or fitting
    error = None
    for option in fitting:
        try:
            return _check(value, option, path)
        except BodyError as found:
            error = _deeper(error, found)
    if error is not None:
        raise error
    raise BodyError(
        f"{path} is {_kind(value)}: {_short(value)}; it takes {_expected(schema)}", param=path, code="invalid_type"
    )


def _fits(kind: str, schema: Schema) -> bool:
    """Whether a value of that kind can be what the schema is about."""
    types = _types(schema)
    return not types or kind in types or (kind == "integer" and "number" in types)


def _deeper(first: BodyError | None, second: BodyError) -> BodyError:
    """Of the errors of two alternatives the one that came further: it is about the one that was meant."""
    return first if first is not None and len(first.param or "") >= len(second.param or "") else second


def _check_range(value: float, schema: Schema, path: str, verb: str) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        raise BodyError(
            f"{path}{verb or ' is'} {_short(value)}; allowed: {low} to {high}", param=path, code="invalid_value"
        )


def _check_length(length: int, schema: Schema, path: str, what: str, low_name: str, high_name: str) -> None:
    low, high = schema.get(low_name, 0), schema.get(high_name)
    if length < low or (high is not None and length > high):
        allowed = f"{low} to {high}" if high is not None else f"at least {low}"
        raise BodyError(
            f"{path or 'the body'} has {length} {what}; allowed: {allowed}",
            param=path or None,
            code="too_long" if length > low else "too_short",
        )


def _types(schema: Schema) -> tuple[str, ...]:
    if "anyOf" in schema:
        return tuple(name for option in schema["anyOf"] for name in _types(option))
    declared = schema.get("type", ())
    return (declared,) if isinstance(declared, str) else tuple(declared)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _kind(value: Any) -> str:
    return _NAMES[_type_of(value)] if not isinstance(value, bool) else "a truth value"


def _expected(schema: Schema) -> str:
    """What a schema takes, in words: its description, or its types."""
    words = schema.get("title") or " or ".join(_NAMES[name] for name in dict.fromkeys(_types(schema)) if name != "null")
    return str(words or "another value")


def _short(value: Any) -> str:
    """A value for a message. Nothing long is written out first: a body may hold millions of entries."""
    if isinstance(value, (list, dict)):
        return f"{len(cast('Sequence[Any]', value))} entries"
    text = repr(value[:60]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.7)
    return f"; did you mean {matches[0]!r}?" if matches else "; it would have no effect here, so leave it out"
