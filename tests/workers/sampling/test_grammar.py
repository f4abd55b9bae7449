"""Structured output: for any logits, texts match the grammar, as checked by jsonschema and re."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from parallel.group import TensorParallelGroup, single_rank_group
from parallel.shard import split
from runtime.common.protocol import NewRequest
from runtime.common.sampling_params import SamplingParams
from tests.dist.ranks import run_ranks
from tests.small_tokenizer import BOS, EOS, write_tokenizer
from tests.workers.sampling.harness import SamplerHarness
from workers.sampling import grammar as grammar_module
from workers.sampling.sampler import NON_FINITE_MESSAGE, Sampler

CPU = torch.device("cpu")
VOCAB_SIZE = 303
"""Of the model; the tokenizer has 300. No multiple of 8, since masks are bits."""

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["a", None, 3.5, "é"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["name", "age", "kind", "tags", "inner"],
    "additionalProperties": False,
}
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])(T[a-f]{1,9})?"
CHOICES = ("yes", "yes, of course", "no", "ü\n😀")
GRAMMAR = 'start: pair (";" pair){0,3}\npair: /[a-z]{1,3}/ "=" /[0-9]{1,4}/'
GBNF = 'root ::= "<" word ">"\nword ::= [a-z] [a-z] | [A-Z]'

OUTPUTS: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"const": "x"}]}, "minItems": 2, "maxItems": 5}},
    {"regex": DATE},
    {"choice": CHOICES},
    {"grammar": GRAMMAR},
    {"grammar": GBNF},
]


def matches(text: str, outputs: dict[str, Any]) -> bool:
    """Whether a text matches the grammar, checked with other libraries."""
    if "json" in outputs:
        jsonschema.Draft202012Validator(outputs["json"]).validate(json.loads(text))
        return True
    if "choice" in outputs:
        return text in outputs["choice"]
    gbnf, lark = r"<([a-z]{2}|[A-Z])>", r"[a-z]{1,3}=[0-9]{1,4}(;[a-z]{1,3}=[0-9]{1,4}){0,3}"
    pattern = outputs.get("regex") or (gbnf if outputs["grammar"] == GBNF else lark)
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


def make_sampler(folder: Path, group: TensorParallelGroup | None = None) -> SamplerHarness:
    group = group or single_rank_group(CPU)
    shard = split(VOCAB_SIZE, group.size, align=1)[group.rank]
    sampler = Sampler(group, shard, VOCAB_SIZE, CPU, eos_token_ids=(EOS, 999), checkpoint=str(folder))
    return SamplerHarness(sampler, group.rank)


def request(req_id: int, outputs: dict[str, Any], output: Sequence[int] = (), **params: Any) -> NewRequest:
    params = {"seed": req_id, "max_tokens": 1000, "structured_outputs": outputs} | params
    return NewRequest(req_id, (BOS, *output), 1, SamplingParams(**params))


def logits_of(rows: int, step: int) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(step))


def text_of(folder: Path, token_ids: Sequence[int]) -> str:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(list(token_ids), skip_special_tokens=True)


def run_to_the_end(sampler: SamplerHarness, group: TensorParallelGroup, requests: list[NewRequest]) -> list[list[int]]:
    """Sample every request until EOS, in shrinking batches of random logits; returns the tokens."""
    outputs: dict[int, list[int]] = {r.req_id: [] for r in requests}
    for new in requests:
        sampler.add(new)
    live = list(outputs)
    shard = split(VOCAB_SIZE, group.size, align=1)[group.rank]
    for step in range(400):
        if not live:
            break
        local = logits_of(len(outputs), step)[live][:, shard.start : shard.stop]
        token_ids, tokens = sampler.sample(local, live)
        assert not [token.error for token in tokens or () if token.error]
        for req_id, token_id in zip(live, token_ids, strict=True):
            outputs[req_id].append(token_id)
        live = [req_id for req_id in live if outputs[req_id][-1] != EOS]
    return list(outputs.values())


def _mixed(group: TensorParallelGroup, folder: str) -> list[list[int]]:
    """Six kinds of grammar with four sets of sampling parameters, and two requests without a grammar."""
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"temperature": 1.7, "top_p": 0.9}, {"logprobs": 2}]
    requests = [
        request(i, OUTPUTS[i % 6], **settings[i % 4], repetition_penalty=1.2 if i == 7 else 1.0) for i in range(24)
    ]
    requests += [NewRequest(24, (BOS,), 1, SamplingParams(seed=24)), NewRequest(25, (BOS,), 1, SamplingParams(seed=5))]
    return run_to_the_end(make_sampler(Path(folder), group), group, requests)


@pytest.fixture(scope="module")
def mixed(folder: Path) -> list[list[int]]:
    return _mixed(single_rank_group(CPU), str(folder))


def test_every_output_matches_its_grammar(folder: Path, mixed: list[list[int]]) -> None:
    texts = [text_of(folder, output) for output in mixed[:24]]
    assert all(output[-1] == EOS and EOS not in output[:-1] for output in mixed[:24])
    assert all(matches(text, OUTPUTS[i % 6]) for i, text in enumerate(texts)), texts
    assert len(set(texts)) > 18


@pytest.mark.parametrize("size", [2, 3])
def test_outputs_do_not_depend_on_the_number_of_ranks(size: int, folder: Path, mixed: list[list[int]]) -> None:
    assert run_ranks(_mixed, size, str(folder)) == [mixed] * size


def test_outputs_do_not_depend_on_the_batch(folder: Path, mixed: list[list[int]]) -> None:
    for req_id in (0, 1, 10):
        settings: dict[str, Any] = [{}, {"temperature": 0.0}, {"temperature": 1.7, "top_p": 0.9}][req_id % 4]
        sampler = make_sampler(folder)
        sampler.add(request(req_id, OUTPUTS[req_id % 6], **settings))
        steps = range(len(mixed[req_id]))
        assert [sampler.sample(logits_of(26, s)[req_id : req_id + 1], [req_id])[0][0] for s in steps] == mixed[req_id]


@pytest.mark.parametrize("outputs", OUTPUTS[:4], ids=lambda outputs: str(outputs)[:20])
def test_preempted_request_continues_its_output(folder: Path, outputs: dict[str, Any]) -> None:
    [whole] = run_to_the_end(make_sampler(folder), single_rank_group(CPU), [request(0, outputs)])
    for known in {1, len(whole) // 2, len(whole) - 1}:
        sampler = make_sampler(folder)
        sampler.add(request(0, outputs, whole[:known]))
        rest = [sampler.sample(logits_of(1, step), [0])[0][0] for step in range(known, len(whole))]
        assert whole[:known] + rest == whole


def test_unlikely_tokens_are_sampled_if_only_they_match(folder: Path) -> None:
    """Only first tokens that begin a choice remain, and greedy takes the likeliest of them."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    beginnings = [
        token_id
        for token_id in range(3, 300)
        if any(choice.startswith(tokenizer.decode([token_id])) for choice in ("yes", "no"))
    ]
    for step in range(20):
        logits = logits_of(1, step)
        logits[0, 50:] += 30
        sampler = make_sampler(folder)
        sampler.add(request(0, {"choice": ("yes", "no")}, temperature=0.0, logprobs=3))
        _, tokens = sampler.sample(logits, [0])
        assert tokens is not None
        best = max(beginnings, key=lambda token_id: float(logits[0, token_id]))
        assert tokens[0].token_id == best
        # Log-probabilities are of unprocessed logits: masked tokens are reported, too.
        expected = logits[0].log_softmax(dim=-1)
        assert tokens[0].logprob == pytest.approx(float(expected[best]))
        assert [token_id for token_id, _ in tokens[0].top_logprobs] == expected.topk(3).indices.tolist()


