"""Ranks whose places were made by torchrun: ``torchrun --nproc-per-node 2 -m launch.spmd generate MODEL ...``.

Every process torchrun starts runs ``launch/spmd.py``. Process 0 carries out the command and is the driver; the others
are *agents*. The driver and each agent start their rank as a child, so the driver's work and a rank's never share an
interpreter, and a rank's exit code or signal is known. An agent holds a control channel to the driver: its spec comes
down, the child's end goes up, and the end of the channel ends the child. ``torchrun_wrapper.py`` starts
these processes for ``lockstep launch``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from launch.accept import accept_ranks
from launch.environment import TorchrunRanks, torchrun_ranks
from launch.local import spawn_rank
from launch.rank_spec import RankSpec, host_identity, make_rank_specs
from runtime.common.channel import Channel, ChannelClosedError, ChannelListener, connect, wait_readable
from runtime.common.config import EngineConfig
from runtime.common.errors import ConfigError, EngineError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import pack, unpack
from runtime.executor.launcher import RankHandle, StartedRank
from runtime.executor.run_dir import PREFIX

POLL_SECONDS = 0.02
GOODBYE_SECONDS = 5.0
"""How long the driver waits at its end for agents that may only just have started."""

DRIVER = "driver"
"""The key under which the driver publishes where the agents of its next engine connect, or that there is none."""

EXIT = b"exit"


class Rendezvous(Protocol):
    """Where the driver leaves its address for the agents, and the agents their goodbye: a few small values."""

    def publish(self, key: str, value: bytes) -> None:
        """Make ``value`` visible to every process under ``key``."""

    def wait(self, key: str, timeout: float, other_than: bytes = b"") -> bytes:
        """The value of ``key`` as soon as there is one, other than a value seen before. Raises TimeoutError."""
        ...

    def remove(self) -> None:
        """Leave nothing behind."""


class FileRendezvous:
    """On one host: files in a private folder named after the torchrun process, the parent of all of us."""

    def __init__(self, ranks: TorchrunRanks) -> None:
        # Named like a run folder of torchrun's pid, so that the next start sweeps it if torchrun was killed.
        name = f"{PREFIX}{os.getppid()}-torchrun-{ranks.master_port}-{ranks.restart_count}"
        self._folder = Path(tempfile.gettempdir()) / name
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise EngineError(f"{self._folder} belongs to another user; remove it or set TMPDIR")

    def publish(self, key: str, value: bytes) -> None:
        """Write the file beside its place, then rename it there: readers never see half of it."""
        partial = self._folder / f".{key}"
        partial.write_bytes(value)
        partial.rename(self._folder / key)

    def wait(self, key: str, timeout: float, other_than: bytes = b"") -> bytes:
        """Poll for the file; only start-up waits here, never a step."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                value = (self._folder / key).read_bytes()
                if value != other_than:
                    return value
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"{key!r} did not appear in {self._folder} within {timeout:.0f} s")

    def remove(self) -> None:
        """Delete the folder; the driver does, after the agents said goodbye."""
        shutil.rmtree(self._folder, ignore_errors=True)


