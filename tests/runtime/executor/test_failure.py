"""Signs of failures: which error describes each, and which one explains the failure of a group best."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.common.errors import (
    CheckpointError,
    InputError,
    LockstepGuardError,
    RankDiedError,
    RankRaisedError,
    RequestError,
)
from runtime.common.protocol import ExceptionKind, RankException
from runtime.executor.failure import Failure, RankContext, best_error, death, divergence, exception

WHERE = RankContext(1, "host", "step 3")


class EndedHandle:
    """A handle of a process that has ended."""

    def __init__(self, returncode: int | None) -> None:
        self.rank, self.host, self.pid = 1, "host", 1
        self._returncode = returncode

    def returncode(self) -> int | None:
        return self._returncode

    def wait(self, timeout: float) -> bool:
        return True


def raised(kind: ExceptionKind, type_name: str, **fields: Any) -> Failure:
    return exception(WHERE, RankException(kind, type_name, "text", "Traceback", fields))


def ended(returncode: int | None) -> Failure:
    return death(WHERE, EndedHandle(returncode))  # pyright: ignore[reportArgumentType]


def test_the_cause_wins_over_its_consequences() -> None:
    """Best first; every sign loses against the ones before it, whichever was observed first."""
    signs = [
        raised(ExceptionKind.INPUT, "CheckpointError"),
        ended(-9),
        raised(ExceptionKind.INTERNAL, "ValueError"),
        divergence(WHERE, "other bytes"),
        raised(ExceptionKind.COLLECTIVE, "CollectiveTimeout"),
    ]
    for first in range(len(signs)):
        assert best_error(signs[first:]) is best_error(reversed(signs[first:])) is signs[first].error
    assert best_error([ended(None), signs[4]]) is not signs[4].error
    assert best_error([ended(None), signs[2]]) is signs[2].error


@pytest.mark.parametrize(
    ("type_name", "fields", "expected"),
    [
        ("CheckpointError", {}, CheckpointError),
        ("RequestError", {"param": "n"}, RequestError),
        ("LaterInputError", {"unknown": 1}, InputError),
    ],
)
def test_refused_input_is_raised_as_its_own_class(type_name: str, fields: dict[str, Any], expected: type) -> None:
    error = raised(ExceptionKind.INPUT, type_name, **fields).error
    assert type(error) is expected and str(error) == "rank 1: text" and error.exit_code == 2
    assert not isinstance(error, RequestError) or error.param == "n"


def test_an_exception_keeps_its_type_and_fields() -> None:
    error = raised(ExceptionKind.COLLECTIVE, "CollectiveTimeout", missing=[0]).error
    assert isinstance(error, RankRaisedError)
    assert (error.exception_type, error.fields, error.rank_traceback) == (
        "CollectiveTimeout",
        {"missing": [0]},
        "Traceback",
    )
    assert (error.rank, error.host, error.stage) == (1, "host", "step 3")
    assert str(error).startswith("rank 1 on host failed during step 3: CollectiveTimeout: text\n")


def test_deaths_and_divergences_name_their_rank() -> None:
    killed, other = ended(-9).error, divergence(WHERE, "other bytes").error
    assert isinstance(killed, RankDiedError) and killed.returncode == -9 and "out-of-memory" in str(killed)
    assert "out-of-memory" not in str(ended(-11).error)
    assert isinstance(other, LockstepGuardError) and "step 3: other bytes" in str(other)
