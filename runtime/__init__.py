"""The driver process: configuration, protocol, scheduling, the engine. Never imports torch."""
