"""Request bodies of the HTTP API as pydantic models: FastAPI validates bodies with them and publishes them.

A field of OpenAI's API that does not change the response is accepted; a field that would silently be ignored is not
declared and so refused. Every number, list and text has a bound; bounds of sampling parameters come from
:class:`~runtime.common.config.SamplingParams`. Null means that a field is absent.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from runtime.common.sampling_params import (
    LOGIT_BIAS_BOUNDS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_OUTPUT_TOKENS,
    MAX_STOP_STRINGS,
    MAX_STRUCTURED_CHOICES,
    SamplingParams,
)
from runtime.engine.input_processor import MAX_PRIORITY, MAX_SALT_CHARACTERS
from runtime.server.validation import (
    Bounded,
    RequestBody,
    StrictModel,
    Validated,
    WholeList,
    at_most,
    by_kind,
    unsupported,
)

MAX_PROMPTS = 1024
"""Prompts in one body."""

MAX_TOKEN_ID = 2**31 - 1
MAX_TOKEN_IDS = 2**20
"""Longest list of token ids in a body; the engine then checks it against ``max_model_len``."""

MAX_STOP_TOKENS = 1024
MAX_STOP_CHARACTERS = 1024
"""Length of one stop string: the end of every text is compared with it after each token."""

MAX_TOKENIZED_CHARACTERS = 2**18
"""Length of a text for /tokenize, which is not refused for ``max_model_len``."""

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_MODEL_CHARACTERS = 1024
MAX_NAME_CHARACTERS = 256
MAX_LABEL_CHARACTERS = 4096
MAX_DESCRIPTION_CHARACTERS = 65536


_SAMPLING = {each.name: each.metadata for each in dataclasses.fields(SamplingParams)}


def _bounds(name: str) -> Bounded:
    """The bounds of a field of :class:`SamplingParams`."""
    return Bounded(*_SAMPLING[name]["bounds"])


def _described(name: str) -> Any:
    """An optional field with the description of a field of :class:`SamplingParams`."""
    return Field(default=None, description=_SAMPLING[name]["help"])


def _text(low: int, high: int, description: str | None = None) -> Any:
    return Field(default=None, min_length=low, max_length=high, description=description)


# ---- types that several fields share

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True), WholeList]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
AnyObject = dict[str, Any]


def _text_or_list(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else None


def _text_or_object(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "object" if isinstance(value, dict) else None


def _prompt_kind(value: Any) -> str | None:
    """The branch of ``prompt``: the first entry of a list decides."""
    if not isinstance(value, list):
        return "text" if isinstance(value, str) else None
    first: Any = value[0] if value else 0
    if isinstance(first, str):
        return "texts"
    if isinstance(first, list):
        return "lists"
    return "ids" if isinstance(first, (int, float)) else None


def _token_id_text(value: str) -> str:
    if not re.fullmatch("[0-9]{1,10}", value):
        raise PydanticCustomError("invalid_value", "a token id")
    return value


TokenIdText = Annotated[
    str, AfterValidator(_token_id_text), WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,10}$"})
]
Bias = Annotated[float, Field(ge=LOGIT_BIAS_BOUNDS[0], le=LOGIT_BIAS_BOUNDS[1], allow_inf_nan=False)]

Stop = Annotated[
    Annotated[StopString, Tag("text")] | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("list")],
    by_kind(_text_or_list, f"a text, or a list of at most {MAX_STOP_STRINGS}"),
]

PromptInput = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("lists")],
    by_kind(_prompt_kind, "a text, a list of texts, a list of token ids, or a list of such lists"),
]


# ---- parts of both completion APIs


class StreamOptions(StrictModel):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputsField(StrictModel):
    """vLLM's ``structured_outputs``: exactly one field is set."""

    json_: (
        Annotated[
            Annotated[AnyObject, Tag("object")] | Annotated[GrammarText, Tag("text")],
            by_kind(_text_or_object, "a JSON schema, as an object or as text"),
        ]
        | None
    ) = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: GrammarText | None = None
    grammar: GrammarText | None = None
    choice: Annotated[list[GrammarText], Field(min_length=1, max_length=MAX_STRUCTURED_CHOICES)] | None = None


class PlainFormat(StrictModel):
    """A response format without a schema."""

    type: Literal["text", "json_object"]


