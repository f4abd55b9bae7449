"""Compiling C on first use: cached by content, never trusting what is damaged."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallel.native import build
from parallel.native.build import NativeBuildError, load_library


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def test_compiles_once(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_library(source, str(cache)).answer() == 42
    monkeypatch.setattr(build, "COMPILERS", ())
    assert load_library(source, str(cache)).answer() == 42
    assert len(libraries(cache)) == 1


def test_other_source_or_flags_are_another_library(source: Path, cache: Path) -> None:
    load_library(source, str(cache))
    load_library(source, str(cache), ("-DNDEBUG",))
    source.write_text("int answer(void) { return 43; }\n")
    assert load_library(source, str(cache)).answer() == 43
    assert len(libraries(cache)) == 3


def test_another_header_is_another_library(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "HEADERS", tmp_path / "headers")
    build.HEADERS.mkdir()
    source.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    for number in (42, 43):
        (build.HEADERS / "number.h").write_text(f"#define NUMBER {number}\n")
        assert load_library(source, str(cache)).answer() == number


@pytest.mark.parametrize("damage", [lambda whole: whole[:100], lambda whole: b"", lambda whole: b"x" * len(whole)])
def test_a_damaged_library_is_compiled_anew(source: Path, cache: Path, damage: object) -> None:
    load_library(source, str(cache))
    path = libraries(cache)[0]
    whole = path.read_bytes()
    path.unlink()  # the mapped file is not to be touched
    path.write_bytes(damage(whole))
    assert load_library(source, str(cache)).answer() == 42
    assert len(path.read_bytes()) == len(whole)


def test_many_may_build_at_once(source: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: load_library(source, str(cache)), range(4)))
    assert [library.answer() for library in loaded] == [42] * 4
    assert len(libraries(cache)) == 1


def test_what_is_missing_is_said(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NativeBuildError, match="set library_dir"):
        load_library(source, "")
    source.write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(NativeBuildError, match="nothing"):
        load_library(source, str(cache))
    (cache.parent / "file").touch()
    with pytest.raises(NativeBuildError, match="cannot store the compiled"):
        load_library(source, str(cache.parent / "file" / "below"))
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(NativeBuildError, match="no C compiler"):
        load_library(source, str(cache))