def test_matching_tokens_have_the_models_distribution(folder: Path) -> None:
    digits = [Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(digit) for digit in "0123456789"]
    logits, rows = logits_of(1, 3).div(2), 4000
    sampler = make_sampler(folder)
    for req_id in range(rows):
        sampler.add(request(req_id, {"regex": "[0-9]"}))
    token_ids, _ = sampler.sample(logits.expand(rows, -1), list(range(rows)))
    assert set(token_ids) == set(digits)
    expected = logits[0, digits].softmax(dim=-1) * rows
    counts = torch.bincount(torch.tensor(token_ids), minlength=VOCAB_SIZE)[digits]
    assert ((counts - expected) ** 2 / expected).sum() < 9 + 4 * 18**0.5


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_complete_output_allows_eos_only(folder: Path, ignore_eos: bool) -> None:
    sampler = make_sampler(folder)
    sampler.add(request(0, {"regex": "n"}, ignore_eos=ignore_eos, logit_bias={EOS: -100.0}))
    tokens = [sampler.sample(logits_of(1, step), [0])[1] for step in range(4)]
    assert [t[0].token_id for t in tokens if t][1:] == [EOS] * 3
    assert not any(t[0].error for t in tokens if t)
    # A request may also be added with these EOS tokens, after a preemption.
    sampler.add(request(1, {"regex": "n"}, [t[0].token_id for t in tokens if t], ignore_eos=ignore_eos))
    assert sampler.sample(logits_of(1, 9), [1])[0] == [EOS]


