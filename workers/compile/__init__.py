"""From a model to a compiled model: trace, cut, compile each distinct subgraph once, remember all of it on disk."""
