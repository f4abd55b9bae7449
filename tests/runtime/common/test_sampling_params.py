"""SamplingParams: refused values, round trips, derived properties."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from runtime.common.config import MAX_SEED
from runtime.common.errors import RequestError
from runtime.common.sampling_params import MAX_PARALLEL_SAMPLES, SamplingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, f"n is 0; allowed: 1 to {MAX_PARALLEL_SAMPLES}"),
        ({"n": 10**9}, "n is 1000000000"),
        ({"n": 10**400}, "n is 1000"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens 20 is more than max_tokens 10"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"logprobs": 21}, "logprobs is 21; allowed: 0 to 20"),
        ({"stop": ("a",) * 17}, "stop takes at most 16 strings"),
        ({"stop": ("",)}, "stop takes at most 16 strings that are not empty"),
        ({"stop": (5,)}, "stop takes"),
        ({"stop": 5}, "stop takes"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids"),
    ],
)
def test_parameters_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("fields", [{"temprature": 1.0}, {"max_tokens": "5"}, {"ignore_eos": 1}])
def test_unknown_parameters_and_other_types_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(fields))):
        SamplingParams.from_dict(fields)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(n=3, max_tokens=7, temperature=0.5, stop=("a", "ü"), stop_token_ids=(1, 2), seed=MAX_SEED),
        SamplingParams(temperature=0, logprobs=0, ignore_eos=True, top_k=5, presence_penalty=-1),
    ],
)
def test_parameters_survive_msgpack(params: SamplingParams) -> None:
    assert SamplingParams.from_dict(msgpack.unpackb(msgpack.packb(params.to_dict()), raw=False)) == params


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"logit_bias": {5: 101}}, "logit_bias"),
        ({"structured_outputs": {}}, "structured_outputs"),
    ],
)
def test_request_error_names_the_wrong_param(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_only_what_was_changed_travels() -> None:
    assert SamplingParams().to_dict() == {}
    assert SamplingParams(top_k=3).to_dict() == {"top_k": 3}


def test_one_stop_string_needs_no_tuple() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # pyright: ignore[reportArgumentType]


def test_what_parameters_mean() -> None:
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy
    assert not SamplingParams().penalized
    for fields in ({"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}):
        assert SamplingParams(**fields).penalized
