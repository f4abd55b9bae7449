"""SCHED_BATCH while the driver waits for the ranks, so that its wake-ups do not preempt a rank.

With as many busy ranks as cores, the answer of the first rank wakes the driver, and the kernel lets a thread that wakes
up preempt the one that runs: a rank then stalls in the middle of its next step, which was queued a step ahead. A thread
under SCHED_BATCH is scheduled without that advantage (sched(7): the policy "applies a small scheduling penalty with
respect to wakeup behavior").
"""

from __future__ import annotations

import logging
import os
from types import TracebackType

log = logging.getLogger("lockstep")

_PRIORITY = os.sched_param(0)  # The only priority of SCHED_BATCH and SCHED_OTHER; nice values are kept.


class SchedBatchContext:
    """Runs the calling thread under SCHED_BATCH within a ``with`` block, and under SCHED_OTHER again afterwards.

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
