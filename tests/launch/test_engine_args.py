"""EngineArgs repeats EngineConfig for type checkers: the same names, types and help texts."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

import pytest

from launch.engine_args import EngineArgs
from launch.llm import LLM, AsyncLLM
from runtime.common.config import EngineConfig
from runtime.common.errors import ConfigError

NOT_ARGUMENTS = {"model", "run_dir", "log_level", "fault"}
"""``model`` is a parameter of its own; launch/ sets the others."""


def test_fields_types_and_docs_are_those_of_the_config() -> None:
    expected = {
        field.name: (str(field.type), field.metadata["help"])
        for field in dataclasses.fields(EngineConfig)
        if field.name not in NOT_ARGUMENTS
    }
    [cls] = [node for node in ast.parse(inspect.getsource(EngineArgs)).body if isinstance(node, ast.ClassDef)]
    found: dict[str, tuple[str, str]] = {}
    for field, doc in zip(cls.body[1::2], cls.body[2::2], strict=True):
        assert isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
        text = " ".join(str(doc.value.value).split()).removesuffix(".")
        found[ast.unparse(field.target)] = (ast.unparse(field.annotation), text[0].lower() + text[1:])
    assert found == {name: (kind, help[0].lower() + help[1:]) for name, (kind, help) in expected.items()}


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_constructors_take_them_as_keywords(cls: type[Any]) -> None:
    parameters = inspect.signature(cls.__init__, eval_str=True).parameters
    assert parameters["settings"].annotation.__args__ == (EngineArgs,)
    with pytest.raises(ConfigError, match=r"unknown setting 'max_seqs' for EngineConfig; known: .*max_num_seqs"):
        cls("demo", max_seqs=3)


@pytest.mark.parametrize("name", sorted(NOT_ARGUMENTS - {"model"}))
def test_settings_of_the_launcher_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        LLM("demo", **{name: "x"})
