"""Loading: every parameter holds its slice, a rank reads its share, and whatever does not fit is named, all at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from parallel.group import TensorParallelGroup, single_rank_group
from parallel.linear import LinearBase
from runtime.common.checkpoint import SINGLE_FILE, inspect_checkpoint
from runtime.common.errors import CheckpointError
from runtime.common.model_config import load_model_config
from tests.checkpoints import prompts, reference_logits, reference_model, tiny_checkpoint
from tests.dist.ranks import run_ranks
from tests.workers.memory_probe import measure_loading
from tests.workers.models.harness import ModelHarness, run_schedules
from workers.models.decoder import DecoderForCausalLM
from workers.models.registry import build_model
from workers.weights import LoadReport, load_weights

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def changed(tmp_path: Path, change: Callable[[Tensors], object], kind: str = "llama") -> Path:
    """A copy of a checkpoint whose tensors were changed."""
    folder = shutil.copytree(tiny_checkpoint(kind), tmp_path / "changed")
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)
    return folder


def build(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderForCausalLM:
    return build_model(load_model_config(folder), group=single_rank_group(CPU), dtype=dtype)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[DecoderForCausalLM, LoadReport]:
    model = build(folder, dtype)
    return model, load_weights(model, inspect_checkpoint(folder), device=CPU)


def fuse(tensors: Tensors) -> None:
    """Store qkv_proj and gate_up_proj in one tensor each, as some checkpoints do."""
    for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
        for name in [n for n in tensors if f".{parts[0]}." in n]:
            names = [name.replace(parts[0], part) for part in parts]
            tensors[name.replace(parts[0], whole)] = torch.cat([tensors.pop(n) for n in names])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3-bias", "llama-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_what_the_checkpoint_holds(kind: str, dtype: torch.dtype) -> None:
    model, report = load(tiny_checkpoint(kind), dtype)
    theirs: Tensors = dict(reference_model(tiny_checkpoint(kind)).state_dict())
    fuse(theirs)
    if model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    ours = dict(model.named_parameters())
    assert set(ours) == set(theirs)
    for name, parameter in ours.items():
        assert parameter.equal(theirs[name].to(dtype)), name
    assert report.bytes_read == report.bytes_total == sum(p.numel() * 4 for p in ours.values())
    assert report.seconds > 0


def test_shards_hold_the_same_as_one_file() -> None:
    sharded = tiny_checkpoint("llama", max_shard_size="200KB")
    assert len(inspect_checkpoint(sharded).files) > 1
    for ours, theirs in zip(load(sharded)[0].parameters(), load(tiny_checkpoint("llama"))[0].parameters(), strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_fused_tensors_at_any_size(tmp_path: Path, tp_size: int) -> None:
    folder = changed(tmp_path, fuse, "qwen2")
    sequence = prompts(9)
    result = run_ranks(run_schedules, tp_size, str(folder), sequence)[0]["whole"][0]
    expected = reference_logits(tiny_checkpoint("qwen2"), sequence[0])
    found = torch.frombuffer(bytearray(result), dtype=torch.float32).view_as(expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tied_head_that_is_stored_all_the_same(tmp_path: Path) -> None:
    def add_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])

    tokens = prompts(5)[0]
    found = ModelHarness(changed(tmp_path, add_head, "llama-tied"), single_rank_group(CPU)).step([(0, tokens)])
    expected = reference_logits(tiny_checkpoint("llama-tied"), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_computed_buffers_in_a_checkpoint_are_ignored(tmp_path: Path) -> None:
    def add_buffers(tensors: Tensors) -> None:
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    tokens = prompts(5)[0]
    found = ModelHarness(changed(tmp_path, add_buffers), single_rank_group(CPU)).step([(0, tokens)])
    expected = reference_logits(tiny_checkpoint("llama"), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.layers.2.mlp.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(33, 96)
        tensors["lm_head.weight"] = torch.zeros(1003, 96, dtype=torch.int8)

    folder = changed(tmp_path, damage)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    lines = str(caught.value).splitlines()
    assert str(folder) in lines[0]
    assert [line.strip().split(";")[0] for line in lines[1:]] == [
        "missing: model.layers.2.mlp.up_proj.weight, in none of model.safetensors",
        "missing: model.norm.weight, in none of model.safetensors",
        "unexpected: model.layers.0.self_attn.q_proj.bias in model.safetensors",
        "unexpected: model.layers.7.mlp.up_proj.weight in model.safetensors",
        "wrong shape: model.layers.1.self_attn.k_proj.weight in model.safetensors: tensor "
        "model.layers.1.self_attn.k_proj.weight has shape [33, 96]",
        "wrong type: lm_head.weight in model.safetensors is stored as I8",
    ]
    assert "[32, 96]" in lines[5]


def test_part_and_whole_of_a_fused_layer(tmp_path: Path) -> None:
    def both(tensors: Tensors) -> None:
        part = tensors["model.layers.0.mlp.up_proj.weight"].clone()
        fuse(tensors)
        tensors["model.layers.0.mlp.up_proj.weight"] = part

    with pytest.raises(
        CheckpointError, match=r"unexpected: .*layers\.0\.mlp\.up_proj\.weight .*gate_up.* stored whole"
    ):
        load(changed(tmp_path, both))


def test_head_that_is_neither_stored_nor_tied(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load(folder)


def test_file_that_vanished_after_it_was_inspected(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "copy")
    checkpoint = inspect_checkpoint(folder)
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be opened"):
        load_weights(build(folder), checkpoint, device=CPU)


def test_progress_reaches_the_total() -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = inspect_checkpoint(tiny_checkpoint())
    load_weights(
        build(tiny_checkpoint()), checkpoint, device=CPU, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert len(seen) == len(checkpoint.tensors)
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)


def test_layers_may_rearrange_their_weights_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(LinearBase, "process_after_loading", lambda self: called.append(self.prefix))
    model, _ = load(tiny_checkpoint())
    assert called == [m.prefix for m in model.modules() if isinstance(m, LinearBase)]


def test_parameter_without_a_loader() -> None:
    model = build(tiny_checkpoint())
    model.extra = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(TypeError, match="extra carries no loader"):
        load_weights(model, inspect_checkpoint(tiny_checkpoint()), device=CPU)


def bytes_read(group: TensorParallelGroup, folder: str) -> int:
    return ModelHarness(Path(folder), group).report.bytes_read


def test_ranks_read_their_share() -> None:
    folder = tiny_checkpoint("mistral")
    total = inspect_checkpoint(folder).total_bytes
    shares = run_ranks(bytes_read, 2, str(folder))
    assert max(shares) <= 0.55 * total
    assert sum(shares) < 1.01 * total  # norms are read by both


def test_memory_peaks_at_the_shard() -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 16384, "num_hidden_layers": 2}
    folder = tiny_checkpoint("mistral", **sizes)
    for rank in run_ranks(measure_loading, 2, str(tiny_checkpoint("mistral")), str(folder)):
        assert rank["total"] > 60e6
        assert rank["read"] <= 0.55 * rank["total"]
        assert rank["held"] <= 0.55 * rank["total"]
        assert rank["largest"] > 10e6
        # Slices are views of the mapped file, in the page cache: not even one is held beside the shard.
        assert rank["peak"] <= rank["held"] + rank["largest"] / 2
