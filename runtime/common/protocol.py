"""What driver and workers say to each other: RPCs, step plans and results, as msgpack.

A message is one msgpack array. Driver to worker: ``["call", call_id, method, arguments]`` or ``["step", plan]``.
Worker to driver: ``["hello", rank, facts]`` once, then for each message ``["ok", id, digest, value]`` or
``["error", id, kind, message, traceback]``, where ``id`` is the call id or the step id. The digest is of the bytes that
the worker received, so that a worker that executed other bytes than the driver sent is found in that very step.

Plans are deltas: a worker keeps what it was told about a request until the request is dropped. Nothing here knows
sockets (``channel.py``) or policy (``scheduler.py``).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from runtime.common.errors import ProtocolError
from runtime.common.sampling_params import SamplingParams

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""A longer message is refused by both sides before it is read."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request a worker has not heard of, or one it was told to drop and that comes back (preemption, replay).

    Attributes:
        req_id: the engine's number for it; never reused while the engine lives.
        token_ids: the prompt followed by the tokens generated so far.
        num_prompt_tokens: how many of ``token_ids`` are the prompt.
        sampling: its parameters; ``seed`` is always set. The noise of output token i depends on (seed, i) alone, so
            a request that is replayed or preempted gets the tokens it would have had.
        num_computed: tokens at the front whose keys and values are in the KV cache already, computed for a request
            that begins alike; its first ``new_block_ids`` name their blocks.
    """

    req_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_computed: int = 0


class ScheduledRequest(NamedTuple):
    """One request's share of a step. A tuple, since one is made for every request of every step.

    Attributes:
        req_id: a request the worker knows (perhaps from ``new`` of the same plan).
        num_tokens: how many of its tokens, after those computed before, are computed in this step. If this reaches
            the end of what is known, the next token is sampled and every rank appends it.
        new_block_ids: KV blocks appended to its block table before the step.
    """

    req_id: int
    num_tokens: int
    new_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of every rank: the order of ``scheduled`` is the order of tokens in the flattened batch."""

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    new: tuple[NewRequest, ...] = ()
    dropped: tuple[int, ...] = ()
    """Requests to forget before this step: finished, aborted or preempted."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the flattened batch, before padding."""
        return sum(request.num_tokens for request in self.scheduled)


class SampledToken(NamedTuple):
    """What sampling one request gave.

    Attributes:
        error: why there is no token; the request cannot go on.
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
    """How likely the model found some tokens of a prompt, in order.

    Attributes:
        req_id: the request, which asked for ``prompt_logprobs``.
        start: index in the prompt of the first of ``tokens``; 1 or more, since nothing comes before token 0.
        tokens: for each its id, its logprob and the likeliest (token id, logprob) pairs, best first.
    """

    req_id: int
    start: int
    tokens: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Rank 0's answer to a plan, after every rank has confirmed the step."""

    step_id: int
    tokens: tuple[SampledToken, ...] = ()
    stats: dict[str, float] = field(default_factory=dict)
    """Seconds spent where, by name; for metrics and ``bench``."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


def digest(message: bytes) -> str:
    """The short checksum both sides take of a message's bytes (BLAKE2b, 8 bytes, hex)."""
    return hashlib.blake2b(message, digest_size=8).hexdigest()


def pack(message: Any) -> bytes:
    """msgpack bytes of a message; tuples become arrays. Raises :class:`ProtocolError` if it is too long."""
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
        raise ProtocolError(f"{len(data)} bytes that are not msgpack: {error}") from error
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ProtocolError(f"a message is an array that begins with its kind, not {type(message).__name__}")
    return message


def pack_plan(plan: StepPlan) -> bytes:
    """The bytes of a step message: packed once, sent to every rank."""
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


def pack_tokens(result: StepResult) -> list[Any]:
    """A result as the value of an "ok" message."""
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
