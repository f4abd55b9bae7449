"""Shares of a run's time, from the engine's counters. The names are those of ``EngineSnapshot``."""

from __future__ import annotations


def shares(model_seconds: float | None, step_seconds: float | None, wall_seconds: float) -> dict[str, float | None]:
    """Shares of a run; None where nothing was counted.

    Args:
        model_seconds: rank 0's own time: preparing, forward pass, sampling.
        step_seconds: time with at least one step in flight.
        wall_seconds: of the whole run.

    Returns:
        ``model_share`` and ``driver_share`` of the time in which steps were under way, and ``busy_share``, what that
        time was of the whole run.
    """
    if model_seconds is None or not step_seconds:
        return {"model_share": None, "driver_share": None, "busy_share": None}
    model_share = model_seconds / step_seconds
    return {
        "model_share": round(model_share, 4),
        "driver_share": round(1 - model_share, 4),
        "busy_share": round(step_seconds / wall_seconds, 4),
    }
