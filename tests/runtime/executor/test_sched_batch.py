"""SchedBatchContext: SCHED_BATCH within the block, for the calling thread only, and the old policy afterwards."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.executor.supervisor import SchedBatchContext

NORMAL, BATCH, IDLE = os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE


def test_the_policy_lasts_for_the_block_and_the_thread():
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

    with ThreadPoolExecutor(1) as pool:  # A thread of its own, so that a failure leaves no policy behind.
        pool.submit(body).result(20.0)


@pytest.mark.parametrize("policy", [BATCH, IDLE])
def test_a_thread_with_a_policy_of_its_own_keeps_it(policy: int):
    script = f"""if True:
        import os
        from runtime.executor.supervisor import SchedBatchContext
        os.sched_setscheduler(0, {policy}, os.sched_param(0))
        with SchedBatchContext():
            assert os.sched_getscheduler(0) == {policy}
        assert os.sched_getscheduler(0) == {policy}
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)  # SCHED_IDLE is irreversible.


def test_a_refusal_of_the_kernel_changes_nothing_and_is_remembered(monkeypatch):
    tried: list[int] = []

    def refuse(pid: int, policy: int, param: os.sched_param) -> None:
        tried.append(policy)
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    batch = SchedBatchContext()
    for _ in range(3):
        with batch:
            assert os.sched_getscheduler(0) == NORMAL
    assert tried == [BATCH]
