"""The engine's thread: processes commands from event loops, makes steps, and delivers outputs to output queues.

This thread alone calls the engine. Event loops post commands and wake it through an eventfd; it puts each request's
newest output into the request's :class:`OutputQueue` and wakes the reader's loop. The coroutines that post and read are
``async_engine.py``'s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from runtime.common.errors import EngineClosedError, EngineError, LockstepError
from runtime.engine.engine import Engine
from runtime.engine.request import GenerateRequest, RequestOutput

log = logging.getLogger("lockstep")

Waiter = concurrent.futures.Future[None]
"""Resolved by the thread; a coroutine awaits it with ``asyncio.wrap_future``."""


@dataclass(eq=False, slots=True)
class OutputQueue:
    """Output queue of one request, of length one: outputs that the reader has not fetched are merged.

    ``req_id`` belongs to the engine's thread, ``arrived`` to the reader's loop; the thread's lock guards the rest.

    Attributes:
        request_id: the client's name for the request.
        request: as the input processor returned it.
        loop, arrived: the reader's event loop, and the event that wakes the reader in it.
        req_id: the engine's number for the request; None until it was added.
        output: the merged output that the reader has not fetched.
        error: raised for the reader instead of an output.
        is_abandoned: whether the reader has left.
    """

    request_id: str
    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Event
    req_id: int | None = None
    output: RequestOutput | None = None
    error: LockstepError | None = None
    is_abandoned: bool = False


class EngineThread:
    """Runs an engine in a thread of its own.

    Args:
        engine: used by this thread alone from now on, and closed by it.

    Attributes:
        lock: guards everything here that event loops read or write.
        queues: output queues of unfinished requests, by request id.
        num_queued: sequences of requests in commands that were not processed.
        has_backlog: whether a request waits that the last plan could not admit.
        is_started, is_closing, has_ended: where the thread is between :meth:`start` and its end.
        last_progress: when the last step was finished, or the first request was queued (``time.monotonic``).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Reentrant: the garbage collector may call close() of an unreferenced engine wherever it runs.
        self.lock = threading.RLock()
        self.queues: dict[str, OutputQueue] = {}
        self.num_queued = 0
        self.has_backlog = False
        self.is_closing = False
        self.has_ended = False
        self.last_progress = time.monotonic()
        self._thread: threading.Thread | None = None
        self._wakeup = -1
        self._commands: deque[Callable[[], object]] = deque()
        self._by_req_id: dict[int, OutputQueue] = {}  # Used by the thread alone.
        self._end_waiters: list[Waiter] = []

    @property
    def is_started(self) -> bool:
        """Whether :meth:`start` was called."""
        return self._thread is not None

    # ---- called by event loops and owners

    def start(self) -> None:
        """Start the thread. Raises :class:`EngineError` if it was started or closed before."""
        with self.lock:
            if self._thread is not None or self.is_closing:
                raise EngineError("this engine was started or closed before; make a new engine")
            self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # A daemon: at exit, the interpreter joins other threads before it runs the finalizer that ends this one.
            self._thread = threading.Thread(target=self._run, name="lockstep-engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Abort every request and end the thread and the engine; waits for the current step. May be called twice."""
        with self.lock:
            self.is_closing = True
            thread = self._thread
            self._wake()
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            thread.join()

    def submit(self, queue: OutputQueue) -> None:
        """Register an output queue and post its request. The lock is held."""
        if not self.queues:
            self.last_progress = time.monotonic()
        self.queues[queue.request_id] = queue
        self.num_queued += queue.request.params.n
        self._post(partial(self._add, queue))

    def abandon(self, queue: OutputQueue) -> None:
        """The reader has left: abort its request and drop its outputs."""
        with self.lock:
            queue.is_abandoned = True
            queue.output = None
            if self.queues.get(queue.request_id) is queue:
                self._post(partial(self._abort, queue, deliver=False))

    def abort(self, request_id: str) -> concurrent.futures.Future[bool] | None:
        """Abort a request with a last output for its reader; resolves to whether it was unfinished. None: unknown."""
        aborted: concurrent.futures.Future[bool] = concurrent.futures.Future()
        with self.lock:
            queue = self.queues.get(request_id)
            if queue is None:
                return None

            def abort() -> None:
                was_unfinished = False
                try:
                    was_unfinished = self._abort(queue, deliver=True)
                finally:
                    if aborted.set_running_or_notify_cancel():  # False: the waiting coroutine was cancelled.
                        aborted.set_result(was_unfinished)

            self._post(abort)
        return aborted

    def wait_for_end(self) -> Waiter | None:
        """Resolved when the thread has ended; None if it has."""
        with self.lock:
            if self.has_ended:
                return None
            waiter = Waiter()
            self._end_waiters.append(waiter)
            return waiter

    def _post(self, command: Callable[[], object]) -> None:
        """Queue a command. The lock is held, so the thread processes it, or had not ended yet and drains it."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    # ---- the thread

    def _run(self) -> None:
        engine = self._engine
        try:
            self._loop()
        except LockstepError:
            log.debug("the engine's thread ends", exc_info=True)  # It is engine.failure, logged below.
        except BaseException as error:
            # No caller above sees it: it is delivered to every reader as the engine's failure.
            log.critical("internal error: the engine's thread ends", exc_info=True)
            engine.failure = engine.failure or EngineError(
                f"internal error in the engine's thread: {type(error).__name__}: {error}; make a new engine"
            )
        if engine.failure is not None:
            log.error("the engine has ended: %s", engine.failure)
        self._end()

    def _loop(self) -> None:
        """Make steps while there is work, sleep while there is none, until closed or failed."""
        engine, scheduler = self._engine, self._engine.scheduler
        while True:
            self._process_commands()
            if self.is_closing:
                return
            if not engine.has_work:
                # Commands posted since wake it at once, since each of them writes to the eventfd.
                if engine.wait(self._wakeup):
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wakeup)
                continue
            outputs = engine.step()
            self.has_backlog = scheduler.num_waiting > 0
            self.last_progress = time.monotonic()
            self._deliver(outputs)
            if engine.failure is not None:
                return

    def _process_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _add(self, queue: OutputQueue) -> None:
        """Command: add a request to the engine."""
        error: LockstepError | None = None
        with self.lock:  # A snapshot counts the request as queued or as waiting, never twice and never not at all.
            self.num_queued -= queue.request.params.n
            try:
                if not queue.is_abandoned:
                    queue.req_id = self._engine.add(queue.request, processed=True)
                    self._by_req_id[queue.req_id] = queue
            except LockstepError as refusal:
                error = refusal
        if queue.req_id is None:
            self._remove(queue, error)

    def _abort(self, queue: OutputQueue, *, deliver: bool) -> bool:
        """Command: abort a request, with a last output if ``deliver``; returns whether it was unfinished."""
        if queue.req_id is None or self._by_req_id.pop(queue.req_id, None) is None:
            return False
        output = self._engine.abort(queue.req_id)
        if deliver and output is not None:
            self._by_req_id[queue.req_id] = queue
            self._deliver([output])
        else:
            self._remove(queue)
        return output is not None

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Put outputs into output queues, and wake the readers: each loop once."""
        woken: dict[asyncio.AbstractEventLoop, list[OutputQueue]] = {}
        unreachable: list[OutputQueue] = []  # Their loop was closed.
        with self.lock:
            for output in outputs:
                queue = self._by_req_id.get(output.req_id)
                if queue is None:
                    continue
                if not queue.is_abandoned:
                    if queue.output is None:
                        woken.setdefault(queue.loop, []).append(queue)
                        queue.output = output
                    else:
                        queue.output = output.merged_with(queue.output)
                        if queue.loop.is_closed():
                            unreachable.append(queue)
                if output.finished:
                    del self._by_req_id[output.req_id]
                    self._remove(queue)
        for loop, queues in woken.items():
            if not _wake_readers(loop, queues):
                unreachable += queues
        for queue in unreachable:
            queue.is_abandoned = True
            self._abort(queue, deliver=False)

    def _remove(self, queue: OutputQueue, error: LockstepError | None = None) -> None:
        """Remove a finished request; with an error, its reader gets that instead of a last output."""
        with self.lock:
            if error is not None:
                queue.error = error
                _wake_readers(queue.loop, [queue])
            if self.queues.get(queue.request_id) is queue:
                del self.queues[queue.request_id]

    def _end(self) -> None:
        """Last call of the thread, or of close() where none was started: no reader and no waiter stays blocked."""
        with self.lock:
            self.has_ended = True  # From now on no request is queued.
        engine = self._engine
        last_calls: list[Callable[[], object]] = [*self._commands]
        self._commands.clear()
        if engine.failure is None:
            last_calls += [partial(self._abort, queue, deliver=True) for queue in self._by_req_id.values()]
        for call in (*last_calls, engine.close):
            try:
                call()
            except Exception:  # E.g. the error that ended the engine, again; the other calls still have to run.
                log.exception("while ending the engine")
        failure = engine.failure or EngineClosedError("this engine was closed; make a new engine")
        for queue in list(self.queues.values()):
            self._remove(queue, failure)
        with self.lock:
            wakeup, self._wakeup = self._wakeup, -1
            if wakeup >= 0:
                os.close(wakeup)
            waiters, self._end_waiters = self._end_waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():  # False: the waiting coroutine was cancelled.
                waiter.set_result(None)


def _wake_readers(loop: asyncio.AbstractEventLoop, queues: list[OutputQueue]) -> bool:
    """Wake the readers of these queues, all in ``loop``; False if it was closed."""

    def wake() -> None:
        for queue in queues:
            queue.arrived.set()

    try:
        loop.call_soon_threadsafe(wake)
    except RuntimeError:  # The loop is closed; checking before would race with closing.
        return False
    return True
