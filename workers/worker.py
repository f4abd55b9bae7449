"""The verbs a driver may call on a rank, in their order, and the loop that answers them.

A rank does what the driver says and nothing else: one message, one answer. Start-up verbs come once each, in the
order ``device, (open_rendezvous,) group, weights, kv_cache_size, kv_cache, compile, use_compiled, warm_up, capture,
(discard_graphs,) ready``; then steps; then the channel closes or ``shutdown`` comes. Processes and environment are
``launch/rank_main.py``'s, the model is ``runner.py``'s.
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
    StepPlan,
    StepResult,
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
from workers.faults import FaultInjector, parse_fault
from workers.kernels import elementwise as native_ops
from workers.kernels.bindings import POOL
from workers.quantization import cpu_linear
from workers.runner import ModelRunner
from workers.sampling import native_sampling

if TYPE_CHECKING:
    from workers.compile.compiler import CompileReport

log = logging.getLogger("lockstep")


Compiled = tuple[Any, "CompileReport", CompileSettings]
"""What ``ModelRunner.compile`` gives."""


@dataclass(frozen=True)
class RankInfo:
    """Who this rank is.

    Attributes:
        rank: 0 to size - 1.
        size: tensor-parallel size.
        local_rank: index among the ranks of this host: which GPU it takes.
        ranks_on_host: how many of them there are.
        threads: CPU threads it computes with.
    """

    rank: int
    size: int
    local_rank: int
    ranks_on_host: int
    threads: int


class Worker:
    """One rank: answers verbs and steps from its channel until the driver is done with it."""

    def __init__(self, info: RankInfo, config: EngineConfig, model_config: ModelConfig, channel: Channel) -> None:
        self.info = info
        self.config = config
        self.model_config = model_config
        self._channel = channel
        fault = parse_fault(config.fault)
        self._faults = FaultInjector(fault) if fault and fault.rank == info.rank else None
        self._library_dir = os.path.join(config.cache_dir, "native")
        self._group: TensorParallelGroup | None = None
        self._device = torch.device("cpu")
        self._runner: ModelRunner
        self._compiled: Compiled | None = None
        self._subgraphs = 0
        self._verbs: dict[str, Callable[..., Any]] = {
            "device": self.take_device,
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
        """Answer messages until ``shutdown`` or the end of the channel. Blocks without spinning while idle."""
        try:
            while self._answer(self._channel.recv()):
                pass
        except ChannelClosedError:
            log.debug("rank %d: the driver closed the channel", self.info.rank)
        finally:
            if self._group is not None:
                self._group.close()

    def _answer(self, frame: bytes) -> bool:
        """Carry out one message and send its answer; False after ``shutdown``."""
        number: Any = -1
        try:
            if self._faults is not None:
                frame = self._faults.on_message(frame)
            message = unpack(frame)
            number = message[1] if len(message) > 1 else -1
            if message[0] == "step":
                value = pack_tokens(self._execute(unpack_plan(message)))
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

    def _call(self, verb: str, arguments: dict[str, Any]) -> Any:
        if verb not in self._verbs:
            raise ProtocolError(f"unknown verb {verb!r}; known: {', '.join(self._verbs)}, shutdown")
        if self._faults is not None:
            self._faults.on_startup(verb)
        return self._verbs[verb](**arguments)

    def _execute(self, plan: StepPlan) -> StepResult:
        if self._faults is not None:
            self._faults.on_step(plan.step_id)
        return self._runner.execute(plan)

    # ---- start-up verbs, in the order in which they are called

    def take_device(self) -> dict[str, Any]:
        """Take this rank's device. Gives its description, for the log."""
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
        # Before a model is built or traced: what it does depends on which kernels there are.
        for module in kernels:
            module.use_native(self._library_dir)
        return {"device": f"cpu, {self.info.threads} thread{'s' if self.info.threads != 1 else ''}"}

    def open_rendezvous(self) -> str:
        """Where the ranks of several hosts can meet: a free TCP port of this host's address. Rank 0's answer counts."""
        with socket.create_server((host_address(), 0)) as probe:
            return f"tcp://{probe.getsockname()[0]}:{probe.getsockname()[1]}"

    def join_group(self, init_method: str, same_host: bool, run_id: str) -> dict[str, Any]:
        """Meet the other ranks. Collective: every rank must be called at the same time."""
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
        if self._faults is not None:
            self._faults.on_group(self._group)
        self._runner = ModelRunner(
            self.config,
            self.model_config,
            self._group,
            ranks_on_host=self.info.ranks_on_host,
            faults=self._faults,
        )
        return {"collectives": self._group.backend}

    def load_weights(self) -> dict[str, Any]:
        """Build the model and fill this rank's shard. Gives bytes read, bytes of the checkpoint, seconds, peak."""
        loaded = self._runner.load_model(self._reporter("weights"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return asdict(loaded) | {"peak_rss": peak}

    def _reporter(self, stage: str) -> Callable[[int, int], None] | None:
        """Tells the driver how far a stage is, at most a hundred times; rank 0 speaks for all."""
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
        """KV blocks this rank can afford; the driver takes the minimum."""
        return self._runner.affordable_kv_blocks()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache of ``num_blocks`` blocks and everything a step needs."""
        self._runner.allocate(num_blocks)

    def compile(self) -> dict[str, Any]:
        """Compile the model, without using it yet: the driver lets all ranks vote.

        Gives the figures of the compilation, or ``{"failure": text}`` where this rank could not.

        Raises:
            TraceError: the model's code cannot be compiled at all, on any rank.
        """
        from workers.compile.errors import TraceError

        try:
            if self._faults is not None:
                self._faults.on_vote("compile")
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
        """Run steps by what :meth:`compile` made, or by the plain model if some rank has none; gives warnings."""
        if agreed and self._compiled is not None:
            forward, report, settings = self._compiled
            self._subgraphs = report.subgraphs
            warning = self._runner.use(forward, settings)
        else:
            warning = ""
        self._compiled = None
        return [warning] if warning else []

    def warm_up(self) -> None:
        """Prepare what is to be captured. Collective: every rank at the same time."""
        self._runner.warm_up(self._reporter("capture"))

    def capture(self) -> dict[str, Any]:
        """Capture graphs; gives how many, or ``{"failure": text}``. Exchanges nothing, so that ranks can vote."""
        try:
            if self._faults is not None:
                self._faults.on_vote("capture")
            return {"graphs": len(self._runner.graphs.capture(self._reporter("capture")))}
        except Exception as error:
            log.debug("capturing failed", exc_info=True)
            return {"failure": f"{type(error).__name__}: {error}"}

    def discard_graphs(self) -> None:
        """Run every step without graphs, because some rank could not capture them."""
        self._runner.graphs.discard()

    def measure_step(self, repeats: int) -> dict[str, float]:
        """For ``bench latency``: seconds of the last step's forward pass, and of its ops. Every rank at once."""
        return self._runner.measure_last_step(repeats)

    def fingerprint(self) -> dict[str, str]:
        """What must be the same on every rank before a step may run; the driver compares field by field."""
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
    """This host's address as other hosts see it: that of the interface with the default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: connecting a datagram socket sends nothing.
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])


def hash_of(fields: dict[str, Any]) -> str:
    """A short hash of a config's fields."""
    return digest(pack(fields))
