"""Which captured graph a step runs in: a pure function of the batch's shape and of what was captured.

Every rank asks it with the same numbers, which all come from the plan, so all ranks run the same graph.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.common.config import GraphMode


@dataclass(frozen=True)
class Dispatch:
    """How one step runs: as NONE, PIECEWISE or FULL, with ``size`` rows of which the last may be padding."""

    mode: GraphMode
    size: int


@dataclass(frozen=True)
class Captured:
    """Numbers of tokens that have a graph, ascending.

    Attributes:
        full: graphs of whole decode steps, one new token per request, as many requests as tokens.
        piecewise: graphs for any batch.
    """

    full: tuple[int, ...] = ()
    piecewise: tuple[int, ...] = ()


def dispatch(num_tokens: int, num_reqs: int, uniform_query_len: int | None, captured: Captured) -> Dispatch:
    """The graph for a step, NONE if there is none.

    Args:
        num_tokens: of the step.
        num_reqs: requests in the step.
        uniform_query_len: new tokens of every request if it is the same number, else None.
        captured: what there is.
    """
    if num_tokens > 0:
        if uniform_query_len == 1 and num_reqs == num_tokens:
            at = bisect.bisect_left(captured.full, num_tokens)
            if at < len(captured.full):
                return Dispatch(GraphMode.FULL, captured.full[at])
        at = bisect.bisect_left(captured.piecewise, num_tokens)
        if at < len(captured.piecewise):
            return Dispatch(GraphMode.PIECEWISE, captured.piecewise[at])
    return Dispatch(GraphMode.NONE, num_tokens)


def uniform_query_len(lengths: Iterable[int]) -> int | None:
    """The number of new tokens that all requests of a step have; None if they differ or there is no request."""
    found = set(lengths)
    return found.pop() if len(found) == 1 else None
