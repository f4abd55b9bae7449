"""``lockstep bench``: the arguments of the measurements in ``benchmarks/``, and their results as lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from launch.args import Gather, Parser, UsageError, add_engine_flags, add_model, nearest, read_settings, whole_numbers
from launch.output import write_json, write_line

HELP = """usage: lockstep bench {latency,startup,collectives,ops} ...

Measure on this machine:
  latency      tokens per second of prefill and decode, for a fixed batch
  startup      seconds of every start-up stage
  collectives  all-reduce between ranks, by size
  ops          the call of an op, by how it is registered; on a GPU every kernel against what the card could do

lockstep bench latency --help tells more, and so for the others."""

Rows = Iterable[dict[str, Any]]
Run = Callable[[], Rows]


def run(argv: Sequence[str]) -> int:
    """Measure and print. Raises :class:`~runtime.errors.LockstepError`."""
    if argv and argv[0] in ("-h", "--help"):
        write_line(HELP)
        return 0
    measure, as_json = check(argv)
    for row in measure():
        if as_json:
            write_json(row)
        else:
            write_line("\n".join(f"{name:<24} {_readable(value)}" for name, value in row.items()) + "\n")
    return 0


def check(argv: Sequence[str]) -> tuple[Run, bool]:
    """What to run, and whether its rows are wanted as JSON. Starts nothing. Raises :class:`UsageError`."""
    if not argv:
        raise UsageError(f"what to measure is missing: one of {', '.join(_BENCHES)} (see lockstep bench --help)")
    if argv[0] not in _BENCHES:
        raise UsageError(f"no bench {argv[0]!r}; there are {', '.join(_BENCHES)}{nearest(argv[0], _BENCHES)}")
    return _BENCHES[argv[0]](argv[1:])


def _latency(argv: Sequence[str]) -> tuple[Run, bool]:
    parser = Parser(
        "lockstep bench latency",
        "MODEL [--batch N ...] [--prompt-tokens N] [--new-tokens N] [--json] [flags]",
        "Tokens per second for a fixed batch: one line for each --batch.",
    )
    add_model(parser)
    parser.add_argument(
        "--batch", type=whole_numbers, nargs="+", action=Gather, metavar="N", help="sequences at once (default: 1)"
    )
    parser.add_argument(
        "--prompt-tokens", type=_positive, default=128, metavar="N", help="prompt length (default: 128)"
    )
    parser.add_argument("--new-tokens", type=_positive, default=128, metavar="N", help="tokens to make (default: 128)")
    _add_json(parser)
    add_engine_flags(parser)
    arguments = parser.parse(argv)
    settings = read_settings(arguments, parser, sampling=False)
    batches: tuple[int, ...] = arguments.batch or (1,)
    if min(batches) < 1:
        parser.error(f"--batch {min(batches)}: a batch has at least one sequence")

    def measure() -> Rows:
        from benchmarks.latency import bench_latency

        return bench_latency(
            settings.model,
            settings.engine,
            batches=batches,
            prompt_tokens=arguments.prompt_tokens,
            new_tokens=arguments.new_tokens,
        )

    return measure, arguments.json


def _startup(argv: Sequence[str]) -> tuple[Run, bool]:
    parser = Parser(
        "lockstep bench startup",
        "MODEL [--json] [flags]",
        "Seconds of every start-up stage of one start, and what the compile cache gave. Run twice: cold, then warm.",
    )
    add_model(parser)
    _add_json(parser)
    add_engine_flags(parser)
    arguments = parser.parse(argv)
    settings = read_settings(arguments, parser, sampling=False)

    def measure() -> Rows:
        from benchmarks.startup import bench_startup

        return [bench_startup(settings.model, settings.engine)]

    return measure, arguments.json


def _collectives(argv: Sequence[str]) -> tuple[Run, bool]:
    parser = Parser(
        "lockstep bench collectives",
        "[--tensor-parallel-size N] [--sizes BYTES ...] [--json]",
        "Microseconds of one all-reduce on CPU between the ranks of this host, by implementation and size.",
    )
    parser.add_argument(
        "-tp", "--tensor-parallel-size", type=_positive, default=2, metavar="N", help="number of ranks (default: 2)"
    )
    parser.add_argument(
        "--sizes", type=whole_numbers, nargs="+", action=Gather, metavar="BYTES", help="of the messages, in bytes"
    )
    _add_json(parser)
    arguments = parser.parse(argv)
    if arguments.tensor_parallel_size < 2:
        parser.error("--tensor-parallel-size 1: a collective needs 2 ranks or more")
    sizes: tuple[int, ...] = arguments.sizes or ()
    if any(size < 2 or size % 2 for size in sizes):
        parser.error(f"--sizes {sizes}: messages are of bf16, so an even number of bytes from 2 up")

    def measure() -> Rows:
        from benchmarks.collectives import SIZES, bench_collectives

        return bench_collectives(arguments.tensor_parallel_size, sizes or SIZES)

    return measure, arguments.json


def _ops(argv: Sequence[str]) -> tuple[Run, bool]:
    parser = Parser(
        "lockstep bench ops", "[--json]", "Microseconds of an op's call; on a GPU also every kernel's share."
    )
    _add_json(parser)
    arguments = parser.parse(argv)

    def measure() -> Rows:
        from benchmarks.ops import bench_ops

        return bench_ops()

    return measure, arguments.json


_BENCHES: dict[str, Callable[[Sequence[str]], tuple[Run, bool]]] = {
    "latency": _latency,
    "startup": _startup,
    "collectives": _collectives,
    "ops": _ops,
}


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _readable(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
