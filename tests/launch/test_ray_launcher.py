"""RayLauncher without Ray: what a rank reserves. Ranks on a cluster are in ``scenarios/test_ray.py``."""

from __future__ import annotations

import sys

import pytest

from launch.ray_launcher import RayLauncher, rank_resources
from runtime.common.config import EngineConfig
from runtime.common.errors import ConfigError
from tests.runtime.executor.fakes import MODEL


def test_a_gpu_per_rank():
    config = EngineConfig(tensor_parallel_size=2, device="cuda")
    assert rank_resources(config, [{"CPU": 1.0, "GPU": 1.0}] * 2) == {"GPU": 1.0, "CPU": 1.0}
    with pytest.raises(ConfigError, match="needs 2 GPUs, the Ray cluster has 1; ask for at most 1"):
        rank_resources(config, [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}])


@pytest.mark.parametrize(("cpus", "share"), [([3.0], 1.0), ([2.0, 1.0], 1.0), ([1.0, 1.0], 0.5), ([0.5, 0.9], 0.25)])
def test_ranks_share_cpus_where_there_are_too_few(cpus: list[float], share: float):
    config = EngineConfig(tensor_parallel_size=3)
    assert rank_resources(config, [{"CPU": cpu} for cpu in cpus]) == {"CPU": share}


def test_a_cluster_without_cpus_is_refused():
    with pytest.raises(ConfigError, match="its nodes offer 0 CPUs"):
        rank_resources(EngineConfig(tensor_parallel_size=1), [{"GPU": 1.0}])


def test_without_ray_the_error_names_the_alternatives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"install lockstep\[ray\], or use --distributed-executor-backend local"):
        RayLauncher().start(EngineConfig(tensor_parallel_size=2), MODEL, 1.0)
