"""The checks of ``tools/check_house.py`` refuse what they are for, and nothing else."""

from __future__ import annotations

import pytest

from tools.check_house import check_sizes, check_words


@pytest.mark.parametrize(
    "line",
    [
        "# Nobody waits for it",
        "class Replica:",
        "def load_piece(piece):",
        "self._lose(rank)",
        "linear(x, weight, wide=True)",
        "from launch.rank_process import Orders",
        "a rank that cannot be had",
    ],
)
def test_a_private_word_is_refused_with_its_line(line: str) -> None:
    found = list(check_words("runtime/x.py", f"first line\n{line}\n"))
    assert found and all(row.startswith("runtime/x.py:2: private word ") for row in found)


@pytest.mark.parametrize(
    "line",
    ['"compiled_pieces": 3, "distinct_pieces": 2', "SentencePiece tokenizers", "a widened tile", "an adverb", "closed"],
)
def test_other_words_are_not(line: str) -> None:
    assert not list(check_words("runtime/x.py", line))


def test_limits_of_files_classes_and_functions() -> None:
    def source(lines: int) -> str:
        return '"""Module."""\n' + "\n".join(["class A:", "    def f(self):", *["        x = 1"] * lines])

    assert not list(check_sizes("runtime/x.py", source(59)))
    assert [row.partition(": ")[2].partition(" has")[0] for row in check_sizes("runtime/x.py", source(60))] == [
        "function f"
    ]
    assert {row.split()[1] for row in check_sizes("runtime/x.py", source(249))} == {"class", "function"}
    assert "401 lines" in next(check_sizes("runtime/x.c", "int x;\n" * 401))
    assert "no docstring" in next(check_sizes("runtime/x.py", "x = 1\n"))
