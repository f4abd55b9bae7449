"""Ranks placed by Ray: one actor per rank in a placement group, on one node or several.

A running cluster is used where there is one (``RAY_ADDRESS``, or ``ray start`` on this host); otherwise an embedded one
is started and ended with the engine. Ray places and watches; steps go over our own channels, because an actor
call costs ten times a pipe. Ray is imported here only, and late: Lockstep works without it.
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
"""CPUs asked for per rank: the first share that the cluster can give to every rank."""


RESERVE_SECONDS = 2.0
"""How often to look whether the cluster has changed while it finds no room."""


class RayRank:
    """A rank that lives under a Ray actor. Implements ``ranks.RankHandle``.

    A thread waits for the actor's ``run`` call, whose result is the rank's return code, and then makes
    :meth:`fileno` readable; Ray reports a killed actor within some 10 ms.
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
            # The actor itself is gone: the rank's own code is unknown, and the rank has died with it.
            log.debug("the actor of rank %d ended: %s", self.rank, error)
        finally:
            self._ended.set()
            with contextlib.suppress(OSError):
                self._notify.send(b"x")

    def fileno(self) -> int:
        """Readable once the rank or its actor has ended."""
        return self._readable.fileno()

    def returncode(self) -> int | None:
        """The rank's exit code, negative for a signal; None while it runs or if its actor was lost."""
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal to the rank if it runs on this host; Ray has no way to send one elsewhere."""
        if self._same_host and self.pid is not None and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the actor; the kernel ends the rank with it."""
        import ray
        from ray import exceptions as ray_exceptions

        if not self._ended.is_set():
            with contextlib.suppress(ray_exceptions.RayError):
                ray.kill(self._actor)

    def wait(self, timeout: float) -> bool:
        """Wait for the end of the rank or its actor."""
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Release the notification sockets and the actor."""
        self.kill()
        self._readable.close()
        self._notify.close()


def connect_to_ray(config: EngineConfig) -> bool:
    """Connect to the cluster there is, or start an embedded one. True if this process must end it.

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
        pass  # No cluster on this host and no RAY_ADDRESS: start our own.
    cores = os.cpu_count() or 1
    ray.init(address="local", num_cpus=max(cores, config.tensor_parallel_size), include_dashboard=False, **quiet)
    return True


def ray_node_ip() -> str:
    """The address of this node that the other nodes of the cluster reach."""
    import ray

    return str(ray.util.get_node_ip_address())


def rank_resources(config: EngineConfig, nodes: Sequence[dict[str, float]]) -> dict[str, float]:
    """What one rank reserves: a GPU each on CUDA; on CPU one core, or a smaller share if the cluster has too few.

    Args:
        config: resolved.
        nodes: the resources of every node that is alive.

    Raises:
        ConfigError: the cluster can never hold so many ranks.
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
    """One actor and where it landed."""

    actor: Any
    host: str
    host_id: str


def embedded_raylet() -> psutil.Process | None:
    """The raylet that ``ray.init`` has started as a child of this process; None if there is none that lives."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None


class RayLauncher:
    """One Ray actor per rank in a placement group. Implements ``ranks.Launcher``."""

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
            ConfigError: Ray is not installed, or the cluster can never hold so many ranks.
            EngineError: the placement or a rank did not come up in time.
        """
        deadline = time.monotonic() + timeout
        if self._owns_ray and embedded_raylet() is None:
            self.close()  # Ray itself would notice, and say so in many words, only after 15 seconds.
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
        """Make the placement group, a bundle per rank; gives what is in a bundle.

        A cluster that has just lost a node, perhaps with our last group, learns of it only while we wait: then there
        may never be room for what was asked, but for smaller bundles.
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
        """Reserve a bundle per rank and start its actor; sorted so that the ranks of a host are neighbours."""
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
        # Rank 0 shares the driver's host where any rank does.
        return sorted(placed, key=lambda p: (p.host_id != host_identity(), p.host_id))

    def release(self) -> None:
        """Give the bundles back. An embedded cluster stays for the next start."""
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
        """End Ray if this launcher started it."""
        self.release()
        if self._owns_ray:
            import ray

            ray.shutdown()
            self._owns_ray = False
