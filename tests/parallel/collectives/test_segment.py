"""The shared-memory segment: its name, its size, the rendezvous, and the removal of stale segments."""

from __future__ import annotations

import fcntl
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallel.collectives.base import CollectiveError
from parallel.collectives.segment import (
    Vote,
    attach_segment,
    create_segment,
    remove_stale_segments,
    segment_bytes,
    segment_name,
)

SLOT = 4096


@pytest.fixture
def dead_pid() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait(timeout=30)
    return process.pid


@pytest.mark.parametrize("run_id", ["123-abc", "lockstep-123-abc"])
def test_the_name_carries_pid_run_and_group(run_id: str) -> None:
    assert segment_name(run_id, "tp/0") == "lockstep-123-abc-tp_0"


@pytest.mark.parametrize("run_id", ["", "abc", "123", "lockstep-abc", "../123-abc"])
def test_a_run_id_without_a_pid_is_refused(run_id: str) -> None:
    with pytest.raises(ValueError, match="has to be '<pid>-<anything>'"):
        segment_name(run_id, "tp")


def test_rendezvous_in_any_order_removes_the_name(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def join(rank: int) -> tuple[Vote, ...]:
        if rank == 0:
            segment = create_segment("lockstep-1-a", 3, SLOT, folder)
        else:
            segment = attach_segment("lockstep-1-a", 3, SLOT, 20.0, folder)
        votes = segment.vote(rank, Vote.NO_LIBRARY if rank == 2 else Vote.READY, 20.0)
        segment.close()
        segment.close()
        return votes

    with ThreadPoolExecutor(3) as threads:
        votes = list(threads.map(join, [2, 1, 0]))
    assert votes == [(Vote.READY, Vote.READY, Vote.NO_LIBRARY)] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_run_id_used_twice_at_once_is_refused(tmp_path: Path) -> None:
    segment = create_segment("lockstep-1-a", 2, SLOT, str(tmp_path))
    with pytest.raises(CollectiveError, match="every start of a group needs its own run_id"):
        create_segment("lockstep-1-a", 2, SLOT, str(tmp_path))
    segment.close()
    assert list(tmp_path.iterdir()) == []


def test_a_segment_for_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    segment = create_segment("lockstep-1-a", 2, SLOT, str(tmp_path))
    with pytest.raises(CollectiveError, match="not one for 3 ranks"):
        attach_segment("lockstep-1-a", 3, SLOT, 1.0, str(tmp_path))
    segment.close()


def test_too_little_space_names_needed_and_free_bytes(tmp_path: Path) -> None:
    huge = 2**44
    with pytest.raises(CollectiveError) as caught:
        create_segment("lockstep-1-a", 2, huge, str(tmp_path))
    assert f"need {segment_bytes(2, huge)}" in str(caught.value)
    assert "bytes left" in str(caught.value) and "--shm-size" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_only_names_of_dead_pids_are_removed(tmp_path: Path, dead_pid: int) -> None:
    stale = [f"lockstep-{dead_pid}-a-tp", f"lockstep-{dead_pid}-a-tp.new"]
    kept = [f"lockstep-{os.getpid()}-a-tp", "lockstep-1-a-tp", f"other-{dead_pid}-a", "lockstep-nopid-a"]
    for name in stale + kept:
        (tmp_path / name).touch()
    assert remove_stale_segments(str(tmp_path)) == stale
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    assert remove_stale_segments(str(tmp_path)) == []


def test_a_locked_segment_is_not_removed(tmp_path: Path, dead_pid: int) -> None:
    # Its pid may be alive in another container that shares /dev/shm.
    path = tmp_path / f"lockstep-{dead_pid}-a-tp"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert remove_stale_segments(str(tmp_path)) == []
    assert remove_stale_segments(str(tmp_path)) == [path.name]


def test_a_missing_folder_has_no_stale_segments(tmp_path: Path) -> None:
    assert remove_stale_segments(str(tmp_path / "none")) == []
