"""The dispatcher: by table, and exhaustively against the rules as the checklist words them."""

from __future__ import annotations

import itertools

import pytest

from runtime.common.config import GraphMode
from workers.graphs.dispatcher import Captured, Dispatch, dispatch, uniform_query_len

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
BOTH = Captured(full=(1, 2, 4, 8), piecewise=(1, 8, 16))


@pytest.mark.parametrize(
    ("tokens", "reqs", "uniform", "captured", "expected"),
    [
        (1, 1, 1, BOTH, Dispatch(FULL, 1)),
        (3, 3, 1, BOTH, Dispatch(FULL, 4)),
        (8, 8, 1, BOTH, Dispatch(FULL, 8)),
        (9, 9, 1, BOTH, Dispatch(PIECEWISE, 16)),  # more requests than any FULL graph holds
        (6, 3, 2, BOTH, Dispatch(PIECEWISE, 8)),  # uniform, but not one token each
        (4, 3, None, BOTH, Dispatch(PIECEWISE, 8)),  # mixed
        (1, 1, None, BOTH, Dispatch(PIECEWISE, 1)),
        (17, 2, None, BOTH, Dispatch(NONE, 17)),
        (0, 0, None, BOTH, Dispatch(NONE, 0)),
        (3, 3, 1, Captured(full=(4,)), Dispatch(FULL, 4)),
        (5, 5, 1, Captured(full=(4,)), Dispatch(NONE, 5)),
        (5, 2, None, Captured(full=(8,)), Dispatch(NONE, 5)),
        (3, 3, 1, Captured(piecewise=(4,)), Dispatch(PIECEWISE, 4)),
        (3, 3, 1, Captured(), Dispatch(NONE, 3)),
    ],
)
def test_table(tokens: int, reqs: int, uniform: int | None, captured: Captured, expected: Dispatch) -> None:
    assert dispatch(tokens, reqs, uniform, captured) == expected


def _sets(limit: int) -> list[tuple[int, ...]]:
    return [sizes for n in range(3) for sizes in itertools.combinations(range(1, limit), n)]


def test_every_batch_against_the_rules() -> None:
    """Every batch of up to 6 tokens over every pair of up to two sizes each."""
    for full, piecewise in itertools.product(_sets(6), repeat=2):
        captured = Captured(full, piecewise)
        for tokens, reqs in itertools.product(range(7), repeat=2):
            uniform = (
                [None] if reqs == 0 or tokens < reqs else [None, *([tokens // reqs] if tokens % reqs == 0 else [])]
            )
            for length in uniform:
                choice = dispatch(tokens, reqs, length, captured)
                fits = {
                    FULL: [s for s in full if s >= tokens] if length == 1 else [],
                    PIECEWISE: [s for s in piecewise if s >= tokens],
                    NONE: [tokens],
                }
                best = next(mode for mode in (FULL, PIECEWISE, NONE) if fits[mode]) if tokens else NONE
                assert choice == Dispatch(best, min(fits[best])), (tokens, reqs, length, captured)


@pytest.mark.parametrize(
    ("lengths", "expected"), [([], None), ([1], 1), ([1, 1, 1], 1), ([3, 3], 3), ([1, 2], None), ([1, 1, 7], None)]
)
def test_uniform_query_len(lengths: list[int], expected: int | None) -> None:
    assert uniform_query_len(lengths) == expected
