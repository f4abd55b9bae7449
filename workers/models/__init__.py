"""Models: the shared decoder, one file per family, and the registry of architectures."""
