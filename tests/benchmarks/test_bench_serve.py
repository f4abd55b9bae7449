"""``lockstep bench serve`` against a scripted server of the standard library."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serve, server_process
from benchmarks.http_client import HttpError, Server
from benchmarks.serve import Load, Outcome, bench_serve, latencies, read_metrics, summarize
from launch.cli import main as cli
from runtime.common.errors import ConfigError, InputError, LockstepError
from tests.checkpoints import tiny_checkpoint

METRICS = """\
# HELP lockstep:step_seconds_total Time in which steps were under way.
# TYPE lockstep:step_seconds_total counter
lockstep:step_seconds_total{{model_name="tiny"}} {steps}
lockstep:model_execution_seconds_total{{model_name="tiny"}} {model}
lockstep:request_success_total{{finished_reason="stop",model_name="a {{b}} c"}} 2.0
lockstep:request_success_total{{finished_reason="length",model_name="tiny"}} 3.0
python_info{{version="3.11"}} 1.0
"""


@dataclass
class Seen:
    """Requests that the server received."""

    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: set[str | None] = field(default_factory=set[str | None])
    lock: threading.Lock = field(default_factory=threading.Lock)
    under_way: int = 0
    most: int = 0
    scraped: int = 0
    broken: Callable[[dict[str, Any]], str] = lambda _: ""


class Handler(BaseHTTPRequestHandler):
    """Sends an event for each requested token; one TCP segment has two events, one event is split over two."""

    protocol_version = "HTTP/1.1"
    seen: Seen

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.seen.keys.add(self.headers["Authorization"])
        if self.path == "/v1/models":
            self._answer(200, json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}))
        elif self.path == "/metrics":
            self.seen.scraped += 1
            self._answer(200, METRICS.format(steps=10.0 + self.seen.scraped, model=5.0 + self.seen.scraped * 0.75))
        else:
            self._answer(404, "no such thing")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.seen.lock:
            self.seen.bodies.append(body)
            self.seen.under_way += 1
            self.seen.most = max(self.seen.most, self.seen.under_way)
        try:
            self._stream(body, self.seen.broken(body))
        finally:
            with self.seen.lock:
                self.seen.under_way -= 1

    def _stream(self, body: dict[str, Any], how: str) -> None:
        if how == "refuse":
            self._answer(429, json.dumps({"error": {"message": "the queue is full"}}))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = [{"choices": [{"text": " word"}]} for _ in range(body["max_tokens"])]
        events.append({"choices": [{"text": "", "finish_reason": "length"}]})
        words = len(body["prompt"].split())
        events.append({"choices": [], "usage": {"prompt_tokens": words, "completion_tokens": body["max_tokens"]}})
        if how == "error event":
            events.insert(1, {"error": {"message": "rank 1 failed"}})
        lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
        chunks = [lines[0], lines[1][:7], lines[1][7:], lines[2] + lines[3], *lines[4:]]
        for chunk in chunks[:2] if how == "cut" else chunks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.flush()
        if how != "cut":
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _answer(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class QuietServer(ThreadingHTTPServer):
    """Does not report clients that disconnect."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, Seen]]:
    handler = type("OwnHandler", (Handler,), {"seen": Seen()})
    http = QuietServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", handler.seen
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


Served = tuple[str, Seen]
LOAD = Load(num_prompts=6, input_len=(4, 9), output_len=(3, 6), seed=5)


def measure(url: str, load: Load = LOAD, **options: Any) -> list[dict[str, Any]]:
    return list(bench_serve("", (), load, base_url=url, **options))


