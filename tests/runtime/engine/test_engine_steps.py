"""The engine's two plans under way, and what happens to them: late ends, aborts, failures and restarts."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from runtime.common.errors import (
    ConfigError,
    EngineError,
    LockstepError,
    ProtocolError,
    RankDiedError,
    RankTimeoutError,
)
from runtime.common.protocol import StepPlan, StepResult
from runtime.common.sampling_params import SamplingParams
from runtime.engine.request import RequestOutput
from runtime.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.runtime.engine.engine_bench import EOS, VOCAB, Bench, byte_tokenizer, text_ids
from tests.runtime.engine.fake_executor import expected_output


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def died(rank: int = 1, signal: int = 9) -> RankDiedError:
    return RankDiedError(rank=rank, returncode=-signal, stage="step 7")


# ---- the order of things


def test_text_is_made_while_the_ranks_have_the_next_plan(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tokenizer)
    happened: list[str] = []

    def record(target: object, name: str, what: str) -> None:
        original = getattr(target, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            happened.append(what)
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, recorded)

    record(bench.executor, "submit", "submit")
    record(bench.executor, "collect", "collect")
    record(IncrementalDetokenizer, "append", "text")
    bench.add(text_ids("x"), text_ids("Hello"), max_tokens=5)
    steps: list[list[str]] = []
    while bench.engine.has_work:
        bench.engine.step()
        steps.append(happened[:])
        happened.clear()
    assert steps == [
        ["submit", "submit", "collect", "submit", "text"],
        ["collect", "submit", "text"],
        ["collect", "submit", "text"],
        ["collect", "text"],
        ["collect", "text"],
    ]


def test_an_end_is_known_before_the_next_plan_is_made() -> None:
    """By ids: the plan after the result leaves the request out. The one before it could not know."""
    bench = Bench()
    bench.add([1], [9, EOS[0]], max_tokens=50)
    bench.add([3], max_tokens=6, ignore_eos=True)
    bench.run()
    scheduled = [{share.req_id for share in plan.scheduled} for plan in bench.executor.plans]
    assert scheduled == [{0, 1}, {0, 1}, {0, 1}, {1}, {1}, {1}]


def test_a_stop_string_is_found_two_plans_late_and_ends_there(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    req_id = bench.add(text_ids("x"), text_ids("say STOP and more"), max_tokens=50, stop="STOP", logprobs=0)
    [*_, last] = bench.run()[req_id]
    assert (last.text, last.finish_reason) == ("say ", "stop")
    assert bytes(last.token_ids) == b"say STOP"
    assert last.logprobs is not None and len(last.logprobs) == 8
    assert len(bench.executor.plans) == 8 + 2, "two more tokens were computed, and ignored"
    assert bench.executor.live == {0}, "the ranks hear of it with the next plan"
    assert bench.one(text_ids("y"), text_ids("z"), max_tokens=1).text == "z"
    assert bench.executor.live <= {1}


def test_nothing_is_left_under_way_when_all_have_ended() -> None:
    bench = Bench()
    bench.add([1], [EOS[0]], max_tokens=50)
    [output] = bench.engine.step()
    assert output.finished and not bench.engine.has_unfinished
    assert bench.engine.has_work and bench.executor.num_outstanding == 1
    assert bench.engine.step() == []
    assert not bench.engine.has_work and bench.executor.num_outstanding == 0


def test_an_abort_while_plans_are_under_way(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    gone = bench.add(text_ids("x"), text_ids("Hello"), max_tokens=50)
    stays = bench.add(text_ids("y"), text_ids("World"), max_tokens=5)
    bench.engine.step()
    last = bench.engine.abort(gone)
    assert last is not None and last.text == "H"
    outputs = bench.run()
    assert outputs.keys() == {stays} and outputs[stays][-1].text == "World"
    assert last.text == "H" and last.token_ids == text_ids("H"), "later tokens are ignored"


def test_outputs_share_the_transcript_and_merge(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    req_id = bench.add(text_ids("x"), text_ids("abcdef"), max_tokens=6, logprobs=0)
    first, second, third, *_ = bench.run()[req_id]
    merged = third.merged_with(second)
    assert merged.outputs[0].new_text == "bc" and bytes(merged.outputs[0].new_token_ids) == b"bc"
    assert [entry.token_id for entry in merged.outputs[0].new_logprobs or ()] == text_ids("bc")
    assert (merged.text, third.merged_with(first).outputs[0].new_text) == ("abc", "abc")
    assert merged.outputs[0].generated is first.outputs[0].generated


def test_only_the_last_output_where_no_other_is_wanted(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    prompts = {"Hello": {}, "two words": {"stop": "wo"}, "caf\u00e9": {"n": 2}}
    req_ids = {}
    for number, (text, settings) in enumerate(prompts.items()):
        ids = list(text.encode())
        req_ids[text] = bench.add([number + 1], ids, max_tokens=len(ids), final_only=True, **settings)
    outputs = bench.run()
    hello, stopped, several = (outputs[req_ids[text]] for text in prompts)
    assert [output.text for output in hello] == ["Hello"]
    assert hello[0].outputs[0].new_text == "Hello" and len(hello[0].outputs[0].new_token_ids) == 5
    assert (stopped[-1].text, stopped[-1].finish_reason) == ("t", "stop"), "a stop string has to be looked for"
    assert len(several) == 1 and several[0].outputs[0].text == "caf\u00e9"
    assert bench.engine.stats.finished == {"stop": 1, "length": 3, "abort": 0, "error": 0}
    aborted = bench.add([9], list(b"never seen"), max_tokens=10, final_only=True)
    for _ in range(3):
        assert bench.engine.step() == []
    last = bench.engine.abort(aborted)
    assert last is not None and last.text == "nev"


def test_text_that_cannot_be_made_fails_one_request(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tokenizer)
    bad = bench.add(text_ids("x"), text_ids("ab!cd"), max_tokens=5)
    good = bench.add(text_ids("y"), text_ids("vwxyz"), max_tokens=5)
    original = IncrementalDetokenizer.append

    def append(self: IncrementalDetokenizer, token_ids: Sequence[int]) -> str:
        if ord("!") in token_ids:
            raise ZeroDivisionError("no such text")
        return original(self, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "append", append)
    outputs = bench.run()
    assert (outputs[bad][-1].finish_reason, outputs[bad][-1].text) == ("error", "ab")
    assert "ZeroDivisionError: no such text" in outputs[bad][-1].error
    assert (outputs[good][-1].finish_reason, outputs[good][-1].text) == ("length", "vwxyz")
    assert bench.engine.failure is None and bench.engine.stats.finished["error"] == 1


def test_prompt_logprobs_that_are_not_finite_fail_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 leaves them out, and gives an error instead of the first token."""
    bench = Bench(max_num_batched_tokens=8)
    bad, good = (bench.add([first] * 20, max_tokens=2, prompt_logprobs=0, ignore_eos=True) for first in (1, 2))
    bench.executor.broken = {0}
    collect = bench.executor.collect

    def collect_what_is_finite() -> StepResult:
        result = collect()
        finite = tuple(part for part in result.prompt_logprobs if (part.req_id, part.start) != (0, 9))
        return replace(result, prompt_logprobs=finite)

    monkeypatch.setattr(bench.executor, "collect", collect_what_is_finite)
    outputs = bench.run()
    assert (outputs[bad][-1].finish_reason, len(outputs[bad][-1].prompt_logprobs or ())) == ("error", 9)
    assert (outputs[good][-1].finish_reason, len(outputs[good][-1].prompt_logprobs or ())) == ("length", 20)
    assert bench.engine.failure is None


