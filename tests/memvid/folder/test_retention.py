"""What a retention keeps: the newest, the marked and the recent, and nothing less because of a clock (threat 37)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid import IndexRow, SessionUri
from torpor.memvid.errors import InvalidPolicy
from torpor.memvid.folder.marks import Marks
from torpor.memvid.folder.retention import EARLIEST_NS, Retention, RetentionPlan, plan_retention

UUID = "01234567-89ab-cdef-0123-456789abcdef"
SCOUT = SessionUri("default", "scout")
WRITER = SessionUri("work", "writer")
NO_MARKS = Marks(UUID)
DAY_NS = 24 * 60 * 60 * 10**9
NOW_NS = EARLIEST_NS + 1000 * DAY_NS
YEARS_NS = 3653 * DAY_NS  # ten years


def id_of(uri: SessionUri, version: int) -> bytes:
    return f"{uri.name}-{version}".encode().ljust(32, b".")


def row(version: int, created_ns: int = NOW_NS, uri: SessionUri = SCOUT) -> IndexRow:
    return IndexRow(
        uri=uri,
        version=version,
        bundle_id=id_of(uri, version),
        parent=None,
        identity_digest=b"\x11" * 32,
        token_count=version,
        bundle_bytes=100,
        logical_bytes=1000,
        created_ns=created_ns,
        model="demo",
        labels=(),
    )


def daily(count: int, until_ns: int = NOW_NS, uri: SessionUri = SCOUT) -> list[IndexRow]:
    """Versions 1 to `count`, a day apart, the last of them made at `until_ns`."""
    return [row(number, until_ns - (count - number) * DAY_NS, uri) for number in range(1, count + 1)]


def kept(plan: RetentionPlan) -> dict[int, tuple[str, ...]]:
    return {one.row.version: one.reasons for one in plan.keep}


def dropped(plan: RetentionPlan) -> list[int]:
    return [one.version for one in plan.drop]


# --- the rules


def test_without_a_rule_everything_stays() -> None:
    plan = plan_retention(daily(5), NO_MARKS, Retention(), NOW_NS + YEARS_NS)
    assert dropped(plan) == []
    assert sorted(kept(plan)) == [1, 2, 3, 4, 5]
    assert all(one.reasons for one in plan.keep)


def test_the_last_n_stay_and_the_newest_is_told_as_such() -> None:
    plan = plan_retention(daily(5), NO_MARKS, Retention(keep_last=2), NOW_NS)
    assert dropped(plan) == [1, 2, 3]
    assert kept(plan) == {4: ("among the last 2",), 5: ("newest", "among the last 2")}


def test_the_days_stay_that_are_asked_for() -> None:
    plan = plan_retention(daily(10), NO_MARKS, Retention(keep_days=3), NOW_NS)
    assert dropped(plan) == [1, 2, 3, 4, 5, 6]
    assert kept(plan)[7] == ("within 3 days",)  # to the very nanosecond
    assert kept(plan)[10] == ("newest", "within 3 days")


def test_parts_of_a_day_count() -> None:
    plan = plan_retention(daily(4), NO_MARKS, Retention(keep_days=1.5), NOW_NS)
    assert dropped(plan) == [1, 2]


def test_a_version_stays_if_either_rule_keeps_it() -> None:
    assert dropped(plan_retention(daily(10), NO_MARKS, Retention(keep_last=5, keep_days=1), NOW_NS)) == [1, 2, 3, 4, 5]
    assert dropped(plan_retention(daily(10), NO_MARKS, Retention(keep_last=1, keep_days=7), NOW_NS)) == [1, 2]


def test_marked_versions_stay_with_every_reason_told() -> None:
    marks = NO_MARKS.tag(SCOUT, id_of(SCOUT, 1), 1, "stable").tag(SCOUT, id_of(SCOUT, 1), 1, "good")
    marks = marks.pin(SCOUT, id_of(SCOUT, 1), 1).pin(SCOUT, id_of(SCOUT, 3), 3)
    plan = plan_retention(daily(5), marks, Retention(keep_last=1), NOW_NS)
    assert dropped(plan) == [2, 4]
    assert kept(plan)[1] == ("pinned", "tagged good", "tagged stable")
    assert kept(plan)[3] == ("pinned",)


def test_marked_versions_count_among_the_last_n() -> None:
    marks = NO_MARKS.pin(SCOUT, id_of(SCOUT, 5), 5)
    assert dropped(plan_retention(daily(5), marks, Retention(keep_last=2), NOW_NS)) == [1, 2, 3]


def test_a_version_that_cannot_be_woken_counts_for_nothing() -> None:
    unsound = {id_of(SCOUT, 3), id_of(SCOUT, 5)}
    plan = plan_retention(daily(6), NO_MARKS, Retention(keep_last=2), NOW_NS, {id_of(SCOUT, 5)})
    assert dropped(plan) == [1, 2, 3]
    plan = plan_retention(daily(5), NO_MARKS, Retention(keep_last=1), NOW_NS, unsound)
    assert dropped(plan) == [1, 2, 3]
    assert kept(plan)[4] == ("no later version can be woken", "among the last 1")
    plan = plan_retention(daily(5), NO_MARKS, Retention(keep_days=1), NOW_NS, unsound)
    assert dropped(plan) == [1, 2]
    assert "within 1 days" in kept(plan)[3]


def test_versions_that_end_in_a_ledger_do_not_count_among_the_last_n() -> None:
    rows = [dataclasses.replace(one, unread_tokens=9) if one.version in (4, 6) else one for one in daily(6)]
    plan = plan_retention(rows, NO_MARKS, Retention(keep_last=2), NOW_NS)
    assert kept(plan) == {
        3: ("among the last 2",),
        4: ("among the last 2",),
        5: ("among the last 2",),
        6: ("newest", "among the last 2"),
    }
    assert dropped(plan) == [1, 2]


def test_a_session_of_which_nothing_can_be_woken_loses_nothing() -> None:
    unsound = {id_of(SCOUT, version) for version in range(1, 6)}
    assert dropped(plan_retention(daily(5), NO_MARKS, Retention(keep_last=1, keep_days=1), NOW_NS, unsound)) == []


def test_each_session_is_judged_for_itself() -> None:
    rows = daily(3) + daily(4, uri=WRITER, until_ns=NOW_NS - 100 * DAY_NS)
    plan = plan_retention(rows, NO_MARKS, Retention(keep_last=2), NOW_NS)
    assert [(one.uri, one.version) for one in plan.drop] == [(SCOUT, 1), (WRITER, 1), (WRITER, 2)]


def test_a_sessions_only_version_stays() -> None:
    for retention in (Retention(keep_last=1), Retention(keep_days=0.001)):
        plan = plan_retention([row(7, EARLIEST_NS)], NO_MARKS, retention, NOW_NS)
        assert kept(plan)[7][0] == "newest"


def test_nothing_is_planned_for_nothing() -> None:
    assert plan_retention([], NO_MARKS, Retention(keep_last=1), NOW_NS) == RetentionPlan((), ())


def test_the_oldest_is_dropped_first_in_whatever_order_the_versions_come() -> None:
    rows = daily(9)
    mixed = rows[5:] + rows[:5][::-1]
    plan = plan_retention(mixed, NO_MARKS, Retention(keep_last=3), NOW_NS)
    assert dropped(plan) == [1, 2, 3, 4, 5, 6]
    assert plan == plan_retention(rows, NO_MARKS, Retention(keep_last=3), NOW_NS)


@pytest.mark.parametrize("keep_last", [0, -1, True, 1.0, "3", 1 << 53, 10**400])
def test_a_number_of_versions_that_means_nothing_is_refused(keep_last: Any) -> None:
    with pytest.raises(InvalidPolicy) as refusal:
        Retention(keep_last=keep_last)
    assert refusal.value.field == "keep_last"


@pytest.mark.parametrize("keep_days", [0, 0.0, -1, True, "3", float("nan"), float("inf"), 36_501, 10**400])
def test_a_number_of_days_that_means_nothing_is_refused(keep_days: Any) -> None:
    with pytest.raises(InvalidPolicy) as refusal:
        Retention(keep_days=keep_days)
    assert refusal.value.field == "keep_days"


def test_the_largest_numbers_are_accepted() -> None:
    plan = plan_retention(daily(3), NO_MARKS, Retention(keep_last=(1 << 53) - 1, keep_days=36_500), NOW_NS)
    assert dropped(plan) == []


# --- clocks


def test_threat_37_time_alone_removes_nothing() -> None:
    """A session that was idle for ten years, or a clock that is ten years ahead: the same plan as on the last day."""
    for retention in (Retention(keep_days=3), Retention(keep_last=2, keep_days=3)):
        fresh = plan_retention(daily(10), NO_MARKS, retention, NOW_NS)
        assert plan_retention(daily(10), NO_MARKS, retention, NOW_NS + YEARS_NS) == fresh


def test_threat_37_a_clock_set_back_removes_nothing_that_was_kept_by_its_date() -> None:
    plan = plan_retention(daily(10), NO_MARKS, Retention(keep_days=3), NOW_NS - YEARS_NS)
    assert dropped(plan) == []
    assert kept(plan)[1] == ("its date cannot be believed",)


def test_threat_37_a_version_from_the_future_stays_and_makes_no_other_look_old() -> None:
    rows = [*daily(5), row(6, NOW_NS + YEARS_NS), row(7, NOW_NS)]
    plan = plan_retention(rows, NO_MARKS, Retention(keep_days=3), NOW_NS)
    assert dropped(plan) == [1]
    assert kept(plan)[6] == ("its date cannot be believed",)


def test_threat_37_a_newest_version_from_the_future_makes_no_other_look_old() -> None:
    rows = [*daily(5), row(6, NOW_NS + YEARS_NS)]
    assert dropped(plan_retention(rows, NO_MARKS, Retention(keep_days=3), NOW_NS)) == [1]


@pytest.mark.parametrize("created_ns", [0, 1, EARLIEST_NS - 1])
def test_threat_37_a_version_of_1970_stays(created_ns: int) -> None:
    rows = [row(1, created_ns), *daily(6)[1:]]
    plan = plan_retention(rows, NO_MARKS, Retention(keep_days=3), NOW_NS)
    assert kept(plan)[1] == ("its date cannot be believed",)
    assert dropped(plan) == [2]


def test_threat_37_the_first_date_that_can_be_believed_and_the_present_are_believed() -> None:
    rows = [row(1, EARLIEST_NS), row(2, NOW_NS - DAY_NS), row(3, NOW_NS)]
    plan = plan_retention(rows, NO_MARKS, Retention(keep_days=3), NOW_NS)
    assert dropped(plan) == [1]
    assert kept(plan)[3] == ("newest", "within 3 days")


def test_threat_37_a_version_is_never_taken_to_be_older_than_those_before_it() -> None:
    """Made while the clock was a year behind, between two versions of today."""
    rows = [row(1, NOW_NS - DAY_NS), row(2, NOW_NS - 365 * DAY_NS), row(3, NOW_NS)]
    plan = plan_retention(rows, NO_MARKS, Retention(keep_days=3), NOW_NS)
    assert dropped(plan) == []
    assert kept(plan)[2] == ("within 3 days",)


def test_threat_37_no_date_at_all_can_be_believed() -> None:
    rows = [row(number, 0) for number in range(1, 5)]
    assert dropped(plan_retention(rows, NO_MARKS, Retention(keep_days=1), NOW_NS)) == []
    assert dropped(plan_retention(rows, NO_MARKS, Retention(keep_last=1), NOW_NS)) == [1, 2, 3]


def test_threat_37_without_days_dates_decide_nothing() -> None:
    rows = [row(number, NOW_NS - number * YEARS_NS) for number in range(1, 8)]
    assert dropped(plan_retention(rows, NO_MARKS, Retention(keep_last=4), NOW_NS)) == [1, 2, 3]


dates = st.one_of(
    st.integers(0, 10),
    st.integers(EARLIEST_NS - DAY_NS, NOW_NS + DAY_NS),
    st.integers(NOW_NS - 5 * DAY_NS, NOW_NS),
    st.integers(NOW_NS, (1 << 63) - 1),
)
clocks = st.one_of(st.integers(0, 10), st.integers(EARLIEST_NS, NOW_NS + 20 * YEARS_NS))
histories = st.lists(dates, min_size=1, max_size=12).map(
    lambda made: [row(number, created_ns) for number, created_ns in enumerate(made, start=1)]
)
retentions = st.builds(
    Retention, st.none() | st.integers(1, 14), st.none() | st.floats(0.001, 36_500) | st.integers(1, 10)
)


@given(histories, retentions, clocks, st.sets(st.integers(1, 12)), st.randoms())
def test_threat_37_whatever_the_clocks_say_what_must_stay_stays(
    rows: list[IndexRow], retention: Retention, now_ns: int, pinned: set[int], random: Any
) -> None:
    marks = NO_MARKS
    for version in pinned:
        marks = marks.pin(SCOUT, id_of(SCOUT, version), version)
    mixed = random.sample(rows, len(rows))
    plan = plan_retention(mixed, marks, retention, now_ns)
    gone = set(dropped(plan))
    assert sorted([*gone, *kept(plan)]) == [one.version for one in rows]
    assert dropped(plan) == sorted(gone)
    assert all(one.reasons for one in plan.keep)
    must_stay = pinned | {rows[-1].version}
    must_stay |= {one.version for one in rows[-(retention.keep_last or 1) :]}
    if retention.keeps_all:
        must_stay |= {one.version for one in rows}
    if retention.keep_days is not None:
        must_stay |= {one.version for one in rows if one.created_ns > now_ns or one.created_ns < EARLIEST_NS}
        must_stay |= {one.version for one in rows if one.created_ns >= now_ns - int(retention.keep_days * DAY_NS)}
    assert not gone & must_stay


@given(histories, retentions, clocks)
def test_a_second_prune_finds_nothing_more(rows: list[IndexRow], retention: Retention, now_ns: int) -> None:
    left = [one.row for one in plan_retention(rows, NO_MARKS, retention, now_ns).keep]
    assert plan_retention(left, NO_MARKS, retention, now_ns).drop == ()


@given(histories, st.integers(1, 12), clocks)
def test_keeping_more_never_drops_what_keeping_less_kept(rows: list[IndexRow], last: int, now_ns: int) -> None:
    few = plan_retention(rows, NO_MARKS, Retention(keep_last=last, keep_days=2), now_ns)
    more = plan_retention(rows, NO_MARKS, Retention(keep_last=last + 1, keep_days=3), now_ns)
    assert set(dropped(more)) <= set(dropped(few))


def test_a_plan_is_a_value_and_leaves_the_rows_as_they_were() -> None:
    rows = daily(4)[::-1]
    before = [dataclasses.replace(one) for one in rows]
    plan_retention(rows, NO_MARKS, Retention(keep_last=1), NOW_NS)
    assert rows == before
