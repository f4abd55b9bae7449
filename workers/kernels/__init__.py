"""Kernels of one rank: bindings of the C kernels, Triton launches, and the custom ops that select between them."""
