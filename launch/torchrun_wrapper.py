"""``lockstep launch``: torchrun's own agent, in this process, for one of our commands.

What it does differently from ``torchrun``: on one node the rendezvous is a file and listens nowhere, the exit code is
the command's own, and SIGTERM and Ctrl-C reach the command as if it ran alone, so that ``serve`` can drain. The
processes it starts are ``spmd.py``'s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Generator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from launch.environment import disable_torchrun_store, prepare_torchrun
from runtime.common.errors import shell_code
from runtime.executor.run_dir import PREFIX

if TYPE_CHECKING:
    import argparse


def launch(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Run ``launch.spmd COMMAND`` under torchrun's own agent in this process.

    Args:
        arguments: of torchrun's own parser (``torch.distributed.run.get_args_parser``).
        command: a Lockstep command and its arguments.

    Returns:
        the exit code of the command itself, where torchrun would say 1: 128 + N for signal N.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    arguments.module, arguments.training_script = True, "launch.spmd"
    arguments.training_script_args = list(command)
    arguments.no_python = arguments.run_path = False
    prepare_torchrun()
    config, program, program_arguments = config_from_args(arguments)
    config.signals_to_handle = "SIGHUP,SIGQUIT"  # The others are handled here, and these as torchrun does.
    with contextlib.ExitStack() as stack:
        if config.max_nodes == 1 and not arguments.rdzv_endpoint:
            # A rendezvous over a file: torchrun's default opens a TCP store on every interface, at a fixed port.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-launch-"))
            disable_torchrun_store()
            config.rdzv_backend, config.rdzv_endpoint = "c10d", os.path.join(folder, "rendezvous")
            config.rdzv_configs = {"store_type": "file"}
            config.run_id = os.path.basename(folder)
        stack.enter_context(signals_to_driver())
        try:
            elastic_launch(config, program)(*program_arguments)
        except ChildFailedError as error:
            failed = error.failures
            return shell_code(failed[min(failed)].exitcode)
        except DriverEnded as end:
            return end.code
        except SignalException as end:
            return 128 + end.sigval
    return 0


class DriverEnded(BaseException):
    """A signal has ended the driver; torchrun must neither count that as a failure nor start it again."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the driver has ended with code {code}")
        self.code = code


@contextlib.contextmanager
def signals_to_driver() -> Generator[None]:
    """SIGTERM and SIGINT go to the driver, if it is on this node, and :class:`DriverEnded` is raised at its end.

    torchrun would tell every process, give them a time of its own, and forget the exit code.
    """
    waiting = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        nonlocal waiting
        driver = find_driver()
        if driver is None:
            raise DriverEnded(128 + number)  # Not started yet, or on another node: torchrun ends what runs here.
        os.kill(driver, number)
        if waiting:
            return  # The second signal, which interrupts the wait below: that goes on.
        waiting = True
        # Not reaped: torchrun holds the process, too.
        end = os.waitid(os.P_PID, driver, os.WEXITED | os.WNOWAIT)
        code = 0 if end is None else end.si_status
        raise DriverEnded(code if end is None or end.si_code == os.CLD_EXITED else shell_code(-code))

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_driver() -> int | None:
    """The process id of the child that torchrun has made rank 0; None if there is none."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # It has just ended.
            if child.environ().get("RANK") == "0" and child.status() != psutil.STATUS_ZOMBIE:
                return child.pid
    return None
