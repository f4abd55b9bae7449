"""Request states and static buffers: the contents of every buffer, the padding of a graph, and plans as deltas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.common.errors import ProtocolError
from runtime.common.protocol import NewRequest, ScheduledRequest, StepPlan
from runtime.common.sampling_params import SamplingParams
from workers.batch import Batch, BatchBuffers

GREEDY = SamplingParams(temperature=0.0)


def make_buffers() -> BatchBuffers:
    """Buffers that hold values of an earlier, larger step everywhere."""
    buffers = BatchBuffers(
        max_num_tokens=16, max_num_reqs=6, max_model_len=12, block_size=4, num_blocks=16, device=torch.device("cpu")
    )
    for buffer in (
        buffers.input_ids, buffers.positions, buffers.slot_mapping, buffers.block_table, buffers.seq_lens,
        buffers.query_start_loc, buffers.sample_rows,
    ):  # fmt: skip
        buffer.tensor.fill_(99)
    return buffers


def new(req_id: int, tokens: int, prompt: int | None = None, computed: int = 0, **params: Any) -> NewRequest:
    token_ids = tuple(range(10 * req_id, 10 * req_id + tokens))
    sampling = SamplingParams(**({"temperature": 0.0} | params))
    return NewRequest(req_id, token_ids, tokens if prompt is None else prompt, sampling, computed)


def run(buffers: BatchBuffers, plan: StepPlan, padded_tokens: int, padded_reqs: int = 0) -> Batch:
    buffers.update_requests(plan)
    return buffers.fill(plan, padded_tokens, padded_reqs)


def decode_batch(buffers: BatchBuffers, num_reqs: int) -> None:
    """Prefill requests 1 to ``num_reqs`` of 2, 3, ... tokens and append a token to each: the next step can decode."""
    plan = StepPlan(
        0,
        tuple(ScheduledRequest(i, i + 1, (2 * i, 2 * i + 1)) for i in range(1, num_reqs + 1)),
        tuple(new(i, i + 1) for i in range(1, num_reqs + 1)),
    )
    for request in run(buffers, plan, plan.num_tokens).sample_requests:
        request.append_token(7)


def test_a_mixed_step_fills_every_buffer() -> None:
    buffers = make_buffers()
    buffers.update_requests(StepPlan(0, (ScheduledRequest(1, 5, (3, 0)),), (new(1, 6),)))
    buffers.requests[1].num_computed = 5
    plan = StepPlan(1, (ScheduledRequest(2, 3, (5, 1)), ScheduledRequest(1, 1)), (new(2, 6),))
    batch = run(buffers, plan, 8)
    metadata = batch.metadata
    assert buffers.input_ids.tensor[:8].tolist() == [20, 21, 22, 15, 0, 0, 0, 0]
    assert buffers.positions.tensor[:8].tolist() == [0, 1, 2, 5, 0, 0, 0, 0]
    assert metadata.slot_mapping.tolist() == [20, 21, 22, 1, -1, -1, -1, -1]
    assert metadata.block_table.tolist() == [[5, 1], [3, 0]]
    assert metadata.seq_lens.tolist() == [3, 6]
    assert metadata.query_start_loc.tolist() == [0, 3, 4]
    assert (metadata.num_tokens, metadata.num_reqs, metadata.max_query_len, metadata.max_seq_len) == (4, 2, 3, 6)
    assert batch.num_tokens == 4
    assert batch.sample_rows.tolist() == [3]  # Request 2 has prompt tokens left.
    assert batch.sample_requests == [buffers.requests[1]]
    assert [request.num_computed for request in buffers.requests.values()] == [6, 3]


def test_the_padding_of_an_under_full_decode_graph_is_cleared() -> None:
    """A FULL graph of 6 requests reads all 6 rows: those of earlier steps must not be left in them."""
    buffers = make_buffers()
    decode_batch(buffers, 3)
    plan = StepPlan(1, tuple(ScheduledRequest(i, 1) for i in (1, 2, 3)))
    metadata = run(buffers, plan, 6, padded_reqs=6).metadata
    assert (metadata.num_tokens, metadata.num_reqs) == (3, 3)
    assert metadata.seq_lens.tolist() == [3, 4, 5, 0, 0, 0]
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3, 3]
    assert metadata.slot_mapping.tolist()[3:] == [-1, -1, -1]
    assert metadata.block_table.shape[0] == 6
    assert buffers.input_ids.tensor[:6].tolist() == [7, 7, 7, 0, 0, 0]
    assert buffers.positions.tensor[:6].tolist() == [2, 3, 4, 0, 0, 0]


def test_without_padded_requests_only_the_rows_of_the_step_are_passed() -> None:
    buffers = make_buffers()
    decode_batch(buffers, 3)
    metadata = run(buffers, StepPlan(1, (ScheduledRequest(2, 1),)), 4).metadata
    assert metadata.seq_lens.tolist() == [4]
    assert metadata.query_start_loc.tolist() == [0, 1]
    assert metadata.slot_mapping.tolist()[1:] == [-1, -1, -1]


def test_a_preempted_request_starts_again_with_its_output() -> None:
    buffers = make_buffers()
    decode_batch(buffers, 2)
    first = buffers.requests[1]
    first.failure, first.non_finite = "grammar", True
    again = NewRequest(1, (10, 11, 7), 2, GREEDY, num_computed=1)
    batch = run(buffers, StepPlan(1, (ScheduledRequest(1, 2, (4,)),), (again,), dropped=(1, 2)), 2)
    assert list(buffers.requests) == [1]
    request = buffers.requests[1]
    assert request is not first and not request.failure and not request.non_finite
    assert request.output == [7] and request.num_output == 1
    assert batch.metadata.slot_mapping.tolist() == [17, 18]
    assert batch.metadata.block_table.tolist() == [[4]]
    assert batch.sample_requests == [request]


def test_a_plan_for_an_unknown_request_is_refused() -> None:
    with pytest.raises(ProtocolError, match="step 4 schedules request 8, never announced here"):
        make_buffers().update_requests(StepPlan(4, (ScheduledRequest(8, 1),)))


@pytest.mark.parametrize("block_id", [-1, 16])
def test_blocks_outside_the_cache_are_refused_before_any_kernel_sees_them(block_id: int) -> None:
    buffers = make_buffers()
    plan = StepPlan(3, (ScheduledRequest(1, 5, (15, block_id)),), (new(1, 5),))
    with pytest.raises(ProtocolError, match=f"step 3 assigns KV block {block_id} to request 1; .* 16 blocks, 0 to 15"):
        buffers.update_requests(plan)


def test_a_plan_for_more_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(ProtocolError, match="step 4 wants tokens 0 to 3 of request 1, which has 2 here"):
        run(make_buffers(), StepPlan(4, (ScheduledRequest(1, 3, (0,)),), (new(1, 2),)), 4)


def test_prompt_spans_are_the_rows_that_predict_prompt_tokens() -> None:
    buffers = make_buffers()
    scheduled = ScheduledRequest(1, 2, (0,)), ScheduledRequest(2, 5, (1, 2)), ScheduledRequest(3, 4, (3,))
    wanted = new(1, 4, prompt_logprobs=2), new(2, 5, prompt=3, prompt_logprobs=0), new(3, 4)
    spans = run(buffers, StepPlan(0, scheduled, wanted), 11).prompt_spans
    found = [(span.request.req_id, span.first_row, span.start, span.token_ids) for span in spans]
    assert found == [(1, 0, 1, (11, 12)), (2, 2, 1, (21, 22))]
    # The second chunk: its last row predicts the output. Request 2 has no prompt token left.
    buffers.requests[2].append_token(1)
    spans = run(buffers, StepPlan(1, (ScheduledRequest(2, 1), ScheduledRequest(1, 2))), 3).prompt_spans
    assert [(span.request.req_id, span.first_row, span.start, span.token_ids) for span in spans] == [(1, 1, 3, (13,))]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"logprobs": 0},
        {"presence_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"logit_bias": {1: 1.0}},
        {"structured_outputs": {"regex": "a"}},
    ],
    ids=str,
)
def test_argmax_only_requests_need_nothing_but_the_argmax(params: dict[str, Any]) -> None:
    buffers = make_buffers()
    buffers.update_requests(StepPlan(0, (), (new(1, 2), new(2, 2, **params))))
    assert buffers.requests[1].argmax_only
    assert not buffers.requests[2].argmax_only


def test_tokens_without_blocks_are_refused() -> None:
    buffers = make_buffers()
    plan = StepPlan(3, (ScheduledRequest(1, 5, (2,)),), (new(1, 5),))
    with pytest.raises(ProtocolError, match="step 3 computes token 5 of request 1, whose 1 KV blocks hold 4"):
        run(buffers, plan, 8)
