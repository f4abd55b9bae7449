"""Starts ``lockstep serve`` as a subprocess for a benchmark, and ends it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Sequence

from benchmarks.http_client import Server
from launch.environment import API_KEY_VARIABLE, torchrun_ranks
from runtime.common.errors import ConfigError, LockstepError, shell_code

READY = re.compile(r"ready at (http://\S+)")
STOP_SECONDS = 60.0
"""Deadline for the server to end after SIGTERM, with no request in flight."""

_SERVER = """
import sys
from launch.rank_main import die_with_parent
die_with_parent(int(sys.argv[1]))
from launch.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""The kernel ends this process with its parent."""


@contextlib.contextmanager
def started_server(model: str, engine_args: Sequence[str]) -> Generator[Server]:
    """Run ``lockstep serve`` on a free port of this host while the block runs.

    Raises:
        ConfigError: this process is one of torchrun's ranks.
        LockstepError: the server ended before it was ready.
    """
    if torchrun_ranks() is not None:
        raise ConfigError(
            "bench serve starts a server of its own, which the ranks of torchrun cannot be; start it by itself "
            "(lockstep launch ... -- serve MODEL) and give its address as --base-url"
        )
    argv = ["serve", model, "--host", "127.0.0.1", "--port", "0", *engine_args]
    environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(os.getpid()), *argv],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    output = _Stderr(process)
    try:
        url = output.wait_for_url()
        if url is None:
            last = output.last[-1] if output.last else "it wrote nothing to stderr"
            failure = LockstepError(f"the server did not start: {last}")
            failure.exit_code = shell_code(process.wait() or 1)
            raise failure
        yield Server(url)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.close()


class _Stderr:
    """Reads the server's stderr in a thread: copies it to this process's until the server is ready, keeps the end.

    Attributes:
        last: the last lines.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.last: deque[str] = deque(maxlen=20)
        self._stream = process.stderr
        self._url: str | None = None
        self._settled = threading.Event()
        self._reader = threading.Thread(target=self._read, name="server-stderr", daemon=True)
        self._reader.start()

    def wait_for_url(self) -> str | None:
        """The server's URL once it is ready; None if it ended. The server's start-up deadlines bound the wait."""
        self._settled.wait()
        return self._url

    def close(self) -> None:
        """Close the stream after the process has ended."""
        self._reader.join()
        if self._stream is not None:
            self._stream.close()

    def _read(self) -> None:
        for line in self._stream or ():
            self.last.append(line.strip())
            if self._url is None:
                print(line, end="", file=sys.stderr, flush=True)
                if match := READY.search(line):
                    self._url = match[1]
                    self._settled.set()
        self._settled.set()
