"""config.json as we read it, compared with transformers' reading, and the settings that are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
import transformers

from runtime.common.errors import CheckpointError
from runtime.common.model_config import ModelConfig, RopeConfig, load_model_config
from tests.checkpoints import KINDS, LLAMA3_ROPE, tiny_checkpoint

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}


def load(folder: Path, **settings: Any) -> ModelConfig:
    """The config of a folder whose config.json is PLAIN with some settings changed; None removes one."""
    values = {key: value for key, value in {**PLAIN, **settings}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return load_model_config(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str) -> None:
    folder = tiny_checkpoint(kind)
    theirs, ours = transformers.AutoConfig.from_pretrained(folder), load_model_config(folder)
    assert [ours.architecture] == theirs.architectures
    for name, their_name in {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}.items():
        assert getattr(ours, name) == getattr(theirs, their_name)
    for name in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    if hasattr(theirs, "layer_types"):
        assert ours.sliding_layers == tuple(kind == "sliding_attention" for kind in theirs.layer_types)
    assert (ours.rope.theta, ours.rope.kind) == (
        theirs.rope_parameters["rope_theta"],
        theirs.rope_parameters["rope_type"],
    )
    assert ours.dtype == "float32"
    assert ours.eos_token_ids == (2,)


@pytest.mark.parametrize("kind", KINDS)
def test_survives_msgpack(kind: str) -> None:
    config = load_model_config(tiny_checkpoint(kind))
    assert ModelConfig.from_dict(msgpack.unpackb(msgpack.packb(config.to_dict()))) == config


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 2048)
    assert (config.rms_norm_eps, config.rope, config.tie_word_embeddings) == (1e-6, RopeConfig(10000.0), False)
    assert config.eos_token_ids == ()
    qwen3 = load(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.sliding_window) == (128, True, False, None)
    mistral = load(tmp_path, architectures=["MistralForCausalLM"])
    assert (mistral.sliding_window, mistral.sliding_layers) == (4096, (True, True))
    assert load(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).sliding_window is None


def test_biases(tmp_path: Path) -> None:
    def biases(**settings: Any) -> tuple[bool, bool, bool]:
        config = load(tmp_path, **settings)
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)
    assert biases(architectures=["Qwen2ForCausalLM"]) == (True, False, False)
    assert biases(architectures=["Qwen3ForCausalLM"], attention_bias=True) == (True, True, False)


def test_sliding_windows_of_qwen(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 9}
    assert load(tmp_path, **qwen).sliding_window is None
    later = load(tmp_path, **qwen, use_sliding_window=True, max_window_layers=1)
    assert [later.layer_window(layer) for layer in range(3)] == [None, 9, 9]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    listed = load(tmp_path, **qwen, use_sliding_window=True, layer_types=kinds)
    assert listed.sliding_layers == (True, False, False)
    with pytest.raises(CheckpointError, match=r"layer_types is .*use_sliding_window"):
        load(tmp_path, **qwen, layer_types=kinds)
    with pytest.raises(CheckpointError, match=r"layer_types is .*3 times"):
        load(tmp_path, **qwen, use_sliding_window=True, layer_types=["full_attention"])


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_in_old_and_new_keys(tmp_path: Path, key: str) -> None:
    llama3 = RopeConfig(500.0, "llama3", 4.0, 1.0, 4.0, 32)
    assert load(tmp_path, **{key: LLAMA3_ROPE}).rope == llama3
    without_theta = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    assert load(tmp_path, **{key: without_theta, "rope_theta": 500.0}).rope == llama3
    assert load(tmp_path, **{key: {"type": "linear", "factor": 2}}).rope == RopeConfig(10000.0, "linear", 2.0)
    assert load(tmp_path, **{key: {"type": "default"}, "rope_theta": 77}).rope == RopeConfig(77.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "architectures is .*supported: LlamaForCausalLM, Mistral"),
    "no architecture": ({"architectures": ...}, "architectures is missing"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
    "code": ({"auto_map": {"AutoModel": "modeling.Evil"}}, "auto_map is .*never run"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "nested partial rope": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_scaling.rope_type is 'yarn'; supported"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.type is 'dynamic'"),
    "unknown rope key": ({"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "rope_scaling.mscale is 1"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    "rope of layers": ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    "rope as list": ({"rope_scaling": [1]}, "rope_scaling is"),
    "bidirectional": ({"is_causal": False}, "is_causal is False"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads 4"),
    "head size": ({"hidden_size": 66}, "head_dim is missing; it is needed"),
    "odd head": ({"head_dim": 15}, "head_dim 15 is odd"),
    "no size": ({"vocab_size": ...}, "vocab_size is missing"),
    "text": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "bool": ({"hidden_size": True}, "hidden_size is True"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; a whole number from 1 to"),
    "eps": ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
    "flag": ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    "dtype": ({"torch_dtype": "float64"}, "torch_dtype is 'float64'; supported: bfloat16"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_setting_is_refused_by_name(tmp_path: Path, case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, **settings)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        (b"{", "not valid JSON"),
        (b"\x80\x04", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ],
)
def test_unreadable_config(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder; give the folder of a Hugging Face checkpoint"):
        load_model_config(tmp_path / "absent")


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, -1]}))
    assert load(tmp_path, eos_token_id=2).eos_token_ids == (2, 7)
    assert load(tmp_path, eos_token_id=[5, 6]).eos_token_ids == (5, 6, 7, 2)
    (tmp_path / "generation_config.json").write_text("garbage")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        load(tmp_path)


def test_dtype_that_is_not_declared_is_the_stored_one(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint("llama", dtype="bfloat16"), tmp_path / "copy")
    settings = json.loads((folder / "config.json").read_text())
    declared = settings.pop("dtype")
    (folder / "config.json").write_text(json.dumps(settings))
    assert load_model_config(folder).dtype == declared == "bfloat16"


def test_needs_no_torch() -> None:
    code = "import runtime.common.model_config, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[3])
