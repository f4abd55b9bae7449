"""The published schema: schemathesis generates valid and invalid requests of it and checks the responses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from runtime.common.sampling_params import SamplingParams
from tests.runtime.server.running import Running, running

EXAMPLES = {"/v1/completions": 30, "/v1/chat/completions": 30, "/tokenize": 10, "/detokenize": 10}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(max_model_len=48, num_blocks=100) as made:  # Short: examples generate up to max_model_len.
        yield made
        assert made.get("/health").status == 200


@pytest.fixture(scope="module")
def schema(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def fuzz(operation: Any, mode: GenerationMode, examples: int) -> None:
    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        # A body that the schema allows may contradict itself, or be too long for the model: 400.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", EXAMPLES)
def test_post_routes(schema: Any, path: str, mode: GenerationMode) -> None:
    fuzz(schema[path]["POST"], mode, EXAMPLES[path])


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/health", "/ping", "/metrics", "/version"])
def test_get_routes(schema: Any, path: str) -> None:
    fuzz(schema[path]["GET"], GenerationMode.POSITIVE, 5)


def test_published_paths_and_models(server: Running) -> None:
    published = server.get("/openapi.json").json
    paths = published["paths"]
    assert {*EXAMPLES, "/v1/models", "/health", "/ping", "/metrics", "/version"} <= set(paths)
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionRequest"}
    model = published["components"]["schemas"]["CompletionRequest"]
    assert "prompt" in model["properties"] and model["additionalProperties"] is False
    assert all("422" not in operation["responses"] for path in paths.values() for operation in path.values())


def test_bounds_of_sampling_parameters_are_those_of_sampling_params(server: Running) -> None:
    model = server.get("/openapi.json").json["components"]["schemas"]["ChatCompletionRequest"]
    names = {each.name: each.metadata.get("bounds") for each in dataclasses.fields(SamplingParams)}
    bounds = {name: found for name, found in names.items() if found and name not in ("logprobs", "top_k")}
    assert len(bounds) > 8
    for name, expected in bounds.items():
        number = model["properties"][name]["anyOf"][0]
        assert (number["minimum"], number["maximum"]) == tuple(map(float, expected)), name
