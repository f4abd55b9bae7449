"""The engine for asyncio: one thread that makes steps, and requests from any number of event loops.

The thread alone touches the engine. Coroutines leave it commands in a queue and wake it through a descriptor; it
leaves each request's newest output in a mailbox and wakes the reader's loop. Whatever a slow reader has not fetched is
merged in the mailbox, so it costs the same however much there is. Nothing here decides what a request may be
(``request_checks.py``) or when it is over (``engine.py``), and HTTP is ``server/``'s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from runtime.common.errors import EngineClosedError, EngineError, LockstepError, QueueFullError, RequestError
from runtime.common.sampling_params import SamplingParams
from runtime.engine.engine import Engine
from runtime.engine.input_processor import CheckedRequest
from runtime.engine.request import RequestOutput
from runtime.engine.stats import EngineSnapshot

log = logging.getLogger("lockstep")

RETRY_SECONDS = (1.0, 60.0)
"""The least and most that a refused client is told to wait."""

_Waiter = concurrent.futures.Future[None]


@dataclass(eq=False, slots=True)
class _Stream:
    """A request between its reader and the engine.

    ``number`` belongs to the engine's thread, ``arrived`` to the reader's loop; the lock guards the rest.
    """

    request_id: str
    checked: CheckedRequest
    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Event
    number: int | None = None
    mailbox: RequestOutput | None = None
    error: LockstepError | None = None
    left: bool = False  # Nobody reads any more.


class AsyncEngine:
    """Continues prompts for coroutines. Use :meth:`start`, then :meth:`generate`, then :meth:`close`.

    Args:
        engine: nobody else may use it from now on. :meth:`close` closes it.
        max_queued_requests: samples that may wait for a place; more requests are refused.
    """

    def __init__(self, engine: Engine, *, max_queued_requests: int) -> None:
        self._engine = engine
        self._max_queued = max_queued_requests
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._wakeup = -1
        # Reentrant: the garbage collector may call close() of a forgotten engine wherever it runs.
        self._lock = threading.RLock()
        self._commands: deque[Callable[[], object]] = deque()
        self._streams: dict[str, _Stream] = {}
        self._by_number: dict[int, _Stream] = {}  # The engine thread's alone.
        self._num_named = 0
        self._num_queued = 0  # Samples in commands that the thread has not carried out.
        self._backlog = False  # Whether somebody waits whom the last plan could not take.
        self._closing = False
        self._ended = False
        self._drain_waiters: list[_Waiter] = []
        self._end_waiters: list[_Waiter] = []
        self._last_progress = time.monotonic()

    # ---- any thread

    @property
    def failure(self) -> LockstepError | None:
        """The error that ended the engine (an EngineClosedError after :meth:`close`); None while it is well."""
        return self._engine.failure

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt + output a request can have here, by the model's length and by the KV cache."""
        return self._engine.max_total_tokens

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def snapshot(self) -> EngineSnapshot:
        """How the engine stands; requests that it has not seen yet count as waiting."""
        with self._lock:  # No request is counted twice on its way from here to the engine.
            snapshot, queued = self._engine.snapshot(), self._num_queued
        return dataclasses.replace(snapshot, num_waiting=snapshot.num_waiting + queued) if queued else snapshot

    def seconds_since_progress(self) -> float:
        """How long ago the thread last finished a step (or got its first request); 0 while there is no request."""
        return time.monotonic() - self._last_progress if self._streams else 0.0

    def start(self) -> None:
        """Start the thread."""
        with self._lock:
            if self._thread is not None or self._closing:
                raise EngineError("this engine was started or closed before; make a new one")
            self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # A daemon: at exit, the interpreter waits for other threads before it runs what would end this one.
            self._thread = threading.Thread(target=self._run, name="lockstep-engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End every request with "abort", the thread, and the engine. May be called twice, and by any thread.

        Waits for the step under way. Does nothing in a forked child, whose engine is its parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
            thread = self._thread
            self._wake()
        if thread is None:
            self._finish()
        elif thread is not threading.current_thread():
            thread.join()

    # ---- coroutines

    async def generate(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; yields an output whenever there is something new, the last one with ``finished`` set.

        What comes while the reader is busy is merged into one output. Leaving the iterator early, by ``break``, by
        cancelling the task or by ``aclose``, aborts the request. If the engine fails, the last output has
        ``finish_reason`` "error".

        Args:
            prompt_token_ids: ids within the vocabulary, at least one.
            params: how to continue it.
            request_id: its name for :meth:`abort`; made up if None.
            prompt: its text, for the outputs.
            priority: lower goes first; of equals, the one that came first.
            cache_salt: only requests with the same salt share the KV blocks of what they have in common.

        Raises:
            RequestError: it can never run, or its name is taken. Raised before anything is yielded, like the others.
            QueueFullError: too many requests are waiting.
            EngineError: the engine has ended or was not started.
        """
        params, limits = params or SamplingParams(), self._engine.limits

        def check() -> CheckedRequest:
            return limits.check(prompt_token_ids, params, prompt=prompt, priority=priority, cache_salt=cache_salt)

        # Grammars may take long to check; everything else takes microseconds.
        checked = check() if params.structured_outputs is None else await asyncio.to_thread(check)
        stream = self._submit(checked, request_id)
        try:
            while True:
                output = await self._next(stream)
                yield output
                if output.finished:
                    return
        finally:
            self._leave(stream)  # No await here: the task may be cancelled, or its loop about to close.

    async def abort(self, request_id: str) -> bool:
        """End a request, whose reader gets its last output with ``finish_reason`` "abort"; whether there was one."""
        answer: concurrent.futures.Future[bool] = concurrent.futures.Future()
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is None:
                return False

            def abort() -> None:
                ended = False
                try:
                    ended = self._end_stream(stream, deliver=True)
                finally:
                    if answer.set_running_or_notify_cancel():  # False: the coroutine that asks was cancelled.
                        answer.set_result(ended)

            self._post(abort)
        return await asyncio.wrap_future(answer)

    async def drained(self) -> None:
        """Return once there is no request that has not ended."""
        with self._lock:
            if not self._streams:
                return
            waiter = _Waiter()
            self._drain_waiters.append(waiter)
        await asyncio.wrap_future(waiter)

    async def ended(self) -> None:
        """Return once the engine has ended, by :meth:`close` or by itself; :attr:`failure` says why."""
        with self._lock:
            if self._ended:
                return
            waiter = _Waiter()
            self._end_waiters.append(waiter)
        await asyncio.wrap_future(waiter)

    def _submit(self, checked: CheckedRequest, request_id: str | None) -> _Stream:
        """Queue a request for the thread."""
        if os.getpid() != self._pid:
            raise EngineError("this engine belongs to the process that forked this one; make a new one here")
        with self._lock:
            self._check_open()
            if request_id is None:
                self._num_named += 1
                request_id = f"request-{self._num_named}"
            if request_id in self._streams:
                raise RequestError(f"there is a request {request_id!r} already; give another request_id, or none")
            stream = _Stream(request_id, checked, asyncio.get_running_loop(), asyncio.Event())
            if not self._streams:
                self._last_progress = time.monotonic()
            self._streams[request_id] = stream
            self._num_queued += checked.params.n
            self._post(partial(self._add, stream))
        return stream

    def _check_open(self) -> None:
        """Whether another request can be queued. The lock is held."""
        if self._ended or self._closing:
            raise (self._engine.failure or EngineClosedError("this engine was closed")).with_traceback(None)
        if self._thread is None:
            raise EngineError("this engine was not started; call start() first")
        scheduler = self._engine.scheduler
        waiting = self._num_queued + scheduler.num_waiting
        # As long as everybody before has got a place, those who have just come will get the places that are left.
        backlog = self._backlog and scheduler.num_waiting > 0
        places = 0 if backlog else max(0, self._engine.max_num_seqs - scheduler.num_running)
        if waiting >= self._max_queued + places:
            stats = self._engine.stats
            between = stats.step_seconds / max(1, sum(stats.finished.values()))
            raise QueueFullError(
                f"{waiting} requests are waiting, and max_queued_requests is {self._max_queued}; try again later",
                retry_after=min(max(between, RETRY_SECONDS[0]), RETRY_SECONDS[1]),
            )

    async def _next(self, stream: _Stream) -> RequestOutput:
        """Wait for something in the mailbox, and take it."""
        while True:
            # Cleared before the look: what comes after the look wakes the wait.
            stream.arrived.clear()
            with self._lock:
                output, stream.mailbox = stream.mailbox, None
                error = stream.error
            if output is not None:
                return output
            if error is not None:
                raise error.with_traceback(None)
            await stream.arrived.wait()

    def _leave(self, stream: _Stream) -> None:
        """The reader is gone: nobody wants the rest."""
        with self._lock:
            stream.left = True
            stream.mailbox = None
            if self._streams.get(stream.request_id) is stream:
                self._post(partial(self._end_stream, stream, deliver=False))

    def _post(self, command: Callable[[], object]) -> None:
        """Leave a command for the thread. The lock is held, so the thread either sees it or has not ended yet."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    # ---- the engine's thread

    def _run(self) -> None:
        engine = self._engine
        try:
            self._work()
        except LockstepError:
            log.debug("the engine's thread ends", exc_info=True)  # It is the engine's failure, told below.
        except BaseException as error:
            # Whatever it is, nobody above would hear of it: those who wait for outputs have to.
            log.critical("a bug ended the engine's thread", exc_info=True)
            engine.failure = engine.failure or EngineError(
                f"a bug ended the engine's thread ({type(error).__name__}: {error}); make a new engine"
            )
        if engine.failure is not None:
            log.error("the engine has ended: %s", engine.failure)
        self._finish()

    def _work(self) -> None:
        """Steps while there is work, sleep while there is none, until closed or failed."""
        engine, scheduler = self._engine, self._engine.scheduler
        while True:
            self._obey()
            if self._closing:
                return
            if not engine.has_work:
                # Commands that came since wake it at once, since each of them writes to the descriptor.
                if engine.wait(self._wakeup):
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wakeup)
                continue
            outputs = engine.step()
            self._backlog = scheduler.num_waiting > 0
            self._last_progress = time.monotonic()
            self._deliver(outputs)
            if engine.failure is not None:
                return

    def _obey(self) -> None:
        """Carry out every command."""
        while self._commands:
            self._commands.popleft()()

    def _add(self, stream: _Stream) -> None:
        """Command: queue a request in the engine."""
        error: LockstepError | None = None
        with self._lock:  # So that nobody who counts those that wait finds it here and there, or nowhere.
            self._num_queued -= stream.checked.params.n
            try:
                if not stream.left:
                    stream.number = self._engine.add(stream.checked)
                    self._by_number[stream.number] = stream
            except LockstepError as refusal:
                error = refusal
        if stream.number is None:
            self._remove(stream, error)

    def _end_stream(self, stream: _Stream, *, deliver: bool) -> bool:
        """Command: abort a request, perhaps with a last output for its reader; whether it had not ended before."""
        if stream.number is None or self._by_number.pop(stream.number, None) is None:
            return False
        output = self._engine.abort(stream.number)
        if deliver and output is not None:
            self._by_number[stream.number] = stream
            self._deliver([output])
        else:
            self._remove(stream)
        return output is not None

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Put outputs into mailboxes, and wake the readers: each loop once."""
        woken: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        forgotten: list[_Stream] = []  # Their loop was closed under them.
        with self._lock:
            for output in outputs:
                stream = self._by_number.get(output.req_id)
                if stream is None:
                    continue
                if not stream.left:
                    if stream.mailbox is None:
                        woken.setdefault(stream.loop, []).append(stream)
                        stream.mailbox = output
                    else:
                        stream.mailbox = output.merged_with(stream.mailbox)
                        if stream.loop.is_closed():
                            forgotten.append(stream)
                if output.finished:
                    del self._by_number[output.req_id]
                    self._remove(stream)
        for loop, streams in woken.items():
            if not _wake_readers(loop, streams):
                forgotten += streams
        for stream in forgotten:
            stream.left = True
            self._end_stream(stream, deliver=False)

    def _remove(self, stream: _Stream, error: LockstepError | None = None) -> None:
        """Forget a request that has ended. With an error, which its reader gets instead of a last output."""
        with self._lock:
            if error is not None:
                stream.error = error
                _wake_readers(stream.loop, [stream])
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
            waiters: list[_Waiter] = []
            if not self._streams:
                waiters, self._drain_waiters = self._drain_waiters, []
        _resolve(waiters)

    def _finish(self) -> None:
        """The thread's last act, or that of close() where none was started: nobody may be left waiting."""
        with self._lock:
            self._ended = True  # From now on nothing is queued any more.
        engine = self._engine
        last_acts: list[Callable[[], object]] = [*self._commands]
        self._commands.clear()
        if engine.failure is None:
            last_acts += [partial(self._end_stream, stream, deliver=True) for stream in self._by_number.values()]
        for act in (*last_acts, engine.close):
            try:
                act()
            except Exception:  # E.g. the bug that ended the engine, again; the others still have to be told.
                log.exception("while ending the engine")
        failure = engine.failure or EngineClosedError("this engine was closed; make a new one")
        for stream in list(self._streams.values()):
            self._remove(stream, failure)
        with self._lock:
            wakeup, self._wakeup = self._wakeup, -1
            if wakeup >= 0:
                os.close(wakeup)
            waiters = [*self._end_waiters, *self._drain_waiters]
            self._end_waiters, self._drain_waiters = [], []
        _resolve(waiters)


def _wake_readers(loop: asyncio.AbstractEventLoop, streams: list[_Stream]) -> bool:
    """Have a loop wake those who wait for these mailboxes; False if it was closed."""

    def wake() -> None:
        for stream in streams:
            stream.arrived.set()

    try:
        loop.call_soon_threadsafe(wake)
    except RuntimeError:  # The loop is closed; there is no way to ask before.
        return False
    return True


def _resolve(waiters: Iterable[_Waiter]) -> None:
    for waiter in waiters:
        if waiter.set_running_or_notify_cancel():  # False: the coroutine that waited was cancelled.
            waiter.set_result(None)
