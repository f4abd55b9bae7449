"""What can go wrong between a model and its compiled model. The driver decides what follows from it."""

from __future__ import annotations

from runtime.common.errors import LockstepError


class CompileError(LockstepError):
    """The model cannot be compiled; ``--enforce-eager`` runs it without."""


class TraceError(CompileError):
    """The model's forward is not one graph for every number of tokens; the message names file and line."""
