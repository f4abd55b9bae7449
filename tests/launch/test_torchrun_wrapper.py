"""``lockstep launch``: signals for the driver. Whole commands under it are in ``test_spmd.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from launch.torchrun_wrapper import DriverEnded, find_driver, signals_to_driver

DRIVER = """if True:
    import signal, sys
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    print("ready", flush=True)
    signal.pause()
"""


def test_a_signal_before_there_is_a_driver_ends_lockstep_launch():
    with signals_to_driver(), pytest.raises(DriverEnded) as end:
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM


def test_a_signal_is_forwarded_to_the_driver_whose_code_is_kept():
    commands = {rank: {**os.environ, "RANK": rank} for rank in ("1", "0")}
    started = [
        subprocess.Popen([sys.executable, "-c", DRIVER], env=environment, stdout=subprocess.PIPE)
        for environment in commands.values()
    ]
    try:
        for process in started:
            assert process.stdout.readline() == b"ready\n"
        assert find_driver() == started[1].pid
        with signals_to_driver(), pytest.raises(DriverEnded) as end:
            signal.raise_signal(signal.SIGTERM)
        assert end.value.code == 5
        assert find_driver() is None and started[0].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()
