"""EngineConfig: refused values, resolved "auto" values, round trips."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest

from runtime.common.config import MAX_SEED, EngineConfig, resolve
from runtime.common.errors import ConfigError, InputError
from runtime.common.model_config import ModelConfig
from runtime.common.sampling_params import SamplingParams

MODEL = ModelConfig("LlamaForCausalLM", 8, 8, 1, 1, 1, 8, 100, 2048, dtype="bfloat16")

# ---- EngineConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; allowed: 1 to 1024"),
        ({"dtype": "int8"}, "dtype is 'int8'; allowed: auto, bfloat16, float16, float32"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"distributed_executor_backend": "mpi"}, "'mpi'; allowed: auto, ray, local, torchrun"),
        ({"cudagraph_mode": "SOME"}, "cudagraph_mode is 'SOME'"),
        ({"optimization_level": 4}, "optimization_level is 4; allowed: 0 to 3"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"kv_cache_memory": -1}, "kv_cache_memory is -1"),
        ({"step_timeout": 0}, "step_timeout is 0"),
        ({"compile_timeout": float("inf")}, "compile_timeout is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"block_size": True}, "block_size is True"),
        ({"cudagraph_capture_sizes": (1, 0)}, "cudagraph_capture_sizes is 0"),
        ({"max_num_seqs": 1.5}, "max_num_seqs is 1.5; allowed: 1 to 65536"),
        ({"attention_backend": "flash"}, "attention_backend is 'flash'; allowed: auto"),
        ({"compile_mode": "SOME"}, "compile_mode is 'SOME'; allowed: NONE, STOCK"),
        ({"quantization": "fp8"}, "quantization is 'fp8'; no scheme is supported yet; leave it out"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 50}, "50 is below max_num_seqs 100"),
    ],
)
def test_values_that_can_never_be_right_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**settings)
    assert isinstance(caught.value, InputError) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_length": 5}, r"unknown setting 'max_model_length' for EngineConfig; known: .*max_model_len"),
        ({"max_num_seqs": "8"}, r"max_num_seqs is '8' \(str\); it takes int"),
        ({"max_num_seqs": True}, r"max_num_seqs is True \(bool\)"),
        ({"enforce_eager": 1}, r"enforce_eager is 1 \(int\); it takes bool"),
        ({"dtype": None}, r"dtype is None"),
        ({"cudagraph_capture_sizes": [1, "2"]}, r"cudagraph_capture_sizes is \(1, '2'\)"),
    ],
)
def test_unknown_names_and_other_types_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_dict(fields)


def test_fields_survive_msgpack() -> None:
    config = EngineConfig(tensor_parallel_size=3, cudagraph_capture_sizes=(1, 2, 4), step_timeout=7, seed=MAX_SEED)
    fields = msgpack.unpackb(msgpack.packb(config.to_dict()), raw=False)
    assert EngineConfig.from_dict(fields) == config


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_every_flag_has_a_help_text() -> None:
    for cls in (EngineConfig, SamplingParams):
        assert all(field.metadata["help"] for field in dataclasses.fields(cls))


# ---- resolve


def resolved(**settings: Any) -> EngineConfig:
    return resolve(EngineConfig(**settings), MODEL, device="cpu", executor="local")


def test_resolve_leaves_nothing_open() -> None:
    config = resolved()
    assert (config.dtype, config.device, config.distributed_executor_backend) == ("bfloat16", "cpu", "local")
    assert (config.max_model_len, config.cudagraph_mode, config.optimization_level) == (2048, "FULL_AND_PIECEWISE", 2)
    assert "auto" not in (config.dtype, config.device, config.distributed_executor_backend)


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 512), ("cuda", 2048)])
def test_resolve_sizes_a_step_by_the_device(device: str, tokens: int) -> None:
    assert resolve(EngineConfig(), MODEL, device=device, executor="local").max_num_batched_tokens == tokens
    many = resolve(EngineConfig(max_num_seqs=4000), MODEL, device=device, executor="local")
    assert many.max_num_batched_tokens == many.max_num_seqs == 4000


def test_resolve_keeps_what_was_asked() -> None:
    asked = {"dtype": "float32", "max_model_len": 100, "cudagraph_mode": "PIECEWISE", "seed": 9}
    assert resolved(**asked) == dataclasses.replace(resolved(), **asked)


@pytest.mark.parametrize(
    ("settings", "mode", "level"),
    [
        ({"optimization_level": 0}, "NONE", 0),
        ({"optimization_level": 1}, "PIECEWISE", 1),
        ({"optimization_level": 3}, "FULL_AND_PIECEWISE", 3),
        ({"enforce_eager": True}, "NONE", 0),
        ({"enforce_eager": True, "optimization_level": 3, "cudagraph_mode": "NONE"}, "NONE", 0),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY", 2),
    ],
)
def test_resolve_picks_the_graph_mode(settings: dict[str, Any], mode: str, level: int) -> None:
    config = resolved(**settings)
    assert (config.cudagraph_mode, config.optimization_level) == (mode, level)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 2049}, r"max_model_len 2049 is more than the 2048 positions"),
        ({"enforce_eager": True, "cudagraph_mode": "FULL"}, r"enforce_eager and cudagraph_mode FULL contradict"),
    ],
)
def test_resolve_refuses_what_the_model_cannot(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**settings)
