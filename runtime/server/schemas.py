"""The bodies that the server takes, as JSON schemas: what is checked (``validate.py``) and what is published is this.

A field of OpenAI's API that changes nothing about the answer is taken; one that would silently be ignored is not
there, so it is refused. Every number, list and text has a bound. How fields become an engine's request is said in
``completions.py`` and ``chat.py``.
"""

from __future__ import annotations

from runtime.common.config import MAX_SEED
from runtime.common.sampling_params import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PARALLEL_SAMPLES,
    MAX_STOP_STRINGS,
)
from runtime.server.validate import Schema

MAX_PROMPTS = 1024
"""Prompts in one body."""

MAX_TOKEN_ID = 2**31 - 1
MAX_TOKEN_IDS = 2**20
"""Longest list of token ids in a body; what the model can take is less, and checked later."""

MAX_STOP_CHARACTERS = 1024
"""Of one stop string: the end of every text is compared with its beginnings, once a token."""

MAX_TOKENIZED_CHARACTERS = 2**18
"""Of a text for /tokenize, which is tokenized however long it is."""

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_NAME_CHARACTERS = 256
MAX_OUTPUT_TOKENS = 2**31 - 1


def _whole(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _text(low: int, high: int) -> Schema:
    return {"type": ["string", "null"], "minLength": low, "maxLength": high}


_FLAG: Schema = {"type": ["boolean", "null"]}
_ANY_OBJECT: Schema = {"type": ["object", "null"]}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_TOKEN_IDS: Schema = {"type": "array", "items": _TOKEN_ID, "minItems": 1, "maxItems": MAX_TOKEN_IDS}
_MODEL = {**_text(0, 1024), "description": "one of /v1/models; the first of them if it is left out"}


def _absent(why: str) -> Schema:
    """A field of OpenAI's API that is not supported, which some clients send as null."""
    return {"type": "null", "title": f"null only: {why}"}


_STRUCTURED: Schema = {
    "type": ["object", "null"],
    "title": "an object with one of json, json_object, regex, grammar, choice",
    "properties": {
        "json": {
            "anyOf": [
                {"type": "object"},
                {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_CHARACTERS},
                {"type": "null"},
            ]
        },
        "json_object": _FLAG,
        "regex": _text(1, MAX_GRAMMAR_CHARACTERS),
        "grammar": _text(1, MAX_GRAMMAR_CHARACTERS),
        "choice": {
            "type": ["array", "null"],
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_CHARACTERS},
            "minItems": 1,
            "maxItems": 1024,
        },
    },
    "additionalProperties": False,
}

_RESPONSE_FORMAT: Schema = {
    "title": 'an object whose type is "text", "json_object" or "json_schema"',
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {"type": {"type": "string", "enum": ["text", "json_object"]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["json_schema"]},
                "json_schema": {
                    "type": "object",
                    "title": "an object with name and schema",
                    "properties": {
                        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARACTERS},
                        "description": _text(0, 65536),
                        "schema": {"type": "object"},
                        "strict": _FLAG,
                    },
                    "required": ["name", "schema"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "json_schema"],
            "additionalProperties": False,
        },
    ],
}

_COMMON: dict[str, Schema] = {
    "model": _MODEL,
    "n": _whole(1, MAX_PARALLEL_SAMPLES),
    "stream": _FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {
            "include_usage": _FLAG,
            "include_obfuscation": {"type": ["boolean", "null"], "enum": [False, None]},
        },
        "additionalProperties": False,
    },
    "temperature": _number(0, 100),
    "top_p": {"type": ["number", "null"], "minimum": 1e-9, "maximum": 1},
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "seed": _whole(0, MAX_SEED),
    "stop": {
        "title": f"a text, or a list of at most {MAX_STOP_STRINGS}",
        "anyOf": [
            {"type": "null"},
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
            {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                "maxItems": MAX_STOP_STRINGS,
            },
        ],
    },
    "logit_bias": {
        "type": ["object", "null"],
        "title": "an object that gives token ids a number from -100 to 100",
        "propertyNames": {"type": "string", "pattern": "^[0-9]{1,10}$", "title": "a token id"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "response_format": _RESPONSE_FORMAT,
    # Beyond OpenAI's API, with vLLM's names.
    "top_k": {**_whole(-1, 2**31 - 1), "description": "0 or -1: all tokens"},
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "min_tokens": _whole(0, MAX_OUTPUT_TOKENS),
    "ignore_eos": _FLAG,
    "stop_token_ids": {"type": ["array", "null"], "items": _TOKEN_ID, "maxItems": 1024},
    "structured_outputs": _STRUCTURED,
    "prompt_logprobs": _whole(0, MAX_LOGPROBS),
    "priority": {**_whole(1 - 2**31, 2**31 - 1), "description": "lower goes first"},
    "cache_salt": {
        **_text(1, MAX_NAME_CHARACTERS),
        "description": "prompts share cached blocks only with prompts of the same salt",
    },
    # OpenAI's, without any effect on the answer.
    "user": _text(0, 4096),
    "store": _FLAG,
    "metadata": _ANY_OBJECT,
    "service_tier": _text(0, 64),
    "safety_identifier": _text(0, 4096),
    "prompt_cache_key": _text(0, 4096),
}

COMPLETION: Schema = {
    "title": "CompletionRequest",
    "type": "object",
    "properties": {
        **_COMMON,
        "prompt": {
            "title": "a text, a list of texts, a list of token ids, or a list of such lists",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ],
        },
        "max_tokens": {**_whole(0, MAX_OUTPUT_TOKENS), "description": "default 16; 0 only together with echo"},
        "logprobs": _whole(0, MAX_LOGPROBS),
        "echo": _FLAG,
        "add_special_tokens": _FLAG,
        "best_of": {**_whole(1, MAX_PARALLEL_SAMPLES), "description": "only the same as n"},
        "suffix": _absent("there is no text to be put in between"),
    },
    "required": ["prompt"],
    "additionalProperties": False,
}

