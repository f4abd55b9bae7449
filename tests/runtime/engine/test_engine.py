"""The engine over a fake executor: what is refused, when requests end, what users see of them, and failure."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.common.config import MAX_SEED
from runtime.common.errors import EngineClosedError, EngineError, RequestError
from runtime.common.sampling_params import SamplingParams
from runtime.engine.request import GenerateRequest, derive_seed
from runtime.text.tokenizer import Tokenizer
from tests.runtime.engine.engine_bench import VOCAB, Bench, byte_tokenizer, text_ids
from tests.runtime.engine.fake_executor import expected_output


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


# ---- what is refused


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "no tokens"),
        ([1, 300], {}, r"token id 300 at position 1; .* 300 tokens, 0 to 299"),
        ([-1], {}, "token id -1 at position 0"),
        ([1] * 200, {}, r"prompt of 200 tokens .*max_model_len is 200, so it may have 199"),
        ([1] * 10_000, {}, "prompt of 10000 tokens"),
        ([1] * 150, {"min_tokens": 51, "max_tokens": 60}, r"min_tokens 51 .* 50 tokens .*150"),
        ([1], {"stop_token_ids": (4, 300)}, r"stop_token_ids has token id 300 at position 1"),
        (["a"], {}, "whole numbers"),
        ([1.5], {}, "whole numbers"),
        (5, {}, "whole numbers"),
        ([1], {"stop": "x"}, "stop strings need a tokenizer"),
        ([1], {"logit_bias": {7: 1.0, 300: 1.0}}, "logit_bias has token id 300 at position 1"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias has token id -1"),
        ("1 2", {}, "whole numbers; got str"),
    ],
)
def test_refuses_requests_with_numbers_and_goes_on(prompt: Any, params: dict[str, Any], message: str) -> None:
    bench = Bench()
    with pytest.raises(RequestError, match=message):
        bench.add(prompt, **params)
    assert not bench.engine.has_unfinished
    assert bench.one([1], max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"params": SamplingParams(stop_token_ids=(300,))}, "stop_token_ids"),
        ({"params": SamplingParams(logit_bias={300: 1.0})}, "logit_bias"),
        ({"params": SamplingParams(min_tokens=199, max_tokens=199), "prompt_token_ids": [1, 2]}, "min_tokens"),
        ({"params": SamplingParams(stop="x")}, "stop"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"prompt_token_ids": [300]}, None),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        Bench().engine.add(GenerateRequest(**({"prompt_token_ids": [1]} | fields)))
    assert caught.value.param == param


def test_refuses_what_never_fits_the_cache() -> None:
    bench = Bench(num_blocks=10)
    assert bench.engine.max_total_tokens == 41
    with pytest.raises(RequestError, match=r"needs 11 KV blocks .* has 10"):
        bench.add([1] * 20, max_tokens=22, n=3)
    assert not bench.engine.has_unfinished and bench.engine.scheduler.num_waiting == 0
    assert len(bench.one([1] * 20, max_tokens=21, ignore_eos=True).token_ids) == 21


def test_takes_ids_from_arrays() -> None:
    import numpy

    output = Bench().one(numpy.array([7, 8]), max_tokens=1)
    assert output.prompt_token_ids == (7, 8) and type(output.prompt_token_ids[0]) is int


# ---- when a sample ends


@pytest.mark.parametrize(
    ("script", "params", "count", "reason"),
    [
        ([9, 9, 9, 9], {"max_tokens": 3}, 3, "length"),
        ([9, 5, 9], {"max_tokens": 3}, 2, "stop"),
        ([9, 9, 2], {"max_tokens": 3}, 3, "stop"),
        ([9, 2, 5, 9], {"max_tokens": 4, "ignore_eos": True}, 4, "length"),
        ([9, 8, 7], {"max_tokens": 9, "stop_token_ids": (7, 8)}, 2, "stop"),
        ([2, 8, 9, 8], {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (8,)}, 2, "stop"),
        ([8, 8, 8, 8], {"max_tokens": 9, "min_tokens": 2, "stop_token_ids": (8,)}, 3, "stop"),
    ],
)
def test_ends(script: list[int], params: dict[str, Any], count: int, reason: str) -> None:
    output = Bench().one([1, 2, 3], script, **params)
    assert (output.token_ids, output.finish_reason, output.finished) == (script[:count], reason, True)


def test_max_tokens_is_cut_to_the_models_length() -> None:
    bench = Bench(max_model_len=20)
    output = bench.one([1] * 15, max_tokens=1000, ignore_eos=True)
    assert (len(output.token_ids), output.finish_reason) == (5, "length")


def test_a_row_that_is_not_finite_fails_its_request_only() -> None:
    bench = Bench()
    good, bad = bench.add([1], max_tokens=5, ignore_eos=True), bench.add([1], max_tokens=5, ignore_eos=True)
    bench.engine.step()  # Three plans are made: the third computes what comes after the third token.
    bench.executor.broken = {bad}
    outputs = bench.run()
    failed = outputs[bad][-1]
    assert (failed.finish_reason, failed.error, len(failed.token_ids)) == ("error", "not finite", 3)
    assert bench.engine.snapshot().broken == 1
    assert outputs[good][-1].finish_reason == "length"
    assert bench.engine.stats.finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    assert bench.engine.failure is None


# ---- text


@pytest.mark.parametrize(
    ("said", "params", "text", "reason"),
    [
        ("Hello, world", {}, "Hello, world", "length"),
        ("Hello, world", {"stop": ("lo, w",)}, "Hel", "stop"),
        ("Hello, world", {"stop": ("world!", "d")}, "Hello, worl", "stop"),
        ("Hello, world", {"stop": ("worldly",)}, "Hello, world", "length"),
        ("Hello, world", {"stop": ("l",), "min_tokens": 4}, "Hello, wor", "stop"),
        ("Hello", {"stop_token_ids": (ord("o"),)}, "Hell", "stop"),
        ("caf\u00e9 \U0001f642", {}, "caf\u00e9 \U0001f642", "length"),
        ("caf\u00e9 \U0001f642", {"max_tokens": 8}, "caf\u00e9 \ufffd", "length"),
    ],
)
def test_text(tokenizer: Tokenizer, said: str, params: dict[str, Any], text: str, reason: str) -> None:
    output = Bench(tokenizer).one(text_ids("x"), text_ids(said), **{"max_tokens": len(said.encode()), **params})
    assert (output.text, output.finish_reason) == (text, reason)
    assert bytes(output.token_ids) == said.encode()[: len(output.token_ids)]


def test_pieces_make_the_whole(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    said = "A\u00e9\U0001f642 stop here STOP and on"
    req_id = bench.add(text_ids("x"), text_ids(said), prompt_text="x", max_tokens=100, stop=("STOP",), logprobs=1)
    outputs = bench.run()[req_id]
    texts = [output.outputs[0].new_text for output in outputs]
    assert "".join(texts) == outputs[-1].text == said[: said.index("STOP")]
    assert not any("\ufffd" in text or "S" in text for text in texts)
    assert [t for output in outputs for t in output.outputs[0].new_token_ids] == outputs[-1].token_ids
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert all(output.prompt == "x" for output in outputs)
    # An output stays what it was when it was made, whatever came after.
    assert [output.text for output in outputs[:2]] == ["A", "A"]
    assert [len(output.token_ids) for output in outputs] == list(range(1, len(outputs) + 1))


def test_logprobs_are_one_for_each_token() -> None:
    bench = Bench()
    with_them, without = bench.add([1], max_tokens=4, ignore_eos=True, logprobs=1), bench.add([1], max_tokens=4)
    outputs = bench.run()
    entries = outputs[with_them][-1].logprobs
    assert entries is not None
    assert [entry.token_id for entry in entries] == outputs[with_them][-1].token_ids
    assert all(entry.top == ((entry.token_id, entry.logprob),) for entry in entries)
    assert outputs[without][-1].logprobs is None


@pytest.mark.parametrize(("size", "budget"), [(1, 64), (2, 64), (30, 8), (30, 64)])
def test_prompt_logprobs_are_complete_whatever_the_chunks(size: int, budget: int) -> None:
    bench = Bench(max_num_batched_tokens=budget)
    prompt = [(7 * number) % VOCAB for number in range(size)]
    bench.add(prompt, max_tokens=1)  # What it leaves in the prefix cache must not leave gaps.
    bench.run()
    req_id, without = bench.add(prompt, max_tokens=3, prompt_logprobs=1, n=2), bench.add(prompt, max_tokens=1)
    outputs = bench.run()
    for output in outputs[req_id]:
        first, *entries = output.prompt_logprobs or ["none"]
        assert first is None
        assert [(e.token_id, e.logprob, e.top) for e in entries] == [(t, -t, ((t, -t),)) for t in prompt[1:]]  # type: ignore[union-attr]
    assert outputs[without][-1].prompt_logprobs is None
    wanted = [new.sampling.prompt_logprobs for plan in bench.executor.plans for new in plan.new if new.req_id in (1, 2)]
    assert wanted == [1, None], "one sample reports for all"


# ---- seeds and samples


def test_seeds_come_from_the_config_and_the_order() -> None:
    def seeds(config_seed: int, *given: int | None) -> list[int | None]:
        bench = Bench(seed=config_seed)
        for seed in given:
            bench.add([1], max_tokens=1, seed=seed)
        bench.run()
        return [new.sampling.seed for plan in bench.executor.plans for new in plan.new]

    assert seeds(0, None, None, 7) == seeds(0, None, None, 7)
    assert seeds(0, None, None)[0] != seeds(0, None, None)[1]
    assert seeds(0, None) != seeds(1, None)
    assert seeds(0, None, 7, 7)[1:] == [7, 7]
    assert seeds(3, 9, None)[1] == seeds(3, None, None)[1], "a seed of one request changes none of another"


def test_derived_seeds_are_in_range_and_differ() -> None:
    seeds = {derive_seed(seed, number) for seed in (0, 1, MAX_SEED) for number in range(1000)}
    assert len(seeds) == 3000 and all(0 <= seed <= MAX_SEED for seed in seeds)


@pytest.mark.parametrize("caching", [True, False])
def test_samples_share_the_blocks_of_their_prompt(caching: bool) -> None:
    """Also without prefix caching, where no other request does."""
    bench = Bench(enable_prefix_caching=caching, num_blocks=24)
    prompt = list(range(40))
    several, alone = bench.add(prompt, max_tokens=2, n=4, ignore_eos=True), bench.add(prompt, max_tokens=2)
    outputs = bench.run()
    computed = {new.req_id: len(new.token_ids) - new.num_computed for plan in bench.executor.plans for new in plan.new}
    assert computed == {0: 40, 1: 4, 2: 4, 3: 4, 4: 4 if caching else 40}
    assert outputs[several][-1].num_cached_tokens == 0
    assert outputs[alone][-1].num_cached_tokens == (36 if caching else 0)


def test_salts_keep_requests_apart() -> None:
    bench = Bench()
    prompt, params = list(range(9)), SamplingParams(max_tokens=1)
    cached: list[int] = []
    for salt in ("", "a", "a", "\ud800", ""):
        bench.engine.add(GenerateRequest(prompt, params, cache_salt=salt))
        [[output]] = bench.run().values()
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 8, 0, 8]


def test_priority_goes_first() -> None:
    bench = Bench(max_num_seqs=1)
    for priority in (0, 5, -3, 0):
        bench.engine.add(GenerateRequest([1], SamplingParams(max_tokens=1), priority=priority))
    assert list(bench.run()) == [2, 0, 3, 1]


@pytest.mark.parametrize(
    "how", [{"priority": 2**31}, {"priority": True}, {"priority": "1"}, {"cache_salt": 5}, {"cache_salt": "x" * 1025}]
)
def test_refuses_places_in_the_queue_that_do_not_exist(how: dict[str, Any]) -> None:
    bench = Bench()
    with pytest.raises(RequestError, match=next(iter(how))):
        bench.engine.input_processor.process(GenerateRequest([1], SamplingParams(), **how))
    assert not bench.engine.has_work


def test_n_samples_of_one_prompt() -> None:
    bench = Bench()
    alone = bench.one([4, 5], max_tokens=6, seed=11, ignore_eos=True)
    req_id = bench.add([4, 5], max_tokens=6, seed=11, n=3, ignore_eos=True)
    produced = bench.run()[req_id]
    last = produced[-1]
    assert [sample.index for sample in last.outputs] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in last.outputs}) == 3
    assert last.token_ids == alone.token_ids
    assert [output.finished for output in produced] == [False] * 5 + [True]
    for sample in range(3):
        chunks = [t for output in produced for t in output.outputs[sample].new_token_ids]
        assert chunks == last.outputs[sample].token_ids


def test_samples_end_one_by_one() -> None:
    bench = Bench()
    req_id = bench.add([4], max_tokens=6, n=2, ignore_eos=False)
    bench.executor.scripted = {0: [9, 2], 1: [9, 9, 9, 9, 9, 9]}
    produced = bench.run()[req_id]
    assert [sample.finish_reason for sample in produced[-1].outputs] == ["stop", "length"]
    assert [output.finished for output in produced] == [False] * 5 + [True]
    assert produced[3].outputs[0].new_token_ids == ()


# ---- many requests


def test_pressure_changes_no_output() -> None:
    """Few blocks: requests are preempted again and again, and say what they say with plenty."""
    generator = random.Random(1)
    prompts = [[generator.randrange(VOCAB) for _ in range(generator.randrange(1, 30))] for _ in range(40)]
    params = [{"max_tokens": generator.randrange(1, 50), "seed": number} for number in range(40)]
    results: list[list[list[int]]] = []
    for num_blocks in (1000, 21):
        bench = Bench(num_blocks=num_blocks)
        req_ids = [bench.add(prompt, **how) for prompt, how in zip(prompts, params, strict=True)]
        outputs = bench.run()
        results.append([outputs[req_id][-1].token_ids for req_id in req_ids])
    assert bench.engine.scheduler.num_preemptions >= 20
    assert results[0] == results[1]
    for prompt, how, tokens in zip(prompts, params, results[0], strict=True):
        assert tokens == expected_output(prompt, SamplingParams(**how), VOCAB, len(tokens))


def test_stats_count() -> None:
    bench = Bench()
    bench.add([1] * 10, max_tokens=3, ignore_eos=True)
    bench.add([7] * 5, max_tokens=2, ignore_eos=True, n=2)
    bench.run()
    stats = bench.engine.stats
    assert (stats.requests, stats.prompt_tokens, stats.generated_tokens) == (2, 15, 7)
    assert stats.computed_tokens == 10 + 2 + (5 + 1) + (1 + 1), "the second sample finds its prompt's first block"
    assert (stats.steps, stats.finished["length"]) == (3, 3)
    assert stats.step_seconds > 0 and stats.driver_seconds > 0 and stats.model_seconds == pytest.approx(3e-6)


def test_a_snapshot_says_what_is_there_and_what_was(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_num_seqs=2, num_blocks=16)
    prompts = [[number] * 9 for number in (1, 1, 8)]
    for prompt in prompts:
        bench.add(prompt, max_tokens=3, ignore_eos=True)
    bench.engine.step()
    now = bench.engine.snapshot()
    assert (now.num_running, now.num_waiting, now.requests, now.prompt_tokens) == (2, 1, 3, 27)
    assert now.kv_usage == 4 / 16, "two of their three blocks are the same two"
    assert (now.prefix_queried_tokens, now.prefix_hit_tokens) == (18, 8)
    bench.run()
    later = bench.engine.snapshot()
    assert (later.num_running, later.num_waiting, later.kv_usage, later.generated_tokens) == (0, 0, 0.0, 9)
    assert (later.finished["length"], now.finished["length"], later.failure) == (3, 0, "")
    bench.engine.close()
    assert "closed" in bench.engine.snapshot().failure


def test_times_are_in_order() -> None:
    bench = Bench()
    req_id = bench.add([1], max_tokens=3, ignore_eos=True)
    first, *_, last = bench.run()[req_id]
    assert first.times.first_token is not None and last.times.finished is not None
    assert first.times.scheduled is not None
    assert first.times.arrived <= first.times.scheduled <= first.times.first_token <= last.times.finished
    assert (first.times.finished, last.times.first_token) == (None, first.times.first_token)


# ---- abort, failure, close


def test_abort_frees_blocks_and_gives_what_there_is(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_num_seqs=2, max_num_batched_tokens=64)
    running = bench.add(text_ids("x"), text_ids("Hello"), max_tokens=50, n=2)
    waiting = bench.add(text_ids("y"), max_tokens=50)
    other = bench.add(text_ids("z"), text_ids("abc"), max_tokens=3)
    bench.engine.step()
    output, never_ran = bench.engine.abort(running), bench.engine.abort(waiting)
    assert output is not None and never_ran is not None
    assert (output.text, output.finish_reason, output.finished) == ("H", "abort", True), "two tokens are under way"
    assert (never_ran.token_ids, never_ran.finish_reason) == ([], "abort")
    assert bench.engine.scheduler.pool.num_used == 0
    assert bench.engine.abort(running) is None and bench.engine.abort(99) is None
    assert bench.run()[other][-1].text == "abc"
    assert bench.engine.stats.finished == {"stop": 0, "length": 1, "abort": 3, "error": 0}


def test_an_interrupted_step_ends_the_engine() -> None:
    bench = Bench()
    req_id = bench.add([1], max_tokens=5)
    bench.executor.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.engine.step()
    with pytest.raises(EngineError, match="interrupted"):
        bench.engine.step()
    aborted = bench.engine.abort(req_id)
    assert aborted is not None and aborted.finish_reason == "abort"


def test_close_ends_everything_once_and_for_all() -> None:
    bench = Bench()
    bench.add([1], max_tokens=5)
    bench.engine.step()
    bench.engine.close()
    bench.engine.close()
    assert bench.executor.closed == 2 and bench.engine.scheduler.pool.num_used == 0
    with pytest.raises(EngineClosedError, match="closed"):
        bench.add([1])


def test_takes_only_a_resolved_config() -> None:
    with pytest.raises(EngineError, match="resolve"):
        Bench(max_model_len=None)
