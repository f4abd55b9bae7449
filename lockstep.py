"""Lockstep's public API: what these names promise is kept; everything else may move.

``LLM``, ``AsyncLLM`` and ``RequestOutput`` load what stands behind them on first use, so importing this module costs
little.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from runtime.common.config import EngineConfig
from runtime.common.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineError,
    InputError,
    LockstepError,
    LockstepGuardError,
    ProtocolError,
    QueueFullError,
    RankDiedError,
    RankError,
    RankRaisedError,
    RankTimeoutError,
    RequestError,
    StartupError,
)
from runtime.common.sampling_params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from launch.llm import LLM, AsyncLLM
    from runtime.engine.request import RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "ConfigError",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "InputError",
    "LockstepError",
    "LockstepGuardError",
    "ProtocolError",
    "QueueFullError",
    "RankDiedError",
    "RankError",
    "RankRaisedError",
    "RankTimeoutError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StartupError",
    "StructuredOutputs",
]

_LATE = {"LLM": "launch.llm", "AsyncLLM": "launch.llm", "RequestOutput": "runtime.engine.request"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_LATE[name]), name)
