"""The process of one rank: receives its spec, prepares its environment, then becomes a worker.

Every launcher starts this same module. ``python -m launch.rank_main --rank R --fd N`` inherits one end of a socket
pair; its first frame is the :class:`RankSpec`. Where the driver is not the parent (a Ray actor or torchrun started
us), the spec names the driver's address and the pair is only used to receive them. Thread counts must be in the
environment before torch is imported, so torch is imported here, late, through ``workers.worker``.
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
"""The exit code of a rank whose driver vanished; nobody is left to read it, but ``ps`` and logs show it."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, also if that happened already (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(DRIVER_GONE_EXIT_CODE)


def watch_driver(channel: Channel, run_dir: str) -> None:
    """End this process at once when the driver's end of the channel closes, even in the middle of a step.

    The thread sleeps in poll(2) for POLLRDHUP alone, so it neither reads frames nor costs a step anything. A closed
    channel means that the driver is dead or has given this group up; an orderly shutdown has answered before it.
    """

    def wait_for_hangup() -> None:
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLRDHUP)
        poller.poll()
        cleanup_run_dir(run_dir)  # The driver was to do it.
        os._exit(DRIVER_GONE_EXIT_CODE)

    threading.Thread(target=wait_for_hangup, name="driver-watch", daemon=True).start()


def run_rank(spec: RankSpec, channel: Channel) -> None:
    """Be rank ``spec.rank`` until the driver is done with it. Returns when it is."""
    config = EngineConfig.from_dict(spec.config)
    threads = spec.threads or max(1, len(os.sched_getaffinity(0)) // spec.ranks_on_host)
    prepare_rank(threads=threads, device=config.device)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C, torchrun and service managers tell whole groups of processes. The driver drains, and ends the ranks.
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # The supervisor asks a hung group for its stacks.
    configure_logging(config.log_level, rank=spec.rank)
    watch_driver(channel, config.run_dir)
    channel.send(pack(["hello", spec.rank, process_facts()]))

    from workers.worker import RankInfo, Worker  # Imports torch: only after the environment is set.

    info = RankInfo(spec.rank, spec.size, spec.local_rank, spec.ranks_on_host, threads)
    Worker(info, config, ModelConfig.from_dict(spec.model), channel).serve()


def process_facts() -> dict[str, Any]:
    """What a rank tells about its process when it connects."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "host_id": host_identity()}


def main() -> None:
    """Entry point of ``python -m launch.rank_main``."""
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
    # Skip interpreter teardown: threads of torch and gloo may still hold locks, and there is nothing to save.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
