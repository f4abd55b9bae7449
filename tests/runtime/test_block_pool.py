"""Block accounting: nothing is given twice, nothing is lost, the same calls give the same blocks."""

from __future__ import annotations

import random

import pytest

from runtime.block_pool import BlockPool
from runtime.errors import EngineError


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
