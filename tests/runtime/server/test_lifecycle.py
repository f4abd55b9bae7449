"""Clients that disconnect or do not read, bytes that are not HTTP, the drain, and an engine that fails or stalls."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from runtime.common.errors import RankDiedError
from runtime.server.options import ServerOptions
from tests.runtime.server.running import TIMEOUT, Running, read_until, running, wait_until


def counter(server: Running, name: str) -> Any:
    return getattr(server.state.engine.snapshot(), name)


# ---- clients


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"]])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts_the_request_and_frees_its_blocks(
    stream: bool, prompt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lockstep")
    with running() as server:
        permits = server.executor.permits = threading.Semaphore(0)
        num_samples = 2 if prompt == "ab" else 4
        client = server.open_stream(prompt=prompt, max_tokens=398, n=2, stream=stream)
        # Each poll permits a step: the engine reads requests and aborts between two steps, and they arrive one by one.
        wait_until(lambda: permits.release() or counter(server, "num_running") == num_samples)
        assert counter(server, "kv_usage") > 0
        client.close()
        wait_until(lambda: server.state.in_flight.num_active == 0)
        wait_until(lambda: permits.release() or counter(server, "kv_usage") == 0)
        wait_until(lambda: counter(server, "finished")["abort"] == num_samples)
        wait_until(lambda: "POST /v1/completions gone " in caplog.text)
        permits.release(1000)
        assert server.complete(max_tokens=5).status == 200


def test_disconnect_while_waiting_and_within_the_body() -> None:
    with running(max_num_seqs=1) as server:
        server.executor.going.clear()
        first, second = server.open_stream(max_tokens=3), server.open_stream()
        wait_until(lambda: counter(server, "num_waiting") + counter(server, "num_running") == 2)
        second.close()
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            wait_until(lambda: server.state.in_flight.num_active == 2)
        wait_until(lambda: server.state.in_flight.num_active == 1)
        server.executor.going.set()
        with first:
            read_until(first, b"[DONE]")
        assert counter(server, "finished")["length"] == 1


def test_client_that_does_not_read_takes_a_bounded_buffer_and_delays_no_other() -> None:
    asked = {"max_tokens": 700, "n": 4, "logprobs": 1, "seed": 6, "prompt": "ab"}
    with running(max_model_len=1000, num_blocks=1024, send_buffer=8192) as server:
        client = server.open_stream(receive_buffer=4096, **asked)
        wait_until(lambda: counter(server, "finished")["length"] == 4)  # The engine does not wait for readers.
        (connection,) = server.call(lambda: list(server.run._server.server_state.connections))
        assert server.call(connection.transport.get_write_buffer_size) < 200_000
        assert server.complete(max_tokens=5).status == 200
        with client:
            events = read_until(client, b"[DONE]").decode()
        texts = [""] * 4
        for line in events.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
        whole = server.post("/v1/completions", **asked).json
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert len(events) > 100_000


def test_bytes_that_are_not_http() -> None:
    rng = random.Random(22)
    with running() as server:
        for length in (0, 1, 10, 1000, 100_000):
            for start in (
                b"",
                b"POST /v1/completions HTTP/1.1\r\n",
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
            ):
                with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as client:
                    try:
                        client.sendall(start + rng.randbytes(length))
                        client.shutdown(socket.SHUT_WR)
                        while client.recv(65536):
                            pass
                    except (BrokenPipeError, ConnectionResetError):
                        pass  # The server closed the connection early.
        assert server.get("/health").status == 200 and server.complete().status == 200
        long = "GET /health HTTP/1.1\r\nHost: x\r\nX: " + "x" * 100_000
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as client:
            client.sendall(long.encode())
            assert client.recv(65536).startswith(b"HTTP/1.1 4")


# ---- the end of the server


def test_drain_refuses_new_requests_and_finishes_those_in_flight() -> None:
    with running() as server, ThreadPoolExecutor() as threads:
        permits = server.executor.permits = threading.Semaphore(0)
        streams = [server.open_stream(max_tokens=20) for _ in range(4)]
        whole = [threads.submit(server.complete, max_tokens=20) for _ in range(4)]
        wait_until(lambda: server.state.engine.num_unfinished == 8)
        server.call(server.run.on_signal, signal.SIGTERM)
        refused = server.complete()
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.error["code"] == "shutting_down"
        health = server.get("/health")
        assert health.status == 503 and "shutting down" in health.error["message"]
        assert server.get("/metrics").status == 200
        permits.release(1000)
        for stream in streams:
            with stream:
                read_until(stream, b"[DONE]")
        assert [reply.result().json["usage"]["completion_tokens"] for reply in whole] == [20] * 4
        wait_until(lambda: server.ended)
        assert server.results == [None]
        with pytest.raises(ConnectionRefusedError):
            server.get("/health")


def test_requests_in_flight_at_the_drain_deadline_get_an_error() -> None:
    with running(options=ServerOptions(drain_seconds=0.2)) as server, ThreadPoolExecutor() as threads:
        permits = server.executor.permits = threading.Semaphore(0)
        stream = server.open_stream(max_tokens=300)
        silent = server.open_stream(max_tokens=300)
        whole = threads.submit(server.complete, max_tokens=300)
        wait_until(lambda: server.state.engine.num_unfinished == 3)
        permits.release(4)
        read_until(stream, b'"text"')
        server.call(server.run.on_signal, signal.SIGTERM)
        assert b'"code": "shutting_down"' in read_until(stream, b"[DONE]")
        assert whole.result().status == 503
        wait_until(lambda: server.ended)
        permits.release(1000)
        stream.close()
        silent.close()


def test_engine_failure_reaches_every_request_and_ends_the_server() -> None:
    with running(max_restarts=0) as server, ThreadPoolExecutor() as threads:
        permits = server.executor.permits = threading.Semaphore(0)
        stream = server.open_stream(max_tokens=300)
        whole = threads.submit(server.complete, max_tokens=300)
        wait_until(lambda: server.state.engine.num_unfinished == 2)
        permits.release(4)
        read_until(stream, b'"text"')
        failure = server.executor.failure = RankDiedError(rank=1, returncode=-9)
        permits.release(1000)
        last = read_until(stream, b"[DONE]").decode()
        assert "rank 1" in last and "SIGKILL" in last and '"code": "engine_dead"' in last
        reply = whole.result()
        assert reply.status == 503 and "SIGKILL" in reply.error["message"] and reply.headers["retry-after"]
        health = server.get("/health")
        assert health.status == 503 and "rank 1" in health.error["message"]
        assert server.complete().status == 503
        stream.close()
        wait_until(lambda: server.ended)
        assert server.results == [failure]


def test_health_is_503_while_the_engine_stalls() -> None:
    with running(step_timeout=0.05) as server:
        assert server.get("/health").status == 200
        server.executor.going.clear()
        client = server.open_stream(max_tokens=3)
        wait_until(lambda: server.get("/health").status == 503)
        assert "made no step for" in server.get("/health").error["message"]
        server.executor.going.set()
        with client:
            read_until(client, b"[DONE]")
        assert server.get("/health").status == server.get("/ping").status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_non_finite_logits_end_one_request_only(stream: bool) -> None:
    with running() as server:
        permits = server.executor.permits = threading.Semaphore(0)
        server.executor.broken.add(0)
        first = server.open_stream(max_tokens=10, stream=stream)
        wait_until(lambda: counter(server, "num_running") == 1)
        second = server.open_stream(max_tokens=10)
        permits.release(1000)
        with first, second:
            assert b"not finite" in read_until(first, b"generation_failed")
            assert b"error" not in read_until(second, b"[DONE]")
        assert 'lockstep:broken_logits_total{model_name="tiny"} 1.0' in server.get("/metrics").body.decode()
        assert server.get("/health").status == 200


def test_openai_client_raises_the_error_in_a_stream() -> None:
    with running() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        permits = server.executor.permits = threading.Semaphore(3)
        stream = client.completions.create(model="tiny", prompt="ab", max_tokens=50, stream=True)
        next(stream)
        server.executor.broken.add(0)
        permits.release(1000)
        with pytest.raises(openai.APIError, match="not finite"):
            list(stream)
