"""The dispatcher, the supported graph modes and the capture sizes: tables, and every batch against the rules."""

from __future__ import annotations

import itertools

import pytest

from runtime.common.config import CompileMode, GraphMode
from runtime.common.errors import ConfigError
from workers.graphs.dispatcher import (
    Captured,
    CaptureSizes,
    Dispatch,
    default_sizes,
    dispatch,
    resolve_capture_sizes,
    supported_mode,
    uniform_query_len,
)

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
BOTH = Captured(full=(1, 2, 4, 8), piecewise=(1, 8, 16))


@pytest.mark.parametrize(
    ("tokens", "reqs", "uniform", "captured", "expected"),
    [
        (1, 1, 1, BOTH, Dispatch(FULL, 1)),
        (3, 3, 1, BOTH, Dispatch(FULL, 4)),
        (8, 8, 1, BOTH, Dispatch(FULL, 8)),
        (9, 9, 1, BOTH, Dispatch(PIECEWISE, 16)),  # more requests than any FULL graph holds
        (6, 3, 2, BOTH, Dispatch(PIECEWISE, 8)),  # uniform, but not one token each
        (4, 3, None, BOTH, Dispatch(PIECEWISE, 8)),  # mixed
        (1, 1, None, BOTH, Dispatch(PIECEWISE, 1)),
        (17, 2, None, BOTH, Dispatch(NONE, 17)),
        (0, 0, None, BOTH, Dispatch(NONE, 0)),
        (3, 3, 1, Captured(full=(4,)), Dispatch(FULL, 4)),
        (5, 5, 1, Captured(full=(4,)), Dispatch(NONE, 5)),
        (5, 2, None, Captured(full=(8,)), Dispatch(NONE, 5)),
        (3, 3, 1, Captured(piecewise=(4,)), Dispatch(PIECEWISE, 4)),
        (3, 3, 1, Captured(), Dispatch(NONE, 3)),
    ],
)
def test_table(tokens: int, reqs: int, uniform: int | None, captured: Captured, expected: Dispatch) -> None:
    assert dispatch(tokens, reqs, uniform, captured) == expected


def _sets(limit: int) -> list[tuple[int, ...]]:
    return [sizes for n in range(3) for sizes in itertools.combinations(range(1, limit), n)]


