"""Startup: the start-up stages of a worker group, each one or several RPCs to every rank with a deadline of its own.

The stages are ``spawn, device, group, weights, kv_cache, compile, capture, ready``. After the last one all ranks have
equal fingerprints, and steps may follow. Failures are handled by ``supervisor.py``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.common.config import EngineConfig
from runtime.common.errors import StartupError
from runtime.common.model_config import ModelConfig
from runtime.executor.launcher import Launcher
from runtime.executor.run_dir import run_id
from runtime.executor.worker_group import Deadline, WorkerGroup

log = logging.getLogger("lockstep")


class StartupProgress(Protocol):
    """Receives the progress of a start."""

    def started(self, stage: str) -> None:
        """A stage has started."""

    def advanced(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of a stage are complete."""

    def finished(self, stage: str, seconds: float, detail: str) -> None:
        """A stage has finished; ``detail`` is a line of text for the user, or ""."""


class NullProgress:
    """A StartupProgress that ignores everything."""

    def started(self, stage: str) -> None:
        """Ignored."""

    def advanced(self, stage: str, done: int, total: int) -> None:
        """Ignored."""

    def finished(self, stage: str, seconds: float, detail: str) -> None:
        """Ignored."""


@dataclass
class StartupReport:
    """Measurements of a start: seconds per stage, KV blocks per rank, each rank's loading report, compile counts."""

    seconds: dict[str, float] = field(default_factory=dict)
    num_kv_blocks: int = 0
    weights: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    compiled_subgraphs: int = 0
    distinct_subgraphs: int = 0
    cache_hits: int = 0


