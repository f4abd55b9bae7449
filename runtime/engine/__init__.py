"""The engine: requests, scheduling, KV block accounting, and the loop that makes steps."""
