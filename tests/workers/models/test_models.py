"""Every architecture equals transformers at every TP size and with every division of a sequence into steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from parallel.group import single_rank_group
from parallel.shard import Shard
from runtime.common.errors import ConfigError
from runtime.common.model_config import ModelConfig, load_model_config
from tests.checkpoints import KINDS, prompts, reference_logits, tiny_checkpoint
from tests.dist.ranks import run_ranks
from tests.workers.models.harness import ModelHarness, run_schedules
from workers.forward_context import ForwardContext, forward_context
from workers.models.registry import MODELS, build_model

CPU = torch.device("cpu")
SEQUENCES = prompts(21, 1, 13, 8)


def assert_equals_transformers(folder: Path, result: dict[str, list[bytes]]) -> None:
    for schedule, sequences in result.items():
        for tokens, data in zip(SEQUENCES, sequences, strict=True):
            expected = reference_logits(folder, tokens)
            found = torch.from_numpy(np.frombuffer(data, dtype=np.float32).reshape(expected.shape).copy())
            error = float((found - expected).abs().max() / expected.std())
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=2e-5 * float(expected.std()), msg=f"{schedule}: {error} of the spread"
            )


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, tp_size: int) -> None:
    folder = tiny_checkpoint(kind)
    results = run_ranks(run_schedules, tp_size, str(folder), SEQUENCES)
    assert list(results[0]) == ["whole", "chunked", "decode", "mixed"]
    assert_equals_transformers(folder, results[0])


@pytest.mark.parametrize("kind", ["mistral", "qwen2-window"])
def test_window_is_smaller_than_the_prompts(kind: str) -> None:
    window = load_model_config(tiny_checkpoint(kind)).sliding_window
    assert window is not None
    assert window < len(SEQUENCES[3])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_error_is_that_of_transformers(kind: str) -> None:
    stored = tiny_checkpoint(kind, dtype="bfloat16")
    found = ModelHarness(stored, single_rank_group(CPU)).step([(0, SEQUENCES[0])])
    theirs = reference_logits(stored, SEQUENCES[0]).float()
    exact = ModelHarness(stored, single_rank_group(CPU), "float32").step([(0, SEQUENCES[0])])
    assert (found - exact).std() < 1.2 * (theirs - exact).std()
    assert (found - theirs).std() < 0.01 * exact.std()


def test_traces_as_one_graph_for_every_number_of_tokens() -> None:
    harness = ModelHarness(tiny_checkpoint("qwen3"), single_rank_group(CPU))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(harness.model, backend=keep, fullgraph=True)
    for request, tokens in enumerate(SEQUENCES[::2]):
        *inputs, metadata = harness.prepare([(request, tokens)])
        for tensor, dim in zip(inputs, harness.model.dynamic_arg_dims.values(), strict=True):
            torch._dynamo.mark_dynamic(tensor, dim)
        with (
            torch.no_grad(),
            forward_context(ForwardContext.for_step(metadata, harness.model.attention_layers, harness.kv_caches)),
        ):
            found = harness.model.compute_logits(compiled(*inputs))
        torch.testing.assert_close(found, reference_logits(tiny_checkpoint("qwen3"), tokens), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    layers = harness.model.config.num_layers
    assert calls.count(torch.ops.lockstep.attention) == calls.count(torch.ops.lockstep.kv_cache_update) == layers


def test_the_model_declares_its_token_dimensions() -> None:
    for model in MODELS.values():
        assert model.dynamic_arg_dims == {"input_ids": 0, "positions": 0}


def llama_8b() -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072, dtype="bfloat16",
    )  # fmt: skip


def test_model_of_eight_billion_parameters_on_the_meta_device() -> None:
    model = build_model(llama_8b(), group=single_rank_group(CPU), dtype=torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248  # as published
    assert model.vocab_shard == Shard(0, 128256)
    assert list(model.attention_layers)[:2] == ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


def test_unknown_architecture() -> None:
    config = ModelConfig.from_dict({**llama_8b().to_dict(), "architecture": "GPT2LMHeadModel"})
    with pytest.raises(ConfigError, match="GPT2LMHeadModel is unknown; supported: LlamaForCausalLM"):
        build_model(config, group=single_rank_group(CPU), dtype=torch.float32)
