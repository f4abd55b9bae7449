"""The C sampling kernel against transformers' logits processors, the torch version, and edge cases."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel import toolchain
from runtime.common.sampling_params import SamplingParams
from workers.sampling import gumbel_max, native_sampling
from workers.sampling.gumbel_max import gumbel_noise, noise_key


@pytest.fixture(scope="module")
def library_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("native"))


@pytest.fixture(autouse=True)
def native(library_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_sampling._Native, "library", None)
    assert native_sampling.use_native(library_dir)


def logits_of(rows: int, width: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@functools.cache
def keys_of(rows: int) -> list[tuple[int, int]]:
    return [noise_key(row, row % 7) for row in range(rows)]


def sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    keys: Sequence[tuple[int, int]] | None = None,
) -> torch.Tensor:
    """Sampled tokens, with the same parameters for all rows."""
    n = len(logits)
    sampled = native_sampling.sample_tokens(
        logits, [temperature] * n, [top_k] * n, [top_p] * n, [min_p] * n, keys_of(n) if keys is None else keys
    )
    assert sampled is not None
    return sampled


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = native_sampling.logprobs(logits, token_ids, num_top)
    assert found is not None
    return found


def columns_of(settings: Sequence[dict[str, Any]]) -> Any:
    """Temperatures, top-ks, top-ps and min-ps."""
    params = [SamplingParams(**setting) for setting in settings]
    return [[getattr(p, name) for p in params] for name in ("temperature", "top_k", "top_p", "min_p")]


def counts_of(row: torch.Tensor, times: int, **settings: Any) -> torch.Tensor:
    """How often each token is sampled from one row."""
    return torch.bincount(sample(row.expand(times, -1), keys=keys_of(times), **settings), minlength=len(row))


# ---- distributions


def expected_probabilities(logits: torch.Tensor, **settings: Any) -> torch.Tensor:
    """The distribution that transformers' processors leave, in the order in which its generate() applies them."""
    from transformers import generation

    params = SamplingParams(**settings)
    processors: list[Any] = [generation.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        processors.append(generation.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(generation.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(generation.MinPLogitsWarper(params.min_p))
    scores = logits.double().unsqueeze(0)
    return generation.LogitsProcessorList(processors)(torch.tensor([[0]]), scores).softmax(dim=-1)[0]


def check_frequencies(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square, four standard deviations wide; masked tokens are never sampled."""
    assert not counts[expected == 0].any(), "a token was sampled that transformers masks"
    expected = expected * int(counts.sum())
    likely = expected >= 5
    rare = counts[~likely].sum(), expected[~likely].sum()
    excess = float(((counts - expected) ** 2 / expected)[likely].sum())
    if rare[1] >= 5:
        excess += float((rare[0] - rare[1]) ** 2 / rare[1])
    degrees = max(int(likely.sum()) - int(rare[1] < 5), 1)
    assert excess < degrees + 4 * (2 * degrees) ** 0.5 + 4, f"chi-square {excess:.1f} with {degrees} degrees of freedom"


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"temperature": 1.8, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.8, "top_p": 0.8, "min_p": 0.15},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.4, "top_k": 200, "min_p": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("width", [150, 3000])
def test_frequencies_are_those_of_transformers(width: int, settings: dict[str, Any]) -> None:
    row = logits_of(1, width, seed=7)[0]
    check_frequencies(counts_of(row, 10000, **settings), expected_probabilities(row, **settings))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7}, {"top_k": 40}, {"top_k": 40, "top_p": 0.7}], ids=str)
def test_frequencies_do_not_depend_on_the_order_of_tokens(settings: dict[str, Any], descending: bool) -> None:
    """The likely tokens share a few blocks, at the beginning or at the end."""
    row = logits_of(1, 2000, seed=3)[0].sort(descending=descending).values
    check_frequencies(counts_of(row, 10000, **settings), expected_probabilities(row, **settings))


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 800}, {"top_k": 800, "top_p": 0.5}], ids=str)
def test_flat_rows_are_truncated_like_transformers(settings: dict[str, Any]) -> None:
    """More candidates remain than there are blocks, and nearly each of them is sampled."""
    row = logits_of(1, 1500, seed=1, scale=0.03)[0]
    counts, expected = counts_of(row, 12000, **settings), expected_probabilities(row, **settings)
    # Rounding may move the end of a nucleus of thousands by one token.
    assert (counts > 0).logical_and(expected == 0).sum() <= 1
    assert (counts > 0).sum() > 0.99 * (expected > 0).sum()


def test_one_stream_has_the_distribution_too() -> None:
    """Noise of successive tokens of one request is independent, like that of different requests."""
    for settings in ({}, {"top_k": 4}):
        steps = 20000
        keys = [noise_key(3, step) for step in range(steps)]
        tokens = sample(torch.zeros(1, 4).expand(steps, -1), keys=keys, **settings)
        pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double()
        expected = (steps - 1) / 16
        assert ((pairs - expected) ** 2 / expected).sum() < 15 + 4 * 30**0.5


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 130, 1000, 5000])
def test_tokens_are_those_of_torch_with_the_same_noise(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is the same function: a request keeps its tokens on another device, up to rounding."""
    rows = 25 * len(SETTINGS)
    settings = [SETTINGS[row % len(SETTINGS)] for row in range(rows)]
    logits = logits_of(rows, width, seed=width)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.1] = float("-inf")
    logits[:, width // 2] = 1.0
    params = [SamplingParams(**setting) for setting in settings]
    sampled = native_sampling.sample_tokens(logits, *columns_of(settings), keys_of(rows))
    monkeypatch.setattr(native_sampling._Native, "library", None)
    assert (sampled != gumbel_max.sample_tokens(logits, params, keys_of(rows))).sum() <= 1


def key_for(mixed: int, token_id: int, second: int) -> tuple[int, int]:
    """The key whose noise for a token comes from these 31 bits: ``gumbel_noise``'s hash backwards."""
    x = mixed ^ mixed >> 16
    x = x * pow(0x846CA68B, -1, 2**32) % 2**32
    x ^= x >> 15 ^ x >> 30
    x = (x ^ second) * pow(0x7FEB352D, -1, 2**32) % 2**32
    x ^= x >> 16
    x = (x - token_id * 0x9E3779B1) % 2**32
    return x - 2**32 * (x >= 2**31), second


@pytest.mark.parametrize("mixed", [0, 1, 5, 100, 2**12 + 1, 2**23 - 1, 2**29, 2**30 + 2**27, 2**31 - 2**12, 2**31 - 1])
def test_noise_is_exact_over_its_whole_range(mixed: int) -> None:
    """The argmax of two tokens changes where the difference of their logits is that of their noise."""
    uniform = torch.tensor([mixed], dtype=torch.float32).add(0.5).mul(2.0**-31).clamp(max=1 - 2.0**-24)
    for second in range(8):
        key = key_for(mixed, 1, second)
        other = gumbel_noise(torch.tensor([key], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32))
        turn = float((-torch.log1p(-uniform.double())).log() + other.double())
        rows = torch.tensor([[0.0, turn - 1e-4], [0.0, turn + 1e-4]])
        assert sample(rows, top_k=2, keys=[key] * 2).tolist() == [0, 1]


# ---- top-k, top-p and min-p: ties and limits


def tokens_of(row: torch.Tensor, times: int = 3000, **settings: Any) -> set[int]:
    return set(counts_of(row, times, **settings).nonzero().flatten().tolist())


@pytest.mark.parametrize("width", [40, 400])
def test_ties_are_all_kept(width: int) -> None:
    row = torch.full((width,), -2.0)
    row[7], row[9:12], row[30] = 3.0, 2.0, 1.0  # Of the first 40: 0.40, thrice 0.15, and 0.05.
    best = {7, 9, 10, 11}
    assert tokens_of(row, top_k=2) == best
    assert tokens_of(row, top_k=4) == best
    assert tokens_of(row, top_k=5) == {*best, 30}
    assert len(tokens_of(row, 30 * width, top_k=6, temperature=20.0)) == width
    assert tokens_of(row[:40], top_p=0.6) == best
    assert tokens_of(row, top_k=1, top_p=0.1) == {7}
    assert tokens_of(row, min_p=0.3) == best
    assert tokens_of(row, top_k=40, min_p=1.0) == {7}
    assert tokens_of(torch.zeros(width), 30 * width, top_k=1) == set(range(width))
    assert tokens_of(torch.zeros(width), 30 * width, top_p=0.01) == set(range(width))


def test_top_p_counts_among_what_top_k_leaves() -> None:
    row = torch.tensor([0.4, 0.2, 0.15, 0.15, 0.1]).log()
    assert tokens_of(row, top_p=0.55) == {0, 1}
    assert tokens_of(row, top_k=2, top_p=0.55) == {0}  # 2/3 of two
    assert tokens_of(row, top_k=2, top_p=0.7) == {0, 1}
    # Top-k has kept 2 before min-p leaves 1 of them: 0.4 of 0.6, not of 0.4, is what top-p looks at.
    assert tokens_of(row, top_k=2, top_p=0.9, min_p=0.6) == {0}


@pytest.mark.parametrize("cut", [{}, {"top_k": 10**9}, {"top_k": 20}, {"top_p": 0.9999999}, {"top_p": 0.5}], ids=str)
def test_masked_tokens_are_never_sampled(cut: dict[str, Any]) -> None:
    row = torch.full((500,), float("-inf"))
    row[[3, 64, 499]] = torch.tensor([0.0, 0.1, -0.1])
    assert tokens_of(row, **cut) == ({3, 64} if cut == {"top_p": 0.5} else {3, 64, 499})
    row[3] = row[499] = float("-inf")
    assert tokens_of(row, **cut) == {64}
    assert sample(torch.full((1, 500), float("-inf")), **cut).tolist() == [-1]


def test_extreme_values_of_top_p() -> None:
    row = logits_of(1, 700, seed=2, scale=0.2)[0]
    assert tokens_of(row, top_p=1e-9) == {int(row.argmax())}
    assert (counts_of(row, 20000, top_p=1 - 2**-40) > 0).sum() == 700


@pytest.mark.parametrize("cut", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_tiny_temperatures_and_huge_logits(cut: dict[str, Any]) -> None:
    logits = logits_of(20, 700)
    for temperature in (1e-3, 1e-30, 1e-40, 5e-324, 0.0):
        assert sample(logits, temperature=temperature, **cut).tolist() == logits.argmax(dim=-1).tolist()
    assert sample(logits * 2e37, **cut).tolist() == logits.argmax(dim=-1).tolist()
    assert set(sample(logits, temperature=100.0).tolist()) != set(logits.argmax(dim=-1).tolist())


def test_greedy_is_argmax_also_among_equals() -> None:
    logits = logits_of(64, 3001).round()
    assert sample(logits, temperature=0.0).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("nan")], ids=str)
@pytest.mark.parametrize("place", [0, 70, 319, 330])
def test_a_row_that_is_not_finite_fails_alone(place: int, value: float) -> None:
    for settings in ({}, {"top_k": 9}, {"top_p": 0.5}, {"temperature": 0.0}):
        logits = logits_of(5, 331)
        good = sample(logits, **settings).tolist()
        logits[3, place] = value
        assert sample(logits, **settings).tolist() == [-1 if row == 3 else token for row, token in enumerate(good)]


# ---- batch composition, threads, memory


def test_tokens_do_not_depend_on_batch_order_or_strides() -> None:
    width, rows = 3000, 3 * len(SETTINGS)
    logits = logits_of(rows, width).bfloat16().float()  # Equals are everywhere.
    columns = columns_of([SETTINGS[row % len(SETTINGS)] for row in range(rows)])
    before, keys = logits.clone(), keys_of(rows)
    together = native_sampling.sample_tokens(logits, *columns, keys)
    assert torch.equal(logits, before)
    for row in range(rows):
        wider = torch.full((3, width + 13), 50.0)
        wider[1, 5 : width + 5] = logits[row]
        view = wider[1:2, 5 : width + 5]
        alone = native_sampling.sample_tokens(view, *([column[row]] for column in columns), [keys[row]])
        assert alone.tolist() == [together[row]]
    order = list(range(rows))[::-1]
    moved = native_sampling.sample_tokens(logits[order], *([c[row] for row in order] for c in columns), keys[::-1])
    assert torch.equal(moved, together[order])


@pytest.fixture
def restored_threads(library_dir: str) -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    native_sampling.use_native(library_dir)


def test_tokens_do_not_depend_on_threads(library_dir: str, restored_threads: None) -> None:
    logits = logits_of(24, 9000)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        native_sampling.use_native(library_dir)
        sampled = [sample(logits, **settings).tolist() for settings in SETTINGS]
        found_logprobs = logprobs_of(logits, torch.arange(24), 5)
        found.append((sampled, [part.tolist() for part in found_logprobs]))
    assert found[0] == found[1] == found[2]


# ---- log-probabilities


@pytest.mark.parametrize("width", [1, 5, 64, 65, 3000])
@pytest.mark.parametrize("num_top", [0, 1, 20, 200])
def test_logprobs_are_those_of_torch(width: int, num_top: int) -> None:
    logits = logits_of(30, width, seed=num_top, scale=6.0)
    logits[3:6, : width // 2] = float("-inf")
    logits[6] *= 20  # Some are e to the power of less than -87.
    tokens = torch.randint(0, width, (30,), generator=torch.Generator().manual_seed(0))
    own, ids, top = logprobs_of(logits, tokens, num_top)
    expected = logits.double().log_softmax(dim=-1)
    best = expected.topk(min(num_top, width), dim=-1)
    torch.testing.assert_close(own.double(), expected.gather(-1, tokens[:, None])[:, 0], rtol=1e-6, atol=1e-5)
    assert top.shape == ids.shape == best.values.shape
    torch.testing.assert_close(top.double(), best.values, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(top.double(), expected.gather(-1, ids), rtol=1e-6, atol=1e-5)
    assert all(len(set(row)) == len(row) for row in ids.tolist())


def test_logprobs_list_equals_by_id() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [299, 150]], logits[1, 7] = 1.0, float("-inf")
    _, ids, top = logprobs_of(logits, torch.zeros(2, dtype=torch.int64), 8)
    assert ids.tolist() == [[150, 299, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 8]]
    torch.testing.assert_close(top, logits.log_softmax(dim=-1).gather(-1, ids))


def test_logprobs_of_rows_that_are_not_finite() -> None:
    logits = logits_of(5, 100)
    logits[1, 99], logits[2, 0], logits[3] = float("nan"), float("inf"), float("-inf")
    own, ids, top = logprobs_of(logits, torch.tensor([1, -1, -1, -1, 2]), 3)
    assert own.isnan().tolist() == [False, True, True, True, False]
    assert top.isnan().all(dim=1).tolist() == [False, True, True, True, False]
    assert ids.min() >= 0 and ids.max() < 100


# ---- unsupported arguments


def test_unsupported_tensors_return_none(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(2, 8)
    good = [1.0] * 2, [0] * 2, [1.0] * 2, [0.0] * 2, [(1, 2)] * 2
    assert native_sampling.sample_tokens(logits, *good) is not None
    assert native_sampling.sample_tokens(logits.double(), *good) is None
    assert native_sampling.sample_tokens(logits.t().contiguous().t(), *good) is None
    assert native_sampling.sample_tokens(logits[:, :0], *good) is None
    assert native_sampling.logprobs(logits.bfloat16(), torch.zeros(2), 1) is None
    monkeypatch.setattr(native_sampling._Native, "library", None)
    assert not native_sampling._Native.is_used()
    assert native_sampling.sample_tokens(logits, *good) is None
    assert native_sampling.logprobs(logits, torch.zeros(2), 1) is None


def test_arguments_of_different_lengths_are_refused() -> None:
    logits = logits_of(2, 8)
    with pytest.raises(ValueError, match=r"2 rows.*settings for 1"):
        native_sampling.sample_tokens(logits, [1.0], [0], [1.0], [0.0], [(1, 2)])
    with pytest.raises(ValueError, match="shorter"):
        native_sampling.sample_tokens(logits, [1.0] * 2, [0] * 2, [1.0], [0.0] * 2, [(1, 2)] * 2)
    for ids in ([0, 8], [0], [0, 1, 2]):
        with pytest.raises(ValueError, match="vocabulary of 8"):
            native_sampling.logprobs(logits, torch.tensor(ids), 1)
    assert native_sampling.sample_tokens(logits[:0], [], [], [], [], []).tolist() == []
    assert logprobs_of(logits[:0], torch.zeros(0, dtype=torch.int64), 3)[1].shape == (0, 3)


def test_without_a_compiler_there_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(toolchain, "COMPILERS", ())
    monkeypatch.setattr(native_sampling._Native, "warned", False)
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert not native_sampling.use_native(str(tmp_path))
        assert not native_sampling.use_native(str(tmp_path))
    assert caplog.text.count("sampling falls back to torch") == 1
