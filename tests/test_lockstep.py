"""The public API: names, versions, and classes that carry the name ``lockstep``."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[1]


def test_version_is_the_distributions() -> None:
    assert lockstep.__version__ == importlib.metadata.version("lockstep")


@pytest.mark.parametrize("name", [name for name in lockstep.__all__ if name != "__version__"])
def test_public_classes_say_lockstep(name: str) -> None:
    cls = getattr(lockstep, name)
    assert (cls.__module__, cls.__qualname__) == ("lockstep", name)
    assert pickle.loads(pickle.dumps(cls)) is cls  # noqa: S301
    assert cls.__doc__


def test_values_survive_pickle_and_copy() -> None:
    params = lockstep.SamplingParams(max_tokens=3, stop=("a",))
    config = lockstep.EngineConfig(max_num_seqs=3)
    assert pickle.loads(pickle.dumps((params, config))) == (params, config)  # noqa: S301
    assert copy.deepcopy(params) == params
    assert repr(params).startswith("SamplingParams(n=1, max_tokens=3")
    assert typing.get_type_hints(lockstep.SamplingParams)["stop"] == tuple[str, ...]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LLm'; it has LLM, AsyncLLM"):
        _ = lockstep.LLm  # pyright: ignore[reportAttributeAccessIssue]


def test_import_is_lazy() -> None:
    code = "import lockstep, sys; sys.exit(any(m in sys.modules for m in ('torch', 'launch.llm', 'tokenizers')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_type_information_is_packaged() -> None:
    for package in ("launch", "runtime"):
        assert (ROOT / package / "py.typed").is_file()
