"""Times the parts of a decode step, for ``bench latency`` on the CPU.

The probe repeats the decode step of the requests that the runner holds; a step itself has no measuring code.
"""

from __future__ import annotations

import time

from runtime.common.errors import EngineError
from runtime.common.protocol import ScheduledRequest, StepPlan
from workers.runner import ModelRunner


def measure_decode_step(runner: ModelRunner, repeats: int) -> dict[str, float]:
    """Repeat the forward pass over the last computed token of every live request. A collective call.

    Computed again, a token writes its keys and values to the same slots, so requests can continue afterwards.

    Returns:
        seconds of one forward pass as steps run it (``forward``), and of the ops in it (``ops``: ATen's and ours; of a
        compiled model its subgraphs and the splitting ops). Each is the minimum of the repeats, since other load on
        the machine only adds to it.

    Raises:
        EngineError: no request has a computed token.
    """
    requests = [request for request in runner.buffers.requests.values() if request.num_computed]
    if not requests:
        raise EngineError("there is no decode step to measure: no live request has a computed token")
    plan = StepPlan(0, tuple(ScheduledRequest(request.req_id, 1) for request in requests))
    for request in requests:
        request.num_computed -= 1
    choice, batch = runner.fill_buffers(plan)
    forward = ops = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        runner.graphs.run(choice, batch.metadata)
        forward = min(forward, time.perf_counter() - started)
        ops = min(ops, runner.graphs.op_seconds(choice, batch.metadata))
    return {"forward": forward, "ops": ops}
