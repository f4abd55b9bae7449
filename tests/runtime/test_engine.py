"""The engine over a fake executor: what is refused, when requests end, what users see of them, and failure."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from runtime.config import MAX_SEED, EngineConfig, SamplingParams
from runtime.engine import Engine
from runtime.errors import EngineClosedError, EngineError, ProtocolError, RankDiedError, RequestError
from runtime.model_config import ModelConfig
from runtime.protocol import StepResult
from runtime.request import RequestOutput, derive_seed
from runtime.tokenizer import Tokenizer
from tests.runtime.fake_executor import FakeExecutor, expected_output

VOCAB = 300
EOS = (2, 5)
MODEL = ModelConfig("LlamaForCausalLM", 8, 8, 1, 1, 1, 8, VOCAB, 4096, eos_token_ids=EOS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token for each byte, in the order of the bytes."""
    folder: Path = tmp_path_factory.mktemp("bytes")
    # The byte-level alphabet writes printable bytes as they are, and the others as letters from 256 on, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    backend = Backend(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


class Bench:
    """An engine over a fake executor."""

    def __init__(self, tokenizer: Tokenizer | None = None, *, num_blocks: int = 256, **settings: Any) -> None:
        sizes = {"max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4} | settings
        self.config = EngineConfig(**sizes)
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            vocab_size=VOCAB,
        )
        self.engine = Engine(self.config, MODEL, tokenizer, self.executor, num_blocks)
        self._num_samples = 0

    def add(
        self, prompt: list[int], script: list[int] | None = None, prompt_text: str | None = None, **params: Any
    ) -> int:
        """Queue a prompt; with a script, the fake model says that instead of what it would."""
        req_id = self.engine.add_request(prompt, SamplingParams(**params), prompt=prompt_text)
        if script is not None:
            self.executor.scripted[self._num_samples] = list(script)
        self._num_samples += params.get("n", 1)
        return req_id

    def run(self) -> dict[int, list[RequestOutput]]:
        """All outputs of all requests, by request."""
        outputs: dict[int, list[RequestOutput]] = {}
        while self.engine.has_unfinished:
            for output in self.engine.step():
                outputs.setdefault(output.req_id, []).append(output)
        assert self.engine.scheduler.pool.num_used == 0
        assert self.engine.step() == []
        return outputs

    def one(self, *args: Any, **params: Any) -> RequestOutput:
        """The last output of one request alone."""
        req_id = self.add(*args, **params)
        return self.run()[req_id][-1]


def text_ids(text: str) -> list[int]:
    return list(text.encode())


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
    ],
)
def test_refuses_requests_with_numbers_and_goes_on(prompt: Any, params: dict[str, Any], message: str) -> None:
    bench = Bench()
    with pytest.raises(RequestError, match=message):
        bench.add(prompt, **params)
    assert not bench.engine.has_unfinished
    assert bench.one([1], max_tokens=2).finish_reason == "length"


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
    bench.engine.step()
    bench.executor.broken = {bad}
    outputs = bench.run()
    failed = outputs[bad][-1]
    assert (failed.finish_reason, failed.error, len(failed.token_ids)) == ("error", "not finite", 1)
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
        pieces = [t for output in produced for t in output.outputs[sample].new_token_ids]
        assert pieces == last.outputs[sample].token_ids


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
    bench.add([1] * 5, max_tokens=2, ignore_eos=True, n=2)
    bench.run()
    stats = bench.engine.stats
    assert (stats.requests, stats.prompt_tokens, stats.generated_tokens) == (2, 15, 7)
    assert stats.computed_tokens == 10 + 2 + 2 * (5 + 1)
    assert (stats.steps, stats.finished["length"]) == (3, 3)
    assert stats.step_seconds > 0


def test_times_are_in_order() -> None:
    bench = Bench()
    req_id = bench.add([1], max_tokens=3, ignore_eos=True)
    first, *_, last = bench.run()[req_id]
    assert first.times.first_token is not None and last.times.finished is not None
    assert first.times.arrived <= first.times.first_token <= last.times.finished
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
    assert (output.text, output.finish_reason, output.finished) == ("H", "abort", True)
    assert (never_ran.token_ids, never_ran.finish_reason) == ([], "abort")
    assert bench.engine.scheduler.pool.num_used == 0
    assert bench.engine.abort(running) is None and bench.engine.abort(99) is None
    assert bench.run()[other][-1].text == "abc"
    assert bench.engine.stats.finished == {"stop": 0, "length": 1, "abort": 3, "error": 0}


def test_a_failed_rank_fails_every_request_and_ends_the_engine() -> None:
    bench = Bench(max_num_seqs=2)
    req_ids = [bench.add([1], max_tokens=5) for _ in range(4)]
    bench.engine.step()
    error = RankDiedError(rank=1, returncode=-9, stage="step 2")
    bench.executor.failure = error
    outputs = bench.engine.step()
    assert [output.req_id for output in outputs] == req_ids
    assert all(output.finished and output.finish_reason == "error" for output in outputs)
    assert all("rank 1" in output.error and "SIGKILL" in output.error for output in outputs)
    assert bench.engine.failure is error and not bench.engine.has_unfinished
    for call in (bench.engine.step, lambda: bench.add([1])):
        with pytest.raises(RankDiedError, match="SIGKILL"):
            call()
    assert bench.engine.abort(req_ids[0]) is None
    bench.engine.close()


def test_an_answer_to_another_step_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.add([1], max_tokens=5)
    monkeypatch.setattr(bench.executor, "collect", lambda: StepResult(7, ()))
    [output] = bench.engine.step()
    assert output.finish_reason == "error" and "step 7" in output.error
    with pytest.raises(ProtocolError, match="step 7"):
        bench.engine.step()


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
