"""The FastAPI application: routes, middleware and exception handlers.

FastAPI validates bodies against ``schemas.py`` and publishes them at /openapi.json. The modules of each API compute the
responses; ``request_cycle.py`` sends them. Needs the ``serve`` extra.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from runtime.common.config import EngineConfig
from runtime.common.errors import InputError, LockstepError
from runtime.common.model_config import ModelConfig
from runtime.server import responses, tokenization
from runtime.server.app_state import AppState
from runtime.server.chat import create_chat_completion, stream_chat_completion
from runtime.server.completions import create_completion, stream_completion
from runtime.server.errors import UnavailableError, error_body, error_reply, shutting_down
from runtime.server.metrics import Metrics
from runtime.server.middleware import AccessLogMiddleware, ApiKeyMiddleware, RequestCycleMiddleware
from runtime.server.options import ServerOptions
from runtime.server.request_cycle import EventStreamResponse, JsonBodyRoute, RequestCycle, ResultResponse
from runtime.server.responses import STATUSES, published
from runtime.server.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.engine.async_engine import AsyncEngine


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    config: EngineConfig,
    model_config: ModelConfig,
    options: ServerOptions | None = None,
) -> FastAPI:
    """Build the application that serves one model.

    Args:
        engine: a started engine; its owner closes it.
        tokenizer: the model's tokenizer.
        config: a resolved configuration.
        model_config: the configuration in the checkpoint.
        options: options of the HTTP server.

    Returns:
        the application; its owner closes ``app.state.lockstep``, an :class:`AppState`, after it.
    """
    state = AppState(engine, tokenizer, config, model_config, options)
    state.metrics = Metrics(engine, state.names[0])
    # The page of docs_url would load scripts from other hosts.
    app = FastAPI(title="Lockstep", version=version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.lockstep = state
    app.router.route_class = JsonBodyRoute
    _add_generation_routes(app, state)
    _add_token_routes(app, state)
    _add_model_routes(app, state)
    _add_monitoring_routes(app, state, state.metrics)
    _add_exception_handlers(app)
    _publish_only_own_statuses(app)
    # The last one added is the outermost.
    app.add_middleware(RequestCycleMiddleware, state=state)
    app.add_middleware(ApiKeyMiddleware, state=state)
    app.add_middleware(AccessLogMiddleware)
    return app


def version() -> str:
    """Lockstep's version."""
    return importlib.metadata.version("lockstep")


def _add_generation_routes(app: FastAPI, state: AppState) -> None:
    """``/v1/completions`` and ``/v1/chat/completions``."""

    @app.post("/v1/completions", responses=published(responses.CompletionResponse, *STATUSES, streams=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        cycle = RequestCycle.of(request)
        if body.stream:
            return EventStreamResponse(cycle, stream_completion(state, body, request_id=cycle.request_id))
        return ResultResponse(cycle, create_completion(state, body, request_id=cycle.request_id))

    @app.post("/v1/chat/completions", responses=published(responses.ChatCompletionResponse, *STATUSES, streams=True))
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Continue a conversation."""
        cycle = RequestCycle.of(request)
        if body.stream:
            return EventStreamResponse(cycle, stream_chat_completion(state, body, request_id=cycle.request_id))
        return ResultResponse(cycle, create_chat_completion(state, body, request_id=cycle.request_id))


def _add_token_routes(app: FastAPI, state: AppState) -> None:
    """``/tokenize`` and ``/detokenize``."""

    @app.post("/tokenize", responses=published(responses.TokenizeResponse, *STATUSES))
    async def tokenize(body: Annotated[TokenizeRequest, Body()], request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return ResultResponse(RequestCycle.of(request), tokenization.tokenize(state, body))

    @app.post("/detokenize", responses=published(responses.DetokenizeResponse, *STATUSES))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        return ResultResponse(RequestCycle.of(request), tokenization.detokenize(state, body))


def _add_model_routes(app: FastAPI, state: AppState) -> None:
    """``/v1/models``."""

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "lockstep",
            "max_model_len": state.max_model_len,
        }

    @app.get("/v1/models", responses=published(responses.ModelList, 401))
    async def models() -> Response:
        """The names of the served model."""
        return JSONResponse({"object": "list", "data": [card(name) for name in state.names]})

    @app.get("/v1/models/{name:path}", responses=published(responses.ModelCard, 401, 404))
    async def model(name: str) -> Response:
        """One of the names."""
        return JSONResponse(card(state.model_name(name)))


def _add_monitoring_routes(app: FastAPI, state: AppState, metrics: Metrics) -> None:
    """``/health``, ``/ping``, ``/metrics`` and ``/version``."""

    @app.get("/health", responses=published(responses.HealthResponse, 503))
    @app.get("/ping", responses=published(responses.HealthResponse, 503))
    async def health() -> Response:
        """Whether requests can be answered: 200, or 503 with the reason."""
        check_health(state)
        return JSONResponse({"status": "ok"})

    @app.get("/version", responses=published(responses.VersionResponse, 401))
    async def get_version() -> Response:
        """Lockstep's version."""
        return JSONResponse({"version": version()})

    text = {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
    statuses = {**published(responses.HealthResponse, 401), 200: text}

    @app.get("/metrics", responses=statuses, response_class=Response)
    async def get_metrics() -> Response:
        """Metrics for Prometheus."""
        content, media_type = metrics.render()
        return Response(content, media_type=media_type)


def check_health(state: AppState) -> None:
    """Raise :class:`UnavailableError` if the engine has failed or stalls, or the server is shutting down."""
    failure = state.engine.failure
    if failure is not None:
        raise UnavailableError(f"the engine has failed: {str(failure).partition(chr(10))[0]}", code="engine_dead")
    if state.in_flight.draining:
        raise shutting_down()
    idle, limit = state.engine.seconds_since_progress(), state.config.step_timeout
    if idle > limit:
        raise UnavailableError(
            f"the engine has work and made no step for {idle:.0f} s; allowed: {limit:.0f} (--step-timeout)",
            code="engine_stuck",
        )


def _add_exception_handlers(app: FastAPI) -> None:
    """Responses in OpenAI's shape to errors that endpoints, validation and the router raise."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        reply = error_reply(error if isinstance(error, LockstepError) else InputError(str(error)))
        return JSONResponse(reply.body, reply.status, reply.headers)

    async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another one")
            text = f"{request.method} is not for {request.url.path}; use {allowed}"
        else:
            text = f"{request.url.path} does not exist here; /openapi.json lists what does"
        return JSONResponse(error_body(text[:300], code="not_found"), error.status_code, error.headers)

    app.add_exception_handler(LockstepError, on_error)
    app.add_exception_handler(RequestValidationError, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)


def _publish_only_own_statuses(app: FastAPI) -> None:
    """Remove FastAPI's 422 from /openapi.json: wrong bodies get 400."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi
