"""The registry of model architectures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from parallel.group import TensorParallelGroup
from parallel.linear_method import QuantConfig
from runtime.common.errors import ConfigError
from runtime.common.model_config import ModelConfig
from workers.models.decoder import DecoderForCausalLM
from workers.models.llama import LlamaForCausalLM
from workers.models.mistral import MistralForCausalLM
from workers.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM

MODELS: Mapping[str, type[DecoderForCausalLM]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
    }
)
"""Model classes by the name in ``architectures`` of config.json."""


def build_model(
    config: ModelConfig,
    *,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    quant_config: QuantConfig | None = None,
    attention_backend: str = "auto",
) -> DecoderForCausalLM:
    """This rank's part of a model on the meta device: shapes without memory. ``workers/weights.py`` fills it.

    Args:
        config: of the whole model.
        group: the ranks.
        dtype: of parameters and activations.
        quant_config: from :func:`workers.quantization.registry.get_quant_config`; None: torch's plain products.
        attention_backend: a name of ``workers/attention/registry.py``, or "auto".

    Raises:
        ConfigError: the architecture is unknown, or the attention backend cannot be used on this rank.
        ShardError: the model cannot be sharded over that many ranks.
    """
    if config.architecture not in MODELS:
        raise ConfigError(f"architecture {config.architecture} is unknown; supported: {', '.join(MODELS)}")
    with torch.device("meta"):
        return MODELS[config.architecture](
            config, group=group, dtype=dtype, quant_config=quant_config, attention_backend=attention_backend
        )
