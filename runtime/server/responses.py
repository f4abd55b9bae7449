"""Response bodies of the HTTP API as pydantic models, which FastAPI publishes.

Responses are written as JSON directly, a token costs no model; tests compare them with these models.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

STATUSES = {
    400: "The body is wrong; the message says what is allowed",
    401: "The API key is missing or wrong",
    404: "The model does not exist",
    408: "The body did not arrive in time",
    413: "The body is too long",
    429: "Too many requests are waiting; Retry-After says when to try again",
    500: "The engine could not finish this request",
    503: "The server is shutting down, or its engine has failed",
}


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of a response with an error status."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Details of the prompt's token count."""

    cached_tokens: int


class UsageInfo(BaseModel):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(BaseModel):
    """One text of a completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionResponse(BaseModel):
    """The response of ``/v1/completions``."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class ChatMessage(BaseModel):
    """The message of the assistant."""

    role: str
    content: str
    refusal: str | None


class ChatChoice(BaseModel):
    """One message of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatCompletionResponse(BaseModel):
    """The response of ``/v1/chat/completions``."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class TokenizeResponse(BaseModel):
    """The response of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    """The response of ``/detokenize``."""

    prompt: str


class ModelCard(BaseModel):
    """A name of the served model."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """The names of the served model."""

    object: str
    data: list[ModelCard]


class HealthResponse(BaseModel):
    """The response of ``/health`` while requests can be answered."""

    status: str


class VersionResponse(BaseModel):
    """The response of ``/version``."""

    version: str


def published(model: type[BaseModel], *statuses: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """FastAPI's ``responses`` of a route: a model, perhaps an event stream, and error statuses."""
    result: dict[str, Any] = {"model": model, "description": "Done"}
    if streams:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        result["content"] = {"text/event-stream": {"schema": event}}
    errors = {status: {"model": ErrorResponse, "description": STATUSES[status]} for status in statuses}
    return {200: result, **errors}
