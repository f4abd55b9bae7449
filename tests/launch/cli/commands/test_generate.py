"""``lockstep generate`` and LLM over real ranks: the same tokens as transformers, with every launcher."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch.cli.main import main
from launch.demo_model import ensure_demo_model
from launch.environment import read_environment
from launch.llm import LLM
from launch.progress import Progress
from runtime.common.errors import ConfigError, EngineClosedError, RequestError
from runtime.common.sampling_params import SamplingParams
from tests.checkpoints import prompts, reference_model, tiny_checkpoint
from tests.demo_reference import MAX_TOKENS, PROMPTS, golden_answers, transformers_answers

BIN = Path(sys.executable).parent
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@functools.cache
def transformers_greedy(folder: Path, lengths: tuple[int, ...], max_tokens: int) -> list[list[int]]:
    """What transformers' ``generate`` continues each prompt with."""
    answers = []
    for token_ids in prompts(*lengths):
        output = reference_model(folder).generate(
            torch.tensor([token_ids]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
        )
        answers.append(output[0, len(token_ids) :].tolist())
    return answers


def local(folder: Path, tp: int, **settings) -> LLM:
    settings = {"enforce_eager": True, **settings}  # compiled models have tests of their own: test_levels.py
    return LLM(str(folder), tensor_parallel_size=tp, distributed_executor_backend="local", progress=False, **settings)


@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        ("llama", 1),
        ("llama", 2),
        ("llama", 3),
        ("llama", 4),
        *(pytest.param("qwen3-bias", tp, marks=pytest.mark.slow) for tp in (1, 2, 3, 4)),
    ],
)
def test_greedy_tokens_are_those_of_transformers(kind: str, tp: int):
    lengths = (1, 9, 30, 17)
    folder = tiny_checkpoint(kind)
    with local(folder, tp, max_num_batched_tokens=16, max_num_seqs=3, block_size=8) as llm:
        outputs = llm.generate(prompts(*lengths), GREEDY)
    assert [output.token_ids for output in outputs] == transformers_greedy(folder, lengths, GREEDY.max_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama3", "mistral", "qwen2-window"])  # The logits of all: test_models.py.
def test_greedy_tokens_of_other_architectures(kind: str):
    lengths = (1, 9, 30, 17)
    folder = tiny_checkpoint(kind)
    with local(folder, 3) as llm:
        outputs = llm.generate(prompts(*lengths), GREEDY)
    assert [output.token_ids for output in outputs] == transformers_greedy(folder, lengths, GREEDY.max_tokens)


def test_one_engine_serves_many_calls_and_closes_once():
    with local(tiny_checkpoint(), 2) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts(4, 20)]
        together = [output.token_ids for output in llm.generate(prompts(4, 20), GREEDY)]
        seeded = SamplingParams(max_tokens=12, seed=7, n=2)
        first, second = llm.generate(prompts(4), seeded), llm.generate(prompts(4), seeded)
        assert [o.token_ids for o in first[0].outputs] == [o.token_ids for o in second[0].outputs]
        assert first[0].outputs[0].token_ids != first[0].outputs[1].token_ids
        assert llm.generate(["Hello"], SamplingParams(max_tokens=3))[0].prompt == "Hello"
        with pytest.raises(RequestError, match="prompt 1"):
            llm.generate([[1], []])
        with pytest.raises(RequestError, match="256"):
            llm.generate([[5] * 300])
    assert alone == together
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate([[1]])


def test_a_size_that_cannot_be_cut_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launch.llm.Supervisor", lambda *_: pytest.fail("a worker group was made"))
    with pytest.raises(ConfigError, match=r"1 to 6"):
        local(tiny_checkpoint(), 7)


def test_quantization_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((tiny_checkpoint() / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for argv in ([str(tiny_checkpoint()), "--quantization", "fp8"], [str(tmp_path)]):
        assert main(["generate", *argv, "--prompt", "x"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("lockstep generate: ") and "quantization" in line and "fp8" in line
        assert "bfloat16, float16 or float32 weights" in line


# ---- the demo model, in float32, against transformers


@functools.cache
def demo_folder() -> Path:
    return ensure_demo_model(read_environment().cache_dir, Progress(enabled=False))


def command(*extra: str) -> list[str]:
    flags = ["--chat", "--json", "--dtype", "float32", "--temperature", "0", "--max-tokens", str(MAX_TOKENS)]
    return ["generate", "demo", *flags, "--enforce-eager", "--max-model-len", "2048", "--prompt", *PROMPTS, *extra]


def answers_of(argv: list[str], **environment: str) -> list[list[int]]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=600, env={**os.environ, "PATH": path, **environment}
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["index"] for line in lines] == list(range(len(lines)))
    return [line["token_ids"] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_answers_written_down_are_those_of_transformers():
    """Every sixth of them, since transformers takes its time; ``demo_reference.py`` writes them all."""
    assert transformers_answers(demo_folder(), PROMPTS[::6]) == golden_answers()[::6]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", [1, 4])  # 2 and 3 are below, by other launchers.
def test_demo_local(tp: int):
    argv = command("--tensor-parallel-size", str(tp), "--distributed-executor-backend", "local")
    assert answers_of([str(BIN / "lockstep"), *argv]) == golden_answers()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", [2])
def test_demo_over_an_embedded_ray(tp: int):
    argv = command("--tensor-parallel-size", str(tp))
    assert answers_of([str(BIN / "lockstep"), *argv], RAY_AUTH_MODE="disabled") == golden_answers()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nproc", [2])
def test_demo_over_torchrun(nproc: int):
    argv = command("--tensor-parallel-size", str(nproc))
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(nproc), "-m", "launch.spmd"]
    assert answers_of([*torchrun, *argv]) == golden_answers()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_over_lockstep_launch():
    argv = [str(BIN / "lockstep"), "launch", "--nproc-per-node", "3", "--"]
    assert answers_of([*argv, *command("-tp", "3")]) == golden_answers()


# ---- bfloat16: not tokens but error, measured against transformers' own


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bfloat16_errs_no_more_than_transformers_in_bfloat16():
    from transformers import AutoModelForCausalLM

    chosen, count = (0, 3, 6, 10), 24
    params = SamplingParams(max_tokens=count, temperature=0.0, logprobs=0)
    with local(demo_folder(), 2, dtype="bfloat16", max_model_len=2048) as llm:
        outputs = [llm.chat([{"role": "user", "content": PROMPTS[i]}], params)[0] for i in chosen]
    errors = {}
    models = {d: AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=getattr(torch, d)) for d in DTYPES}
    for output in outputs:
        sequence = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
        positions = torch.arange(len(output.prompt_token_ids) - 1, sequence.shape[1] - 1)
        tokens = torch.tensor(output.token_ids)
        judged = {}
        for dtype, model in models.items():
            with torch.no_grad():
                logprobs = model(sequence).logits[0, positions].float().log_softmax(-1)
            judged[dtype] = logprobs.gather(1, tokens[:, None]).flatten()
        ours = torch.tensor([entry.logprob for entry in output.logprobs])
        errors.setdefault("ours", []).append(ours - judged["float32"])
        errors.setdefault("theirs", []).append(judged["bfloat16"] - judged["float32"])
    ours, theirs = (torch.cat(errors[who]).square().mean().sqrt().item() for who in ("ours", "theirs"))
    assert ours <= 1.5 * theirs, f"rms error of logprobs: ours {ours:.4f}, transformers' {theirs:.4f}"


DTYPES = ("float32", "bfloat16")
