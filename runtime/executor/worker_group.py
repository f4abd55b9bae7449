"""WorkerGroup: the messages between the driver and the ranks of one group, under the lockstep guard.

Every rank receives the same bytes and answers messages in order. An answer carries the number and the digest of the
message that it answers; anything else is a divergence. Several messages may be in flight, and early answers are kept.
The first sign of a failure (death, exception, divergence, timeout) ends the group; ``failure.py`` chooses the error.
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
from runtime.common.errors import ProtocolError, RankTimeoutError
from runtime.common.protocol import digest, pack, unpack, unpack_exception
from runtime.executor.failure import Failure, RankContext, best_error, death, divergence, exception
from runtime.executor.launcher import StartedRank

log = logging.getLogger("lockstep")

GRACE_SECONDS = 0.25
"""How long to collect further signs after the first one of a failure: another rank may have a better explanation."""

ORDERLY_EXIT_SECONDS = 3.0
"""Time limit for a rank to exit after the shutdown RPC, before it is killed."""

KILL_SECONDS = 5.0
"""Time limit for a process to end after SIGKILL."""

HELLO = "hello"
"""Number of a rank's first message, which answers no other."""


@dataclass(frozen=True)
class Deadline:
    """The time limit of a message.

    Attributes:
        stage: a start-up stage or ``"step N"``.
        seconds: counted from when the message was sent or the one before it was answered, whichever is later.
        flag: the command line flag that sets it.
    """

    stage: str
    seconds: float
    flag: str


@dataclass(eq=False, slots=True)
class _InFlight:
    """A message that was sent to every rank, and the answers so far."""

    number: int | str
    digest: str | None
    deadline: Deadline
    since: float
    missing: set[int]
    answers: list[Any] = field(default_factory=list[Any])


