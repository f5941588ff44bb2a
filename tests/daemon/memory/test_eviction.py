"""Which sessions go to sleep so that others fit: a table of cases, and rules that hold for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.memory.eviction import Resident, ResidentModel, plan_eviction
from torpor.memvid.uri import SessionUri


def resident(name: str, size: int, last_used: float, *, in_use: bool = False) -> Resident:
    return Resident(SessionUri("default", name), size, last_used, in_use)


def names(leaving: tuple[SessionUri | str, ...]) -> list[str]:
    return [uri.name for uri in leaving if isinstance(uri, SessionUri)]


def test_nothing_goes_where_all_fits() -> None:
    assert plan_eviction([resident("a", 60, 1)], 60, 40, 100) == ()


def test_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    residents = [resident("new", 30, 9), resident("old", 30, 1), resident("mid", 30, 5)]
    assert names(plan_eviction(residents, 90, 20, 100)) == ["old"]
    assert names(plan_eviction(residents, 90, 41, 100)) == ["old", "mid"]


def test_what_is_in_use_stays_however_old_it_is() -> None:
    residents = [resident("used", 30, 0, in_use=True), resident("idle", 30, 5)]
    assert names(plan_eviction(residents, 60, 60, 100)) == ["idle"]


def test_what_takes_nothing_stays_for_its_sleep_would_free_nothing() -> None:
    assert plan_eviction([resident("empty", 0, 0)], 100, 10, 100) == ()


def test_what_can_go_goes_even_where_it_is_not_enough() -> None:
    assert plan_eviction([resident("a", 30, 1)], 90, 60, 100) == (SessionUri("default", "a"),)


def test_those_used_at_the_same_time_go_by_name_so_that_a_plan_is_always_the_same() -> None:
    residents = [resident("b", 30, 1), resident("a", 30, 1)]
    assert names(plan_eviction(residents, 60, 60, 100)) == ["a"]


def model(name: str, size: int, last_used: float, *, in_use: bool = False) -> ResidentModel:
    return ResidentModel(name, size, last_used, in_use)


def on(name: str, size: int, last_used: float, model: str, *, in_use: bool = False) -> Resident:
    return Resident(SessionUri("default", name), size, last_used, in_use, model)


def leaving(plan: tuple[SessionUri | str, ...]) -> list[str]:
    return [each if isinstance(each, str) else each.name for each in plan]


def test_a_model_goes_after_its_sessions_and_before_the_sessions_of_one_that_was_used_later() -> None:
    residents = [on("a", 10, 1, "old"), on("b", 10, 9, "new"), on("c", 10, 4, "old")]
    models = [model("new", 100, 2), model("old", 100, 3)]
    assert leaving(plan_eviction(residents, 230, 230, 230, models)) == ["a", "c", "old", "b", "new"]
    assert leaving(plan_eviction(residents, 230, 60, 230, models)) == ["a", "c", "old"]
    assert leaving(plan_eviction(residents, 230, 20, 230, models)) == ["a", "c"]


def test_a_model_that_was_used_itself_later_than_its_sessions_goes_then() -> None:
    models = [model("m", 100, 7)]
    assert leaving(plan_eviction([on("a", 10, 1, "m"), on("b", 10, 5, "n")], 120, 120, 120, models)) == ["a", "b", "m"]


@pytest.mark.parametrize(
    ("residents", "models"),
    [
        ([on("a", 10, 1, "m", in_use=True)], [model("m", 100, 1)]),
        ([on("a", 0, 1, "m")], [model("m", 100, 1)]),
        ([], [model("m", 100, 1, in_use=True)]),
    ],
)
def test_a_model_stays_that_is_held_or_has_a_session_that_stays(
    residents: list[Resident], models: list[ResidentModel]
) -> None:
    assert plan_eviction(residents, 110, 50, 110, models) == ()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.booleans()), max_size=12),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_a_plan_frees_what_is_wanted_or_all_that_can_go(
    sizes: list[tuple[int, int, bool]], wanted: int, budget: int
) -> None:
    residents = [resident(f"s{at:02}", size, used, in_use=busy) for at, (size, used, busy) in enumerate(sizes)]
    held = sum(each.bytes for each in residents)
    plan = plan_eviction(residents, held, wanted, budget)
    by_uri = {each.uri: each for each in residents}
    gone = [by_uri[uri] for uri in plan if isinstance(uri, SessionUri)]
    assert not any(each.in_use for each in gone)
    assert [each.last_used for each in gone] == sorted(each.last_used for each in gone)
    left = held - sum(each.bytes for each in gone)
    if gone:
        assert left + gone[-1].bytes + wanted > budget, "the last one need not have gone"
    if left + wanted > budget:
        assert {each.uri for each in residents if not each.in_use and each.bytes} == set(plan)
