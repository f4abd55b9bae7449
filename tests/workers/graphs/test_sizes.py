"""Capture sizes: the defaults of each device, and the flag's list."""

from __future__ import annotations

import itertools

import pytest

from runtime.common.errors import ConfigError
from workers.graphs.sizes import CaptureSizes, default_sizes, resolve_capture_sizes


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
