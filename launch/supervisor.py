"""Starts, watches, stops one worker group; the same for every launcher.

A launcher makes processes and channels; the supervisor walks them through the named start-up stages, sends the same
plan to every rank and holds the lockstep guard over their answers. A group lives and dies together: the first death,
exception, silence or divergence ends all of it, and the error says which rank and why. It implements
``runtime.executor.Executor``; it knows nothing of requests or tokens.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from launch.run_folder import make_run_folder, remove_traces, run_id
from runtime.channel import Channel, ChannelClosedError, Waitable, wait_readable
from runtime.config import EngineConfig
from runtime.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineError,
    InputError,
    LockstepGuardError,
    RankDiedError,
    RankRaisedError,
    RankTimeoutError,
    RequestError,
    StartupError,
)
from runtime.model_config import ModelConfig
from runtime.protocol import StepPlan, StepResult, digest, pack, pack_plan, unpack, unpack_tokens

log = logging.getLogger("lockstep")

INPUT_ERRORS = {cls.__name__: cls for cls in (InputError, CheckpointError, ConfigError, RequestError)}
"""A rank's errors of these kinds are the user's to mend: no traceback, exit code 2."""

GRACE_SECONDS = 0.25
"""After the first sign of a failure, how long to listen for a better explanation from the other ranks."""

ORDERLY_EXIT_SECONDS = 3.0
"""How long a rank that was told to shut down may take before it is killed."""

REAP_SECONDS = 5.0


class RankHandle(Protocol):
    """A rank's process as the launcher that made it can see and end it."""

    rank: int
    host: str
    pid: int | None

    def fileno(self) -> int:
        """A descriptor that becomes readable once the process has ended."""
        ...

    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs or where it cannot be known."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal where the launcher can."""

    def kill(self) -> None:
        """End the process for certain."""

    def wait(self, timeout: float) -> bool:
        """Wait for its end, at most ``timeout`` seconds; whether it has ended."""
        ...

    def close(self) -> None:
        """Release what the handle holds."""


@dataclass(frozen=True)
class StartedRank:
    """A rank's process and its channel, which may still be silent."""

    handle: RankHandle
    channel: Channel


class Launcher(Protocol):
    """A way to make processes."""

    name: str

    def start(self, config: EngineConfig, model: ModelConfig, timeout: float) -> list[StartedRank]:
        """Start every rank within ``timeout`` seconds and give them in rank order."""
        ...

    def close(self) -> None:
        """Release everything beyond the ranks themselves (they are gone by then)."""


class StartupProgress(Protocol):
    """Who wants to hear how a start goes."""

    def started(self, stage: str) -> None:
        """A stage begins."""

    def advanced(self, stage: str, done: int, total: int) -> None:
        """So much of a stage is done."""

    def finished(self, stage: str, seconds: float, detail: str) -> None:
        """A stage is over."""


class Silence:
    """A StartupProgress nobody listens to."""

    def started(self, stage: str) -> None:
        """Ignored."""

    def advanced(self, stage: str, done: int, total: int) -> None:
        """Ignored."""

    def finished(self, stage: str, seconds: float, detail: str) -> None:
        """Ignored."""


@dataclass
class StartupReport:
    """What a start took and found: seconds per stage, KV blocks per rank, and each rank's loading report."""

    seconds: dict[str, float] = field(default_factory=dict)
    num_kv_blocks: int = 0
    weights: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    compiled_pieces: int = 0
    distinct_pieces: int = 0
    cache_hits: int = 0


@dataclass(frozen=True)
class _Trouble:
    """One sign of a failure, and how well it explains it (lower is better)."""

    order: int
    error: EngineError | InputError


