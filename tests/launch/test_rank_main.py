"""The process of a rank: it ends with its parent and with its driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch.rank_main import DRIVER_GONE_EXIT_CODE
from runtime.common.channel import channel_pair

WATCH = """if True:
    import signal, socket, sys
    from launch.rank_main import watch_driver
    from runtime.common.channel import Channel
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    watch_driver(channel, sys.argv[2])
    channel.send(b"watching")
    signal.pause()
"""


def test_a_rank_whose_parent_has_ended_exits():
    script = "from launch.rank_main import die_with_parent; die_with_parent(1 << 22)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == DRIVER_GONE_EXIT_CODE


def test_a_rank_whose_driver_has_ended_cleans_up_and_exits(tmp_path: Path):
    folder = tmp_path / "lockstep-1-x"
    folder.mkdir()
    channel, theirs = channel_pair()
    command = [sys.executable, "-c", WATCH, str(theirs.fileno()), str(folder)]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        assert channel.recv(60.0) == b"watching"
        assert folder.exists() and process.poll() is None
        channel.close()
        assert process.wait(60) == DRIVER_GONE_EXIT_CODE
    assert not folder.exists()
