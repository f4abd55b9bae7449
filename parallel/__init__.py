"""Tensor parallelism itself: shards, layers, groups of ranks and their collectives. Imports nothing of ours."""
