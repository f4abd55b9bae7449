"""The store of artifacts: nothing damaged is trusted, nothing stops a start, one process writes at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from workers.compile.cache import MANIFEST, Store

Damage = Callable[[Path], object]
FILES = {"code": b"print", "loop0.so": b"\x7fELF" * 100}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "compile"))


def leftovers(store: Store) -> list[str]:
    assert store.root is not None
    return sorted(path.name for path in store.root.iterdir() if path.name.startswith("."))


def test_what_was_saved_is_found_by_another_store(store: Store) -> None:
    saved = store.save("key", FILES)
    found = Store(str(store.root)).load("key")
    assert saved is not None
    assert found is not None
    assert dict(found.files) == FILES
    assert (found.folder / "loop0.so").read_bytes() == FILES["loop0.so"]
    assert store.load("other") is None
    assert store.warnings == []
    assert leftovers(store) == []


def truncate(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:3])


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def swap_files(folder: Path) -> None:
    (folder / "code").write_bytes(b"another")


def become_a_file(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("what is this")


def hold_another_key(folder: Path) -> None:
    other = Store(str(folder.parent)).save("other", FILES)
    assert other is not None
    for path in other.folder.iterdir():
        path.replace(folder / path.name)


@pytest.mark.parametrize(
    "damage",
    [
        truncate("code"),
        truncate("loop0.so"),
        truncate(MANIFEST),
        remove("loop0.so"),
        remove(MANIFEST),
        swap_files,
        become_a_file,
        hold_another_key,
    ],
    ids=lambda f: f.__qualname__,
)
def test_a_damaged_or_foreign_entry_is_not_used_and_is_replaced(store: Store, damage: Damage) -> None:
    entry = store.save("key", FILES)
    assert entry is not None
    damage(entry.folder)
    assert store.load("key") is None
    assert len(store.warnings) == 1
    assert str(entry.folder) in store.warnings[0]
    assert "compiled again" in store.warnings[0]
    store.save("key", FILES)
    assert store.load("key") is not None
    assert len(store.warnings) == 1
    assert leftovers(store) == []


@pytest.mark.parametrize("root", ["/proc/lockstep", "/dev/null/compile"])
def test_a_directory_that_cannot_be_made_costs_one_warning(root: str) -> None:
    store = Store(root)
    with store.lock("key", wait=True) as held, store.scratch() as folder:
        assert held
        assert Path(folder).is_dir()
        assert store.save("key", FILES) is None
        assert store.load("key") is None
    assert not Path(folder).exists()
    assert len(store.warnings) == 1
    assert "every start compiles again" in store.warnings[0]


def test_a_read_only_directory_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save("key", FILES)

    def refuse(*_: object, **__: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    monkeypatch.setattr("os.open", refuse)
    assert store.load("key") is not None
    with store.lock("other", wait=True) as held:
        assert held
        assert store.save("other", FILES) is None
    assert len(store.warnings) == 1


def test_no_directory_keeps_nothing() -> None:
    store = Store("")
    with store.lock("key", wait=True) as held, store.scratch():
        assert held
        assert store.save("key", FILES) is None
    assert store.load("key") is None
    assert store.warnings == []


def test_the_directory_is_its_owners_alone(store: Store) -> None:
    store.save("key", FILES)
    assert store.root is not None
    assert store.root.stat().st_mode & 0o077 == 0


HOLD = """
import sys
from workers.compile.cache import Store
with Store(sys.argv[1]).lock("key", wait=True):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_one_process_at_a_time_and_a_dead_one_lets_go(store: Store) -> None:
    command = [sys.executable, "-c", HOLD, str(store.root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with store.lock("key", wait=False) as held:
            assert not held
        with store.lock("another", wait=False) as held:
            assert held
        other.kill()
        with store.lock("key", wait=True) as held:
            assert held


def test_scratch_is_gone_afterwards_or_kept_and_later_swept(store: Store) -> None:
    assert store.root is not None
    with store.scratch() as folder:
        Path(folder, "header").write_text("")
    assert leftovers(store) == []
    with store.scratch(keep=True) as folder:
        pass
    own = Path(folder)
    assert own.is_dir()
    dead = store.root / ".work-4194304-x"  # more than the largest pid
    dead.mkdir()
    for path in (own, dead):
        os.utime(path, (0, 3600.0 * 24 * 365))
    with store.scratch():
        assert not dead.exists()
        assert own.exists(), "its process lives"
    young = store.root / ".new-4194304-x"
    young.mkdir()
    with store.scratch():
        assert young.exists()


def test_two_that_save_the_same_at_once_both_succeed(store: Store) -> None:
    others = [Store(str(store.root)) for _ in range(4)]
    with ThreadPoolExecutor(len(others)) as pool:
        for _ in range(50):
            entries = list(pool.map(lambda one: one.save("key", {"a": b"content"}), others))
            assert None not in entries
            found = store.load("key")
            assert found is not None
            assert found.files == {"a": b"content"}
    assert [one.warnings for one in (store, *others)] == [[]] * 5
    assert leftovers(store) == []
