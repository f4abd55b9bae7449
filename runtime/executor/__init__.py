"""The executor: starts, watches, steps, restarts and ends a worker group, whatever launcher made its processes."""
