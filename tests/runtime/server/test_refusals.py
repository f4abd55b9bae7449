"""Refused requests: status, numbers in the message, OpenAI's error shape, and no effect on other requests."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from runtime.server.options import ServerOptions
from tests.runtime.server.running import TIMEOUT, Running, read_until, running, wait_until

MEBIBYTE = 1024 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as made:
        yield made
        assert made.complete().status == 200


# ---- wrong bodies


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [1] * 401}, "prompt of 401 tokens .* max_model_len is 400, so it may have 399"),
        ({"prompt": "x" * 401}, "prompt of 401 tokens"),
        ({"prompt": "x" * 300_000}, r"prompt of 300000 characters, more than \d+ tokens, is too long: .* 400"),
        ({"n": 10**9}, "n is 1000000000; allowed: 1 to 128"),
        ({"prompt": ["x"] * 100_000}, "prompt has 100000 entries; allowed: at most 1024"),
        ({"prompt": ["x"] * 1000, "n": 128}, "1000 prompts with n 128 are 128000 samples; .*: 1024"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 is more than max_tokens 8"),
        ({"prompt": [1, 300]}, "token id 300 at position 1; .* 300 tokens, 0 to 299"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": []}, "prompt has 0 entries"),
        ({"logit_bias": {"300": 1}}, "logit_bias has token id 300"),
        ({"logit_bias": {"-1": 1}}, "'-1'; it takes a token id"),
        ({"stop_token_ids": [300]}, "stop_token_ids has token id 300"),
        ({"max_tokens": 0}, "max_tokens is 0; allowed: 1 or more"),
        ({"max_tokens": 399}, None),
        ({"best_of": 2}, "best_of is 2; it can only be the same as n"),
        ({"stream_options": {}}, "stream_options needs stream"),
        ({"stream": True, "prompt_logprobs": 1}, "leave out stream"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "give one of them"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one of .* got regex, choice"),
        ({"structured_outputs": {"regex": "("}}, "structured output"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "contradict"),
        ({"prompt": "\ud83d"}, "not valid Unicode"),
        ({"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}, None),
        ({"tool_choice": "auto"}, "unknown field 'tool_choice'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_bodies(server: Running, fields: Any, message: str | None, stream: bool) -> None:
    body = {"prompt": "x", **({"stream": True} if stream and "stream_options" not in fields else {}), **fields}
    reply = server.post("/v1/completions", **body)
    if message is None:
        assert reply.status == 200, reply.body
        return
    assert reply.status == 400
    assert re.search(message, reply.error["message"]), reply.error
    assert reply.error["type"] == "invalid_request_error"


def test_openai_client_raises_its_own_errors(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="temperature is 101") as caught:
            client.completions.create(model="tiny", prompt="x", temperature=101)
        assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.BadRequestError, match="min_tokens 9 is more than max_tokens 8") as caught:
            client.completions.create(model="tiny", prompt="x", max_tokens=8, extra_body={"min_tokens": 9})
        assert (caught.value.param, caught.value.code) == ("min_tokens", "invalid_value")
        with pytest.raises(openai.NotFoundError, match="'gpt' does not exist; there is tiny") as missing:
            client.completions.create(model="gpt", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="there is no search"):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], web_search_options={}
            )


@pytest.mark.parametrize(
    ("message", "fields", "error"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, {}, "reads text only|'image_url'"),
        ({"role": "robot", "content": "x"}, {}, "role is 'robot'; allowed: 'system'"),
        ({"content": "x"}, {}, "role is missing"),
        ({"role": "user", "content": "x"}, {"tool_choice": "required"}, "tool_choice is 'required'"),
        ({"role": "user", "content": "x"}, {"top_logprobs": 2}, "needs logprobs"),
        ({"role": "user", "content": "x"}, {"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        ({"role": "user", "content": "x" * 400}, {}, "tokens leaves no room"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]},
            {},
            "have to be a JSON object",
        ),
    ],
)
def test_wrong_chats(server: Running, message: Any, fields: Any, error: str) -> None:
    reply = server.post("/v1/chat/completions", messages=[message], **fields)
    assert reply.status == 400 and re.search(error, reply.error["message"]), reply.body


def test_checkpoint_without_a_template() -> None:
    with running(template=None) as bare:
        assert "no chat template" in bare.chat().error["message"]
        assert bare.complete().status == 200
    with running(template="{{ raise_exception('only users') }}") as strict:
        reply = strict.chat()
        assert reply.status == 400 and "only users" in reply.error["message"]


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{", b'{"prompt": NaN}', b"[" * 5000, b'"' + b"\\" * 5000])
def test_bodies_that_are_not_objects(server: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = server.ask("POST", path, body)
        assert reply.status == 400 and reply.error["message"]


def test_unknown_routes_and_methods(server: Running) -> None:
    assert server.get("/v1/embeddings").status == server.get("/docs").status == server.get("/health/").status == 404
    reply = server.get("/v1/completions")
    assert reply.status == 405 and reply.headers["allow"] == "POST" and reply.error["message"]


# ---- bodies that are too long or too slow


def test_body_of_100_mib_is_refused_unread(server: Running) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as client:
        client.sendall(f"{head}Content-Length: {100 * MEBIBYTE}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(4096), b""))  # To the end: the connection is closed.
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer
    assert f"the body has {100 * MEBIBYTE} bytes or more; allowed: 8388608".encode() in answer
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as client:
        client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                client.sendall(b"100000\r\n" + b"x" * MEBIBYTE + b"\r\n")
                sent += 1
            raise AssertionError("100 MiB were accepted")
        assert 8 <= sent < 40  # Bytes over the limit are in the kernel's buffers.
    assert process.memory_info().rss - before < 40 * MEBIBYTE


def test_slow_body_or_head_closes_the_connection() -> None:
    with running(options=ServerOptions(body_seconds=0.3)) as quick:
        with socket.create_connection(("127.0.0.1", quick.port), timeout=TIMEOUT) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answer = b"".join(iter(lambda: client.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 408 ") and b"within 0.3 s; 1 bytes" in answer
        for sent in (b"", b"POST /v1/comp"):
            with socket.create_connection(("127.0.0.1", quick.port), timeout=TIMEOUT) as client:
                client.sendall(sent)
                assert client.recv(4096) == b""
        with socket.create_connection(("127.0.0.1", quick.port), timeout=TIMEOUT) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            read_until(client, b'{"status":"ok"}')
            client.sendall(b"GET /hea")  # The second request on the connection is never complete.
            assert client.recv(4096) == b""


def test_header_deadline_does_not_end_a_long_response() -> None:
    with running(options=ServerOptions(body_seconds=0.2)) as quick:
        quick.executor.going.clear()
        timer = threading.Timer(0.6, quick.executor.going.set)
        timer.start()
        assert quick.complete().status == 200
        timer.join()


# ---- API key, request ids, internal errors


def test_every_route_but_health_needs_the_key() -> None:
    with running(options=ServerOptions(api_key="sesame")) as locked:
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere", "/v1/completions"):
            reply = locked.get(path)
            assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer" and reply.error
        for wrong in ("Bearer open", "Bearer", "Basic sesame", "sesame", "Bearer sesam", "Bearer sesamee"):
            assert locked.post("/v1/completions", {"Authorization": wrong}, prompt="x").status == 401
        assert locked.get("/health").status == locked.get("/ping").status == 200
        right = {"Authorization": "Bearer sesame"}
        assert locked.post("/v1/completions", right, prompt="x").status == 200
        assert locked.get("/v1/models", **right).status == locked.get("/metrics", **right).status == 200
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="sesame", max_retries=0) as client:
            assert client.models.list().data
        with (
            pytest.raises(openai.AuthenticationError),
            openai.OpenAI(base_url=f"{locked.url}/v1", api_key="x") as other,
        ):
            other.models.list()


def test_request_ids(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lockstep")
    own = server.post("/v1/completions", {"X-Request-Id": "my-id.1:2"}, prompt="secret words")
    assert own.headers["x-request-id"] == "my-id.1:2" and own.json["id"] == "cmpl-my-id.1:2"
    for bad in ("a b", "x" * 129, "a\tb", "<script>", "é"):
        made = server.get("/version", **{"X-Request-Id": bad}).headers["x-request-id"]
        assert len(made) == 32 and made.isalnum()
    server.get("/v1/models/%0aforged%20line?secret")
    lines = [record.getMessage() for record in caplog.records]
    assert any("POST /v1/completions 200" in line and "id=my-id.1:2" in line for line in lines)
    assert not any("secret" in line or "\n" in line for line in lines)


def test_internal_error_has_openais_shape_and_is_logged(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.state, "model_name", lambda name: 1 / 0)
    for reply in (server.complete(), server.complete(stream=True), server.get("/v1/models/tiny")):
        assert reply.status == 500 and reply.error["type"] == "server_error"
        assert "division" not in reply.error["message"]
    assert caplog.text.count("ZeroDivisionError") == 3
    monkeypatch.undo()
    assert server.complete().status == 200


# ---- queue full


def test_full_queue_sends_retry_after() -> None:
    with running(max_num_seqs=1, max_queued_requests=2) as small:
        small.executor.going.clear()
        streams = [small.open_stream(max_tokens=5) for _ in range(3)]
        wait_until(lambda: small.state.engine.snapshot().num_waiting >= 2)
        reply = small.complete()
        assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
        assert reply.error["code"] == "queue_full" and "max_queued_requests is 2" in reply.error["message"]
        assert small.complete(stream=True).status == 429
        small.executor.going.set()
        for stream in streams:
            with stream:
                read_until(stream, b"data: [DONE]")
        assert small.complete().status == 200
