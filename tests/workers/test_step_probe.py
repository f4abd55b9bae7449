"""The step probe: it times the step of the live requests and leaves them as they were."""

from __future__ import annotations

import pytest
import torch

from runtime.common.errors import EngineError
from tests.workers.test_runner import decode, prefill, ready_runner, tokens_of
from workers.step_probe import measure_decode_step


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_requests_continue_after_a_measurement(mode: str) -> None:
    measured, plain = ready_runner(cudagraph_mode=mode), ready_runner(cudagraph_mode=mode)
    for plan in (prefill(range(3)), decode(2, range(3)), decode(3, range(3))):
        assert tokens_of(measured, plan) == tokens_of(plain, plan)
        before = {name: cache.clone() for name, cache in measured.kv_caches.items()}
        found = measure_decode_step(measured, 2)
        assert found["ops"] > 0 and 0 < found["forward"] < float("inf")
        torch.testing.assert_close(measured.kv_caches, before)


def test_a_measurement_needs_a_live_request() -> None:
    with pytest.raises(EngineError, match="no live request has a computed token"):
        measure_decode_step(ready_runner(enforce_eager=True), 1)
