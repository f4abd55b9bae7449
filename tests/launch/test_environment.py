"""Environment variables: defaults, refused values, torchrun's variables, and what children and libraries receive."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.environment import (
    Environment,
    TorchrunRanks,
    disable_torchrun_store,
    prepare_rank,
    prepare_ray,
    prepare_torchrun,
    rank_environment,
    read_environment,
    torchrun_ranks,
)
from runtime.common.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_defaults() -> None:
    assert read_environment({}) == Environment(Path.home() / ".cache" / "lockstep", "INFO", "")


def test_every_variable(tmp_path: Path) -> None:
    variables = {
        "LOCKSTEP_CACHE_DIR": f"{tmp_path}/a/../b",
        "LOCKSTEP_LOG_LEVEL": "debug",
        "LOCKSTEP_FAULT": "rank=1,kind=raise",
        "LOCKSTEP_API_KEY": "secret",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "CUDA_VISIBLE_DEVICES": "",
    }
    expected = Environment(tmp_path / "b", "DEBUG", "rank=1,kind=raise", "secret", "10.0.0.1:6379", "")
    assert read_environment(variables) == expected


def test_a_relative_cache_folder_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_environment({"LOCKSTEP_CACHE_DIR": "cache"}).cache_dir == tmp_path / "cache"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="LOCKSTEP_LOG_LEVEL is 'LOUD'; allowed: DEBUG, INFO"):
        read_environment({"LOCKSTEP_LOG_LEVEL": "loud"})


def test_torchrun_is_recognised_by_all_its_variables() -> None:
    expected = TorchrunRanks(3, 1, 4, 2, "127.0.0.1", 29500, run_id="", restart_count=0, agent_store=False)
    assert torchrun_ranks(TORCHRUN) == expected
    for name in TORCHRUN:
        assert torchrun_ranks({key: value for key, value in TORCHRUN.items() if key != name}) is None


def test_what_torchelastic_adds() -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = torchrun_ranks(TORCHRUN | elastic)
    assert found is not None
    assert (found.run_id, found.restart_count, found.agent_store) == ("x", 2, True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("RANK", "x", "RANK is 'x'"), ("RANK", "4", "RANK 4 of WORLD_SIZE 4"), ("LOCAL_WORLD_SIZE", "5", "contradict")],
)
def test_wrong_numbers_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torchrun_ranks(TORCHRUN | {name: value})


@pytest.mark.parametrize(("inherited", "expected"), [({}, "/source"), ({"PYTHONPATH": "/own"}, "/source:/own")])
def test_a_rank_finds_the_source_before_the_users_own_path(inherited: dict[str, str], expected: str) -> None:
    assert rank_environment(Path("/source"), {"HOME": "/h", **inherited}) == {"HOME": "/h", "PYTHONPATH": expected}


def test_only_a_cpu_rank_hides_the_devices() -> None:
    for device, visible in (("cpu", ""), ("cuda", "1")):
        variables = {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "64"}
        prepare_rank(threads=3, device=device, variables=variables)
        assert variables == {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "3", "THP_MEM_ALLOC_ENABLE": "1"}


def test_a_users_settings_of_libraries_stay() -> None:
    own = {"RAY_USAGE_STATS_ENABLED": "1", "RAY_worker_niceness": "5", "OMP_NUM_THREADS": "8"}
    variables = dict(own)
    prepare_ray(variables)
    prepare_torchrun(variables)
    assert variables == own
    variables.clear()
    prepare_ray(variables)
    prepare_torchrun(variables)
    disable_torchrun_store(variables)
    defaults = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    assert variables == {**defaults, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
