"""Entry point of a rank's process: receives the RankSpec, sets the environment, runs the worker.

Every launcher starts this module: ``python -m launch.rank_main --rank R --fd N`` inherits one end of a socket pair,
whose first frame is the :class:`RankSpec`. If a Ray actor or a torchrun process is the parent, the spec contains the
driver's address, and the pair carries nothing else. torch reads thread counts from the environment when it is
imported, so ``workers.worker`` is imported after the environment is set.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

from launch.environment import prepare_rank
from launch.rank_spec import RankSpec, host_identity
from launch.standard_error import protect_stderr
from runtime.common.channel import Channel, connect
from runtime.common.config import EngineConfig
from runtime.common.log import configure_logging
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import pack
from runtime.executor.run_dir import cleanup_run_dir

PR_SET_PDEATHSIG = 1
DRIVER_GONE_EXIT_CODE = 70
"""The exit code of a rank whose driver has died; ``ps`` and logs show it."""


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends; exits at once if the parent has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(DRIVER_GONE_EXIT_CODE)


def watch_driver(channel: Channel, run_dir: str) -> None:
    """Start a thread that exits the process when the driver's end of the channel closes, even during a step.

    The thread sleeps in poll(2) for POLLRDHUP only; it reads no frames and does not run during steps. A closed channel
    means that the driver has died or has ended this group; an orderly shutdown exits before.
    """

    def wait_for_hangup() -> None:
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLRDHUP)
        poller.poll()
        cleanup_run_dir(run_dir)  # The driver can no longer do it.
        os._exit(DRIVER_GONE_EXIT_CODE)

    threading.Thread(target=wait_for_hangup, name="driver-watch", daemon=True).start()


def run_rank(spec: RankSpec, channel: Channel) -> None:
    """Run the worker of a rank until the driver shuts it down."""
    config = EngineConfig.from_dict(spec.config)
    threads = spec.threads or max(1, len(os.sched_getaffinity(0)) // spec.ranks_on_host)
    prepare_rank(threads=threads, device=config.device)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C, torchrun and service managers signal whole process groups. The driver drains and then ends the ranks.
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # The driver requests stacks after a timeout.
    configure_logging(config.log_level, rank=spec.rank)
    watch_driver(channel, config.run_dir)
    channel.send(pack(["hello", spec.rank, process_facts()]))

    from workers.worker import RankInfo, Worker  # Imports torch.

    info = RankInfo(spec.rank, spec.size, spec.local_rank, spec.ranks_on_host, threads)
    Worker(info, config, ModelConfig.from_dict(spec.model), channel).serve()


def process_facts() -> dict[str, Any]:
    """The facts in a rank's hello message."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "host_id": host_identity()}


def main() -> None:
    """Run the command line of ``python -m launch.rank_main``."""
    parser = argparse.ArgumentParser(description="one tensor-parallel rank; started by Lockstep, not by hand")
    parser.add_argument("--rank", type=int, required=True, help="shown in process lists; the spec decides")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket with the spec")
    parser.add_argument("--parent", type=int, default=0, help="die with this process; 0: do not")
    arguments = parser.parse_args()
    protect_stderr()
    if arguments.parent:
        die_with_parent(arguments.parent)
    inherited = Channel(socket.socket(fileno=arguments.fd))
    spec = RankSpec.unpack(inherited.recv(timeout=60.0))
    channel = inherited
    if spec.address:
        channel = connect(spec.address, spec.secret, timeout=60.0)
        channel.send(spec.rank.to_bytes(2, "big"))
    run_rank(spec, channel)
    # Skip interpreter teardown, which can deadlock on locks that threads of torch and gloo hold.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
