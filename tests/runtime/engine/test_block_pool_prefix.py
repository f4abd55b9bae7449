"""What blocks hold, as hashes; and who finds, shares and keeps them, with the scheduler and checked by the executor."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest

from runtime.common.sampling_params import SamplingParams
from runtime.engine.block_pool import extend_hashes
from runtime.engine.request import SequenceOutput, SequenceState, SequenceStatus
from tests.runtime.engine.scheduler_bench import Bench, shares

PROMPT = [7 * position % 500 for position in range(100)]


def hashes_of(
    prompt: list[int], output: list[int] | None = None, salt: bytes = b"", block_size: int = 4
) -> list[bytes]:
    request = SequenceState(0, tuple(prompt), SamplingParams(), cache_salt=salt, output=SequenceOutput(output or []))
    extend_hashes(request, (len(prompt) + len(output or [])) // block_size, block_size)
    return request.block_hashes


# ---- hashes


def test_a_hash_is_of_everything_up_to_the_end_of_its_block() -> None:
    whole = hashes_of(PROMPT[:40])
    assert len(whole) == len(set(whole)) == 10 and {len(value) for value in whole} == {16}
    for changed in (0, 17, 39):
        tokens = PROMPT[:40]
        tokens[changed] += 1
        block = changed // 4
        assert hashes_of(tokens)[:block] == whole[:block]
        assert not set(hashes_of(tokens)[block:]) & set(whole)
    assert not set(hashes_of(PROMPT[4:40])) & set(whole), "the same tokens at another place"


def test_prompt_and_output_are_one_sequence() -> None:
    for cut in range(1, 40):
        assert hashes_of(PROMPT[:cut], PROMPT[cut:40]) == hashes_of(PROMPT[:40])


def test_hashes_are_made_once_and_extended() -> None:
    request = SequenceState(0, tuple(PROMPT[:30]), SamplingParams())
    for count in (2, 1, 5, 7):
        extend_hashes(request, count, 4)
    request.output_token_ids.extend(PROMPT[30:40])
    extend_hashes(request, 10, 4)
    assert request.block_hashes == hashes_of(PROMPT[:40])


def test_salts_separate_and_cannot_look_like_a_prefix() -> None:
    plain = hashes_of(PROMPT[:40])
    assert not set(hashes_of(PROMPT[:40], salt=b"mine")) & set(plain)
    # Who could choose the chain's state as a salt would find blocks of another place under his own tokens.
    assert not set(hashes_of(PROMPT[4:40], salt=plain[0])) & set(plain)


def test_the_hash_is_blake2b_over_the_chain() -> None:
    def blake2b(data: bytes, name: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, person=name).digest()

    chain = blake2b(b"salt of mine", b"salt")
    for start in (0, 4, 8):
        chain = blake2b(chain + b"".join(t.to_bytes(8, "little") for t in PROMPT[start : start + 4]), b"block")
    assert hashes_of(PROMPT[:12], salt=b"salt of mine")[-1] == chain


# ---- hits


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (20, 16), (21, 20), (23, 20)])
def test_all_full_blocks_but_the_last_token_are_found(length: int, found: int) -> None:
    bench = Bench()
    bench.add(PROMPT[:length], 3)
    bench.run()
    again = bench.add(PROMPT[:length], 3)
    plan = bench.step()
    assert plan is not None and again.num_cached == found
    assert plan.new[0].num_computed == found and shares(plan) == {1: length - found}
    assert len(plan.scheduled[0].new_block_ids) == -(-length // 4)
    bench.run()
    bench.check_outputs()
    pool = bench.scheduler.pool
    assert (pool.queried_tokens, pool.hit_tokens) == (2 * length, found)


def test_a_conversation_finds_its_answers_too() -> None:
    bench = Bench()
    first = bench.add(PROMPT[:10], 12)
    bench.run()
    # Of 22 tokens the last was never computed: five blocks are full of computed ones.
    second = bench.add([*first.prompt_token_ids, *first.output_token_ids, 1, 2, 3], 4)
    bench.run()
    assert second.num_cached == 20
    bench.check_outputs()


def test_requests_of_one_step_share() -> None:
    bench = Bench(num_blocks=22, max_num_seqs=8)
    for _ in range(8):
        bench.add(PROMPT[:30], 3)
    plan = bench.step()
    assert shares(plan) == {0: 30, 1: 2}, "the step is full with the first of all and the second's rest"
    assert shares(bench.step()) == dict.fromkeys(range(2), 1) | dict.fromkeys(range(2, 8), 2)
    # Seven common blocks, and one own for each.
    assert bench.scheduler.pool.num_used == 7 + 8
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize(
    ("fields", "params", "found"),
    [
        ({}, {}, 16),
        ({"cache_salt": b"other"}, {}, 0),
        ({"cache_salt": None}, {}, 0),
        ({}, {"prompt_logprobs": 0}, 0),
        ({}, {"logprobs": 2, "temperature": 0.0}, 16),
        ({"priority": 4}, {}, 16),
    ],
    ids=["alike", "other salt", "no salt", "prompt logprobs", "other sampling", "other priority"],
)
def test_who_finds(fields: dict[str, Any], params: dict[str, Any], found: int) -> None:
    bench = Bench()
    bench.add(PROMPT[:20], 3)
    bench.run()
    request = bench.add(PROMPT[:20], 3, params, **fields)
    bench.run()
    assert request.num_cached == found
    assert bench.scheduler.pool.queried_tokens == (40 if found or fields.get("cache_salt") else 20)
    bench.check_outputs()


@pytest.mark.parametrize(("salt", "found"), [(b"", 16), (b"mine", 0), (None, 0)])
def test_who_offers(salt: bytes | None, found: int) -> None:
    bench = Bench()
    bench.add(PROMPT[:20], 3, {"prompt_logprobs": 1}, cache_salt=salt)
    bench.run()
    request = bench.add(PROMPT[:20], 3)
    bench.run()
    assert request.num_cached == found
    bench.check_outputs()


def test_sampled_tokens_are_offered_when_they_are_known() -> None:
    bench = Bench(block_size=2)
    first = bench.add(PROMPT[:3], 20)
    bench.submit()
    bench.submit()  # Computes the first sampled token, which fills the second block; its id is not here yet.
    early = bench.add([*PROMPT[:3], 1, 2, 3], 2)
    assert len(first.block_hashes) == 1
    bench.collect()
    assert len(first.block_hashes) == 2
    late = bench.add([*first.prompt_token_ids, *first.output_token_ids, 3], 2)
    bench.submit()
    assert (early.num_cached, late.num_cached) == (2, 4)
    bench.collect()
    bench.collect()
    bench.run()
    bench.check_outputs()


# ---- pressure


def test_kept_blocks_that_are_found_use_up_free_ones() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    bench.add(PROMPT[:12], 2)
    bench.run()
    large = bench.add(17, 4)  # Takes the five blocks in which nothing can be found.
    bench.step()
    assert bench.scheduler.pool.num_free == 3
    again = bench.add(PROMPT[:13], 3)  # Needs four: the three that are left and are just those it finds, and another.
    bench.step()
    assert again.status is SequenceStatus.WAITING
    bench.run()
    assert again.num_cached == 12 and large.num_preemptions == again.num_preemptions == 0
    bench.check_outputs()


def test_blocks_that_somebody_holds_cost_nothing() -> None:
    bench = Bench(num_blocks=7, block_size=4)
    bench.add(PROMPT[:13], 3)
    bench.step()
    assert bench.scheduler.pool.num_free == 3
    again = bench.add(PROMPT[:13], 3)  # Four blocks, three of them there.
    bench.step()
    assert again.status is SequenceStatus.RUNNING and bench.scheduler.pool.num_free == 2
    bench.run()
    bench.check_outputs()


def test_a_preempted_holder_leaves_shared_blocks_to_the_other_and_finds_them_again() -> None:
    bench = Bench(num_blocks=8, block_size=2)
    first, second = bench.add(PROMPT[:7], 8), bench.add(PROMPT[:7], 8)
    while not second.num_preemptions:
        bench.step()
    assert first.status is SequenceStatus.RUNNING and bench.scheduler.pool.num_used == len(first.block_ids)
    back = [new for plan in bench.run() for new in plan.new if new.req_id == second.seq_id]
    assert back[0].num_computed >= 6
    assert second.num_cached == 6, "counted when it first started"
    assert bench.scheduler.pool.queried_tokens == 14, "only first starts are counted"
    bench.check_outputs()


def test_what_a_plan_under_way_computes_is_found_though_its_request_has_ended() -> None:
    bench = Bench()
    first = bench.add(PROMPT[:20], 4)
    bench.submit()
    bench.scheduler.finish(first)
    second = bench.add(PROMPT[:20], 4)
    bench.submit()
    assert second.num_cached == 16
    assert bench.scheduler.update(bench.executor.collect()) == []
    bench.collect()
    bench.run()
    bench.requests = [second]
    bench.check_outputs()


def test_what_a_plan_under_way_computes_is_found_though_its_request_was_preempted() -> None:
    bench = Bench(num_blocks=7, block_size=2)
    bench.add(1, 12)
    bench.step()
    second = bench.add(PROMPT[:9], 3)  # Fills the cache.
    bench.submit()
    assert second.status is SequenceStatus.RUNNING and bench.scheduler.pool.num_free == 1
    bench.submit()
    bench.collect()
    bench.submit()
    assert second.num_preemptions == 1 and second.num_in_flight_tokens == 1, "its result is still on its way"
    bench.collect()
    bench.collect()
    bench.run()
    assert any(new.req_id == second.seq_id and new.num_computed for plan in bench.executor.plans for new in plan.new)
    bench.check_outputs()


def test_a_request_whose_numbers_were_not_finite_leaves_nothing_to_find() -> None:
    bench = Bench()
    bad = bench.add(PROMPT[:20], 4)
    bench.executor.broken = {bad.seq_id}
    bench.submit()
    [(request, token)] = bench.scheduler.update(bench.executor.collect())
    assert request is bad and token.error
    bench.scheduler.finish(bad)
    good = bench.add(PROMPT[:20], 4)
    bench.run()
    assert good.num_cached == 0
    bench.requests = [good]
    bench.check_outputs()


def test_a_shared_prompt_is_computed_once_under_random_load() -> None:
    """With room for everything, each distinct block of prompts is computed once, but for last tokens."""
    generator = random.Random(3)
    bench = Bench(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=32)
    prompts = [PROMPT[: generator.randrange(1, 60)] for _ in range(40)]
    for prompt in prompts:
        bench.add(prompt, 2)
    plans = bench.run()
    computed = sum(plan.num_tokens for plan in plans)
    blocks = max(len(prompt) for prompt in prompts) // 4
    # One decode token each; the rest of each prompt after its full blocks; the common blocks at most once.
    rests = sum((len(prompt) - 1) % 4 + 1 for prompt in prompts)
    assert computed <= len(prompts) + rests + 4 * blocks
    assert bench.scheduler.pool.evictions == 0
    bench.check_outputs()