# ---- restarts


def make_requests(bench: Bench, count: int = 12) -> dict[int, tuple[list[int], dict[str, Any]]]:
    """Prompts of several lengths, some of which begin alike, each with a seed, some of several samples."""
    chance = random.Random(5)
    made: dict[int, tuple[list[int], dict[str, Any]]] = {}
    for number in range(count):
        prompt = [1, 2, 3, 4] * chance.randrange(0, 4) + [
            chance.randrange(VOCAB) for _ in range(chance.randrange(1, 30))
        ]
        how = {"max_tokens": chance.randrange(1, 25), "seed": number, "ignore_eos": True, "n": 1 + (number % 5 == 0)}
        made[bench.add(prompt, **how)] = (prompt, how)
    return made


def check_outputs(
    made: dict[int, tuple[list[int], dict[str, Any]]], outputs: dict[int, list[RequestOutput]], bench: Bench
) -> None:
    """Every request has ended with the tokens of an undisturbed run, each reported once."""
    assert outputs.keys() == made.keys()
    for req_id, (prompt, how) in made.items():
        last = outputs[req_id][-1]
        assert last.finished and last.finish_reason == "length"
        expected = expected_output(prompt, SamplingParams(**how), VOCAB, how["max_tokens"])
        assert last.token_ids == expected
        for sample in range(how["n"]):
            chunks = [t for output in outputs[req_id] for t in output.outputs[sample].new_token_ids]
            assert chunks == last.outputs[sample].token_ids and len(chunks) == how["max_tokens"]
    assert bench.engine.failure is None


