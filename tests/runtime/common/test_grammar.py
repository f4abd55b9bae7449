"""Grammars of structured output: the texts that they match, and the tokenizers that llguidance can read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runtime.common.errors import RequestError
from runtime.common.grammar import error_of, make_llg_tokenizer, make_matcher, to_grammar
from runtime.common.sampling_params import StructuredOutputs
from tests.small_tokenizer import EOS, write_tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def accepts(text: str, **outputs: Any) -> bool:
    """Whether a whole text matches, byte by byte."""
    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")
    matcher = make_matcher(tokenizer, to_grammar(StructuredOutputs(**outputs)))
    assert not error_of(matcher)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_json_has_no_optional_white_space() -> None:
    assert accepts('{"name":"a b","age":3}', json=PERSON)
    for text in ('{ "name":"a","age":3}', '{"name": "a","age":3}', '{"name":"a","age":3}\n', '{"name":"a"}'):
        assert not accepts(text, json=PERSON)
    assert accepts('{"a":[1,{"b":null}]}', json_object=True)
    assert not accepts("[1]", json_object=True)


def test_a_schema_cannot_change_our_settings() -> None:
    lax = {"x-guidance": {"whitespace_flexible": True, "lenient": True}, **PERSON}
    assert not accepts('{ "name":"a","age":3}', json=lax)


def test_json_matches_what_jsonschema_accepts() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", None, 3.5]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
            "n": {"type": "integer", "minimum": -5, "exclusiveMaximum": 100},
        },
        "required": ["kind", "tags", "n"],
        "additionalProperties": False,
    }
    for kind in ("a", None, 3.5, "b", 3):
        for tags in (["ab"], ["", "éé"], [], ["abcd"], ["a", "b", "c"], [1]):
            for n in (-5, -6, 0, 99, 100, 1000, "0"):
                value = {"kind": kind, "tags": tags, "n": n}
                text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
                valid = jsonschema.Draft202012Validator(schema).is_valid(value)
                assert accepts(text, json=schema) == valid, text


@pytest.mark.parametrize("regex", [r"(ab|c)*d?", r"^\d{2,4}$", r"[^x]+/\w", r"(?i)yes|no"])
def test_expressions_match_the_whole_text_as_in_python(regex: str) -> None:
    texts = [
        "",
        "ab",
        "abcd",
        "cabd",
        "d",
        "dd",
        "1",
        "12",
        "1234",
        "12345",
        "a/b",
        "x/b",
        "a/b ",
        "YES",
        "no",
        "yesno",
    ]
    for text in texts:
        assert accepts(text, regex=regex) == bool(re.fullmatch(regex, text)), text


def test_choices_are_plain_texts() -> None:
    choices = ("yes", 'say "no"\n', "ü😀", "a|b", "\\d", "\x00")
    assert all(accepts(choice, choice=choices) for choice in choices)
    assert not any(accepts(text, choice=choices) for text in ("y", "yesyes", "a", "b", "3", 'say \\"no\\"\\n'))


def test_both_notations_of_grammars() -> None:
    lark, gbnf = 'start: "a" tail\ntail: "b" tail | "c"', 'root ::= "a" tail\ntail ::= "b" tail | "c"'
    quoting = 'start: "::=" "a"'  # Lark, although it contains the mark of GBNF.
    for grammar in (lark, gbnf):
        assert accepts("abbc", grammar=grammar)
        assert not accepts("abb", grammar=grammar)
    assert accepts("::=a", grammar=quoting)


# ---- tokenizers


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"model": {}}', '{"model": {"type": "WordPiece", "vocab": {"a": 0}}}']
)
def test_an_unusable_tokenizer_is_named_in_the_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(RequestError, match=re.escape(str(tmp_path / "tokenizer.json"))):
        make_llg_tokenizer(tmp_path, (0,), 10)


def test_the_tokenizer_has_the_vocabulary_of_model_and_checkpoint(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    tokenizer = make_llg_tokenizer(tmp_path, (EOS, 5000), 310)
    assert tokenizer.vocab_size == 310
    assert tokenizer.eos_tokens == [EOS]  # The tokenizer has no token 5000.
    assert make_llg_tokenizer(tmp_path / "tokenizer.json", (), 10).vocab_size == 300
