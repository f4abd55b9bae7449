"""Llama 2, 3, 3.1 and the many models that share its form (SmolLM, TinyLlama, ...)."""

from __future__ import annotations

from workers.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder. Biases and rotary scaling come from the config."""
