"""Starts, watches, restarts and ends one worker group after another; the same for every launcher.

A launcher makes processes and channels, ``startup.py`` walks them through their stages, ``worker_group.py`` exchanges
messages under the lockstep guard. Here is what lives longer than a group: the failure that ended it, the folder it ran
in, the restart. A group lives and dies together: its first failure ends all of it, down to the last process and file.
It implements ``runtime.executor.interface.Executor``; it knows nothing of requests or tokens.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import replace

from runtime.common.config import EngineConfig
from runtime.common.errors import EngineClosedError, EngineError, LockstepError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import StepPlan, StepResult, pack_plan, unpack_tokens
from runtime.executor.batch_scheduling import SchedBatchContext
from runtime.executor.interface import MAX_OUTSTANDING
from runtime.executor.launcher import Launcher
from runtime.executor.run_dir import cleanup_run_dir, make_run_dir
from runtime.executor.startup import NullProgress, Startup, StartupProgress, StartupReport, stage_deadline
from runtime.executor.worker_group import Deadline, WorkerGroup

log = logging.getLogger("lockstep")

LONG_FRAME_BYTES = 32 * 1024
"""A longer plan is sent only when no rank can be blocked in sending an answer: two of this size fit in any socket."""


class Supervisor:
    """Worker groups from spawn to the last process. Use :meth:`start`, then submit and collect, then close.

    Args:
        launcher: makes the processes.
        config: resolved.
        model: the model's config, handed to every rank.
        progress: told about every start-up stage of the first start.

    Attributes:
        report: what the latest start took and found.
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
        """Results that had to be read before the engine asked for them."""
        self._run_dir = ""
        self._batch_scheduling = SchedBatchContext()
        self._failure: LockstepError | None = None
        self._closed = False
        self.report = StartupReport()

    @property
    def rank_pids(self) -> list[int]:
        """Each rank's process, on its own host; empty while there is no group that has said hello."""
        ranks = self._group.ranks if self._group is not None else []
        return [pid for rank in ranks if (pid := rank.handle.pid) is not None]

    # ---- start and restart

    def start(self) -> StartupReport:
        """Walk a group through every start-up stage.

        Raises:
            RankError: a rank failed; the message names stage, rank, host, and carries the rank's traceback.
            InputError: a rank found the input wrong (e.g. a misshaped tensor).
        """
        try:
            self._bring_up(self._config, self._progress)
        except BaseException:
            self.close()
            raise
        return self.report

    def restart(self) -> int:
        """Start the group anew after it has failed; gives its KV blocks. See ``Executor.restart``.

        What the failed group had compiled is found in the cache. An injected fault has happened and does not happen
        again.

        Raises:
            LockstepError: a rank failed while starting, or the launcher cannot start a second group. Another restart
                may be tried.
        """
        if self._closed:
            raise EngineClosedError("this worker group was closed")
        self._end_group(orderly=self._failure is None)
        if not self._launcher.supports_restart:
            raise self._cannot_restart()
        begun = time.monotonic()
        self._failure = None
        self._bring_up(replace(self._config, fault=""), NullProgress())
        blocks = self.report.num_kv_blocks
        log.warning("the worker group is up again after %.1f s, with %d KV blocks", time.monotonic() - begun, blocks)
        return blocks

    def _bring_up(self, config: EngineConfig, progress: StartupProgress) -> None:
        self._run_dir = make_run_dir()
        startup = Startup(self._launcher, replace(config, run_dir=self._run_dir), self._model, progress)
        try:
            self._group = startup.run()
        except BaseException as error:
            self._group = startup.group
            self._failure = error if isinstance(error, LockstepError) else EngineError("a start was interrupted")
            self._end_group(orderly=False)
            raise
        self.report = startup.report
        # Ranks are connected and have met: nothing in the folder is needed any more.
        cleanup_run_dir(self._run_dir)

    def _cannot_restart(self) -> EngineError:
        """The launcher's refusal, which must not hide what it was that failed."""
        error = EngineError(f"{self._launcher.restart_hint}; the cause: {self._failure}")
        if self._failure is not None:
            error.exit_code = self._failure.exit_code
        error.__cause__ = self._failure
        return error

    # ---- steps

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank: packed once, the same bytes down every channel. See ``Executor.submit``."""
        group = self._ready_group()
        if len(self._collected) + group.num_unanswered >= MAX_OUTSTANDING:
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
        """Every rank's answer to the oldest outstanding plan, checked; gives rank 0's. See ``Executor.collect``."""
        if self._collected:
            return self._collected.popleft()
        group = self._ready_group()
        if not group.num_unanswered:
            raise EngineError("no plan is outstanding; submit one first")
        try:
            with self._batch_scheduling:
                return self._gather(group)
        except LockstepError as error:
            self._fail(error)
            raise

    def wait(self, wakeup: int, timeout: float | None = None) -> bool:
        """While no plan is outstanding: sleep until ``wakeup`` is readable or a rank dies. See ``Executor.wait``."""
        group = self._ready_group()
        try:
            return group.wait_idle(wakeup, timeout)
        except LockstepError as error:
            self._fail(error)
            raise

    def measure_step(self, repeats: int) -> list[dict[str, float]]:
        """For benchmarks: each rank's seconds of the last step's forward pass, and of its ops, over some repeats."""
        group = self._ready_group()
        try:
            self._read_outstanding(group)
            return group.call("measure_step", stage_deadline(self._config, "ready"), repeats=repeats)
        except LockstepError as error:
            self._fail(error)
            raise

    def _gather(self, group: WorkerGroup) -> StepResult:
        number = group.oldest
        return unpack_tokens(int(number), group.gather()[0])

    def _read_outstanding(self, group: WorkerGroup) -> None:
        """Read every answer that is still to come, for :meth:`collect`: then every rank waits for a message."""
        while group.num_unanswered:
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
        """End the group and everything it owns: ranks, channels, files, what the launcher holds."""
        if self._closed:
            return
        self._closed = True
        self._end_group(orderly=self._failure is None)
        self._launcher.close()

    def _fail(self, error: LockstepError) -> None:
        """End the group because of ``error``, which every later call raises too, until a restart."""
        self._failure = error
        self._end_group(orderly=False)

    def _end_group(self, *, orderly: bool) -> None:
        """End the ranks, then remove what else this start has made. Nothing happens if that was done."""
        group, self._group = self._group, None
        self._collected.clear()
        if group is not None:
            group.end(orderly=orderly)
        self._launcher.release()
        cleanup_run_dir(self._run_dir)
        self._run_dir = ""
