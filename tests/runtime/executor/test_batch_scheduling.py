"""A thread gives way while it waits for the ranks, and is what it was before and after."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.executor.batch_scheduling import SchedBatchContext

NORMAL, BATCH, IDLE = os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE


def test_it_lasts_as_long_as_the_block_and_for_that_thread_alone():
    def body() -> None:
        batch = SchedBatchContext()
        for _ in range(2):
            with batch:
                assert os.sched_getscheduler(0) == BATCH
                assert os.sched_getscheduler(os.getpid()) == NORMAL
            assert os.sched_getscheduler(0) == NORMAL
        with pytest.raises(ZeroDivisionError), batch:
            _ = 1 // 0
        assert os.sched_getscheduler(0) == NORMAL

    with ThreadPoolExecutor(1) as pool:  # A thread of its own, whose policy dies with it.
        pool.submit(body).result(20.0)


@pytest.mark.parametrize("policy", [BATCH, IDLE])
def test_a_thread_with_a_policy_of_its_own_keeps_it(policy: int):
    script = f"""if True:
        import os
        from runtime.executor.batch_scheduling import SchedBatchContext
        os.sched_setscheduler(0, {policy}, os.sched_param(0))
        with SchedBatchContext():
            assert os.sched_getscheduler(0) == {policy}
        assert os.sched_getscheduler(0) == {policy}
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)  # SCHED_IDLE cannot be left again.


def test_where_the_kernel_refuses_nothing_changes_and_it_is_not_asked_again(monkeypatch):
    asked: list[int] = []

    def refuse(pid: int, policy: int, param: os.sched_param) -> None:
        asked.append(policy)
        raise OSError(errno.EINVAL, "this kernel knows one policy")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    batch = SchedBatchContext()
    for _ in range(3):
        with batch:
            assert os.sched_getscheduler(0) == NORMAL
    assert asked == [BATCH]
