"""Drawing: mlx-lm's filters, a random key of the session's own, and logits that stay as they are."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import replace

import pytest
from torpor.daemon.api.limits import MAX_SEED
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.engine import sampler
from torpor.daemon.engine.sampler import PENALTY_WINDOW_TOKENS, draw, initial_key, number_at

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

PROBABILITIES = (0.4, 0.3, 0.15, 0.1, 0.05)
NOTHING: array[int] = array("I")


def logits(*probabilities: float) -> mx.array:
    made = mx.log(mx.array(probabilities or PROBABILITIES))
    mx.eval(made)
    return made


def drawn(sampling: Sampling, count: int = 400, ledger: array[int] = NOTHING) -> Counter[int]:
    places = (array("I", [*ledger, *[0] * at]) for at in range(count))
    return Counter(draw(sampling, logits(), place, initial_key()).token for place in places)


def test_temperature_zero_takes_the_best_and_keeps_the_key_lv3() -> None:
    key = initial_key()
    result = draw(Sampling(), logits(), NOTHING, key)
    assert result.token == 0
    assert result.next_key is key


def test_ties_go_to_the_lowest_id_lp5() -> None:
    assert draw(Sampling(), mx.array([0.0, 5.0, 5.0]), NOTHING, initial_key()).token == 1


def test_the_same_key_draws_the_same_token_br1() -> None:
    sampling = Sampling(1.0, seed=9)
    key = initial_key()
    first, second = (draw(sampling, logits(), NOTHING, key) for _ in range(2))
    assert first.token == second.token
    assert first.next_key.tolist() == second.next_key.tolist() == key.tolist()


def test_the_number_of_a_draw_follows_from_seed_and_place_br10() -> None:
    found = {(seed, place): number_at(seed, place) for seed in (0, 1, MAX_SEED) for place in (0, 1, 2, 10**6)}
    assert all(0 <= number < 1 for number in found.values())
    assert len(set(found.values())) == len(found)
    assert (number_at(7, 3), number_at(7, 4)) == (0.19764450225639663, 0.18818004704655178)


@pytest.mark.one_in(1)
def test_a_session_of_before_draws_what_it_would_have_drawn() -> None:
    """The tokens and the key are those of the version that had no other way."""
    sampling = Sampling(1.3, top_p=0.97, min_p=0.001, top_k=40, repetition_penalty=1.2, seed=9)
    key, ledger = mx.random.key(9), array("I")
    for at in range(24):
        result = draw(sampling, mx.sin(mx.arange(50) * (at + 1.0)) * 3, ledger, key)
        ledger.append(result.token)
        key = result.next_key
    before = "33 7 30 24 28 40 20 19 49 41 27 9 15 1 1 33 23 22 3 1 33 36 17 32"
    assert list(ledger) == [int(token) for token in before.split()]
    assert key.tolist() == [1162551870, 3827456743]


def test_tokens_come_as_often_as_they_are_likely() -> None:
    counts = drawn(Sampling(1.0, seed=4))
    for token, probability in enumerate(PROBABILITIES):
        assert abs(counts[token] / 400 - probability) < 0.08


@pytest.mark.one_in(1)
def test_drawing_leaves_the_random_state_of_the_process_alone() -> None:
    mx.random.seed(5)
    before = [part.tolist() for part in mx.random.state]
    drawn(Sampling(1.0, top_p=0.9, top_k=3, min_p=0.01, seed=1), 3)
    assert [part.tolist() for part in mx.random.state] == before


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("changes", "possible"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 1000}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-6}, {0}),
        ({"top_p": 0.5}, {0, 1}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"temperature": 1e-4}, {0}),
    ],
)
def test_filters_leave_only_the_likely_tokens_lp4(changes: dict[str, float], possible: set[int]) -> None:
    counts = drawn(replace(Sampling(1.0, seed=2), **changes))  # type: ignore[arg-type]
    assert set(counts) == possible


def test_a_high_temperature_evens_out() -> None:
    counts = drawn(Sampling(100.0, seed=1))
    assert max(counts.values()) < 0.35 * 400


@pytest.mark.parametrize(
    "sampling",
    [Sampling(repetition_penalty=1.8), Sampling(0.7, repetition_penalty=1.8, top_p=0.9, top_k=3, min_p=0.01)],
)
def test_drawing_never_changes_the_logits_qx9(sampling: Sampling) -> None:
    stored = logits()
    before = stored.tolist()
    first = draw(sampling, stored, array("I", [0, 1, 0]), initial_key())
    second = draw(sampling, stored, array("I", [0, 1, 0]), initial_key())
    assert stored.tolist() == before
    assert first.token == second.token


def test_a_penalty_makes_repetition_less_likely() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    assert draw(sampling, mx.array([3.0, 2.0, 1.0]), array("I", [0]), initial_key()).token == 1
    assert draw(sampling, mx.array([-1.0, -1.5, -9.0]), array("I", [0]), initial_key()).token == 1
    assert draw(sampling, mx.array([3.0, 2.0, 1.0]), NOTHING, initial_key()).token == 0


def test_a_penalty_looks_back_over_its_window_only() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    scores = mx.array([3.0, 2.0, 1.0])
    outside = array("I", [0] + [2] * PENALTY_WINDOW_TOKENS)
    inside = array("I", [0] + [2] * (PENALTY_WINDOW_TOKENS - 1))
    assert draw(sampling, scores, outside, initial_key()).token == 0
    assert draw(sampling, scores, inside, initial_key()).token == 1


def test_a_penalty_counts_a_token_once_however_often_it_came() -> None:
    sampling = Sampling(repetition_penalty=1.4)
    assert draw(sampling, mx.array([3.0, 2.0]), array("I", [0] * 10), initial_key()).token == 0


@pytest.mark.one_in(1)
def test_tokens_that_are_ruled_out_are_never_drawn_lp8() -> None:
    masked = mx.array([-math.inf, 0.0, -math.inf, 0.5])
    sampling = Sampling(1.0, top_p=0.99, min_p=0.001, top_k=3, seed=1)
    for key in (initial_key(), mx.random.key(1)):
        for at in range(50):
            result = draw(sampling, masked, array("I", [1] * at), key)
            key = result.next_key
            assert result.token in {1, 3}


@pytest.mark.one_in(1)
def test_a_vocabulary_of_one_gives_its_token_lp4() -> None:
    sampling = Sampling(1.0, top_k=1, top_p=0.5, min_p=0.5)
    assert draw(sampling, mx.array([0.3]), NOTHING, initial_key()).token == 0


def test_a_number_at_either_end_draws_a_token_that_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = mx.array([-math.inf, 0.0, -3.0, -math.inf])
    for number, token in ((0.0, 1), (1 - 2**-52, 2)):
        monkeypatch.setattr(sampler, "number_at", lambda _seed, _place, number=number: number)
        assert draw(Sampling(1.0), masked, NOTHING, initial_key()).token == token
