"""The thread pool of the C kernels: every task runs once, idle threads sleep, and a fork leaves the pool usable."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.toolchain import load_library
from workers.kernels.bindings import POOL

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)

FORK = """
import ctypes, os, sys, threading
pool = ctypes.CDLL(sys.argv[1])
task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)

def run(tasks):
    done = []
    pool.lockstep_parallel_for(task(lambda work, number: done.append(number)), None, ctypes.c_long(tasks))
    assert sorted(done) == list(range(tasks)), done

def in_child(check):
    child = os.fork()
    if not child:
        try:
            check()
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def check_pool():
    run(50)
    assert pool.lockstep_pool_threads(3) == 3
    for _ in range(20):
        run(50)
"""

IDLE_FORK = """
assert pool.lockstep_pool_threads(3) == 3
run(50)
in_child(check_pool)
"""

FORK_DURING_A_LOOP = """
parent, stale, release = os.getpid(), [], threading.Event()
begun = threading.Semaphore(0)

def wait(work, number):
    if os.getpid() != parent:
        stale.append(number)
        return
    begun.release()
    release.wait()

def check():
    assert pool.lockstep_pool_threads(3) == 3
    for _ in range(50):  # the new threads look for tasks, and would take open ones
        while any(open(f"/proc/self/task/{t}/stat").read().rpartition(")")[2].split()[0] != "S"
                  for t in os.listdir("/proc/self/task") if int(t) != threading.get_native_id()):
            os.sched_yield()
    check_pool()
    assert not stale, f"{len(stale)} tasks of the parent's loop ran in the child: {stale}"

assert pool.lockstep_pool_threads(3) == 3
callback = task(wait)
caller = threading.Thread(target=lambda: pool.lockstep_parallel_for(callback, None, ctypes.c_long(40)))
caller.start()
for _ in range(3):
    begun.acquire()  # all threads of the pool are within a task
in_child(check)
release.set()
caller.join()
for _ in range(37):
    begun.acquire()  # every task of the parent's loop ran in the parent
assert not begun.acquire(blocking=False)
run(50)
"""

FORK_WITHIN_A_TASK = """
parent, caller, done, stale, children = os.getpid(), threading.get_ident(), [], [], []

def fork(work, number):
    (done if os.getpid() == parent else stale).append(number)
    if not children and threading.get_ident() == caller:
        children.append(os.fork())

callback = task(fork)
assert pool.lockstep_pool_threads(2) == 2
while not children:  # a loop may end before its caller has executed a task
    done.clear()
    pool.lockstep_parallel_for(callback, None, ctypes.c_long(40))
if not children[0]:
    os._exit(1 if stale or check_pool() else 0)
assert os.waitpid(children[0], 0)[1] == 0
assert sorted(done) == list(range(40))
"""


@pytest.fixture(scope="module")
def library_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("native"))


@pytest.fixture
def pool(library_dir: str) -> Iterator[ctypes.CDLL]:
    library = load_library(POOL, library_dir)
    yield library
    library.lockstep_pool_threads(1)


def run(pool: ctypes.CDLL, tasks: int) -> list[int]:
    """Tasks in the order in which they finished."""
    done: list[int] = []
    pool.lockstep_parallel_for(TASK(lambda _, task: done.append(task)), None, ctypes.c_long(tasks))
    return done


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_runs_once(pool: ctypes.CDLL, threads: int) -> None:
    assert pool.lockstep_pool_threads(threads) == threads
    for tasks in [0, 1, 2, 3, 100] * 20:
        assert sorted(run(pool, tasks)) == list(range(tasks))


def test_the_number_of_threads_can_change(pool: ctypes.CDLL) -> None:
    for threads in (3, 1, 4, 2):
        assert pool.lockstep_pool_threads(threads) == threads
        used: set[int] = set()
        barrier = threading.Barrier(threads, timeout=30)

        def task(_: int, number: int, barrier: threading.Barrier = barrier, used: set[int] = used) -> None:
            barrier.wait()  # passed only if so many threads are in a task at the same time
            used.add(threading.get_ident())

        pool.lockstep_parallel_for(TASK(task), None, ctypes.c_long(threads))
        assert len(used) == threads


def test_two_callers_do_not_disturb_each_other(pool: ctypes.CDLL) -> None:
    pool.lockstep_pool_threads(3)
    wrong: list[list[int]] = []

    def call() -> None:
        for _ in range(100):
            done = run(pool, 20)
            if sorted(done) != list(range(20)):
                wrong.append(done)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_idle_threads_sleep(pool: ctypes.CDLL) -> None:
    """A thread that polls is runnable (R) or on a core; a sleeping one is S. Ends by the time-out of every test."""
    pool.lockstep_pool_threads(4)
    assert len(run(pool, 100)) == 100
    main = str(threading.get_native_id())
    awake = {main}
    while awake:
        os.sched_yield()
        threads = [path for path in Path("/proc/self/task").iterdir() if path.name != main]
        assert len(threads) >= 3
        awake = {path.name for path in threads if (path / "stat").read_text().rpartition(")")[2].split()[0] != "S"}
    assert sorted(run(pool, 100)) == list(range(100))


@pytest.mark.parametrize("fork", [IDLE_FORK, FORK_DURING_A_LOOP, FORK_WITHIN_A_TASK], ids=["idle", "loop", "task"])
def test_the_pool_is_usable_after_a_fork(pool: ctypes.CDLL, library_dir: str, fork: str) -> None:
    """No task of the parent's loop runs in the child, and every task of the child's loops runs once."""
    path = next(Path(library_dir).glob("pool-*.so"))
    done = subprocess.run(
        [sys.executable, "-c", FORK + fork, str(path)], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
