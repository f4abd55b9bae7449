"""``lockstep serve`` as a process: start and end, and the demo model through OpenAI's own client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import psutil
import pytest

from launch.cli.commands.serve import bind, check
from launch.cli.main import main
from runtime.common.errors import InputError
from tests.checkpoints import tiny_checkpoint

BIN = Path(sys.executable).parent
TIMEOUT = 60.0


class Served:
    """A server in its own process group, as a terminal starts it."""

    def __init__(self, model: object, *flags: object, prefix: tuple[str, ...] = (), **environment: str) -> None:
        argv = [*(prefix or (str(BIN / "lockstep"),)), "serve", str(model), "--port", "0", *map(str, flags)]
        self.process = subprocess.Popen(
            argv, stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **environment}
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + 2 * TIMEOUT
        while not (found := re.search(pattern, self.said)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.01)
        return found[found.lastindex or 0]

    def ready(self) -> str:
        return self.wait_for(r"lockstep serve: ready at (http://127\.0\.0\.1:\d+)\n")

    def client(self, **settings: Any) -> openai.OpenAI:
        settings = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT, **settings}
        return openai.OpenAI(base_url=f"{self.ready()}/v1", **settings)

    def end(self, number: int | None = None) -> int:
        """Send a signal to the server, wait for its end, and return its exit code."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(TIMEOUT)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join()
        assert self.process.stderr
        self.process.stderr.close()


@contextlib.contextmanager
def served(model: object, *flags: object, **more: Any) -> Generator[Served]:
    server = Served(model, *flags, **more)
    try:
        yield server
    finally:
        server.close()


def tiny(*flags: object, **more: Any) -> Any:
    """A server of a small model with room for long outputs."""
    folder = tiny_checkpoint(max_position_embeddings=8192)
    return served(folder, "--enforce-eager", "--kv-cache-memory", 64 * 1024 * 1024, *flags, **more)


def status(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def streams(client: openai.OpenAI, count: int, max_tokens: int) -> list[Any]:
    """Streams that have each received an event."""
    asked: dict[str, Any] = {"model": "", "prompt": "Hello", "max_tokens": max_tokens, "stream": True}

    def begin(_: int) -> Any:
        stream = client.completions.create(**asked, extra_body={"ignore_eos": True})
        next(stream)
        return stream

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count)))


# ---- before anything starts


def test_error_of_a_taken_port_names_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} on 127.0.0.1 is taken by .* \(process {os.getpid()}\)"):
            bind("127.0.0.1", port)
    with contextlib.closing(bind("127.0.0.1", port)) as first:  # Free again at once.
        with pytest.raises(InputError, match="taken by another process"):
            bind("127.0.0.1", port)  # Bound, though it does not listen yet.
        assert first.getsockname()[1] == port
    with pytest.raises(InputError, match="no address"):
        bind("not an address", 0)
    with pytest.raises(InputError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_taken_port_ends_the_command_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "demo", "--port", str(taken.getsockname()[1])]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"process {os.getpid()}" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port is 70000; allowed: 0 to 65535"),
        (["--drain-timeout", "-1"], "--drain-timeout is -1.0; allowed: 0 to 86400"),
        (["--max-body-bytes", "1"], "--max-body-bytes is 1; allowed: 1024 to"),
        (["--api-key", "a b"], "the API key .* printable ASCII"),
        (["--tempreature", "1"], "unknown flag --tempreature"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
    ],
)
def test_wrong_flags(flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(["demo", *flags])


# ---- starting and ending


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ready_line_api_key_and_sigterm_while_idle() -> None:
    with tiny("--served-model-name", "a", "b", LOCKSTEP_API_KEY="sesame") as server:
        url = server.ready()
        curl = server.wait_for(r"  (curl .*)\n")
        assert url in curl and "$LOCKSTEP_API_KEY" in curl and "sesame" not in server.said
        done = subprocess.run(
            ["sh", "-c", curl], capture_output=True, text=True, env={**os.environ, "LOCKSTEP_API_KEY": "sesame"}
        )
        assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant", done.stderr
        assert status(f"{url}/v1/models")[0] == 401 and status(f"{url}/health")[0] == 200
        with server.client(api_key="sesame") as client:
            assert [model.id for model in client.models.list()] == ["a", "b"]
        listening = [c.laddr.ip for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        assert server.end(signal.SIGTERM) == 0, server.said


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ctrl_c_in_a_terminal_finishes_requests_in_flight() -> None:
    with tiny("-tp", 2, "--distributed-executor-backend", "local") as server, server.client() as client:
        running = streams(client, 8, 400)
        os.killpg(server.process.pid, signal.SIGINT)  # The workers receive it too.
        server.wait_for("SIGINT: finishing 8 requests")
        with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
            client.completions.create(model="", prompt="x")
        assert refused.value.status_code == 503 and int(refused.value.response.headers["retry-after"]) >= 1
        assert status(f"{server.ready()}/health")[0] == 503
        for stream in running:
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert server.end() == 0, server.said


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_second_signal_ends_everything() -> None:
    with tiny("-tp", 2, "--distributed-executor-backend", "local") as server, server.client() as client:
        (stream,) = streams(client, 1, 8000)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("SIGTERM: finishing 1 requests")
        assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM, server.said
        with pytest.raises((openai.APIError, OSError)):
            list(stream)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_dead_rank_without_restarts_ends_the_server_with_its_code() -> None:
    with tiny("--max-restarts", 0) as server, server.client() as client:
        (stream,) = streams(client, 1, 8000)
        url = server.ready()
        (rank,) = [
            child
            for child in psutil.Process(server.process.pid).children(recursive=True)
            if "rank_main" in " ".join(child.cmdline())
        ]
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError, match=r"rank 0 .*SIGKILL"):
            list(stream)
        code, body = status(f"{url}/health")
        assert code == 503 and "SIGKILL" in body["error"]["message"]
        assert server.end() == 128 + signal.SIGKILL, server.said


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("place", "number"), [("torchrun", signal.SIGTERM), ("lockstep launch", signal.SIGINT)])
def test_signal_to_torchrun_finishes_requests_in_flight(place: str, number: signal.Signals) -> None:
    torchrun = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "launch.spmd")
    launch = (str(BIN / "lockstep"), "launch", "--nproc-per-node", "2", "--max-restarts", "3", "--")
    with tiny(prefix=torchrun if place == "torchrun" else launch) as server, server.client() as client:
        running = streams(client, 4, 300)
        server.process.send_signal(number)
        server.wait_for(f"{number.name}: finishing 4 requests")
        for stream in running:
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        code = server.end()
        # torchrun reports every signal as a failure, whatever the exit code of the command.
        assert code == (1 if place == "torchrun" else 0), server.said
        assert "Traceback" not in server.said or place == "torchrun", server.said


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_second_signal_to_lockstep_launch_ends_everything_without_a_restart() -> None:
    launch = (str(BIN / "lockstep"), "launch", "--nproc-per-node", "2", "--max-restarts", "3", "--")
    with tiny(prefix=launch) as server, server.client() as client:
        (stream,) = streams(client, 1, 8000)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("SIGTERM: finishing 1 requests")
        assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM, server.said
        assert server.said.count("ready at") == 1
        with pytest.raises((openai.APIError, OSError)):
            list(stream)


