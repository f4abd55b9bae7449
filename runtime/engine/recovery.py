"""Restart policy: how often a failed worker group is started again, and which failures end the engine.

Starting a group is the executor's; queueing the requests again over the new group is ``engine.py``'s.
"""

from __future__ import annotations

import logging
import time

from runtime.common.errors import EngineClosedError, InputError, LockstepError, RankError
from runtime.executor.interface import Executor

log = logging.getLogger("lockstep")

RESTART_WINDOW_SECONDS = 600.0
"""A failure counts against ``EngineConfig.max_restarts`` for this long."""


class RestartPolicy:
    """Restarts the worker group of one executor, at most ``max_restarts`` times within the window."""

    def __init__(self, executor: Executor, max_restarts: int) -> None:
        self._executor = executor
        self._max_restarts = max_restarts
        self._failures: list[float] = []

    def restart(self, error: RankError, num_requests: int) -> int:
        """Start the group again after ``error``, retrying while the policy permits; returns its number of KV blocks.

        Args:
            error: the failure of the group.
            num_requests: unfinished requests, for the log.

        Raises:
            RankError: no restart is left, or the group cannot be started; the error that ends the engine.
        """
        refused = ""
        while True:
            self._count(error)
            log.error("%s", error)
            number, allowed = len(self._failures), self._max_restarts
            log.warning("restart %d of %d; %d requests will continue", number, allowed, num_requests)
            try:
                return self._executor.restart()
            except RankError as again:
                error = again
            except (InputError, EngineClosedError) as refusal:
                raise error from refusal  # Another attempt would fail in the same way.
            except LockstepError as refusal:
                if str(refusal) == refused:
                    raise error from refusal  # E.g. a launcher that starts every rank but once.
                refused = str(refusal)
                log.error("the worker group could not be restarted: %s", refused)

    def _count(self, error: RankError) -> None:
        """Record a failure. Raises ``error`` if the restarts within the window are used up."""
        now = time.monotonic()
        recent = [at for at in self._failures if now - at < RESTART_WINDOW_SECONDS]
        if len(recent) >= self._max_restarts:
            if recent:
                log.error(
                    "the worker group failed %d times within %g s: no more restarts (--max-restarts is %d)",
                    len(recent) + 1,
                    RESTART_WINDOW_SECONDS,
                    self._max_restarts,
                )
            raise error
        self._failures = [*recent, now]
