"""Checks that the grammar of a request's structured output compiles, before the request is queued.

A small grammar can keep llguidance busy for hours, fill the memory, or end the process by a stack overflow:
intersecting several patterns is what takes so long, and no limit of the library covers it. A grammar that has such
parts, or is large, is therefore compiled in a subprocess first, whose time and memory are limited. A grammar that
passed is cached, so a schema that is sent with every request costs that once.
"""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
import threading
import time

from runtime.common.errors import RequestError
from runtime.common.grammar import (
    PREFIX,
    error_of,
    llguidance_module,
    make_matcher,
    no_panic,
    parser_limits,
    short_error,
    to_grammar,
)
from runtime.common.sampling_params import StructuredOutputs
from runtime.text.helper_process import helper_command, limit_process

MAX_BUILD_SECONDS = 1.0
"""CPU time that making a grammar ready may take. Rank 0 compiles it within a step, which delays every request."""

TRIAL_SECONDS = 2
"""CPU time after which a trial is ended, its start included."""

TRIAL_WALL_SECONDS = 30.0
"""Time after which a trial is given up on a machine that has no CPU time for it."""

TRIAL_MEMORY_BYTES = 1024 * 1024 * 1024
"""Address space of a trial."""

TRIAL_STACK_BYTES = 2 * 1024 * 1024
"""Stack of a trial: a quarter of what a rank has, so that what passes here does not overflow there."""

SIMPLE_CHARACTERS = 16 * 1024
"""Longer grammars are tried in a subprocess."""

SIMPLE_REFERENCES = 100
"""Schemas with more references, which may be a deep chain, are tried in a subprocess."""

SIMPLE_REPEATS = 10_000
"""Expressions whose counts, e.g. 3 in ``(ab){3}``, multiply to more are tried in a subprocess."""

HARD_KEYWORDS = ("allOf", "oneOf", "not", "pattern", "patternProperties", "multipleOf", "propertyNames", "format")
"""JSON schema keywords that intersect languages, or count."""


def check_structured(outputs: StructuredOutputs) -> None:
    """Refuse what cannot be followed. May take :data:`TRIAL_WALL_SECONDS`: not for an event loop or a step's path.

    Raises:
        RequestError: the schema, expression or grammar is invalid, uses what is not supported, takes too long to
            prepare, or nothing matches it; or llguidance is not installed.
    """
    _check(to_grammar(outputs), not _is_simple(outputs))


def serve_trial() -> None:
    """What runs in the process of a trial: a grammar on stdin, what is wrong with it as JSON on stdout."""
    limit_process(memory_bytes=TRIAL_MEMORY_BYTES, cpu_seconds=TRIAL_SECONDS)
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
    llguidance = llguidance_module()
    started = time.thread_time()
    problem = llguidance.LLMatcher.validate_grammar(grammar, limits=parser_limits())
    if problem and not problem.startswith("WARNING"):
        return short_error(problem)
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
    command = helper_command("runtime.text.grammar_check", "serve_trial")
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
