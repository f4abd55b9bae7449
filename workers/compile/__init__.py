"""From a model to a compiled replica: trace, cut, compile each distinct piece once, remember all of it on disk."""
