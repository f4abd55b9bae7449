"""The worker: RPC methods over a channel in start-up order, and one answer for every message."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from parallel.collectives.base import CollectiveTimeout
from runtime.common.channel import Channel, channel_pair
from runtime.common.config import EngineConfig, resolve
from runtime.common.errors import CheckpointError, ProtocolError, RequestError
from runtime.common.model_config import ModelConfig, load_model_config
from runtime.common.protocol import (
    ExceptionKind,
    NewRequest,
    ScheduledRequest,
    StepPlan,
    digest,
    pack,
    pack_exception,
    pack_plan,
    unpack,
    unpack_exception,
    unpack_tokens,
)
from runtime.common.sampling_params import SamplingParams
from tests.checkpoints import tiny_checkpoint
from tests.workers.graphs.split_model import compile_without_inductor
from workers.attention import cpu_paged
from workers.faults import FaultyRunner
from workers.kernels import elementwise
from workers.quantization import cpu_linear
from workers.runner import ModelRunner
from workers.sampling import native_sampling
from workers.worker import RankInfo, Worker, rank_exception

GROUP = {"init_method": "", "same_host": True, "run_id": "run"}


@pytest.fixture(autouse=True)
def kernels_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards the C kernels that a worker loads: other tests expect the PyTorch forms."""
    for library in (cpu_paged._library, elementwise._library, native_sampling._Native):
        monkeypatch.setattr(library, "library", library.library)
    monkeypatch.setattr(cpu_linear._Native, "call", cpu_linear._Native.call)


class Driver:
    """The driver's end of a worker that runs in a thread."""

    def __init__(self, rank: int = 0, **settings: Any) -> None:
        model: ModelConfig = load_model_config(tiny_checkpoint())
        config = EngineConfig(
            model=str(tiny_checkpoint()),
            max_model_len=32,
            kv_cache_memory=2**20,
            **({"enforce_eager": True} | settings),
        )
        config = resolve(config, model, device="cpu", executor="local")
        self.channel, theirs = channel_pair()
        self.worker = Worker(RankInfo(rank, 1, 0, 1, 1), config, model, Channel(theirs))
        self.thread = threading.Thread(target=self.worker.serve, daemon=True)
        self.thread.start()
        self.progress: list[list[Any]] = []
        self._calls = 0

    def exchange(self, frame: bytes) -> list[Any]:
        """Send a message; its answer. Collects progress on the way."""
        self.channel.send(frame)
        while (message := unpack(self.channel.recv(timeout=60.0)))[0] == "progress":
            self.progress.append(message[1:])
        return message

    def call(self, method: str, **arguments: Any) -> Any:
        """The value of an RPC that succeeds."""
        self._calls += 1
        frame = pack(["call", self._calls, method, arguments])
        kind, number, checksum, value = self.exchange(frame)
        assert (kind, number, checksum) == ("ok", self._calls, digest(frame)), value
        return value

    def start_up(self) -> None:
        self.call("device")
        self.call("group", **GROUP)
        self.call("weights")
        self.call("kv_cache", num_blocks=self.call("kv_cache_size"))
        self.call("compile")
        self.call("use_compiled", agreed=True)
        self.call("warm_up")
        self.call("capture")

    def end(self) -> None:
        self.channel.close()
        self.thread.join(20.0)


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    started = Driver(**getattr(request, "param", {}))
    yield started
    started.end()
    assert not started.thread.is_alive()


def plan(step: int, scheduled: int = 7) -> StepPlan:
    new = NewRequest(7, (3, 4, 5), 3, SamplingParams(temperature=0.0, seed=0))
    return StepPlan(step, (ScheduledRequest(scheduled, 3, (0,)),), (new,))


