"""What the server publishes of itself at /openapi.json: bodies, statuses and the shapes of its answers.

The bodies are the schemas that requests are checked against. Nothing here decides anything.
"""

from __future__ import annotations

from typing import Any

from runtime.server import schemas
from runtime.server.validate import Schema

_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}

_STATUSES = {
    400: "The request is wrong: the message says what is allowed",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    408: "The body did not arrive in time",
    413: "The body is too long",
    429: "Too many requests are waiting; Retry-After says when to try again",
    500: "The engine could not finish this request",
    503: "The server is shutting down, or its engine has failed",
}

_USAGE: Schema = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
}


def _list_of(choice: str) -> Schema:
    """The response of either API; ``choice``: what holds the text."""
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string"},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"index": {"type": "integer"}, "finish_reason": {"type": ["string", "null"]}},
                    "required": ["index", choice, "finish_reason"],
                },
            },
            "usage": _USAGE,
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    }


def _answers(schema: Schema, statuses: tuple[int, ...], others: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}, **(others or {})}
    errors = {
        str(status): {"description": _STATUSES[status], "content": {"application/json": {"schema": _ERROR}}}
        for status in statuses
    }
    return {"200": {"description": "Done", "content": content}, **errors}


def _post(summary: str, body: Schema, answer: Schema, others: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _answers(answer, tuple(_STATUSES), others),
    }


def _get(answer: Schema, *statuses: int) -> dict[str, Any]:
    return {"responses": _answers(answer, statuses)}


_EVENTS = {
    "text/event-stream": {
        "schema": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]},
    }
}
_CARD: Schema = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id", "object"]}

COMPLETIONS = _post("Continue prompts", schemas.COMPLETION, _list_of("text"), _EVENTS)
CHAT_COMPLETIONS = _post("Answer a conversation", schemas.CHAT, _list_of("message"), _EVENTS)
TOKENIZE = _post(
    "Token ids of a text or a conversation",
    schemas.TOKENIZE,
    {
        "type": "object",
        "properties": {
            "count": {"type": "integer"},
            "max_model_len": {"type": "integer"},
            "tokens": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["count", "max_model_len", "tokens"],
    },
)
DETOKENIZE = _post(
    "The text of token ids",
    schemas.DETOKENIZE,
    {"type": "object", "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
)
MODELS = _get({"type": "object", "properties": {"data": {"type": "array", "items": _CARD}}, "required": ["data"]}, 401)
MODEL = _get(_CARD, 401, 404)
HEALTH = _get({"type": "object"}, 503)
VERSION = _get({"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]}, 401)
METRICS: dict[str, Any] = {
    "responses": {
        **_answers({}, (401,)),
        "200": {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}},
    }
}
