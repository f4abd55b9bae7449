"""Compilation of a model: trace it, split it, compile each distinct subgraph once, cache all of it on disk."""
