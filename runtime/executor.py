"""The interface the engine sees: a group of ranks that executes one plan after another.

``launch/supervisor.py`` implements it over real processes; the tests implement it in a few lines to prove scheduler
and engine without any. Three methods, each called from one place of the engine.
"""

from __future__ import annotations

from typing import Protocol

from runtime.protocol import StepPlan, StepResult


class Executor(Protocol):
    """A worker group, ready to execute steps."""

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank. At most one plan is outstanding. Raises :class:`~runtime.errors.RankError`."""

    def collect(self) -> StepResult:
        """Wait for every rank's answer to the outstanding plan and give rank 0's.

        Raises:
            RankError: a rank died, raised, diverged, or was silent past its deadline. The group is gone afterwards.
        """
        ...

    def close(self) -> None:
        """End the group and everything it owns. May be called twice."""
