"""Supported graph modes: the part of a configured ``runtime.common.config.GraphMode`` that this machine can capture.

Dispatching a step to a captured graph is ``dispatcher.py``'s.
"""

from __future__ import annotations

from runtime.common.config import GraphMode


def supported_mode(
    mode: GraphMode, *, device_type: str, split: bool, attention_capturable: bool, collectives_capturable: bool
) -> tuple[GraphMode, str]:
    """What of ``mode`` can be captured here.

    The CPU's replay holds anything. A CUDA graph holds launches only: nothing that reads a value back to the host.

    Args:
        mode: as configured.
        device_type: "cpu" or "cuda".
        split: whether the model is compiled in subgraphs.
        attention_capturable: whether the attention backend launches the same kernels whatever a batch holds.
        collectives_capturable: whether the collectives run on the device.

    Returns:
        the mode to capture, and a warning that says what was dropped and why; empty if nothing was.
    """
    if device_type != "cuda" or mode is GraphMode.NONE:
        return mode, ""
    if not collectives_capturable:
        return GraphMode.NONE, f"graph mode {mode.value} becomes NONE: these collectives run on the host"
    decode, mixed, reasons = mode.decode, mode.mixed, list[str]()
    if decode is GraphMode.FULL and not attention_capturable:
        decode = GraphMode.PIECEWISE if mixed is GraphMode.PIECEWISE else GraphMode.NONE
        reasons.append("this attention backend reads sizes on the host, so no graph can hold it")
    if GraphMode.PIECEWISE in (decode, mixed) and not split:
        decode = decode if decode is GraphMode.FULL else GraphMode.NONE
        mixed = GraphMode.NONE
        reasons.append("without compilation there are no subgraphs to capture (use -O1 or higher)")
    if not reasons:
        return mode, ""
    found = GraphMode.of(decode, mixed)
    return found, f"graph mode {mode.value} becomes {found.value}: {'; '.join(reasons)}"