class Startup:
    """One start of a worker group.

    Args:
        launcher: makes the processes.
        config: resolved, with the ``run_dir`` of this start.
        model: the model's config, sent to every rank.
        progress: receives every stage.

    Attributes:
        group: set in the spawn stage; the caller ends it if a later stage fails.
        report: measurements of this start.
    """

    def __init__(self, launcher: Launcher, config: EngineConfig, model: ModelConfig, progress: StartupProgress) -> None:
        self._launcher = launcher
        self._config = config
        self._model = model
        self._progress = progress
        self._host_ids: list[str] = []
        self.group: WorkerGroup | None = None
        self.report = StartupReport()

    def run(self) -> WorkerGroup:
        """Run every stage; returns a group that is ready for steps.

        Raises:
            RankError: a rank failed; the message names stage, rank, host, and includes the rank's traceback.
            InputError: a rank refuses the user's input (e.g. a tensor of the wrong shape).
        """
        with self._stage("spawn") as note:
            note(self._spawn())
        with self._stage("device") as note:
            devices = self._call("device", "device")
            note(devices[0]["device"])
        with self._stage("group") as note:
            note(self._rendezvous())
        with self._stage("weights") as note:
            self.report.weights = self._call("weights", "weights")
            note(f"{sum(w['bytes_read'] for w in self.report.weights) / 1e6:.0f} MB read by all ranks")
        with self._stage("kv_cache") as note:
            self.report.num_kv_blocks = min(self._call("kv_cache_size", "kv_cache"))
            self._call("kv_cache", "kv_cache", num_blocks=self.report.num_kv_blocks)
            note(f"{self.report.num_kv_blocks} blocks of {self._config.block_size} tokens")
        with self._stage("compile") as note:
            note(self._compile())
        with self._stage("capture") as note:
            note(self._capture())
        with self._stage("ready"):
            self._compare_fingerprints(self._call("ready", "ready"))
        return self._ranks

    @contextlib.contextmanager
    def _stage(self, name: str) -> Generator[Callable[[str], None]]:
        detail = ""

        def note(text: str) -> None:
            nonlocal detail
            detail = text

        self._progress.started(name)
        begun = time.monotonic()
        yield note
        seconds = time.monotonic() - begun
        self.report.seconds[name] = seconds
        self._progress.finished(name, seconds, detail)

    @property
    def _ranks(self) -> WorkerGroup:
        assert self.group is not None, "the spawn stage runs first"
        return self.group

    def _call(self, method: str, stage: str, **arguments: Any) -> list[Any]:
        """Call an RPC method on every rank; one value per rank, in rank order."""
        return self._ranks.call(method, stage_deadline(self._config, stage), **arguments)

    def _spawn(self) -> str:
        begun, deadline = time.monotonic(), stage_deadline(self._config, "spawn")
        started = self._launcher.start(self._config, self._model, deadline.seconds)
        self.group = WorkerGroup(started, deadline, begun, self._progress.advanced)
        hellos = self.group.gather()
        self.group.hosts = [facts["host"] for facts in hellos]
        self._host_ids = [facts["host_id"] for facts in hellos]
        for rank, facts in zip(started, hellos, strict=True):
            rank.handle.pid = facts["pid"]
        return f"{len(started)} over {self._launcher.name}, pids {', '.join(str(h['pid']) for h in hellos)}"

    def _rendezvous(self) -> str:
        """Initialize the process group: over a file in the run directory on one host, over TCP on several."""
        same_host = len({*self._host_ids}) == 1
        if same_host:
            init_method = f"file://{self._config.run_dir}/group"
        else:
            init_method = self._call("open_rendezvous", "group")[0]
        name = run_id(self._config.run_dir)
        found = self._call("group", "group", init_method=init_method, same_host=same_host, run_id=name)
        return str(found[0]["collectives"])

    def _compile(self) -> str:
        """Compile on every rank. If one rank fails, all ranks run the uncompiled model."""
        votes = self._call("compile", "compile")
        failed = self._fall_back(votes, "the model is not compiled, and no graphs are captured")
        self._warn(warning for vote in votes for warning in vote.get("warnings", ()))
        self._warn(w for warnings in self._call("use_compiled", "compile", agreed=not failed) for w in warnings)
        if failed:
            return "fell back to the plain model"
        report = self.report
        report.compiled_subgraphs = sum(vote["compiled_subgraphs"] for vote in votes)
        report.distinct_subgraphs = max(vote["distinct_subgraphs"] for vote in votes)
        report.cache_hits = sum(vote["cache_hits"] for vote in votes)
        if votes[0]["mode"] == "NONE":
            return "nothing to do"
        return (
            f"{votes[0]['subgraphs']} subgraphs, {report.distinct_subgraphs} distinct; all ranks: "
            f"{report.compiled_subgraphs} compiled, {report.cache_hits} from the cache"
        )

    def _capture(self) -> str:
        """Capture graphs on every rank. If one rank fails, all ranks run without graphs."""
        self._call("warm_up", "capture")
        votes = self._call("capture", "capture")
        if self._fall_back(votes, "no graphs are used"):
            self._call("discard_graphs", "capture")
            return "fell back to no graphs"
        return f"{votes[0]['graphs']} graphs"

    def _fall_back(self, votes: Sequence[dict[str, Any]], consequence: str) -> bool:
        """Whether a rank voted that it failed; if so, log the failures and the consequence for all ranks."""
        failed = [(rank, vote["failure"]) for rank, vote in enumerate(votes) if "failure" in vote]
        for rank, text in failed:
            log.warning("rank %d on %s: %s", rank, self._ranks.hosts[rank], text)
        if failed:
            ranks = ", ".join(str(rank) for rank, _ in failed)
            log.warning("all ranks fall back together because of rank(s) %s: %s", ranks, consequence)
        return bool(failed)

    def _warn(self, warnings: Iterable[str]) -> None:
        """Log each warning once, regardless of the number of ranks that sent it."""
        for warning in dict.fromkeys(warnings):
            log.warning("%s", warning)

    def _compare_fingerprints(self, fingerprints: Sequence[dict[str, str]]) -> None:
        """Refuse a group whose ranks differ in a field that influences what they execute."""
        for rank, fingerprint in enumerate(fingerprints):
            for name, expected in fingerprints[0].items():
                if fingerprint.get(name) != expected:
                    raise StartupError(
                        f"its {name} is {fingerprint.get(name)}, rank 0 has {expected}: all ranks must run the same "
                        "software on the same configuration",
                        rank=rank,
                        host=self._ranks.hosts[rank],
                        stage="ready",
                    )


def stage_deadline(config: EngineConfig, stage: str) -> Deadline:
    """The deadline of a start-up stage."""
    return Deadline(stage, config.stage_timeout(stage), f"--{stage.replace('_', '-')}-timeout")
