"""What a retention keeps: the newest, the marked and the recent, and nothing less because of a clock (threat 37)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid.answers import VersionInfo
from torpor.memvid.errors import InvalidPolicy
from torpor.memvid.folder.marks import Marks
from torpor.memvid.folder.retention import EARLIEST_NS, Retention, RetentionPlan, plan_retention
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.store_making import index_row

UUID = "01234567-89ab-cdef-0123-456789abcdef"
SCOUT = SessionUri("default", "scout")
WRITER = SessionUri("work", "writer")
NO_MARKS = Marks(UUID)
DAY_NS = 24 * 60 * 60 * 10**9
NOW_NS = EARLIEST_NS + 1000 * DAY_NS
YEARS_NS = 3653 * DAY_NS  # ten years


def id_of(uri: SessionUri, version: int) -> str:
    return f"{uri.name}-{version}".encode().ljust(32, b".").hex()


def row(version: int, created_ns: int = NOW_NS, uri: SessionUri = SCOUT) -> VersionInfo:
    return index_row(uri, version, id_of(uri, version), created_ns=created_ns)


def daily(count: int, until_ns: int = NOW_NS, uri: SessionUri = SCOUT) -> list[VersionInfo]:
    """Versions 1 to `count`, a day apart, the last of them made at `until_ns`."""
    return [row(number, until_ns - (count - number) * DAY_NS, uri) for number in range(1, count + 1)]


def kept(plan: RetentionPlan) -> dict[int, tuple[str, ...]]:
    return {one.row.version: one.reasons for one in plan.keep}


def dropped(plan: RetentionPlan) -> list[int]:
    return [one.version for one in plan.drop]


def require_plan(
    rows: list[VersionInfo],
    retention: Retention,
    wanted: list[int],
    reasons: dict[int, tuple[str, ...]],
    now_ns: int = NOW_NS,
    **more: Any,
) -> None:
    """These versions are dropped, the others kept, some of them for these reasons."""
    plan = plan_retention(rows, more.get("marks", NO_MARKS), retention, now_ns, more.get("unsound", frozenset()))
    assert dropped(plan) == wanted
    assert sorted([*wanted, *kept(plan)]) == sorted(one.version for one in rows)
    assert {version: kept(plan)[version] for version in reasons} == reasons


# --- the rules


def unsound(*versions: int) -> set[bytes]:
    return {id_of(SCOUT, version) for version in versions}


MARKED = (
    NO_MARKS.tag(SCOUT, id_of(SCOUT, 1), "stable")
    .tag(SCOUT, id_of(SCOUT, 1), "good")
    .pin(SCOUT, id_of(SCOUT, 1))
    .pin(SCOUT, id_of(SCOUT, 3))
)
WITH_LEDGERS = [dataclasses.replace(one, unread_tokens=9) if one.version in (4, 6) else one for one in daily(6)]
LAST_2 = ("among the last 2",)
UNWOKEN = ("no later version can be woken",)


@pytest.mark.parametrize(
    ("rows", "retention", "wanted", "reasons", "more"),
    [
        pytest.param(daily(5), Retention(keep_last=2), [1, 2, 3], {4: LAST_2, 5: ("newest", *LAST_2)}, {}, id="last"),
        pytest.param(
            daily(10), Retention(keep_days=3), [1, 2, 3, 4, 5, 6],
            {7: ("within 3 days",), 10: ("newest", "within 3 days")}, {}, id="days, to the very nanosecond",
        ),
        pytest.param(daily(4), Retention(keep_days=1.5), [1, 2], {}, {}, id="parts of a day"),
        pytest.param(daily(10), Retention(keep_last=5, keep_days=1), [1, 2, 3, 4, 5], {}, {}, id="either: the last"),
        pytest.param(daily(10), Retention(keep_last=1, keep_days=7), [1, 2], {}, {}, id="either: the days"),
        pytest.param(
            daily(5), Retention(keep_last=1), [2, 4], {1: ("pinned", "tagged good", "tagged stable"), 3: ("pinned",)},
            {"marks": MARKED}, id="marked versions, with every reason",
        ),
        pytest.param(
            daily(5), Retention(keep_last=2), [1, 2, 3], {}, {"marks": NO_MARKS.pin(SCOUT, id_of(SCOUT, 5))},
            id="marked versions count among the last",
        ),
        pytest.param(
            daily(6), Retention(keep_last=2), [1, 2, 3], {}, {"unsound": unsound(5)}, id="unsound ones do not count",
        ),
        pytest.param(
            daily(5), Retention(keep_last=1), [1, 2, 3], {4: (*UNWOKEN, "among the last 1")},
            {"unsound": unsound(3, 5)}, id="what stands in for an unsound newest one",
        ),
        pytest.param(
            daily(5), Retention(keep_days=1), [1, 2], {3: ("within 1 days",)}, {"unsound": unsound(3, 5)},
            id="unsound ones are kept by their date",
        ),
        pytest.param(
            daily(5), Retention(keep_last=1, keep_days=1), [], {}, {"unsound": unsound(1, 2, 3, 4, 5)},
            id="nothing is lost of a session that cannot be woken",
        ),
        pytest.param(
            WITH_LEDGERS, Retention(keep_last=2), [1, 2],
            {3: LAST_2, 4: LAST_2, 5: LAST_2, 6: ("newest", *LAST_2)}, {}, id="versions that end in a ledger",
        ),
        pytest.param(
            daily(3), Retention(keep_last=(1 << 53) - 1, keep_days=36_500), [], {}, {}, id="the largest numbers",
        ),
        pytest.param([row(7, EARLIEST_NS)], Retention(keep_days=0.001), [], {}, {}, id="the only version"),
    ],
)  # fmt: skip
def test_what_a_rule_keeps_and_why(
    rows: list[VersionInfo], retention: Retention, wanted: list[int], reasons: dict[int, tuple[str, ...]], more: Any
) -> None:
    require_plan(rows, retention, wanted, reasons, **more)


def test_each_session_is_judged_for_itself() -> None:
    rows = daily(3) + daily(4, uri=WRITER, until_ns=NOW_NS - 100 * DAY_NS)
    plan = plan_retention(rows, NO_MARKS, Retention(keep_last=2), NOW_NS)
    assert [(one.uri, one.version) for one in plan.drop] == [(SCOUT, 1), (WRITER, 1), (WRITER, 2)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("keep_last", value) for value in (0, -1, True, 1.0, "3", 1 << 53, 10**400)),
        *(("keep_days", value) for value in (0, 0.0, -1, True, "3", float("nan"), float("inf"), 36_501, 10**400)),
    ],
)
def test_a_number_that_means_nothing_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidPolicy) as refusal:
        Retention(**{field: value})
    assert refusal.value.field == field


# --- clocks


def test_threat_37_time_alone_removes_nothing() -> None:
    """A session that was idle for ten years, or a clock that is ten years ahead: the same plan as on the last day."""
    for retention in (Retention(keep_days=3), Retention(keep_last=2, keep_days=3)):
        fresh = plan_retention(daily(10), NO_MARKS, retention, NOW_NS)
        assert plan_retention(daily(10), NO_MARKS, retention, NOW_NS + YEARS_NS) == fresh


UNBELIEVED = ("its date cannot be believed",)
IN_TEN_YEARS = row(6, NOW_NS + YEARS_NS)


@pytest.mark.parametrize(
    ("rows", "retention", "wanted", "reasons"),
    [
        pytest.param(
            [*daily(5), IN_TEN_YEARS, row(7)], Retention(keep_days=3), [1], {6: UNBELIEVED}, id="one from the future",
        ),
        pytest.param(
            [*daily(5), IN_TEN_YEARS], Retention(keep_days=3), [1], {}, id="the newest from the future",
        ),
        *(
            pytest.param([row(1, made), *daily(6)[1:]], Retention(keep_days=3), [2], {1: UNBELIEVED}, id=f"at {made}")
            for made in (0, 1, EARLIEST_NS - 1)
        ),
        pytest.param(
            [row(1, EARLIEST_NS), row(2, NOW_NS - DAY_NS), row(3)], Retention(keep_days=3), [1],
            {3: ("newest", "within 3 days")}, id="the first date that can be believed, and the present",
        ),
        pytest.param(
            [row(1, NOW_NS - DAY_NS), row(2, NOW_NS - 365 * DAY_NS), row(3)], Retention(keep_days=3), [],
            {2: ("within 3 days",)}, id="one made while the clock was a year behind",
        ),
        pytest.param([row(at, 0) for at in range(1, 5)], Retention(keep_days=1), [], {}, id="no date can be believed"),
        pytest.param([row(at, 0) for at in range(1, 5)], Retention(keep_last=1), [1, 2, 3], {}, id="and none decides"),
        pytest.param(
            [row(at, NOW_NS - at * YEARS_NS) for at in range(1, 8)], Retention(keep_last=4), [1, 2, 3], {},
            id="without days no date decides",
        ),
    ],
)  # fmt: skip
def test_threat_37_a_date_that_cannot_be_believed_removes_nothing(
    rows: list[VersionInfo], retention: Retention, wanted: list[int], reasons: dict[int, tuple[str, ...]]
) -> None:
    require_plan(rows, retention, wanted, reasons)


def test_threat_37_a_clock_set_back_removes_nothing_that_was_kept_by_its_date() -> None:
    require_plan(daily(10), Retention(keep_days=3), [], {1: UNBELIEVED}, NOW_NS - YEARS_NS)


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
    rows: list[VersionInfo], retention: Retention, now_ns: int, pinned: set[int], random: Any
) -> None:
    marks = NO_MARKS
    for version in pinned:
        marks = marks.pin(SCOUT, id_of(SCOUT, version))
    mixed = random.sample(rows, len(rows))
    plan = plan_retention(mixed, marks, retention, now_ns)
    gone = set(dropped(plan))
    assert sorted([*gone, *kept(plan)]) == [one.version for one in rows]
    assert dropped(plan) == sorted(gone)
    assert all(one.reasons for one in plan.keep)
    must_stay = pinned | {rows[-1].version}
    must_stay |= {one.version for one in rows[-(retention.keep_last or 1) :]}
    if retention == Retention():
        must_stay |= {one.version for one in rows}
    if retention.keep_days is not None:
        must_stay |= {one.version for one in rows if one.created_ns > now_ns or one.created_ns < EARLIEST_NS}
        must_stay |= {one.version for one in rows if one.created_ns >= now_ns - int(retention.keep_days * DAY_NS)}
    assert not gone & must_stay


@given(histories, retentions, clocks)
def test_a_second_prune_finds_nothing_more(rows: list[VersionInfo], retention: Retention, now_ns: int) -> None:
    left = [one.row for one in plan_retention(rows, NO_MARKS, retention, now_ns).keep]
    assert plan_retention(left, NO_MARKS, retention, now_ns).drop == ()


@given(histories, st.integers(1, 12), clocks)
def test_keeping_more_never_drops_what_keeping_less_kept(rows: list[VersionInfo], last: int, now_ns: int) -> None:
    few = plan_retention(rows, NO_MARKS, Retention(keep_last=last, keep_days=2), now_ns)
    more = plan_retention(rows, NO_MARKS, Retention(keep_last=last + 1, keep_days=3), now_ns)
    assert set(dropped(more)) <= set(dropped(few))
