"""RayLauncher: one Ray actor per rank in a placement group, on one node or several.

It connects to a running cluster (``RAY_ADDRESS``, or ``ray start`` on this host) or else starts an embedded one, which
ends with the engine. Ray places and watches the actors. Steps use channels, because an actor call costs ten times as
much as a pipe. Ray is an optional dependency and is imported inside functions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from launch.accept import accept_ranks
from launch.environment import prepare_ray
from launch.rank_spec import host_identity, make_rank_specs
from launch.ray_actor import RankActor
from runtime.common.channel import ChannelListener
from runtime.common.config import EngineConfig
from runtime.common.errors import ConfigError, EngineError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import unpack
from runtime.executor.launcher import StartedRank

log = logging.getLogger("lockstep")

CPU_SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.01)
"""CPUs to reserve per rank, in order of preference: the first share that fits the cluster is used."""


RESERVE_SECONDS = 2.0
"""How often to compare the reservation with the cluster's resources while it is pending."""


class RayRank:
    """A rank under a Ray actor. Implements ``runtime.executor.launcher.RankHandle``.

    A thread waits for the actor's ``run`` call, whose result is the rank's return code, and then makes
    :meth:`fileno` readable. Ray reports a killed actor within about 10 ms.
    """

    def __init__(self, rank: int, host: str, actor: Any, running: Any, *, same_host: bool) -> None:
        self.rank = rank
        self.host = host
        self.pid: int | None = None
        self._actor = actor
        self._same_host = same_host
        self._code: int | None = None
        self._ended = threading.Event()
        self._readable, self._notify = socket.socketpair()
        threading.Thread(target=self._watch, args=(running,), name=f"ray-rank-{rank}", daemon=True).start()

    def _watch(self, running: Any) -> None:
        import ray
        from ray import exceptions as ray_exceptions

        try:
            self._code = int(ray.get(running))
        except ray_exceptions.RayError as error:
            # The actor has ended, and the rank with it; the rank's own code is unknown.
            log.debug("the actor of rank %d ended: %s", self.rank, error)
        finally:
            self._ended.set()
            with contextlib.suppress(OSError):
                self._notify.send(b"x")

    def fileno(self) -> int:
        """Readable once the rank or its actor has ended."""
        return self._readable.fileno()

    def returncode(self) -> int | None:
        """The rank's exit code, negative for a signal; None while it runs or if its actor ended first."""
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal to the rank if it runs on this host; Ray cannot send signals to other hosts."""
        if self._same_host and self.pid is not None and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the actor; the kernel then kills the rank."""
        import ray
        from ray import exceptions as ray_exceptions

        if not self._ended.is_set():
            with contextlib.suppress(ray_exceptions.RayError):
                ray.kill(self._actor)

    def wait(self, timeout: float) -> bool:
        """Wait for the rank or its actor to end."""
        return self._ended.wait(timeout)

    def close(self) -> None:
        """End the actor and close the notification sockets."""
        self.kill()
        self._readable.close()
        self._notify.close()


def connect_to_ray(config: EngineConfig) -> bool:
    """Connect to a running cluster, or start an embedded one; True if this process has to shut it down.

    Raises:
        ConfigError: Ray is not installed.
    """
    prepare_ray()
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray is not installed, and --distributed-executor-backend ray (the default above one rank) needs it; "
            "install lockstep[ray], or use --distributed-executor-backend local"
        ) from None
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": True}
    try:
        ray.init(address="auto", **quiet)
        return False
    except ConnectionError:
        pass  # No cluster on this host and no RAY_ADDRESS.
    cores = os.cpu_count() or 1
    ray.init(address="local", num_cpus=max(cores, config.tensor_parallel_size), include_dashboard=False, **quiet)
    return True


def ray_node_ip() -> str:
    """The address of this node in the cluster's network."""
    import ray

    return str(ray.util.get_node_ip_address())


def rank_resources(config: EngineConfig, nodes: Sequence[dict[str, float]]) -> dict[str, float]:
    """The resources of one rank's bundle: a GPU on CUDA; on CPU one core, or a smaller share on a small cluster.

    Args:
        config: resolved.
        nodes: the resources of every live node.

    Raises:
        ConfigError: the cluster's total resources do not suffice.
    """
    size = config.tensor_parallel_size
    if config.device == "cuda":
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        if gpus < size:
            raise ConfigError(
                f"tensor_parallel_size {size} needs {size} GPUs, the Ray cluster has {gpus}; ask for at most {gpus}"
            )
        return {"GPU": 1.0, "CPU": 1.0}
    for share in CPU_SHARES:
        if sum(int(node.get("CPU", 0) / share + 1e-6) for node in nodes) >= size:
            if share < 1:
                log.warning("%d ranks on a Ray cluster of fewer CPUs: each reserves %g of one", size, share)
            return {"CPU": share}
    raise ConfigError(
        f"tensor_parallel_size {size} is more than this Ray cluster can hold: its nodes offer "
        f"{sum(node.get('CPU', 0) for node in nodes):g} CPUs; add nodes or start them with --num-cpus"
    )


