"""The messages between the driver and one worker group: the same bytes to every rank, one answer from each, in order.

This is where the lockstep guard stands: every answer carries the number and the digest of the message that it answers.
The first death, exception, silence or divergence is turned into the error that explains it best. Several messages may
be under way; a rank answers them in order, and what comes early is kept. Start-up stages are ``startup.py``'s,
restarts ``supervisor.py``'s, processes the launchers'.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.common.channel import ChannelClosedError, wait_readable
from runtime.common.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    InputError,
    LockstepGuardError,
    ProtocolError,
    RankDiedError,
    RankError,
    RankRaisedError,
    RankTimeoutError,
    RequestError,
)
from runtime.common.protocol import digest, pack, unpack
from runtime.executor.launcher import StartedRank

log = logging.getLogger("lockstep")

INPUT_ERRORS = {cls.__name__: cls for cls in (InputError, CheckpointError, ConfigError, RequestError)}
"""A rank's errors of these kinds are the user's to mend: no traceback, exit code 2."""

GRACE_SECONDS = 0.25
"""After the first sign of a failure, how long to listen for a better explanation from the other ranks."""

ORDERLY_EXIT_SECONDS = 3.0
"""How long a rank that was told to shut down may take before it is killed."""

REAP_SECONDS = 5.0

HELLO = "hello"
"""The number of a rank's first message, which answers nothing."""


@dataclass(frozen=True)
class Deadline:
    """How long a message may take, and what to call it.

    Attributes:
        stage: a start-up stage or ``"step N"``.
        seconds: from when it was sent, or from when the message before it was answered if that is later.
        flag: the flag that sets it.
    """

    stage: str
    seconds: float
    flag: str


@dataclass(eq=False, slots=True)
class _Sent:
    """A message that every rank answers: what was sent, and who has not answered it yet."""

    number: int | str
    digest: str | None
    deadline: Deadline
    since: float
    missing: set[int]
    answers: list[Any] = field(default_factory=list[Any])


@dataclass(frozen=True)
class _Failure:
    """One sign of a failure, and how well it explains it (lower is better)."""

    order: int
    error: EngineError | InputError


