"""Validation of request bodies: the base class of the body models, and pydantic's errors as OpenAI error objects.

Bodies arrive as parsed JSON. Numbers are strict: neither text nor a boolean is a number, but 2.0 is a whole number, as
in JSON Schema. The number of errors that pydantic collects is bounded, since a body may hold a million wrong values.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Self, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, PydanticKnownError, core_schema

from runtime.server.errors import BodyError

MAX_PARAM_CHARACTERS = 100
"""Length of the ``param`` of an error: a field name in a body may have any length."""


class StrictModel(BaseModel):
    """An object without conversions between types and without unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: Any) -> Any:
        """Drop all unknown fields but the first, which is the one that the error names."""
        if cls.model_config.get("extra") != "forbid" or not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        known = _field_names(cls)
        if len(fields.keys() - known) < 2:
            return fields
        unknown = next(name for name in fields if name not in known)
        return {name: item for name, item in fields.items() if name in known or name == unknown}


class RequestBody(StrictModel):
    """The body of a request: validation raises :class:`BodyError` instead of pydantic's ``ValidationError``."""

    @model_validator(mode="wrap")
    @classmethod
    def _raise_body_error(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            raise body_error(cls, error, value) from None


# ---- types of fields


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_numbers(value: Any, validate: Callable[[Any], list[int]]) -> list[int]:
    """Validate a list at pydantic's speed; convert numbers such as 2.0 only in a list that has them."""
    try:
        return validate(value)
    except ValidationError:
        if not isinstance(value, list) or float not in map(type, cast("list[Any]", value)):
            raise
        return validate([_whole_number(item) for item in cast("list[Any]", value)])


class Bounded:
    """Annotation of an int or a float: both bounds are included.

    An int is a whole number of JSON: 2 and 2.0, but neither 2.5 nor "2" nor true. A float is finite.
    """

    def __init__(self, low: float, high: float) -> None:
        self.low = low
        self.high = high

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A strict number with these bounds."""
        if source is float:
            return core_schema.float_schema(strict=True, allow_inf_nan=False, ge=self.low, le=self.high)
        whole = core_schema.int_schema(strict=True, ge=int(self.low), le=int(self.high))
        return core_schema.no_info_before_validator_function(_whole_number, whole)


WholeList = WrapValidator(_whole_numbers)
"""Accepts numbers such as 2.0 in a list of ints."""


def by_kind(kind: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Select the branch of a union by a value; ``expected`` describes the branches if ``kind`` returns None."""
    return Discriminator(kind, custom_error_type="invalid_type", custom_error_message=expected)


def unsupported(why: str) -> BeforeValidator:
    """Refuse every value but null, which some clients send for fields that they do not use."""

    def refuse(value: Any) -> None:
        if value is not None:
            raise PydanticCustomError("invalid_type", "null only: {why}", {"why": why})

    return BeforeValidator(refuse)


def at_most(count: int) -> BeforeValidator:
    """Refuse an object with more fields before any of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(cast("dict[Any, Any]", value)) > count:
            length = len(cast("dict[Any, Any]", value))
            raise PydanticKnownError(
                "too_long", {"field_type": "Dictionary", "max_length": count, "actual_length": length}
            )
        return value

    return BeforeValidator(check)


class Validated:
    """Annotation of a dict that a model validates and publishes; the dict itself, key order included, is the value.

    Chat templates receive such objects as the client sent them.
    """

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate as the model, return the input."""

        def keep_input(value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
            validate(value)
            return value

        return core_schema.no_info_wrap_validator_function(keep_input, handler.generate_schema(self._model))


# ---- errors

_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
"""What a field takes, by the type of pydantic's error."""


def body_error(model: type[BaseModel], error: ValidationError, body: Any) -> BodyError:
    """The first of pydantic's errors, an unknown field before all others, as an OpenAI error with status 400."""
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    path = _path(first["loc"], body, keep_last=first["type"] in ("missing", "extra_forbidden"))
    code, message = _describe(model, first, path or "the body")
    return BodyError(message, param=path or None, code=code)


def _path(loc: tuple[int | str, ...], body: Any, *, keep_last: bool) -> str:
    """A location in the body as ``messages[0].role``.

    pydantic's ``loc`` also names the branches of unions, which are not in the body: they are left out.
    """
    path = ""
    value = body
    for position, part in enumerate(loc):
        if isinstance(part, int) and isinstance(value, list) and part < len(cast("list[Any]", value)):
            path, value = f"{path}[{part}]", cast("list[Any]", value)[part]
        elif isinstance(value, dict) and part in value:
            path, value = f"{path}.{part}" if path else str(part), cast("dict[Any, Any]", value)[part]
        elif keep_last and position == len(loc) - 1:
            path = f"{path}.{part}" if path else str(part)
    return path[:MAX_PARAM_CHARACTERS]


def _describe(model: type[BaseModel], error: ErrorDetails, path: str) -> tuple[str, str]:
    """OpenAI's ``code`` and the message of one error."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    match kind:
        case "missing":
            return "missing", f"{path} is missing"
        case "extra_forbidden":
            known = _field_names(model) if len(error["loc"]) == 1 else set[str]()
            return "unknown", f"unknown field {path!r}{_suggestion(path, known)}"
        case "greater_than_equal" | "less_than_equal":
            return "invalid_value", f"{path} is {_short(value)}; allowed: {_allowed(model, error)}"
        case "too_long" | "too_short":
            return kind, f"{path} has {context['actual_length']} entries; allowed: {_lengths(context)}"
        case "string_too_long" | "string_too_short":
            return kind.removeprefix("string_"), f"{path} has {len(value)} characters; allowed: {_lengths(context)}"
        case "literal_error":
            return "invalid_value", f"{path} is {_short(value)}; allowed: {context['expected']}"
        case "union_tag_invalid":
            field = f"{path}.{context['discriminator'].strip(chr(39))}"
            return "invalid_value", f"{field} is {context['tag'][:60]!r}; allowed: {context['expected_tags']}"
        case "union_tag_not_found":
            return "missing", f"{path}.{context['discriminator'].strip(chr(39))} is missing"
        case "string_unicode":
            return "invalid_value", f"{path} is not valid Unicode: {_short(value)}"
        case _:
            expected = _EXPECTED.get(kind, error["msg"])
            return "invalid_type", f"{path} is {_kind(value)}: {_short(value)}; it takes {expected}"


def _allowed(model: type[BaseModel], error: ErrorDetails) -> str:
    """The bounds of a number: both of a :class:`Bounded` field of the body, else the one that was exceeded."""
    context = error.get("ctx", {})
    if len(error["loc"]) == 1 and (field := model.model_fields.get(str(error["loc"][0]))) is not None:
        for option in get_args(field.annotation):
            for each in getattr(option, "__metadata__", ()):
                if isinstance(each, Bounded):
                    return f"{_number(each.low)} to {_number(each.high)}"
    return f"at least {_number(context['ge'])}" if "ge" in context else f"at most {_number(context['le'])}"


def _number(value: float) -> str:
    return str(int(value) if float(value).is_integer() else value)


def _lengths(context: Mapping[str, Any]) -> str:
    return f"at most {context['max_length']}" if "max_length" in context else f"at least {context['min_length']}"


def _field_names(model: type[BaseModel]) -> set[str]:
    """The names of a model's fields in JSON."""
    return {field.alias or name for name, field in model.model_fields.items()}


def _suggestion(name: str, known: set[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {matches[0]!r}?" if matches else "; it would have no effect here, so leave it out"


def _kind(value: Any) -> str:
    """The JSON type of a value, in words."""
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "a truth value"), (int, "a whole number"), (float, "a number"), (str, "text"), (list, "a list"),
        (dict, "an object"),
    )  # fmt: skip
    return next((words for kind, words in kinds if isinstance(value, kind)), "null")


def _short(value: Any) -> str:
    """A value for a message. Long values are cut before they are formatted."""
    if isinstance(value, (list, dict)):
        return f"{len(cast('list[Any]', value))} entries"
    text = repr(value[:60]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