_TEXT_PART: Schema = {
    "type": "object",
    "title": 'an object {"type": "text", "text": ...}; this model reads text only',
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}

_TOOL_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": _text(0, MAX_NAME_CHARACTERS),
        "type": {"type": ["string", "null"], "enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": MAX_NAME_CHARACTERS},
                "arguments": {"type": "string", "description": "JSON"},
            },
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}

_MESSAGE: Schema = {
    "type": "object",
    "title": "an object with role and content",
    "description": "fields of other names reach the chat template as they are",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {
            "title": "a text, or a list of text parts",
            "anyOf": [
                {"type": "null"},
                {"type": "string"},
                {"type": "array", "items": _TEXT_PART, "maxItems": MAX_MESSAGES},
            ],
        },
        "name": _text(0, MAX_NAME_CHARACTERS),
        "tool_calls": {"type": ["array", "null"], "items": _TOOL_CALL, "maxItems": MAX_TOOLS},
        "tool_call_id": _text(0, MAX_NAME_CHARACTERS),
    },
    "required": ["role"],
}

_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}

_TOOLS: Schema = {
    "type": ["array", "null"],
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["function"]},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARACTERS},
                    "description": {"type": ["string", "null"]},
                    "parameters": _ANY_OBJECT,
                    "strict": _FLAG,
                },
                "required": ["name"],
            },
        },
        "required": ["type", "function"],
    },
}

CHAT: Schema = {
    "title": "ChatCompletionRequest",
    "type": "object",
    "properties": {
        **_COMMON,
        "messages": _MESSAGES,
        "max_tokens": {**_whole(1, MAX_OUTPUT_TOKENS), "description": "default: what the model's length leaves"},
        "max_completion_tokens": _whole(1, MAX_OUTPUT_TOKENS),
        "logprobs": _FLAG,
        "top_logprobs": {**_whole(0, MAX_LOGPROBS), "description": "needs logprobs: true"},
        "tools": _TOOLS,
        "tool_choice": {
            "type": ["string", "null"],
            "enum": ["none", "auto", None],
            "title": '"none" or "auto"; what a model says is never parsed for calls',
        },
        "parallel_tool_calls": _FLAG,
        "add_generation_prompt": _FLAG,
        "modalities": {"type": ["array", "null"], "items": {"type": "string", "enum": ["text"]}, "maxItems": 1},
        "audio": _absent("this model reads and writes text only"),
        "prediction": _absent("there is no speculative decoding"),
        "reasoning_effort": _absent("say in a message how much the model should think"),
        "functions": _absent("use tools"),
        "function_call": _absent("use tools"),
        "web_search_options": _absent("there is no search"),
    },
    "required": ["messages"],
    "additionalProperties": False,
}

TOKENIZE: Schema = {
    "title": "TokenizeRequest",
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "model": _MODEL,
                "prompt": {"type": "string", "maxLength": MAX_TOKENIZED_CHARACTERS},
                "add_special_tokens": _FLAG,
                "return_token_strs": _FLAG,
            },
            "required": ["prompt"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "model": _MODEL,
                "messages": _MESSAGES,
                "tools": _TOOLS,
                "add_generation_prompt": _FLAG,
                "return_token_strs": _FLAG,
            },
            "required": ["messages"],
            "additionalProperties": False,
        },
    ],
}

DETOKENIZE: Schema = {
    "title": "DetokenizeRequest",
    "type": "object",
    "properties": {
        "model": _MODEL,
        "tokens": {"type": "array", "items": _TOKEN_ID, "maxItems": MAX_TOKEN_IDS},
    },
    "required": ["tokens"],
    "additionalProperties": False,
}
