"""A model under test whose forward is compiled. Imported in rank processes, so it imports no transformers."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from parallel.group import TensorParallelGroup, single_rank_group
from parallel.linear import gather_columns
from parallel.platform import detect_platform
from runtime.common.config import CompileMode, EngineConfig
from runtime.common.model_config import load_model_config
from tests.workers.models.harness import ModelHarness, Step
from workers.compile.compiler import CompileReport, compile_model
from workers.forward_context import ForwardContext, forward_context

CPU = torch.device("cpu")


class CompiledModelHarness(ModelHarness):
    """A model with a compiled forward beside the model's own.

    Args:
        folder: of the checkpoint.
        cache_dir: of artifacts; "" keeps none.
        mode: how to compile.
        group: the ranks; default: one.
        dtype: default: the checkpoint's.
        example_tokens: of the first trace.
    """

    compiled: Any
    compile_report: CompileReport

    def __init__(
        self,
        folder: Path,
        cache_dir: Path | str,
        mode: CompileMode = CompileMode.PIECEWISE,
        group: TensorParallelGroup | None = None,
        dtype: str = "",
        *,
        example_tokens: int = 8,
    ) -> None:
        super().__init__(folder, group or single_rank_group(CPU), dtype, num_blocks=1024)
        self.requests = itertools.count(1_000_000)
        self.progress: list[tuple[int, int]] = []
        self.compiled, self.compile_report = compile_model(
            self.model,
            mode=mode,
            config=EngineConfig(cache_dir=str(cache_dir)),
            model_config=load_model_config(folder),
            platform=detect_platform(),
            device=self.group.device,
            example_tokens=example_tokens,
            progress=lambda done, total: self.progress.append((done, total)),
        )

    def compiled_step(self, step: Step, padding: int = 0) -> torch.Tensor:
        """As :meth:`ModelHarness.step`, through the compiled forward."""
        # Inputs are made outside of inference mode, as the runner's static buffers are.
        input_ids, positions, metadata = self.prepare(step, padding)
        context = ForwardContext.for_step(metadata, self.model.attention_layers, self.kv_caches)
        with torch.inference_mode(), forward_context(context):
            hidden = self.compiled(input_ids, positions)
            logits = self.model.compute_logits(hidden[: metadata.num_tokens])
            whole = logits if self.group.size == 1 else gather_columns(self.group, logits, self.vocab)
        return whole.float()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Tokens by always taking the likeliest: the prompt in two chunks, then one token a step."""
        request = next(self.requests)
        half = max(1, len(prompt) // 2)
        self.compiled_step([(request, prompt[:half])])
        logits = self.compiled_step([(request, prompt[half:])], padding=1)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.compiled_step([(request, tokens[-1:])])[-1].argmax()))
        return tokens


def compile_and_generate(
    group: TensorParallelGroup, folder: str, cache_dir: str, mode: str, prompts: list[list[int]], count: int
) -> dict[str, Any]:
    """In a rank: the report and the greedy tokens of every prompt."""
    harness = CompiledModelHarness(Path(folder), cache_dir, CompileMode(mode), group)
    tokens = [harness.greedy(prompt, count) for prompt in prompts]
    return {"report": asdict(harness.compile_report), "tokens": tokens}
