"""``lockstep bench``: the arguments of the measurements in ``benchmarks/``, and their results as lines."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.cli.args import (
    Gather,
    Parser,
    UsageError,
    add_engine_flags,
    add_model,
    engine_arguments,
    read_settings,
    suggest,
    whole_numbers,
)
from launch.cli.output import write_json, write_line
from launch.environment import read_environment

HELP = """usage: lockstep bench {latency,throughput,serve,startup,collectives,ops} ...

Measure on this machine:
  latency      tokens per second of prefill and decode, for a fixed batch
  throughput   requests and tokens per second of many mixed requests, offline
  serve        what clients of a server see, at given rates of requests
  startup      seconds of every start-up stage
  collectives  all-reduce between ranks, by size
  ops          the call of an op, by how it is registered; on a GPU every kernel against what the card could do

lockstep bench latency --help tells more, and so for the others."""

ANY_MODEL = "*"
"""Stands for MODEL where a running server is asked and none was named."""

Rows = Iterable[dict[str, Any]]
Run = Callable[[], Rows]


def run(argv: Sequence[str]) -> int:
    """Measure and print; 1 if requests of a load failed. Raises :class:`~runtime.common.errors.LockstepError`."""
    if argv and argv[0] in ("-h", "--help"):
        write_line(HELP)
        return 0
    measure, as_json = check(argv)
    failed = False
    rows = iter(measure())
    try:
        for row in rows:
            failed = failed or bool(row.get("errors"))
            if as_json:
                write_json(row)
            else:
                write_line("\n".join(f"{name:<24} {_readable(value)}" for name, value in row.items()) + "\n")
    finally:
        if isinstance(rows, Generator):  # It may hold an engine or a server; an error here must not leave it behind.
            rows.close()
    return 1 if failed else 0


def check(argv: Sequence[str]) -> tuple[Run, bool]:
    """What to run, and whether its rows are wanted as JSON. Starts nothing. Raises :class:`UsageError`."""
    if not argv:
        raise UsageError(f"what to measure is missing: one of {', '.join(_BENCHES)} (see lockstep bench --help)")
    if argv[0] not in _BENCHES:
        raise UsageError(f"no bench {argv[0]!r}; there are {', '.join(_BENCHES)}{suggest(argv[0], _BENCHES)}")
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


def _throughput(argv: Sequence[str]) -> tuple[Run, bool]:
    parser = Parser(
        "lockstep bench throughput",
        "MODEL [--num-prompts N] [--input-len LOW-HIGH] [--output-len LOW-HIGH] [--seed N] [--json] [flags]",
        "Many requests of mixed length and settings at once, offline: requests and tokens per second.",
    )
    add_model(parser)
    _add_work(parser)
    _add_json(parser)
    add_engine_flags(parser)
    arguments = parser.parse(argv)
    settings = read_settings(arguments, parser, sampling=False)

    def measure() -> Rows:
        from benchmarks.throughput import bench_throughput

        yield bench_throughput(
            settings.model,
            settings.engine,
            num_prompts=arguments.num_prompts,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            seed=settings.engine.get("seed", 0),
        )

    return measure, arguments.json


def _serve(argv: Sequence[str]) -> tuple[Run, bool]:
    parser = Parser(
        "lockstep bench serve",
        "[MODEL] [--base-url URL] [--request-rate R ...] [--num-prompts N] [--concurrency N] [--plot FILE] [flags]",
        "Stream requests from a server that is started for it, or from the one at --base-url: one line per rate.",
        "Arrivals are random, as of independent clients, and fixed by --seed like lengths and words. A request's clock "
        "begins when it is sent, so what waits for --concurrency does not count.",
    )
    add_model(parser)
    parser.add_argument("--base-url", metavar="URL", help="a running server; MODEL is then a name that it serves")
    parser.add_argument("--api-key", metavar="KEY", help="of that server (default: LOCKSTEP_API_KEY)")
    parser.add_argument(
        "--request-rate", type=_rate, nargs="+", metavar="R", default=[float("inf")],
        help="requests a second, or inf: all at once; one run for each (default: inf)",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=_positive, default=0, metavar="N", help="most requests at once (default: any number)"
    )
    _add_work(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw how the latencies are distributed into this PNG file")
    _add_json(parser)
    add_engine_flags(parser)
    arguments = parser.parse(argv)
    if arguments.base_url and not hasattr(arguments, "model"):
        arguments.model = ANY_MODEL
    settings = read_settings(arguments, parser, sampling=False)
    if arguments.base_url and (others := sorted(settings.engine.keys() - {"seed"})):
        parser.error(f"{others[0]} is a setting of a server's start; the one at --base-url runs already")
    if arguments.api_key and not arguments.base_url:
        parser.error("--api-key goes with --base-url; a server that is started for this needs none")
    _check_plot(parser, arguments.plot)

    def measure() -> Rows:
        from benchmarks.serve import Load, bench_serve

        load = Load(
            rates=tuple(arguments.request_rate),
            num_prompts=arguments.num_prompts,
            concurrency=arguments.concurrency,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            seed=settings.engine.get("seed", 0),
        )
        return bench_serve(
            "" if settings.model == ANY_MODEL else settings.model,
            engine_arguments(settings.engine),
            load,
            base_url=(arguments.base_url or "").rstrip("/"),
            api_key=arguments.api_key or read_environment().api_key or "",
            plot=arguments.plot or "",
        )

    return measure, arguments.json


def _check_plot(parser: Parser, file: str | None) -> None:
    """Say before anything is measured that it could not be drawn."""
    if file is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed: pip install 'lockstep[plot]', or leave it out")
    if not Path(file).resolve().parent.is_dir():
        parser.error(f"--plot {file}: there is no folder {Path(file).resolve().parent}; make it first")


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
    "throughput": _throughput,
    "serve": _serve,
    "startup": _startup,
    "collectives": _collectives,
    "ops": _ops,
}


def _add_work(parser: Parser) -> None:
    """How many requests, and how long."""
    parser.add_argument("--num-prompts", type=_positive, default=64, metavar="N", help="requests (default: 64)")
    parser.add_argument(
        "--input-len", type=_range, default=(16, 128), metavar="LOW-HIGH",
        help="tokens of a prompt, drawn evenly; or one number (default: 16-128)",
    )  # fmt: skip
    parser.add_argument(
        "--output-len", type=_range, default=(16, 64), metavar="LOW-HIGH",
        help="tokens to make, likewise (default: 16-64)",
    )  # fmt: skip


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    first, last = _positive(low), _positive(high if dash else low)
    if first > last:
        raise argparse.ArgumentTypeError(f"{text!r}: the first number is the smaller one")
    return first, last


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:  # Also what is no number.
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 nor inf")
    return rate


def _readable(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
