"""Executor: the interface between the engine and a worker group.

``supervisor.py`` implements it over processes; tests of the engine and the scheduler implement it without any. The
engine calls it from one thread.
"""

from __future__ import annotations

from typing import Protocol

from runtime.common.protocol import StepPlan, StepResult

MAX_OUTSTANDING = 2
"""Limit of plans that are submitted and not collected. With two, step n+1 is already queued on the ranks when step n
ends."""


class Executor(Protocol):
    """Executes step plans on a worker group, in order."""

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank. At most :data:`MAX_OUTSTANDING` plans are outstanding.

        Raises:
            RankError: a rank has failed. The group is gone.
        """

    def collect(self) -> StepResult:
        """Wait until every rank has answered the oldest outstanding plan; returns rank 0's result.

        Raises:
            RankError: a rank died, raised, diverged, or missed the deadline. The group is gone.
        """
        ...

    def wait(self, wakeup: int, timeout: float | None = None) -> bool:
        """Sleep until file descriptor ``wakeup`` is readable; whether it is. No plan may be outstanding.

        Raises:
            RankError: a rank died while idle. The group is gone.
        """
        ...

    def restart(self) -> int:
        """After a RankError: start another group with the same number of ranks.

        Outstanding plans are discarded. The next plan's step id must be greater than any before.

        Returns:
            the number of KV blocks, all empty.

        Raises:
            LockstepError: the launcher does not support restarts, or a rank failed during start-up. The group is gone,
                and another ``restart`` may be tried.
        """
        ...

    def close(self) -> None:
        """End the group and everything it owns. Idempotent."""