# ---- the demo model, over Ray, as OpenAI's client sees it


@pytest.fixture(scope="module")
def demo() -> Iterator[openai.OpenAI]:
    flags = ["-tp", 2, "--distributed-executor-backend", "ray", "--max-model-len", 1024, "--enforce-eager"]
    with served("demo", *flags, "--dtype", "float32") as server:
        with server.client() as client:
            yield client
        assert server.end(signal.SIGTERM) == 0, server.said


ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "size": {"type": "integer", "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.leaves_session_processes
class TestDemoOverRay:
    def test_chat_streamed_and_not(self, demo: openai.OpenAI) -> None:
        whole = demo.chat.completions.create(**ASKED, temperature=0, max_tokens=32)
        assert "Paris" in (whole.choices[0].message.content or "") and whole.choices[0].finish_reason == "stop"
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(demo.chat.completions.create(**ASKED, temperature=0, max_tokens=32, **options))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content and len(chunks) > 5
        assert chunks[-1].usage and whole.usage
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    def test_completion_with_logprobs_and_stop(self, demo: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": "demo", "prompt": "One, two, three, four,", "temperature": 0}
        done = demo.completions.create(**asked, max_tokens=8, logprobs=3)
        (choice,) = done.choices
        assert choice.text.startswith(" five") and choice.logprobs and choice.logprobs.token_logprobs
        assert "".join(choice.logprobs.tokens or ()) == choice.text
        tops = choice.logprobs.top_logprobs or []
        for token, value, top in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, tops, strict=True):
            assert value <= 0 and len(top) == 3 and max(top.values()) == top[token] == value  # It is greedy.
        stopped = demo.completions.create(**asked, max_tokens=8, stop=["five"])
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" ", "stop")

    def test_seeds_and_samples(self, demo: openai.OpenAI) -> None:
        asked: dict[str, Any] = {**ASKED, "max_tokens": 12, "temperature": 1.2, "seed": 11, "n": 3}
        first, second = (demo.chat.completions.create(**asked) for _ in range(2))
        texts = [choice.message.content for choice in first.choices]
        assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) == 3
        assert second.usage and second.usage.prompt_tokens_details
        assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 0

    def test_logit_bias_forbids_and_forces(self, demo: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": "demo", "prompt": "One, two, three,", "temperature": 0, "max_tokens": 1}
        free = demo.completions.create(**asked, logprobs=2).choices[0]
        assert free.logprobs and free.logprobs.top_logprobs
        forbidden = json.loads(status_post(demo, "/tokenize", {"prompt": free.text, "add_special_tokens": False}))[
            "tokens"
        ][0]
        other = demo.completions.create(**asked, logit_bias={str(forbidden): -100}).choices[0]
        assert other.text != free.text and other.text in free.logprobs.top_logprobs[0]

    def test_json_schema(self, demo: openai.OpenAI) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        asked: dict[str, Any] = {**ASKED, "response_format": form, "max_tokens": 200, "temperature": 1.0}
        for seed in range(3):
            done = demo.chat.completions.create(**asked, seed=seed)
            jsonschema.validate(json.loads(done.choices[0].message.content or ""), SCHEMA)
            assert done.choices[0].finish_reason == "stop"

    def test_errors_and_batch_invariance(self, demo: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="max_model_len is 1024"):
            demo.completions.create(model="demo", prompt=[1] * 1024)
        with pytest.raises(openai.NotFoundError):
            demo.completions.create(model="gpt-4", prompt="x")
        prompts = [f"Number {number} is" for number in range(12)]
        with ThreadPoolExecutor(12) as threads:
            together = list(
                threads.map(
                    lambda p: demo.completions.create(model="demo", prompt=p, temperature=0, max_tokens=8), prompts
                )
            )
        alone = demo.completions.create(model="demo", prompt=prompts[5], temperature=0, max_tokens=8)
        assert together[5].choices[0].text == alone.choices[0].text


def status_post(client: openai.OpenAI, path: str, body: Any) -> bytes:
    url = str(client.base_url).removesuffix("/v1/") + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        return reply.read()
