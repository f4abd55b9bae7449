"""Metrics after known requests, as Prometheus' own parser reads them."""

from __future__ import annotations

import threading

from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.server.running import Running, read_until, running, wait_until

VLLM_NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits num_preemptions
prompt_tokens generation_tokens request_success time_to_first_token_seconds inter_token_latency_seconds
e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prompt_tokens request_generation_tokens request_params_n request_params_max_tokens
""".split()
"""vLLM's metrics that apply here, without its prefix."""

OWN = "worker_group_restarts broken_logits model_execution_seconds step_seconds steps requests computed_tokens".split()


def scrape(server: Running) -> dict[tuple[str, ...], float]:
    """Every sample by name and by its labels other than the model's name."""
    reply = server.get("/metrics")
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain")
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("lockstep:"):
                assert labels.pop("model_name") == "tiny"
            found[(sample.name.removeprefix("lockstep:"), *labels.values())] = sample.value
    return found


def test_metrics_have_vllms_names() -> None:
    with running() as server:
        names = {family.name for family in text_string_to_metric_families(server.get("/metrics").body.decode())}
    assert {f"lockstep:{name}" for name in (*VLLM_NAMES, *OWN)} <= names
    assert {"process_resident_memory_bytes", "process_open_fds"} <= names


def test_counters_and_histograms_of_known_requests() -> None:
    with running() as server:
        assert server.complete("p" * 40, max_tokens=10, n=2).status == 200
        assert server.complete("p" * 40, max_tokens=6, stream=True).status == 200
        assert server.chat("x").status == 200
        assert server.complete(n=0).status == 400
        found = scrape(server)
    chat = len("<user>x<assistant>")
    assert found["prompt_tokens_total",] == 80 + chat
    assert found["generation_tokens_total",] == 20 + 6 + 400 - chat
    assert found["request_success_total", "length"] == 4 and found["request_success_total", "abort"] == 0
    assert found["prefix_cache_hits_total",] >= 36
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert found[f"{name}_seconds_count",] == 3
    assert found["inter_token_latency_seconds_count",] == 9 + 5 + 400 - chat - 1
    assert found["request_prompt_tokens_sum",] == 80 + chat
    assert found["request_generation_tokens_sum",] == found["generation_tokens_total",]
    assert found["request_params_n_sum",] == 4
    assert (found["request_params_max_tokens_count",], found["request_params_max_tokens_sum",]) == (2, 16)
    total = found["e2e_request_latency_seconds_sum",]
    parts = [found[f"request_{part}_time_seconds_sum",] for part in ("queue", "prefill", "decode")]
    assert min(parts) >= 0 and abs(sum(parts) - total) < 1e-6
    assert found["num_requests_running",] == found["num_requests_waiting",] == found["kv_cache_usage_perc",] == 0
    assert found["model_execution_seconds_total",] > 0 and found["step_seconds_total",] > 0


def test_gauges_of_running_and_waiting_requests() -> None:
    with running(max_num_seqs=1) as server:
        permits = server.executor.permits = threading.Semaphore(0)
        streams = [server.open_stream(max_tokens=4) for _ in range(3)]
        wait_until(lambda: server.state.engine.snapshot().num_running == 1)
        wait_until(lambda: server.state.engine.snapshot().num_waiting == 2)
        found = scrape(server)
        assert found["num_requests_running",] == 1 and found["num_requests_waiting",] == 2
        assert 0 < found["kv_cache_usage_perc",] < 1
        permits.release(1000)
        for stream in streams:
            with stream:
                read_until(stream, b"[DONE]")
