"""Ranks over Ray: on a running cluster, over two nodes, as a submitted job, and with processes that die.

The module starts a cluster of its own with two nodes, both on this machine, and ends only that.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.llm import LLM
from runtime.common.errors import RankDiedError, RankRaisedError
from runtime.common.sampling_params import SamplingParams
from tests.checkpoints import prompts, tiny_checkpoint
from tests.launch.cli.commands.test_generate import GREEDY, answers_of, command, golden_answers, transformers_greedy
from tests.scenarios.test_restart import check_kill, strike_supervisors, tokens

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, one CPU each; its address is in ``RAY_ADDRESS`` while the module runs."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", str(ROOT))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True})
        made.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            yield made
        finally:
            import ray

            ray.shutdown()
            made.shutdown()


def over_ray(tp: int, *, max_restarts: int = 0, **settings) -> LLM:
    own = {"tensor_parallel_size": tp, "max_restarts": max_restarts, "progress": False, "enforce_eager": True}
    return LLM(str(tiny_checkpoint()), **own, **settings)


@pytest.mark.parametrize("tp", [2, 3])
def test_tokens_over_two_nodes(cluster: Any, tp: int):
    """TP 2 has a rank on each node; at TP 3 the ranks share the cluster's two CPUs."""
    with over_ray(tp) as llm:
        assert llm.config.distributed_executor_backend == "ray"
        outputs = llm.generate(prompts(1, 9, 30, 17), GREEDY)
    expected = transformers_greedy(tiny_checkpoint(), (1, 9, 30, 17), GREEDY.max_tokens)
    assert [output.token_ids for output in outputs] == expected
    assert placement_groups() == set()


def placement_groups() -> set[str]:
    """Placement groups that hold resources."""
    import ray

    table = ray.util.placement_group_table()
    return {name for name, group in table.items() if group["state"] not in ("REMOVED",)}


def test_demo_on_a_running_cluster(cluster: Any):
    argv = command("--tensor-parallel-size", "2")
    assert answers_of([str(BIN / "lockstep"), *argv]) == golden_answers()


def test_sigkill_of_each_rank_until_no_restart_is_left(cluster: Any, monkeypatch: pytest.MonkeyPatch):
    """Ranks on two nodes; a restarted group is placed again."""
    strikes = strike_supervisors(monkeypatch)
    with over_ray(2, max_restarts=2) as llm:
        expected = tokens(llm)
        for rank in (0, 1):
            strikes.arm(rank)
            assert tokens(llm) == expected
            check_kill(strikes.failures[-1], (rank,))
            assert len(placement_groups()) == 1
        strikes.arm(1)
        with pytest.raises(RankDiedError) as caught:
            tokens(llm)
        check_kill(caught.value, (1,))
        assert placement_groups() == set()


def test_sigkill_of_a_raylet_ends_the_ranks_on_its_node(cluster: Any):
    """The actors end themselves and their ranks; Ray itself would do it after about 15 s."""
    node = cluster.add_node(num_cpus=2)  # The only node with room for both, so both are placed on it.
    try:
        with over_ray(2) as llm:
            family = [psutil.Process(pid) for pid in llm.rank_pids]
            family += [rank.parent() for rank in family]
            assert "RankActor" in " ".join(family[-1].cmdline())
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            assert family[-1].parent() == family[-2].parent() == raylet
            raylet.kill()
            with pytest.raises(RankDiedError):
                llm.generate([[1, 2, 3]], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
            _, alive = psutil.wait_procs(family, timeout=60)
            assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    finally:
        cluster.remove_node(node)


def test_sigkill_of_an_actor_takes_its_rank_along(cluster: Any):
    with over_ray(2) as llm:
        rank = psutil.Process(llm.rank_pids[1])
        actor = rank.parent()
        assert "RankActor" in " ".join(actor.cmdline())
        actor.kill()
        psutil.wait_procs([rank], timeout=60)
        with pytest.raises(RankDiedError) as caught:
            llm.generate([[1, 2, 3]], GREEDY)
    assert caught.value.rank == 1


def test_exception_in_rank_1_only(cluster: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", "rank=1,step=3,kind=raise")
    with over_ray(2) as llm, pytest.raises(RankRaisedError) as caught:
        llm.generate([[1, 2, 3]], GREEDY)
    assert caught.value.rank == 1 and "injected fault" in str(caught.value)


def test_sigkill_of_the_driver_over_ray(cluster: Any):
    argv = [BIN / "lockstep", "generate", tiny_checkpoint(max_position_embeddings=65536), "-tp", "2"]
    argv += ["--prompt", "x", "--max-tokens", "60000", "--ignore-eos", "--enforce-eager"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as driver:
        for line in driver.stderr:
            if line.strip().startswith("ready"):
                break
        ranks = ours("launch.rank_main")
        assert len(ranks) == 2
        driver.kill()
    _, alive = psutil.wait_procs([*ranks, *ours("RankActor")], timeout=60)
    assert not alive


def ours(word: str) -> list[psutil.Process]:
    """Live processes of this test session whose command line contains ``word``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            session = process.environ().get("LOCKSTEP_TEST_SESSION")
            if session == os.environ["LOCKSTEP_TEST_SESSION"] and word in " ".join(process.cmdline()):
                found.append(process)
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def test_submitted_jobs(cluster: Any):
    from ray.job_submission import JobSubmissionClient

    address = f"http://{cluster.head_node.webui_url}"
    argv = [BIN / "ray", "job", "submit", "--address", address, "--working-dir", str(ROOT), "--", "lockstep"]
    argv += ["generate", str(tiny_checkpoint()), "--tensor-parallel-size", "2", "--json", "--enforce-eager", "--prompt"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    good, bad = (subprocess.Popen([*argv, prompt], env=environment, cwd=ROOT, **pipes) for prompt in ("x", "x" * 3000))
    said = good.communicate(timeout=300)[0]
    assert good.returncode == 0, said
    assert '"finish_reason"' in said
    said = bad.communicate(timeout=300)[0]
    assert bad.returncode == 1, said
    jobs = JobSubmissionClient(address).list_jobs()
    assert {job.driver_exit_code for job in jobs if job.driver_exit_code} == {2}
