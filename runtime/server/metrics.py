"""Prometheus metrics with vLLM's names after the prefix ``lockstep:``.

Counters and gauges are read from one snapshot of the engine at each scrape; histograms are observed as outputs arrive.
Neither iterates over requests. prometheus_client is part of the ``serve`` extra, so it is imported on construction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from runtime.common.sampling_params import SamplingParams
from runtime.engine.request import RequestOutput

if TYPE_CHECKING:
    from runtime.engine.async_engine import AsyncEngine

PREFIX = "lockstep:"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Seconds from a request's arrival to its first token", _SECONDS),
    "inter_token_latency_seconds": ("Seconds between two tokens of a request", _STEP_SECONDS),
    "e2e_request_latency_seconds": ("Seconds from a request's arrival to its end", _SECONDS),
    "request_queue_time_seconds": ("Seconds from a request's arrival to its first step", _SECONDS),
    "request_prefill_time_seconds": ("Seconds from a request's first step to its first token", _SECONDS),
    "request_decode_time_seconds": ("Seconds from a request's first token to its end", _SECONDS),
    "request_prompt_tokens": ("Tokens of the prompt", _TOKENS),
    "request_generation_tokens": ("Tokens generated, over all samples of a request", _TOKENS),
    "request_params_n": ("Samples requested", _COUNTS),
    "request_params_max_tokens": ("max_tokens, of requests that have it", _TOKENS),
}

_GAUGES = {
    "num_requests_running": ("num_running", "Samples in the running batch"),
    "num_requests_waiting": ("num_waiting", "Samples that wait to be scheduled"),
    "kv_cache_usage_perc": ("kv_usage", "Share of the KV blocks in use, 0 to 1"),
}

_COUNTERS = {
    "prefix_cache_queries": ("prefix_queried_tokens", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    "num_preemptions": ("preemptions", "Samples preempted: their KV blocks were freed and are computed again"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of all requests"),
    "generation_tokens": ("generated_tokens", "Tokens generated"),
    "computed_tokens": ("computed_tokens", "Tokens computed by the model, recomputed ones included"),
    "requests": ("requests", "Requests accepted"),
    "steps": ("steps", "Steps executed"),
    "worker_group_restarts": ("restarts", "Restarts of the worker group after a failure"),
    "broken_logits": ("broken", "Samples ended because their logits were not finite"),
    "model_execution_seconds": ("model_seconds", "Seconds in which rank 0 prepared, computed and sampled"),
    "step_seconds": ("step_seconds", "Seconds of steps as measured by the driver"),
}


class Metrics:
    """Metrics of one server, in a registry of their own.

    Args:
        engine: source of the counters and gauges.
        model_name: the label ``model_name``.
    """

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        from prometheus_client import CollectorRegistry, Histogram, ProcessCollector

        self._engine = engine
        self._model_name = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        collector: Any = self
        self._registry.register(collector)
        self._histograms: dict[str, Any] = {}
        for name, (text, buckets) in _HISTOGRAMS.items():
            histogram = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)
            self._histograms[name] = histogram.labels(model_name)

    def render(self) -> tuple[bytes, str]:
        """The metrics in Prometheus' text format, and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """Counters and gauges of the engine. Called by the registry at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._engine.snapshot()
        label = [self._model_name]
        for name, (field, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric(label, getattr(snapshot, field))
            yield gauge
        for name, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric(label, getattr(snapshot, field))
            yield counter
        finished = CounterMetricFamily(
            f"{PREFIX}request_success", "Samples finished, by reason", labels=["model_name", "finished_reason"]
        )
        for reason, count in snapshot.finished.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished

    def observe(self, name: str, value: float) -> None:
        """Add one value to a histogram."""
        self._histograms[name].observe(value)

    def new_request(self, params: SamplingParams, max_tokens: int | None) -> RequestMetrics:
        """Observe a new request. ``max_tokens``: the body's, None if it has none."""
        self.observe("request_params_n", params.n)
        if max_tokens is not None:
            self.observe("request_params_max_tokens", max_tokens)
        return RequestMetrics(self)


class RequestMetrics:
    """Histogram observations of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: float | None = None

    def update(self, output: RequestOutput) -> None:
        """Observe an output. Called for each token."""
        now = time.monotonic()
        count = max(sample.num_tokens - sample.old_tokens for sample in output.outputs)
        if count:
            gaps, since = count, self._last
            if since is None:
                gaps, since = count - 1, output.times.first_token or now
            # Tokens that the engine merged into one output, because the client is slow, share its interval.
            for _ in range(gaps):
                self._metrics.observe("inter_token_latency_seconds", (now - since) / gaps)
            self._last = now
        if output.finished:
            self._finish(output)

    def _finish(self, output: RequestOutput) -> None:
        times, observe = output.times, self._metrics.observe
        observe("request_prompt_tokens", len(output.prompt_token_ids))
        observe("request_generation_tokens", sum(sample.num_tokens for sample in output.outputs))
        if times.finished is not None:
            observe("e2e_request_latency_seconds", times.finished - times.arrived)
        if times.scheduled is not None:
            observe("request_queue_time_seconds", times.scheduled - times.arrived)
        if times.first_token is not None:
            observe("time_to_first_token_seconds", times.first_token - times.arrived)
            if times.scheduled is not None:
                observe("request_prefill_time_seconds", times.first_token - times.scheduled)
            if times.finished is not None:
                observe("request_decode_time_seconds", times.finished - times.first_token)
