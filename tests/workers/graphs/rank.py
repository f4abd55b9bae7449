"""One rank's model with static buffers, a KV cache and a graph runner, driven by hand through steps.

Imported in rank processes, so it imports no transformers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from parallel.group import TensorParallelGroup
from runtime.common.checkpoint import inspect_checkpoint
from runtime.common.config import GraphMode
from runtime.common.model_config import load_model_config
from runtime.common.protocol import NewRequest, ScheduledRequest, StepPlan
from runtime.common.sampling_params import SamplingParams
from tests.workers.graphs.split_model import split_model
from workers.batch import BatchBuffers
from workers.forward_context import ForwardContext
from workers.graphs.dispatcher import CaptureSizes, Dispatch, uniform_query_len
from workers.graphs.graph_runner import GraphRunner
from workers.kv_cache import KVCacheSpec, allocate_kv_cache
from workers.models.registry import build_model
from workers.quantization.registry import get_quant_config
from workers.weights import load_weights

BLOCK_SIZE = 4
MAX_TOKENS = 48
MAX_REQS = 8
MAX_MODEL_LEN = 64
BLOCKS_PER_REQUEST = MAX_MODEL_LEN // BLOCK_SIZE

SIZES = CaptureSizes(decode=(1, 2, 4, 8), mixed=(1, 3, 8, 16))


def run_model(model: Any) -> Any:
    """The forward of steps is the model itself."""
    return model


Step = list[tuple[int, int]]
"""(request, how many of its tokens) of one step."""

STEPS: list[Step] = [
    [(0, 5), (1, 1), (2, 9)],  # mixed, padded to 16
    [(0, 1), (1, 1), (2, 1)],  # decode, padded to 4
    [(0, 1), (3, 4), (1, 1)],  # mixed, padded to 8
    [(3, 1), (0, 1), (1, 1), (2, 1)],  # decode, fits 4
    [(4, 20)],  # too large for a graph
    [(4, 1)],  # decode, fits 1
    [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)],  # decode, padded to 8
    [(2, 3)],  # mixed, fits 3
]
"""What requests 0 to 4 do, so that every way to run a step comes up."""


@dataclass
class Outcome:
    """What a step gave: how it ran, the hidden states of its real tokens, and those of the padding."""

    choice: Dispatch
    hidden: torch.Tensor
    padding: torch.Tensor


class Rank:
    """A model over its own KV cache, whose blocks are in random order and start as NaN.

    Args:
        folder: of the checkpoint.
        group: the ranks.
        dtype: of weights and activations.
        mode: what to capture.
        forward: makes the forward of steps from the model; default: a split model.
        settings: more arguments of the graph runner.
    """

    def __init__(
        self,
        folder: str | Path,
        group: TensorParallelGroup,
        dtype: str,
        mode: GraphMode,
        *,
        forward: Callable[[Any], Any] = split_model,
        sizes: CaptureSizes = SIZES,
        **settings: Any,
    ) -> None:
        config = load_model_config(folder)
        self.model = build_model(
            config,
            group=group,
            dtype=getattr(torch, dtype),
            quant_config=get_quant_config(None, group.device),
        )
        load_weights(self.model, inspect_checkpoint(folder), device=group.device)
        blocks = list(range(BLOCKS_PER_REQUEST * MAX_REQS))
        self.kv_caches = allocate_kv_cache(KVCacheSpec.from_model(self.model, BLOCK_SIZE), len(blocks), group.device)
        for cache in self.kv_caches.values():
            cache.fill_(float("nan"))
        random.Random(0).shuffle(blocks)
        self.blocks = [blocks[r * BLOCKS_PER_REQUEST : (r + 1) * BLOCKS_PER_REQUEST] for r in range(MAX_REQS)]
        self.buffers = BatchBuffers(
            max_num_tokens=MAX_TOKENS, max_num_reqs=MAX_REQS, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE,
            num_blocks=len(blocks), device=group.device,
        )  # fmt: skip
        self.graphs = GraphRunner(
            forward(self.model),
            mode=mode,
            sizes=sizes,
            buffers=self.buffers,
            make_context=lambda metadata: ForwardContext.for_step(
                metadata, self.model.attention_layers, self.kv_caches
            ),
            device=group.device,
            **settings,
        )
        self._vocab = config.vocab_size

    def step(self, step: Step, size: int | None = None) -> Outcome:
        """Run one step as the dispatcher says, or as NONE padded to ``size``."""
        lengths = [length for _, length in step]
        choice = self.graphs.choose(sum(lengths), len(step), uniform_query_len(lengths))
        if size is not None:
            choice = Dispatch(GraphMode.NONE, size)
        plan = self.plan(step)
        self.buffers.update_requests(plan)
        batch = self.buffers.fill(plan, choice.size)
        hidden = self.graphs.run(choice, batch.metadata).clone()
        return Outcome(choice, hidden[: batch.num_tokens], hidden[batch.num_tokens :])

    def plan(self, step: Step) -> StepPlan:
        """The step plan of a step; requests are new at their first step."""
        new: list[NewRequest] = []
        scheduled: list[ScheduledRequest] = []
        for request, length in step:
            known = request in self.buffers.requests
            if not known:
                tokens = tuple(random.Random(request).randrange(3, self._vocab) for _ in range(MAX_MODEL_LEN))
                new.append(NewRequest(request, tokens, len(tokens), SamplingParams()))
            scheduled.append(ScheduledRequest(request, length, () if known else tuple(self.blocks[request])))
        return StepPlan(0, tuple(scheduled), tuple(new))


@contextlib.contextmanager
def no_model_code(model: nn.Module) -> Generator[None]:
    """Fail if a module or the model's forward is called within the block."""
    message = "model code ran"
    with (
        patch.object(nn.Module, "__call__", side_effect=AssertionError(message)),
        patch.object(type(model), "forward", side_effect=AssertionError(message)),
    ):
        yield


def compare_with_none(group: TensorParallelGroup, folder: str, dtype: str, mode: str) -> list[str]:
    """Run :data:`STEPS` with graphs and, on another cache, as NONE at the same sizes; all bits have to be equal.

    Returns:
        how each step ran.
    """
    graphs = Rank(folder, group, dtype, GraphMode.parse(mode))
    plain = Rank(folder, group, dtype, GraphMode.NONE)
    graphs.graphs.warm_up()
    graphs.graphs.capture()
    choices: list[str] = []
    for step in STEPS:
        with no_model_code(graphs.model):
            found = graphs.step(step)
        expected = plain.step(step, found.choice.size)
        assert torch.equal(found.hidden, expected.hidden), f"{step} as {found.choice} differs from NONE"
        assert torch.equal(found.padding, expected.padding), f"the padding of {step} as {found.choice} differs"
        for name, cache in graphs.kv_caches.items():
            same = torch.equal(cache.view(torch.uint8), plain.kv_caches[name].view(torch.uint8))
            assert same, f"{step} as {found.choice} left another cache in {name}"
        choices.append(f"{found.choice.mode.value} {found.choice.size}")
    return choices
