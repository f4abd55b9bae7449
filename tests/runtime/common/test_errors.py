"""The tree of errors: as drawn in the module, with the exit codes it promises."""

from __future__ import annotations

import re

import pytest

from runtime.common import errors
from runtime.common.errors import (
    ConfigError,
    EngineError,
    LockstepError,
    RankDiedError,
    RankError,
    RankRaisedError,
    RequestError,
    shell_code,
    signal_name,
)


def test_the_drawing_is_the_tree_of_classes() -> None:
    drawn: list[tuple[str, str]] = []
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"( {4}[ │├└─]*)(\w+Error)\b", line):
            depth = (len(found[1]) - 4) // 4
            del parents[depth:]
            drawn += [(found[2], parents[-1])] if parents else []
            parents.append(found[2])
    defined = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)]
    assert sorted(drawn) == sorted((cls.__name__, cls.__bases__[0].__name__) for cls in defined if cls != LockstepError)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (RequestError("x", param="n"), 2),
        (EngineError("x"), 1),
        (RankDiedError(rank=1, returncode=-9), 137),
        (RankDiedError(rank=1, returncode=3), 3),
        (RankDiedError(rank=1, returncode=0), 1),
        (RankDiedError(rank=1, returncode=None), 1),
    ],
)
def test_exit_codes(error: LockstepError, code: int) -> None:
    assert error.exit_code == code


def test_a_rank_error_names_rank_host_and_stage() -> None:
    assert str(RankError("boom", rank=2, host="h", stage="step 7")) == "rank 2 on h failed during step 7: boom"
    assert str(RankError("boom", rank=-1, host="h")) == "the worker group on h failed: boom"
    raised = RankRaisedError("boom", rank=1, rank_traceback="Traceback\n  line\n", exception_type="ValueError")
    assert str(raised).splitlines()[1:] == ["--- traceback of rank 1 ---", "Traceback", "  line"]
    assert raised.exception_type == "ValueError" and raised.fields == {}


def test_signals_have_names_and_shell_codes() -> None:
    assert (shell_code(-15), shell_code(3), signal_name(9), signal_name(250)) == (143, 3, "SIGKILL", "signal 250")
