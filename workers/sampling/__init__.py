"""Sampling: from logits to tokens and log-probabilities, the same on every rank."""
