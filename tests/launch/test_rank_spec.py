"""RankSpec: ranks per host, and the frame that carries a spec."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from launch.rank_spec import RankSpec, host_identity, make_rank_specs
from runtime.common.config import EngineConfig
from runtime.common.model_config import ModelConfig
from tests.runtime.executor.fakes import MODEL

CONFIG = EngineConfig(tensor_parallel_size=3, threads_per_rank=2)


def test_ranks_are_counted_per_host() -> None:
    specs = make_rank_specs(CONFIG, MODEL, ["a", "b", "a"], "tcp:a:1", b"secret")
    assert [spec.rank for spec in specs] == [0, 1, 2]
    assert [(spec.local_rank, spec.ranks_on_host, spec.size) for spec in specs] == [(0, 2, 3), (0, 1, 3), (1, 2, 3)]
    assert {(spec.threads, spec.address, spec.secret) for spec in specs} == {(2, "tcp:a:1", b"secret")}


def test_a_spec_survives_its_frame() -> None:
    (spec,) = make_rank_specs(CONFIG, MODEL, ["a"])
    unpacked = RankSpec.unpack(spec.pack())
    assert replace(unpacked, config={}, model={}) == replace(spec, config={}, model={})
    assert EngineConfig.from_dict(unpacked.config) == CONFIG and ModelConfig.from_dict(unpacked.model) == MODEL


def test_processes_of_one_host_have_the_same_identity() -> None:
    command = [sys.executable, "-c", "from launch.rank_spec import host_identity; print(host_identity())"]
    assert subprocess.check_output(command, text=True, timeout=60).strip() == host_identity()
