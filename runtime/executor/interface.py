"""The interface the engine sees: a group of ranks that executes one plan after another.

``supervisor.py`` implements it over real processes; the tests implement it in a few lines to prove scheduler and engine
without any. Each method is called from one place of the engine, by one thread.
"""

from __future__ import annotations

from typing import Protocol

from runtime.common.protocol import StepPlan, StepResult

MAX_OUTSTANDING = 2
"""Plans that may be submitted and not collected: the ranks find the next one waiting when they finish one."""


class Executor(Protocol):
    """A worker group, ready to execute steps."""

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank. At most :data:`MAX_OUTSTANDING` plans are outstanding.

        Raises:
            RankError: a rank has failed. The group is gone.
        """

    def collect(self) -> StepResult:
        """Wait for every rank's answer to the oldest outstanding plan and give rank 0's.

        Raises:
            RankError: a rank died, raised, diverged, or was silent past its deadline. The group is gone afterwards.
        """
        ...

    def wait(self, wakeup: int, timeout: float | None = None) -> bool:
        """While no plan is outstanding: sleep until file descriptor ``wakeup`` is readable; whether it is.

        Raises:
            RankError: a rank died while idle. The group is gone afterwards.
        """
        ...

    def restart(self) -> int:
        """After a RankError: start the group anew, with the same number of ranks; gives its KV blocks, all empty.

        Outstanding plans are forgotten. The next plan's step id is greater than any before.

        Raises:
            LockstepError: it cannot be started again (the launcher cannot, or a rank failed while starting). The
                group is gone, and another ``restart`` may be tried.
        """
        ...

    def close(self) -> None:
        """End the group and everything it owns. May be called twice."""
