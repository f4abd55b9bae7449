"""A sampler together with the request states that a rank's batch buffers would hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runtime.common.protocol import NewRequest, SampledToken
from workers.batch import RequestState
from workers.sampling.sampler import Sampler

MAX_MODEL_LEN = 4096


class SamplerHarness:
    """A :class:`Sampler` whose requests are given by number."""

    def __init__(self, sampler: Sampler, rank: int = 0) -> None:
        self.sampler = sampler
        self.requests: dict[int, RequestState] = {}
        self._rank = rank

    def add(self, new: NewRequest) -> None:
        self.requests[new.req_id] = RequestState(new, MAX_MODEL_LEN, 1)

    def sample(self, logits: torch.Tensor, req_ids: Sequence[int]) -> tuple[list[int], Any]:
        """The tokens appended to the requests, on every rank, and the results on rank 0, None on the others."""
        requests = [self.requests[req_id] for req_id in req_ids]
        lengths = [request.num_tokens for request in requests]
        results: list[SampledToken] = self.sampler.sample(logits, requests)
        assert [request.num_tokens for request in requests] == [length + 1 for length in lengths]
        token_ids = [int(request.token_ids[request.num_tokens - 1]) for request in requests]
        assert self._rank == 0 or not results
        return token_ids, results if self._rank == 0 else None
