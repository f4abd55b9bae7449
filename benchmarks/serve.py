"""``lockstep bench serve``: throughput and client-side latencies of a server at given request rates.

Measures the server at a URL, or starts one (``server_process.py``). Requests arrive as a Poisson process; the seed
fixes arrivals, lengths and words. Every response is streamed; latencies count from the send. ``http_client.py`` is the
client, ``workload.py`` generates the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from benchmarks.http_client import HttpError, Server
from benchmarks.server_process import started_server
from benchmarks.shares import shares
from benchmarks.workload import Work, make_work, text_prompt
from launch.progress import Bar, Progress, Throughput
from runtime.common.errors import InputError, LockstepError

REQUEST_SECONDS = 600.0
"""Deadline of one request; without a complete response it counts as an error."""

WARM_UP = 2

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """The requests of a benchmark.

    Attributes:
        rates: requests per second, one run for each; infinite: all at once.
        num_prompts: requests of each run.
        concurrency: maximum number of requests in flight; 0: no limit.
        input_len, output_len: least and greatest length, in tokens.
        seed: seed of arrivals, lengths, words and sampling.
    """

    rates: tuple[float, ...] = (float("inf"),)
    num_prompts: int = 64
    concurrency: int = 0
    input_len: tuple[int, int] = (16, 128)
    output_len: tuple[int, int] = (16, 64)
    seed: int = 0


@dataclass
class Outcome:
    """Result of one request. Times are in seconds since the send; ``arrivals`` has one for each event with text."""

    arrivals: list[float] = field(default_factory=list[float])
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


def bench_serve(
    model: str, engine_args: Sequence[str], load: Load, *, base_url: str = "", api_key: str = "", plot: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield one row for each rate: throughput, errors, latency percentiles, and the share of step time in the model.

    Args:
        model: the model of the started server; with ``base_url`` a name of its model, empty: the first it lists.
        engine_args: engine flags of the started server.
        load: the requests.
        base_url: URL of a running server to measure.
        api_key: API key of that server.
        plot: PNG file for a plot of the latencies.

    Raises:
        LockstepError: there is no server, or it does not respond as an OpenAI-compatible one.
    """
    runs: list[tuple[float, list[Outcome]]] = []
    with (
        contextlib.nullcontext(Server(base_url, api_key)) if base_url else started_server(model, engine_args) as server
    ):
        name = asyncio.run(_model_name(server, model if base_url else ""))
        warm_up = make_work(WARM_UP, (8, 8), (4, 4), load.seed)
        asyncio.run(_run(server, name, warm_up, float("inf"), load, "warm-up", None))
        works = make_work(load.num_prompts, load.input_len, load.output_len, load.seed)
        for number, rate in enumerate(load.rates):
            before = asyncio.run(_metrics(server))
            started = time.perf_counter()
            with Progress().bar(f"rate {rate:g}", load.num_prompts) as bar:
                # Each rate has its own words: the prefix cache must not have the prompts of the last run.
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
                    counter_increase(before, after, "model_execution_seconds_total"),
                    counter_increase(before, after, "step_seconds_total"),
                    seconds,
                ),
            }
    if plot:
        draw(runs, plot)


async def _run(
    server: Server, name: str, works: Sequence[Work], rate: float, load: Load, seed: str, bar: Bar | None
) -> list[Outcome]:
    """Send every request at its arrival time and wait for all responses."""
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
    # No TaskGroup: it would wrap the exception of a signal that arrives while a task runs.
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send(server: Server, name: str, work: Work, prompt: str) -> Outcome:
    """Send one request and time the events of its response."""
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
    except (HttpError, OSError, ValueError, KeyError) as error:  # The last two: events of another format.
        outcome.error = str(error) or repr(error)
    outcome.seconds = time.perf_counter() - sent
    return outcome


# ---- numbers


def summarize(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Throughput, errors and percentiles. Failed requests count as errors only.

    ``ttft``: from the send to the first text; ``itl``: between two consecutive events with text; ``tpot``: from the
    first text to the last, divided by the tokens after the first; ``e2e``: from the send to the end.
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
        row[f"{name}_ms_mean"] = round(1e3 * float(numpy.mean(values)), 3) if values else None
        for percent in PERCENTILES:
            row[f"{name}_ms_p{percent}"] = round(1e3 * float(numpy.percentile(values, percent)), 3) if values else None
    if errors:
        row["first_error"] = errors[0]
    return row


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Latencies in seconds, by kind; see :func:`summarize`."""
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


def read_metrics(text: str) -> dict[str, float]:
    """Sums of every metric over its labels, by name without the ``lockstep:`` prefix, of Prometheus' text format."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"lockstep:(\w+)(?:\{.*\})?\s+(\S+)", line)
        if match:
            with contextlib.suppress(ValueError):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def counter_increase(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    """Increase of a counter; None for a server without it."""
    return after[name] - before.get(name, 0.0) if name in after else None


async def _metrics(server: Server) -> dict[str, float]:
    """The server's metrics; empty if it has none."""
    try:
        return read_metrics(await server.get("/metrics"))
    except HttpError:  # Other servers may have no metrics, or none at this path.
        return {}


async def _model_name(server: Server, wanted: str) -> str:
    """The model name for requests. Raises :class:`LockstepError` if there is no server."""
    _ = server.address  # Raises for an invalid URL.
    try:
        names = [str(model["id"]) for model in json.loads(await server.get("/v1/models"))["data"]]
    except (HttpError, OSError, ValueError, KeyError, TypeError) as error:
        raise LockstepError(f"no server that can be used at {server.url}: {error or repr(error)}") from None
    if wanted and wanted not in names:
        raise InputError(f"the server at {server.url} has no model {wanted!r}; it has {', '.join(names)}")
    if not names:
        raise LockstepError(f"the server at {server.url} lists no model")
    return wanted or names[0]


# ---- plot


def draw(runs: Sequence[tuple[float, Sequence[Outcome]]], file: str) -> None:
    """Plot the distribution of latencies, a line for each rate, into a PNG file. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {
        "ttft": "time to first text",
        "itl": "between two events with text",
        "tpot": "per output token",
        "e2e": "whole request",
    }
    for number, (kind, title) in enumerate(titles.items()):
        axes = figure.add_subplot(2, 2, number + 1)
        for rate, outcomes in runs:
            values = sorted(latencies([o for o in outcomes if not o.error])[kind])
            percents = [100 * (index + 1) / len(values) for index in range(len(values))]
            axes.plot([1e3 * value for value in values], percents, label=_label(rate))
        axes.set(title=title, xlabel="ms", ylabel="share of requests, %")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120, format="png")


def _label(rate: float) -> str:
    return "all at once" if rate == float("inf") else f"{rate:g} requests/s"
