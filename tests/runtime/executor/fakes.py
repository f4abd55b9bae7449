"""Fake ranks and a fake launcher: the ranks of a worker group without processes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from runtime.common.channel import Channel, ChannelClosedError, channel_pair
from runtime.common.config import EngineConfig
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import (
    ExceptionKind,
    NewRequest,
    RankException,
    SampledToken,
    ScheduledRequest,
    StepPlan,
    StepResult,
    digest,
    pack,
    pack_exception,
    pack_tokens,
    unpack,
)
from runtime.common.sampling_params import SamplingParams
from runtime.executor.launcher import StartedRank

MODEL = ModelConfig("LlamaForCausalLM", 8, 8, 1, 1, 1, 8, 100, 2048)
SAMPLING = SamplingParams(seed=1)
START_UP_ANSWERS: dict[str, Any] = {
    "device": {"device": "fake"},
    "open_rendezvous": "tcp://here:1",
    "group": {"collectives": "none"},
    "weights": {"bytes_read": 0},
    "kv_cache_size": 7,
    "compile": {"compiled_subgraphs": 0, "distinct_subgraphs": 0, "cache_hits": 0, "subgraphs": 0, "mode": "NONE"},
    "use_compiled": [],
    "capture": {"graphs": 0},
    "ready": {"config": "same"},
}
"""The value that a rank answers to each start-up RPC; None to others."""


class FakeRank:
    """A rank without a process: the handle that the supervisor controls, and the rank's end of the channel."""

    def __init__(self, rank: int, host_id: str = "one") -> None:
        self.rank, self.host, self.pid = rank, "here", 1000 + rank
        self.host_id = host_id
        self.code: int | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.driver_end, theirs = channel_pair()
        self.channel = Channel(theirs)
        self._ended, self._end = socket.socketpair()

    # ---- the handle

    def fileno(self) -> int:
        return self._ended.fileno()

    def returncode(self) -> int | None:
        return self.code

    def signal(self, number: int) -> None:
        pass

    def kill(self) -> None:
        self.die(-9)

    def wait(self, timeout: float) -> bool:
        return self.code is not None

    def close(self) -> None:
        self._ended.close()
        self._end.close()

    # ---- the rank's behaviour, chosen by the test

    def start_up(self, answers: Mapping[str, Any]) -> None:
        """Send hello, then answer every start-up RPC in a thread."""
        facts = {"pid": self.pid, "host": self.host, "host_id": self.host_id}
        self.channel.send(pack(["hello", self.rank, facts]))
        self.serve({**START_UP_ANSWERS, **answers}, last="ready")

    def serve(self, answers: Mapping[str, Any], last: str) -> None:
        """Answer RPCs until ``last``, in a thread. A value may be an exception to report, ``...`` for no
        answer, or a function of this rank that returns the value.
        """
        threading.Thread(target=self._serve, args=(answers, last), daemon=True).start()

    def _serve(self, answers: Mapping[str, Any], last: str) -> None:
        method = ""
        with contextlib.suppress(ChannelClosedError):
            while method != last:
                frame = self.channel.recv(timeout=20.0)
                _, number, method, arguments = unpack(frame)
                self.calls.append((method, arguments))
                value = answers.get(method)
                if callable(value):
                    value = value(self)
                if value is ...:
                    return
                if isinstance(value, Exception):
                    raised = RankException(ExceptionKind.INTERNAL, type(value).__name__, str(value), "Traceback")
                    self.channel.send(pack_exception(number, raised))
                else:
                    self.channel.send(pack(["ok", number, digest(frame), value]))

    def read(self) -> tuple[int, str]:
        """The next plan's step id, and its digest."""
        frame = self.channel.recv(timeout=20.0)
        return int(unpack(frame)[1]), digest(frame)

    def answer(self, step: tuple[int, str], size: int = 0) -> None:
        tokens = (SampledToken(self.rank, step[0], error="x" * size),)
        self.channel.send(pack(["ok", *step, pack_tokens(StepResult(step[0], tokens))]))

    def fail(self, step: tuple[int, str], kind: ExceptionKind = ExceptionKind.INTERNAL) -> None:
        raised = RankException(kind, "ValueError", f"in step {step[0]}", "Traceback of it")
        self.channel.send(pack_exception(step[0], raised))

    def die(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.channel.close()
            self._end.send(b"x")


class FakeLauncher:
    """Makes fake ranks.

    Args:
        size: the number of ranks.
        answers: replaces some of :data:`START_UP_ANSWERS`, per rank.
        host_ids: each rank's host identity; default: the same for all.
    """

    name = "fake"

    def __init__(
        self,
        size: int,
        answers: Mapping[int, Mapping[str, Any]] | None = None,
        host_ids: Mapping[int, str] | None = None,
    ) -> None:
        self.size = size
        self.answers = answers or {}
        self.host_ids = host_ids or {}
        self.supports_restart, self.restart_hint = True, ""
        self.groups: list[list[FakeRank]] = []
        self.configs: list[EngineConfig] = []
        self.policies: list[int] = []  # The scheduling policy that processes would inherit.
        self.released = self.closed = 0
        self.broken: Exception | None = None

    @property
    def ranks(self) -> list[FakeRank]:
        return self.groups[-1]

    def start(self, config: EngineConfig, model: object, timeout: float) -> list[StartedRank]:
        self.policies.append(os.sched_getscheduler(0))
        if self.broken is not None:
            raise self.broken
        self.groups.append([FakeRank(rank, self.host_ids.get(rank, "one")) for rank in range(self.size)])
        self.configs.append(config)
        for rank in self.ranks:
            rank.start_up(self.answers.get(rank.rank, {}))
        return [StartedRank(rank, rank.driver_end) for rank in self.ranks]

    def release(self) -> None:
        self.released += 1

    def close(self) -> None:
        self.closed += 1

    def end(self) -> None:
        """End every rank, so that the supervisor's orderly end does not wait for any."""
        for ranks in self.groups:
            for rank in ranks:
                rank.die(0)


def plan(step: int, tokens: int = 1) -> StepPlan:
    new = (NewRequest(step, tuple(range(1000, 1000 + tokens)), 1, SAMPLING),) if tokens > 1 else ()
    return StepPlan(step, (ScheduledRequest(1, 1),), new)
