"""Graph modes: what may be captured, for pure decode and for mixed batches, and what a machine can really hold.

How a step finds its graph is ``dispatcher.py``'s; the names are also ``runtime.common.config.GRAPH_MODES``.
"""

from __future__ import annotations

from enum import Enum

from runtime.common.errors import ConfigError


class GraphMode(Enum):
    """How steps run. The first three are also what one step runs as; the pairs differ by kind of batch.

    A FULL graph holds the whole forward pass, attention included, for batches in which every request has one new
    token (decode). A PIECEWISE graph holds what stands between the attention layers, which run as ever, so it serves
    any batch of its number of tokens. FULL alone captures for decode only, as FULL_DECODE_ONLY does.
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @classmethod
    def parse(cls, text: str) -> GraphMode:
        """The mode of that name.

        Raises:
            ConfigError: there is none.
        """
        try:
            return cls(text)
        except ValueError:
            allowed = ", ".join(mode.value for mode in cls)
            raise ConfigError(f"cudagraph_mode is {text!r}; allowed: {allowed}") from None

    @property
    def decode(self) -> GraphMode:
        """NONE, PIECEWISE or FULL: what a pure decode batch asks for."""
        return self if self in (GraphMode.NONE, GraphMode.PIECEWISE) else GraphMode.FULL

    @property
    def mixed(self) -> GraphMode:
        """NONE or PIECEWISE: what any other batch asks for."""
        piecewise = self in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE)
        return GraphMode.PIECEWISE if piecewise else GraphMode.NONE

    @classmethod
    def of(cls, decode: GraphMode, mixed: GraphMode) -> GraphMode:
        """The mode whose halves these are."""
        return next(mode for mode in reversed(cls) if (mode.decode, mode.mixed) == (decode, mixed))


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
