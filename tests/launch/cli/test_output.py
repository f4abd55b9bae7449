"""A stdout or stderr that cannot be written: unwritable results are an error, unwritable log lines are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import tiny_checkpoint

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))


def generate(tp: int = 1) -> list[str]:
    argv = [LOCKSTEP, "generate", str(tiny_checkpoint()), "--prompt", "Hi", "--json", "--max-tokens", "3"]
    return [*argv, "--enforce-eager", "-tp", str(tp), "--distributed-executor-backend", "local"]


@pytest.mark.parametrize("how", ["full", "closed"])
@pytest.mark.timeout(120)
def test_an_unwritable_log_does_not_fail_the_command(how: str) -> None:
    """The ranks write to it too: debug lines come from every rank in every stage."""
    environment = {**os.environ, "LOCKSTEP_LOG_LEVEL": "DEBUG"}
    if how == "full":
        with open("/dev/full", "w") as log:
            done = subprocess.run(generate(2), stdout=subprocess.PIPE, stderr=log, env=environment, timeout=100)
    else:
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(generate(2), stdout=subprocess.PIPE, stderr=write, env=environment, timeout=100)
        os.close(write)
    assert done.returncode == 0
    assert done.stdout.count(b'"finish_reason"') == 1


@pytest.mark.timeout(120)
def test_results_that_cannot_be_written_are_an_error_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(generate(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "lockstep generate: the results cannot be written to stdout: No space left on device; make room there"
    )
    assert "Traceback" not in done.stderr


def test_lost_log_bytes_are_reported_after_the_next_successful_write(tmp_path: Path) -> None:
    """stderr is replaced by /dev/full for two writes."""
    script = """if True:
        import os, sys
        from launch.standard_error import protect_stderr
        protect_stderr()
        log, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
        print("one", file=sys.stderr)
        os.dup2(full, 2)
        print("two!", file=sys.stderr)
        sys.stderr.write("three\\n")
        sys.stderr.flush()
        os.dup2(log, 2)
        print("four \\udcff", file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "one",
        "lockstep: 11 bytes of this log could not be written (No space left on device)",
        "four \\udcff",
    ]