def test_every_batch_against_the_rules() -> None:
    """Every batch of up to 6 tokens over every pair of up to two sizes each."""
    for full, piecewise in itertools.product(_sets(6), repeat=2):
        captured = Captured(full, piecewise)
        for tokens, reqs in itertools.product(range(7), repeat=2):
            uniform = (
                [None] if reqs == 0 or tokens < reqs else [None, *([tokens // reqs] if tokens % reqs == 0 else [])]
            )
            for length in uniform:
                choice = dispatch(tokens, reqs, length, captured)
                fits = {
                    FULL: [s for s in full if s >= tokens] if length == 1 else [],
                    PIECEWISE: [s for s in piecewise if s >= tokens],
                    NONE: [tokens],
                }
                best = next(mode for mode in (FULL, PIECEWISE, NONE) if fits[mode]) if tokens else NONE
                assert choice == Dispatch(best, min(fits[best])), (tokens, reqs, length, captured)


@pytest.mark.parametrize(
    ("lengths", "expected"), [([], None), ([1], 1), ([1, 1, 1], 1), ([3, 3], 3), ([1, 2], None), ([1, 1, 7], None)]
)
def test_uniform_query_len(lengths: list[int], expected: int | None) -> None:
    assert uniform_query_len(lengths) == expected


DECODE_ONLY, BOTH_MODES = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE
EVERY_MODE = [NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH_MODES]


@pytest.mark.parametrize(
    ("device", "compile_mode", "attention", "collectives", "expected"),
    [
        # A CPU replays what was traced, whatever attention and collectives do.
        ("cpu", "PIECEWISE", False, False, EVERY_MODE),
        ("cpu", "DYNAMO_TRACE_ONCE", True, True, [NONE, NONE, FULL, DECODE_ONLY, DECODE_ONLY]),
        ("cpu", "STOCK", True, True, [NONE] * 5),
        ("cpu", "NONE", True, True, [NONE] * 5),
        # A CUDA graph holds launches, of a module as well.
        ("cuda", "PIECEWISE", True, True, EVERY_MODE),
        ("cuda", "NONE", True, True, [NONE, NONE, FULL, DECODE_ONLY, DECODE_ONLY]),
        ("cuda", "STOCK", True, True, [NONE, NONE, FULL, DECODE_ONLY, DECODE_ONLY]),
        ("cuda", "PIECEWISE", False, True, [NONE, PIECEWISE, NONE, NONE, PIECEWISE]),
        ("cuda", "NONE", False, True, [NONE] * 5),
        ("cuda", "PIECEWISE", True, False, [NONE] * 5),
        ("cuda", "NONE", False, False, [NONE] * 5),
    ],
)
def test_supported_modes(
    device: str, compile_mode: str, attention: bool, collectives: bool, expected: list[GraphMode]
) -> None:
    for mode, found in zip(GraphMode, expected, strict=True):
        result, warning = supported_mode(
            mode,
            compile_mode=CompileMode(compile_mode),
            device_type=device,
            attention_capturable=attention,
            collectives_capturable=collectives,
        )
        assert result is found
        assert warning.startswith(f"graph mode {mode} becomes {found}: ") == (found is not mode)
        assert bool(warning) == (found is not mode)


def test_a_graph_mode_without_compilation_says_what_to_do_on_a_cpu() -> None:
    _, warning = supported_mode(
        FULL,
        compile_mode=CompileMode.NONE,
        device_type="cpu",
        attention_capturable=True,
        collectives_capturable=True,
    )
    assert warning == (
        "graph mode FULL becomes NONE: a CPU replays traced models only, and the compile mode is NONE "
        "(use -O1 or higher)"
    )


def test_defaults_of_a_gpu() -> None:
    assert default_sizes(24, "cuda") == (1, 2, 4, 8, 16, 24)
    assert default_sizes(20, "cuda") == (1, 2, 4, 8, 16, 20)
    assert default_sizes(512, "cuda")[:6] == (1, 2, 4, 8, 16, 24)
    assert default_sizes(512, "cuda")[-3:] == (480, 496, 512)
    assert len(default_sizes(512, "cuda")) == 51


def test_defaults_of_a_cpu_pad_by_an_eighth_at_most() -> None:
    assert default_sizes(16, "cpu") == tuple(range(1, 17))
    assert default_sizes(40, "cpu") == (*range(1, 17), 18, 20, 22, 24, 26, 28, 30, 32, 36, 40)
    sizes = default_sizes(1000, "cpu")
    for small, large in itertools.pairwise(sizes):
        assert large - small == 1 or large - (small + 1) <= (small + 1) / 8
    assert len(default_sizes(64, "cpu")) == 32


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 17, 64, 65, 511, 4096])
def test_defaults_ascend_from_one_to_the_limit(device: str, limit: int) -> None:
    sizes = default_sizes(limit, device)
    assert sizes[0] == 1
    assert sizes[-1] == limit
    assert list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize(
    ("device", "seqs", "tokens", "decode", "mixed"),
    [
        ("cuda", 64, 2048, 64, 512),
        ("cuda", 1024, 8192, 1024, 1024),
        ("cuda", 64, 100, 64, 100),
        ("cpu", 8, 2048, 8, 64),
        ("cpu", 128, 2048, 128, 128),
        ("cpu", 8, 32, 8, 32),
    ],
)
def test_default_limits(device: str, seqs: int, tokens: int, decode: int, mixed: int) -> None:
    sizes = resolve_capture_sizes(None, max_num_seqs=seqs, max_num_batched_tokens=tokens, device_type=device)
    assert (sizes.decode[-1], sizes.mixed[-1], sizes.dropped) == (decode, mixed, ())


def test_the_flags_list_is_sorted_and_cut() -> None:
    sizes = resolve_capture_sizes(
        (8, 2, 600, 2, 64, 5000), max_num_seqs=32, max_num_batched_tokens=1024, device_type="cpu"
    )
    assert sizes == CaptureSizes(decode=(2, 8), mixed=(2, 8, 64, 600), dropped=(5000,))


@pytest.mark.parametrize(("given", "told"), [((), "empty"), ((4, 0), "4, 0"), ((2048,), "2048")])
def test_a_list_of_no_use_is_refused(given: tuple[int, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=f"cudagraph_capture_sizes is {told}; allowed: .* 1 to .* 1024"):
        resolve_capture_sizes(given, max_num_seqs=32, max_num_batched_tokens=1024, device_type="cuda")
