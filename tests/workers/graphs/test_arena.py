"""Memory of replays: what lives at the same time does not overlap, and what does not shares its place."""

from __future__ import annotations

import random

import torch

from workers.graphs.arena import ALIGNMENT, Arena, Lifetime, plan_memory


def test_values_that_follow_one_another_share_their_place() -> None:
    offsets, total = plan_memory([Lifetime(0, 1, 100), Lifetime(1, 2, 100), Lifetime(2, 3, 100)])
    assert offsets == (0, 128, 0)
    assert total == 256


def test_a_gap_is_used_if_it_is_large_enough() -> None:
    lifetimes = [Lifetime(0, 1, 64), Lifetime(0, 9, 64), Lifetime(2, 9, 128), Lifetime(3, 9, 64), Lifetime(4, 4, 0)]
    offsets, total = plan_memory(lifetimes)
    assert offsets[:4] == (0, 64, 128, 0)
    assert total == 256


def test_nothing() -> None:
    assert plan_memory([]) == ((), 0)


def test_random_lifetimes() -> None:
    for seed in range(50):
        state = random.Random(seed)
        lifetimes: list[Lifetime] = []
        for _ in range(40):
            first = state.randrange(30)
            lifetimes.append(Lifetime(first, first + state.randrange(6), state.randrange(400)))
        offsets, total = plan_memory(lifetimes)
        for i, a in enumerate(lifetimes):
            assert offsets[i] % ALIGNMENT == 0
            assert offsets[i] + a.size <= total
            for j, b in enumerate(lifetimes[:i]):
                together = a.first <= b.last and b.first <= a.last
                apart = offsets[i] + a.size <= offsets[j] or offsets[j] + b.size <= offsets[i]
                assert apart or not together or not a.size or not b.size, (seed, a, b)
        assert total < sum(-(-v.size // ALIGNMENT) * ALIGNMENT for v in lifetimes)


def test_tensors_lie_where_they_were_planned() -> None:
    arena = Arena()
    arena.reserve(256)
    whole = arena.tensor(64, torch.float32, (2, 4), (4, 1), 0)
    column = arena.tensor(64, torch.float32, (2,), (4,), 1)
    narrow = arena.tensor(64, torch.bfloat16, (3,), (1,), 2)
    whole.copy_(torch.arange(8.0).view(2, 4))
    assert column.tolist() == [1.0, 5.0]
    assert narrow.data_ptr() == whole.data_ptr() + 4
    assert arena.tensor(64, torch.float32, (2,), (4,), 1) is column


def test_growing_leaves_what_was_given_alone() -> None:
    arena = Arena()
    arena.reserve(64)
    before = arena.tensor(0, torch.int64, (8,), (1,), 0).fill_(7)
    arena.reserve(32)
    assert arena.tensor(0, torch.int64, (8,), (1,), 0) is before
    arena.reserve(128)
    assert arena.tensor(0, torch.int64, (8,), (1,), 0) is not before
    arena.tensor(0, torch.int64, (16,), (1,), 0).fill_(1)
    assert before.tolist() == [7] * 8
