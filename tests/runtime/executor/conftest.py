"""Fixtures of the executor's tests: a supervisor over fake ranks, and a pipe to wake it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.common.config import EngineConfig
from runtime.executor.supervisor import Supervisor
from tests.runtime.executor.fakes import MODEL, FakeLauncher


@pytest.fixture
def begin() -> Iterator[Callable[..., tuple[Supervisor, FakeLauncher]]]:
    """Starts a supervisor over fake ranks, and closes it after the test."""
    with contextlib.ExitStack() as stack:

        def start(size: int = 2, **settings: Any) -> tuple[Supervisor, FakeLauncher]:
            launcher = FakeLauncher(size)
            supervisor = Supervisor(launcher, EngineConfig(tensor_parallel_size=size, **settings), MODEL)
            supervisor.start()
            stack.callback(supervisor.close)
            stack.callback(launcher.end)
            return supervisor, launcher

        yield start


@pytest.fixture
def bell() -> Iterator[tuple[int, int]]:
    """A pipe: its end to wait for, and its end to ring."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)
