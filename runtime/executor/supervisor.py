"""Supervisor: the executor. Starts, steps, watches, restarts and ends worker groups, whatever the launcher.

A launcher makes processes and channels, ``startup.py`` runs the start-up stages, ``worker_group.py`` exchanges
messages. The supervisor owns what outlives a group: the failure that ended it, the run directory, the restart. The
first failure of a rank ends its whole group, with all processes, sockets and files. Requests and tokens are not known
here.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import replace
from types import TracebackType
from typing import Any

from runtime.common.config import EngineConfig
from runtime.common.errors import EngineClosedError, EngineError, LockstepError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import StepPlan, StepResult, pack_plan, unpack_tokens
from runtime.executor.interface import MAX_OUTSTANDING
from runtime.executor.launcher import Launcher
from runtime.executor.run_dir import cleanup_run_dir, make_run_dir
from runtime.executor.startup import NullProgress, Startup, StartupProgress, StartupReport, stage_deadline
from runtime.executor.worker_group import Deadline, WorkerGroup

log = logging.getLogger("lockstep")

LONG_FRAME_BYTES = 32 * 1024
"""Before a longer plan is sent, all answers in flight are read, because a rank that is blocked in sending a long answer
receives nothing. Two frames of this size fit in the buffer of any socket."""

_PRIORITY = os.sched_param(0)  # The only priority of SCHED_BATCH and SCHED_OTHER; nice values are kept.


class SchedBatchContext:
    """Runs the calling thread under SCHED_BATCH within a ``with`` block, and under SCHED_OTHER again afterwards.

    The driver waits for the ranks in such a block, so that its wake-ups preempt no rank. With as many busy ranks as
    cores, the answer of the first rank wakes the driver, and the kernel lets a thread that wakes up preempt the one
    that runs: a rank then stalls in the middle of its next step, which was queued a step ahead. A thread under
    SCHED_BATCH is scheduled without that advantage (sched(7): the policy "applies a small scheduling penalty with
    respect to wakeup behavior").

    Threads with another policy than SCHED_OTHER keep it. If the kernel refuses, the policy stays unchanged, and later
    blocks do not try again. Used by one thread at a time; processes started outside the block do not inherit it.
    """

    def __init__(self) -> None:
        self._allowed = True
        self._changed = False

    def __enter__(self) -> None:
        if self._allowed and os.sched_getscheduler(0) == os.SCHED_OTHER:
            try:
                os.sched_setscheduler(0, os.SCHED_BATCH, _PRIORITY)
            except OSError as error:  # E.g. in a sandbox.
                self._allowed = False
                log.debug("the driver waits without SCHED_BATCH: %s", error)
            else:
                self._changed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._changed:
            self._changed = False
            os.sched_setscheduler(0, os.SCHED_OTHER, _PRIORITY)


class Supervisor:
    """Runs one worker group after another: :meth:`start`, then submit and collect, then :meth:`close`.

    Implements ``runtime.executor.interface.Executor``.

    Args:
        launcher: makes the processes.
        config: resolved.
        model: the model's config, sent to every rank.
        progress: receives the start-up stages of the first start.

    Attributes:
        report: measurements of the latest start.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: EngineConfig,
        model: ModelConfig,
        progress: StartupProgress | None = None,
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._model = model
        self._progress: StartupProgress = progress or NullProgress()
        self._group: WorkerGroup | None = None
        self._collected: deque[StepResult] = deque()
        """Results that were read before the engine collected them."""
        self._run_dir = ""
        self._batch_scheduling = SchedBatchContext()
        self._failure: LockstepError | None = None
        self._closed = False
        self.report = StartupReport()

    @property
    def rank_pids(self) -> list[int]:
        """Each rank's process id, on its own host; empty before all ranks have sent hello."""
        ranks = self._group.ranks if self._group is not None else []
        return [pid for rank in ranks if (pid := rank.handle.pid) is not None]

    # ---- start and restart

    def start(self) -> StartupReport:
        """Start a group and run every start-up stage.

        Raises:
            RankError: a rank failed; the message names stage, rank, host, and includes the rank's traceback.
            InputError: a rank refuses the user's input (e.g. a tensor of the wrong shape).
        """
        try:
            self._start_group(self._config, self._progress)
        except BaseException:
            self.close()
            raise
        return self.report

    def restart(self) -> int:
        """Start another group after a failure; returns its number of KV blocks. See ``Executor.restart``.

        Compiled code is loaded from the cache. An injected fault is not injected again.

        Raises:
            LockstepError: a rank failed during start-up, or the launcher does not support restarts. Another restart
                may be tried.
        """
        if self._closed:
            raise EngineClosedError("this worker group was closed")
        self._end_group(orderly=self._failure is None)
        if not self._launcher.supports_restart:
            raise self._restart_unsupported()
        begun = time.monotonic()
        self._failure = None
        self._start_group(replace(self._config, fault=""), NullProgress())
        blocks = self.report.num_kv_blocks
        log.warning("the worker group is up again after %.1f s, with %d KV blocks", time.monotonic() - begun, blocks)
        return blocks

    def _start_group(self, config: EngineConfig, progress: StartupProgress) -> None:
        self._run_dir = make_run_dir()
        startup = Startup(self._launcher, replace(config, run_dir=self._run_dir), self._model, progress)
        try:
            self._group = startup.run()
        except BaseException as error:
            self._group = startup.group
            self._failure = error if isinstance(error, LockstepError) else EngineError("the start was interrupted")
            self._end_group(orderly=False)
            raise
        self.report = startup.report
        # The directory holds only the rendezvous and the listener, which are unused from here on.
        cleanup_run_dir(self._run_dir)

    def _restart_unsupported(self) -> EngineError:
        """The launcher's refusal, with the failure's text and exit code."""
        error = EngineError(f"{self._launcher.restart_hint}; the cause: {self._failure}")
        if self._failure is not None:
            error.exit_code = self._failure.exit_code
        error.__cause__ = self._failure
        return error

    # ---- steps

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank. It is packed once. See ``Executor.submit``."""
        group = self._ready_group()
        if len(self._collected) + group.num_in_flight >= MAX_OUTSTANDING:
            raise EngineError(
                f"{MAX_OUTSTANDING} plans are outstanding, step {plan.step_id} would be one more; collect one first"
            )
        frame = pack_plan(plan)
        try:
            if len(frame) > LONG_FRAME_BYTES:
                self._read_outstanding(group)
            deadline = Deadline(f"step {plan.step_id}", self._config.step_timeout, "--step-timeout")
            group.send(frame, plan.step_id, deadline)
        except LockstepError as error:
            self._fail(error)
            raise

    def collect(self) -> StepResult:
        """Wait for every rank's answer to the oldest plan; returns rank 0's result. See ``Executor.collect``."""
        if self._collected:
            return self._collected.popleft()
        group = self._ready_group()
        if not group.num_in_flight:
            raise EngineError("no plan is outstanding; submit one first")
        try:
            with self._batch_scheduling:
                return self._gather(group)
        except LockstepError as error:
            self._fail(error)
            raise

    def wait(self, wakeup: int, timeout: float | None = None) -> bool:
        """Sleep until ``wakeup`` is readable or a rank dies, with no plan in flight. See ``Executor.wait``."""
        group = self._ready_group()
        try:
            return group.wait_idle(wakeup, timeout)
        except LockstepError as error:
            self._fail(error)
            raise

    def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call an RPC method on every rank, between steps; one value per rank. The deadline is that of ``ready``.

        Raises:
            RankError: a rank failed. The group is gone.
        """
        group = self._ready_group()
        try:
            self._read_outstanding(group)
            return group.call(method, stage_deadline(self._config, "ready"), **arguments)
        except LockstepError as error:
            self._fail(error)
            raise

    def _gather(self, group: WorkerGroup) -> StepResult:
        number = group.oldest
        return unpack_tokens(int(number), group.gather()[0])

    def _read_outstanding(self, group: WorkerGroup) -> None:
        """Read all answers in flight and keep them for :meth:`collect`, so that every rank waits for a message."""
        while group.num_in_flight:
            self._collected.append(self._gather(group))

    def _ready_group(self) -> WorkerGroup:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise EngineClosedError("this worker group was closed")
        if self._group is None:
            raise EngineError("there is no worker group; start it first")
        return self._group

    # ---- end

    def close(self) -> None:
        """End the group and everything it owns: ranks, channels, files, the launcher's resources. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._end_group(orderly=self._failure is None)
        self._launcher.close()

    def _fail(self, error: LockstepError) -> None:
        """End the group because of ``error``, which every later call raises until a restart."""
        self._failure = error
        self._end_group(orderly=False)

    def _end_group(self, *, orderly: bool) -> None:
        """End the ranks, then clean up the other resources of this start. Idempotent."""
        group, self._group = self._group, None
        self._collected.clear()
        if group is not None:
            group.end(orderly=orderly)
        self._launcher.release()
        cleanup_run_dir(self._run_dir)
        self._run_dir = ""
