"""What a request may ask its output to match, as a grammar of llguidance, and whether it can be used at all.

The driver checks a request here before it is queued; rank 0 makes the same grammar of the same parameters and follows
it (``workers/structured.py``). llguidance is an optional library, so it is imported where it is needed.

A small grammar can keep llguidance busy for hours, fill the memory, or end the process by a stack overflow: crossing
out what several patterns have in common is what takes so long, and no limit of the library covers it. What has such
parts, or is large, is therefore tried in a process of its own first, whose time and memory are limited. What was found
to be good is remembered, so a schema that is sent with every request costs that once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runtime.config import StructuredOutputs
from runtime.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TOKENIZER_FILE = "tokenizer.json"

MAX_BUILD_SECONDS = 1.0
"""CPU time that making a grammar ready may take. Rank 0 does it within a step, and everybody waits."""

TRIAL_SECONDS = 2
"""CPU time after which a trial is ended, its start included."""

TRIAL_WALL_SECONDS = 30.0
"""Time after which a trial is given up on a machine that has no CPU time for it."""

TRIAL_MEMORY_BYTES = 1024 * 1024 * 1024
"""Address space of a trial."""

TRIAL_STACK_BYTES = 2 * 1024 * 1024
"""Stack of a trial: a quarter of what a rank has, so that what passes here does not overflow there."""

SIMPLE_CHARACTERS = 16 * 1024
"""Longer grammars are tried in a process of their own."""

SIMPLE_REFERENCES = 100
"""Schemas with more references, which may be a deep chain, are tried in a process of their own."""

MAX_GBNF_CHARACTERS = 16 * 1024
"""A longer grammar in GBNF takes minutes to translate; in Lark's notation it needs no translation."""

SIMPLE_REPEATS = 10_000
"""Expressions whose counts, e.g. 3 in ``(ab){3}``, multiply to more are tried in a process of their own."""

HARD_KEYWORDS = ("allOf", "oneOf", "not", "pattern", "patternProperties", "multipleOf", "propertyNames", "format")
"""JSON schema keywords that intersect languages, or count."""

PREFIX = "structured output cannot be followed: "

_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "coerce_one_of": False}


def check_structured(outputs: StructuredOutputs) -> None:
    """Refuse what cannot be followed. May take :data:`TRIAL_WALL_SECONDS`: not for an event loop or a step's path.

    Raises:
        RequestError: the schema, expression or grammar is invalid, uses what is not supported, takes too long to
            prepare, or nothing matches it; or llguidance is not installed.
    """
    _check(to_grammar(outputs), not _is_simple(outputs))


def to_grammar(outputs: StructuredOutputs) -> str:
    """The grammar in llguidance's own JSON form. JSON gets no free white space, so that a model cannot dwell in it.

    Raises:
        RequestError: it is not even a JSON schema, or not a grammar; or llguidance is not installed.
    """
    with no_panic():
        return _grammar(outputs)


def _grammar(outputs: StructuredOutputs) -> str:
    matcher = _llguidance().LLMatcher
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
        raise RequestError(f"the JSON schema cannot be used: {_short(str(error))}") from None


def make_llg_tokenizer(path: str | Path, eos_token_ids: Sequence[int], vocab_size: int) -> LLTokenizer:
    """What llguidance has to know of a checkpoint's tokens: takes 0.3 s for 49000 tokens, so keep it.

    Args:
        path: folder of the checkpoint, or its tokenizer.json.
        eos_token_ids: tokens that may end an output; none: the tokenizer's own.
        vocab_size: of the model, which may be padded beyond the tokenizer's.

    Raises:
        RequestError: the file cannot be read, or its tokens do not say which bytes they stand for.
    """
    llguidance = _llguidance()
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
            f"structured output cannot be had with this checkpoint: {file} is not a tokenizer that llguidance can "
            f"read ({_short(str(error))}); drop structured_outputs"
        ) from error


def parser_limits() -> LLParserLimits:
    """What following one grammar may cost. The same for trial and rank 0: what passes there has to pass here."""
    return _llguidance().LLParserLimits(
        max_grammar_size=50_000, step_max_items=10_000, max_lexer_states=50_000, verbose_errors=False
    )


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of ``grammar``; see its ``is_error`` and :func:`error_of`.

    Raises:
        RequestError: the library panicked.
    """
    with no_panic():
        return _llguidance().LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())


def error_of(matcher: LLMatcher) -> str:
    """What is wrong with a matcher, in one line; empty if nothing is."""
    return _short(matcher.get_error()) if matcher.is_error() else ""


@contextlib.contextmanager
def no_panic() -> Generator[None]:
    """Around calls of llguidance: make RequestError of a panic, which is no Exception and would end the process."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(
            f"{PREFIX}llguidance has failed ({_short(str(error))}); write the schema, "
            "expression or grammar in another way"
        ) from None


