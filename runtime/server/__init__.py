"""The OpenAI-compatible HTTP server: bodies in, the engine's outputs as responses out. It starts no ranks."""
