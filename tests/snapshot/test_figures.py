"""Each figure is what its formula says, computed here the plain way on the whole array; and what is not defined is null
with a reason, never NaN."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from torpor.snapshot.figures import Difference, ElementFigures, HeadOutliers, HeadSums, figures_of, rounded, sums_bytes

CLOSE = 6e-6  # figures are told to six digits


def figures(values: np.ndarray, positions: Any = None, *, piece: int = 7) -> dict[str, Any]:
    """The figures of vectors `[heads, tokens, dim]`, taken in piece by piece."""
    heads, count, dim = values.shape
    at = np.arange(count) if positions is None else np.asarray(positions)
    sums = HeadSums(heads, dim)
    cuts = range(0, count, piece)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in cuts:
            sums.add(values[:, start : start + piece], at[start : start + piece])
        outliers = HeadOutliers(sums)
        for start in cuts:
            outliers.add(values[:, start : start + piece])
        found = figures_of(sums, outliers)
    json.dumps(found, allow_nan=False)
    return found


def reason(found: dict[str, Any], figure: str, head: int = 0) -> str | None:
    return next(
        (each["why"] for each in found["undefined"] if each["figure"] == figure and head in each["heads"]), None
    )


@pytest.fixture
def values() -> np.ndarray:
    """Three unlike heads: noise around a mean, one with an outlier channel, and one whose first token is tiny."""
    numbers = np.random.default_rng(5)
    made = numbers.normal(size=(3, 60, 5)).astype(np.float32)
    made[0] += [2, -1, 0, 0, 1]
    made[1, ::9, 3] = [40, -60, 50, 45, -70, 55, 50]
    made[2, 0] *= 1e-3
    made[2, 41] *= 30
    return made


@pytest.mark.parametrize("piece", [1, 7, 60])
def test_rms_is_the_length_over_the_root_of_the_dimension(values: np.ndarray, piece: int) -> None:
    found = figures(values, piece=piece)["rms"]
    for head, vectors in enumerate(values.astype(float)):
        lengths = [math.sqrt(sum(x * x for x in vector) / len(vector)) for vector in vectors]
        assert found["mean"][head] == pytest.approx(sum(lengths) / len(lengths), rel=CLOSE)
        assert found["max"][head] == pytest.approx(max(lengths), rel=CLOSE)
        assert found["max_at"][head] == lengths.index(max(lengths))


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / math.sqrt((one @ one) * (other @ other)))


@pytest.mark.parametrize("piece", [1, 7, 60])
def test_coherence_is_the_mean_cosine_of_neighbours_and_with_the_mean(values: np.ndarray, piece: int) -> None:
    values[0, 13] = 0  # a vector without direction counts in neither
    found = figures(values, piece=piece)["coherence"]
    for head, vectors in enumerate(values.astype(float)):
        pairs = [cosine(a, b) for a, b in pairwise(vectors) if a.any() and b.any()]
        assert found["consecutive"][head] == pytest.approx(np.mean(pairs), rel=CLOSE, abs=1e-9)
        mean = vectors.mean(axis=0)
        assert found["with_mean"][head] == pytest.approx(
            np.mean([cosine(vector, mean) for vector in vectors if vector.any()]), rel=CLOSE
        )


def test_tokens_that_do_not_follow_each_other_are_no_neighbours(values: np.ndarray) -> None:
    at = [*range(10), *range(100, 150)]
    found = figures(values, at)["coherence"]["consecutive"]
    for head, vectors in enumerate(values.astype(float)):
        pairs = [cosine(vectors[t], vectors[t + 1]) for t in range(59) if t != 9]
        assert found[head] == pytest.approx(np.mean(pairs), rel=CLOSE)


@pytest.mark.parametrize("away", [0.0, 1e4])
def test_entropy_is_that_of_the_eigenvalues_of_the_covariance(values: np.ndarray, away: float) -> None:
    moved = (values + np.float32(away)).astype(np.float32)  # a large mean must not cost the digits of the variance
    found = figures(moved)["spectrum"]
    for head, vectors in enumerate(moved.astype(float)):
        centered = vectors - vectors.mean(axis=0)
        share = np.linalg.svd(centered, compute_uv=False) ** 2
        share /= share.sum()
        entropy = -sum(p * math.log(p) for p in share)
        assert found["entropy_nats"][head] == pytest.approx(entropy, rel=1e-5)
        assert found["effective_rank"][head] == pytest.approx(math.exp(entropy), rel=1e-5)


def test_the_covariance_is_the_plain_one_whatever_its_size() -> None:
    numbers = np.random.default_rng(4)
    made = (numbers.normal(size=(2, 150, 130)) * np.linspace(0.1, 3, 130) + 7).astype(np.float32)
    sums = HeadSums(2, 130)
    for start in (0, 70, 140):
        sums.add(made[:, start : start + 70], np.arange(start, min(150, start + 70)))
    for head, vectors in enumerate(made.astype(float)):
        np.testing.assert_allclose(sums.covariance(head), np.cov(vectors.T, bias=True), rtol=1e-9, atol=1e-9)


def test_the_effective_rank_is_that_of_the_space_in_which_vectors_vary() -> None:
    numbers = np.random.default_rng(1)
    flat = np.zeros((1, 2000, 16), dtype=np.float32)
    flat[0, :, 3:7] = numbers.choice([-1.0, 1.0], size=(2000, 4))
    assert figures(flat, piece=256)["spectrum"]["effective_rank"][0] == pytest.approx(4, rel=0.01)


def test_outliers_are_the_elements_beyond_six_standard_deviations(values: np.ndarray) -> None:
    many = np.tile(values, (1, 20, 1))
    many[1, 200:] = np.clip(many[1, 200:], -3, 3)  # few enough for the deviation to stay small beside them
    found = figures(many)["outliers"]
    for head, vectors in enumerate(many.astype(float)):
        sigma = vectors.std()
        beyond = np.abs(vectors) > 6 * sigma
        channels = beyond.sum(axis=0)
        assert found["sigma"][head] == pytest.approx(sigma, rel=CLOSE)
        assert found["count"][head] == beyond.sum()
        assert found["share"][head] == pytest.approx(beyond.mean(), rel=CLOSE)
        assert found["channel"][head] == (channels.argmax() if beyond.any() else None)
        assert found["channel_count"][head] == channels.max()
    assert found["count"][1] > 0
    assert found["channel"][1] == 3


def test_figures_do_not_depend_on_how_an_array_is_cut(values: np.ndarray) -> None:
    one, other = figures(values, piece=1), figures(values, piece=60)
    assert one.keys() == other.keys()
    for group in one.keys() - {"undefined"}:
        for name in one[group]:
            for told, expected in zip(one[group][name], other[group][name], strict=True):
                assert told == (pytest.approx(expected, rel=CLOSE) if isinstance(expected, float) else expected)
    assert one["undefined"] == other["undefined"]


def test_one_token_has_norms_and_no_spectrum_and_no_neighbour() -> None:
    found = figures(np.array([[[3.0, -4.0]]], dtype=np.float32))
    assert found["rms"] == {"mean": [3.53553], "max": [3.53553], "max_at": [0]}
    assert found["coherence"] == {"consecutive": [None], "with_mean": [1.0]}
    assert found["spectrum"] == {"entropy_nats": [None], "effective_rank": [None]}
    assert reason(found, "spectrum") == "its vectors do not vary"
    assert reason(found, "coherence.consecutive") is not None
    assert reason(found, "outliers.channel") == "it has no outliers"


def test_zeros_have_no_direction_and_no_spectrum() -> None:
    found = figures(np.zeros((2, 9, 4), dtype=np.float32))
    assert found["rms"] == {"mean": [0.0, 0.0], "max": [0.0, 0.0], "max_at": [0, 0]}
    assert found["coherence"] == {"consecutive": [None] * 2, "with_mean": [None] * 2}
    assert found["outliers"]["count"] == [None] * 2
    for figure in ("coherence.consecutive", "coherence.with_mean", "spectrum", "outliers"):
        assert reason(found, figure, 1) is not None, figure


def test_equal_vectors_do_not_vary_however_large_they_are() -> None:
    found = figures(np.full((1, 50, 3), 1.1e6, dtype=np.float32), piece=8)
    assert found["coherence"] == {"consecutive": [1.0], "with_mean": [1.0]}
    assert reason(found, "spectrum") == "its vectors do not vary"
    assert found["outliers"]["sigma"] == [0.0]


def test_vectors_that_cancel_have_no_coherence_with_their_mean() -> None:
    found = figures(np.array([[[1.0, 2.0], [-1.0, -2.0]]], dtype=np.float32))
    assert found["coherence"] == {"consecutive": [-1.0], "with_mean": [None]}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_head_with_nan_or_infinity_has_no_figures_and_leaves_the_others_theirs(
    values: np.ndarray, bad: float
) -> None:
    sound = figures(values)
    values[1, 30, 2] = bad
    found = figures(values)
    for group, names in sound.items():
        if group != "undefined":
            for name, told in names.items():
                assert found[group][name] == [told[0], None, told[2]], (group, name)
    assert reason(found, "rms", 1) == "it holds NaN or infinity"


def test_the_largest_numbers_of_float32_do_not_overflow() -> None:
    largest = np.finfo(np.float32).max
    found = figures(np.array([[[largest, 0], [-largest, largest], [largest / 4, 1]]], dtype=np.float32))
    assert all(value is not None for group in ("rms", "spectrum") for value in found[group].values())


def test_no_tokens_and_no_elements_give_no_figures() -> None:
    none = figures(np.zeros((2, 0, 4), dtype=np.float32))
    assert none["rms"]["mean"] == [None, None]
    assert reason(none, "rms", 1) == "it holds no tokens"
    empty = figures(np.zeros((1, 5, 0), dtype=np.float32))
    assert reason(empty, "rms") == "its vectors have no elements"
    headless = figures(np.zeros((0, 5, 3), dtype=np.float32))
    assert headless["rms"] == {"mean": [], "max": [], "max_at": []}


def test_what_is_held_does_not_grow_with_the_tokens() -> None:
    def held(sums: HeadSums) -> int:
        return sum(value.nbytes for value in vars(sums).values() if isinstance(value, np.ndarray))

    values = np.ones((3, 60, 64), dtype=np.float32)
    sums = HeadSums(3, 64)
    sums.add(values, np.arange(60))
    once = held(sums)
    for start in range(60, 6000, 60):
        sums.add(values, np.arange(start, start + 60))
    assert held(sums) == once
    assert once == pytest.approx(sums_bytes(3, 64), rel=0.05)


def elements(values: np.ndarray, *, piece: int = 4) -> dict[str, Any]:
    figures = ElementFigures()
    for start in range(0, values.size, piece):
        figures.add(values[start : start + piece])
    for start in range(0, values.size, piece):
        figures.count_outliers(values[start : start + piece])
    json.dumps(figures.to_map(), allow_nan=False)
    return figures.to_map()


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_an_array_without_tokens_has_norms_and_outliers(dtype: Any) -> None:
    numbers = np.random.default_rng(2).normal(size=200) * 3
    numbers[[17, 120]] = -90, 120
    values = numbers > 0 if dtype is np.bool_ else numbers.astype(dtype)
    found, exact = elements(values), values.astype(float)
    assert found["rms"] == pytest.approx(math.sqrt((exact**2).mean()), rel=CLOSE)
    assert found["max_abs"] == rounded(np.abs(exact).max())
    assert found["max_at"] == np.abs(exact).argmax()
    beyond = np.abs(exact) > 6 * exact.std()
    assert found["outliers"]["count"] == beyond.sum()
    assert found["outliers"]["share"] == pytest.approx(beyond.mean(), rel=CLOSE)
    assert found["outliers"]["sigma"] == pytest.approx(exact.std(), rel=CLOSE)
    assert dtype is np.bool_ or beyond.sum() == 2


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (np.zeros(0, dtype=np.float32), "it is empty"),
        (np.array([1, np.nan], dtype=np.float32), "it holds NaN or infinity"),
        (np.full(9, 7.5, dtype=np.float32), "its elements do not vary"),
    ],
)
def test_an_array_of_which_nothing_can_be_told_says_why(values: np.ndarray, why: str) -> None:
    found = elements(values)
    assert found["undefined"][0]["why"] == why
    assert found["outliers"]["count"] is None


def test_a_difference_is_the_largest_one_and_the_relative_length_of_all() -> None:
    numbers = np.random.default_rng(3)
    parent = numbers.normal(size=(2, 9, 4)).astype(np.float32)
    values = parent + numbers.normal(size=parent.shape).astype(np.float32) / 100
    difference = Difference()
    for start in range(0, 9, 4):
        difference.add(values[:, start : start + 4], parent[:, start : start + 4])
    away = values.astype(float) - parent.astype(float)
    assert difference.to_map() == {
        "max_abs": pytest.approx(np.abs(away).max(), rel=CLOSE),
        "relative_l2": pytest.approx(math.sqrt((away**2).sum() / (parent.astype(float) ** 2).sum()), rel=CLOSE),
        "why": None,
    }


@pytest.mark.parametrize(
    ("values", "parents", "expected"),
    [
        ([], [], (0.0, 0.0, None)),
        ([0.0], [0.0], (0.0, 0.0, None)),
        ([2.0], [0.0], (2.0, None, "the parent's are all zero")),
        ([np.nan], [1.0], (None, None, "it holds NaN or infinity")),
        ([-np.inf], [-np.inf], (None, None, "it holds NaN or infinity")),
    ],
)
def test_a_difference_is_defined_or_says_why_not(values: Any, parents: Any, expected: Any) -> None:
    difference = Difference()
    difference.add(np.array(values, dtype=np.float32), np.array(parents, dtype=np.float32))
    assert tuple(difference.to_map().values()) == expected