def test_logit_bias_applies_to_matching_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    quote, brace = tokenizer.token_to_id('"'), tokenizer.token_to_id("}")
    requests = [request(i, {"json_object": True}, logit_bias={quote: 6.0, brace: 9.0}) for i in range(6)]
    for output in run_to_the_end(make_sampler(folder), single_rank_group(CPU), requests):
        assert isinstance(json.loads(text_of(folder, output)), dict)


# ---- errors end their request only


def test_grammar_errors_fail_their_request_only(folder: Path) -> None:
    sampler = make_sampler(folder)
    sampler.add(request(0, {"json": {"type": "objec"}}))
    sampler.add(request(1, {"regex": "[0-9]+"}))
    sampler.add(request(2, {"regex": "[0-9]+"}, [3, 4, 5]))
    sampler.add(NewRequest(3, (BOS,), 1, SamplingParams(seed=3)))
    panics = r"((([^a])|(b|\w|\s))|((\p{L})|\w)|(bab){0,1000}|\s.)"  # A bug of llguidance.
    sampler.add(request(4, {"regex": panics}))
    for step in range(2):
        token_ids, tokens = sampler.sample(logits_of(5, step), [0, 1, 2, 3, 4])
        assert tokens is not None
        assert "objec" in tokens[0].error
        assert "cannot go on" in tokens[2].error
        assert "panic" in tokens[4].error
        assert [bool(token.error) for token in tokens] == [True, False, True, False, True]
        assert not any(token.broken for token in tokens)
        assert token_ids[1] == tokens[1].token_id


def test_a_checkpoint_without_a_tokenizer_fails_the_request(tmp_path: Path) -> None:
    sampler = make_sampler(tmp_path)
    sampler.add(request(0, {"regex": "a"}))
    for step in range(2):
        _, tokens = sampler.sample(logits_of(1, step), [0])
        assert tokens is not None
        assert "tokenizer.json" in tokens[0].error


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_non_finite_logits_of_masked_tokens_are_detected(folder: Path, value: str) -> None:
    for token_id in (BOS, Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("7")):
        sampler = make_sampler(folder)
        for req_id in range(2):
            sampler.add(request(req_id, {"regex": "[0-9]+"}))
        logits = logits_of(2, 0)
        logits[1, token_id] = float(value)
        _, tokens = sampler.sample(logits, [0, 1])
        assert tokens is not None
    assert [(token.error, token.broken) for token in tokens] == [("", False), (NON_FINITE_MESSAGE, True)]


def test_compiling_grammars_in_one_step_is_limited_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "STEP_SECONDS", 0.0)
    sampler = make_sampler(folder)
    for req_id, regex in enumerate(("a", "a", "b")):
        sampler.add(request(req_id, {"regex": regex}))
    _, tokens = sampler.sample(logits_of(3, 0), [0, 1, 2])
    assert tokens is not None
    assert [bool(token.error) for token in tokens] == [False, False, True]
    assert "so many grammars" in tokens[2].error
    sampler.add(request(3, {"regex": "b"}))
    _, tokens = sampler.sample(logits_of(1, 0), [3])
    assert tokens is not None
    assert not tokens[0].error


def test_cache_of_grammars_is_bounded(folder: Path) -> None:
    sampler = make_sampler(folder)
    for req_id in range(grammar_module.CACHED_GRAMMARS + 5):
        sampler.add(request(req_id, {"regex": f"{req_id}"}))
        sampler.sample(logits_of(1, 0), [req_id])
    assert len(sampler.sampler._grammars._compiled) == grammar_module.CACHED_GRAMMARS
