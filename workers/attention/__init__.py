"""Attention over the paged KV cache: the interface of a backend, and the backends."""
