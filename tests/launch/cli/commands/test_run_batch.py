"""``lockstep run-batch`` with a real engine over an executor without workers."""

from __future__ import annotations

import errno
import io
import itertools
import json
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from launch.cli import main as cli
from launch.cli.commands import run_batch
from runtime.common.errors import RankDiedError
from runtime.common.protocol import StepResult
from runtime.common.sampling_params import SamplingParams
from runtime.engine.async_engine import AsyncEngine
from tests.runtime.engine.engine_bench import MODEL, VOCAB, Bench, byte_tokenizer, text_ids
from tests.runtime.engine.fake_executor import expected_output


class FakeAsyncLLM:
    """Replaces launch.llm.AsyncLLM: a real engine over fake ranks."""

    folder: Path
    made: list[FakeAsyncLLM]

    def __init__(self, model: str, **settings: Any) -> None:
        self.tokenizer = byte_tokenizer(self.folder)
        self.bench = Bench(self.tokenizer, **settings)
        self.config, self.model_config = self.bench.config, MODEL
        self.engine = AsyncEngine(self.bench.engine, max_queued_requests=self.config.max_queued_requests)
        self.engine.start()
        type(self).made.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.close()


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> type[FakeAsyncLLM]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    )
    module = types.ModuleType("launch.llm")
    fake = type("FakeAsyncLLM", (FakeAsyncLLM,), {"folder": folder, "made": []})
    module.AsyncLLM = fake
    monkeypatch.setitem(sys.modules, "launch.llm", module)
    return fake


Batch = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def batch(llm: type[FakeAsyncLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Batch:
    """Run a batch of lines, JSON values or text: (exit code, lines of the output, stderr)."""

    def run(*lines: Any, flags: str = "") -> tuple[int, list[dict[str, Any]], str]:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / "in.jsonl").write_text(text + "\n", encoding="utf-8")
        output = tmp_path / "out.jsonl"
        files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(output)]
        code = cli.main(["run-batch", "tiny", *files, *flags.split()])
        found = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
        assert not list(tmp_path.glob(".*")), "a partial file was left"
        return code, [json.loads(line) for line in found], capsys.readouterr().err

    return run