class StoreRendezvous:
    """Over several hosts: the TCP store whose address torchrun gives every process."""

    def __init__(self, ranks: TorchrunRanks) -> None:
        import torch.distributed as dist  # A heavy import, for several hosts only.

        is_master = ranks.rank == 0 and not ranks.agent_store
        stores: Any = dist
        store = stores.TCPStore(ranks.master_addr, ranks.master_port, is_master=is_master)
        self._store = stores.PrefixStore(f"lockstep/{ranks.restart_count}", store)

    def publish(self, key: str, value: bytes) -> None:
        """Set the key."""
        self._store.set(key, value)

    def wait(self, key: str, timeout: float, other_than: bytes = b"") -> bytes:
        """Poll the store, as for files: a key that is overwritten cannot be waited for in another way."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._store.check([key]):
                value = bytes(self._store.get(key))
                if value != other_than:
                    return value
            time.sleep(10 * POLL_SECONDS)
        raise TimeoutError(f"{key!r} did not appear in torchrun's store within {timeout:.0f} s")

    def remove(self) -> None:
        """The store ends with torchrun."""


def open_rendezvous(ranks: TorchrunRanks) -> FileRendezvous | StoreRendezvous:
    """The rendezvous that fits how torchrun placed its processes."""
    return FileRendezvous(ranks) if ranks.one_host else StoreRendezvous(ranks)


# ---- the driver's side


class AgentRank:
    """A rank under an agent, seen through the agent's control channel. Implements ``ranks.RankHandle``."""

    def __init__(self, rank: int, host: str, control: Channel) -> None:
        self.rank = rank
        self.host = host
        self.pid: int | None = None
        self._control = control
        self._code: int | None = None
        self._ended = False

    def fileno(self) -> int:
        """Readable once the agent reported the rank's end, or ended itself."""
        return self._control.fileno()

    def returncode(self) -> int | None:
        """The rank's exit code, negative for a signal; None while it runs or if its agent was lost."""
        return self._code

    def signal(self, number: int) -> None:
        """Have the agent send a signal to the rank."""
        if not self._ended:
            with contextlib.suppress(ChannelClosedError):
                self._control.send(pack(["signal", number]))

    def kill(self) -> None:
        """Have the agent end the rank."""
        self.signal(signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Wait for the agent's report."""
        if not self._ended:
            try:
                self._code = int(unpack(self._control.recv(timeout))[1])
                self._ended = True
            except TimeoutError:
                return False
            except ChannelClosedError:
                self._ended = True
        return True

    def close(self) -> None:
        """Close the control channel; the agent then waits for the next engine."""
        self._control.close()


class TorchrunLauncher:
    """Starts rank 0 as our child and the others through their agents. Implements ``ranks.Launcher``."""

    name = "torchrun"
    supports_restart = False
    restart_hint = (
        "torchrun placed these ranks, so it is torchrun that can start them again: `torchrun --max-restarts N ...` or "
        "`lockstep launch --max-restarts N -- ...`, which runs the whole command anew"
    )

    def __init__(self) -> None:
        found = torchrun_ranks()
        if found is None:
            raise ConfigError(
                "--distributed-executor-backend torchrun needs torchrun's variables; start with "
                "`torchrun --nproc-per-node N -m launch.spmd ...` or `lockstep launch ...`"
            )
        self._ranks = found

    def start(self, config: EngineConfig, model: ModelConfig, timeout: float) -> list[StartedRank]:
        """Meet the agents, give every rank its spec, and accept a channel from each.

        Raises:
            ConfigError: torchrun started another number of processes than there are to be ranks.
            EngineError: an agent or a rank did not come up in time.
        """
        size = config.tensor_parallel_size
        if size != self._ranks.world_size:
            raise ConfigError(
                f"tensor_parallel_size is {size}, torchrun started {self._ranks.world_size} processes; make them equal"
            )
        deadline = time.monotonic() + timeout
        secret = secrets.token_bytes(32)
        address = (
            f"unix:{config.run_dir}/driver"
            if self._ranks.one_host
            else f"tcp:{socket.gethostbyname(socket.gethostname())}"
        )
        listener = ChannelListener(address, secret)
        try:
            agents = self._meet_agents(listener, secret, size, deadline)
            return self._start_ranks(config, model, listener, secret, agents, deadline)
        finally:
            listener.close()

    def _meet_agents(
        self, listener: ChannelListener, secret: bytes, size: int, deadline: float
    ) -> dict[int, tuple[Channel, dict[str, Any]]]:
        """Publish where we listen, and wait for each agent's control channel and description."""
        rendezvous = open_rendezvous(self._ranks)
        rendezvous.publish(DRIVER, pack(["driver", listener.address, secret]))
        agents: dict[int, tuple[Channel, dict[str, Any]]] = {}
        while len(agents) < size - 1:
            missing = sorted(set(range(1, size)) - set(agents))
            try:
                control = listener.accept(deadline - time.monotonic())
                _, rank, facts = unpack(control.recv(timeout=5.0))
            except (TimeoutError, ChannelClosedError):
                raise EngineError(
                    f"torchrun processes {missing} did not report in time (--spawn-timeout); were they all started "
                    "with `-m launch.spmd` and the same arguments?"
                ) from None
            agents[int(rank)] = (control, facts)
        return agents

    def _start_ranks(
        self,
        config: EngineConfig,
        model: ModelConfig,
        listener: ChannelListener,
        secret: bytes,
        agents: dict[int, tuple[Channel, dict[str, Any]]],
        deadline: float,
    ) -> list[StartedRank]:
        places = [host_identity(), *(agents[rank][1]["host_id"] for rank in range(1, len(agents) + 1))]
        handles: list[RankHandle] = []
        try:
            for spec in make_rank_specs(config, model, places, listener.address, secret):
                if spec.rank == 0:
                    process, pair = spawn_rank(spec)
                    pair.close()
                    handles.append(process)
                else:
                    control, facts = agents[spec.rank]
                    control.send(spec.pack())
                    handles.append(AgentRank(spec.rank, str(facts["host"]), control))
            channels = accept_ranks(listener, handles, deadline)
        except BaseException:
            for handle in handles:
                handle.kill()
                handle.wait(5.0)
                handle.close()
            raise
        return [StartedRank(handle, channels[handle.rank]) for handle in handles]

    def release(self) -> None:
        """Nothing beyond the ranks: agents stay until the command ends."""

    def close(self) -> None:
        """Nothing here either."""


# ---- an agent's side


class DeferredSigterm:
    """SIGTERM for an agent: it ends the process, but not as long as a driver uses its rank.

    On one host torchrun sends it to all of its processes at once: the driver, too, which may have requests to finish.

    Args:
        leave: called before the process ends.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._needed = False
        self._told = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    @contextlib.contextmanager
    def while_needed(self) -> Generator[None]:
        """Until the block ends, SIGTERM has to wait."""
        self._needed = True
        try:
            yield
        finally:
            self._needed = False
            if self._told:
                self._end()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._told = True
        if not self._needed:
            self._end()

    def _end(self) -> NoReturn:
        self._leave()
        sys.exit(128 + signal.SIGTERM)


def serve_as_agent(ranks: TorchrunRanks, rendezvous: Rendezvous) -> int:
    """Run ranks for the driver, one engine after another, until it says that there will be no more."""

    def leave() -> None:
        with contextlib.suppress(OSError):  # The driver was done before, and has removed the folder.
            rendezvous.publish(f"bye-{ranks.rank}", b"1")

    wait = DeferredSigterm(leave).while_needed if ranks.one_host else contextlib.nullcontext
    seen = b""
    while True:
        seen = rendezvous.wait(DRIVER, timeout=7 * 86400.0, other_than=seen)
        if seen == EXIT:
            leave()
            return 0
        _, address, secret = unpack(seen)
        try:
            control = connect(address, secret, timeout=30.0)
        except ConnectionError:
            continue  # That engine was given up already; the next value tells how it goes on.
        facts = {"host": socket.gethostname(), "host_id": host_identity()}
        with wait():
            with contextlib.suppress(ChannelClosedError):
                control.send(pack(["agent", ranks.rank, facts]))
                run_rank_spec(control)
            control.close()


def run_rank_spec(control: Channel) -> None:
    """Start the rank of the spec that the driver sends, pass signals on to it, and report its end.

    Raises:
        ChannelClosedError: the driver closed the control channel; the rank, if there was one, is dead by then.
    """
    process, pair = spawn_rank(RankSpec.unpack(control.recv()))
    pair.close()
    try:
        while process.returncode() is None:
            if control in wait_readable([control, process], None):
                _, number = unpack(control.recv())
                process.signal(int(number))
        control.send(pack(["ended", process.returncode()]))
        control.recv()  # Wait for the driver to close its end.
    finally:
        process.kill()
        process.wait(None)
        process.close()