class JsonSchema(StrictModel):
    """A named JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    description: str | None = _text(0, MAX_DESCRIPTION_CHARACTERS)
    schema_: AnyObject = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """A response format with a JSON schema that the text has to match."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class GenerationBody(RequestBody):
    """The fields that both completion APIs share."""

    model: str | None = _text(0, MAX_MODEL_CHARACTERS, "one of /v1/models; default: the first of them")
    n: Annotated[int, _bounds("n")] | None = _described("n")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, _bounds("temperature")] | None = _described("temperature")
    top_p: Annotated[float, _bounds("top_p")] | None = _described("top_p")
    presence_penalty: Annotated[float, _bounds("presence_penalty")] | None = _described("presence_penalty")
    frequency_penalty: Annotated[float, _bounds("frequency_penalty")] | None = _described("frequency_penalty")
    seed: Annotated[int, _bounds("seed")] | None = _described("seed")
    stop: Stop | None = None
    logit_bias: (
        Annotated[
            dict[TokenIdText, Bias],
            Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}),
            at_most(MAX_LOGIT_BIAS),
        ]
        | None
    ) = Field(default=None, description="a number added to the logit of each of these token ids")
    response_format: Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    # Beyond OpenAI's API, with vLLM's names.
    top_k: Annotated[int, Bounded(-1, _SAMPLING["top_k"]["bounds"][1])] | None = Field(
        default=None, description="0 or -1: all tokens"
    )
    min_p: Annotated[float, _bounds("min_p")] | None = _described("min_p")
    repetition_penalty: Annotated[float, _bounds("repetition_penalty")] | None = _described("repetition_penalty")
    min_tokens: Annotated[int, _bounds("min_tokens")] | None = _described("min_tokens")
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS), WholeList] | None = None
    structured_outputs: StructuredOutputsField | None = None
    prompt_logprobs: Annotated[int, _bounds("prompt_logprobs")] | None = _described("prompt_logprobs")
    priority: Annotated[int, Bounded(-MAX_PRIORITY, MAX_PRIORITY)] | None = Field(
        default=None, description="lower values are scheduled first"
    )
    cache_salt: str | None = _text(
        1, MAX_SALT_CHARACTERS, "prompts share cached blocks only with prompts of the same salt"
    )
    # OpenAI's, without an effect on the response.
    user: str | None = _text(0, MAX_LABEL_CHARACTERS)
    store: bool | None = None
    metadata: AnyObject | None = None
    service_tier: str | None = _text(0, 64)
    safety_identifier: str | None = _text(0, MAX_LABEL_CHARACTERS)
    prompt_cache_key: str | None = _text(0, MAX_LABEL_CHARACTERS)


class CompletionRequest(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: PromptInput
    max_tokens: Annotated[int, Bounded(0, MAX_OUTPUT_TOKENS)] | None = Field(
        default=None, description="default 16; 0 only together with echo"
    )
    logprobs: Annotated[int, _bounds("logprobs")] | None = _described("logprobs")
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: Annotated[int, _bounds("n")] | None = Field(default=None, description="only the same as n")
    suffix: Annotated[None, unsupported("infilling is not supported")] = None


# ---- chat


class TextPart(StrictModel):
    """A text part of a message's content."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: str


class FunctionCall(StrictModel):
    """The function that an assistant message calls."""

    model_config = ConfigDict(extra="allow")

    name: Name
    arguments: str = Field(description="a JSON object, as text")


class ToolCall(StrictModel):
    """A tool call of an assistant message."""

    model_config = ConfigDict(extra="allow")

    id: Name | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(StrictModel):
    """A message. The chat template receives it as sent, fields of other names included."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("list")],
            by_kind(_text_or_list, "a text, or a list of text parts; this model reads text only"),
        ]
        | None
    ) = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None


class FunctionDefinition(StrictModel):
    """A function that the chat template may describe to the model."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    description: str | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool that the chat template may describe to the model."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


Messages = Annotated[
    list[Annotated[dict[str, Any], Validated(Message)]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]
Tools = Annotated[list[Annotated[dict[str, Any], Validated(Tool)]], Field(max_length=MAX_TOOLS)]


class ChatCompletionRequest(GenerationBody):
    """The body of ``/v1/chat/completions``."""

    messages: Messages
    max_tokens: Annotated[int, _bounds("max_tokens")] | None = Field(
        default=None, description="default: what max_model_len leaves"
    )
    max_completion_tokens: Annotated[int, _bounds("max_tokens")] | None = Field(
        default=None, description="the same as max_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _bounds("logprobs")] | None = Field(default=None, description="needs logprobs: true")
    tools: Tools | None = None
    tool_choice: Literal["none", "auto"] | None = Field(
        default=None, description="the response is not parsed for tool calls"
    )
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: Annotated[None, unsupported("this model reads and writes text only")] = None
    prediction: Annotated[None, unsupported("there is no speculative decoding")] = None
    reasoning_effort: Annotated[None, unsupported("say in a message how much the model should reason")] = None
    functions: Annotated[None, unsupported("use tools")] = None
    function_call: Annotated[None, unsupported("use tools")] = None
    web_search_options: Annotated[None, unsupported("there is no search")] = None


# ---- tokens


class TokenizeTextRequest(RequestBody):
    """The body of ``/tokenize`` with a text."""

    model: str | None = _text(0, MAX_MODEL_CHARACTERS)
    prompt: Annotated[str, Field(max_length=MAX_TOKENIZED_CHARACTERS)]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(RequestBody):
    """The body of ``/tokenize`` with messages."""

    model: str | None = _text(0, MAX_MODEL_CHARACTERS)
    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


def _tokenize_kind(value: Any) -> str:
    return "messages" if isinstance(value, dict) and "messages" in value else "prompt"


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("prompt")] | Annotated[TokenizeChatRequest, Tag("messages")],
    by_kind(_tokenize_kind, "an object with prompt or messages"),
]


class DetokenizeRequest(RequestBody):
    """The body of ``/detokenize``."""

    model: str | None = _text(0, MAX_MODEL_CHARACTERS)
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True), WholeList]