def completion(custom_id: str, prompt: str = "hi", **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "seed": 7, "ignore_eos": True, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def chat(custom_id: str, content: str = "hi", **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True, "seed": 7, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def expected_text(llm: FakeAsyncLLM, prompt: str, count: int) -> str:
    token_ids = text_ids(prompt)
    output = expected_output(token_ids, SamplingParams(seed=7), VOCAB, count)
    return llm.tokenizer.decode(token_ids + output)[len(prompt) :]


def test_responses_are_openais_and_in_order(llm: type[FakeAsyncLLM], batch: Batch) -> None:
    # The first takes longest: the others finish before it.
    code, lines, err = batch(completion("first", "hello", max_tokens=90), chat("sëcond"), completion("third", n=2))
    assert code == 0
    assert [line["custom_id"] for line in lines] == ["first", "sëcond", "third"]
    assert [(line["response"]["status_code"], line["error"]) for line in lines] == [(200, None)] * 3
    ids = {line["id"] for line in lines} | {line["response"]["request_id"] for line in lines}
    assert len(ids) == 6
    first, second, third = (line["response"]["body"] for line in lines)
    made = llm.made[0]
    assert Completion.model_validate(first, strict=True).choices[0].text == expected_text(made, "hello", 90)
    answer = ChatCompletion.model_validate(second, strict=True)
    assert answer.choices[0].message.content == expected_text(made, "u:hi;", 4)
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert [choice.index for choice in Completion.model_validate(third, strict=True).choices] == [0, 1]
    assert "lockstep run-batch: 3 of 3 requests answered" in err
    assert made.engine.num_unfinished == 0


def test_more_lines_than_run_concurrently(llm: type[FakeAsyncLLM], batch: Batch) -> None:
    prompts = [f"prompt {number}" for number in range(60)]
    code, lines, _ = batch(*(completion(prompt, prompt) for prompt in prompts), flags="--max-num-seqs 3")
    assert code == 0
    answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert answers == {prompt: expected_text(llm.made[0], prompt, 4) for prompt in prompts}
    assert [*answers] == prompts


def test_full_queue_is_retried(llm: type[FakeAsyncLLM], batch: Batch) -> None:
    lines = [completion(str(number), n=2) for number in range(12)]
    code, found, _ = batch(*lines, flags="--max-num-seqs 2 --max-queued-requests 2")
    assert code == 0
    assert [line["response"]["status_code"] for line in found] == [200] * 12


def test_failed_requests_do_not_fail_others(llm: type[FakeAsyncLLM], batch: Batch) -> None:
    lines = [
        completion("hot", temperature=1000),
        completion("long", "x" * 300),
        chat("model", model="gpt-4"),
        completion("good"),
        completion("body", typo=3),
        {**completion("list"), "body": []},
    ]
    code, found, err = batch(*lines)
    assert code == 1
    assert [line["response"]["status_code"] for line in found] == [400, 400, 404, 200, 400, 400]
    errors = [line["response"]["body"].get("error", {}).get("message", "") for line in found]
    for error, said in zip(
        errors, ("temperature", "300 tokens", "'gpt-4' does not exist", "", "typo", ""), strict=True
    ):
        assert said in error
    assert all(line["error"] is None for line in found)
    assert "1 of 6 requests answered" in err


@pytest.mark.parametrize(
    ("line", "custom_id", "code"),
    [
        ("{nonsense", None, "invalid_json_line"),
        ("[" * 100_000, None, "invalid_json_line"),
        ("[1]", None, "invalid_request"),
        ({"method": "POST"}, None, "missing_custom_id"),
        ({**completion("x"), "custom_id": 5}, None, "missing_custom_id"),
        (completion("twice"), "twice", "duplicate_custom_id"),
        ({**completion("x"), "method": "GET"}, "x", "invalid_method"),
        ({**completion("x"), "url": "/v1/embeddings"}, "x", "invalid_url"),
        ({**completion("x"), "url": ["/v1/completions"]}, "x", "invalid_url"),
        (completion("x", stream=True), "x", "streaming"),
    ],
)
def test_invalid_line_becomes_an_error_line(batch: Batch, line: Any, custom_id: str | None, code: str) -> None:
    exit_code, (good, bad), _ = batch(completion("twice"), "", line)
    assert (exit_code, good["response"]["status_code"]) == (1, 200)
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == (custom_id, None, code)
    assert "line 3" in bad["error"]["message"] and len(bad["error"]["message"]) < 400


def test_served_model_names(batch: Batch) -> None:
    lines = [chat("a", model="gpt-4"), chat("b", model="tiny"), chat("c")]
    _, found, _ = batch(*lines, flags="--served-model-name gpt-4 other")
    assert [line["response"]["status_code"] for line in found] == [200, 404, 200]
    assert found[2]["response"]["body"]["model"] == "gpt-4"


def test_engine_failure_ends_the_run_and_keeps_the_old_output(
    llm: type[FakeAsyncLLM], batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.jsonl").write_text('{"old": 1}\n')
    make, write, answered = Bench.__init__, run_batch.Batch._write, threading.Event()
    submit, queued = AsyncEngine._submit, threading.Semaphore(0)

    def counted(self: AsyncEngine, *request: Any) -> Any:
        stream = submit(self, *request)
        queued.release()
        return stream

    def watched(self: run_batch.Batch, index: int, line: str) -> None:
        write(self, index, line)
        if index == 2:
            answered.set()

    def broken(self: Bench, *args: Any, **settings: Any) -> None:
        make(self, *args, **settings)
        collect, self.executor.failing_steps[20] = self.executor.collect, RankDiedError(rank=1, returncode=-9)
        calls = itertools.count()

        def collect_late() -> StepResult:
            # No result before all three requests are queued: ten steps then suffice for the short ones.
            call = next(calls)
            for _ in range(3 if call == 0 else 0):
                assert queued.acquire(timeout=20.0), "a request was never queued"
            assert call < 10 or answered.wait(20.0), "the short requests were never answered"
            return collect()

        monkeypatch.setattr(self.executor, "collect", collect_late)

    monkeypatch.setattr(AsyncEngine, "_submit", counted)
    monkeypatch.setattr(run_batch.Batch, "_write", watched)
    monkeypatch.setattr(Bench, "__init__", broken)
    # The short requests finish, the long one does not.
    asked = [completion("long", max_tokens=150), *(completion(str(n), max_tokens=2) for n in range(2))]
    code, lines, err = batch(*asked, flags="--max-restarts 0")
    assert (code, lines) == (137, [{"old": 1}])
    assert "killed by signal 9 (SIGKILL)" in err
    assert llm.made[0].bench.executor.closed
    kept = tmp_path / "out.jsonl.unfinished"
    assert [json.loads(line)["custom_id"] for line in kept.read_text().splitlines()] == ["0", "1"]
    assert f"the answers that were ready are in {kept}" in err


def test_full_disk_is_one_line_and_leaves_no_partial_output(
    llm: type[FakeAsyncLLM], batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_batch.os, "fsync", full)
    code, lines, err = batch(completion("a"))
    assert (code, lines) == (1, []) and not list(tmp_path.glob(".*"))
    assert not list(tmp_path.glob("*.unfinished"))
    assert err.splitlines()[-1].startswith("lockstep run-batch: the results cannot be written to")
    assert "No space left on device" in err


def test_ctrl_c_leaves_no_output(llm: type[FakeAsyncLLM], batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt(*_: Any, **__: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        return {}

    endpoints = run_batch._endpoints() | {"/v1/chat/completions": interrupt}
    monkeypatch.setattr(run_batch, "_endpoints", lambda: endpoints)
    code, lines, err = batch(completion("a", max_tokens=150), chat("b"))
    assert (code, lines) == (130, [])
    assert "lockstep run-batch: interrupted" in err
    assert llm.made[0].bench.executor.closed


def test_missing_extra_is_one_line(llm: type[FakeAsyncLLM], batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, lines, err = batch(completion("a"))
    assert (code, lines, llm.made) == (2, [], [])
    assert err == "lockstep run-batch: run-batch needs pydantic; install with: pip install 'lockstep[serve]'\n"


def test_requests_from_standard_input(llm: type[FakeAsyncLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\xef\xbb\xbf" + json.dumps(completion("a")).encode() + b"\r\n\r\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert cli.main(["run-batch", "tiny", "-i", "-", "-o", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out").read_text())["custom_id"] == "a"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["-i", "in"], "-o/--output-file"),
        (["-i", "none", "-o", "out"], "-i none: No such file or directory"),
        (["-i", "empty", "-o", "out"], "-i empty holds no request"),
        (["-i", "in", "-o", "none/out"], "-o none/out: No such file or directory"),
        (["-i", "in", "-o", "."], "-o . is no regular file"),
        (["-i", "in", "-o", "/dev/null"], "-o /dev/null is no regular file"),
        (["-i", "in", "-o", "./in"], "-o ./in is the input"),
    ],
)
def test_unusable_files_are_refused_before_anything_starts(
    llm: type[FakeAsyncLLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text(json.dumps(completion("a")))
    (tmp_path / "empty").write_text("\n \n")
    assert cli.main(["run-batch", "tiny", *files]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not llm.made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "in"]
