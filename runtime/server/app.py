"""The application: routes, and around them request ids, the access log, the API key and the refusals of a drain.

FastAPI routes and publishes the schemas; bodies are read, checked and answered by ``wire.py`` and the modules of each
API, over plain ASGI. How the application meets signals and sockets is ``lifecycle.py``'s. FastAPI comes with the
``serve`` extra, so it is imported when an application is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import importlib.metadata
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from runtime.common.config import EngineConfig
from runtime.common.errors import InputError, LockstepError
from runtime.common.log import LOGGER_NAME
from runtime.common.model_config import ModelConfig
from runtime.server import openapi, tokens
from runtime.server.chat import create_chat_completion, stream_chat_completion
from runtime.server.completions import create_completion, stream_completion
from runtime.server.errors import HttpError, UnavailableError, error_body, error_reply, shutting_down
from runtime.server.metrics import Metrics
from runtime.server.serving import ServerOptions, Serving
from runtime.server.wire import ClientGone, Exchange, Message, Receive, Scope, Send
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastapi import FastAPI

    from runtime.engine.async_engine import AsyncEngine

OPEN_PATHS = ("/health", "/ping")
"""Routes that need no API key, and answer while the server drains."""

QUIET_PATHS = (*OPEN_PATHS, "/metrics")
"""Routes that are asked every few seconds: logged at debug level."""

GOODBYE_SECONDS = 0.5
"""How long telling a client that the server ends may take."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_log = logging.getLogger(LOGGER_NAME)

