"""The account of a tree: the same as a walk over all of it, whatever changes."""

from __future__ import annotations

import random

from torpor.daemon.branches.accounts import Account


def walked(held: dict[int, tuple[int, dict[int, int]]]) -> int:
    shared: dict[int, int] = {}
    for _, pieces in held.values():
        shared |= pieces
    return sum(own for own, _ in held.values()) + sum(shared.values())


def test_what_several_hold_counts_once_until_the_last_has_left() -> None:
    account = Account()
    account.enter({1: (10, {100: 7}), 2: (20, {100: 7, 200: 5})})
    assert account.total == 42
    account.leave([2])
    assert account.total == 17
    account.enter({1: (3, {})})
    assert account.total == 3
    account.leave([1, 1, 9])
    assert account.total == 0


def test_a_place_that_one_leaves_may_be_anothers_with_another_size() -> None:
    account = Account()
    account.enter({1: (0, {100: 7}), 2: (0, {200: 5})})
    account.enter({2: (0, {100: 9}), 1: (0, {})})
    assert account.total == 9


def test_random_changes_are_counted_as_a_walk_counts_them() -> None:
    chance, account = random.Random(5), Account()
    held: dict[int, tuple[int, dict[int, int]]] = {}
    for _ in range(2000):
        changed = chance.sample(range(12), chance.randint(1, 3))
        if chance.random() < 0.3:
            account.leave(changed)
            held = {number: each for number, each in held.items() if number not in changed}
        else:
            pieces = {number: {place: place * 3 for place in chance.sample(range(1, 20), 4)} for number in changed}
            entered = {number: (chance.randrange(9), pieces[number]) for number in changed}
            account.enter(entered)
            held |= entered
        assert account.total == walked(held)
