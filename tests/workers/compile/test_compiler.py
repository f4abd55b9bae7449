"""compile_model: the compiled model, its cache entries on disk, damaged entries, and errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.common.config import CompileMode
from tests.checkpoints import prompts, reference_logits, tiny_checkpoint
from tests.dist.ranks import run_ranks
from tests.workers.compile.harness import CompiledModelHarness, compile_and_generate
from workers.compile.cache import MANIFEST
from workers.compile.compiler import compile_model
from workers.compile.errors import CompileError, TraceError
from workers.compile.plan import Plan
from workers.compile.split import Subgraph
from workers.compile.subgraph_compiler import CompiledSubgraph, SubgraphCompiler

pytestmark = pytest.mark.slow  # Whatever compiles pays half a minute for Inductor's first subgraph.

ROOT = Path(__file__).parents[3]
PROMPTS = prompts(9, 2, 17)
TOKENS = 6
LAYERS = 3
SUBGRAPHS = 3
"""Distinct ones: before the first attention, between two, after the last."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_checkpoint("llama-bias")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compile-cache")


@pytest.fixture(scope="module")
def cold(folder: Path, cache: Path) -> CompiledModelHarness:
    """The first start: everything is traced and compiled, once for all tests here."""
    return CompiledModelHarness(folder, cache, example_tokens=1)


@pytest.fixture
def copied(cold: CompiledModelHarness, cache: Path, tmp_path: Path) -> Path:
    """The cache that the first start left, to be damaged."""
    return Path(shutil.copytree(cache, tmp_path / "cache"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Subgraph]]:
    """Subgraphs are not compiled but run as they are, and counted: for tests of what surrounds the compiler."""
    compiled: list[Subgraph] = []

    def run_as_is(self: SubgraphCompiler, subgraph: Subgraph, *, portable: bool) -> CompiledSubgraph:
        compiled.append(subgraph)
        return CompiledSubgraph(lambda inputs: subgraph.module(*inputs), {"code": b"not to be loaded"})

    monkeypatch.setattr(SubgraphCompiler, "compile", run_as_is)
    yield compiled


def entries(cache: Path, holding: str) -> list[Path]:
    return sorted(path.parent for path in (cache / "compile").glob(f"*/{holding}"))


def greedy_reference(folder: Path, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(reference_logits(folder, prompt + tokens)[-1].argmax()))
    return tokens


def assert_right(harness: CompiledModelHarness, folder: Path) -> None:
    """Logits of a prompt in steps of several sizes, one token among them, equal transformers'."""
    prompt, request = PROMPTS[2], next(harness.requests)
    steps = [prompt[:5], prompt[5:6], prompt[6:]]
    found = torch.cat([harness.compiled_step([(request, step)], padding=n) for n, step in enumerate(steps)])
    expected = reference_logits(folder, prompt)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * float(expected.std()))


# ---- a first start


def test_each_distinct_subgraph_is_compiled_once(cold: CompiledModelHarness) -> None:
    report = cold.compile_report
    assert (report.compiled_subgraphs, report.distinct_subgraphs, report.cache_hits) == (SUBGRAPHS, SUBGRAPHS, 0)
    assert (report.subgraphs, report.plan_from_cache, report.warnings) == (LAYERS + 1, False, ())
    assert cold.progress == [(done, SUBGRAPHS) for done in (1, 2, 3)]


def test_a_compiled_model_equals_transformers_though_it_was_asked_to_trace_one_token(
    cold: CompiledModelHarness, folder: Path
) -> None:
    assert_right(cold, folder)


def test_every_size_of_step_uses_the_one_trace(cold: CompiledModelHarness) -> None:
    """Nothing may trace or compile after the start: the compiled model holds neither."""
    for size in (1, 2, 3, 64):
        tokens = [token % 100 + 3 for token in range(size)]
        found, expected = (run([(next(cold.requests), tokens)]) for run in (cold.compiled_step, cold.step))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert {type(stage.run).__module__ for stage in cold.compiled.stages if stage.kind == "op"} == {"builtins"}


def test_weights_are_shared_and_not_copied(cold: CompiledModelHarness) -> None:
    named = {tensor.data_ptr() for tensor in (*cold.model.parameters(), *cold.model.buffers())}
    assert {tensor.data_ptr() for tensor in cold.compiled.bound.values()} <= named
    caches = {cache.data_ptr() for cache in cold.kv_caches.values()}
    assert not caches & {tensor.data_ptr() for tensor in cold.compiled.bound.values()}


def test_values_are_dropped_after_their_last_use(cold: CompiledModelHarness) -> None:
    harness = cold.compiled
    kept = {*harness.bound, harness.output}
    killed = [index for kill in harness.last_uses for index in kill]
    assert len(killed) == len(set(killed))
    assert set(killed) == {index for stage in harness.stages for index in stage.inputs} - kept
    for number, kill in enumerate(harness.last_uses):
        assert not set(kill) & {index for stage in harness.stages[number + 1 :] for index in stage.inputs}


