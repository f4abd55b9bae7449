"""The sampler against transformers' logits processors, torch.argmax, and itself in other batches and on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.group import TensorParallelGroup, single_rank_group
from parallel.shard import Shard, split
from runtime.common.protocol import NewRequest, SampledToken
from runtime.common.sampling_params import SamplingParams
from tests.dist.ranks import run_ranks
from tests.workers.sampling.harness import SamplerHarness
from workers.sampling import native_sampling
from workers.sampling import sampler as sampler_module
from workers.sampling.gumbel_max import NUCLEUS_WIDTH
from workers.sampling.sampler import Sampler

CPU = torch.device("cpu")
EOS = 2


def make_sampler(vocab_size: int) -> SamplerHarness:
    return SamplerHarness(Sampler(single_rank_group(CPU), Shard(0, vocab_size), vocab_size, CPU, eos_token_ids=(EOS,)))


def request(req_id: int, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **params: Any) -> NewRequest:
    params.setdefault("seed", req_id)
    return NewRequest(req_id, prompt + output, len(prompt), SamplingParams(max_tokens=100, **params))


def logits_of(rows: int, vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def sample_one(
    logits: torch.Tensor, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **params: Any
) -> SampledToken:
    """What a request alone gets from one row [V]."""
    sampler = make_sampler(logits.shape[-1])
    sampler.add(request(0, prompt, output, **params))
    _, tokens = sampler.sample(logits.unsqueeze(0), [0])
    assert tokens is not None, "rank 0 reports tokens"
    return tokens[0]


# ---- argmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_argmax_also_among_equals(dtype: torch.dtype) -> None:
    logits = logits_of(64, 3001, dtype=dtype).round()  # Rounded, so that most rows have several maxima.
    sampler = make_sampler(3001)
    for req_id in range(64):
        sampler.add(request(req_id, temperature=0.0))
    token_ids, _ = sampler.sample(logits, list(range(64)))
    assert token_ids == logits.argmax(dim=-1).tolist()


def test_tiny_temperature_is_greedy() -> None:
    logits = logits_of(1, 500)[0]
    for temperature in (1e-3, 1e-30, 5e-324):
        assert sample_one(logits, temperature=temperature).token_id == int(logits.argmax())


# ---- distributions


def expected_probabilities(logits: torch.Tensor, prompt: tuple[int, ...], params: SamplingParams) -> torch.Tensor:
    """The distribution that transformers' processors leave, in the order in which its generate() applies them."""
    from transformers import generation

    processors: list[Any] = []
    if params.logit_bias:
        processors.append(generation.SequenceBiasLogitsProcessor([[[t], bias] for t, bias in params.logit_bias]))
    if params.repetition_penalty != 1.0:
        processors.append(generation.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(generation.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(generation.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(generation.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(generation.MinPLogitsWarper(params.min_p))
    ids = torch.tensor([prompt])
    return generation.LogitsProcessorList(processors)(ids, logits.unsqueeze(0)).softmax(dim=-1)[0]


DISTRIBUTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 1.5},
    {"logit_bias": {0: 2.5, 3: -100, 149: 4.0}},
    {"logit_bias": {4: 3.0, 9: -1.0}, "repetition_penalty": 1.7, "temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.8, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.8, "top_p": 0.8, "min_p": 0.15},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=str)
def test_frequencies_are_those_of_transformers(params: dict[str, Any]) -> None:
    vocab_size, rows, steps = 150, 1000, 6  # More than two blocks of tokens, the last not full.
    logits = logits_of(1, vocab_size, seed=7)[0]
    prompt = (1, 4, 4, 9, int(logits.argmax()))
    expected = expected_probabilities(logits, prompt, SamplingParams(**params))
    counts = torch.zeros(vocab_size)
    sampler = make_sampler(vocab_size)
    for step in range(steps):
        for row in range(rows):
            sampler.add(request(row, prompt, seed=1_000_000 * step + row, **params))
        token_ids, _ = sampler.sample(logits.expand(rows, -1), list(range(rows)))
        counts += torch.bincount(torch.tensor(token_ids), minlength=vocab_size)
    assert not counts[expected == 0].any(), "a token was sampled that transformers masks"
    likely = expected * rows * steps >= 5
    excess = ((counts - expected * rows * steps) ** 2 / (expected * rows * steps))[likely].sum()
    degrees = max(int(likely.sum()) - 1, 1)
    assert excess < degrees + 4 * (2 * degrees) ** 0.5 + 4, f"chi-square {excess:.1f} with {degrees} degrees of freedom"


def test_one_stream_has_the_distribution_too() -> None:
    """Noise of successive tokens of one request is independent, like that of different requests."""
    logits, steps = torch.zeros(1, 4), 3000
    sampler = make_sampler(4)
    sampler.add(request(0, seed=3))
    tokens = torch.tensor([sampler.sample(logits, [0])[0][0] for _ in range(steps)])
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).float()
    expected = (steps - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 15 + 4 * 30**0.5


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 3000}, {"top_k": 3000, "top_p": 0.5}], ids=str)
def test_flat_rows_are_truncated_like_transformers(params: dict[str, Any]) -> None:
    """More candidates remain than are considered first: the whole row has to be sorted."""
    logits = logits_of(1, 6000, seed=1)[0] / 30
    expected = expected_probabilities(logits, (1,), SamplingParams(**params))
    sampler = make_sampler(6000)
    for row in range(400):
        sampler.add(request(row, **params))
    token_ids, _ = sampler.sample(logits.expand(400, -1), list(range(400)))
    assert (expected > 0).sum() > NUCLEUS_WIDTH
    # Rounding may move the end of a nucleus of thousands by one token.
    assert expected[token_ids].count_nonzero() >= 399
    assert len(set(token_ids)) > 300


def test_top_k_keeps_all_ties() -> None:
    logits = torch.zeros(200)
    logits[:3] = 1.0
    tokens = {sample_one(logits, top_k=4, seed=seed).token_id for seed in range(300)}
    assert tokens & set(range(3)) and len(tokens - set(range(3))) > 50


# ---- penalties, min_tokens, logprobs


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.tensor([0.0, 5.0, 4.9, 4.0, 3.0])
    output = (1, 1, 2)
    for presence, frequency in ((0.5, 0.0), (0.0, 0.3), (1.0, 1.0), (-1.0, 0.2)):
        expected = logits.clone()
        for token in set(output):
            expected[token] -= presence + frequency * output.count(token)
        got = sample_one(
            logits, (3, 3, 3), output, temperature=0.0, presence_penalty=presence, frequency_penalty=frequency
        )
        assert got.token_id == int(expected.argmax())


def test_penalties_count_sampled_tokens() -> None:
    """Counting token by token equals counting the whole output of a request that is added again."""
    logits = logits_of(1, 50)
    params = {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    sampler = make_sampler(50)
    sampler.add(request(0, **params))
    output: list[int] = []
    for _ in range(12):
        assert sample_one(logits[0], (1,), tuple(output), **params).token_id == sampler.sample(logits, [0])[0][0]
        output.append(sample_one(logits[0], (1,), tuple(output), **params).token_id)
    assert len(set(output)) > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_suppresses_eos_and_stop_tokens(temperature: float) -> None:
    logits = torch.full((1, 10), -5.0)
    logits[0, EOS], logits[0, 7] = 20.0, 19.0
    sampler = make_sampler(10)
    sampler.add(request(0, temperature=temperature, min_tokens=3, stop_token_ids=(7,)))
    tokens = [sampler.sample(logits, [0])[0][0] for _ in range(4)]
    assert not {EOS, 7} & set(tokens[:3])
    assert tokens[3] in (EOS, 7)


def test_min_tokens_does_not_suppress_an_ignored_eos() -> None:
    logits = torch.zeros(10)
    logits[EOS] = 9.0
    assert sample_one(logits, temperature=0.0, min_tokens=3, ignore_eos=True).token_id == EOS


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_of_the_raw_logits(temperature: float) -> None:
    logits = logits_of(1, 300, dtype=torch.bfloat16)[0]
    token = sample_one(logits, temperature=temperature, logprobs=5, repetition_penalty=2.0, top_k=9)
    expected = logits.float().log_softmax(dim=-1)
    values, ids = expected.topk(5)
    assert token.logprob == pytest.approx(float(expected[token.token_id]))
    assert [token_id for token_id, _ in token.top_logprobs] == ids.tolist()
    assert [logprob for _, logprob in token.top_logprobs] == pytest.approx(values.tolist())
    assert all(isinstance(token_id, int) for token_id, _ in token.top_logprobs)


def test_each_row_gets_its_number_of_logprobs() -> None:
    sampler = make_sampler(30)
    for req_id, wanted in enumerate((None, 0, 3, 20)):
        sampler.add(request(req_id, logprobs=wanted))
    _, tokens = sampler.sample(logits_of(4, 30), [0, 1, 2, 3])
    assert tokens is not None, "rank 0 reports tokens"
    assert [len(token.top_logprobs) for token in tokens] == [0, 0, 3, 20]
    assert [token.logprob is None for token in tokens] == [True, False, False, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_forces_one_token_and_bans_another(temperature: float) -> None:
    logits = torch.zeros(50)
    logits[6] = 20.0
    for bias, expected in (({41: 100}, {41}), ({6: -100}, set(range(50)) - {6}), ({6: -19.0, 8: 2.0}, set(range(50)))):
        tokens = {sample_one(logits, temperature=temperature, logit_bias=bias, seed=i).token_id for i in range(20)}
        assert tokens <= expected
    token = sample_one(logits, temperature=temperature, logit_bias={41: 100}, logprobs=1)
    expected_logprobs = logits.log_softmax(dim=-1)
    assert token.logprob == pytest.approx(float(expected_logprobs[41]))  # Of the row as it came.
    assert token.top_logprobs == ((6, pytest.approx(float(expected_logprobs[6]))),)


def test_non_finite_prompt_logits_are_reported_for_that_request_only() -> None:
    sampler = make_sampler(20)
    for req_id, params in enumerate(({"temperature": 0.0}, {"logprobs": 1}, {})):
        sampler.add(request(req_id, **params))
    for req_id in (0, 1):
        sampler.requests[req_id].non_finite = True
    _, tokens = sampler.sample(logits_of(3, 20), [0, 1, 2])
    assert tokens is not None, "rank 0 reports tokens"
    assert [token.broken for token in tokens] == [bool(token.error) for token in tokens] == [True, True, False]
    assert tokens[1].logprob is None


# ---- batch composition, order, replay

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "min_p": 0.2, "presence_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {7: 3.0, 40: -2.0}},
    {"temperature": 0.9, "top_k": 700, "min_tokens": 4},
]


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "native"])
def test_tokens_do_not_depend_on_the_batch(kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 rounded to halves, so that most rows have ties at top-k."""
    monkeypatch.setattr(native_sampling._Native, "library", None)
    assert not kernel or native_sampling.use_native(str(tmp_path))
    vocab_size, steps = 997, 5
    logits = [(logits_of(8, vocab_size, step) * 2).round().div(2).bfloat16() for step in range(steps)]
    together = make_sampler(vocab_size)
    for req_id, params in enumerate(MIXED):
        together.add(request(req_id, **params))
    for step in range(steps):
        order = [(req_id * 3 + step) % 8 for req_id in range(8)]
        token_ids, _ = together.sample(logits[step][order], order)
        for req_id, token_id in zip(order, token_ids, strict=True):
            alone = make_sampler(vocab_size)
            alone.add(request(req_id, **MIXED[req_id]))
            for earlier in range(step):
                alone.sample(logits[earlier][req_id : req_id + 1], [req_id])
            assert alone.sample(logits[step][req_id : req_id + 1], [req_id])[0] == [token_id]


def test_preempted_request_continues_its_noise() -> None:
    logits = logits_of(1, 400)
    for params in MIXED:
        steady, moved = make_sampler(400), make_sampler(400)
        steady.add(request(5, **params))
        output = [steady.sample(logits, [5])[0][0] for _ in range(6)]
        moved.add(request(5, (1,), tuple(output[:2]), **params))
        first = moved.sample(logits, [5])[0]
        moved.add(request(5, (1,), tuple(output[:3]), **params))
        assert first + [moved.sample(logits, [5])[0][0] for _ in range(3)] == output[2:]


def test_rows_beyond_the_memory_bound_are_sampled_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(8, 100)
    results = []
    for bound in (2**25, 250):
        monkeypatch.setattr(sampler_module, "MAX_GATHERED", bound)
        sampler = make_sampler(100)
        for req_id, params in enumerate(MIXED):
            sampler.add(request(req_id, **params))
        results.append(sampler.sample(logits, list(range(8))))
    assert results[0] == results[1]


def test_logits_are_not_modified() -> None:
    logits = logits_of(8, 60)
    logits[3, 5] = float("nan")
    before = logits.clone()
    sampler = make_sampler(60)
    for req_id, params in enumerate(MIXED):
        sampler.add(request(req_id, **params))
    sampler.sample(logits, list(range(8)))
    assert torch.equal(logits, before) or torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_wrong_shapes_and_shards_are_refused() -> None:
    sampler = make_sampler(10)
    sampler.add(request(0))
    with pytest.raises(ValueError, match=r"\(1, 9\).*10 tokens"):
        sampler.sample(torch.zeros(1, 9), [0])
    with pytest.raises(ValueError, match="vocabulary of 12"):
        Sampler(single_rank_group(CPU), Shard(0, 10), 12, CPU)


# ---- several ranks


def _sharded(group: TensorParallelGroup, vocab_size: int, steps: int, broken: list[list[Any]]) -> dict[str, Any]:
    """Sample the mixed batch on one rank of a group: tokens and reports of each step, and the collectives made.

    ``broken`` lists (row, token id, value) to put into the logits of the last step.
    """
    calls: list[str] = []
    _record_calls(group, calls)
    shard = split(vocab_size, group.size, align=7)[group.rank]
    sampler = SamplerHarness(Sampler(group, shard, vocab_size, CPU, eos_token_ids=(EOS,)), group.rank)
    for req_id, params in enumerate(MIXED):
        sampler.add(request(req_id, **params))
    found: dict[str, Any] = {"tokens": [], "reports": [], "calls": calls}
    for step in range(steps):
        logits = logits_of(8, vocab_size, step).mul(4).round().div(4).bfloat16()
        for row, token_id, value in broken if step == steps - 1 else []:
            logits[row, token_id] = float(value)
        token_ids, tokens = sampler.sample(logits[:, shard.start : shard.stop], list(range(8)))
        found["tokens"].append(token_ids)
        if tokens is not None:
            found["reports"].append([[t.token_id, t.logprob, t.top_logprobs, bool(t.error)] for t in tokens])
    return found


def _record_calls(group: TensorParallelGroup, calls: list[str]) -> None:
    for name in ("all_gather", "gather", "broadcast", "all_reduce"):
        original = getattr(group, name)

        def recorded(x: torch.Tensor, *args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(f"{name} {tuple(x.shape)}")
            return original(x, *args)

        setattr(group, name, recorded)


def sharded(size: int, vocab_size: int, steps: int, broken: list[list[Any]]) -> list[dict[str, Any]]:
    """:func:`_sharded` on every rank of a group of ``size``."""
    if size == 1:
        return [_sharded(single_rank_group(CPU), vocab_size, steps, broken)]
    return run_ranks(_sharded, size, vocab_size, steps, broken)


@pytest.mark.parametrize("size", [2, 3])
def test_tokens_do_not_depend_on_the_number_of_ranks(size: int) -> None:
    [whole] = sharded(1, 1000, 4, [])
    ranks = sharded(size, 1000, 4, [])
    assert all(rank["tokens"] == whole["tokens"] for rank in ranks)
    assert all(not rank["reports"] for rank in ranks[1:])
    for step, reports in enumerate(whole["reports"]):
        for row, (token_id, logprob, top, broken) in enumerate(reports):
            close = [pytest.approx(pair) for pair in top]
            assert ranks[0]["reports"][step][row] == [token_id, pytest.approx(logprob), close, broken]


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("row", [0, 3, 4], ids=["greedy", "sampled", "logprobs"])
def test_a_row_that_is_not_finite_fails_alone(row: int, value: str) -> None:
    [good] = sharded(1, 500, 2, [])
    for token_id in (3, 499):  # In the first rank's part of the vocabulary, and in the last rank's.
        for size in (1, 2):
            ranks = sharded(size, 500, 2, [[row, token_id, value]])
            expected = [0 if at == row else token for at, token in enumerate(good["tokens"][1])]
            assert all(rank["tokens"] == [good["tokens"][0], expected] for rank in ranks)
            reports = ranks[0]["reports"][1]
            assert [broken for *_, broken in reports] == [at == row for at in range(8)]
            assert reports[row][:2] == [0, None]


def test_data_never_changes_the_collectives() -> None:
    everywhere = [[row, token_id, "nan"] for row in range(8) for token_id in (0, 250, 499)]
    calls = [rank["calls"] for broken in ([], everywhere) for rank in sharded(3, 500, 3, broken)]
    assert all(call == calls[0] for call in calls)
    assert len(calls[0]) == 1 + 3 * 3  # The shards, once; then candidates, rows, and tokens in each step.
