"""Entry point under torchrun: ``torchrun --nproc-per-node 2 -m launch.spmd generate MODEL ...``.

Process 0 carries out the command and is the driver; the others are agents of its :class:`TorchrunLauncher`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

from launch.cli.main import main as run_command
from launch.environment import torchrun_ranks
from launch.rank_main import die_with_parent
from launch.standard_error import protect_stderr
from launch.torchrun_launcher import DRIVER, EXIT, GOODBYE_SECONDS, open_rendezvous, serve_as_agent


def main(argv: Sequence[str] | None = None) -> int:
    """What every process of ``torchrun -m launch.spmd COMMAND ...`` does; gives its exit code."""
    protect_stderr()
    ranks = torchrun_ranks()
    if ranks is None:
        print(
            "launch.spmd runs under torchrun; start it with `torchrun --nproc-per-node N -m launch.spmd COMMAND ...`, "
            "or run `lockstep COMMAND ...` for the other launchers",
            file=sys.stderr,
        )
        return 2
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN if ranks.rank else signal.default_int_handler)
    rendezvous = open_rendezvous(ranks)
    if ranks.rank != 0:
        return serve_as_agent(ranks, rendezvous)
    try:
        return run_command(sys.argv[1:] if argv is None else argv)
    finally:
        rendezvous.publish(DRIVER, EXIT)
        deadline = time.monotonic() + GOODBYE_SECONDS
        for rank in range(1, ranks.world_size):
            with contextlib.suppress(TimeoutError):
                rendezvous.wait(f"bye-{rank}", max(0.0, deadline - time.monotonic()))
        rendezvous.remove()


if __name__ == "__main__":
    sys.exit(main())
