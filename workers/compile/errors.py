"""Errors of compilation. The driver decides whether all ranks fall back."""

from __future__ import annotations

from runtime.common.errors import LockstepError


class CompileError(LockstepError):
    """The model cannot be compiled; ``--enforce-eager`` runs it uncompiled."""


class TraceError(CompileError):
    """The model's forward is not one graph for every number of tokens; the message has the file and line."""
