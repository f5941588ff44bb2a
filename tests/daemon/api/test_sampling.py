"""Sampling parameters: what can be sampled from, and nothing else (threat 48)."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.api.limits import MAX_SEED, MAX_TOKEN_ID
from torpor.daemon.api.sampling import Sampling, TokenBias
from torpor.daemon.errors import InvalidSampling


def test_the_defaults_are_greedy() -> None:
    assert Sampling() == Sampling(0.0, 1.0, 0, 0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 100.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("temperature", 1e-40),
        ("temperature", 1e-320),
        ("top_p", 0.0),
        ("top_p", -1),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 2.5),
        ("top_k", 2.0),
        ("top_k", math.inf),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.01),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", 10**400),
        ("logit_bias", 5),
        ("logit_bias", [5]),
        ("logit_bias", [{"id": 5}]),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("seed", 1.0),
        ("seed", "1"),
        ("seed", False),
    ],
)
def test_a_value_that_cannot_be_sampled_from_is_refused_by_its_field_threat_48(field: str, value: Any) -> None:
    with pytest.raises(InvalidSampling) as refusal:
        Sampling(**{field: value})
    assert refusal.value.field == field
    assert field in refusal.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 100),
        ("temperature", 1e-4),
        ("top_p", 1e-6),
        ("top_p", 1),
        ("top_k", 2**31 - 1),
        ("min_p", 1.0),
        ("repetition_penalty", 1e-3),
        ("presence_penalty", -2),
        ("frequency_penalty", 2.0),
        ("logit_bias", (TokenBias(MAX_TOKEN_ID, -1000), TokenBias(0, 1000.0), TokenBias(1))),
        ("seed", MAX_SEED),
    ],
)
def test_the_ends_of_each_range_are_accepted(field: str, value: Any) -> None:
    assert getattr(Sampling(**{field: value}), field) == value


@given(
    st.builds(
        Sampling,
        temperature=st.floats(0.01, 100),
        top_p=st.floats(1e-6, 1),
        top_k=st.integers(0, 2**31 - 1),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(1e-3, 100),
        seed=st.integers(0, MAX_SEED),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logit_bias=st.lists(st.builds(TokenBias, st.integers(0, 99), st.none() | st.floats(-1000, 1000)), max_size=3),
    )
)
def test_what_a_snapshot_keeps_is_read_back(sampling: Sampling) -> None:
    assert Sampling.from_map(sampling.to_map()) == sampling


def test_the_map_of_before_is_read_and_written_where_nothing_else_is_asked() -> None:
    before = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 7}
    assert Sampling.from_map(before) == Sampling(0.5, seed=7)
    assert Sampling.from_map(before).to_map() == before


@pytest.mark.parametrize("bias", [(-1, 1.0), (2**32, 1.0), (1.0, 1.0), (5, 1000.5), (5, math.nan), (5, "1"), (5, True)])
def test_a_bias_that_cannot_be_added_is_refused_threat_48(bias: Any) -> None:
    with pytest.raises(InvalidSampling):
        TokenBias(*bias)


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_map_of_other_fields_is_refused(change: str) -> None:
    kept: dict[str, Any] = dict(Sampling().to_map())
    if change == "missing":
        del kept["top_p"]
    else:
        kept["beam_width"] = 4
    with pytest.raises(InvalidSampling):
        Sampling.from_map(kept)


def test_what_was_given_is_what_is_named_a_default_that_is_handed_on_too() -> None:
    assert Sampling(temperature=0.5, seed=0).named() == {"temperature": 0.5, "seed": 0}
    assert Sampling().named() == {}
    assert Sampling(top_p=Sampling().top_p).named() == {"top_p": 1.0}
    assert Sampling(0.5, seed=3).changed(Sampling(temperature=0.0)) == Sampling(seed=3)
    assert Sampling(0.5).changed(None) == Sampling(0.5)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_draws_the_same_and_names_the_same(again: Callable[[Sampling], Sampling]) -> None:
    sampling = Sampling(temperature=0.5, top_k=0, logit_bias=[TokenBias(3)])
    assert again(sampling) == sampling
    assert again(sampling).named() == {"temperature": 0.5, "top_k": 0, "logit_bias": [{"token": 3, "bias": None}]}
