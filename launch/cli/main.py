"""The ``lockstep`` command line: imports the command's module, runs it, and maps errors to exit codes.

Exit codes: 0 success, 2 wrong usage or input (one line on stderr), a failed rank's own code, 128 + N for signal N,
1 anything else. A command's module is imported only when the command runs, so ``--help`` stays fast.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from launch.cli.args import UsageError, suggest
from launch.cli.output import OutputClosed, write_line
from launch.standard_error import protect_stderr
from runtime.common.errors import InputError, LockstepError


@dataclass(frozen=True)
class _Command:
    module: str
    summary: str

    def run(self) -> Callable[[Sequence[str]], int]:
        run: Callable[[Sequence[str]], int] = importlib.import_module(self.module).run
        return run


COMMANDS = {
    "generate": _Command("launch.cli.commands.generate", "continue prompts, or answer them as a chat"),
    "chat": _Command("launch.cli.commands.chat", "chat with a model in the terminal"),
    "serve": _Command("launch.cli.commands.serve", "serve OpenAI's HTTP API"),
    "run-batch": _Command("launch.cli.commands.run_batch", "run a file of OpenAI requests"),
    "bench": _Command("launch.cli.commands.bench", "measure: latency, throughput, serve, startup, collectives, ops"),
    "launch": _Command("launch.cli.commands.launch", "run a command under torchrun, on one node or several"),
    "doctor": _Command("launch.cli.commands.doctor", "check this machine and say what to fix"),
}

_SIGPIPE_EXIT = 128 + signal.SIGPIPE


class Terminated(BaseException):
    """SIGTERM arrived. Unwinds the stack as KeyboardInterrupt does, so that context managers close what was started."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Exceptions outside the LockstepError tree propagate."""
    protect_stderr()
    args = list(sys.argv[1:] if argv is None else argv)
    name = f"lockstep {args[0]}" if args and args[0] in COMMANDS else "lockstep"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # A terminal without UTF-8 must not fail the command.
    try:
        with _sigterm_raises():
            return run_command(args)
    except SystemExit as done:  # argparse printed the help
        return int(done.code or 0)
    except OutputClosed:
        return _SIGPIPE_EXIT
    except KeyboardInterrupt:
        _say(f"{name}: interrupted")
        return 128 + signal.SIGINT
    except Terminated:
        _say(f"{name}: terminated")
        return 128 + signal.SIGTERM
    except InputError as error:
        _say(f"{name}: {'; '.join(line.strip() for line in str(error).splitlines() if line.strip())}")
        return error.exit_code
    except LockstepError as error:
        _say(f"{name}: {error}")
        return error.exit_code


def run_command(argv: Sequence[str]) -> int:
    """Run the command in ``argv`` and return its exit code: 1 if only part of it succeeded. Raises LockstepError."""
    if not argv:
        raise UsageError(f"a command is missing: one of {', '.join(COMMANDS)} (see lockstep --help)")
    first, rest = argv[0], argv[1:]
    if first in ("-h", "--help", "help"):
        write_line(_help())
        return 0
    if first == "--version":
        write_line(f"lockstep {importlib.metadata.version('lockstep')}")
        return 0
    if first not in COMMANDS:
        raise UsageError(f"unknown command {first!r}; there are {', '.join(COMMANDS)}{suggest(first, COMMANDS)}")
    return COMMANDS[first].run()(rest)


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: lockstep COMMAND ...\n\n"
        "Run one decoder language model over several tensor-parallel ranks.\n\n"
        f"commands:\n{commands}\n\n"
        "lockstep COMMAND --help lists its flags; lockstep --version prints the version.\n"
        'Try: lockstep generate demo --chat --prompt "What is the capital of France?"'
    )


@contextlib.contextmanager
def _sigterm_raises() -> Generator[None]:
    """Raise :class:`Terminated` in the main thread on the first SIGTERM; the second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    """Print one line to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