@pytest.mark.parametrize("failing", [(1,), (2,), (3,), (4, 9), (5, 7, 9), (12, 14, 20)])
@pytest.mark.parametrize("num_blocks", [256, 24])
def test_a_restart_loses_and_repeats_nothing(
    failing: tuple[int, ...], num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(num_blocks=num_blocks, max_restarts=3)
    bench.executor.failing_steps = {step: died() for step in failing}
    made = make_requests(bench)
    with caplog.at_level(logging.ERROR, "lockstep"):
        check_outputs(made, bench.run(), bench)
    assert bench.executor.restarts == bench.engine.snapshot().restarts == len(failing)
    assert [record.message.count("SIGKILL") for record in caplog.records] == [1] * len(failing)


@pytest.mark.parametrize("submits", [1, 2, 3, 10])
def test_a_group_that_fails_when_it_is_sent_a_plan(submits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a step, the second of a step, and the one between a result and its text."""
    bench = Bench()
    submit, calls = bench.executor.submit, 0

    def failing(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if calls == submits:
            bench.executor.submit_failure = died()
        submit(plan)

    monkeypatch.setattr(bench.executor, "submit", failing)
    made = make_requests(bench)
    check_outputs(made, bench.run(), bench)
    assert bench.executor.restarts == 1


def test_text_and_prompt_logprobs_go_on_after_a_restart(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_num_batched_tokens=8)
    prompt = [(5 * number) % VOCAB for number in range(30)]
    bench.executor.failing_steps = {3: died(), 6: died()}
    req_id = bench.add(prompt, max_tokens=12, seed=3, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    outputs = bench.run()[req_id]
    last = outputs[-1]
    assert last.prompt_logprobs is not None and last.prompt_logprobs[0] is None
    assert [e.token_id for e in last.prompt_logprobs[1:] if e is not None] == prompt[1:]
    assert last.logprobs is not None and [e.token_id for e in last.logprobs] == last.token_ids
    assert last.token_ids == expected_output(prompt, SamplingParams(seed=3), VOCAB, 12)
    undisturbed = Bench(tokenizer).one(prompt, max_tokens=12, seed=3, ignore_eos=True)
    assert "".join(output.outputs[0].new_text for output in outputs) == last.text == undisturbed.text


def test_a_restart_that_fails_counts_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(max_restarts=3)
    bench.executor.failing_steps = {2: died()}
    bench.executor.restart_failures = [
        RankTimeoutError("no answer", rank=0, stage="weights"),
        EngineError("the cluster has no room"),
    ]
    made = make_requests(bench)
    check_outputs(made, bench.run(), bench)
    assert bench.executor.restarts == 1
    logged = "\n".join(record.message for record in caplog.records)
    assert "during weights: no answer" in logged and "no room" in logged and "restart 3 of 3" in logged


@pytest.mark.parametrize(
    ("failures", "refusals", "rank"),
    [
        ([2, 4, 6], [], 3),
        ([2], [died(0, 15), died(2, 11)], 2),
        ([2, 5], [EngineError("no room")], 3),
        ([2], [EngineError("only once"), EngineError("only once")], 3),
        ([2], [ConfigError("no such device")], 3),
    ],
)
def test_restarts_used_up_fail_every_request_with_the_cause(
    failures: list[int], refusals: list[LockstepError], rank: int
) -> None:
    bench = Bench(max_restarts=2, max_num_seqs=4)
    bench.executor.failing_steps = {step: died(rank=3) for step in failures}
    bench.executor.restart_failures = list(refusals)
    req_ids = [bench.add([number], max_tokens=50, ignore_eos=True) for number in range(6)]
    outputs: dict[int, RequestOutput] = {}
    while bench.engine.has_work:
        outputs.update((output.req_id, output) for output in bench.engine.step() if output.finished)
    assert list(outputs) == req_ids
    assert all(output.finish_reason == "error" and f"rank {rank}" in output.error for output in outputs.values())
    failure = bench.engine.failure
    assert isinstance(failure, RankDiedError) and failure.rank == rank and failure.exit_code > 128
    assert f"rank {rank}" in bench.engine.snapshot().failure
    assert not bench.engine.has_work and bench.engine.scheduler.num_running == 0
    for call in (bench.engine.step, lambda: bench.add([1]), lambda: bench.engine.wait(0)):
        with pytest.raises(RankDiedError, match=f"rank {rank}"):
            call()
    assert bench.engine.abort(req_ids[0]) is None
    bench.engine.close()
    assert bench.executor.closed == 1


def test_what_was_said_before_the_last_failure_is_reported(tokenizer: Tokenizer) -> None:
    """The plan between a result and its text fails: the text of the result is not lost with it."""
    bench = Bench(tokenizer, max_restarts=0)
    req_id = bench.add(text_ids("x"), text_ids("Hello"), max_tokens=50)
    ends = bench.add(text_ids("y"), text_ids("W"), max_tokens=1)
    collect = bench.executor.collect

    def collect_and_break() -> StepResult:
        bench.executor.submit_failure = died()
        return collect()

    bench.executor.collect = collect_and_break
    outputs = {output.req_id: output for output in bench.engine.step()}
    assert (outputs[req_id].text, outputs[req_id].finish_reason) == ("H", "error")
    assert (outputs[ends].text, outputs[ends].finish_reason) == ("W", "length")
    assert isinstance(bench.engine.failure, RankDiedError)


def test_old_failures_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr("runtime.engine.engine.time.monotonic", lambda: clock)
    bench = Bench(max_restarts=1)
    bench.add([1], max_tokens=30, ignore_eos=True)
    for step in (2, 8, 14):
        bench.executor.failing_steps = {step: died()}
        while bench.executor.failing_steps:
            bench.engine.step()
        clock += 601.0
    assert bench.engine.failure is None and bench.executor.restarts == 3
    bench.executor.failing_steps = {20: died(), 22: died()}
    with pytest.raises(RankDiedError):
        while True:
            bench.engine.step()


def test_what_no_longer_fits_fails_alone() -> None:
    bench = Bench(num_blocks=40)
    large = bench.add([1] * 60, max_tokens=60, ignore_eos=True)
    small = bench.add([1] * 10, max_tokens=10, ignore_eos=True, seed=4)
    bench.engine.step()
    bench.executor.num_blocks = 20
    bench.executor.failing_steps = {2: died()}
    outputs = bench.run()
    assert (outputs[large][-1].finish_reason, len(outputs[large][-1].token_ids)) == ("error", 1)
    assert "smaller KV cache" in outputs[large][-1].error and "needs 30 KV blocks" in outputs[large][-1].error
    assert outputs[small][-1].token_ids == expected_output([1] * 10, SamplingParams(seed=4), VOCAB, 10)
    assert bench.engine.max_total_tokens == 81


def test_sleep_ends_with_the_wakeup_and_notices_a_death() -> None:
    bench = Bench(max_restarts=1)
    wakeup = os.eventfd(0)
    try:
        assert not bench.engine.wait(wakeup, 0.0)
        os.eventfd_write(wakeup, 1)
        assert bench.engine.wait(wakeup, None)
        bench.executor.failure = died()
        assert not bench.engine.wait(wakeup, None), "restarted: there may be something to look at"
        assert (bench.executor.restarts, bench.engine.failure) == (1, None)
        assert bench.one([1], max_tokens=2, ignore_eos=True).finish_reason == "length"
        bench.executor.failure = died()
        with pytest.raises(RankDiedError):
            bench.engine.wait(wakeup, None)
        assert isinstance(bench.engine.failure, RankDiedError)
    finally:
        os.close(wakeup)


# ---- what no restart fixes


def test_an_answer_to_another_step_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.add([1], max_tokens=5)
    monkeypatch.setattr(bench.executor, "collect", lambda: StepResult(7, ()))
    [output] = bench.engine.step()
    assert output.finish_reason == "error" and "step 7" in output.error
    with pytest.raises(ProtocolError, match="step 7"):
        bench.engine.step()
    assert bench.executor.restarts == 0


def test_an_internal_error_ends_the_engine_with_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.add([1], max_tokens=5)
    monkeypatch.setattr(bench.engine.scheduler, "update", lambda _result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.engine.step()
    with pytest.raises(EngineError, match=r"internal error .*ZeroDivisionError"):
        bench.engine.step()


def test_a_scheduler_that_plans_nothing_is_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.add([1], max_tokens=5)
    monkeypatch.setattr(bench.engine.scheduler, "schedule", lambda: None)
    [output] = bench.engine.step()
    assert output.finish_reason == "error" and "none schedulable" in output.error
