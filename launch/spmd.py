"""Entry point under torchrun: ``torchrun --nproc-per-node 2 -m launch.spmd generate MODEL ...``.

Process 0 runs the command and is the driver. The others are agents: each runs a rank for the driver's
:class:`~launch.torchrun_launcher.TorchrunLauncher`, engine after engine, until the driver exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import NoReturn

from launch.cli.main import main as run_command
from launch.environment import TorchrunRanks, torchrun_ranks
from launch.local import spawn_rank
from launch.rank_main import die_with_parent
from launch.rank_spec import RankSpec, host_identity
from launch.standard_error import protect_stderr
from launch.torchrun_rendezvous import DRIVER, EXIT, Rendezvous, goodbye_key, open_rendezvous
from runtime.common.channel import Channel, ChannelClosedError, connect, wait_readable
from runtime.common.protocol import pack, unpack

GOODBYE_SECONDS = 5.0
"""How long the exiting driver waits for its agents, which may have just started."""

ENGINE_SECONDS = 7 * 86400.0
"""How long an agent waits for the driver's next engine."""

CONNECT_SECONDS = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the driver's command or an agent, depending on torchrun's rank; returns the exit code."""
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
                rendezvous.wait(goodbye_key(rank), max(0.0, deadline - time.monotonic()))
        rendezvous.remove()


class DeferredSigterm:
    """Handles SIGTERM in an agent: the process exits, but not before :meth:`defer`'s block has ended.

    On one host torchrun signals all of its processes, including the driver, which may have requests to finish on the
    agent's rank.

    Args:
        on_exit: called before the process exits.
    """

    def __init__(self, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._deferring = False
        self._received = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    @contextlib.contextmanager
    def defer(self) -> Generator[None]:
        """Defer SIGTERM to the end of the block."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            if self._received:
                self._exit()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if not self._deferring:
            self._exit()

    def _exit(self) -> NoReturn:
        self._on_exit()
        sys.exit(128 + signal.SIGTERM)


def serve_as_agent(ranks: TorchrunRanks, rendezvous: Rendezvous) -> int:
    """Run a rank for each of the driver's engines, until the driver publishes EXIT; returns the exit code."""

    def say_goodbye() -> None:
        with contextlib.suppress(OSError):  # The driver has removed the folder.
            rendezvous.publish(goodbye_key(ranks.rank), b"1")

    defer = DeferredSigterm(say_goodbye).defer if ranks.one_host else contextlib.nullcontext
    seen = b""
    while True:
        seen = rendezvous.wait(DRIVER, ENGINE_SECONDS, other_than=seen)
        if seen == EXIT:
            say_goodbye()
            return 0
        _, address, secret = unpack(seen)
        try:
            control = connect(address, secret, CONNECT_SECONDS)
        except ConnectionError:
            continue  # That engine has ended; the driver publishes another value.
        facts = {"host": socket.gethostname(), "host_id": host_identity()}
        with defer():
            with contextlib.suppress(ChannelClosedError):
                control.send(pack(["agent", ranks.rank, facts]))
                run_rank_spec(control)
            control.close()


def run_rank_spec(control: Channel) -> None:
    """Run the rank whose spec the driver sends, forward signals to it, and report its end.

    Raises:
        ChannelClosedError: the driver closed the control channel. The rank has been killed.
    """
    process, pair = spawn_rank(RankSpec.unpack(control.recv()))
    pair.close()
    try:
        while process.returncode() is None:
            if control in wait_readable([control, process], None):
                _, number = unpack(control.recv())
                process.signal(int(number))
        control.send(pack(["ended", process.returncode()]))
        control.recv()  # Returns when the driver closes its end.
    finally:
        process.kill()
        process.wait(None)
        process.close()


if __name__ == "__main__":
    sys.exit(main())
