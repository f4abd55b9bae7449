"""A checkpoint's model configuration: Hugging Face's ``config.json`` parsed into a frozen dataclass.

A setting that changes the result and is not implemented is refused by name. The engine's configuration is in
``config.py``, the weight files are in ``checkpoint.py``, the models in ``workers/models/``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from runtime.common.checkpoint import checked_folder, inspect_checkpoint, read_json_object
from runtime.common.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
ROPE_KINDS = ("default", "linear", "llama3")
STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the angle of pair i at position p is ``p * theta ** (-2i / head_dim)``, then scaled.

    Attributes:
        kind: "default"; "linear": angles divided by ``factor``; "llama3": only low frequencies divided by ``factor``.
        original_max_position_embeddings: llama3: the context length of pre-training, in tokens.
        low_freq_factor, high_freq_factor: llama3: rotations within that context below or above which a frequency is low
            or high.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are those of the whole model, before sharding.

    Attributes:
        architecture: the name in ``architectures`` of config.json, a key of ``workers/models/registry.py``.
        qkv_bias, o_bias, mlp_bias: whether these linear layers have a bias.
        qk_norm: whether queries and keys are normalized per head before the rotary embedding.
        sliding_window: window of sliding-attention layers in tokens, the query included; None without such layers.
        sliding_layers: for each layer, whether it has sliding attention.
        dtype: of weights and activations, one of "bfloat16", "float16", "float32".
        eos_token_ids: end-of-sequence tokens of config.json and generation_config.json.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.sliding_layers:
            object.__setattr__(self, "sliding_layers", (False,) * self.num_layers)

    def layer_window(self, layer: int) -> int | None:
        """A layer's attention window in tokens, the query included; None: full attention."""
        return self.sliding_window if self.sliding_layers[layer] else None

    def to_dict(self) -> dict[str, Any]:
        """The fields as msgpack types; :meth:`from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`. Raises TypeError for an unknown field."""
        values: dict[str, Any] = dict(fields)
        for name in ("sliding_layers", "eos_token_ids"):
            values[name] = tuple(values.get(name, ()))
        if "rope" in values:
            values["rope"] = RopeConfig(**values["rope"])
        return cls(**values)


@dataclass(frozen=True)
class _Architecture:
    """Properties of an architecture that its config.json does not state, and its defaults for absent keys."""

    max_position_embeddings: int
    head_dim: int | None = None
    attention_bias: str = "none"  # "none", "qkv" (always on these three), or "config" (attention_bias, o_proj too)
    mlp_bias: bool = False  # whether config.json's mlp_bias is followed
    qk_norm: bool = False
    windows: str = "none"  # "none", "all" (every layer once sliding_window is set), or "layers" (Qwen's three keys)


ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(2048, attention_bias="config", mlp_bias=True),
    "MistralForCausalLM": _Architecture(131072, windows="all"),
    "Qwen2ForCausalLM": _Architecture(32768, attention_bias="qkv", windows="layers"),
    "Qwen3ForCausalLM": _Architecture(32768, head_dim=128, attention_bias="config", qk_norm=True, windows="layers"),
}

NO_QUANTIZATION = "no scheme is supported yet; use a checkpoint with bfloat16, float16 or float32 weights"

