"""``lockstep launch``: torchrun's flags, ``--``, and a command of ours for the ranks that torchrun starts."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Sequence

from launch.cli.args import UsageError, nearest
from launch.cli.commands import bench, generate, run_batch, serve
from launch.cli.output import write_line

HELP = """usage: lockstep launch [torchrun's flags] -- COMMAND ...

Start the ranks as torchrun does and run COMMAND (generate, serve, run-batch, bench) on them.
Every flag of torchrun is taken:
  --nproc-per-node N      processes on each node: tensor-parallel ranks in all = nodes x N
  --nnodes N              number of nodes (default: 1); run the same command on each
  --node-rank N           which node this is, from 0
  --master-addr HOST      address of node 0
  --master-port PORT      its port
  --rdzv-backend, --rdzv-endpoint, --rdzv-id, --max-restarts, --log-dir, ...: see torchrun --help

For example, two ranks on this machine:
  lockstep launch --nproc-per-node 2 -- generate demo --tensor-parallel-size 2 --prompt Hello"""

_CHECKS: dict[str, Callable[[Sequence[str]], object]] = {
    "generate": generate.check,
    "serve": serve.check,
    "run-batch": run_batch.check,
    "bench": bench.check,
}


def run(argv: Sequence[str]) -> int:
    """Start the ranks and give the command's exit code. Raises :class:`~runtime.common.errors.LockstepError`."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    flags, command = words[:split], words[split + 1 :]
    if "--help" in flags or "-h" in flags:
        write_line(HELP)
        return 0
    if not command:
        raise UsageError("a command is missing: lockstep launch [torchrun's flags] -- generate MODEL ...")
    if command[0] not in _CHECKS:
        raise UsageError(
            f"{command[0]!r} cannot be launched; allowed: {', '.join(_CHECKS)}{nearest(command[0], _CHECKS)}"
        )
    # A mistake in it should be told once and at once, not by every rank after torchrun has started them.
    if "--help" not in command and "-h" not in command:
        _CHECKS[command[0]](command[1:])
    arguments = torchrun_arguments(flags)

    from launch.torchrun_wrapper import launch

    return launch(arguments, command)


def torchrun_arguments(flags: Sequence[str]) -> argparse.Namespace:
    """What torchrun's own parser makes of ``flags``. Raises :class:`UsageError` with its complaint in one line."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            # The parser ends with a script and its arguments; launch.spmd fills in its own.
            arguments, unknown = parser.parse_known_args([*flags, "launch.spmd"])
    except SystemExit:
        complaint = said.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise UsageError(f"{complaint or 'wrong flags for torchrun'} (see lockstep launch --help)") from None
    if arguments.training_script != "launch.spmd" or unknown:
        wrong = unknown[0] if unknown else arguments.training_script
        raise UsageError(f"{wrong!r} is no flag of torchrun; the command comes after -- (see lockstep launch --help)")
    return arguments