def test_artifacts_name_no_rank_and_no_temporary_place(cold: CompiledModelHarness, cache: Path) -> None:
    assert len(entries(cache, "code")) == SUBGRAPHS
    assert len(entries(cache, "plan")) == 1
    assert not list((cache / "compile").glob(".*"))
    for path in (cache / "compile").glob("*/plan"):
        assert b"rank" not in path.read_bytes()


# ---- a later start


def test_a_later_start_compiles_nothing_and_does_not_import_the_compiler(
    cold: CompiledModelHarness, folder: Path, cache: Path
) -> None:
    code = (
        "import json, sys; from pathlib import Path; from dataclasses import asdict\n"
        "from tests.workers.compile.harness import CompiledModelHarness\n"
        "model = CompiledModelHarness(Path(sys.argv[1]), sys.argv[2])\n"
        "loaded = [n for n in ('torch._dynamo', 'torch._inductor', 'triton') if n in sys.modules]\n"
        "tokens = model.greedy(json.loads(sys.argv[3]), 6)\n"
        "print(json.dumps({'report': asdict(model.compile_report), 'loaded': loaded, 'tokens': tokens}))"
    )
    arguments = [sys.executable, "-c", code, str(folder), str(cache), json.dumps(PROMPTS[0])]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loaded"] == []
    assert (found["report"]["compiled_subgraphs"], found["report"]["cache_hits"]) == (0, SUBGRAPHS)
    assert found["report"]["plan_from_cache"]
    assert found["tokens"] == greedy_reference(folder, PROMPTS[0], 6) == cold.greedy(PROMPTS[0], 6)


def test_a_later_start_gives_the_same_bits(cold: CompiledModelHarness, folder: Path, cache: Path) -> None:
    warm = CompiledModelHarness(folder, cache)
    assert warm.compile_report.plan_from_cache
    assert torch.equal(warm.compiled_step([(0, PROMPTS[0])]), cold.compiled_step([(next(cold.requests), PROMPTS[0])]))


def test_deeper_models_share_the_subgraphs(cold: CompiledModelHarness, copied: Path) -> None:
    deeper = tiny_checkpoint("llama-bias", num_hidden_layers=6)
    harness = CompiledModelHarness(deeper, copied)
    report = harness.compile_report
    assert (report.compiled_subgraphs, report.cache_hits, report.subgraphs) == (0, SUBGRAPHS, 7)
    assert_right(harness, deeper)


def damaged_plan(cache: Path) -> None:
    (entry,) = entries(cache, "plan")
    (entry / "plan").write_bytes(b"\x80")


def plan_of_another_model(cache: Path) -> None:
    from workers.compile.cache import Store

    (entry,) = entries(cache, "plan")
    plan = Plan.unpacked((entry / "plan").read_bytes())
    bound = tuple(dataclasses.replace(tensor, name=f"other.{tensor.name}") for tensor in plan.bound)
    Store(str(entry.parent)).save(entry.name, {"plan": dataclasses.replace(plan, bound=bound).packed()})


def no_plan(cache: Path) -> None:
    (entry,) = entries(cache, "plan")
    shutil.rmtree(entry)


@pytest.mark.parametrize(("damage", "warnings"), [(damaged_plan, 1), (plan_of_another_model, 1), (no_plan, 0)])
def test_a_plan_that_cannot_be_used_costs_a_trace_but_no_compilation(
    folder: Path, copied: Path, damage: Any, warnings: int
) -> None:
    damage(copied)
    harness = CompiledModelHarness(folder, copied)
    report = harness.compile_report
    assert (report.compiled_subgraphs, report.cache_hits, report.plan_from_cache) == (0, SUBGRAPHS, False)
    assert len(report.warnings) == warnings
    assert_right(harness, folder)
    assert CompiledModelHarness(folder, copied).compile_report.plan_from_cache


def truncate_a_loop(entry: Path) -> None:
    path = entry / "loop0.so"
    path.write_bytes(path.read_bytes()[:5000])


def remove_the_manifest(entry: Path) -> None:
    (entry / MANIFEST).unlink()


def hold_code_that_does_not_load(entry: Path) -> None:
    """Whole and of the right key, but of no use: as another version of Lockstep might leave it."""
    from workers.compile.cache import Store

    Store(str(entry.parent)).save(entry.name, {"code": b"\x81\xa4form\xa6python"})


@pytest.mark.parametrize("damage", [truncate_a_loop, remove_the_manifest, hold_code_that_does_not_load])
def test_a_subgraph_that_cannot_be_used_is_compiled_again(
    folder: Path, copied: Path, damage: Any, no_compiler: list[Subgraph]
) -> None:
    damage(entries(copied, "code")[0])
    harness = CompiledModelHarness(folder, copied)
    report = harness.compile_report
    assert (report.compiled_subgraphs, report.cache_hits) == (1, SUBGRAPHS - 1)
    assert len(no_compiler) == 1
    assert report.warnings
    assert_right(harness, folder)


@pytest.mark.parametrize("place", ["", "/dev/null/cache"])
def test_a_cache_that_cannot_be_written_costs_a_warning(folder: Path, place: str, no_compiler: list[Subgraph]) -> None:
    harness = CompiledModelHarness(folder, place)
    assert len(no_compiler) == SUBGRAPHS
    assert len(harness.compile_report.warnings) == bool(place)
    assert_right(harness, folder)


