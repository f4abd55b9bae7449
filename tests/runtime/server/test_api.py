"""Responses of both APIs, streamed and not, as OpenAI's own client parses them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from runtime.common.sampling_params import SamplingParams, StructuredOutputs
from runtime.server.app_state import AppState
from runtime.server.chat import create_chat_completion, stream_chat_completion
from runtime.server.options import ServerOptions
from runtime.server.schemas import ChatCompletionRequest
from tests.runtime.engine.fake_executor import expected_output
from tests.runtime.server.running import EOS, VOCAB, Running, gather_events, read_until, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def script(server: Running, text: str, *, then: tuple[int, ...] = ()) -> None:
    """Set the text that the fake model generates for the next prompt."""
    number = max((new.req_id for plan in server.executor.plans for new in plan.new), default=-1) + 1
    server.executor.scripted[number] = [*text.encode(), *then]


def sampling(server: Running) -> SamplingParams:
    """The sampling parameters of the newest sequence on the ranks."""
    return [new for plan in server.executor.plans for new in plan.new][-1].sampling


def decoded(server: Running, prompt: str, params: SamplingParams, count: int) -> str:
    return server.state.tokenizer.decode(expected_output(list(prompt.encode()), params, VOCAB - 1, count))


# ---- completions


def test_completion(client: openai.OpenAI, server: Running) -> None:
    done = client.completions.create(model="tiny", prompt="ab", max_tokens=7, seed=5)
    (choice,) = done.choices
    assert choice.text == decoded(server, "ab", SamplingParams(seed=5), 7)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (done.object, done.model, done.id[:5]) == ("text_completion", "tiny", "cmpl-")
    assert done.usage and (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (2, 7, 9)
    assert client.completions.create(model="tiny", prompt="ab").usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", [["ab", "cd"], [[97, 98], [99, 100]]])
@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_and_samples_are_numbered(
    client: openai.OpenAI, server: Running, prompt: Any, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "n": 3, "max_tokens": 4, "seed": 9}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == list(range(6))
    alone = [client.completions.create(**{**asked, "prompt": one}) for one in prompt]
    texts = [choice.text for one in alone for choice in one.choices]
    assert len(set(texts)) == 6
    if stream:
        got = [""] * 6
        for chunk in client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                got[choice.index] += choice.text
        assert got == texts
    else:
        assert [choice.text for choice in whole.choices] == texts
    assert whole.usage and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 24)


def test_stream_has_the_content_of_the_whole_response(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "stream", "max_tokens": 40, "logprobs": 2, "seed": 3}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert "".join(chunk.choices[0].text for chunk in parts) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens == 40
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for chunk in parts for item in getattr(chunk.choices[0].logprobs, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)


def test_stream_sends_each_token_as_it_is_generated(server: Running) -> None:
    script(server, "xyz")
    permits = server.executor.permits = threading.Semaphore(0)
    try:
        with server.open_stream(max_tokens=3) as client:
            for letter in "xyz":
                permits.release()
                read_until(client, f'"text": "{letter}"'.encode())
    finally:
        server.executor.permits = None
        permits.release(1000)


def test_logprobs_of_a_completion(client: openai.OpenAI, server: Running) -> None:
    script(server, "xyz")
    logprobs = client.completions.create(model="tiny", prompt="ab", max_tokens=3, logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["x", "y", "z"]
    assert logprobs.token_logprobs == [-120.0, -121.0, -122.0]  # The fake model's logprobs are its token ids.
    assert logprobs.top_logprobs == [{"x": -120.0}, {"y": -121.0}, {"z": -122.0}]
    assert logprobs.text_offset == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("max_tokens", "text"), [(2, "abxy"), (0, "ab")])
def test_echo_scores_the_prompt(server: Running, stream: bool, max_tokens: int, text: str) -> None:
    script(server, "xy")
    reply = server.complete("ab", echo=True, logprobs=0, max_tokens=max_tokens, stream=stream)
    objects = reply.events if stream else [reply.json]
    choices = [choice for thing in objects for choice in thing["choices"]]
    assert "".join(choice["text"] for choice in choices) == text
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    values = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert tokens == list(text) and values == [None, -98.0, -120.0, -121.0][: len(text)]
    assert choices[-1]["finish_reason"] == "length" and "prompt_logprobs" not in choices[0]
    if not stream:
        assert reply.json["usage"]["completion_tokens"] == max_tokens
    assert server.complete([97, 98], echo=True, max_tokens=0).json["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(("prompt_logprobs", "count"), [(None, 2), (0, 2), (3, 3)])
def test_echo_scores_the_prompt_with_the_larger_number_of_logprobs(
    server: Running, prompt_logprobs: int | None, count: int
) -> None:
    assert server.complete("ab", echo=True, logprobs=2, prompt_logprobs=prompt_logprobs, max_tokens=1).status == 200
    assert sampling(server).prompt_logprobs == count


def test_prompt_logprobs_as_vllm_gives_them(server: Running) -> None:
    (choice,) = server.complete("abc", prompt_logprobs=1, max_tokens=1).json["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert others[0]["98"] == {"logprob": -98.0, "rank": 1, "decoded_token": "b"}
    chat = server.chat("a", prompt_logprobs=0, max_tokens=1).json
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_stop_strings_and_end_of_sequence(client: openai.OpenAI, server: Running) -> None:
    script(server, "one two three")
    choice = client.completions.create(model="tiny", prompt="a", stop=["wo t"], max_tokens=30).choices[0]
    assert (choice.text, choice.finish_reason) == ("one t", "stop")
    script(server, "one", then=(EOS,))
    chunks = list(client.completions.create(model="tiny", prompt="a", max_tokens=30, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one" and chunks[-1].choices[0].finish_reason == "stop"


def test_every_sampling_field_reaches_the_engine(server: Running) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.5, "seed": 77, "min_tokens": 2, "ignore_eos": True, "max_tokens": 3,
    }  # fmt: skip
    reply = server.complete("a", stop_token_ids=[299], logit_bias={"5": -100, "7": 1.5}, stop="zzzz", **fields)
    assert reply.status == 200, reply.body
    got = sampling(server)
    assert {name: getattr(got, name) for name in fields} == fields
    assert got.logit_bias == ((5, -100.0), (7, 1.5)) and got.stop_token_ids == (299,) and got.stop == ("zzzz",)
    assert server.complete("a", top_k=-1).status == 200 and sampling(server).top_k == 0


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            StructuredOutputs(json='{"type": "null"}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"json": {"type": "null"}}}, StructuredOutputs(json='{"type": "null"}')),
    ],
)
def test_structured_output_reaches_the_engine(server: Running, field: Any, expected: Any) -> None:
    assert server.complete("a", **field).status == 200
    assert sampling(server).structured_outputs == expected


def test_usage_has_cached_tokens_and_salts_separate_prompts(client: openai.OpenAI, server: Running) -> None:
    def cached(**fields: Any) -> int:
        done = client.completions.create(model="tiny", prompt="p" * 64, max_tokens=1, extra_body=fields)
        return done.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(cache_salt="mine") == 0 and cached(cache_salt="mine") == 60
    assert cached(cache_salt="yours") == 0 and cached(priority=-3) == 0


# ---- chat


def test_chat_completion(client: openai.OpenAI, server: Running) -> None:
    script(server, "Paris", then=(EOS,))
    done = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        logprobs=True,
        top_logprobs=1,
    )
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Paris", "stop")
    assert done.object == "chat.completion" and done.id.startswith("chatcmpl-")
    prompt = "<system>be<user>Hi<assistant>"
    started = [new for plan in server.executor.plans for new in plan.new][-1]
    assert bytes(started.token_ids).decode() == prompt
    assert done.usage and done.usage.prompt_tokens == len(prompt)
    entry = choice.logprobs.content[0]
    assert (entry.token, entry.logprob, entry.bytes, len(entry.top_logprobs)) == ("P", -80.0, [80], 1)


def test_bytes_of_chat_logprobs_join_to_the_text_within_characters_too(client: openai.OpenAI, server: Running) -> None:
    text = "né 🙂"
    script(server, text, then=(EOS,))
    (choice,) = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True
    ).choices
    entries = choice.logprobs.content
    assert choice.message.content == text and len(entries) == len(text.encode()) + 1
    assert bytes(byte for entry in entries[:-1] for byte in entry.bytes) == text.encode()
    assert [entry.token for entry in entries[:3]] == ["n", "\ufffd", "\ufffd"]


def test_streamed_chat_completion(client: openai.OpenAI, server: Running) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 30, "seed": 1, "n": 2,
        "logprobs": True,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    for index in (0, 1):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert parts[0].delta.role == "assistant" and [p.finish_reason for p in parts[1:]].count("length") == 1
        assert "".join(part.delta.content or "" for part in parts) == whole.choices[index].message.content
        logprobs = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert logprobs == whole.choices[index].logprobs.content


def test_chat_without_max_tokens_generates_up_to_max_model_len(server: Running) -> None:
    done = server.chat("x" * 300).json
    assert done["choices"][0]["finish_reason"] == "length"
    assert done["usage"]["total_tokens"] == 400


def test_chat_without_max_tokens_fits_a_small_kv_cache() -> None:
    with running(num_blocks=20) as small:  # 80 tokens fit; the last one takes no slot.
        assert small.chat("x").json["usage"]["total_tokens"] == 81


def test_tools_reach_the_template(server: Running) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "user", "content": "y"}]

    def prompt(**more: Any) -> str:
        tokens = server.post("/tokenize", messages=messages, **more).json["tokens"]
        return bytes(tokens).decode()

    assert prompt() == "<assistant>[f 5]<user>y<assistant>"
    assert json.dumps(tools) in prompt(tools=tools, add_generation_prompt=False)

    def prompt_tokens(**more: Any) -> int:
        return server.post("/v1/chat/completions", messages=messages, max_tokens=1, **more).json["usage"][
            "prompt_tokens"
        ]

    plain = prompt_tokens()
    assert (
        prompt_tokens(tools=tools, tool_choice="auto") == prompt_tokens(tools=tools) == plain + len(json.dumps(tools))
    )
    assert prompt_tokens(tools=tools, tool_choice="none") == plain


# ---- models and tokens


def test_models_are_listed(client: openai.OpenAI, server: Running) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and server.get("/v1/models").json["data"][0]["max_model_len"] == 400
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        client.models.retrieve("other/model")


def test_tokenize_and_detokenize(server: Running) -> None:
    made = server.post("/tokenize", prompt="héllo", return_token_strs=True).json
    assert made["tokens"] == list("héllo".encode()) and made["count"] == 6 and made["max_model_len"] == 400
    assert len(made["token_strs"]) == 6 and made["token_strs"][0] == "h"
    assert server.post("/detokenize", tokens=made["tokens"]).json == {"prompt": "héllo"}
    assert server.get("/version").json["version"]


def test_endpoints_without_http(server: Running) -> None:
    """As run-batch calls them: in another event loop, without an application."""

    async def both() -> tuple[dict[str, Any], bytes]:
        state = AppState(server.state.engine, server.state.tokenizer, server.state.config, server.state.model_config)
        body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], seed=4, max_tokens=9)
        try:
            whole = await create_chat_completion(state, body, request_id="r")
            return whole, await gather_events(stream_chat_completion(state, body, request_id="s"))
        finally:
            state.close()

    whole, events = asyncio.run(both())
    assert whole["id"] == "chatcmpl-r"
    deltas = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content", "") for event in deltas for choice in event["choices"])
    assert text == whole["choices"][0]["message"]["content"]


def test_served_model_names() -> None:
    with running(options=ServerOptions(served_model_names=("first", "second"))) as named:
        assert [card["id"] for card in named.get("/v1/models").json["data"]] == ["first", "second"]
        assert named.complete(model="second").json["model"] == "second"
        assert named.complete().json["model"] == "first"
        assert named.complete(model="tiny").status == 404
