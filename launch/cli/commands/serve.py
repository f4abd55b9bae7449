"""``lockstep serve``: an OpenAI-compatible HTTP server for one model.

The port is bound before anything else starts, so that a port in use is reported at once. Requests are handled in
``runtime/server``; the engine comes from ``launch/llm.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import importlib.util
import json
import resource
import shlex
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launch.cli.args import Parser, Settings, add_engine_flags, add_model, read_settings, whole_number
from launch.environment import API_KEY_VARIABLE, read_environment
from launch.hub import served_name
from runtime.common.errors import ConfigError, InputError
from runtime.server.options import ServerOptions

if TYPE_CHECKING:
    from launch.llm import AsyncLLM

DEFAULTS = ServerOptions()
LIBRARIES = ("fastapi", "pydantic", "uvicorn", "prometheus_client")


def build_parser() -> Parser:
    """The arguments of ``serve``."""
    parser = Parser(
        "lockstep serve",
        "MODEL [--host ADDRESS] [--port N] [--api-key KEY] [flags]",
        "Serve MODEL over HTTP with OpenAI's API. Says on stderr when it is ready, and where.",
        "SIGTERM or Ctrl-C: no new requests, those in flight finish; the second one stops at once.",
    )
    add_model(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    server.add_argument(
        "--port", metavar="N", type=whole_number, default=8000, help="port; 0: any free one (default: 8000)"
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what clients have to send as `Authorization: Bearer KEY`; default: {API_KEY_VARIABLE}, which does not "
        "show in the process list; without one, no key is required",
    )
    server.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        help="what requests may call the model; default: MODEL without @REVISION",
    )
    server.add_argument(
        "--drain-timeout",
        metavar="SECONDS",
        type=float,
        default=DEFAULTS.drain_seconds,
        help=f"how long requests may go on after SIGTERM (default: {DEFAULTS.drain_seconds:g})",
    )
    server.add_argument(
        "--max-body-bytes",
        metavar="N",
        type=whole_number,
        default=DEFAULTS.max_body_bytes,
        help=f"longest body of a request (default: {DEFAULTS.max_body_bytes})",
    )
    add_engine_flags(parser)
    return parser


def check(argv: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """Parse and validate the arguments without starting anything. Raises :class:`InputError`."""
    parser = build_parser()
    arguments = parser.parse(argv)
    settings = read_settings(arguments, parser, sampling=False)
    if not 0 <= arguments.port <= 65535:
        parser.error(f"--port is {arguments.port}; allowed: 0 to 65535")
    if not 0 <= arguments.drain_timeout <= 86400:
        parser.error(f"--drain-timeout is {arguments.drain_timeout}; allowed: 0 to 86400")
    if not 1024 <= arguments.max_body_bytes <= 2**30:
        parser.error(f"--max-body-bytes is {arguments.max_body_bytes}; allowed: 1024 to {2**30}")
    _api_key(arguments)
    require("serving", LIBRARIES)
    return arguments, settings


def require(what: str, libraries: Sequence[str]) -> None:
    """Raise :class:`ConfigError` if libraries of the ``serve`` extra are missing."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}; install with: pip install 'lockstep[serve]'")


def run(argv: Sequence[str]) -> int:
    """Serve until a signal; 0 after a drain, 128 + N if a second signal N ended it.

    Raises:
        LockstepError: the server could not start, or its engine failed.
    """
    arguments, settings = check(argv)
    api_key = _api_key(arguments)
    with contextlib.closing(bind(arguments.host, arguments.port)) as listener:
        from launch.llm import AsyncLLM

        options = ServerOptions(
            served_model_names=tuple(arguments.served_model_name or (served_name(settings.model),)),
            api_key=api_key,
            max_body_bytes=arguments.max_body_bytes,
            drain_seconds=arguments.drain_timeout,
        )
        with AsyncLLM(settings.model, **settings.engine) as llm:
            if api_key is None and not _is_loopback(listener):
                print(
                    f"lockstep serve: every client that can reach {arguments.host} may use this server; require a key "
                    f"with --api-key or {API_KEY_VARIABLE}",
                    file=sys.stderr,
                )
            return asyncio.run(_serve(llm, options, listener))


async def _serve(llm: AsyncLLM, options: ServerOptions, listener: socket.socket) -> int:
    from runtime.server.app import create_app
    from runtime.server.lifecycle import ServerRun

    app = create_app(llm.engine, llm.tokenizer, llm.config, llm.model_config, options)
    server = ServerRun(app, listener, max_files=_raise_file_limit())
    with server.handle_signals():
        failure = await server.run(lambda: _print_ready(listener, options))
    if failure is not None:
        raise failure
    return 128 + server.signals[1] if len(server.signals) > 1 else 0


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the address. It does not listen yet, so clients are refused until the server is ready.

    Raises:
        InputError: the host does not have the address, or the port is taken; the message names its owner if known.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host!r} is no address: {error}; use 127.0.0.1, or an address of this host") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # The flag permits binding while connections of an ended server are in TIME_WAIT. It is cleared after the bind,
        # so that another server that starts at the same time cannot bind the port too.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"port {port} on {host} is taken by {_owner(port)}; end that, or take another --port (0: any free one)"
            ) from None
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror}; take another --host or --port"
        ) from None
    return listener


def _owner(port: int) -> str:
    """The process that listens on a port, as far as this process may see it."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if local and local.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        return "another process"
    return "another process, perhaps of another user"


def _api_key(arguments: argparse.Namespace) -> str | None:
    """The key of the flag or the environment. Raises :class:`InputError` for a key that no header can hold."""
    key = arguments.api_key if arguments.api_key is not None else read_environment().api_key
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"the API key (--api-key or {API_KEY_VARIABLE}) has to be printable ASCII without spaces, and not empty"
        )
    return key


def _is_loopback(listener: socket.socket) -> bool:
    return str(listener.getsockname()[0]).startswith(("127.", "::1"))


def _raise_file_limit() -> int:
    """Raise the limit of open files, of which each connection takes one, as far as allowed; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 65536
    with contextlib.suppress(OSError, ValueError):  # The soft limit stays, and is returned.
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _print_ready(listener: socket.socket, options: ServerOptions) -> None:
    """Print the server's URL and a command that sends a request to it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    body = json.dumps(
        {
            "model": options.served_model_names[0],
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
    )
    key = "" if options.api_key is None else f'-H "Authorization: Bearer ${API_KEY_VARIABLE}" '
    print(f"lockstep serve: ready at {url}", file=sys.stderr)
    print(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' {key}-d {shlex.quote(body)}",
        file=sys.stderr,
        flush=True,
    )
