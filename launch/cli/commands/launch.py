"""``lockstep launch``: torchrun's flags, then ``--``, then the Lockstep command that every rank runs."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Sequence

from launch.cli.args import UsageError, suggest
from launch.cli.commands import bench, generate, run_batch, serve
from launch.cli.output import write_line

HELP = """usage: lockstep launch [torchrun's flags] -- COMMAND ...

Start the ranks as torchrun does and run COMMAND (generate, serve, run-batch, bench) on them.
Every flag of torchrun is accepted:
  --nproc-per-node N      processes on each node: tensor-parallel size = nodes x N
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
    """Start the ranks and return the command's exit code. Raises :class:`~runtime.common.errors.LockstepError`."""
    args = list(argv)
    split = args.index("--") if "--" in args else len(args)
    flags, command = args[:split], args[split + 1 :]
    if "--help" in flags or "-h" in flags:
        write_line(HELP)
        return 0
    if not command:
        raise UsageError("a command is missing: lockstep launch [torchrun's flags] -- generate MODEL ...")
    if command[0] not in _CHECKS:
        raise UsageError(
            f"{command[0]!r} cannot be launched; allowed: {', '.join(_CHECKS)}{suggest(command[0], _CHECKS)}"
        )
    # Check the command here: otherwise every rank would report the same mistake after torchrun started it.
    if "--help" not in command and "-h" not in command:
        _CHECKS[command[0]](command[1:])
    arguments = torchrun_arguments(flags)

    from launch.torchrun_wrapper import launch

    return launch(arguments, command)


def torchrun_arguments(flags: Sequence[str]) -> argparse.Namespace:
    """``flags`` parsed by torchrun's own parser. Raises :class:`UsageError` with the parser's message in one line."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            # torchrun requires a script; launch.spmd stands in for it.
            arguments, unknown = parser.parse_known_args([*flags, "launch.spmd"])
    except SystemExit:
        message = stderr.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise UsageError(f"{message or 'wrong flags for torchrun'} (see lockstep launch --help)") from None
    if arguments.training_script != "launch.spmd" or unknown:
        unexpected = unknown[0] if unknown else arguments.training_script
        raise UsageError(
            f"{unexpected!r} is not a flag of torchrun; the command comes after -- (see lockstep launch --help)"
        )
    return arguments
