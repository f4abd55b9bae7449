"""From the architecture that a checkpoint names to the class that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from parallel.group import TensorParallelGroup
from parallel.linear import QuantConfig
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


def build_model(
    config: ModelConfig,
    *,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    quant_config: QuantConfig | None = None,
    attention_backend: str = "auto",
) -> DecoderForCausalLM:
    """One rank's model on the meta device: shapes without memory. ``workers/weights.py`` fills it.

    Raises:
        ConfigError: the architecture is unknown, or the attention backend cannot be used on this rank.
    """
    if config.architecture not in MODELS:
        raise ConfigError(f"architecture {config.architecture} is unknown; supported: {', '.join(MODELS)}")
    with torch.device("meta"):
        return MODELS[config.architecture](
            config, group=group, dtype=dtype, quant_config=quant_config, attention_backend=attention_backend
        )
