"""TorchrunLauncher: ranks on the processes that torchrun started: ``torchrun --nproc-per-node 2 -m launch.spmd ...``.

Every process runs ``launch/spmd.py``. Process 0 runs the command and is the driver; the others are *agents*. The driver
and each agent start their rank as a child process, so the driver and a rank never share an interpreter, and the exit
code or signal of every rank is known. An agent holds a control channel to the driver, which carries the rank's spec,
signals, and the rank's end. ``torchrun_wrapper.py`` starts these processes for ``lockstep launch``.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import time
from dataclasses import dataclass

from launch.accept import accept_ranks
from launch.environment import torchrun_ranks
from launch.local import spawn_rank
from launch.rank_spec import host_identity, make_rank_specs
from launch.torchrun_rendezvous import DRIVER, open_rendezvous
from runtime.common.channel import Channel, ChannelClosedError, ChannelListener
from runtime.common.config import EngineConfig
from runtime.common.errors import ConfigError, EngineError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import pack, unpack
from runtime.executor.launcher import RankHandle, StartedRank


class AgentRank:
    """A rank under an agent, controlled over a channel. Implements ``runtime.executor.launcher.RankHandle``."""

    def __init__(self, rank: int, host: str, control: Channel) -> None:
        self.rank = rank
        self.host = host
        self.pid: int | None = None
        self._control = control
        self._code: int | None = None
        self._ended = False

    def fileno(self) -> int:
        """Readable once the agent has reported the rank's end, or has ended itself."""
        return self._control.fileno()

    def returncode(self) -> int | None:
        """The rank's exit code, negative for a signal; None while it runs or if its agent ended first."""
        return self._code

    def signal(self, number: int) -> None:
        """Make the agent send a signal to the rank."""
        if not self._ended:
            with contextlib.suppress(ChannelClosedError):
                self._control.send(pack(["signal", number]))

    def kill(self) -> None:
        """Make the agent send SIGKILL to the rank."""
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


@dataclass(frozen=True)
class _Agent:
    """An agent's control channel and its host."""

    control: Channel
    host: str
    host_id: str


class TorchrunLauncher:
    """Rank 0 as a child process, the others under agents. Implements ``runtime.executor.launcher.Launcher``."""

    name = "torchrun"
    supports_restart = False
    restart_hint = (
        "torchrun placed these ranks, so only torchrun can start them again: `torchrun --max-restarts N ...` or "
        "`lockstep launch --max-restarts N -- ...`, which runs the whole command again"
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
        """Wait for the agents, send every rank its spec, and accept a channel from each.

        Raises:
            ConfigError: the number of torchrun's processes differs from the number of ranks.
            EngineError: an agent or a rank missed the deadline.
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
            agents = self._accept_agents(listener, secret, size, deadline)
            return self._start_ranks(config, model, listener, secret, agents, deadline)
        finally:
            listener.close()

    def _accept_agents(self, listener: ChannelListener, secret: bytes, size: int, deadline: float) -> dict[int, _Agent]:
        """Publish the listener's address; returns the agents that connect, by rank."""
        rendezvous = open_rendezvous(self._ranks)
        rendezvous.publish(DRIVER, pack(["driver", listener.address, secret]))
        agents: dict[int, _Agent] = {}
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
            agents[int(rank)] = _Agent(control, str(facts["host"]), str(facts["host_id"]))
        return agents

    def _start_ranks(
        self,
        config: EngineConfig,
        model: ModelConfig,
        listener: ChannelListener,
        secret: bytes,
        agents: dict[int, _Agent],
        deadline: float,
    ) -> list[StartedRank]:
        hosts = [host_identity(), *(agents[rank].host_id for rank in range(1, len(agents) + 1))]
        handles: list[RankHandle] = []
        try:
            for spec in make_rank_specs(config, model, hosts, listener.address, secret):
                if spec.rank == 0:
                    process, pair = spawn_rank(spec)
                    pair.close()
                    handles.append(process)
                else:
                    agent = agents[spec.rank]
                    agent.control.send(spec.pack())
                    handles.append(AgentRank(spec.rank, agent.host, agent.control))
            channels = accept_ranks(listener, handles, deadline)
        except BaseException:
            for handle in handles:
                handle.kill()
                handle.wait(5.0)
                handle.close()
            raise
        return [StartedRank(handle, channels[handle.rank]) for handle in handles]

    def release(self) -> None:
        """Nothing to release: a start holds only its ranks. Agents stay until the command ends."""

    def close(self) -> None:
        """Nothing to release."""