@dataclass(frozen=True)
class _Placed:
    """An actor and its host."""

    actor: Any
    host: str
    host_id: str


def embedded_raylet() -> psutil.Process | None:
    """The live raylet that ``ray.init`` started as a child of this process; None if there is none."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None


class RayLauncher:
    """One Ray actor per rank in a placement group. Implements ``runtime.executor.launcher.Launcher``."""

    name = "ray"
    supports_restart = True
    restart_hint = ""

    def __init__(self) -> None:
        self._owns_ray = False
        self._group: Any = None
        self._listener: ChannelListener | None = None

    def start(self, config: EngineConfig, model: ModelConfig, timeout: float) -> list[StartedRank]:
        """Connect to Ray, place the actors, start the ranks, and accept a channel from each.

        Raises:
            ConfigError: Ray is not installed, or the cluster's total resources do not suffice.
            EngineError: placement or a rank's start missed the deadline.
        """
        deadline = time.monotonic() + timeout
        if self._owns_ray and embedded_raylet() is None:
            self.close()  # Ray itself notices a dead raylet only after 15 seconds.
        self._owns_ray = connect_to_ray(config) or self._owns_ray
        placed = self._place(config, deadline)
        same_host = all(p.host_id == host_identity() for p in placed)
        secret = secrets.token_bytes(32)
        self._listener = ChannelListener(
            f"unix:{config.run_dir}/driver" if same_host else f"tcp:{ray_node_ip()}", secret
        )
        specs = make_rank_specs(config, model, [p.host_id for p in placed], self._listener.address, secret)
        handles: list[RayRank] = []
        for place, spec in zip(placed, specs, strict=True):
            running = place.actor.run.remote(spec.pack())
            local = place.host_id == host_identity()
            handles.append(RayRank(spec.rank, place.host, place.actor, running, same_host=local))
        try:
            channels = accept_ranks(self._listener, handles, deadline)
        except BaseException:
            for handle in handles:
                handle.close()
            raise
        self._listener.close()
        return [StartedRank(handle, channels[handle.rank]) for handle in handles]

    def _reserve(self, config: EngineConfig, deadline: float) -> dict[str, float]:
        """Create the placement group, one bundle per rank; returns a bundle's resources.

        The cluster may notice a lost node only while the group is pending, in which case the bundles may never fit.
        The resources are therefore computed again, and a smaller bundle replaces a larger one.
        """
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        size = config.tensor_parallel_size
        needs: dict[str, float] = {}
        ready: Any = None
        while True:
            now_needed = rank_resources(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
            if now_needed != needs:
                if self._group is not None:
                    remove_placement_group(self._group)
                needs = now_needed
                self._group = placement_group([needs] * size, strategy="PACK")
                ready = self._group.ready()
            left = deadline - time.monotonic()
            if ray.wait([ready], timeout=max(0.1, min(left, RESERVE_SECONDS)))[0]:
                return needs
            if left <= 0:
                raise EngineError(
                    f"Ray did not find room for {size} ranks of {needs} in time (--spawn-timeout); free now: "
                    f"{ray.available_resources()}"
                )

    def _place(self, config: EngineConfig, deadline: float) -> list[_Placed]:
        """Start one actor per bundle; sorted by host, so that consecutive ranks share a host."""
        import ray
        from ray import exceptions as ray_exceptions
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self._reserve(config, deadline)
        size = config.tensor_parallel_size
        actor_class = ray.remote(RankActor)
        actors = []
        for index in range(size):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            options = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0)}
            actors.append(actor_class.options(scheduling_strategy=strategy, max_restarts=0, **options).remote())
        left = max(0.1, deadline - time.monotonic())
        try:
            described = [unpack(d) for d in ray.get([a.describe.remote() for a in actors], timeout=left)]
        except ray_exceptions.GetTimeoutError:
            raise EngineError("Ray placed the ranks, but their actors did not start (--spawn-timeout)") from None
        placed = [_Placed(actor, d[1], d[2]) for actor, d in zip(actors, described, strict=True)]
        # Rank 0 runs on the driver's host if any rank does.
        return sorted(placed, key=lambda p: (p.host_id != host_identity(), p.host_id))

    def release(self) -> None:
        """Remove the placement group. An embedded cluster stays for the next start."""
        if self._listener is not None:
            self._listener.close()
        if self._group is None:
            return
        import ray
        from ray import exceptions as ray_exceptions
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            with contextlib.suppress(ray_exceptions.RayError):
                remove_placement_group(self._group)
        self._group = None

    def close(self) -> None:
        """Shut Ray down if this launcher started it."""
        self.release()
        if self._owns_ray:
            import ray

            ray.shutdown()
            self._owns_ray = False
