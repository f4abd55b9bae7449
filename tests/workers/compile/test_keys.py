"""Cache keys: what changes them and what does not."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import workers
from parallel.group import single_rank_group
from parallel.library import python_implementations
from parallel.platform import CpuPlatform
from runtime.common.config import EngineConfig
from runtime.common.model_config import ModelConfig, load_model_config
from tests.checkpoints import tiny_checkpoint
from workers.compile import keys
from workers.models.decoder import DecoderForCausalLM
from workers.models.registry import build_model

CPU = torch.device("cpu")


def any_config(cache_dir: Path) -> dict[str, Any]:
    """Arguments of ``compile_model`` for a model without a checkpoint."""
    model_config = ModelConfig("LlamaForCausalLM", 8, 8, 1, 1, 1, 8, 32, 64)
    return {
        "config": EngineConfig(cache_dir=str(cache_dir)), "model_config": model_config, "platform": CpuPlatform(),
        "device": CPU, "example_tokens": 8,
    }  # fmt: skip


class FakeGroup:
    """A group for building a model, without the other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.name, self.rank, self.size, self.device = "tp", rank, size, CPU


def build(rank: int, size: int, **settings: Any) -> DecoderForCausalLM:
    config = load_model_config(tiny_checkpoint("llama", **settings))
    group: Any = single_rank_group(CPU) if size == 1 else FakeGroup(rank, size)
    return build_model(config, group=group, dtype=torch.float32)


def test_ranks_of_one_shape_have_one_key_and_others_have_not() -> None:
    def key(rank: int, size: int, **settings: Any) -> str:
        return keys.cache_key(keys.model_shape(build(rank, size, vocab_size=1024, **settings)))

    assert key(0, 2, intermediate_size=256) == key(1, 2, intermediate_size=256)
    assert key(0, 2, intermediate_size=250) != key(1, 2, intermediate_size=250), "no halves in whole blocks"
    assert key(0, 1) not in (key(0, 2), key(0, 1, num_hidden_layers=2))


def test_another_backend_or_another_class_is_another_model() -> None:
    model = build(0, 1)
    before = keys.cache_key(keys.model_shape(model))
    layer = next(iter(model.attention_layers.values()))
    layer.backend = type("Other", (type(layer.backend),), {})()
    changed = keys.cache_key(keys.model_shape(model))
    assert changed != before
    model.model.norm.__class__ = type("OtherNorm", (type(model.model.norm),), {})
    assert keys.cache_key(keys.model_shape(model)) != changed


def test_the_environment_has_what_code_depends_on() -> None:
    found = keys.environment(CPU)
    assert found["torch"] == torch.__version__
    assert found["device"] == "cpu"
    assert found["threads"] == torch.get_num_threads()
    assert found["cpu"] == keys.cpu_features()
    assert keys.cache_key(found) == keys.cache_key(keys.environment(CPU))


def test_sources_of_a_model_from_elsewhere_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "elsewhere.py"
    module = ModuleType("elsewhere")
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    model = type("Model", (torch.nn.Module,), {"__module__": "elsewhere"})()
    source.write_text("one")
    first = keys.source_hash(model)
    assert keys.source_hash(model) == first
    source.write_text("two")
    assert keys.source_hash(model) != first
    assert keys.source_hash(build(0, 1)) not in (first, keys.source_hash(model))


def test_our_own_sources_count(tmp_path: Path) -> None:
    for text in ("one", "two"):
        (tmp_path / text).mkdir()
        (tmp_path / text / "layer.py").write_text(text)
    assert keys._folder_hash(tmp_path / "one") != keys._folder_hash(tmp_path / "two")


def test_every_module_of_a_model_and_every_op_is_in_a_traced_folder() -> None:
    root = Path(workers.__file__).parent
    assert all((root / name).is_dir() for name in keys.TRACED_FOLDERS)
    files = {Path(sys.modules[type(module).__module__].__file__ or "") for module in build(0, 1).modules()}
    files |= {Path(inspect.getfile(implementation)) for implementation in python_implementations("CPU").values()}
    ours = {file.relative_to(root).parts[0] for file in files if file.is_relative_to(root)}
    assert ours
    assert ours <= set(keys.TRACED_FOLDERS)
