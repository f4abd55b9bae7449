"""Compiled and captured models give the tokens that the plain model gives, which are those of transformers.

Every start here shares one cache folder, so a subgraph is compiled once for the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.environment import read_environment
from launch.llm import LLM
from runtime.common.sampling_params import SamplingParams
from runtime.executor.startup import StartupReport
from tests.checkpoints import prompts, tiny_checkpoint
from tests.demo_reference import MAX_TOKENS, PROMPTS, golden_answers
from tests.launch.cli.commands.test_generate import GREEDY, demo_folder, transformers_greedy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (1, 9, 30, 17)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("cache")
    libraries = read_environment().cache_dir / "native"  # C libraries are not what is tested here.
    libraries.mkdir(parents=True, exist_ok=True)
    (folder / "native").symlink_to(libraries)
    yield str(folder)


def start(folder: Path, tp: int, cache: str, **settings) -> LLM:
    settings = {"tensor_parallel_size": tp, "distributed_executor_backend": "local", "cache_dir": cache, **settings}
    return LLM(str(folder), progress=False, **settings)


def tokens(folder: Path, tp: int, cache: str, **settings) -> tuple[list[list[int]], StartupReport]:
    with start(folder, tp, cache, max_num_seqs=8, **settings) as llm:
        return [output.token_ids for output in llm.generate(prompts(*LENGTHS), GREEDY)], llm.startup


@pytest.mark.parametrize("kind", ["qwen3-bias"])
def test_levels_agree_for_every_family(kind: str, cache: str):
    folder = tiny_checkpoint(kind, num_hidden_layers=2)
    expected = transformers_greedy(folder, LENGTHS, GREEDY.max_tokens)
    for level in (1, 2):
        assert tokens(folder, 1, cache, optimization_level=level)[0] == expected, f"-O{level}"


@pytest.mark.parametrize("tp", [2])
def test_levels_agree_over_ranks(tp: int, cache: str):
    folder = tiny_checkpoint("llama", num_hidden_layers=2)
    expected = transformers_greedy(folder, LENGTHS, GREEDY.max_tokens)
    first, cold = tokens(folder, tp, cache, optimization_level=1)
    second, warm = tokens(folder, tp, cache, optimization_level=2)
    assert first == second == expected
    assert cold.compiled_subgraphs > 0 and cold.distinct_subgraphs <= 4
    assert warm.compiled_subgraphs == 0 and warm.cache_hits == tp * warm.distinct_subgraphs


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_graph_modes_agree(mode: str, cache: str):
    folder = tiny_checkpoint("llama", num_hidden_layers=2)
    expected = transformers_greedy(folder, LENGTHS, GREEDY.max_tokens)
    assert tokens(folder, 2, cache, cudagraph_mode=mode, max_num_batched_tokens=16)[0] == expected


@pytest.mark.parametrize("tp", [2])
def test_demo_compiled(tp: int):
    """Thirty layers, at most four subgraphs, all prompts in one batch. In the user's cache, which may know them."""
    with start(demo_folder(), tp, "", dtype="float32", max_model_len=2048) as llm:
        assert llm.startup.distinct_subgraphs <= 4
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs = llm.chat(conversations, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
    assert [output.token_ids for output in outputs] == golden_answers()


@pytest.mark.parametrize("kind", ["compile_fail", "capture_fail"])
def test_all_ranks_fall_back_if_one_cannot_compile_or_capture(
    kind: str, cache: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("LOCKSTEP_FAULT", f"rank=1,kind={kind}")
    folder = tiny_checkpoint("llama", num_hidden_layers=2)
    assert tokens(folder, 2, cache)[0] == transformers_greedy(folder, LENGTHS, GREEDY.max_tokens)
    assert "all ranks fall back together because of rank(s) 1" in capfd.readouterr().err


def test_a_machine_without_a_compiler_falls_back_and_says_what_to_install(
    cache: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tiny_checkpoint("llama", num_hidden_layers=2)
    found, report = tokens(folder, 1, str(tmp_path / "cache"))
    assert found == transformers_greedy(folder, LENGTHS, GREEDY.max_tokens)
    assert report.distinct_subgraphs == 0
    assert "apt-get install g++" in capfd.readouterr().err
