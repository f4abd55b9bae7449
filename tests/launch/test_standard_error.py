"""The standard error stream whose write errors are counted."""

from __future__ import annotations

import os
import subprocess
import sys

from launch.standard_error import _LossyFile


def test_dropped_bytes_are_reported_by_the_next_write():
    reading, writing = os.pipe()
    file = _LossyFile(writing)
    os.close(reading)
    assert [file.write(b"lost"), file.write(b"lost, too")] == [4, 9]
    reading, other = os.pipe()
    os.dup2(other, writing)
    assert file.write(b"kept\n") == 5
    said = os.read(reading, 1000).decode()
    assert said == "lockstep: 13 bytes of this log could not be written (Broken pipe)\nkept\n"
    for descriptor in (reading, other, writing):
        os.close(descriptor)


def test_a_closed_pipe_does_not_end_the_process():
    script = """if True:
        import sys
        from launch.standard_error import protect_stderr
        protect_stderr()
        sys.stdin.readline()
        print("lost", file=sys.stderr)
        print("done")
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as process:
        process.stderr.close()
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.read() == "done\n"
    assert process.returncode == 0
