"""Graph modes: their halves, and what of them a machine can hold."""

from __future__ import annotations

import itertools

import pytest

from runtime.common.config import GRAPH_MODES, GraphMode
from runtime.common.errors import ConfigError
from workers.graphs.modes import supported_mode

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
DECODE_ONLY, BOTH = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE

HALVES = {
    NONE: (NONE, NONE),
    PIECEWISE: (PIECEWISE, PIECEWISE),
    FULL: (FULL, NONE),
    DECODE_ONLY: (FULL, NONE),
    BOTH: (FULL, PIECEWISE),
}


def test_the_modes_are_those_of_the_config() -> None:
    assert tuple(mode.value for mode in GraphMode) == GRAPH_MODES
    assert [GraphMode.parse(name).value for name in GRAPH_MODES] == list(GRAPH_MODES)


@pytest.mark.parametrize("mode", GraphMode)
def test_halves(mode: GraphMode) -> None:
    assert (mode.decode, mode.mixed) == HALVES[mode]
    assert HALVES[GraphMode.of(*HALVES[mode])] == HALVES[mode]


def test_unknown_mode() -> None:
    with pytest.raises(ConfigError, match="cudagraph_mode is 'HALF'; allowed: NONE, PIECEWISE, FULL, "):
        GraphMode.parse("HALF")


@pytest.mark.parametrize("mode", GraphMode)
def test_a_cpu_holds_anything(mode: GraphMode) -> None:
    for split, attention, collectives in itertools.product([False, True], repeat=3):
        found = supported_mode(
            mode, device_type="cpu", split=split, attention_capturable=attention, collectives_capturable=collectives
        )
        assert found == (mode, "")


@pytest.mark.parametrize(
    ("split", "attention", "collectives", "expected"),
    [
        (True, True, True, [NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH]),
        (False, True, True, [NONE, NONE, FULL, DECODE_ONLY, DECODE_ONLY]),
        (True, False, True, [NONE, PIECEWISE, NONE, NONE, PIECEWISE]),
        (False, False, True, [NONE] * 5),
        (True, True, False, [NONE] * 5),
        (False, False, False, [NONE] * 5),
    ],
)
def test_a_gpu_holds_launches_only(split: bool, attention: bool, collectives: bool, expected: list[GraphMode]) -> None:
    for mode, found in zip(GraphMode, expected, strict=True):
        result, warning = supported_mode(
            mode, device_type="cuda", split=split, attention_capturable=attention, collectives_capturable=collectives
        )
        assert result is found
        assert warning.startswith(f"graph mode {mode.value} becomes {found.value}: ") == (found is not mode)
        assert bool(warning) == (found is not mode)
