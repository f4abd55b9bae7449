"""Structured output: translates a request's parameters to a grammar of llguidance, for the driver and rank 0.

The driver checks the grammar before the request is queued (``runtime/text/grammar_check.py``); rank 0 builds the same
grammar from the same parameters and matches the output against it (``workers/sampling/grammar.py``). llguidance is an
optional dependency, imported at first use.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runtime.common.errors import RequestError
from runtime.common.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TOKENIZER_FILE = "tokenizer.json"

MAX_GBNF_CHARACTERS = 16 * 1024
"""Length limit of GBNF grammars, which are translated to Lark: a longer one takes minutes."""

PREFIX = "structured output cannot be followed: "

_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "coerce_one_of": False}


def to_grammar(outputs: StructuredOutputs) -> str:
    """The grammar in llguidance's JSON form. JSON has no optional white space: a model could repeat it forever.

    Raises:
        RequestError: the JSON schema or the grammar is invalid, or llguidance is not installed.
    """
    with no_panic():
        return _grammar(outputs)


def _grammar(outputs: StructuredOutputs) -> str:
    matcher = llguidance_module().LLMatcher
    if outputs.regex is not None:
        return matcher.grammar_from_regex(_encodable("regex", outputs.regex))
    if outputs.choice:
        texts = [json.dumps(_encodable("choice", text), ensure_ascii=False) for text in outputs.choice]
        return matcher.grammar_from_lark("start: " + " | ".join(texts))
    if outputs.grammar is not None:
        return matcher.grammar_from_lark(_to_lark(_encodable("grammar", outputs.grammar)))
    schema = {"type": "object"} if outputs.json_object else _schema(outputs.json or "")
    try:
        return matcher.grammar_from_json_schema(json.dumps(schema), overrides=cast("Any", _COMPACT))
    except ValueError as error:
        raise RequestError(f"the JSON schema cannot be used: {short_error(str(error))}") from None


def make_llg_tokenizer(path: str | Path, eos_token_ids: Sequence[int], vocab_size: int) -> LLTokenizer:
    """llguidance's tokenizer for a checkpoint. Takes 0.3 s for 49000 tokens: cache it.

    Args:
        path: folder of the checkpoint, or its tokenizer.json.
        eos_token_ids: tokens that end an output; if empty, the tokenizer's own.
        vocab_size: of the model; may be larger than the tokenizer's because of padding.

    Raises:
        RequestError: the file cannot be read, or its tokens do not map to bytes.
    """
    llguidance = llguidance_module()
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        known = _num_tokens(json.loads(text))
        eos = [token_id for token_id in eos_token_ids if token_id < known]
        with no_panic():
            return llguidance.LLTokenizer(text, n_vocab=max(known, vocab_size), eos_token=eos or None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise RequestError(
            f"structured output is not available with this checkpoint: {file} is not a tokenizer that llguidance can "
            f"read ({short_error(str(error))}); drop structured_outputs"
        ) from error


def parser_limits() -> LLParserLimits:
    """Cost limits of one grammar, the same in the driver's check and on rank 0."""
    return llguidance_module().LLParserLimits(
        max_grammar_size=50_000, step_max_items=10_000, max_lexer_states=50_000, verbose_errors=False
    )


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of ``grammar``. Check :func:`error_of` before use.

    Raises:
        RequestError: llguidance panicked.
    """
    with no_panic():
        return llguidance_module().LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())


def error_of(matcher: LLMatcher) -> str:
    """The error of a matcher in one line; empty if it has none."""
    return short_error(matcher.get_error()) if matcher.is_error() else ""


@contextlib.contextmanager
def no_panic() -> Generator[None]:
    """Convert a panic of llguidance to RequestError; it derives from BaseException and would end the process."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(
            f"{PREFIX}llguidance has failed ({short_error(str(error))}); write the schema, "
            "expression or grammar in another way"
        ) from None


def _num_tokens(fields: dict[str, Any]) -> int:
    """One more than the highest token id in a tokenizer.json."""
    vocab: Any = fields["model"]["vocab"]
    highest = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1
    return 1 + max([highest, *(token["id"] for token in fields.get("added_tokens") or ())])


def llguidance_module() -> Any:
    """The llguidance module. Raises RequestError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            f"structured output needs the library llguidance, which cannot be imported here ({error}); install it "
            "with: pip install 'lockstep[serve]'"
        ) from None
    return llguidance


def _schema(text: str) -> dict[str, Any]:
    """The schema in ``text``, without its ``x-guidance`` key, which would override our settings of llguidance."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {short_error(str(error))}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError(f"a JSON schema is an object; got {text:.80}")
    return {key: value for key, value in cast("dict[str, Any]", schema).items() if key != "x-guidance"}


def _to_lark(grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(grammar):
        return grammar
    if len(grammar) > MAX_GBNF_CHARACTERS:
        raise RequestError(
            f"a grammar in GBNF may have {MAX_GBNF_CHARACTERS} characters, not {len(grammar)}; write it in Lark's "
            "notation"
        )
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception, IndexError and RecursionError
        raise RequestError(f"the grammar is not GBNF: {short_error(str(error) or type(error).__name__)}") from None


def _encodable(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} is not valid Unicode (a lone surrogate?): {text!r:.80}") from None
    return text


def short_error(text: str) -> str:
    """An error message of llguidance in one line, without its internal state."""
    for mark in ("<non-verbose/>", "<state>", "<backtrace>"):
        text = text.partition(mark)[0]
    return " ".join(text.split())[:300]
