"""The messages between driver and ranks: RPCs, step plans and results, exceptions, as msgpack.

A message is one msgpack array. Driver to rank: ``["call", call_id, method, arguments]`` or ``["step", plan]``.
Rank to driver: ``["hello", rank, facts]`` once, ``["progress", stage, done, total]`` during start-up, and one answer
to each message: ``["ok", id, digest, value]`` or ``["error", id, exception]``, where ``id`` is the call id or the step
id. The digest covers the bytes that the rank received, so the driver detects in the same step that a rank executed
other bytes than the ones sent.

Plans are deltas: a rank keeps the state of a request until the request is dropped. Sockets are in ``channel.py``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import msgpack

from runtime.common.errors import ProtocolError
from runtime.common.sampling_params import SamplingParams

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""The limit of a message's length; both sides check it before they read the message."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that is new to the ranks, or that comes back after it was dropped (preemption, replay).

    Attributes:
        req_id: the engine's number of the request; never reused by the same engine.
        token_ids: the prompt followed by the tokens generated so far.
        num_prompt_tokens: how many of ``token_ids`` are the prompt.
        sampling: sampling parameters; ``seed`` is always set. Random numbers of output token i depend on (seed, i)
            only, so replay and preemption do not change a request's tokens.
        num_computed: leading tokens whose keys and values are in the KV cache already (prefix caching); the first
            ``new_block_ids`` of the request are their blocks.
    """

    req_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_computed: int = 0


class ScheduledRequest(NamedTuple):
    """One request's part of a step. A named tuple, because one is made per request and step.

    Attributes:
        req_id: a request that the ranks hold, possibly from ``new`` of the same plan.
        num_tokens: number of its tokens to compute, after the ones computed before. If they include the last known
            token, the next token is sampled and every rank appends it.
        new_block_ids: KV blocks to append to its block table before the step.
    """

    req_id: int
    num_tokens: int
    new_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The scheduler's output for one step. The order of ``scheduled`` is the order in the flattened batch."""

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    new: tuple[NewRequest, ...] = ()
    dropped: tuple[int, ...] = ()
    """Requests whose state the ranks discard before this step: finished, aborted or preempted."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the flattened batch, before padding."""
        return sum(request.num_tokens for request in self.scheduled)


class SampledToken(NamedTuple):
    """The sampled token of one request.

    Attributes:
        error: why there is no token, in which case the request fails; "" otherwise.
        broken: whether that is because its logits were not finite.
    """

    req_id: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    error: str = ""
    broken: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens.

    Attributes:
        req_id: a request with ``prompt_logprobs``.
        start: index in the prompt of the first of ``tokens``; at least 1, because token 0 has no log-probability.
        tokens: token id, logprob and the top (token id, logprob) pairs, best first, of each.
    """

    req_id: int
    start: int
    tokens: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Rank 0's result of a step that every rank has confirmed."""

    step_id: int
    tokens: tuple[SampledToken, ...] = ()
    stats: dict[str, float] = field(default_factory=dict)
    """Seconds by name of the phase; for metrics and ``bench``."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class ExceptionKind(StrEnum):
    """What a rank's exception says about the failure."""

    INPUT = "input"
    """An InputError: the driver raises it again as the same class."""
    COLLECTIVE = "collective"
    """A collective failed, most often because another rank did not join it."""
    INTERNAL = "internal"
    """Any other exception."""


@dataclass(frozen=True, slots=True)
class RankException:
    """An exception of a rank, as it is sent to the driver.

    Attributes:
        kind: how the driver treats it.
        type_name: name of the exception's class.
        message: its text.
        traceback: formatted.
        fields: its own attributes, as keyword arguments of its class, where the driver can use them.
    """

    kind: ExceptionKind
    type_name: str
    message: str
    traceback: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


def digest(message: bytes) -> str:
    """The checksum of a message's bytes (BLAKE2b, 8 bytes, hex)."""
    return hashlib.blake2b(message, digest_size=8).hexdigest()


def pack(message: Any) -> bytes:
    """The msgpack bytes of a message; tuples become arrays. Raises :class:`ProtocolError` if it is too long."""
    data = bytes(msgpack.packb(message, use_bin_type=True) or b"")
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is longer than the {MAX_MESSAGE_BYTES} allowed")
    return data


def unpack(data: bytes) -> list[Any]:
    """The message in ``data``. Raises :class:`ProtocolError` unless it is one non-empty msgpack array."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is longer than the {MAX_MESSAGE_BYTES} allowed")
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a list as the key of a map.
        raise ProtocolError(f"{len(data)} bytes are not msgpack: {error}") from error
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ProtocolError(f"a message is an array that starts with its kind, not {type(message).__name__}")
    return message


def pack_plan(plan: StepPlan) -> bytes:
    """The bytes of a step message. Packed once; every rank receives the same bytes."""
    new = [(r.req_id, r.token_ids, r.num_prompt_tokens, r.sampling.to_dict(), r.num_computed) for r in plan.new]
    scheduled = [(r.req_id, r.num_tokens, r.new_block_ids) for r in plan.scheduled]
    return pack(["step", plan.step_id, scheduled, new, plan.dropped])


def unpack_plan(message: list[Any]) -> StepPlan:
    """The plan in an unpacked step message. Raises :class:`ProtocolError` if it is not one."""
    try:
        _, step_id, scheduled, new, dropped = message
        return StepPlan(
            step_id=int(step_id),
            scheduled=tuple(ScheduledRequest(i, n, tuple(blocks)) for i, n, blocks in scheduled),
            new=tuple(NewRequest(i, tuple(t), p, SamplingParams.from_dict(s), c) for i, t, p, s, c in new),
            dropped=tuple(dropped),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ProtocolError(f"not a step plan: {error}") from error


def pack_exception(number: Any, exception: RankException) -> bytes:
    """The bytes of an error message: the answer to message ``number``."""
    e = exception
    return pack(["error", number, [e.kind.value, e.type_name, e.message, e.traceback, e.fields]])


def unpack_exception(message: list[Any]) -> RankException:
    """The exception in an unpacked error message. Raises :class:`ProtocolError` if there is none."""
    try:
        _, _, (kind, type_name, text, traceback, fields) = message
        return RankException(ExceptionKind(kind), str(type_name), str(text), str(traceback), dict(fields))
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"not an exception of a rank: {error}") from error


def pack_tokens(result: StepResult) -> list[Any]:
    """A result as the value of an "ok" message; the inverse of :func:`unpack_tokens`."""
    return [result.tokens, result.stats, [(p.req_id, p.start, p.tokens) for p in result.prompt_logprobs]]


def unpack_tokens(step_id: int, value: Any) -> StepResult:
    """The inverse of :func:`pack_tokens`. Raises :class:`ProtocolError` if it is not one."""
    try:
        tokens, stats, prompts = value
        return StepResult(
            step_id,
            tuple([SampledToken(i, t, lp, _pairs(top), error, broken) for i, t, lp, top, error, broken in tokens]),
            dict(stats),
            tuple(
                PromptLogprobs(i, start, tuple((t, lp, _pairs(top)) for t, lp, top in entries))
                for i, start, entries in prompts
            ),
        )
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"not a step result: {error}") from error


def _pairs(values: Any) -> tuple[tuple[int, float], ...]:
    return tuple((token_id, logprob) for token_id, logprob in values) if values else ()