@pytest.mark.parametrize("driver", [{"enforce_eager": False, "cudagraph_mode": "FULL"}], indirect=True)
def test_start_up_step_and_shutdown(driver: Driver) -> None:
    with patch("workers.compile.compiler.compile_model", compile_without_inductor):
        driver.start_up()
    stages = [stage for stage, *_ in driver.progress]
    assert set(stages) == {"weights", "capture"}
    assert all(0 < done <= total for _, done, total in driver.progress)
    assert driver.progress[-1][1] == driver.progress[-1][2]
    fingerprint = driver.call("ready")
    assert fingerprint["graph_mode"] == "FULL" and fingerprint["full_graphs"]
    assert {"config", "model", "python", "torch", "device", "kv_blocks", "subgraphs"} < fingerprint.keys()
    frame = pack_plan(plan(4))
    kind, number, checksum, value = driver.exchange(frame)
    assert (kind, number, checksum) == ("ok", 4, digest(frame))
    [token] = unpack_tokens(4, value).tokens
    assert token.req_id == 7 and not token.error
    assert driver.call("measure_step", repeats=1)["forward"] > 0
    assert driver.exchange(pack(["call", 99, "shutdown", {}])) == ["ok", 99, "", None]
    driver.thread.join(20.0)
    assert not driver.thread.is_alive()


def test_errors_are_answers_and_the_worker_continues(driver: Driver) -> None:
    for frame, number, text in (
        (pack(["call", 5, "unheard-of", {}]), 5, "unknown method 'unheard-of'"),
        (pack(["shout", 6]), 6, "unknown message 'shout'"),
        (b"\xc1", -1, "not msgpack"),
    ):
        answer = driver.exchange(frame)
        assert answer[:2] == ["error", number]
        assert any(text in str(part) for part in answer[2:])
    driver.start_up()
    answer = driver.exchange(pack_plan(plan(8, scheduled=1)))
    assert answer[:2] == ["error", 8]
    assert any("step 8 schedules request 1, never announced here" in str(part) for part in answer[2:])
    assert driver.call("discard_graphs") is None


def test_fingerprints_of_other_configs_differ() -> None:
    found = []
    for settings in ({}, {}, {"max_num_seqs": 3}):
        driver = Driver(**settings)
        driver.start_up()
        found.append(driver.call("ready"))
        driver.end()
    assert found[0] == found[1]
    assert found[0]["config"] != found[2]["config"]


@pytest.mark.parametrize("driver", [{"fault": "rank=0,kind=compile_fail"}], indirect=True)
def test_a_rank_that_cannot_compile_reports_a_failure(driver: Driver) -> None:
    driver.call("device")
    driver.call("group", **GROUP)
    driver.call("weights")
    driver.call("kv_cache", num_blocks=2)
    assert driver.call("compile") == {"failure": "InjectedFaultError: injected fault: compile_fail"}
    assert driver.call("use_compiled", agreed=False) == []


def test_only_the_faulty_rank_has_a_faulty_runner() -> None:
    for rank, fault, expected in ((0, "", ModelRunner), (0, "rank=1,kind=exit", ModelRunner),
                                  (0, "rank=0,kind=exit", FaultyRunner)):  # fmt: skip
        driver = Driver(rank, fault=fault)
        driver.call("device")
        driver.call("group", **GROUP)
        assert type(driver.worker._runner) is expected
        driver.end()


@pytest.mark.parametrize(
    ("error", "kind", "fields"),
    [
        (CheckpointError("x"), ExceptionKind.INPUT, {}),
        (RequestError("x", param="n"), ExceptionKind.INPUT, {"param": "n"}),
        (CollectiveTimeout("x", (1, 2)), ExceptionKind.COLLECTIVE, {"missing": [1, 2]}),
        (ProtocolError("x"), ExceptionKind.INTERNAL, {}),
        (OSError(28, "x"), ExceptionKind.INTERNAL, {}),
    ],
)
def test_an_exception_is_sent_with_its_kind_and_fields(error: Exception, kind: ExceptionKind, fields: dict[str, Any]):
    error.add_note("ignored")
    try:
        raise error
    except type(error) as caught:
        sent = unpack_exception(unpack(pack_exception(7, rank_exception(caught))))
    assert (sent.kind, sent.type_name, sent.fields) == (kind, type(error).__name__, fields)
    assert sent.message == str(error) and "Traceback" in sent.traceback