def serve_trial() -> None:
    """What runs in the process of a trial: a grammar on stdin, what is wrong with it as JSON on stdout."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_SECONDS, TRIAL_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_MEMORY_BYTES, TRIAL_MEMORY_BYTES))
    threading.stack_size(TRIAL_STACK_BYTES)
    grammar = sys.stdin.buffer.read().decode()

    def try_it() -> None:
        try:
            with no_panic():
                problem = _problem(grammar)
        except RequestError as error:
            problem = str(error).removeprefix(PREFIX)
        sys.stdout.write(json.dumps(problem))

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()


def _num_tokens(fields: dict[str, Any]) -> int:
    """One more than the highest token id in a tokenizer.json."""
    vocab: Any = fields["model"]["vocab"]
    highest = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1
    return 1 + max([highest, *(token["id"] for token in fields.get("added_tokens") or ())])


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            f"structured output needs the library llguidance, which cannot be imported here ({error}); install it "
            "with: pip install 'lockstep[serve]'"
        ) from None
    return llguidance


@functools.lru_cache(maxsize=64)
def _check(grammar: str, apart: bool) -> None:
    """Raise RequestError unless ``grammar`` can be followed. Only what is good is remembered."""
    with no_panic():
        problem = _try_apart(grammar) if apart else _problem(grammar)
    if "coerce_one_of" in problem:
        problem = "oneOf is not supported where several of its schemas may match the same value: use anyOf"
    if "unknown special token" in problem:
        problem = "a grammar is about text and cannot name special tokens; an end of sequence follows by itself"
    if problem:
        raise RequestError(f"{PREFIX}{problem}")


def _problem(grammar: str) -> str:
    """What is wrong with a grammar, by making it ready and taking a first step, over single bytes for tokens."""
    llguidance = _llguidance()
    started = time.thread_time()
    problem = llguidance.LLMatcher.validate_grammar(grammar, limits=parser_limits())
    if problem and not problem.startswith("WARNING"):
        return _short(problem)
    matcher = make_matcher(llguidance.LLTokenizer("byte"), grammar)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    error = error_of(matcher)
    if error.startswith("NoExtension") or not (error or any(mask)):
        return "nothing matches it"
    if error:
        return error
    seconds = time.thread_time() - started
    return f"preparing it took {seconds:.1f} s; allowed: {MAX_BUILD_SECONDS}" if seconds > MAX_BUILD_SECONDS else ""


def _try_apart(grammar: str) -> str:
    """:func:`_problem`, found by a process that can be ended."""
    roots = [str(Path(__file__).resolve().parents[1]), *sys.path]
    program = f"import sys; sys.path[:] = {roots!r}; from runtime.structured import serve_trial; serve_trial()"
    command = [sys.executable, "-I", "-c", program]
    try:
        done = subprocess.run(
            command, input=grammar.encode(), capture_output=True, timeout=TRIAL_WALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"preparing it took more than {TRIAL_WALL_SECONDS:g} s; make it simpler"
    try:
        return str(json.loads(done.stdout))
    except ValueError:
        return (
            f"preparing it takes too long (allowed: {MAX_BUILD_SECONDS:g} s), too much memory, or too deep a stack "
            f"(its trial ended with {done.returncode}); make it smaller, or have fewer patterns hold at once"
        )


def _is_simple(outputs: StructuredOutputs) -> bool:
    """Whether a grammar can be made ready here and now: it is short, and has nothing that takes long."""
    if outputs.json_object:
        return True
    text = outputs.json or outputs.regex or "".join(outputs.choice)
    if outputs.grammar is not None or len(text) > SIMPLE_CHARACTERS:
        return False
    if outputs.regex is not None:
        counts = [int(f"0{count}") for pair in re.findall(r"\{\s*(\d*)[\s,]*(\d*)", text) for count in pair]
        return math.prod(max(1, count) for count in counts) <= SIMPLE_REPEATS
    quoted = [f'"{word}"' for word in HARD_KEYWORDS]
    return outputs.json is None or (
        "\\u" not in text  # Could spell a keyword.
        and text.count('"$') <= SIMPLE_REFERENCES
        and not any(word in text for word in quoted)
    )


def _schema(text: str) -> dict[str, Any]:
    """The schema in ``text``. What it says to llguidance itself is left out: our own settings hold."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {_short(str(error))}") from None
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
        raise RequestError(f"the grammar is not GBNF: {_short(str(error) or type(error).__name__)}") from None


def _encodable(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} is not valid Unicode (a lone surrogate?): {text!r:.80}") from None
    return text


def _short(text: str) -> str:
    """A message of llguidance in one line."""
    for mark in ("<non-verbose/>", "<state>", "<backtrace>"):
        text = text.partition(mark)[0]
    return " ".join(text.split())[:300]
