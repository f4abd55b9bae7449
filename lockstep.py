"""Lockstep's public API; names outside of ``__all__`` may change without notice.

``LLM``, ``AsyncLLM`` and ``RequestOutput`` are imported on first use, so importing this module is cheap.
"""

from __future__ import annotations

import importlib
import importlib.metadata
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

__version__ = importlib.metadata.version("lockstep")

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
    "__version__",
]

_LAZY = {"LLM": "launch.llm", "AsyncLLM": "launch.llm", "RequestOutput": "runtime.engine.request"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return _public(name, getattr(importlib.import_module(_LAZY[name]), name))


def _public(name: str, value: Any) -> Any:
    """Make a class say ``lockstep.NAME`` in tracebacks, ``help()`` and pickles, and keep it as an attribute here."""
    if isinstance(value, type):
        value.__module__ = __name__
    globals()[name] = value
    return value


for _value in [globals()[_name] for _name in __all__ if _name not in _LAZY]:
    if isinstance(_value, type):
        _public(_value.__name__, _value)
