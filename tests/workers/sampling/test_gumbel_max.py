"""The Gumbel-max trick in torch: its noise, which seeds must reproduce for good, and rows that are not finite.

Distributions are tested through the sampler (``test_sampler.py``), the C kernel in ``test_native_sampling.py``.
"""

from __future__ import annotations

import pytest
import torch

from runtime.common.sampling_params import SamplingParams
from workers.sampling import native_sampling
from workers.sampling.gumbel_max import NON_FINITE, gumbel_noise, noise_key, sample_tokens, select_rows

KEYS = [(128274514, 242521337), (-909882950, 792877672), (1774956820, 271188309)]
NOISE = [-0.82453698, 0.029715195, -0.40294495]


def test_noise_is_gumbel_and_uncorrelated() -> None:
    keys = torch.tensor([[k * 7919, -k] for k in range(400)], dtype=torch.int32)
    noise = gumbel_noise(keys, torch.arange(2000, dtype=torch.int32).unsqueeze(0)).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.57722) < 0.01
    assert abs(noise.var() - torch.pi**2 / 6) < 0.02
    among_rows = torch.corrcoef(noise)
    among_tokens = torch.corrcoef(noise[:, :400].T)
    assert (among_rows - torch.eye(400)).abs().max() < 6 / 2000**0.5
    assert (among_tokens - torch.eye(400)).abs().max() < 6 / 400**0.5


def test_noise_of_a_seed_never_changes() -> None:
    assert [noise_key(0, 0), noise_key(7, 3), noise_key(2**63, 1)] == KEYS
    keys = torch.tensor([noise_key(7, 3)], dtype=torch.int32)
    noise = gumbel_noise(keys, torch.tensor([[0, 1, 49151]], dtype=torch.int32))[0]
    torch.testing.assert_close(noise, torch.tensor(NOISE), rtol=1e-6, atol=0.0)


def test_each_row_has_its_own_params_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_sampling._Native, "library", None)
    logits = torch.arange(100.0).expand(4, -1).clone()
    logits[1, 3], logits[2] = float("nan"), float("-inf")
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_k=1)]
    keys = [noise_key(row, 0) for row in range(4)]
    assert sample_tokens(logits, params, keys).tolist() == [99, NON_FINITE, NON_FINITE, 99]


def test_selecting_all_rows_does_not_copy() -> None:
    x = torch.arange(6).view(3, 2)
    assert select_rows(x, [0, 1, 2]) is x
    assert select_rows(x, [0, 2]).tolist() == [[0, 1], [4, 5]]
