"""Prompt log-probabilities against transformers' log_softmax: at TP sizes 1 to 3, in chunks, and after preemption."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.group import TensorParallelGroup, single_rank_group
from parallel.shard import Shard
from runtime.common.config import EngineConfig, resolve
from runtime.common.model_config import load_model_config
from runtime.common.protocol import NewRequest, ScheduledRequest, StepPlan
from runtime.common.sampling_params import SamplingParams
from tests.dist.ranks import run_ranks
from workers.batch import PromptSpan, RequestState
from workers.runner import ModelRunner
from workers.sampling.logprobs import PromptScorer, compute_logprobs

CPU = torch.device("cpu")
BLOCK = 4

Scores = dict[int, dict[int, Any]]
"""By request and position: token, log-probability, and the likeliest."""


def _new(
    req_id: int, tokens: list[int], prompt: int, num_top: int | None, blocks: list[int]
) -> tuple[Any, tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=50, prompt_logprobs=num_top, logprobs=0)
    return NewRequest(req_id, tuple(tokens), prompt, params), tuple(blocks)


def _plans(first: list[int], second: list[int], third: list[int], output: list[int]) -> list[StepPlan]:
    """A prompt in three chunks, a whole one, a request without prompt logprobs, a decode, and a preempted request."""
    a, a_blocks = _new(0, first, len(first), 5, range(8))
    b, b_blocks = _new(1, second, len(second), 0, range(8, 14))
    c, c_blocks = _new(2, third, len(third), None, range(14, 18))
    back, back_blocks = _new(1, second + output, len(second), 2, range(18, 26))
    one = ScheduledRequest
    return [
        StepPlan(0, (one(2, len(third), c_blocks), one(0, 7, a_blocks)), new=(c, a)),
        StepPlan(1, (one(2, 1), one(0, 9), one(1, len(second), b_blocks)), new=(b,)),
        StepPlan(2, (one(1, 1), one(0, len(first) - 16), one(2, 1))),
        StepPlan(3, (one(1, len(second) + len(output), back_blocks), one(0, 1)), new=(back,), dropped=(1,)),
    ]


def _run(group: TensorParallelGroup, folder: str, prompts: list[list[int]], output: list[int], rows: int) -> list[Any]:
    """Prompt log-probabilities and errors of each step."""
    model = load_model_config(folder)
    config = EngineConfig(
        model=folder, max_model_len=64, block_size=BLOCK, max_num_batched_tokens=64, enforce_eager=True
    )
    config = resolve(config, model, device="cpu", executor="local")
    runner = ModelRunner(config, model, group, ranks_on_host=group.size)
    runner.load_model()
    runner.allocate(32)
    runner.prompt_scorer._rows_per_round = rows
    results = [runner.execute(plan) for plan in _plans(*prompts, output)]
    return [
        [[(p.req_id, p.start, p.tokens) for p in result.prompt_logprobs], [t.error for t in result.tokens]]
        for result in results
    ]


def _scores(steps: list[Any]) -> list[Scores]:
    """By step, request and position."""
    return [
        {req_id: {start + i: entry for i, entry in enumerate(entries)} for req_id, start, entries in prompts}
        for prompts, _ in steps
    ]


@pytest.mark.parametrize(("size", "rows"), [(1, 1000), (2, 1000), (3, 5)])
def test_prompt_logprobs_are_transformers(size: int, rows: int) -> None:
    from tests.checkpoints import prompts, reference_logits, tiny_checkpoint

    folder = tiny_checkpoint("llama")
    first, second, third = prompts(25, 17, 9)
    output = [7, 8]
    arguments = str(folder), [first, second, third], output, rows
    ranks = [_run(single_rank_group(CPU), *arguments)] if size == 1 else run_ranks(_run, size, *arguments)
    assert all(step == [[], []] for rank in ranks[1:] for step in rank)
    steps = _scores(ranks[0])
    assert [{req_id: list(found) for req_id, found in step.items()} for step in steps] == [
        {0: list(range(1, 8))},
        {0: list(range(8, 17)), 1: list(range(1, 17))},
        {0: list(range(17, 25))},
        {1: list(range(1, 17))},
    ]
    whole = {0: (first, steps[0][0] | steps[1][0] | steps[2][0], 5)}
    for step, most in ((1, 0), (3, 2)):
        whole[step] = (second, steps[step][1], most)
    for tokens, found, most in whole.values():
        expected = reference_logits(folder, tokens).float().log_softmax(dim=-1)
        for position in range(1, len(tokens)):
            token_id, logprob, top = found[position]
            row = expected[position - 1]
            assert token_id == tokens[position]
            assert logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert [token for token, _ in top] == row.topk(most).indices.tolist()
            assert [value for _, value in top] == pytest.approx(row.topk(most).values.tolist(), abs=1e-4)
    assert not [error for _, errors in ranks[0] for error in errors if error]


def test_more_logprobs_than_the_vocabulary_are_capped() -> None:
    scorer = PromptScorer(single_rank_group(CPU), Shard(0, 3), 3)
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    request = RequestState(_new(0, [0, 2], 2, 20, [])[0], 8, 2)
    [report] = scorer.score(torch.zeros(1, 1), [PromptSpan(request, 0, 1, (2,))], lambda hidden: logits)
    [(token_id, logprob, top)] = report.tokens
    expected = logits[0].log_softmax(dim=-1)
    assert (token_id, logprob) == (2, pytest.approx(float(expected[2])))
    assert [token for token, _ in top] == [1, 2, 0]
    [(logprob, again)] = compute_logprobs(logits, torch.tensor([2]), 20)
    assert logprob == pytest.approx(float(expected[2]))
    assert again == tuple((token, pytest.approx(value)) for token, value in top)


def test_non_finite_prompt_logits_fail_their_request_only() -> None:
    from tests.checkpoints import prompts, tiny_checkpoint

    folder = str(tiny_checkpoint("llama"))
    model = load_model_config(folder)
    config = resolve(
        EngineConfig(model=folder, max_model_len=64, block_size=BLOCK), model, device="cpu", executor="local"
    )
    runner = ModelRunner(config, model, single_rank_group(CPU), ranks_on_host=1)
    runner.load_model()
    runner.allocate(32)
    [prompt] = prompts(9)
    compute = runner.model.compute_logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        return logits if len(hidden) == 2 else logits.index_fill(0, torch.tensor([3]), float("nan"))

    runner.model.compute_logits = poisoned  # type: ignore[method-assign]
    wanting, blocks = _new(0, prompt, 9, 1, range(4))
    plain, plain_blocks = _new(1, prompt, 9, None, range(4, 8))
    scheduled = (ScheduledRequest(0, 9, blocks), ScheduledRequest(1, 9, plain_blocks))
    result = runner.execute(StepPlan(0, scheduled, new=(wanting, plain)))
    assert result.prompt_logprobs == ()
    assert [token.broken for token in result.tokens] == [True, False]
