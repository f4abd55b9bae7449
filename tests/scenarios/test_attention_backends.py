"""``--attention-backend``: every backend gives transformers' tokens at TP 1 and 2; unusable ones are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallel.toolchain import find_compiler
from tests.checkpoints import prompts, tiny_checkpoint
from tests.launch.cli.commands.test_generate import GREEDY, local, transformers_greedy

LENGTHS = (9, 30)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_tokens_are_those_of_transformers(backend: str, tp: int) -> None:
    if backend == "cpu" and find_compiler() is None:
        pytest.skip("no C compiler")
    folder = tiny_checkpoint("llama")
    with local(folder, tp, attention_backend=backend, max_num_batched_tokens=16, max_num_seqs=3) as llm:
        outputs = llm.generate(prompts(*LENGTHS), GREEDY)
    assert [output.token_ids for output in outputs] == transformers_greedy(folder, LENGTHS, GREEDY.max_tokens)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("triton", "attention_backend 'triton' cannot be used here: it runs on cuda"),
        ("flash", "'flash'"),
    ],
)
def test_a_backend_that_cannot_be_used_ends_with_code_2(backend: str, message: str) -> None:
    command = [str(Path(sys.executable).parent / "lockstep"), "generate", str(tiny_checkpoint("llama"))]
    command += ["--prompt", "x", "--device", "cpu", "--enforce-eager", "--attention-backend", backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if message in line]
    assert "torch" in line and "auto" in line
    assert "Traceback" not in done.stderr
