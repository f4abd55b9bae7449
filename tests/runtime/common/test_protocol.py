"""Messages between driver and ranks: round trips, and bytes that are not messages."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from runtime.common import protocol
from runtime.common.errors import ProtocolError
from runtime.common.protocol import (
    ExceptionKind,
    NewRequest,
    RankException,
    SampledToken,
    ScheduledRequest,
    StepPlan,
    StepResult,
    digest,
    pack,
    pack_exception,
    pack_plan,
    pack_tokens,
    unpack,
    unpack_exception,
    unpack_plan,
    unpack_tokens,
)
from runtime.common.sampling_params import SamplingParams

PLAN = StepPlan(
    step_id=7,
    scheduled=(ScheduledRequest(3, 1), ScheduledRequest(5, 12, (4, 9, 2))),
    new=(NewRequest(5, (1, 2, 3), 2, SamplingParams(max_tokens=9, seed=2**63 - 1, stop=("ü",), temperature=0.3)),),
    dropped=(1, 2),
)
RESULT = StepResult(
    step_id=7,
    tokens=(SampledToken(3, 44, -0.25, ((44, -0.25), (1, -3.5))), SampledToken(5, 0, error="not finite", broken=True)),
    stats={"forward": 0.25},
)


def test_plans_and_results_survive() -> None:
    assert unpack_plan(unpack(pack_plan(PLAN))) == PLAN
    assert unpack_plan(unpack(pack_plan(StepPlan(0, ())))) == StepPlan(0, ())
    assert unpack_tokens(7, msgpack.unpackb(msgpack.packb(pack_tokens(RESULT)), raw=False)) == RESULT


@pytest.mark.parametrize("kind", ExceptionKind)
def test_exceptions_survive(kind: ExceptionKind) -> None:
    raised = RankException(kind, "CollectiveTimeout", "rank 1 is missing", "Traceback", {"missing": [1]})
    message = unpack(pack_exception(7, raised))
    assert message[:2] == ["error", 7] and unpack_exception(message) == raised


def test_the_number_of_tokens_is_that_of_all_requests() -> None:
    assert PLAN.num_tokens == 13


def test_the_digest_is_of_every_byte() -> None:
    message = pack_plan(PLAN)
    assert digest(message) == digest(bytes(message))
    for position in range(len(message)):
        changed = bytearray(message)
        changed[position] ^= 1
        assert digest(bytes(changed)) != digest(message)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x93\x01", b"\x05", b"\x90", b"\x91\x05", b"\x80", pack(["a"]) + b"x"]
)
def test_bytes_that_are_not_a_message_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(data)


def test_deeply_nested_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError):
        unpack(b"\x91" * 100_000 + b"\xa1a")


def test_long_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(ProtocolError, match=r"longer than the 100 allowed"):
        pack(["x" * 100])
    with pytest.raises(ProtocolError):
        unpack(msgpack.packb(["x" * 100]))


SHAPES: list[Any] = [
    None,
    1,
    -1,
    "a",
    b"a",
    [],
    {},
    [1],
    [[1]],
    [[1, 2, 3]],
    {"n": 1},
    1.5,
    True,
    [[1, 2, [3], {"n": 0}]],
]


def test_messages_of_another_shape_are_no_plans() -> None:
    """Anything in any place is either a plan or a ProtocolError, never another exception."""
    refused = 0
    for count in (1, 4, 6):
        with pytest.raises(ProtocolError):
            unpack_plan(["step", *[[]] * (count - 1)])
    for place in range(1, 5):
        for shape in SHAPES:
            message = unpack(pack_plan(PLAN))
            message[place] = shape
            try:
                unpack_plan(message)
            except ProtocolError:
                refused += 1
    assert refused > 30


def test_messages_of_another_shape_are_no_results() -> None:
    for value in (*SHAPES, [[], []], [[[1, 2]], {}], [[[1, 2, 3, 4, 5]], {}]):
        try:
            unpack_tokens(1, value)
        except ProtocolError as error:
            assert "not a step result" in str(error)


def test_messages_of_another_shape_are_no_exceptions() -> None:
    for value in (*SHAPES, ["unknown kind", "a", "b", "c", {}], ["input", "a", "b", "c", 1]):
        with pytest.raises(ProtocolError, match="not an exception"):
            unpack_exception(["error", 1, value])
    with pytest.raises(ProtocolError, match="not an exception"):
        unpack_exception(["error"])


def test_random_changes_never_raise_anything_else() -> None:
    generator = random.Random(0)
    message = pack_plan(PLAN)
    for _ in range(3000):
        changed = bytearray(message)
        for _ in range(generator.randrange(1, 4)):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        try:
            unpack_plan(unpack(bytes(changed[: generator.randrange(len(changed) + 1)])))
        except ProtocolError:
            continue
