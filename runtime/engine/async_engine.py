"""The engine for asyncio: requests from any number of event loops, steps in one thread.

Coroutines post requests to :class:`~runtime.engine.engine_thread.EngineThread` and read their output queues. Outputs
that a slow reader has not fetched are merged, so it costs the same however many there are. Request checks are
``input_processor.py``'s, finishing is ``engine.py``'s, and HTTP is ``runtime/server``'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncGenerator

from runtime.common.errors import EngineClosedError, EngineError, LockstepError, QueueFullError, RequestError
from runtime.engine.engine import Engine
from runtime.engine.engine_thread import EngineThread, OutputQueue
from runtime.engine.request import GenerateRequest, RequestOutput
from runtime.engine.stats import EngineSnapshot

RETRY_SECONDS = (1.0, 60.0)
"""Bounds of the time after which a refused client is asked to retry."""


class AsyncEngine:
    """Continuous batching for coroutines: :meth:`start`, then :meth:`generate`, then :meth:`close`.

    Args:
        engine: used by this object alone from now on. :meth:`close` closes it.
        max_queued_requests: sequences that may wait for admission; more requests are refused.

    Example::

        engine = AsyncEngine(Engine(...), max_queued_requests=256)
        engine.start()
        async for output in engine.generate(GenerateRequest([1, 2, 3], SamplingParams(max_tokens=8))):
            print(output.token_ids)
    """

    def __init__(self, engine: Engine, *, max_queued_requests: int) -> None:
        self._engine = engine
        self._thread = EngineThread(engine)
        self._max_queued = max_queued_requests
        self._pid = os.getpid()
        self._num_named = 0

    # ---- any thread

    @property
    def failure(self) -> LockstepError | None:
        """The error that ended the engine (an EngineClosedError after :meth:`close`); None while it runs."""
        return self._engine.failure

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt plus output of a request, by the model's length and by the KV cache."""
        return self._engine.max_total_tokens

    @property
    def num_unfinished(self) -> int:
        """Unfinished requests."""
        return len(self._thread.queues)

    def snapshot(self) -> EngineSnapshot:
        """The engine's snapshot; requests that the thread has not added yet count as waiting."""
        with self._thread.lock:  # No request is counted twice on its way from here to the engine.
            snapshot, queued = self._engine.snapshot(), self._thread.num_queued
        return dataclasses.replace(snapshot, num_waiting=snapshot.num_waiting + queued) if queued else snapshot

    def seconds_since_progress(self) -> float:
        """Seconds since the last step was finished (or the first request was queued); 0 without requests."""
        return time.monotonic() - self._thread.last_progress if self._thread.queues else 0.0

    def start(self) -> None:
        """Start the thread. Raises :class:`EngineError` if it was started or closed before."""
        self._thread.start()

    def close(self) -> None:
        """Finish every request with "abort", end the thread, and close the engine. May be called twice, by any thread.

        Waits for the current step. Does nothing in a forked child, whose engine belongs to its parent.
        """
        if os.getpid() == self._pid:
            self._thread.close()

    # ---- coroutines

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; yields an output whenever there is something new, the last one with ``finished`` set.

        Outputs that arrive while the reader is busy are merged into one. Leaving the iterator early, by ``break``, by
        cancelling the task or by ``aclose``, aborts the request. If the engine fails, the last output has
        ``finish_reason`` "error".

        Raises:
            RequestError: it can never run, or its ``request_id`` is in use. Raised before anything is yielded, like
                the others.
            QueueFullError: too many requests are waiting.
            EngineError: the engine has ended or was not started.
        """
        process = self._engine.input_processor.process
        if request.params.structured_outputs is None:
            request = process(request)
        else:
            request = await asyncio.to_thread(process, request)  # Checking a grammar may take seconds.
        queue = self._submit(request)
        try:
            while True:
                output = await self._next(queue)
                yield output
                if output.finished:
                    return
        finally:
            self._thread.abandon(queue)  # No await here: the task may be cancelled, or its loop about to close.

    async def abort(self, request_id: str) -> bool:
        """Abort a request, whose reader gets a last output with ``finish_reason`` "abort"; False if it is unknown."""
        aborted = self._thread.abort(request_id)
        return aborted is not None and await asyncio.wrap_future(aborted)

    async def ended(self) -> None:
        """Return once the engine has ended, by :meth:`close` or by a failure; :attr:`failure` says why."""
        waiter = self._thread.wait_for_end()
        if waiter is not None:
            await asyncio.wrap_future(waiter)

    def _submit(self, request: GenerateRequest) -> OutputQueue:
        """Queue a processed request for the thread."""
        if os.getpid() != self._pid:
            raise EngineError("this engine belongs to the process that forked this one; make a new one here")
        thread = self._thread
        with thread.lock:
            self._check_admission()
            request_id = request.request_id
            if request_id is None:
                self._num_named += 1
                request_id = f"request-{self._num_named}"
            if request_id in thread.queues:
                raise RequestError(f"there is a request {request_id!r} already; give another request_id, or none")
            queue = OutputQueue(request_id, request, asyncio.get_running_loop(), asyncio.Event())
            thread.submit(queue)
        return queue

    def _check_admission(self) -> None:
        """Check that another request can be queued. The lock is held."""
        thread, scheduler = self._thread, self._engine.scheduler
        if thread.has_ended or thread.is_closing:
            raise (self._engine.failure or EngineClosedError("this engine was closed")).with_traceback(None)
        if not thread.is_started:
            raise EngineError("this engine was not started; call start() first")
        waiting = thread.num_queued + scheduler.num_waiting
        # Without a backlog every earlier request was admitted, so new ones will be admitted up to max_num_seqs.
        has_backlog = thread.has_backlog and scheduler.num_waiting > 0
        free = 0 if has_backlog else max(0, self._engine.max_num_seqs - scheduler.num_running)
        if waiting >= self._max_queued + free:
            stats = self._engine.stats
            between = stats.step_seconds / max(1, sum(stats.finished.values()))
            raise QueueFullError(
                f"{waiting} requests are waiting, and max_queued_requests is {self._max_queued}; try again later",
                retry_after=min(max(between, RETRY_SECONDS[0]), RETRY_SECONDS[1]),
            )

    async def _next(self, queue: OutputQueue) -> RequestOutput:
        """Wait for an output, and take it out of the queue."""
        while True:
            # Cleared before reading: an output that arrives after the read sets it again.
            queue.arrived.clear()
            with self._thread.lock:
                output, queue.output = queue.output, None
                error = queue.error
            if output is not None:
                return output
            if error is not None:
                raise error.with_traceback(None)
            await queue.arrived.wait()