def test_row_for_each_rate(server: Served) -> None:
    url, seen = server
    rows = measure(url, Load(rates=(500.0, float("inf")), num_prompts=6, input_len=(4, 9), output_len=(3, 6), seed=5))
    assert [(row["model"], row["request_rate"]) for row in rows] == [("tiny", 500.0), ("tiny", "inf")]
    runs = [seen.bodies[2:8], seen.bodies[8:]]  # The first two warm up.
    for row, bodies in zip(rows, runs, strict=True):
        assert (row["completed"], row["errors"]) == (6, 0)
        assert row["prompt_tokens"] == sum(len(body["prompt"].split()) for body in bodies)
        assert row["output_tokens"] == sum(body["max_tokens"] for body in bodies)
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"] <= row["e2e_ms_p99"]
        assert row["itl_ms_p50"] >= 0 and row["tpot_ms_mean"] >= 0
        assert (row["model_share"], row["driver_share"]) == (0.75, 0.25)
    assert all(body["stream"] and body["ignore_eos"] and body["stream_options"] for body in seen.bodies)
    assert all(4 <= len(body["prompt"].split()) <= 9 and 3 <= body["max_tokens"] <= 6 for body in runs[0])
    prompts = [{body["prompt"] for body in bodies} for bodies in runs]
    assert len(prompts[0]) == 6 and not prompts[0] & prompts[1]


def test_same_seed_sends_the_same_requests(server: Served) -> None:
    url, seen = server
    for seed in (5, 5, 6):
        measure(url, Load(num_prompts=4, input_len=(4, 9), output_len=(3, 6), concurrency=1, seed=seed))
    sent = [[(body["prompt"], body["seed"]) for body in seen.bodies[at + 2 : at + 6]] for at in (0, 6, 12)]
    assert sent[0] == sent[1]
    assert sent[0] != sent[2]
    assert seen.most <= 2  # The warm-up is two at once; after it, one.


def test_arrivals_are_a_poisson_process(monkeypatch: pytest.MonkeyPatch) -> None:
    due: list[float] = []

    async def sleep(seconds: float) -> None:
        due.append(seconds)

    async def send(*_: Any) -> Outcome:
        return Outcome()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(serve, "_send", send)
    works = serve.make_work(4000, (1, 1), (1, 1), 0)
    asyncio.run(serve._run(Server("http://nowhere"), "", works, 8.0, LOAD, "0", None))
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert due[0] == 0.0
    # Exponential: the deviation is the mean, and a share of 1/e is longer than it.
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("refuse", "429: "),
        ("cut", "the connection was lost before the response was complete"),
        ("error event", "rank 1 failed"),
    ],
)
def test_failed_request_counts_as_an_error_only(server: Served, how: str, message: str) -> None:
    url, seen = server
    broken = iter([False, False, True])
    seen.broken = lambda body: how if next(broken, False) else ""
    (row,) = measure(url, Load(num_prompts=5, concurrency=1, input_len=(4, 9), output_len=(3, 6)))
    assert (row["num_prompts"], row["completed"], row["errors"]) == (5, 4, 1)
    assert message in row["first_error"]
    assert row["output_tokens"] == sum(body["max_tokens"] for body in seen.bodies[3:])


def test_request_without_an_end_times_out(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    url, seen = server
    go = threading.Event()
    seen.broken = lambda body: "" if len(seen.bodies) <= 2 else str(go.wait(30) or "")[:0]
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.2)
    try:
        (row,) = measure(url, Load(num_prompts=1, input_len=(4, 4), output_len=(3, 3)))
    finally:
        go.set()
    assert (row["errors"], row["first_error"]) == (1, "no end after 0 s")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_the_benchmark(
    server: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    send = serve._send

    async def send_then_signal(server: Server, *how: Any) -> Outcome:
        outcome = await send(server, *how)
        if len(bodies) == 4:
            signal.raise_signal(number)
        return outcome

    url, bodies = server[0], server[1].bodies
    monkeypatch.setattr(serve, "_send", send_then_signal)
    assert cli.main(["bench", "serve", "--base-url", url, "--concurrency", "1", "--num-prompts", "9"]) == code
    assert capsys.readouterr().out == ""
    assert len(bodies) == 4


def test_api_key_and_model_name(server: Served) -> None:
    url, seen = server
    measure(url, api_key="secret")
    assert seen.keys == {"Bearer secret"}
    (row,) = bench_serve("other", (), LOAD, base_url=url)
    assert row["model"] == "other"
    with pytest.raises(InputError, match="has no model 'third'; it has tiny, other"):
        list(bench_serve("third", (), LOAD, base_url=url))


def test_no_server_or_invalid_url() -> None:
    with socket.socket() as taken:  # Bound, but not listening.
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LockstepError, match=f"no server that can be used at {url}"):
            measure(url)
    for url in ("127.0.0.1:9", "http://", "ftp://a", "http://a:b", "http://a/v1"):
        with pytest.raises(InputError, match="is no server's URL"):
            measure(url)


