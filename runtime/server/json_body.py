"""Parses JSON bodies whose depth and number of entries are bounded before anything is allocated for them."""

from __future__ import annotations

import json
import re
from typing import Any

from runtime.server.errors import BodyError

MAX_DEPTH = 64
"""Objects and lists within each other."""

MAX_BRACKETS = 100_000
MAX_COMMAS = 2_000_000
"""Objects and lists, and entries: a byte of JSON can take sixty bytes of memory once it is parsed."""

_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parse_json(body: bytes) -> Any:
    """Parse a JSON text in UTF-8.

    Raises:
        BodyError: it is not JSON, or is deeper or has more entries than allowed.
    """
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > MAX_DEPTH:
        # Strings may hold brackets and commas, so they are removed first; this takes as long as a copy.
        bare = _STRINGS.sub(b"", body)
        brackets, commas = bare.count(b"[") + bare.count(b"{"), bare.count(b",")
        if brackets > MAX_BRACKETS:
            raise BodyError(f"the body has {brackets} lists and objects; allowed: {MAX_BRACKETS}", code="too_long")
        if _depth(bare) > MAX_DEPTH:
            raise BodyError(f"the body is nested deeper than {MAX_DEPTH} lists and objects", code="too_deep")
    else:
        commas = body.count(b",")
    if commas > MAX_COMMAS:
        raise BodyError(f"the body has more than {commas} entries; allowed: {MAX_COMMAS}", code="too_long")
    try:
        # Given bytes, json would also accept UTF-16 and UTF-32.
        return json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise BodyError(f"the body is not JSON: {error}"[:300], code="invalid_json") from None


def _depth(bare: bytes) -> int:
    """The depth of a JSON text without its strings, counted up to one more than the limit."""
    depth = deepest = 0
    for bracket in bare.translate(None, _NOT_BRACKETS):
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                break
        else:
            depth -= 1
    return deepest


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")
