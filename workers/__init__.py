"""One rank's process: the model, its shard of the weights, its KV cache, and the steps it executes."""
