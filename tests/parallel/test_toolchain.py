"""Compiling C on first use: cached by content, never trusting what is damaged."""

from __future__ import annotations

import errno
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallel import toolchain
from parallel.toolchain import NativeBuildError, StructSizeError, load_library


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def test_compiles_once(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_library(source, str(cache)).answer() == 42
    monkeypatch.setattr(toolchain, "COMPILERS", ())
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
    monkeypatch.setattr(toolchain, "INCLUDE_DIR", tmp_path / "headers")
    toolchain.INCLUDE_DIR.mkdir()
    source.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    for number in (42, 43):
        (toolchain.INCLUDE_DIR / "number.h").write_text(f"#define NUMBER {number}\n")
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


def test_processes_that_start_together_share_the_work(tmp_path: Path, cache: Path) -> None:
    """Each of three sources is compiled once, though three processes want all of them; each tells what it compiled."""
    names = ["a", "b", "c"]
    for name in names:
        (tmp_path / f"{name}.c").write_text(f"int answer(void) {{ return {ord(name)}; }}\n")
    script = f"""if True:
        import sys
        from pathlib import Path
        from parallel import toolchain
        compiled, compile_one = [], toolchain._compile
        toolchain._compile = lambda source, *rest: (compiled.append(source.stem), compile_one(source, *rest))
        sources = [Path({str(tmp_path)!r}, name + ".c") for name in {names}]
        sys.stdin.readline()
        toolchain.build_ahead(sources, {str(cache)!r})
        assert [toolchain.load_library(source, {str(cache)!r}).answer() for source in sources] == [97, 98, 99]
        print(" ".join(compiled))
    """
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert sorted(" ".join(said).split()) == names


def test_where_there_are_no_locks_it_is_compiled_all_the_same(source: Path, cache: Path) -> None:
    cache.mkdir()
    (cache / "locks").touch()
    toolchain.build_ahead([source], str(cache))
    assert len(libraries(cache)) == 1
    assert load_library(source, str(cache)).answer() == 42


def test_a_file_system_without_locks_compiles_too(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert load_library(source, str(cache)).answer() == 42
    assert not recwarn.list


def test_to_build_ahead_says_nothing_of_what_cannot_be_built(source: Path, cache: Path) -> None:
    broken = source.with_name("broken.c")
    broken.write_text("int answer(void) { return nothing; }\n")
    toolchain.build_ahead([broken, source], str(cache))
    assert len(libraries(cache)) == 1
    with pytest.raises(NativeBuildError, match="nothing"):
        load_library(broken, str(cache))
    toolchain.build_ahead([source], "")


def test_what_is_missing_is_said(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NativeBuildError, match="set library_dir"):
        load_library(source, "")
    source.write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(NativeBuildError, match="nothing"):
        load_library(source, str(cache))
    (cache.parent / "file").touch()
    with pytest.raises(NativeBuildError, match="cannot store the compiled"):
        load_library(source, str(cache.parent / "file" / "below"))
    monkeypatch.setattr(toolchain, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(NativeBuildError, match="no C compiler"):
        load_library(source, str(cache))


def test_a_struct_of_another_size_is_refused(source: Path, cache: Path) -> None:
    """A field added in C only, or in Python only, would be read as garbage."""
    source.write_text('#include "shared_struct.h"\ntypedef struct { long a, b; } numbers;\nEXPORT_SIZE(numbers);\n')
    load_library(source, str(cache), structs={"numbers": 16})
    with pytest.raises(StructSizeError, match=r"struct 'numbers' has 16 bytes in answer\.c and 24 in Python"):
        load_library(source, str(cache), structs={"numbers": 24})
    with pytest.raises(StructSizeError, match=r"answer\.c exports no size of its struct 'others'"):
        load_library(source, str(cache), structs={"others": 16})
