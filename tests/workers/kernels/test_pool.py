"""The threads that C kernels share: every part once, no waiting for who does not come, no spinning when idle."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.toolchain import load_library
from workers.kernels.bindings import POOL

PART = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)

FORK = """
import ctypes, os, sys
pool = ctypes.CDLL(sys.argv[1])
part = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)
def run():
    done = []
    pool.lockstep_parallel(part(lambda work, number: done.append(number)), None, ctypes.c_long(50))
    assert sorted(done) == list(range(50)), done
assert pool.lockstep_pool_threads(3) == 3
run()
child = os.fork()
if not child:
    run()
    assert pool.lockstep_pool_threads(2) == 2
    run()
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.fixture(scope="module")
def library_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("native"))


@pytest.fixture
def pool(library_dir: str) -> Iterator[ctypes.CDLL]:
    library = load_library(POOL, library_dir)
    yield library
    library.lockstep_pool_threads(1)


def run(pool: ctypes.CDLL, parts: int) -> list[int]:
    """The parts in the order in which they were finished."""
    done: list[int] = []
    pool.lockstep_parallel(PART(lambda _, part: done.append(part)), None, ctypes.c_long(parts))
    return done


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_part_is_done_once(pool: ctypes.CDLL, threads: int) -> None:
    assert pool.lockstep_pool_threads(threads) == threads
    for parts in [0, 1, 2, 3, 100] * 20:
        assert sorted(run(pool, parts)) == list(range(parts))


def test_the_number_of_threads_can_change(pool: ctypes.CDLL) -> None:
    for threads in (3, 1, 4, 2):
        assert pool.lockstep_pool_threads(threads) == threads
        used: set[int] = set()
        meet = threading.Barrier(threads, timeout=30)

        def part(_: int, number: int, meet: threading.Barrier = meet, used: set[int] = used) -> None:
            meet.wait()  # passed only if so many threads are in a part at the same time
            used.add(threading.get_ident())

        pool.lockstep_parallel(PART(part), None, ctypes.c_long(threads))
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


def test_nothing_spins_while_there_is_no_work(pool: ctypes.CDLL) -> None:
    pool.lockstep_pool_threads(4)
    assert len(run(pool, 100)) == 100
    deadline = time.monotonic() + 30
    busy = 1.0
    while busy > 0.1:
        assert time.monotonic() < deadline, f"the idle process uses {busy:.0%} of a core"
        cpu, wall = time.process_time(), time.monotonic()
        time.sleep(0.05)
        busy = (time.process_time() - cpu) / (time.monotonic() - wall)
    assert sorted(run(pool, 100)) == list(range(100))


def test_a_forked_child_works_without_the_helpers(pool: ctypes.CDLL, library_dir: str) -> None:
    path = next(Path(library_dir).glob("pool-*.so"))
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(path)], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
