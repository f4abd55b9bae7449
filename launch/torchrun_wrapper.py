"""``lockstep launch``: runs torchrun's agent in this process for a Lockstep command.

Unlike ``torchrun``, the rendezvous on one node is a file instead of a TCP store, the exit code is the command's own,
and SIGTERM and SIGINT are forwarded to the command, so that ``serve`` drains. The processes run ``spmd.py``.
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
    """Run ``launch.spmd COMMAND`` under torchrun's agent in this process.

    Args:
        arguments: of torchrun's own parser (``torch.distributed.run.get_args_parser``).
        command: a Lockstep command and its arguments.

    Returns:
        the command's exit code (torchrun itself would return 1); 128 + N for signal N.
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
    config.signals_to_handle = "SIGHUP,SIGQUIT"  # SIGTERM and SIGINT are handled here.
    with contextlib.ExitStack() as stack:
        if config.max_nodes == 1 and not arguments.rdzv_endpoint:
            # torchrun's default opens a TCP store on every interface, at a fixed port.
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
    """A signal has ended the driver, which torchrun must neither count as a failure nor restart."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the driver has ended with code {code}")
        self.code = code


@contextlib.contextmanager
def signals_to_driver() -> Generator[None]:
    """Forward SIGTERM and SIGINT to the driver, if it runs on this node; raise :class:`DriverEnded` when it ends.

    torchrun would signal every process, apply a time limit of its own, and lose the exit code.
    """
    waiting = False

    def forward(number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        nonlocal waiting
        driver = find_driver()
        if driver is None:
            raise DriverEnded(128 + number)  # No driver yet, or on another node: torchrun ends the processes.
        os.kill(driver, number)
        if waiting:
            return  # A second signal interrupts the waitid below, which then continues.
        waiting = True
        # WNOWAIT: torchrun reaps the process.
        end = os.waitid(os.P_PID, driver, os.WEXITED | os.WNOWAIT)
        code = 0 if end is None else end.si_status
        raise DriverEnded(code if end is None or end.si_code == os.CLD_EXITED else shell_code(-code))

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_driver() -> int | None:
    """The process id of the child that is torchrun's rank 0; None if there is none."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # The child has ended.
            if child.environ().get("RANK") == "0" and child.status() != psutil.STATUS_ZOMBIE:
                return child.pid
    return None
