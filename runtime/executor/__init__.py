"""The executor: runs steps on a worker group and starts, watches, restarts and ends it, with any launcher."""
