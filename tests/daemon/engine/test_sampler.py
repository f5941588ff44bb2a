"""Drawing: mlx-lm's filters, a random key of the session's own, and logits that stay as they are."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import replace

import pytest
from torpor.daemon.api.limits import MAX_SEED
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.engine.sampler import PENALTY_WINDOW_TOKENS, draw, initial_key

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

PROBABILITIES = (0.4, 0.3, 0.15, 0.1, 0.05)
NOTHING: array[int] = array("I")


def logits(*probabilities: float) -> mx.array:
    made = mx.log(mx.array(probabilities or PROBABILITIES))
    mx.eval(made)
    return made


def drawn(sampling: Sampling, count: int = 400, ledger: array[int] = NOTHING) -> Counter[int]:
    key, tokens = initial_key(sampling), []
    for _ in range(count):
        result = draw(sampling, logits(), ledger, key)
        tokens.append(result.token)
        key = result.next_key
    return Counter(tokens)


def test_temperature_zero_takes_the_best_and_keeps_the_key_lv3() -> None:
    key = initial_key(Sampling(seed=3))
    result = draw(Sampling(), logits(), NOTHING, key)
    assert result.token == 0
    assert result.next_key is key


def test_ties_go_to_the_lowest_id_lp5() -> None:
    assert draw(Sampling(), mx.array([0.0, 5.0, 5.0]), NOTHING, initial_key(Sampling())).token == 1


def test_the_same_key_draws_the_same_token_br1() -> None:
    sampling = Sampling(1.0, seed=9)
    key = initial_key(sampling)
    first, second = (draw(sampling, logits(), NOTHING, key) for _ in range(2))
    assert first.token == second.token
    assert first.next_key.tolist() == second.next_key.tolist() != key.tolist()


def test_tokens_come_as_often_as_they_are_likely() -> None:
    counts = drawn(Sampling(1.0, seed=4))
    for token, probability in enumerate(PROBABILITIES):
        assert abs(counts[token] / 400 - probability) < 0.08


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
    first = draw(sampling, stored, array("I", [0, 1, 0]), initial_key(sampling))
    second = draw(sampling, stored, array("I", [0, 1, 0]), initial_key(sampling))
    assert stored.tolist() == before
    assert first.token == second.token


def test_a_penalty_makes_repetition_less_likely() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    assert draw(sampling, mx.array([3.0, 2.0, 1.0]), array("I", [0]), initial_key(sampling)).token == 1
    assert draw(sampling, mx.array([-1.0, -1.5, -9.0]), array("I", [0]), initial_key(sampling)).token == 1
    assert draw(sampling, mx.array([3.0, 2.0, 1.0]), NOTHING, initial_key(sampling)).token == 0


def test_a_penalty_looks_back_over_its_window_only() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    scores = mx.array([3.0, 2.0, 1.0])
    outside = array("I", [0] + [2] * PENALTY_WINDOW_TOKENS)
    inside = array("I", [0] + [2] * (PENALTY_WINDOW_TOKENS - 1))
    assert draw(sampling, scores, outside, initial_key(sampling)).token == 0
    assert draw(sampling, scores, inside, initial_key(sampling)).token == 1


def test_a_penalty_counts_a_token_once_however_often_it_came() -> None:
    sampling = Sampling(repetition_penalty=1.4)
    assert draw(sampling, mx.array([3.0, 2.0]), array("I", [0] * 10), initial_key(sampling)).token == 0


def test_tokens_that_are_ruled_out_are_never_drawn_lp8() -> None:
    masked = mx.array([-math.inf, 0.0, -math.inf, 0.5])
    sampling = Sampling(1.0, top_p=0.99, min_p=0.001, top_k=3, seed=1)
    key = initial_key(sampling)
    for _ in range(50):
        result = draw(sampling, masked, NOTHING, key)
        key = result.next_key
        assert result.token in {1, 3}


def test_a_vocabulary_of_one_gives_its_token_lp4() -> None:
    sampling = Sampling(1.0, top_k=1, top_p=0.5, min_p=0.5)
    assert draw(sampling, mx.array([0.3]), NOTHING, initial_key(sampling)).token == 0


def test_every_seed_has_a_key_of_its_own() -> None:
    keys = {tuple(initial_key(Sampling(seed=seed)).tolist()) for seed in (0, 1, 2**32, 2**63, MAX_SEED)}
    assert len(keys) == 5
    assert initial_key(Sampling()).dtype == mx.uint32
