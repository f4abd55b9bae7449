"""Hub models: download, revisions, cache, offline mode and errors, against a local HTTP stand-in for the hub."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from typing_extensions import override

from launch.hub import HubError, download_model, is_hub_name, served_name
from launch.progress import Progress
from tests.checkpoints import tiny_checkpoint

REPO = "org/tiny"
QUIET = Progress(enabled=False)


class Hub(http.server.ThreadingHTTPServer):
    """Serves one repository with two revisions, a gated one and no other, on 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.files |= {"pytorch_model.bin": b"pickle", "modeling_evil.py": b"code", "original/model.safetensors": b"x"}
        self.files |= {"consolidated.safetensors": b"twice", "README.md": b"text"}
        self.revisions = {"main": "a" * 40, "v1": "b" * 40}
        self.paths: list[str] = []
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def downloaded(self) -> list[str]:
        return sorted(path.partition("/resolve/")[2] for path in self.paths if "/resolve/" in path)


class HubHandler(http.server.BaseHTTPRequestHandler):
    """The three kinds of requests that snapshot_download makes."""

    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.command == "GET":
            self.server.paths.append(path)
        self.server.tokens.add(self.headers.get("Authorization"))
        api, _, rest = path.removeprefix("/api/models/").partition("/revision/")
        if path.startswith("/api/models/org/gated"):
            self.answer(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        elif not path.startswith((f"/api/models/{REPO}", f"/{REPO}/resolve/")):
            self.answer(404, {"error": "absent"}, {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            self.answer(200, [self.entry(name) for name in self.server.files])
        elif "/resolve/" in path:
            revision, _, name = path.partition("/resolve/")[2].partition("/")
            etag = hashlib.sha256(self.server.files[name]).hexdigest()
            self.answer(200, self.server.files[name], {"X-Repo-Commit": revision, "ETag": f'"{etag}"'})
        elif (rest or "main") in self.server.revisions:
            sha = self.server.revisions[rest or "main"]
            self.answer(200, {"id": api, "modelId": api, "sha": sha, "siblings": [], "tags": [], "private": False})
        else:
            self.answer(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})

    do_HEAD = do_GET

    def entry(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(self.server.files[name]), "oid": "0" * 40}

    def answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with Hub(tiny_checkpoint()) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_names() -> None:
    assert all(map(is_hub_name, ("org/name", "Qwen/Qwen2.5-0.5B-Instruct", "o/n@v1", "o/n@refs/pr/1")))
    assert not any(map(is_hub_name, ("demo", "/org/name", "./org", "a/b/c", "../b", "~/x", "a/.b", "a/b@", "a b/c")))


def test_only_the_needed_files_are_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    stream = io.StringIO()
    folder = download_model(REPO, Progress(stream), endpoint=hub.url, cache_dir=tmp_path)
    names = sorted(path.name for path in tiny_checkpoint().iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all((folder / name).read_bytes() == hub.files[name] for name in names)
    assert hub.downloaded == [f"{'a' * 40}/{name}" for name in names]
    said = stream.getvalue().splitlines()
    assert said[0].startswith(f"lockstep: downloading {REPO} (") and "download" in said[-1]
    assert download_model(REPO, QUIET, endpoint=hub.url, cache_dir=tmp_path) == folder
    assert len(hub.downloaded) == len(names)


def test_the_bar_counts_the_downloaded_bytes(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.progress.PLAIN_INTERVAL_S", 0.0)
    stream = io.StringIO()
    download_model(REPO, Progress(stream), endpoint=hub.url, cache_dir=tmp_path)
    total = sum(path.stat().st_size for path in tiny_checkpoint().iterdir())
    assert f"({total} of {total})" in stream.getvalue()


def test_revision_and_token(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert download_model(f"{REPO}@v1", QUIET, endpoint=hub.url, cache_dir=tmp_path).name == "b" * 40
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (f"{REPO}@v2", "org/tiny has no revision 'v2'"),
        ("org/absent", "'org/absent' is neither a folder nor a repository on the hub"),
        ("org/gated", "access to org/gated is restricted; accept its terms"),
        ("org", "'org' is not a hub name; give ORG/NAME"),
    ],
)
def test_errors_say_what_to_change(hub: Hub, tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(HubError, match=message) as caught:
        download_model(model, QUIET, endpoint=hub.url, cache_dir=tmp_path)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_an_unreachable_hub(hub: Hub, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(HubError, match=r"org/tiny is not completely in .* the hub is not reachable \(.*refused"):
            download_model(REPO, QUIET, endpoint=url, cache_dir=tmp_path)
        folder = download_model(REPO, QUIET, endpoint=hub.url, cache_dir=tmp_path)
        assert download_model(REPO, QUIET, endpoint=url, cache_dir=tmp_path) == folder, "the cache is complete"


def test_offline_mode_uses_the_cache_only(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = download_model(REPO, QUIET, endpoint=hub.url, cache_dir=tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    requests = len(hub.paths)
    assert download_model(REPO, QUIET, endpoint=hub.url, cache_dir=tmp_path) == folder
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set; download it first"):
        download_model(f"{REPO}@v1", QUIET, endpoint=hub.url, cache_dir=tmp_path)
    assert len(hub.paths) == requests


@pytest.mark.slow
def test_generate_downloads_and_then_runs_offline(hub: Hub, tmp_path: Path) -> None:
    lockstep = str(Path(sys.executable).with_name("lockstep"))
    argv = [lockstep, "generate", f"{REPO}@v1", "--prompt", "Hi", "--json", "--max-tokens", "3", "--enforce-eager"]
    outputs: list[str] = []
    requests = 0
    for offline, argument in (("0", argv[2]), ("1", argv[2]), ("1", REPO)):
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline}
        command = [*argv[:2], argument, *argv[3:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        if argument == REPO:
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.splitlines()[-1].startswith(f"lockstep generate: {REPO} is not completely in the hub's")
            break
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
        requests = len(hub.paths)
    assert outputs[0] == outputs[1] and json.loads(outputs[0])["completion_tokens"] == 3
    assert len(hub.paths) == requests


def test_the_name_in_the_api_has_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [served_name(name) for name in ("org/tiny@v1", "org/tiny", "demo", "/a/b@c")] == [
        "org/tiny", "org/tiny", "demo", "/a/b@c",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny@v1").mkdir(parents=True)
    assert served_name("org/tiny@v1") == "org/tiny@v1"  # A folder of that name is the model.