class Supervisor:
    """One worker group from spawn to the last process. Use :meth:`start`, then submit and collect, then close.

    Args:
        launcher: makes the processes.
        config: resolved.
        model: the model's config, handed to every rank.
        progress: told about every start-up stage.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: EngineConfig,
        model: ModelConfig,
        progress: StartupProgress | None = None,
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._model = model
        self._progress: StartupProgress = progress or Silence()
        self._ranks: list[StartedRank] = []
        self._hosts: list[str] = []
        self._outstanding: tuple[int, str] | None = None
        self._next_call = 0
        self._host_ids: list[str] = []
        self._run_dir = ""
        self._failure: EngineError | InputError | None = None
        self._closed = False
        self.report = StartupReport()

    @property
    def rank_pids(self) -> list[int]:
        """Each rank's process, on its own host; empty before the ranks have said hello."""
        return [pid for rank in self._ranks if (pid := rank.handle.pid) is not None]

    # ---- start

    def start(self) -> StartupReport:
        """Walk the group through every start-up stage.

        Raises:
            RankError: a rank failed; the message names stage, rank, host, and carries the rank's traceback.
            InputError: a rank found the input wrong (e.g. a misshaped tensor).
        """
        self._run_dir = make_run_folder()
        self._config = replace(self._config, run_dir=self._run_dir)
        try:
            with self._stage("spawn") as note:
                note(self._spawn())
            with self._stage("device") as note:
                devices = self._call("device", "device")
                note(devices[0]["device"])
            with self._stage("group") as note:
                note(self._meet())
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
        except BaseException:
            self._tear_down(orderly=False)
            raise
        # Ranks are connected and have met: nothing in the folder is needed any more.
        remove_traces(self._run_dir)
        return self.report

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

    def _spawn(self) -> str:
        timeout = self._config.stage_timeout("spawn")
        deadline = time.monotonic() + timeout
        self._ranks = self._launcher.start(self._config, self._model, timeout)
        self._hosts = [rank.handle.host for rank in self._ranks]
        hellos = self._gather("hello", None, deadline, "spawn", "--spawn-timeout")
        self._host_ids = [facts["host_id"] for facts in hellos]
        self._hosts = [facts["host"] for facts in hellos]
        for started, facts in zip(self._ranks, hellos, strict=True):
            started.handle.pid = facts["pid"]
        return f"{len(self._ranks)} over {self._launcher.name}, pids {', '.join(str(h['pid']) for h in hellos)}"

    def _meet(self) -> str:
        """Have the ranks join their group: over a file in the run's folder, or TCP when they are on several hosts."""
        same_host = len({*self._host_ids}) == 1
        if same_host:
            init_method = f"file://{self._run_dir}/group"
        else:
            init_method = self._call("open_rendezvous", "group")[0]
        name = run_id(self._run_dir)
        found = self._call("group", "group", init_method=init_method, same_host=same_host, run_id=name)
        return str(found[0]["collectives"])

    def _compile(self) -> str:
        """Have every rank compile its replica; one rank that cannot makes all of them run the plain model."""
        votes = self._call("compile", "compile")
        failed = self._fall_back(votes, "the model is not compiled, and no graphs are captured")
        self._warn(warning for vote in votes for warning in vote.get("warnings", ()))
        self._warn(w for warnings in self._call("use_compiled", "compile", agreed=not failed) for w in warnings)
        if failed:
            return "fell back to the plain model"
        report = self.report
        report.compiled_pieces = sum(vote["compiled_pieces"] for vote in votes)
        report.distinct_pieces = max(vote["distinct_pieces"] for vote in votes)
        report.cache_hits = sum(vote["cache_hits"] for vote in votes)
        if votes[0]["mode"] == "NONE":
            return "nothing to do"
        return (
            f"{votes[0]['pieces']} pieces, {report.distinct_pieces} distinct; all ranks: {report.compiled_pieces} "
            f"compiled, {report.cache_hits} from the cache"
        )

    def _capture(self) -> str:
        """Have every rank capture its graphs; one rank that cannot makes all of them run without."""
        self._call("warm_up", "capture")
        votes = self._call("capture", "capture")
        if self._fall_back(votes, "no graphs are used"):
            self._call("discard_graphs", "capture")
            return "fell back to no graphs"
        return f"{votes[0]['graphs']} graphs"

    def _fall_back(self, votes: Sequence[dict[str, Any]], consequence: str) -> bool:
        """Whether some rank voted that it failed; says which, and what follows for all of them."""
        failed = [(rank, vote["failure"]) for rank, vote in enumerate(votes) if "failure" in vote]
        for rank, text in failed:
            log.warning("rank %d on %s: %s", rank, self._hosts[rank], text)
        if failed:
            ranks = ", ".join(str(rank) for rank, _ in failed)
            log.warning("all ranks fall back together because of rank(s) %s: %s", ranks, consequence)
        return bool(failed)

    def _warn(self, warnings: Iterable[str]) -> None:
        """Log each warning once, however many ranks gave it."""
        for warning in dict.fromkeys(warnings):
            log.warning("%s", warning)

    def _compare_fingerprints(self, fingerprints: Sequence[dict[str, str]]) -> None:
        """Refuse a group whose ranks are not the same in every field that decides what they will execute."""
        for rank, fingerprint in enumerate(fingerprints):
            for name, expected in fingerprints[0].items():
                if fingerprint.get(name) != expected:
                    raise self._failed(
                        StartupError(
                            f"its {name} is {fingerprint.get(name)}, rank 0 has {expected}: all ranks must run the "
                            "same software on the same configuration",
                            rank=rank,
                            host=self._hosts[rank],
                            stage="ready",
                        )
                    )

    # ---- messages

    def _call(self, verb: str, stage: str, **arguments: Any) -> list[Any]:
        """Call a verb on every rank; one value per rank, in rank order."""
        self._next_call += 1
        frame = pack(["call", self._next_call, verb, arguments])
        deadline = time.monotonic() + self._config.stage_timeout(stage)
        self._broadcast(frame, stage)
        return self._gather(self._next_call, digest(frame), deadline, stage, f"--{stage.replace('_', '-')}-timeout")

    def measure_step(self, repeats: int) -> list[dict[str, float]]:
        """For benchmarks: each rank's seconds of the last step's forward pass, and of its ops, over some repeats."""
        self._check_usable()
        return self._call("measure_step", "ready", repeats=repeats)

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank: packed once, the same bytes down every channel."""
        self._check_usable()
        if self._outstanding is not None:
            raise EngineError(f"step {self._outstanding[0]} was submitted and not collected yet")
        frame = pack_plan(plan)
        self._broadcast(frame, f"step {plan.step_id}")
        self._outstanding = (plan.step_id, digest(frame))

    def collect(self) -> StepResult:
        """Every rank's answer to the outstanding plan, checked; gives rank 0's."""
        self._check_usable()
        if self._outstanding is None:
            raise EngineError("no step was submitted")
        step_id, expected = self._outstanding
        self._outstanding = None
        deadline = time.monotonic() + self._config.step_timeout
        values = self._gather(step_id, expected, deadline, f"step {step_id}", "--step-timeout")
        return unpack_tokens(step_id, values[0])

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise EngineClosedError("this worker group was closed")

    def _broadcast(self, frame: bytes, stage: str) -> None:
        for rank, started in enumerate(self._ranks):
            try:
                started.channel.send(frame)
            except ChannelClosedError:
                raise self._failed(self._death(rank, stage)) from None

    def _gather(self, number: int | str, expected: str | None, deadline: float, stage: str, flag: str) -> list[Any]:
        """One answer from every rank, or the error that explains best why there is none.

        Args:
            number: the call or step id the answers must carry; ``"hello"`` for a rank's first message.
            expected: the digest they must carry, of the bytes that were sent; None accepts any.
            deadline: by ``time.monotonic``.
            stage: for messages.
            flag: the flag that sets this deadline, for messages.
        """
        answers: dict[int, Any] = {}
        troubles: list[_Trouble] = []
        grace_ends = float("inf")
        pending = set(range(len(self._ranks)))
        while pending:
            left = min(deadline, grace_ends) - time.monotonic()
            watched: list[Waitable] = [self._ranks[rank].channel for rank in pending]
            watched += [self._ranks[rank].handle for rank in pending]
            ready = wait_readable(watched, max(0.0, left)) if left > 0 else []
            if not ready:
                break
            for rank in sorted(pending):
                started = self._ranks[rank]
                if started.channel in ready:
                    outcome = self._read(rank, number, expected, stage)
                elif started.handle in ready:
                    outcome = self._death_trouble(rank, stage)
                else:
                    continue
                if isinstance(outcome, _Trouble):
                    troubles.append(outcome)
                    grace_ends = min(grace_ends, time.monotonic() + GRACE_SECONDS)
                    pending.discard(rank)
                elif outcome is not None:
                    answers[rank] = outcome[0]
                    pending.discard(rank)
        if troubles:
            raise self._failed(min(troubles, key=lambda trouble: trouble.order).error)
        if pending:
            raise self._failed(self._silence(sorted(pending), deadline, stage, flag))
        return [answers[rank] for rank in range(len(self._ranks))]

    def _read(self, rank: int, number: int | str, expected: str | None, stage: str) -> _Trouble | tuple[Any] | None:
        """One message of a rank: its answer in a tuple, a trouble, or None for mere progress."""
        try:
            message = unpack(self._ranks[rank].channel.recv(timeout=1.0))
        except ChannelClosedError:
            return self._death_trouble(rank, stage)
        host = self._hosts[rank]
        if message[0] == "progress":
            self._progress.advanced(*message[1:4])
            return None
        if message[0] == "error":
            _, _, kind, text, rank_traceback = message
            if kind in INPUT_ERRORS:
                return _Trouble(0, INPUT_ERRORS[kind](f"rank {rank}: {text}"))
            # A collective that failed says that *another* rank is missing: believe that other rank first.
            order = 4 if kind.startswith("Collective") else 2
            raised = RankRaisedError(
                f"{kind}: {text}", rank=rank, host=host, stage=stage, rank_traceback=rank_traceback
            )
            return _Trouble(order, raised)
        if message[0] == "hello":
            return (message[2],)
        if message[1] != number:
            text = f"it answered for step or call {message[1]} instead of {number}"
            return _Trouble(3, LockstepGuardError(text, rank=rank, host=host, stage=stage))
        if expected is not None and message[2] != expected:
            text = f"it executed a message with digest {message[2]}, sent was {expected}: it received other bytes"
            return _Trouble(3, LockstepGuardError(text, rank=rank, host=host, stage=stage))
        return (message[3],)

    # ---- failure

    def _death_trouble(self, rank: int, stage: str) -> _Trouble:
        death = self._death(rank, stage)
        return _Trouble(1 if death.returncode is not None else 3, death)

    def _death(self, rank: int, stage: str) -> RankDiedError:
        """What is known about a rank whose channel closed or whose process ended."""
        handle = self._ranks[rank].handle
        handle.wait(0.5)  # The channel closes a moment before the process can be reaped.
        code = handle.returncode()
        hint = ""
        if code == -signal.SIGKILL:
            hint = "if nobody sent it, look for the kernel's out-of-memory killer in dmesg"
        return RankDiedError(rank=rank, returncode=code, host=self._hosts[rank], stage=stage, hint=hint)

    def _silence(self, silent: list[int], deadline: float, stage: str, flag: str) -> RankTimeoutError:
        """No answer in time: ask every rank for its stacks, then say who was silent and which flag decides."""
        for started in self._ranks:
            started.handle.signal(signal.SIGUSR1)
        log.error("%s: no answer from rank(s) %s; stacks of all ranks follow", stage, ", ".join(map(str, silent)))
        wait_readable([self._ranks[rank].handle for rank in silent], GRACE_SECONDS)
        others = f" (silent: ranks {', '.join(map(str, silent))})" if len(silent) > 1 else ""
        seconds = self._config.step_timeout if flag == "--step-timeout" else self._config.stage_timeout(stage)
        text = f"no answer within {seconds:g} s, the deadline that {flag} sets{others}"
        return RankTimeoutError(text, rank=silent[0], host=self._hosts[silent[0]], stage=stage)

    def _failed(self, error: EngineError | InputError) -> EngineError | InputError:
        """End the group because of ``error``, which every later call raises too."""
        self._failure = error
        self._tear_down(orderly=False)
        return error

    # ---- end

    def close(self) -> None:
        """End the group and everything it owns: ranks, channels, files, what the launcher holds."""
        self._tear_down(orderly=self._failure is None)

    def _tear_down(self, *, orderly: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if orderly:
            frame = pack(["call", 0, "shutdown", {}])
            for started in self._ranks:
                with contextlib.suppress(ChannelClosedError):
                    started.channel.send(frame)
            deadline = time.monotonic() + ORDERLY_EXIT_SECONDS
            for started in self._ranks:
                started.handle.wait(max(0.0, deadline - time.monotonic()))
        for started in self._ranks:
            started.handle.kill()
        for started in self._ranks:
            if not started.handle.wait(REAP_SECONDS):
                log.error("rank %d does not end, not even by SIGKILL", started.handle.rank)
            started.channel.close()
            started.handle.close()
        self._launcher.close()
        remove_traces(self._run_dir)