class WorkerGroup:
    """The ranks of one group, from their hello to their end. Used by one thread; any raised error ends the group.

    Args:
        ranks: in rank order. Each sends hello, which is the first message to gather.
        hello: the deadline of hello.
        since: when that deadline starts, by ``time.monotonic``.
        on_progress: called with stage, done and total when a rank reports progress.
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
        self._in_flight: deque[_InFlight] = deque()
        self._last_gathered = 0.0
        self._next_call = 0
        self._failures: dict[int, Failure] = {}
        """The first failure of each rank. Further messages of these ranks are ignored."""
        self._grace_ends = float("inf")
        # One poll object for the life of the group: a selector per step costs more than the step's messages.
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
    def num_in_flight(self) -> int:
        """Number of messages whose answers were not gathered."""
        return len(self._in_flight)

    @property
    def oldest(self) -> int | str:
        """The number of the message whose answers :meth:`gather` returns next."""
        return self._in_flight[0].number

    def call(self, method: str, deadline: Deadline, **arguments: Any) -> list[Any]:
        """Call an RPC method on every rank; one value per rank. No other message may be in flight."""
        self._next_call += 1
        self.send(pack(["call", self._next_call, method, arguments]), self._next_call, deadline)
        return self.gather()

    def send(self, frame: bytes, number: int, deadline: Deadline) -> None:
        """Send a frame to every rank. Answers must carry ``number`` and the frame's digest.

        Raises:
            RankError: a rank has failed.
        """
        self._expect(number, digest(frame), deadline, time.monotonic())
        for rank, started in enumerate(self.ranks):
            try:
                started.channel.send(frame)
            except ChannelClosedError:
                self._mark_failed(rank, death(self._context(rank), started.handle))
        if self._failures:
            self._listen(self._in_flight[0], float("inf"))
            raise best_error(self._failures.values())

    def gather(self) -> list[Any]:
        """Wait for every rank's answer to the oldest message in flight; one value per rank.

        Raises:
            RankError: a rank died, raised, diverged, or missed the deadline.
            InputError: a rank refuses the user's input.
        """
        sent = self._in_flight[0]
        self._listen(sent, max(sent.since, self._last_gathered) + sent.deadline.seconds)
        if sent.missing:
            raise best_error(self._failures.values()) if self._failures else self._timeout_error(sent)
        self._in_flight.popleft()
        self._last_gathered = time.monotonic()
        return sent.answers

    def wait_idle(self, wakeup: int, timeout: float | None) -> bool:
        """Sleep until the descriptor ``wakeup`` is readable; whether it is. Answers that arrive meanwhile are kept.

        Raises:
            RankError: a rank died.
        """
        self._poll.register(wakeup, select.POLLIN)
        try:
            deadline = float("inf") if timeout is None else time.monotonic() + timeout
            while True:
                ready = self._read_ready(deadline - time.monotonic())
                if self._failures:
                    raise best_error(self._failures.values())
                if wakeup in ready:
                    return True
                if not ready and time.monotonic() >= deadline:
                    return False
        finally:
            self._poll.unregister(wakeup)

    def end(self, *, orderly: bool) -> None:
        """End every rank's process and close every channel.

        Args:
            orderly: whether to call ``shutdown`` and wait before SIGKILL; False for a group that has failed.
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
            if not started.handle.wait(KILL_SECONDS):
                log.error("rank %d is still alive after SIGKILL", started.handle.rank)
            started.channel.close()
            started.handle.close()

    # ---- answers

    def _expect(self, number: int | str, expected: str | None, deadline: Deadline, since: float) -> None:
        size = len(self.ranks)
        self._in_flight.append(_InFlight(number, expected, deadline, since, set(range(size)), [None] * size))

    def _listen(self, sent: _InFlight, deadline: float) -> None:
        """Read until every rank that has not failed has answered ``sent``, or until the deadline."""
        while sent.missing - self._failures.keys():
            left = min(deadline, self._grace_ends) - time.monotonic()
            # Answers that have arrived count even if this process was scheduled after the deadline.
            if not self._read_ready(left) and left <= 0:
                return

    def _read_ready(self, seconds: float) -> set[int]:
        """Wait at most ``seconds`` for readable descriptors and read one message of each; returns the descriptors."""
        ready = {fd for fd, _ in self._poll.poll(None if seconds == float("inf") else max(0.0, seconds) * 1000.0)}
        # In rank order, a rank's channel before its process: its last message explains its death.
        for fd in sorted(ready & self._rank_of.keys(), key=lambda fd: (self._rank_of[fd], fd not in self._channels)):
            rank = self._rank_of[fd]
            if rank in self._failures:
                continue
            if fd in self._channels:
                self._read(rank)
            elif self.ranks[rank].channel.fileno() not in ready:
                self._mark_failed(rank, death(self._context(rank), self.ranks[rank].handle))
        return ready

    def _read(self, rank: int) -> None:
        """Read one message of a rank: keep its answer, or mark the rank as failed."""
        started = self.ranks[rank]
        try:
            failure = self._accept(rank, unpack(started.channel.recv_ready()))
        except ChannelClosedError:
            failure = death(self._context(rank), started.handle)
        except ProtocolError as error:
            failure = divergence(self._context(rank), f"it sent a malformed message: {error}")
        if failure is not None:
            self._mark_failed(rank, failure)

    def _accept(self, rank: int, message: list[Any]) -> Failure | None:
        """Keep the answer in a message; returns the failure that the message shows instead, if any."""
        if message[0] == "progress":
            self._on_progress(*message[1:4])
            return None
        if message[0] == "error":
            return exception(self._context(rank), unpack_exception(message))
        sent = next((sent for sent in self._in_flight if rank in sent.missing), None)
        if sent is None:
            return divergence(self._context(rank), f"it sent {message[0]!r} when no message was in flight")
        if violation := _violation(sent, message):
            return divergence(self._context(rank), violation)
        sent.answers[rank] = message[2] if sent.number == HELLO else message[3]
        sent.missing.discard(rank)
        return None

    # ---- failures

    def _context(self, rank: int) -> RankContext:
        stage = next((sent.deadline.stage for sent in self._in_flight if rank in sent.missing), "")
        return RankContext(rank, self.hosts[rank], stage)

    def _mark_failed(self, rank: int, failure: Failure) -> None:
        """Record a rank's failure and ignore the rank from now on. Idempotent: the first failure of a rank counts."""
        if rank in self._failures:
            return
        self._failures[rank] = failure
        self._grace_ends = min(self._grace_ends, time.monotonic() + GRACE_SECONDS)
        started = self.ranks[rank]
        for descriptor in (started.channel.fileno(), started.handle.fileno()):
            self._poll.unregister(descriptor)

    def _timeout_error(self, sent: _InFlight) -> RankTimeoutError:
        """The error of a missed deadline. Every rank logs its stacks first."""
        silent, deadline = sorted(sent.missing), sent.deadline
        for started in self.ranks:
            started.handle.signal(signal.SIGUSR1)
        names = ", ".join(map(str, silent))
        log.error("%s: no answer from rank(s) %s; stacks of all ranks follow", deadline.stage, names)
        wait_readable([self.ranks[rank].handle for rank in silent], GRACE_SECONDS)
        others = f" (silent: ranks {names})" if len(silent) > 1 else ""
        text = f"no answer within {deadline.seconds:g} s, the deadline that {deadline.flag} sets{others}"
        return RankTimeoutError(text, rank=silent[0], host=self.hosts[silent[0]], stage=deadline.stage)


def _violation(sent: _InFlight, message: list[Any]) -> str:
    """How a message violates the lockstep guard as an answer to ``sent``; "" if it does not."""
    kind = message[0]
    if sent.number == HELLO:
        return "" if kind == HELLO and len(message) == 3 else f"its first message was {kind!r}"
    if kind != "ok" or len(message) != 4:
        return f"it sent {kind!r} instead of an answer"
    if message[1] != sent.number:
        return f"it answered for step or call {message[1]} instead of {sent.number}"
    if message[2] != sent.digest:
        return f"it executed a message with digest {message[2]}, sent was {sent.digest}: it received other bytes"
    return ""