_ONLY: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the feed-forward layers compute silu(gate) * up"),
    "partial_rotary_factor": (1.0, "whole heads are rotated"),
    "rope_interleaved": (False, "a head is rotated in halves"),
    "is_causal": (True, "attention is causal"),
    "add_cross_attention": (False, "there is no encoder"),
    "is_encoder_decoder": (False, "there is no encoder"),
    "quantization_config": (
        None,
        NO_QUANTIZATION,
    ),
    "compression_config": (
        None,
        NO_QUANTIZATION,
    ),
    "auto_map": (None, "a checkpoint's code is never run; remove the key if the architecture is a standard one"),
}
"""Settings that change the result: key -> (the one supported value, reason)."""


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json`` if there) of a checkpoint folder.

    Raises:
        CheckpointError: folder or file is missing or unreadable, the architecture is unknown, or a setting is
            missing, malformed, or not supported. The message names file and setting.
    """
    folder = checked_folder(folder)
    path = folder / CONFIG_FILE
    if not path.exists():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}, so it is not a Hugging Face checkpoint; check the path")
    settings = _Settings(path, read_json_object(path))
    name, architecture = _architecture(settings)
    for key, (value, why) in _ONLY.items():
        settings.only(key, value, why)
    num_layers = settings.size("num_hidden_layers", most=MAX_LAYERS)
    max_positions = settings.size("max_position_embeddings", architecture.max_position_embeddings)
    num_heads, num_kv_heads, head_dim = _heads(settings, architecture)
    sliding_window, sliding_layers = _windows(settings, architecture, num_layers)
    attention_bias = architecture.attention_bias == "config" and settings.flag("attention_bias")
    vocab_size = settings.size("vocab_size")
    return ModelConfig(
        architecture=name,
        hidden_size=settings.size("hidden_size"),
        intermediate_size=settings.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        hidden_act="silu",
        qkv_bias=attention_bias or architecture.attention_bias == "qkv",
        o_bias=attention_bias,
        mlp_bias=architecture.mlp_bias and settings.flag("mlp_bias"),
        qk_norm=architecture.qk_norm,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        rope=_rope(settings, max_positions),
        tie_word_embeddings=settings.flag("tie_word_embeddings"),
        dtype=_dtype(settings, folder),
        eos_token_ids=_eos_token_ids(settings, folder),
    )


class _Settings:
    """The values of one JSON file, each checked on access; errors name the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any], where: str = "") -> None:
        self.path = path
        self.where = where
        self.values = values

    def error(self, key: str, allowed: str) -> CheckpointError:
        """The error for a key with an invalid value; ``allowed`` says what is valid."""
        found = repr(self.values[key])[:200] if key in self.values else "missing"
        return CheckpointError(f"{self.path}: {self.where}{key} is {found}; {allowed}")

    def size(self, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A positive integer; null counts as absent."""
        value = default if self.values.get(key) is None else self.values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(key, f"a whole number from 1 to {most} is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; null counts as absent."""
        value = default if self.values.get(key) is None else self.values[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise self.error(key, "a positive number is needed")
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean; absent and null mean False."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false is needed")
        return bool(value)

    def only(self, key: str, value: Any, why: str) -> None:
        """Refuse every value of a key except one; absent and null count as that value."""
        found = self.values.get(key)
        if found is not None and found != value:
            raise self.error(key, f"only {value!r} is supported: {why}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; null and -1 stand for "none" in published checkpoints."""
        value = self.values.get(key)
        items = cast("list[Any]", value) if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.error(key, "a token id or a list of them is needed")
        return tuple(item for item in items if item >= 0)


def _architecture(settings: _Settings) -> tuple[str, _Architecture]:
    names = settings.values.get("architectures")
    name = cast("list[Any]", names)[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise settings.error("architectures", f"supported: {', '.join(ARCHITECTURES)}")
    return str(name), ARCHITECTURES[str(name)]


def _heads(settings: _Settings, architecture: _Architecture) -> tuple[int, int, int]:
    """Query heads, KV heads, and the size of a head."""
    num_heads = settings.size("num_attention_heads")
    num_kv_heads = settings.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise settings.error("num_key_value_heads", f"it must divide num_attention_heads {num_heads}")
    default = architecture.head_dim if "head_dim" not in settings.values else None
    if default is None and settings.values.get("head_dim") is None:
        hidden_size = settings.size("hidden_size")
        if hidden_size % num_heads:
            raise settings.error("head_dim", f"it is needed: hidden_size {hidden_size} is no multiple of {num_heads}")
        default = hidden_size // num_heads
    head_dim = settings.size("head_dim", default)
    if head_dim % 2:
        raise CheckpointError(f"{settings.path}: head_dim {head_dim} is odd; rotary embedding needs an even one")
    return num_heads, num_kv_heads, head_dim


def _windows(settings: _Settings, architecture: _Architecture, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window in tokens, and for each layer whether it has one."""
    none: tuple[int | None, tuple[bool, ...]] = (None, (False,) * num_layers)
    if architecture.windows == "none":
        return none
    default = 4096 if "sliding_window" not in settings.values else None
    asked = architecture.windows == "all" or settings.flag("use_sliding_window")
    has_window = asked and (default is not None or settings.values.get("sliding_window") is not None)
    window = settings.size("sliding_window", default) if has_window else None
    kinds = settings.values.get("layer_types")
    if architecture.windows == "all":
        settings.only("layer_types", None, "every layer of this architecture has the same kind of attention")
        layers = (True,) * num_layers
    elif kinds is None:
        first = settings.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise settings.error("max_window_layers", "the number of layers without a window is needed")
        layers = tuple(layer >= first for layer in range(num_layers))
    else:
        names = cast("list[Any]", kinds) if isinstance(kinds, list) else []
        if len(names) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in names):
            raise settings.error("layer_types", f"'full_attention' or 'sliding_attention', {num_layers} times")
        layers = tuple(kind == "sliding_attention" for kind in names)
        if window is None and any(layers):
            raise settings.error("layer_types", "sliding_attention needs use_sliding_window and sliding_window")
    return (window, layers) if window is not None and any(layers) else none


def _rope(settings: _Settings, max_positions: int) -> RopeConfig:
    """The rotary embedding, from transformers 5's ``rope_parameters`` or the older ``rope_scaling``."""
    for key in ("rope_parameters", "rope_scaling"):
        if settings.values.get(key) is not None and not isinstance(settings.values[key], dict):
            raise settings.error(key, "an object is needed")
    key = "rope_parameters" if settings.values.get("rope_parameters") else "rope_scaling"
    rope = _Settings(settings.path, dict(settings.values.get(key) or {}), f"{key}.")
    kind_key = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.values.get(kind_key, "default")
    if kind not in ROPE_KINDS:
        raise rope.error(kind_key, f"supported: {', '.join(ROPE_KINDS)}")
    rope.only("partial_rotary_factor", 1.0, "whole heads are rotated")
    theta = rope.number("rope_theta", settings.number("rope_theta", 10000.0))
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind == "default":
        config = RopeConfig(theta)
    elif kind == "linear":
        known |= {"factor"}
        config = RopeConfig(theta, kind, rope.number("factor"))
    else:
        known |= {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error("high_freq_factor", f"it must be more than low_freq_factor {low}")
        # As in transformers, the key outside of the object takes precedence.
        outer = settings if settings.values.get("original_max_position_embeddings") is not None else rope
        original = outer.size("original_max_position_embeddings", max_positions)
        config = RopeConfig(theta, kind, rope.number("factor"), low, high, original)
    unknown = sorted(name for name, value in rope.values.items() if name not in known and value is not None)
    if unknown:
        raise rope.error(unknown[0], f"{kind} scaling takes {', '.join(sorted(known))}")
    return config


def _dtype(settings: _Settings, folder: Path) -> str:
    """The declared dtype; without one, the dtype in which most of the checkpoint's bytes are stored."""
    key = "dtype" if settings.values.get("dtype") is not None else "torch_dtype"
    declared = settings.values.get(key)
    if declared in (None, "auto"):
        stored = [info for info in inspect_checkpoint(folder).tensors.values() if info.dtype in STORED_DTYPES]
        if not stored:
            raise settings.error("dtype", f"and no tensor is stored in one of {', '.join(STORED_DTYPES.values())}")
        return STORED_DTYPES[max(stored, key=lambda info: info.nbytes).dtype]
    name = str(declared).removeprefix("torch.")
    if name not in STORED_DTYPES.values():
        raise settings.error(key, f"supported: {', '.join(STORED_DTYPES.values())}")
    return name


def _eos_token_ids(settings: _Settings, folder: Path) -> tuple[int, ...]:
    """End-of-sequence tokens: config.json's first, then those that only generation_config.json names."""
    token_ids = settings.token_ids("eos_token_id")
    path = folder / GENERATION_CONFIG_FILE
    if path.exists():
        token_ids += _Settings(path, read_json_object(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(token_ids))
