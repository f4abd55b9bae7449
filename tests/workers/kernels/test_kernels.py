"""Every Triton kernel under Triton's interpreter, against its plain-torch reference, at odd sizes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernel_checks import CHECKS
from tests.workers.kernels.conftest import Check

DTYPES = ["float32", "bfloat16"]

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "activation": ("silu_and_mul", {"rows": 3, "width": 250}),
    "activation of several parts": ("silu_and_mul", {"rows": 1, "width": 1100}),
    "norm": ("rms_norm", {"rows": 7, "width": 576}),
    "norm of one row": ("rms_norm", {"rows": 1, "width": 96}),
    "norm of heads": ("rms_norm", {"rows": 3, "width": 80, "heads": 5}),
    "norm with residual": ("fused_add_rms_norm", {"rows": 7, "width": 250}),
    "rotation": ("rotary_embedding", {"rows": 3, "heads": 9, "kv_heads": 3, "head_dim": 64}),
    "rotation of odd heads": ("rotary_embedding", {"rows": 1, "heads": 7, "kv_heads": 1, "head_dim": 80}),
    "writing": ("kv_cache_write", {"rows": 7, "kv_heads": 3, "head_dim": 80, "block_size": 16}),
    "writing one": ("kv_cache_write", {"rows": 1, "kv_heads": 1, "head_dim": 64, "block_size": 32}),
}

BORDERS = [(14, 1), (15, 1), (16, 1), (0, 15), (0, 16), (16, 17), (31, 2)]

ATTENTION: dict[str, dict[str, Any]] = {
    "one new token": {"requests": [[40, 1]], "heads": 1, "kv_heads": 1, "head_dim": 64, "block_size": 16},
    "first token": {"requests": [[0, 1]], "heads": 4, "kv_heads": 1, "head_dim": 96, "block_size": 32},
    "one prompt": {"requests": [[0, 70]], "heads": 3, "kv_heads": 1, "head_dim": 80, "block_size": 16},
    "block borders": {"requests": BORDERS, "heads": 6, "kv_heads": 2, "head_dim": 64, "block_size": 16},
    "padded rows": {
        "requests": [[3, 1], [0, 5], [33, 1]], "heads": 8, "kv_heads": 1, "head_dim": 16, "block_size": 32,
        "padded_rows": 3,
    },
    "captured batch": {
        "requests": [[32, 1], [9, 1]], "heads": 8, "kv_heads": 2, "head_dim": 64, "block_size": 16, "padded_rows": 5,
        "padded_reqs": 5, "longest": 500,
    },
    "window within a block": {
        "requests": [[40, 1], [0, 20], [65, 3], [2, 1]], "heads": 2, "kv_heads": 2, "head_dim": 64, "block_size": 16,
        "window": 5,
    },
    "window of several tiles": {
        "requests": [[200, 1], [100, 40]], "heads": 3, "kv_heads": 1, "head_dim": 64, "block_size": 32, "window": 90,
    },
    "more tiles than KV splits": {
        "requests": [[2200, 1], [63, 1]], "heads": 4, "kv_heads": 1, "head_dim": 64, "block_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_equals_its_reference(interpreted: Check, name: str, dtype: str) -> None:
    check, sizes = SMALL[name]
    interpreted(check, dtype=dtype, **sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_its_reference(interpreted: Check, name: str, dtype: str) -> None:
    interpreted("paged_attention", dtype=dtype, **ATTENTION[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_request_do_not_depend_on_its_company(interpreted: Check, dtype: str) -> None:
    requests = [[40, 1], [0, 20], [150, 1], [30, 3], [0, 1]]
    interpreted(
        "company", dtype=dtype, requests=requests, heads=4, kv_heads=2, head_dim=64, block_size=16, padded_rows=2
    )


def test_every_kernel_is_here() -> None:
    assert {check for check, _ in SMALL.values()} | {"paged_attention", "company"} == set(CHECKS)
