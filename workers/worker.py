"""The worker of one rank: its RPC methods in their order, and the loop that receives and answers messages.

Each message gets one answer. The driver calls each start-up method once, in the order ``device, (open_rendezvous,)
group, weights, kv_cache_size, kv_cache, compile, use_compiled, warm_up, capture, (discard_graphs,) ready``; then it
sends steps, until it closes the channel or calls ``shutdown``. ``launch/rank_main.py`` sets up process and
environment, ``runner.py`` runs the model.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import socket
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from parallel.collectives import shared_memory
from parallel.collectives.base import CollectiveError
from parallel.group import TensorParallelGroup, init_group, single_rank_group
from parallel.group_spec import GroupSpec
from parallel.platform import detect_platform
from parallel.toolchain import build_ahead
from runtime.common.channel import Channel, ChannelClosedError
from runtime.common.config import EngineConfig
from runtime.common.errors import InputError, ProtocolError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import (
    ExceptionKind,
    RankException,
    digest,
    pack,
    pack_exception,
    pack_tokens,
    unpack,
    unpack_plan,
)
from workers.attention import cpu_paged as native_attention
from workers.attention.registry import backend_name
from workers.compile.levels import CompileSettings
from workers.kernels import elementwise as native_ops
from workers.kernels.bindings import POOL
from workers.quantization import cpu_linear
from workers.runner import ModelRunner
from workers.sampling import native_sampling

if TYPE_CHECKING:
    from workers.compile.compiler import CompileReport

log = logging.getLogger("lockstep")

CompileResult = tuple[Any, "CompileReport", CompileSettings]
"""The result of ``ModelRunner.compile``."""


@dataclass(frozen=True)
class RankInfo:
    """Rank numbers and resources of one worker.

    Attributes:
        rank: 0 to size - 1.
        size: tensor-parallel size.
        local_rank: index among the ranks of this host; selects the GPU.
        ranks_on_host: number of ranks on this host.
        threads: number of CPU threads for computing.
    """

    rank: int
    size: int
    local_rank: int
    ranks_on_host: int
    threads: int


class Worker:
    """The worker of one rank: executes RPC methods and steps from its channel.

    Args:
        info: rank numbers and resources.
        config: the resolved engine config.
        model_config: of the checkpoint.
        channel: to the driver.
    """

    def __init__(self, info: RankInfo, config: EngineConfig, model_config: ModelConfig, channel: Channel) -> None:
        self.info = info
        self.config = config
        self.model_config = model_config
        self._channel = channel
        self._receive: Callable[[], bytes] = channel.recv
        self._make_runner: Callable[..., ModelRunner] = ModelRunner
        if config.fault:
            from workers import faults  # Late: only tests inject faults.

            fault = faults.parse_fault(config.fault)
            if fault.rank == info.rank:
                self._receive = faults.corrupt_plans(channel.recv, fault)
                self._make_runner = partial(faults.FaultyRunner, fault)
        self._library_dir = os.path.join(config.cache_dir, "native")
        self._group: TensorParallelGroup | None = None
        self._device = torch.device("cpu")
        self._runner: ModelRunner
        self._compiled: CompileResult | None = None
        self._subgraphs = 0
        self._methods: dict[str, Callable[..., Any]] = {
            "device": self.init_device,
            "open_rendezvous": self.open_rendezvous,
            "group": self.join_group,
            "weights": self.load_weights,
            "kv_cache_size": self.size_kv_cache,
            "kv_cache": self.allocate_kv_cache,
            "compile": self.compile,
            "use_compiled": self.use_compiled,
            "warm_up": self.warm_up,
            "capture": self.capture,
            "discard_graphs": self.discard_graphs,
            "ready": self.fingerprint,
            "measure_step": self.measure_step,
        }

    def serve(self) -> None:
        """Receive and answer messages until ``shutdown`` or the end of the channel. Blocks while idle."""
        try:
            while self._answer(self._receive()):
                pass
        except ChannelClosedError:
            log.debug("rank %d: the driver closed the channel", self.info.rank)
        finally:
            if self._group is not None:
                self._group.close()

    def _answer(self, frame: bytes) -> bool:
        """Execute one message and send its answer; False after ``shutdown``."""
        number: Any = -1
        try:
            message = unpack(frame)
            number = message[1] if len(message) > 1 else -1
            if message[0] == "step":
                value = pack_tokens(self._runner.execute(unpack_plan(message)))
            elif message[0] == "call" and len(message) == 4:
                if message[2] == "shutdown":
                    self._channel.send(pack(["ok", number, "", None]))
                    return False
                value = self._call(message[2], message[3])
            else:
                raise ProtocolError(f"unknown message {message[0]!r}")
            answer = pack(["ok", number, digest(frame), value])
        except Exception as error:  # Every exception is an answer; the driver decides what follows.
            log.debug("%s failed", number, exc_info=True)
            answer = pack_exception(number, rank_exception(error))
        self._channel.send(answer)
        return True

    def _call(self, method: str, arguments: dict[str, Any]) -> Any:
        if method not in self._methods:
            raise ProtocolError(f"unknown method {method!r}; known: {', '.join(self._methods)}, shutdown")
        return self._methods[method](**arguments)

    # ---- RPC methods, in the order in which they are called

    def init_device(self) -> dict[str, Any]:
        """Select this rank's device and load the CPU kernels; returns the device's description for the log."""
        found = detect_platform()
        if found.device_type != self.config.device:
            raise RuntimeError(f"rank {self.info.rank} was to use {self.config.device}, found {found.device_type} here")
        if self.config.device == "cuda":
            self._device = torch.device("cuda", self.info.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
            return {"device": torch.cuda.get_device_name(self._device)}
        torch.set_num_threads(self.info.threads)
        kernels = (cpu_linear, native_attention, native_ops, native_sampling)
        exchange = [shared_memory.SOURCE] if self.info.size > 1 else []
        build_ahead((POOL, *exchange, *(module.SOURCE for module in kernels)), self._library_dir)
        # Before the model is built and traced: both depend on which kernels are available.
        for module in kernels:
            module.use_native(self._library_dir)
        return {"device": f"cpu, {self.info.threads} thread{'s' if self.info.threads != 1 else ''}"}

    def open_rendezvous(self) -> str:
        """Rendezvous address for ranks on several hosts: a free TCP port of this host. The driver uses rank 0's."""
        with socket.create_server((host_address(), 0)) as probe:
            return f"tcp://{probe.getsockname()[0]}:{probe.getsockname()[1]}"

    def join_group(self, init_method: str, same_host: bool, run_id: str) -> dict[str, Any]:
        """Join the tensor-parallel group. A collective call: every rank at the same time."""
        if self.info.size == 1:
            self._group = single_rank_group(self._device)
        else:
            spec = GroupSpec(
                name="tp",
                rank=self.info.rank,
                size=self.info.size,
                init_method=init_method,
                backend=self.config.collectives,
                same_host=same_host,
                run_id=run_id,
                timeout=self.config.collective_timeout,
                library_dir=self._library_dir,
            )
            self._group = init_group(spec, self._device)
        self._runner = self._make_runner(
            self.config, self.model_config, self._group, ranks_on_host=self.info.ranks_on_host
        )
        return {"collectives": self._group.backend}

    def load_weights(self) -> dict[str, Any]:
        """Build the model and load this rank's shard; returns a :class:`LoadReport`'s fields and ``peak_rss``."""
        loaded = self._runner.load_model(self._reporter("weights"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return asdict(loaded) | {"peak_rss": peak}

    def _reporter(self, stage: str) -> Callable[[int, int], None] | None:
        """A callback that reports progress of a stage to the driver, at most 100 times; None on ranks other than 0."""
        if self.info.rank != 0:
            return None
        last = -1

        def report(done: int, total: int) -> None:
            nonlocal last
            percent = done * 100 // max(total, 1)
            if percent != last:
                last = percent
                self._channel.send(pack(["progress", stage, done, total]))

        return report

    def size_kv_cache(self) -> int:
        """Number of KV blocks that this rank has memory for; the driver takes the minimum over ranks."""
        return self._runner.affordable_kv_blocks()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate a KV cache of ``num_blocks`` blocks, the static buffers and the sampler."""
        self._runner.allocate(num_blocks)

    def compile(self) -> dict[str, Any]:
        """Compile the model. Steps use the result after :meth:`use_compiled` only, once every rank has reported.

        Returns:
            statistics of the compilation, or ``{"failure": text}`` if it failed on this rank.

        Raises:
            TraceError: the model's code cannot be traced, which is the same on every rank.
        """
        from workers.compile.errors import TraceError

        try:
            self._compiled = self._runner.compile(self._reporter("compile"))
        except TraceError:
            raise
        except Exception as error:
            log.debug("compiling failed", exc_info=True)
            return {"failure": f"{type(error).__name__}: {error}"}
        _, report, settings = self._compiled
        return {
            "compiled_subgraphs": report.compiled_subgraphs,
            "distinct_subgraphs": report.distinct_subgraphs,
            "cache_hits": report.cache_hits,
            "plan_from_cache": report.plan_from_cache,
            "subgraphs": report.subgraphs,
            "mode": settings.mode.value,
            "warnings": [*settings.warnings, *report.warnings],
        }

    def use_compiled(self, agreed: bool) -> list[str]:
        """Run steps with the compiled model if ``agreed``, else with the plain one; returns warnings."""
        if agreed and self._compiled is not None:
            forward, report, settings = self._compiled
            self._subgraphs = report.subgraphs
            warning = self._runner.use(forward, settings)
        else:
            warning = ""
        self._compiled = None
        return [warning] if warning else []

    def warm_up(self) -> None:
        """Prepare graph capture. A collective call: every rank at the same time."""
        self._runner.warm_up(self._reporter("capture"))

    def capture(self) -> dict[str, Any]:
        """Capture graphs; returns their number, or ``{"failure": text}``. Not a collective call."""
        try:
            return {"graphs": self._runner.capture(self._reporter("capture"))}
        except Exception as error:
            log.debug("capturing failed", exc_info=True)
            return {"failure": f"{type(error).__name__}: {error}"}

    def discard_graphs(self) -> None:
        """Discard the graphs and run every step without: capture has failed on some rank."""
        self._runner.graphs.discard()

    def measure_step(self, repeats: int) -> dict[str, float]:
        """For ``bench latency``: seconds of a decode step's forward pass, and of its ops. A collective call."""
        from workers.step_probe import measure_decode_step  # Late: only a benchmark needs it.

        return measure_decode_step(self._runner, repeats)

    def fingerprint(self) -> dict[str, str]:
        """Values that must be equal on every rank before the first step; the driver compares them by field."""
        return {
            "config": hash_of(replace(self.config, run_dir="").to_dict()),
            "model": hash_of(self.model_config.to_dict()),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": self._device.type,
            "attention_backend": backend_name(self._runner.model.attention_backend),
            "kv_blocks": str(next(iter(self._runner.kv_caches.values())).shape[0]),
            "subgraphs": str(self._subgraphs),
            "graph_mode": self._runner.graph_mode.value,
            **self._runner.graphs.describe(),
        }


def rank_exception(error: Exception) -> RankException:
    """The exception as it is sent to the driver; called while it is handled."""
    kind = ExceptionKind.INTERNAL
    if isinstance(error, InputError):
        kind = ExceptionKind.INPUT
    elif isinstance(error, CollectiveError):
        kind = ExceptionKind.COLLECTIVE
    known = kind is not ExceptionKind.INTERNAL
    fields = {name: value for name, value in vars(error).items() if known and not name.startswith("_")}
    return RankException(kind, type(error).__name__, str(error), traceback.format_exc(), fields)


def host_address() -> str:
    """This host's address for other hosts: that of the interface with the default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: connecting a datagram socket sends no packet.
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])


def hash_of(fields: dict[str, Any]) -> str:
    """A short hash of the fields of a config."""
    return digest(pack(fields))