class WorkerGroup:
    """Ranks that live and die together. One thread uses it; every error that it raises is the end of the group.

    Args:
        ranks: in rank order; each will say hello, which is the first thing to gather.
        hello: the deadline of that.
        since: when it began, by ``time.monotonic``.
        on_progress: called with stage, done and total when a rank tells how far it is.
    """

    def __init__(
        self,
        ranks: Sequence[StartedRank],
        hello: Deadline,
        since: float,
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self.ranks = list(ranks)
        self._on_progress = on_progress
        self.hosts = [started.handle.host for started in ranks]
        self._sent: deque[_Sent] = deque()
        self._last_gathered = 0.0
        self._next_call = 0
        self._failures: list[_Failure] = []
        self._grace_ends = float("inf")
        self._failed: set[int] = set()
        """Ranks with a failure: nothing they say matters any more."""
        # One poll object for the life of the group: a selector made for every step costs more than the step's messages.
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        self._channels: dict[int, int] = {}
        for rank, started in enumerate(ranks):
            self._channels[started.channel.fileno()] = rank
            for descriptor in (started.channel.fileno(), started.handle.fileno()):
                self._rank_of[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)
        self._expect(HELLO, None, hello, since)

    @property
    def num_unanswered(self) -> int:
        """Messages that were sent and whose answers were not gathered."""
        return len(self._sent)

    @property
    def oldest(self) -> int | str:
        """The number of the message that :meth:`gather` will give the answers to."""
        return self._sent[0].number

    def call(self, method: str, deadline: Deadline, **arguments: Any) -> list[Any]:
        """Call an RPC method on every rank; one value per rank. Nothing else may be unanswered."""
        self._next_call += 1
        self.send(pack(["call", self._next_call, method, arguments]), self._next_call, deadline)
        return self.gather()

    def send(self, frame: bytes, number: int, deadline: Deadline) -> None:
        """Send a frame to every rank; its answers must carry ``number`` and the frame's digest.

        Raises:
            RankError: a rank is gone.
        """
        self._expect(number, digest(frame), deadline, time.monotonic())
        for rank, started in enumerate(self.ranks):
            try:
                started.channel.send(frame)
            except ChannelClosedError:
                self._mark_failed(rank, self._death(rank))
        if self._failures:
            oldest = self._sent[0]
            self._listen(oldest, float("inf"))
            raise self._best_error()

    def gather(self) -> list[Any]:
        """Wait for every rank's answer to the oldest message; gives one value per rank.

        Raises:
            RankError: a rank died, raised, diverged, or was silent past the deadline.
            InputError: a rank found the input wrong.
        """
        sent = self._sent[0]
        self._listen(sent, max(sent.since, self._last_gathered) + sent.deadline.seconds)
        if sent.missing:
            raise self._best_error() if self._failures else self._timeout_error(sent)
        self._sent.popleft()
        self._last_gathered = time.monotonic()
        return sent.answers

    def wait_idle(self, wakeup: int, timeout: float | None) -> bool:
        """Sleep until the descriptor ``wakeup`` is readable; whether it is. Answers that come meanwhile are kept.

        Raises:
            RankError: a rank died.
        """
        self._poll.register(wakeup, select.POLLIN)
        try:
            deadline = float("inf") if timeout is None else time.monotonic() + timeout
            while True:
                ready = self._take(deadline - time.monotonic())
                if self._failures:
                    raise self._best_error()
                if wakeup in ready:
                    return True
                if not ready and time.monotonic() >= deadline:
                    return False
        finally:
            self._poll.unregister(wakeup)

    def end(self, *, orderly: bool) -> None:
        """End every rank and close every channel.

        Args:
            orderly: whether to ask first; a group that has failed is not asked.
        """
        if orderly:
            frame = pack(["call", 0, "shutdown", {}])
            for started in self.ranks:
                with contextlib.suppress(ChannelClosedError):
                    started.channel.send(frame)
            deadline = time.monotonic() + ORDERLY_EXIT_SECONDS
            for started in self.ranks:
                started.handle.wait(max(0.0, deadline - time.monotonic()))
        for started in self.ranks:
            started.handle.kill()
        for started in self.ranks:
            if not started.handle.wait(REAP_SECONDS):
                log.error("rank %d does not end, not even by SIGKILL", started.handle.rank)
            started.channel.close()
            started.handle.close()

    # ---- answers

    def _expect(self, number: int | str, expected: str | None, deadline: Deadline, since: float) -> None:
        size = len(self.ranks)
        self._sent.append(_Sent(number, expected, deadline, since, set(range(size)), [None] * size))

    def _listen(self, sent: _Sent, deadline: float) -> None:
        """Read until every rank without a failure has answered ``sent``, or it is too late."""
        while sent.missing - self._failed:
            left = min(deadline, self._grace_ends) - time.monotonic()
            # What is there already counts even if this process itself was late to look.
            if not self._take(left) and left <= 0:
                return

    def _take(self, seconds: float) -> set[int]:
        """Wait at most so long for something to read, and read it; gives the descriptors that were ready."""
        ready = {fd for fd, _ in self._poll.poll(None if seconds == float("inf") else max(0.0, seconds) * 1000.0)}
        # In rank order, a channel before the process behind it: last words explain a death.
        for fd in sorted(ready & self._rank_of.keys(), key=lambda fd: (self._rank_of[fd], fd not in self._channels)):
            rank = self._rank_of[fd]
            if rank in self._failed:
                continue
            if fd in self._channels:
                self._read(rank)
            elif self.ranks[rank].channel.fileno() not in ready:
                self._mark_failed(rank, self._death(rank))
        return ready

    def _read(self, rank: int) -> None:
        """One message of a rank: keep its answer, or note the failure."""
        try:
            message = unpack(self.ranks[rank].channel.recv_begun())
        except ChannelClosedError:
            self._mark_failed(rank, self._death(rank))
            return
        except ProtocolError as error:
            self._mark_failed(rank, self._divergence(rank, f"it sent what is no message of ours: {error}"))
            return
        if message[0] == "progress":
            self._on_progress(*message[1:4])
            return
        sent = next((sent for sent in self._sent if rank in sent.missing), None)
        failure = self._check(rank, message, sent)
        if failure is not None:
            self._mark_failed(rank, failure)
        elif sent is not None:
            sent.answers[rank] = message[2] if sent.number == HELLO else message[3]
            sent.missing.discard(rank)

    def _check(self, rank: int, message: list[Any], sent: _Sent | None) -> _Failure | None:
        """What is wrong with a message as the answer to ``sent``; None if nothing is."""
        if message[0] == "error":
            _, _, kind, text, rank_traceback = message
            if kind in INPUT_ERRORS:
                return _Failure(0, INPUT_ERRORS[kind](f"rank {rank}: {text}"))
            # A collective that failed says that *another* rank is missing: believe that other rank first.
            order = 4 if kind.startswith("Collective") else 2
            host, stage = self.hosts[rank], self._stage(rank)
            raised = RankRaisedError(
                f"{kind}: {text}", rank=rank, host=host, stage=stage, rank_traceback=rank_traceback
            )
            return _Failure(order, raised)
        if sent is None:
            return self._divergence(rank, f"it sent {message[0]!r} when nothing was asked of it")
        if sent.number == HELLO:
            return None if message[0] == HELLO else self._divergence(rank, f"its first message was {message[0]!r}")
        if message[1] != sent.number:
            return self._divergence(rank, f"it answered for step or call {message[1]} instead of {sent.number}")
        if message[2] != sent.digest:
            return self._divergence(
                rank,
                f"it executed a message with digest {message[2]}, sent was {sent.digest}: it received other bytes",
            )
        return None

    # ---- failures

    def _stage(self, rank: int) -> str:
        """What a rank was to do: the stage of the oldest message it has not answered; "" while it was idle."""
        return next((sent.deadline.stage for sent in self._sent if rank in sent.missing), "")

    def _divergence(self, rank: int, text: str) -> _Failure:
        return _Failure(3, LockstepGuardError(text, rank=rank, host=self.hosts[rank], stage=self._stage(rank)))

    def _death(self, rank: int) -> _Failure:
        """What is known about a rank whose channel closed or whose process ended."""
        handle = self.ranks[rank].handle
        handle.wait(0.5)  # The channel closes a moment before the process can be reaped.
        code = handle.returncode()
        hint = ""
        if code == -signal.SIGKILL:
            hint = "if nobody sent it, look for the kernel's out-of-memory killer in dmesg"
        stage = self._stage(rank)
        death = RankDiedError(rank=rank, returncode=code, host=self.hosts[rank], stage=stage, hint=hint)
        return _Failure(1 if code is not None else 3, death)

    def _mark_failed(self, rank: int, failure: _Failure) -> None:
        """Note a failure, and stop listening to its rank."""
        self._failures.append(failure)
        self._failed.add(rank)
        self._grace_ends = min(self._grace_ends, time.monotonic() + GRACE_SECONDS)
        started = self.ranks[rank]
        for descriptor in (started.channel.fileno(), started.handle.fileno()):
            self._poll.unregister(descriptor)

    def _best_error(self) -> EngineError | InputError:
        return min(self._failures, key=lambda failure: failure.order).error

    def _timeout_error(self, sent: _Sent) -> RankError:
        """No answer in time: ask every rank for its stacks, then say who was silent and which flag decides."""
        silent, deadline = sorted(sent.missing), sent.deadline
        for started in self.ranks:
            started.handle.signal(signal.SIGUSR1)
        names = ", ".join(map(str, silent))
        log.error("%s: no answer from rank(s) %s; stacks of all ranks follow", deadline.stage, names)
        wait_readable([self.ranks[rank].handle for rank in silent], GRACE_SECONDS)
        others = f" (silent: ranks {names})" if len(silent) > 1 else ""
        text = f"no answer within {deadline.seconds:g} s, the deadline that {deadline.flag} sets{others}"
        return RankTimeoutError(text, rank=silent[0], host=self.hosts[silent[0]], stage=deadline.stage)
