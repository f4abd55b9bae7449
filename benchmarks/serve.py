"""``lockstep bench serve``: what clients of a server see, at given rates of requests.

Starts a server of its own unless it is told where one is. Requests arrive as a Poisson process whose times, lengths
and words are fixed by the seed. Each is streamed; its clock begins when it is sent. The client is ``http_client.py``,
the requests are made by ``workload.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.http_client import HttpError, Server
from benchmarks.shares import shares
from benchmarks.workload import Work, make_work, text_prompt
from launch.cli.args import engine_arguments
from launch.environment import torchrun_ranks
from launch.progress import Bar, Progress, Throughput
from runtime.common.errors import ConfigError, InputError, LockstepError

READY = re.compile(r"ready at (http://\S+)")
STOP_SECONDS = 60.0
"""How long our own server may take to end; nothing runs on it by then."""

REQUEST_SECONDS = 600.0
"""A request without an end after this long counts as an error."""

WARM_UP = 2

PERCENTILES = (50, 90, 99)

_SERVER = """
import sys
from launch.rank_main import die_with_parent
die_with_parent(int(sys.argv[1]))
from launch.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        rates: requests a second, one run each; infinite: all at once.
        num_prompts: requests of each run.
        concurrency: most requests under way, 0 for any number.
        input_len, output_len: shortest and longest, in tokens.
        seed: of arrivals, lengths, words and sampling.
    """

    rates: tuple[float, ...] = (float("inf"),)
    num_prompts: int = 64
    concurrency: int = 0
    input_len: tuple[int, int] = (16, 128)
    output_len: tuple[int, int] = (16, 64)
    seed: int = 0


@dataclass
class Outcome:
    """What became of one request. Times in seconds; ``arrivals`` are those of pieces of text, since it was sent."""

    arrivals: list[float] = field(default_factory=list[float])
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


def bench_serve(
    model: str, engine: dict[str, Any], load: Load, *, base_url: str = "", api_key: str = "", plot: str = ""
) -> Iterator[dict[str, Any]]:
    """One row for each rate: throughput, errors, percentiles of latencies, and the share of steps that is the model.

    Args:
        model: what our own server runs; with ``base_url`` the name to ask for, empty: the first that it lists.
        engine: settings of our own server.
        load: the requests.
        base_url: measure the server there.
        api_key: of that server.
        plot: a PNG file to draw the latencies into.

    Raises:
        LockstepError: no server, or one that cannot be used.
    """
    runs: list[tuple[float, list[Outcome]]] = []
    with contextlib.nullcontext(Server(base_url, api_key)) if base_url else own_server(model, engine) as server:
        name = asyncio.run(_model_name(server, model if base_url else ""))
        warm_up = make_work(WARM_UP, (8, 8), (4, 4), load.seed)
        asyncio.run(_run(server, name, warm_up, float("inf"), load, "warm-up", None))
        works = make_work(load.num_prompts, load.input_len, load.output_len, load.seed)
        for number, rate in enumerate(load.rates):
            before = asyncio.run(_metrics(server))
            started = time.perf_counter()
            with Progress().bar(f"rate {rate:g}", load.num_prompts) as bar:
                # Other words for each rate: the server must not find the last run's prompts in its cache.
                outcomes = asyncio.run(_run(server, name, works, rate, load, f"{load.seed}/{number}", bar))
            seconds = time.perf_counter() - started
            after = asyncio.run(_metrics(server))
            runs.append((rate, outcomes))
            yield {
                "model": name,
                "request_rate": "inf" if rate == float("inf") else rate,
                "concurrency": load.concurrency or None,
                **summarize(outcomes, seconds),
                **shares(
                    spent(before, after, "model_execution_seconds_total"),
                    spent(before, after, "step_seconds_total"),
                    seconds,
                ),
            }
    if plot:
        draw(runs, plot)


async def _run(
    server: Server, name: str, works: Sequence[Work], rate: float, load: Load, seed: str, bar: Bar | None
) -> list[Outcome]:
    """Send every request at its time and wait for all of them."""
    chance = random.Random(f"{seed}/arrivals")
    words = random.Random(f"{seed}/words")
    slots = asyncio.Semaphore(load.concurrency or len(works))
    throughput = Throughput()

    async def send_at(due: float, work: Work, prompt: str) -> Outcome:
        await asyncio.sleep(due)
        async with slots:
            outcome = await _send(server, name, work, prompt)
        if bar is not None:
            bar.advance(text=throughput.add(outcome.output_tokens))
        return outcome

    due = 0.0
    tasks: list[asyncio.Task[Outcome]] = []
    for work in works:
        tasks.append(asyncio.create_task(send_at(due, work, text_prompt(work, words))))
        due += chance.expovariate(rate) if rate != float("inf") else 0.0
    # No TaskGroup: it would wrap a signal that arrives while one of them runs.
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send(server: Server, name: str, work: Work, prompt: str) -> Outcome:
    outcome = Outcome()
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": work.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **work.sampling,
    }
    sent = time.perf_counter()
    try:
        async with (
            asyncio.timeout(REQUEST_SECONDS),
            contextlib.aclosing(server.stream("/v1/completions", body)) as events,
        ):
            async for event in events:
                if any(choice.get("text") for choice in event.get("choices", ())):
                    outcome.arrivals.append(time.perf_counter() - sent)
                if usage := event.get("usage"):
                    outcome.prompt_tokens = usage["prompt_tokens"]
                    outcome.output_tokens = usage["completion_tokens"]
    except TimeoutError:
        outcome.error = f"no end after {REQUEST_SECONDS:.0f} s"
    except (HttpError, OSError, ValueError, KeyError) as error:  # The last two: JSON that is not as it should be.
        outcome.error = str(error) or repr(error)
    outcome.seconds = time.perf_counter() - sent
    return outcome


# ---- numbers


def summarize(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Throughput, errors and percentiles. Requests that failed count as errors and for nothing else.

    ``ttft``: from sending to the first text; ``itl``: between two pieces of text that arrived one after the other;
    ``tpot``: from the first text to the last, per token after the first; ``e2e``: from sending to the end.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    row: dict[str, Any] = {
        "num_prompts": len(outcomes),
        "completed": len(good),
        "errors": len(errors),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(output_tokens / seconds, 2),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / seconds, 2),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    for name, values in latencies(good).items():
        row[f"{name}_ms_mean"] = round(1e3 * statistics.fmean(values), 3) if values else None
        for percent in PERCENTILES:
            row[f"{name}_ms_p{percent}"] = round(1e3 * percentile(values, percent), 3) if values else None
    if errors:
        row["first_error"] = errors[0]
    return row


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds, by kind of latency; see :func:`summarize`."""
    found: dict[str, list[float]] = {"ttft": [], "itl": [], "tpot": [], "e2e": []}
    for outcome in outcomes:
        arrivals = outcome.arrivals
        if arrivals:
            found["ttft"].append(arrivals[0])
            found["itl"] += [later - earlier for earlier, later in itertools.pairwise(arrivals)]
            if outcome.output_tokens > 1:
                found["tpot"].append((arrivals[-1] - arrivals[0]) / (outcome.output_tokens - 1))
        found["e2e"].append(outcome.seconds)
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, drawn straight between neighbours, as numpy does by default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def read_metrics(text: str) -> dict[str, float]:
    """The sum of every metric over its labels, from Prometheus' text format; without the ``lockstep:`` prefix."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"lockstep:(\w+)(?:\{.*\})?\s+(\S+)", line)
        if match:
            with contextlib.suppress(ValueError):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def spent(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    """How much a counter rose; None for a server that does not have it."""
    return after[name] - before.get(name, 0.0) if name in after else None


async def _metrics(server: Server) -> dict[str, float]:
    try:
        return read_metrics(await server.get("/metrics"))
    except HttpError:  # Another server may have none, or none that we may read.
        return {}


async def _model_name(server: Server, wanted: str) -> str:
    """The model to ask for. Raises :class:`LockstepError` if there is no server."""
    _ = server.address  # Refuses a URL that is none.
    try:
        names = [str(model["id"]) for model in json.loads(await server.get("/v1/models"))["data"]]
    except (HttpError, OSError, ValueError, KeyError, TypeError) as error:
        raise LockstepError(f"no server that can be used at {server.url}: {error or repr(error)}") from None
    if wanted and wanted not in names:
        raise InputError(f"the server at {server.url} has no model {wanted!r}; it has {', '.join(names)}")
    if not names:
        raise LockstepError(f"the server at {server.url} lists no model")
    return wanted or names[0]


# ---- our own server


@contextlib.contextmanager
def own_server(model: str, engine: dict[str, Any]) -> Generator[Server]:
    """``lockstep serve`` on a free port of this host, ended with the block, or by the kernel if we are killed.

    Raises:
        ConfigError: we are one of torchrun's processes.
        LockstepError: it ended before it was ready.
    """
    if torchrun_ranks() is not None:
        raise ConfigError(
            "bench serve starts a server of its own, which the ranks of torchrun cannot be; start it by itself "
            "(lockstep launch ... -- serve MODEL) and give its address as --base-url"
        )
    arguments = ["serve", model, "--host", "127.0.0.1", "--port", "0", *engine_arguments(engine)]
    environment = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    said = _Said(process)
    try:
        url = said.wait_for_url()
        if url is None:
            failure = LockstepError(f"the server did not start: {said.last[-1] if said.last else 'it said nothing'}")
            code = process.wait() or 1
            failure.exit_code = 128 - code if code < 0 else code
            raise failure
        yield Server(url)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        said.close()


class _Said:
    """What our server writes on stderr: passed on while it starts, then only kept, the last lines of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.last: deque[str] = deque(maxlen=20)
        self._stream = process.stderr
        self._url: str | None = None
        self._settled = threading.Event()
        self._reader = threading.Thread(target=self._read, name="server-stderr", daemon=True)
        self._reader.start()

    def wait_for_url(self) -> str | None:
        """Where the server listens; None if it ended instead. Its own deadlines bound how long that takes."""
        self._settled.wait()
        return self._url

    def close(self) -> None:
        """After its end."""
        self._reader.join()
        if self._stream is not None:
            self._stream.close()

    def _read(self) -> None:
        for line in self._stream or ():
            self.last.append(line.strip())
            if self._url is None:
                print(line, end="", file=sys.stderr, flush=True)
                if match := READY.search(line):
                    self._url = match[1]
                    self._settled.set()
        self._settled.set()


# ---- picture


def draw(runs: Sequence[tuple[float, Sequence[Outcome]]], file: str) -> None:
    """Draw how latencies are distributed, a line for each rate, into a PNG file. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {
        "ttft": "time to first text",
        "itl": "between two pieces of text",
        "tpot": "per output token",
        "e2e": "whole request",
    }
    for number, (kind, title) in enumerate(titles.items()):
        axes = figure.add_subplot(2, 2, number + 1)
        for rate, outcomes in runs:
            values = sorted(latencies([o for o in outcomes if not o.error])[kind])
            percents = [100 * (index + 1) / len(values) for index in range(len(values))]
            axes.plot([1e3 * value for value in values], percents, label=_label(rate))
        axes.set(title=title, xlabel="ms", ylabel="% of them at most")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120, format="png")


def _label(rate: float) -> str:
    return "all at once" if rate == float("inf") else f"{rate:g} requests/s"
