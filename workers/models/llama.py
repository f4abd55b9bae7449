"""Llama 2, 3 and 3.1, and models with the same architecture (SmolLM, TinyLlama, ...)."""

from __future__ import annotations

from workers.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """The decoder as it is; biases and rotary scaling come from the config."""
