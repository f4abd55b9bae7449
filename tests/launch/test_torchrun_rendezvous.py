"""The rendezvous of torchrun's processes, as files and as a TCP store."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.environment import TorchrunRanks
from launch.torchrun_rendezvous import DRIVER, FileRendezvous, Rendezvous, StoreRendezvous, open_rendezvous


def ranks(local_world_size: int) -> TorchrunRanks:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return TorchrunRanks(0, 0, 2, local_world_size, "127.0.0.1", port, run_id="", restart_count=0, agent_store=False)


@pytest.fixture(params=[2, 1], ids=["one host", "two hosts"])
def rendezvous(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = open_rendezvous(ranks(request.param))
    assert isinstance(opened, FileRendezvous if request.param == 2 else StoreRendezvous)
    yield opened
    opened.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_value_is_awaited_until_it_differs(rendezvous: Rendezvous) -> None:
    with pytest.raises(TimeoutError, match="'driver' did not appear"):
        rendezvous.wait(DRIVER, 0.05)
    rendezvous.publish(DRIVER, b"first")
    assert rendezvous.wait(DRIVER, 30.0) == b"first"
    with pytest.raises(TimeoutError):
        rendezvous.wait(DRIVER, 0.05, other_than=b"first")
    thread = threading.Thread(target=rendezvous.publish, args=(DRIVER, b"second"))
    thread.start()
    assert rendezvous.wait(DRIVER, 30.0, other_than=b"first") == b"second"
    thread.join()


def test_the_folder_is_private_and_of_this_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = FileRendezvous(ranks(2))
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and folder.name.endswith("-0")
    opened.publish("key", b"x" * 100)
    assert [path.name for path in folder.iterdir()] == ["key"]
    opened.remove()
