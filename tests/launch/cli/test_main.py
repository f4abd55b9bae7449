"""The ``lockstep`` command: what it prints where, and its exit codes. The model behind it is a stand-in."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

import launch.torchrun_wrapper
from launch.cli import main as cli
from launch.cli.commands.launch import torchrun_arguments
from runtime.common.errors import CheckpointError, LockstepError, RankDiedError, RankRaisedError
from runtime.common.sampling_params import SamplingParams, StructuredOutputs
from runtime.engine.request import CompletionOutput, RequestOutput, RequestTimes, SequenceOutput, TokenLogprob

ROOT = Path(__file__).parents[3]
BENCH_KEYS = {"model": "demo", "tensor_parallel_size": 1, "batch": 1, "decode_tokens_per_s": 12.3456}


def answer(index: int, prompt: str, params: SamplingParams) -> RequestOutput:
    """What a model that repeats its prompt in capitals would give."""
    tokens = [ord(character) for character in prompt.upper()]
    logprobs = [TokenLogprob(token, -0.5, ((token, -0.5),)) for token in tokens]
    generated = SequenceOutput(tokens, [prompt.upper()], None if params.logprobs is None else logprobs)
    failed = prompt == "fail"
    samples = tuple(
        CompletionOutput(
            sample,
            generated,
            num_tokens=len(tokens),
            num_texts=1,
            finish_reason="error" if failed else "stop",
            error="its logits were not finite" if failed else "",
        )
        for sample in range(params.n)
    )
    return RequestOutput(index, (1, 2, 3), samples, True, RequestTimes(0.0), prompt, index)


class FakeLLM:
    """Stands in for launch.llm.LLM and remembers how it was used."""

    made: list[FakeLLM]
    raises: BaseException | None

    def __init__(self, model: str, **engine: Any) -> None:
        self.model, self.engine, self.closed = model, engine, False
        self.conversations: Any = None
        type(self).made.append(self)

    def generate(
        self, prompts: Sequence[str], params: SamplingParams, *, progress: bool = False
    ) -> list[RequestOutput]:
        if self.raises is not None:
            raise self.raises
        return [answer(index, prompt, params) for index, prompt in enumerate(prompts)]

    def chat(self, conversations: Any, params: SamplingParams, *, progress: bool = False) -> list[RequestOutput]:
        self.conversations = conversations
        return self.generate([f"<user>{messages[-1]['content']}" for messages in conversations], params)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = types.ModuleType("launch.llm")
    fake = type("FakeLLM", (FakeLLM,), {"made": [], "raises": None})
    module.LLM = fake
    monkeypatch.setitem(sys.modules, "launch.llm", module)
    return fake


@pytest.fixture
def lockstep(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: (exit code, stdout, stderr)."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


Lockstep = Callable[..., tuple[int, str, str]]


def test_generate_prints_the_text_alone(llm: type[FakeLLM], lockstep: Lockstep) -> None:
    assert lockstep("generate", "demo", "-tp", "2", "--prompt", "hello") == (0, "HELLO\n", "")
    assert (llm.made[0].model, llm.made[0].engine, llm.made[0].closed) == ("demo", {"tensor_parallel_size": 2}, True)


def test_generate_json_is_one_object_a_line_in_order(llm: type[FakeLLM], lockstep: Lockstep) -> None:
    code, out, err = lockstep("generate", "demo", "--json", "--prompt", "hé", "zwei\nZeilen")
    assert (code, err) == (0, "")
    assert [json.loads(line) for line in out.splitlines()] == [
        {
            "index": index,
            "prompt": prompt,
            "text": prompt.upper(),
            "token_ids": [ord(character) for character in prompt.upper()],
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "completion_tokens": len(prompt),
        }
        for index, prompt in enumerate(["hé", "zwei\nZeilen"])
    ]


def test_generate_json_adds_what_was_asked_for(llm: type[FakeLLM], lockstep: Lockstep) -> None:
    _, out, _ = lockstep("generate", "demo", "--json", "-n", "2", "--logprobs", "1", "--prompt", "a", "b")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["index"], line["sample"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert lines[0]["logprobs"] == [{"token_id": 65, "logprob": -0.5, "top": [[65, -0.5]]}]


def test_chat_gives_prompts_as_user_messages(llm: type[FakeLLM], lockstep: Lockstep) -> None:
    code, out, _ = lockstep("generate", "demo", "--chat", "--json", "--prompt", "hi")
    assert llm.made[0].conversations == [[{"role": "user", "content": "hi"}]]
    assert (code, json.loads(out)["prompt"], json.loads(out)["text"]) == (0, "hi", "<USER>HI")


def test_a_failed_prompt_is_named_and_spares_the_others(llm: type[FakeLLM], lockstep: Lockstep) -> None:
    code, out, err = lockstep("generate", "demo", "--json", "--prompt", "fail", "good")
    assert code == 1
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["error", "stop"]
    assert err == "lockstep generate: prompt 0 failed: its logits were not finite\n"


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ("one\n\n two \r\n", ["one", " two "]),
        ('"one\\ntwo"\n"three"\n', ["one\ntwo", "three"]),
        ('"one"\nplain\n', ['"one"', "plain"]),
        ("12\n13", ["12", "13"]),
        ("\ufeffone", ["one"]),
    ],
)
def test_prompts_file(llm: type[FakeLLM], lockstep: Lockstep, tmp_path: Path, content: str, prompts: list[str]) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content.encode())
    _, out, _ = lockstep("generate", "demo", "--json", "--prompts-file", str(file))
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == prompts


def test_prompts_from_standard_input(llm: type[FakeLLM], lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    _, out, _ = lockstep("generate", "demo", "--json", "--prompts-file", "-")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["one", "two"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "a command is missing"),
        (["generat"], f"unknown command 'generat'; there are {', '.join(cli.COMMANDS)}; did you mean generate?"),
        (["generate", "demo"], "nothing to generate from: give --prompt TEXT or --prompts-file FILE"),
        (["generate", "demo", "--promt", "x"], "unknown flag --promt; did you mean --prompt?"),
        (["generate", "demo", "--prompts-file", "/nowhere"], "--prompts-file /nowhere: No such file or directory"),
        (["generate", "demo", "--prompts-file", "/dev/null"], "--prompts-file /dev/null holds no prompt"),
        (["generate", "demo", "--prompt", "\udcff"], "prompt 0 is not valid UTF-8"),
        (["bench"], "what to measure is missing: one of latency, throughput, serve, startup, collectives, ops"),
        (["bench", "latency", "demo", "--batch", "0"], "--batch 0"),
        (["bench", "latency", "demo", "--temperature", "0"], "unknown flag --temperature"),
        (["bench", "startup"], "MODEL is missing"),
        (["bench", "serve"], "MODEL is missing"),
        (["bench", "serve", "demo", "--request-rate", "1", "0"], "--request-rate: '0' is neither a number above 0 nor"),
        (["bench", "serve", "demo", "--request-rate", "nan"], "'nan' is neither a number above 0 nor inf"),
        (["bench", "serve", "demo", "--api-key", "x"], "--api-key goes with --base-url"),
        (["bench", "serve", "--base-url", "http://a", "-tp", "2"], "tensor_parallel_size is a setting of a server's"),
        (["bench", "serve", "demo", "--plot", "/nowhere/a.png"], "--plot /nowhere/a.png: there is no folder /nowhere"),
        (["bench", "throughput", "demo", "--input-len", "9-3"], "'9-3': the first number is the smaller one"),
        (["bench", "throughput", "demo", "--output-len", "0"], "'0' is not a whole number from 1 up"),
        (["bench", "collectives", "-tp", "1"], "a collective needs 2 ranks or more"),
        (["launch", "--nproc-per-node", "2"], "a command is missing"),
        (["launch", "--", "doctor"], "'doctor' cannot be launched; allowed: generate, serve, run-batch, bench"),
        (["launch", "--", "generate", "demo", "--promt", "x"], "unknown flag --promt"),
        (["doctor", "--jsn"], "unknown flag --jsn; did you mean --json?"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(lockstep: Lockstep, argv: list[str], message: str) -> None:
    code, out, err = lockstep(*argv)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (CheckpointError("two tensors are missing:\n  a\n  b"), 2, "two tensors are missing:; a; b\n"),
        (LockstepError("no network"), 1, "no network\n"),
        (RankDiedError(rank=1, returncode=-9), 137, "rank 1 on localhost failed: killed by signal 9 (SIGKILL)\n"),
        (RankDiedError(rank=1, returncode=3), 3, "rank 1 on localhost failed: its process ended with exit code 3\n"),
        (
            RankRaisedError("boom", rank=1, rank_traceback="Traceback\n  line\nValueError: boom"),
            1,
            "rank 1 on localhost failed: boom\n--- traceback of rank 1 ---\nTraceback\n  line\nValueError: boom\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (cli.Terminated(), 143, "terminated\n"),
    ],
)
def test_errors_become_exit_codes(
    llm: type[FakeLLM], lockstep: Lockstep, error: BaseException, code: int, shown: str
) -> None:
    llm.raises = error
    assert lockstep("generate", "demo", "--prompt", "x") == (code, "", f"lockstep generate: {shown}")
    assert llm.made[0].closed


def test_a_defect_keeps_its_traceback(llm: type[FakeLLM]) -> None:
    llm.raises = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        cli.main(["generate", "demo", "--prompt", "x"])


def test_sigterm_unwinds(llm: type[FakeLLM], lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "generate", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert lockstep("generate", "demo", "--prompt", "x")[0] == 143
    assert llm.made[0].closed
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("command", ["--help", "generate --help", "chat --help", "run-batch --help", "bench --help",
    "bench throughput --help", "bench serve --help", "launch -h"])  # fmt: skip
def test_help(lockstep: Lockstep, command: str) -> None:
    code, out, err = lockstep(*command.split())
    assert (code, err) == (0, "")
    assert out.startswith("usage: lockstep")


def test_a_closed_stdout_ends_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "launch.cli.main", "--help"]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_bench_latency_passes_its_arguments_and_prints_rows(
    lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def bench_latency(model: str, engine: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
        seen.update(model=model, engine=engine, **how)
        return [{**BENCH_KEYS, "batch": batch} for batch in how["batches"]]

    module = types.ModuleType("benchmarks.latency")
    module.bench_latency = bench_latency
    monkeypatch.setitem(sys.modules, "benchmarks.latency", module)
    command = "bench latency demo -tp 2 --batch 1 8 --prompt-tokens 16 --new-tokens 4".split()
    code, out, err = lockstep(*command, "--json")
    assert (code, err) == (0, "")
    assert [json.loads(line)["batch"] for line in out.splitlines()] == [1, 8]
    assert seen == {
        "model": "demo",
        "engine": {"tensor_parallel_size": 2},
        "batches": (1, 8),
        "prompt_tokens": 16,
        "new_tokens": 4,
    }
    _, table, _ = lockstep(*command)
    assert "decode_tokens_per_s      12.35" in table


def test_bench_startup_prints_its_one_row(lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("benchmarks.startup")
    module.bench_startup = lambda model, engine: {"model": model, **engine}
    monkeypatch.setitem(sys.modules, "benchmarks.startup", module)
    code, out, _ = lockstep("bench", "startup", "demo", "-O1", "--json")
    assert (code, json.loads(out)) == (0, {"model": "demo", "optimization_level": 1})


def bench(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """Put ``functions`` in the place of a module of ``benchmarks``."""
    stand_in = types.ModuleType(module)
    vars(stand_in).update(functions)
    monkeypatch.setitem(sys.modules, module, stand_in)


def test_bench_throughput_passes_its_arguments_and_fails_with_its_requests(
    lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def bench_throughput(model: str, engine: dict[str, Any], **how: Any) -> dict[str, Any]:
        seen.update(model=model, engine=engine, **how)
        return {"requests_per_s": 1.5, "errors": len(seen["engine"]) - 1}

    bench(monkeypatch, "benchmarks.throughput", bench_throughput=bench_throughput)
    code, out, _ = lockstep("bench", "throughput", "demo", "--seed", "3", "--input-len", "5-9", "--json")
    assert (code, json.loads(out)) == (0, {"requests_per_s": 1.5, "errors": 0})
    work = {"num_prompts": 64, "input_len": (5, 9), "output_len": (16, 64), "seed": 3}
    assert seen == {"model": "demo", "engine": {"seed": 3}, **work}
    code, out, _ = lockstep("bench", "throughput", "demo", "-tp", "2", "--seed", "3", "--input-len", "5")
    assert (code, seen["input_len"]) == (1, (5, 5))
    assert "requests_per_s           1.5" in out


def test_bench_serve_passes_its_arguments(lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    bench(
        monkeypatch, "benchmarks.serve", Load=lambda **load: load,
        bench_serve=lambda *given, **options: calls.append((*given, options)) or [{"errors": 0}],
    )  # fmt: skip
    monkeypatch.delenv("LOCKSTEP_API_KEY", raising=False)
    plot = str(tmp_path / "a.png")
    argv = ["--request-rate", "0.5", "inf", "--concurrency", "4", "--num-prompts", "8", "--plot", plot, "-tp", "2"]
    assert lockstep("bench", "serve", "demo", *argv)[0] == 0
    monkeypatch.setenv("LOCKSTEP_API_KEY", "secret")
    assert lockstep("bench", "serve", "--base-url", "http://a:1/", "--seed", "2")[0] == 0
    work = {"input_len": (16, 128), "output_len": (16, 64)}
    assert calls == [
        (
            "demo",
            ["--tensor-parallel-size=2"],
            {"rates": (0.5, float("inf")), "num_prompts": 8, "concurrency": 4, "seed": 0, **work},
            {"base_url": "", "api_key": "", "plot": plot},
        ),
        (
            "",
            ["--seed=2"],
            {"rates": (float("inf"),), "num_prompts": 64, "concurrency": 0, "seed": 2, **work},
            {"base_url": "http://a:1", "api_key": "secret", "plot": ""},
        ),
    ]


def test_a_plot_needs_matplotlib(lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = lockstep("bench", "serve", "demo", "--plot", "a.png")
    assert (code, err.count("\n")) == (2, 1)
    assert "--plot needs matplotlib, which is not installed: pip install 'lockstep[plot]'" in err


def test_a_bench_that_cannot_print_lets_go_of_what_it_started(
    lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    def bench_serve(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        try:
            yield {"errors": 0}
            yield {"errors": 0}
        finally:
            closed.append(True)

    bench(monkeypatch, "benchmarks.serve", Load=dict, bench_serve=bench_serve)
    kept: list[object] = []  # As a traceback would keep it.

    def write_line(text: str) -> None:
        kept.append(sys._getframe(1))
        raise LockstepError("the disk is full")

    monkeypatch.setattr("launch.cli.commands.bench.write_line", write_line)
    assert lockstep("bench", "serve", "demo")[0] == 1
    assert closed == [True]


def test_generate_asks_for_structured_output(llm: type[FakeLLM], lockstep: Lockstep) -> None:
    asked: list[SamplingParams] = []
    generate = llm.generate

    def remember(self: FakeLLM, prompts: Sequence[str], params: SamplingParams, **how: Any) -> list[RequestOutput]:
        asked.append(params)
        return generate(self, prompts, params, **how)

    llm.generate = remember
    assert lockstep("generate", "demo", "--prompt", "x", "--regex", "[ab]+")[0] == 0
    assert asked[0].structured_outputs == StructuredOutputs(regex="[ab]+")


def test_launch_hands_over_torchruns_arguments(lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        launch.torchrun_wrapper, "launch", lambda arguments, command: seen.extend([arguments, command]) or 7
    )
    command = ["generate", "demo", "-tp", "2", "--prompt", "x"]
    assert lockstep("launch", "--nnodes", "1", "--nproc-per-node", "2", "--", *command)[0] == 7
    assert (seen[0].nnodes, seen[0].nproc_per_node, seen[1]) == ("1", "2", command)


def test_launch_refuses_what_torchrun_refuses_in_one_line(lockstep: Lockstep) -> None:
    for flags, message in (
        (["--max-restarts", "many"], "invalid int value: 'many'"),
        (["--no-such-flag"], "'--no-such-flag' is not a flag of torchrun"),
        (["stray"], "'stray' is not a flag of torchrun"),
    ):
        code, out, err = lockstep("launch", *flags, "--", "generate", "demo", "--prompt", "x")
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    assert torchrun_arguments(["--nproc_per_node=3"]).nproc_per_node == "3"
