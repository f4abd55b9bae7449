"""The group in one process: a single rank, the checks of the spec, the registry, and opcheck of the ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.group import TensorParallelGroup, get_group, init_group, single_rank_group
from parallel.group_spec import GroupSpec
from tests.parallel.unconnected import ConstantCollectives

CPU = torch.device("cpu")


def test_a_single_rank_does_not_communicate() -> None:
    group = single_rank_group(CPU)
    x = torch.randn(3, 4)
    assert (group.rank, group.size, group.backend) == (0, 1, "none")
    assert group.all_reduce(x) is x
    assert group.broadcast(x) is x
    assert group.all_gather(x).shape == (1, 3, 4)
    assert group.gather(x).shape == (1, 3, 4)
    group.barrier()
    group.set_epoch(3)
    group.close()


def test_a_group_of_one_needs_no_rendezvous() -> None:
    group = init_group(GroupSpec("tp", 0, 1, "file:///nowhere"), CPU)
    assert (group.name, group.size) == ("tp", 1)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"rank": 2}, "rank 2 of 2"),
        ({"size": 0}, "rank 0 of 0"),
        ({"backend": "mpi"}, "'mpi'; known: auto, shm, gloo, nccl"),
        ({"timeout": 0.0}, "timeout of 0.0 s"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GroupSpec(**{"name": "tp", "rank": 0, "size": 2, "init_method": "file:///x", **changed})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"backend": "nccl"}, "nccl needs CUDA devices, and rank 0 is on cpu"),
        ({"backend": "shm", "same_host": False}, "on one host"),
        ({"backend": "gloo", "init_method": "env://"}, "neither file:///path nor tcp://host:port"),
        ({"backend": "shm", "run_id": "nameless"}, "'<pid>-<anything>'"),
    ],
)
def test_a_backend_that_does_not_fit_is_refused(changed: dict[str, Any], text: str) -> None:
    spec = GroupSpec(**{"name": "tp", "rank": 0, "size": 2, "init_method": "file:///x", "run_id": "1-a", **changed})
    with pytest.raises(ValueError, match=text):
        init_group(spec, CPU)


def test_names_are_unique_while_a_group_is_open() -> None:
    group = TensorParallelGroup("once", 0, 2, CPU, ConstantCollectives(0, 2))
    assert get_group("once") is group
    with pytest.raises(ValueError, match="already has a group 'once'"):
        TensorParallelGroup("once", 0, 2, CPU, ConstantCollectives(0, 2))
    group.close()
    with pytest.raises(ValueError, match="no group 'once' is open"):
        get_group("once")
    TensorParallelGroup("once", 0, 2, CPU, ConstantCollectives(0, 2)).close()


def test_the_ops_find_the_group_by_name_and_pass_opcheck() -> None:
    group = TensorParallelGroup("checked", 0, 2, CPU, ConstantCollectives(0, 2))
    x = torch.randn(3, 4)
    torch.testing.assert_close(group.all_reduce(x), 2 * x)
    assert group.all_gather(x).shape == (2, 3, 4)
    torch.library.opcheck(torch.ops.lockstep.all_reduce.default, (x, "checked"))
    torch.library.opcheck(torch.ops.lockstep.all_gather.default, (x, 2, "checked"))
    group.close()