Create = Callable[..., Coroutine[Any, Any, dict[str, Any]]]
Stream = Callable[..., AsyncGenerator[bytes]]


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    config: EngineConfig,
    model_config: ModelConfig,
    options: ServerOptions | None = None,
) -> FastAPI:
    """An application that serves one model.

    Args:
        engine: started; whoever made it closes it.
        tokenizer: of the model.
        config: resolved.
        model_config: what the checkpoint says.
        options: how to serve.

    Returns:
        A FastAPI application; ``app.state.serving`` is its :class:`Serving`, to be closed after it.
    """
    from fastapi import FastAPI

    serving = Serving(engine, tokenizer, config, model_config, options)
    serving.metrics = Metrics(engine, serving.names[0])
    # The page of docs_url would load scripts from elsewhere; /openapi.json is what programs want.
    app = FastAPI(title="Lockstep", version=version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.serving = serving
    _add_posts(app, serving)
    _add_gets(app, serving)
    _add_error_handlers(app)
    app.add_middleware(Gate, serving=serving)
    app.add_middleware(RequestLog)
    return app


def version() -> str:
    """Lockstep's version."""
    return importlib.metadata.version("lockstep")


def _add_posts(app: FastAPI, serving: Serving) -> None:
    """The routes that take a body. Their answers are ASGI applications of our own: see ``wire.py``."""
    from starlette.requests import Request
    from starlette.responses import Response

    class Answer(Response):
        """A response that answers by itself."""

        def __init__(self, create: Create, stream: Stream | None) -> None:
            super().__init__()
            self._create = create
            self._stream = stream

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await answer(serving, self._create, self._stream, scope, receive, send)

    def add(path: str, create: Create, stream: Stream | None, description: dict[str, Any]) -> None:
        async def endpoint(request: Request) -> Response:
            return Answer(create, stream)

        endpoint.__name__ = create.__name__
        endpoint.__annotations__ = {"request": Request, "return": Response}
        app.add_api_route(path, endpoint, methods=["POST"], openapi_extra=description, response_class=Response)

    add("/v1/completions", create_completion, stream_completion, openapi.COMPLETIONS)
    add("/v1/chat/completions", create_chat_completion, stream_chat_completion, openapi.CHAT_COMPLETIONS)
    add("/tokenize", tokens.tokenize, None, openapi.TOKENIZE)
    add("/detokenize", tokens.detokenize, None, openapi.DETOKENIZE)


async def answer(
    serving: Serving, create: Create, stream: Stream | None, scope: Scope, receive: Receive, send: Send
) -> None:
    """Read a body and answer it: whole, or as events if it asks for a stream."""
    options = serving.options
    exchange = Exchange(scope, receive, send, max_body_bytes=options.max_body_bytes, body_seconds=options.body_seconds)
    request_id: str = scope.get("lockstep.request_id") or uuid.uuid4().hex
    with serving.traffic.one():
        try:
            body = await exchange.read()
            if stream is not None and isinstance(body, dict) and body.get("stream") is True:
                await exchange.while_connected(exchange.stream(stream(serving, body, request_id=request_id)))
            else:
                value = await exchange.while_connected(create(serving, body, request_id=request_id))
                await exchange.answer(200, value)
        except ClientGone:
            scope["lockstep.gone"] = True
        except LockstepError as error:
            await exchange.fail(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not serving.traffic.stopping or task is None:
                raise
            task.uncancel()
            with contextlib.suppress(TimeoutError):  # A client that does not read gets no goodbye.
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await exchange.fail(shutting_down())


def _add_gets(app: FastAPI, serving: Serving) -> None:
    from starlette.responses import JSONResponse, Response

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": serving.started,
            "owned_by": "lockstep",
            "max_model_len": serving.max_model_len,
        }

    async def models() -> Any:
        """The names the model is served under."""
        return JSONResponse({"object": "list", "data": [card(name) for name in serving.names]})

    async def model(name: str) -> Any:
        """One of the names."""
        return JSONResponse(card(serving.model_name(name)))

    async def health() -> Any:
        """Whether requests can be answered: 200, or 503 with the reason."""
        check_health(serving)
        return JSONResponse({"status": "ok"})

    async def metrics() -> Any:
        """Metrics for Prometheus."""
        if serving.metrics is None:
            raise HttpError("this server keeps no metrics", status=404)
        text, kind = serving.metrics.render()
        return Response(text, media_type=kind)

    async def get_version() -> Any:
        """Lockstep's version."""
        return JSONResponse({"version": version()})

    for path, endpoint, description in (
        ("/v1/models", models, openapi.MODELS),
        ("/v1/models/{name:path}", model, openapi.MODEL),
        ("/health", health, openapi.HEALTH),
        ("/ping", health, openapi.HEALTH),
        ("/metrics", metrics, openapi.METRICS),
        ("/version", get_version, openapi.VERSION),
    ):
        endpoint.__annotations__ = {"name": str} if "{name" in path else {}
        app.add_api_route(path, endpoint, methods=["GET"], openapi_extra=description, response_class=Response)


def check_health(serving: Serving) -> None:
    """Raise :class:`UnavailableError` if the engine has failed or stands still, or the server is shutting down."""
    failure = serving.engine.failure
    if failure is not None:
        raise UnavailableError(f"the engine has failed: {str(failure).partition(chr(10))[0]}", code="engine_dead")
    if serving.traffic.draining:
        raise shutting_down()
    idle, limit = serving.engine.seconds_since_progress(), serving.config.step_timeout
    if idle > limit:
        raise UnavailableError(
            f"the engine has work and made no step for {idle:.0f} s; allowed: {limit:.0f} (--step-timeout)",
            code="engine_stuck",
        )


def _add_error_handlers(app: FastAPI) -> None:
    """Errors outside of the routes with a body, in OpenAI's shape."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    async def ours(request: Request, error: Exception) -> JSONResponse:
        reply = error_reply(error if isinstance(error, LockstepError) else InputError(str(error)))
        return JSONResponse(reply.body, reply.status, reply.headers)

    async def of_the_router(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another one")
            text = f"{request.method} is not for {request.url.path}; use {allowed}"
        else:
            text = f"{request.url.path} does not exist here; /openapi.json lists what does"
        return JSONResponse(error_body(text[:300], code="not_found"), error.status_code, error.headers)

    app.add_exception_handler(LockstepError, ours)
    app.add_exception_handler(RequestValidationError, ours)
    app.add_exception_handler(HTTPException, of_the_router)


class Gate:
    """Lets in who has the API key, and while the server drains nobody new."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], serving: Serving) -> None:
        self._app = app
        self._serving = serving
        key = serving.options.api_key
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        error: HttpError | None = None
        if not self._has_key(scope):
            error = HttpError(
                "this server needs its API key: send the header `Authorization: Bearer KEY`",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        elif self._serving.traffic.draining and scope["method"] == "POST":
            error = shutting_down()
        if error is None:
            await self._app(scope, receive, send)
            return
        await Exchange(scope, receive, send, max_body_bytes=0, body_seconds=0).fail(error)

    def _has_key(self, scope: Scope) -> bool:
        """Compared by digest: neither the key's length nor how much of it is right shows in the time this takes."""
        if self._digest is None:
            return True
        header: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, given = header.partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == b"bearer"


class RequestLog:
    """Gives every request an id, writes the access log, and answers for what nobody expected.

    Prompts, queries and keys are in no line.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and write down how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["lockstep.request_id"] = request_id
        header = (b"x-request-id", request_id.encode())
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # A bug of ours, whatever it is: told in the log, and in the shape that clients expect.
            _log.exception("request %s to %s failed", request_id, _path(scope))
            if status:
                raise  # The response has begun; the server can only close the connection.
            error = HttpError("an internal error; the log has more", status=500, kind="server_error")
            exchange = Exchange(scope, receive, send_with_id, max_body_bytes=0, body_seconds=0)
            await exchange.fail(error)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            if _log.isEnabledFor(level):
                client = scope.get("client") or ("-", 0)
                shown = "gone" if scope.get("lockstep.gone") else str(status or "unanswered")
                took = time.monotonic() - started
                _log.log(
                    level, "%s %s %s %s %.3f s id=%s", client[0], scope["method"], _path(scope), shown, took, request_id
                )


def _request_id(scope: Scope) -> str:
    """The client's X-Request-Id if it is harmless in headers and logs, or else a new one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.match(given) else uuid.uuid4().hex


def _path(scope: Scope) -> str:
    """The path as one short, printable word."""
    return ascii(scope["path"][:100])[1:-1].replace(" ", "%20")