def test_get_of_an_unknown_path(server: Served) -> None:
    with pytest.raises(HttpError, match="404: no such thing"):
        asyncio.run(Server(server[0]).get("/nothing"))


def test_latencies_and_throughput() -> None:
    good = Outcome(arrivals=[0.5, 0.6, 0.9], seconds=1.0, prompt_tokens=10, output_tokens=5)
    one = Outcome(arrivals=[0.7], seconds=0.8, prompt_tokens=3, output_tokens=1)
    bad = Outcome(arrivals=[0.1], seconds=9.0, prompt_tokens=99, output_tokens=99, error="lost")
    assert latencies([good, one]) == {
        "ttft": [0.5, 0.7],
        "itl": pytest.approx([0.1, 0.3]),
        "tpot": [pytest.approx(0.1)],
        "e2e": [1.0, 0.8],
    }
    row = summarize([good, one, bad], 2.0)
    assert (row["completed"], row["errors"], row["first_error"]) == (2, 1, "lost")
    assert (row["requests_per_s"], row["output_tokens_per_s"], row["total_tokens_per_s"]) == (1.0, 3.0, 9.5)
    assert (row["ttft_ms_mean"], row["itl_ms_p50"], row["tpot_ms_p99"]) == (600.0, 200.0, 100.0)
    nothing = summarize([bad], 2.0)
    assert (nothing["completed"], nothing["ttft_ms_p50"]) == (0, None)


def test_metrics_are_summed_over_labels() -> None:
    found = read_metrics(METRICS.format(steps=1.5, model="1e-3"))
    assert found == {"step_seconds_total": 1.5, "model_execution_seconds_total": 0.001, "request_success_total": 5.0}


def test_server_without_metrics_has_no_shares() -> None:
    assert (
        serve.shares(serve.counter_increase({}, {}, "model_execution_seconds_total"), None, 1.0)["model_share"] is None
    )


def test_plot_is_a_png(server: Served, tmp_path: Path) -> None:
    file = tmp_path / "latencies.png"
    measure(server[0], Load(rates=(500.0, float("inf")), num_prompts=3, output_len=(3, 6)), plot=str(file))
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


def test_started_server_is_ended_and_its_failure_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import sys, time; print('starting', file=sys.stderr); "
    ready = said + "print('lockstep serve: ready at http://127.0.0.1:1', file=sys.stderr, flush=True); time.sleep(60)"
    monkeypatch.setattr(server_process, "_SERVER", ready)
    with server_process.started_server("tiny", ()) as ours:
        assert ours == Server("http://127.0.0.1:1")
    monkeypatch.setattr(server_process, "_SERVER", said + "sys.exit('lockstep serve: no such folder')")
    with (
        pytest.raises(LockstepError, match="did not start: lockstep serve: no such folder") as failed,
        server_process.started_server("tiny", ()),
    ):
        pytest.fail("it is not ready")
    assert failed.value.exit_code == 1


def test_torchrun_rank_cannot_start_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "torchrun_ranks", lambda: object())
    with pytest.raises(ConfigError, match="give its address as --base-url"), server_process.started_server("tiny", ()):
        pytest.fail("it was started")


@pytest.mark.slow
def test_against_lockstep_serve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_API_KEY", "secret")  # Must not reach the started server.
    size = "--num-prompts 4 --input-len 4-12 --output-len 6-9 --request-rate inf 50"
    assert cli.main(["bench", "serve", str(tiny_checkpoint()), "--enforce-eager", "--json", *size.split()]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["request_rate"] for row in rows] == ["inf", 50.0]
    for row in rows:
        assert (row["completed"], row["errors"]) == (4, 0)
        assert 4 * 6 <= row["output_tokens"] <= 4 * 9
        assert 0 < row["ttft_ms_p50"] < row["e2e_ms_p99"]
        assert 0 < row["model_share"] <= 1
        assert 0 < row["busy_share"] <= 1
