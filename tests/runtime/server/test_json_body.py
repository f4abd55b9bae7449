"""Bodies that are not JSON, or deeper or longer than allowed."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from runtime.server.errors import BodyError
from runtime.server.json_body import MAX_BRACKETS, MAX_COMMAS, MAX_DEPTH, parse_json


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
def test_refused_bodies_take_little_memory(body: bytes, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BodyError, match=message):
            parse_json(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body) + 1_000_000


def test_brackets_in_strings_are_not_counted() -> None:
    value = {"a": "[{" * 1000 + '"\\', "b": [[1]] * 100, "c": "\\"}
    assert parse_json(json.dumps(value).encode()) == value
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert parse_json(json.dumps(deep).encode()) == deep
