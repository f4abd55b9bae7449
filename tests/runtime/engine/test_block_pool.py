"""Block accounting: nothing is given twice, nothing is lost, what is kept is found, the same calls give the same."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from runtime.common.errors import EngineError
from runtime.engine.block_pool import BlockPool


def test_allocates_every_block_once_and_takes_them_back() -> None:
    pool = BlockPool(5, 16)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.free(second)
    assert (pool.num_free, pool.num_used) == (3, 2)
    assert sorted(pool.allocate(3)) == sorted(second)


def test_same_calls_give_same_blocks() -> None:
    def run() -> list[list[int]]:
        generator, pool, held = random.Random(0), BlockPool(50, 4), list[list[int]]()
        given: list[list[int]] = []
        for _ in range(300):
            count = generator.randrange(6)
            if count <= pool.num_free and generator.random() < 0.6:
                held.append(pool.allocate(count))
                given.append(held[-1])
            elif held:
                pool.free(held.pop(generator.randrange(len(held))))
            assert pool.num_used == sum(map(len, held))
        return given

    assert run() == run()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert BlockPool(1, 16).blocks_for(tokens) == blocks


def test_refuses_more_than_are_free() -> None:
    pool = BlockPool(3, 16)
    pool.allocate(2)
    with pytest.raises(EngineError, match="2 KV blocks were asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


@pytest.mark.parametrize("wrong", [[0, 0], [2], [-1], [3]], ids=["twice", "never allocated", "negative", "foreign"])
def test_refuses_to_free_what_is_not_allocated(wrong: list[int]) -> None:
    pool = BlockPool(3, 16)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(EngineError, match=rf"KV block {wrong[-1]} of 3"):
        pool.free(wrong)


def test_refuses_sizes_below_one() -> None:
    for sizes in ((0, 16), (4, 0)):
        with pytest.raises(EngineError, match="at least 1"):
            BlockPool(*sizes)


# ---- shared and kept blocks


def test_a_shared_block_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.incref(blocks)
    pool.free(blocks)
    assert (pool.num_free, pool.num_used) == (2, 2)
    assert not set(pool.allocate(2)) & set(blocks)
    pool.free(blocks)
    assert (pool.num_free, pool.num_used) == (2, 2)
    with pytest.raises(EngineError, match="freed without being allocated"):
        pool.free(blocks[:1])


def test_what_was_offered_is_found_while_held_and_afterwards() -> None:
    pool = BlockPool(4, 16)
    first, second, third = pool.allocate(3)
    pool.cache(first, b"a")
    pool.cache(second, b"b")
    pool.cache(third, b"d")
    assert pool.lookup([b"a", b"b", b"c", b"d"]) == [first, second], "a run ends at the first gap"
    pool.free([first, second, third])
    assert pool.num_free == 4 and pool.lookup([b"a", b"b"]) == [first, second] and pool.lookup([b"x", b"a"]) == []
    assert pool.count_free([first, second]) == 2
    pool.incref([first])
    assert (pool.num_free, pool.num_used, pool.count_free([first, second])) == (3, 1, 1)
    pool.incref([first])
    assert pool.num_free == 3


def test_unused_blocks_go_out_first_then_the_least_recently_used() -> None:
    pool = BlockPool(6, 16)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, block_hash in zip([*old, *new], (b"0", b"1", b"2", b"3"), strict=True):
        pool.cache(block, block_hash)
    pool.free(old)
    pool.free(new)
    pool.incref(old)  # Used again: now more recent than the others.
    pool.free(old)
    assert not set(pool.allocate(2)) & {*old, *new} and pool.evictions == 0
    # Of one sequence the later blocks go first: without the earlier ones they could not be found.
    assert pool.allocate(4) == [new[1], new[0], old[1], old[0]]
    assert pool.evictions == 4 and pool.lookup([b"0"]) == []


def test_a_second_block_of_the_same_content_is_not_offered() -> None:
    pool = BlockPool(3, 16)
    first, second = pool.allocate(2)
    pool.cache(first, b"a")
    pool.cache(second, b"a")
    pool.cache(first, b"a")
    assert pool.lookup([b"a"]) == [first]
    pool.free([first])
    pool.free([second])
    assert pool.allocate(2)[0] == second, "a block that cannot be found is not kept"
    assert pool.lookup([b"a"]) == [first]


def test_forgotten_blocks_are_held_on_and_not_found() -> None:
    pool = BlockPool(3, 16)
    held, kept = pool.allocate(2)
    pool.cache(held, b"a")
    pool.cache(kept, b"b")
    pool.free([kept])
    pool.evict([b"a", b"b", b"never offered"])
    assert (pool.lookup([b"a"]), pool.lookup([b"b"]), pool.num_used, pool.num_free) == ([], [], 1, 2)
    assert pool.allocate(1) == [kept] and pool.evictions == 0
    pool.cache(held, b"c")
    assert pool.lookup([b"c"]) == [held]


def test_refuses_to_share_or_offer_what_nobody_holds() -> None:
    pool = BlockPool(3, 16)
    [block] = pool.allocate(1)
    pool.cache(block, b"a")
    with pytest.raises(EngineError, match="other content"):
        pool.cache(block, b"b")
    pool.free([block])
    with pytest.raises(EngineError, match="cached while free"):
        pool.cache(block, b"a")
    pool.evict([b"a"])
    with pytest.raises(EngineError, match="neither a reference nor a hash"):
        pool.incref([block])


class Model:
    """The pool, written as plainly as possible: who holds what, and what every block holds."""

    def __init__(self, num_blocks: int) -> None:
        self.holders: Counter[int] = Counter()
        self.content: dict[int, bytes] = {}
        self.freed: dict[int, int] = {}
        self.num_blocks = num_blocks

    def check(self, pool: BlockPool, hashes: list[bytes]) -> None:
        assert pool.num_used == sum(count > 0 for count in self.holders.values())
        assert pool.num_used + pool.num_free == self.num_blocks
        for block_hash in hashes:
            assert pool.lookup([block_hash]) == [b for b, content in self.content.items() if content == block_hash]


def test_any_calls_agree_with_a_plain_model() -> None:
    generator = random.Random(1)
    hashes = [bytes([value]) for value in range(30)]
    evictions = 0
    for _ in range(30):
        pool, model, held = BlockPool(12, 4), Model(12), list[list[int]]()
        for now in range(200):
            match generator.randrange(5):
                case 0 if pool.num_free:
                    blocks = pool.allocate(generator.randint(1, min(4, pool.num_free)))
                    assert not any(model.holders[block] for block in blocks) and len(set(blocks)) == len(blocks)
                    for block in blocks:
                        if model.content.pop(block, None) is not None:
                            older = [b for b in model.content if not model.holders[b] and b not in blocks]
                            assert all(model.freed[block] <= model.freed[b] for b in older)
                    held.append(blocks)
                    model.holders.update(blocks)
                case 1 if found := pool.lookup(generator.sample(hashes, 3)):
                    pool.incref(found)
                    held.append(found)
                    model.holders.update(found)
                case 2 if held:
                    block, block_hash = generator.choice(generator.choice(held)), generator.choice(hashes)
                    if block not in model.content:
                        pool.cache(block, block_hash)
                        if block_hash not in model.content.values():
                            model.content[block] = block_hash
                case 3 | 4 if held:
                    blocks = held.pop(generator.randrange(len(held)))
                    pool.free(blocks)
                    model.holders.subtract(blocks)
                    model.freed.update(dict.fromkeys(blocks, now))
                case _:
                    forgotten = generator.sample(hashes, 1)
                    pool.evict(forgotten)
                    model.content = {b: content for b, content in model.content.items() if content not in forgotten}
            model.check(pool, hashes)
        evictions += pool.evictions
        for blocks in held:
            pool.free(blocks)
        assert (pool.num_used, pool.num_free) == (0, 12)
    assert evictions > 100
