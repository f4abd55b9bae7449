"""Qwen 2, 2.5 and 3."""

from __future__ import annotations

from workers.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The decoder with QKV biases; the later layers may have a sliding window."""


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The decoder with a norm on every query and key head, usually without biases."""
