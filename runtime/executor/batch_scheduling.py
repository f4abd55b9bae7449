"""Waiting for ranks that need the same cores: the thread that waits must not push one aside when its answer comes.

With as many busy ranks as cores, the answer that a rank sends wakes the driver, and the kernel lets who wakes up run
first: the rank stands still in the middle of the next step for as long as the driver has something to do, although
nothing was urgent, since plans are sent a step ahead. Under SCHED_BATCH a thread that wakes waits its turn instead
(sched(7): the scheduling policy "applies a small scheduling penalty with respect to wakeup behavior").
"""

from __future__ import annotations

import logging
import os
from types import TracebackType

log = logging.getLogger("lockstep")

_PRIORITY = os.sched_param(0)  # The only one that SCHED_BATCH and SCHED_OTHER have; nice values stay as they are.


class SchedBatchContext:
    """Within the ``with`` block, the calling thread pushes no other one aside when it wakes up.

    It ends with the block, so neither a caller's thread nor a process that it starts later is changed. A thread with a
    policy of its own keeps it, and where the kernel refuses, things stay as they are. For one thread at a time.
    """

    def __init__(self) -> None:
        self._allowed = True
        self._changed = False

    def __enter__(self) -> None:
        if self._allowed and os.sched_getscheduler(0) == os.SCHED_OTHER:
            try:
                os.sched_setscheduler(0, os.SCHED_BATCH, _PRIORITY)
            except OSError as error:  # E.g. a sandbox that knows one policy.
                self._allowed = False
                log.debug("the driver cannot give way to the ranks: %s", error)
            else:
                self._changed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._changed:
            self._changed = False
            os.sched_setscheduler(0, os.SCHED_OTHER, _PRIORITY)