def test_other_sources_settings_or_machines_have_other_keys(
    cold: CompiledModelHarness, folder: Path, copied: Path, no_compiler: list[Subgraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("source_hash", "new"), ("environment", {"cpu": "another"})):
        with monkeypatch.context() as patch:
            patch.setattr(f"workers.compile.compiler.{name}", lambda _, value=value: value)
            assert CompiledModelHarness(folder, copied).compile_report.compiled_subgraphs == SUBGRAPHS
    assert CompiledModelHarness(folder, copied).compile_report.plan_from_cache


# ---- modes


@pytest.mark.parametrize("mode", [CompileMode.STOCK, CompileMode.DYNAMO_TRACE_ONCE])
def test_other_modes_give_the_same_tokens(cache: Path, mode: CompileMode) -> None:
    folder = tiny_checkpoint("llama-bias", num_hidden_layers=1)
    harness = CompiledModelHarness(folder, cache, mode)
    assert harness.compile_report.subgraphs == 1
    assert_right(harness, folder)
    traced = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for prompt in PROMPTS:
        assert harness.greedy(prompt, TOKENS) == greedy_reference(folder, prompt, TOKENS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == traced, "all sizes were compiled at the start"
    if mode is CompileMode.DYNAMO_TRACE_ONCE:
        again = CompiledModelHarness(folder, cache, mode)
        assert (again.compile_report.compiled_subgraphs, again.compile_report.plan_from_cache) == (0, True)
        assert_right(again, folder)


def test_mode_none_is_the_model(folder: Path) -> None:
    harness = CompiledModelHarness(folder, "", CompileMode.NONE)
    assert harness.compiled is harness.model
    assert (harness.compile_report.subgraphs, harness.compile_report.distinct_subgraphs) == (0, 0)


def test_bfloat16_is_as_near_to_the_truth_as_eager(cache: Path) -> None:
    stored = tiny_checkpoint("llama", dtype="bfloat16")
    exact = reference_logits(tiny_checkpoint("llama"), PROMPTS[0])
    harness = CompiledModelHarness(stored, cache)
    compiled, eager = harness.compiled_step([(0, PROMPTS[0])]), harness.step([(1, PROMPTS[0])])
    assert (compiled - exact).std() < 1.1 * (eager - exact).std()


def test_inductors_own_form_of_an_artifact_serves_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU uses, and a subgraph whose output has to be a view of its input."""
    compile_subgraph = SubgraphCompiler.compile
    monkeypatch.setattr(
        SubgraphCompiler,
        "compile",
        lambda self, subgraph, *, portable: compile_subgraph(self, subgraph, portable=False),
    )
    small = tiny_checkpoint("llama", num_hidden_layers=1)
    for hits in (0, 2):
        harness = CompiledModelHarness(small, tmp_path)
        assert (harness.compile_report.cache_hits, harness.compile_report.plan_from_cache) == (hits, hits > 0)
        assert_right(harness, small)
    assert len(entries(tmp_path, "artifact")) == 2


# ---- errors


def test_a_compiler_that_fails_is_an_error_that_says_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("workers.compile.subgraph_compiler.find_cxx", lambda: str(broken))
    with pytest.raises(CompileError, match=r"Inductor cannot compile a subgraph of the model \(.*--enforce-eager"):
        CompiledModelHarness(folder, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "compile").glob(".*"))


def test_a_model_that_branches_on_a_value_fails_at_the_start(tmp_path: Path) -> None:
    from tests.workers.compile.models import BranchesOnValue, line_of
    from tests.workers.compile.test_keys import any_config

    for mode in (CompileMode.PIECEWISE, CompileMode.DYNAMO_TRACE_ONCE, CompileMode.STOCK):
        with pytest.raises(TraceError) as caught:
            compile_model(BranchesOnValue(), mode=mode, **any_config(tmp_path))
        assert line_of(BranchesOnValue) in str(caught.value)


# ---- several processes


@pytest.mark.timeout(300)
def test_ranks_of_one_shape_share_the_work(tmp_path: Path) -> None:
    """Every subgraph is compiled by one rank while the other waits for it; then none is."""
    folder = tiny_checkpoint("llama", vocab_size=1024, intermediate_size=256)
    arguments = [str(folder), str(tmp_path), "PIECEWISE", PROMPTS[:2], TOKENS]
    expected = [greedy_reference(folder, prompt, TOKENS) for prompt in PROMPTS[:2]]
    for compiled in (SUBGRAPHS, 0):
        results = run_ranks(compile_and_generate, 2, *arguments, timeout=280.0, collective_timeout=270.0)
        reports = [result["report"] for result in results]
        assert sum(report["compiled_subgraphs"] for report in reports) == compiled
        assert [report["distinct_subgraphs"] for report in reports] == [SUBGRAPHS] * 2
        assert [report["subgraphs"] for report in reports] == [LAYERS + 1] * 2
        assert all(result["tokens"] == expected for result in results)
    assert all(report["plan_from_cache"] for report in reports)
