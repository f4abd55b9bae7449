"""Mistral: Llama's architecture, with a sliding window in every layer if the config sets one."""

from __future__ import annotations

from workers.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """The decoder without biases."""
