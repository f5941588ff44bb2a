"""Restore or recompute: the decision as a function of values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torpor.daemon.models.rates import Rate, Rates
from torpor.daemon.sleep.choosing import Calls, Work, choose
from torpor.snapshot.passes import UNREPEATABLE, Passes

MIB = 1 << 20
WORK = Work(read_bytes=100 * MIB, behind=Calls(), again=Calls(1000, 10))
SLOW_DISK = Rates(prefill=Rate(1e-4, 3), decode=Rate(1e-3, 3), restore=Rate(1e-6, 3), fixed=Rate(0.02, 3))
FAST_DISK = replace(SLOW_DISK, restore=Rate(1e-10, 3))


def calls(sizes: list[int]) -> Calls:
    read = Passes()
    for size in sizes:
        read.add(size)
    found = Calls.of(read.runs())
    assert found.tokens == read.token_count
    return found


def test_calls_are_told_by_what_they_cost() -> None:
    assert calls([256, 256, 44, 1]) == Calls(in_chunks=557, alone=0), "the last token of a reading is in its rate"
    assert calls([256, 1, 1, 1]) == Calls(in_chunks=257, alone=2)
    assert calls([1, 1, 30, 1, 1]) == Calls(in_chunks=31, alone=3)
    assert calls([30, 1, UNREPEATABLE, UNREPEATABLE, 1]) == Calls(in_chunks=31, alone=3)
    assert calls([]).tokens == 0


def test_seconds_are_what_the_rates_say() -> None:
    choice = choose(WORK, SLOW_DISK, "off")
    assert choice.restore_s == pytest.approx(0.02 + 100 * MIB * 1e-6)
    assert choice.recompute_s == pytest.approx(0.02 + 0.1 + 0.01)
    behind = choose(replace(WORK, behind=Calls(500)), SLOW_DISK, "off")
    assert behind.restore_s == pytest.approx(0.02 + 100 * MIB * 1e-6 + 0.05), "what restoring leaves to the model"


@pytest.mark.parametrize("policy", ["exact", "fastest"])
def test_the_choice_flips_with_the_rates(policy: str) -> None:
    assert choose(WORK, SLOW_DISK, policy).way == "recompute"  # type: ignore[arg-type]
    assert choose(WORK, FAST_DISK, policy).way == "restore"  # type: ignore[arg-type]
    slow_model = replace(SLOW_DISK, prefill=Rate(1.0, 3))
    assert choose(WORK, slow_model, policy).way == "restore"  # type: ignore[arg-type]


def test_unless_the_daemon_was_told_otherwise_it_is_restored_and_the_other_way_is_told() -> None:
    choice = choose(WORK, SLOW_DISK, "off")
    assert choice.way == "restore"
    assert "would be faster" in choice.reason
    assert "--recompute exact" in choice.reason


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("prefill", "no text was read"),
        ("decode", "no token was written"),
        ("restore", "no wake was seen"),
        ("fixed", "no wake was seen"),
    ],
)
def test_where_a_rate_is_not_measured_it_is_restored(lacks: str, said: str) -> None:
    choice = choose(WORK, replace(SLOW_DISK, **{lacks: None}), "fastest")
    assert choice.way == "restore"
    assert None in (choice.restore_s, choice.recompute_s)
    assert said in choice.reason


def test_a_rate_that_nothing_needs_is_not_missed() -> None:
    work, rates = replace(WORK, again=Calls(1000, 0)), replace(SLOW_DISK, decode=None)
    assert choose(work, rates, "exact").way == "recompute"


def test_what_may_give_other_bits_is_recomputed_only_where_that_was_asked_for() -> None:
    work = replace(WORK, inexact="it rained")
    assert choose(work, SLOW_DISK, "exact").way == "restore"
    assert "it rained" in choose(work, SLOW_DISK, "exact").reason
    assert choose(work, SLOW_DISK, "fastest").way == "recompute"
    assert "recomputed" in choose(work, SLOW_DISK, "fastest").reason


@pytest.mark.parametrize("policy", ["off", "exact", "fastest"])
def test_what_cannot_be_recomputed_is_restored_by_every_policy(policy: str) -> None:
    choice = choose(replace(WORK, obstacle="there is nothing to do it from"), SLOW_DISK, policy)  # type: ignore[arg-type]
    assert (choice.way, "nothing to do it from" in choice.reason) == ("restore", True)
