"""Startup: the stages, and what is decided over all ranks, on fake ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from runtime.common.config import EngineConfig
from runtime.common.errors import RankRaisedError, RankTimeoutError, StartupError
from runtime.common.protocol import pack
from runtime.executor import worker_group
from runtime.executor.startup import NullProgress, Startup, StartupReport
from tests.runtime.executor.fakes import MODEL, START_UP_ANSWERS, FakeLauncher, FakeRank

FAILURE = {"failure": "RuntimeError: boom"}


class Recorded(NullProgress):
    """Progress that keeps what it received."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.details: dict[str, str] = {}

    def started(self, stage: str) -> None:
        self.stages.append(stage)

    def finished(self, stage: str, seconds: float, detail: str) -> None:
        self.details[stage] = detail


def start(
    answers: dict[int, dict[str, Any]] | None = None,
    *,
    host_ids: dict[int, str] | None = None,
    progress: NullProgress | None = None,
    **settings: Any,
) -> tuple[StartupReport, FakeLauncher]:
    launcher = FakeLauncher(2, answers, host_ids)
    config = EngineConfig(tensor_parallel_size=2, run_dir="/run/lockstep-1-x", **settings)
    startup = Startup(launcher, config, MODEL, progress or NullProgress())
    try:
        startup.run()
        return startup.report, launcher
    finally:
        launcher.end()
        if startup.group is not None:
            startup.group.end(orderly=False)


def calls(launcher: FakeLauncher, rank: int = 0) -> list[str]:
    return [method for method, _ in launcher.ranks[rank].calls]


def test_every_stage_runs_once_in_order():
    progress = Recorded()
    report, launcher = start(progress=progress)
    stages = ["spawn", "device", "group", "weights", "kv_cache", "compile", "capture", "ready"]
    assert progress.stages == list(progress.details) == list(report.seconds) == stages
    assert calls(launcher) == calls(launcher, 1)
    assert calls(launcher) == (
        "device group weights kv_cache_size kv_cache compile use_compiled warm_up capture ready".split()
    )
    assert "pids 1000, 1001" in progress.details["spawn"]


def test_ready_follows_the_slowest_ranks_last_capture():
    rank_0_answers, slow_rank_is_read = threading.Event(), threading.Event()
    events: list[str] = []

    class Ordered(NullProgress):
        def started(self, stage: str) -> None:
            events.append(stage)

        def advanced(self, stage: str, done: int, total: int) -> None:
            slow_rank_is_read.set()

    def quick(rank: FakeRank) -> dict[str, int]:
        rank_0_answers.set()
        return {"graphs": 1}

    def slow(rank: FakeRank) -> dict[str, int]:
        assert rank_0_answers.wait(20.0)
        rank.channel.send(pack(["progress", "capture", 1, 2]))
        assert slow_rank_is_read.wait(20.0)
        events.append("last capture")
        return {"graphs": 1}

    start({0: {"capture": quick}, 1: {"capture": slow}}, progress=Ordered())
    assert events[-3:] == ["capture", "last capture", "ready"]


def test_the_kv_cache_has_the_minimum_over_ranks():
    report, launcher = start({1: {"kv_cache_size": 5}})
    assert report.num_kv_blocks == 5
    assert [rank.calls[4] for rank in launcher.ranks] == [("kv_cache", {"num_blocks": 5})] * 2


def test_one_host_has_a_rendezvous_over_a_file_and_two_have_one_over_tcp():
    _, launcher = start()
    assert launcher.ranks[1].calls[1] == (
        "group",
        {"init_method": "file:///run/lockstep-1-x/group", "same_host": True, "run_id": "lockstep-1-x"},
    )
    _, launcher = start({1: {"open_rendezvous": "tcp://ignored:2"}}, host_ids={1: "another"})
    assert calls(launcher)[1] == "open_rendezvous"
    method, arguments = launcher.ranks[1].calls[2]
    assert method == "group" and arguments["init_method"] == "tcp://here:1" and not arguments["same_host"]


def test_one_rank_that_cannot_compile_makes_all_fall_back(caplog: pytest.LogCaptureFixture):
    report, launcher = start({1: {"compile": FAILURE}})
    for rank in launcher.ranks:
        assert ("use_compiled", {"agreed": False}) in rank.calls
    assert "rank 1 on here: RuntimeError: boom" in caplog.text
    assert "all ranks fall back together because of rank(s) 1" in caplog.text
    assert report.compiled_subgraphs == 0


def test_one_rank_that_cannot_capture_makes_all_discard_their_graphs():
    _, launcher = start({0: {"capture": FAILURE}})
    assert calls(launcher, 0)[-2:] == calls(launcher, 1)[-2:] == ["discard_graphs", "ready"]


def test_compile_counts_are_summed_and_warnings_logged_once(caplog: pytest.LogCaptureFixture):
    vote = START_UP_ANSWERS["compile"] | {"mode": "FULL", "subgraphs": 5, "warnings": ["careful"]}
    votes = [vote | {"compiled_subgraphs": 2, "distinct_subgraphs": 3}, vote | {"cache_hits": 3}]
    progress = Recorded()
    report, _ = start({rank: {"compile": vote} for rank, vote in enumerate(votes)}, progress=progress)
    assert (report.compiled_subgraphs, report.distinct_subgraphs, report.cache_hits) == (2, 3, 3)
    assert progress.details["compile"].startswith("5 subgraphs, 3 distinct; all ranks: 2 compiled, 3 from the cache")
    assert caplog.text.count("careful") == 1


def test_warnings_of_the_switch_to_compiled_code_are_logged_once(caplog: pytest.LogCaptureFixture):
    start({rank: {"use_compiled": ["no graphs"]} for rank in (0, 1)})
    assert caplog.text.count("no graphs") == 1


def test_ranks_with_different_fingerprints_are_refused():
    with pytest.raises(StartupError, match=r"its torch is 2\.12, rank 0 has 2\.11") as caught:
        start({0: {"ready": {"config": "c", "torch": "2.11"}}, 1: {"ready": {"config": "c", "torch": "2.12"}}})
    assert (caught.value.rank, caught.value.stage) == (1, "ready")


def test_an_exception_names_its_stage():
    with pytest.raises(RankRaisedError, match="ValueError: boom") as caught:
        start({1: {"warm_up": ValueError("boom")}})
    assert (caught.value.rank, caught.value.stage) == (1, "capture")


def test_a_stage_that_misses_its_deadline_names_stage_and_flag(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_group, "GRACE_SECONDS", 0.0)
    with pytest.raises(RankTimeoutError, match=r"0\.05 s, the deadline that --kv-cache-timeout sets") as caught:
        start({1: {"kv_cache": ...}}, kv_cache_timeout=0.05)
    assert (caught.value.rank, caught.value.stage) == (1, "kv_cache")
