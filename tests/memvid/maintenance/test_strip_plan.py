"""The plan of what goes where a store has too little room: the order, what never goes, and dates that lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from torpor.memvid.answers import VersionInfo
from torpor.memvid.folder.marks import Marks
from torpor.memvid.folder.retention import EARLIEST_NS
from torpor.memvid.limits import MAX_STRIPS
from torpor.memvid.maintenance import strip_plan
from torpor.memvid.maintenance.strip_plan import RoomPolicy, Stock, plan_deletes, plan_strips
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.store_making import index_row

HOUR = 3600 * 10**9
DAY = 24 * HOUR
NOW = EARLIEST_NS + 1000 * DAY
TODAY = NOW // DAY
SIZE = 100
STORE = "2d4ef7d6-6f6b-4f5c-9c1a-000000000000"


def bundle(name: str, version: int = 1) -> str:
    return f"{name}{version}".encode().ljust(32, b".").hex()


def row(name: str, hours_ago: float, version: int = 1, *, unnamed: bool = True) -> VersionInfo:
    created = NOW - int(hours_ago * HOUR)
    uri = SessionUri("default", name)
    sizes = {"token_count": 1, "bundle_bytes": SIZE, "logical_bytes": SIZE}
    return index_row(uri, version, bundle(name, version), **sizes, created_ns=created, unnamed=unnamed)


def stock_of(*rows: VersionInfo, used: Mapping[str, int] = MappingProxyType({}), **changes: Any) -> Stock:
    rows = tuple(replace(each, used_ns=used.get(each.bundle_id, 0)) for each in rows)
    return Stock(rows, **{"marks": Marks(STORE), **changes})


def strips(
    stock: Stock, blocks: Mapping[str, str] | None = None, held: str = "", empty: str = "", **policy: bool
) -> list[tuple[str, int]]:
    """The versions in the order in which they go, with what each frees. blocks: a letter each, by version; without any
    each has one of its own. empty: blocks that have no keys and values."""
    own = {each.bundle_id: [each.bundle_id.encode()] for each in stock.rows}
    of = own if blocks is None else {bundle(name[:-1], int(name[-1])): list(of.encode()) for name, of in blocks.items()}
    told = plan_strips(
        stock,
        RoomPolicy(**policy),
        NOW,
        blocks_of=lambda each: of.get(each, []),  # type: ignore[arg-type,return-value]
        held=list(held.encode()),  # type: ignore[arg-type]
        bytes_of=lambda each: 0 if each in empty.encode() else SIZE,  # type: ignore[operator]
    )
    found = [(step, each) for step in told for each in step.rows]
    return [
        (f"{each.uri.name}{each.version}", step.bytes_freed if each is step.rows[-1] else 0) for step, each in found
    ]


def names(told: Sequence[tuple[str, int]]) -> list[str]:
    return [name for name, _ in told]


THREE = (
    row("cache", 50, 1),
    row("cache", 4, 2),
    row("chat", 3),
    row("notes", 90, 1, unnamed=False),
    row("notes", 80, 2, unnamed=False),
    row("notes", 70, 3, unnamed=False),
    row("other", 99, 1, unnamed=False),
)


def test_sessions_that_nobody_named_go_first_then_earlier_versions_and_newest_ones_where_settings_say() -> None:
    told = ["cache1", "cache2", "chat1", "notes1", "notes2"]
    assert names(strips(stock_of(*THREE))) == told
    assert names(strips(stock_of(*THREE), strip_named=True)) == [*told, "other1", "notes3"]


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({"marks": Marks(STORE).tag(THREE[0].uri, bundle("cache", 1), "kept")}, ["cache1"]),
        ({"marks": Marks(STORE).pin(THREE[3].uri, bundle("notes", 2))}, ["notes2"]),
        ({"marks": Marks(STORE).strip({THREE[3].uri: [bundle("notes", 1)]})}, ["notes1"]),
        ({"busy": {THREE[0].uri}}, ["cache1", "cache2"]),
        ({"busy": {THREE[3].uri}}, ["notes1", "notes2"]),
        ({"bases": {bundle("cache", 1)}}, ["cache1"]),
        ({"used": {bundle("chat"): NOW - HOUR + 1}}, ["chat1"]),
        ({"used": {bundle("notes", 1): NOW - HOUR + 1}}, ["notes1"]),
        ({"used": {bundle("cache", 1): NOW - HOUR + 1}}, ["cache1", "cache2"]),
        ({"used": {bundle("chat"): NOW + DAY}}, ["chat1"]),
    ],
    ids=lambda each: ",".join(each),
)
def test_what_never_goes(changes: dict[str, Any], stays: list[str]) -> None:
    all_of_them = names(strips(stock_of(*THREE)))
    assert names(strips(stock_of(*THREE, **changes))) == [each for each in all_of_them if each not in stays]


def test_a_use_without_a_version_counts() -> None:
    assert names(strips(stock_of(row("a", 9), row("b", 8)))) == ["a1", "b1"]
    assert names(strips(stock_of(row("a", 9), row("b", 8), used={bundle("a"): NOW - 2 * HOUR}))) == ["b1", "a1"]


@pytest.mark.parametrize("created", [0, EARLIEST_NS - 1, NOW + 1, NOW + 400 * DAY])
def test_a_date_that_cannot_be_believed_costs_no_version(created: int) -> None:
    odd = replace(row("odd", 5), created_ns=created)
    assert names(strips(stock_of(row("a", 9), odd))) == ["a1"]
    assert list(plan_deletes(stock_of(odd, days=range(TODAY - 90, TODAY)), RoomPolicy(), NOW)) == []


def test_where_the_clock_is_behind_all_dates_nothing_goes() -> None:
    stock = replace(stock_of(*(replace(each, created_ns=each.created_ns + 10**4 * DAY) for each in THREE)))
    assert strips(stock, strip_named=True) == []


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ({"a1": "sa", "b1": "sb"}, [("a1", SIZE), ("b1", 2 * SIZE)]),
        ({"a1": "s", "b1": "sb"}, [("a1", 0), ("b1", 2 * SIZE)]),  # all of it is in b: it goes with b
        ({"a1": "s", "b1": "s"}, [("a1", 0), ("b1", SIZE)]),
        ({"a1": "s", "b1": "b", "n1": "s"}, [("b1", SIZE)]),  # a version that stays has all of it
        ({"a1": "sa", "b1": "", "n1": "s"}, [("a1", SIZE)]),
        ({"a1": "aa", "b1": "e"}, [("a1", SIZE)]),  # a recurrent model's span has no keys and values
        ({"a1": "h", "b1": "hb"}, [("b1", SIZE)]),  # and one that is being read
    ],
)
def test_what_frees_nothing_is_not_stripped_and_what_is_shared_goes_with_its_last_user(
    blocks: dict[str, str], expected: list[tuple[str, int]]
) -> None:
    stock = stock_of(row("a", 9), row("b", 8), row("n", 7, unnamed=False))
    assert strips(stock, {"n1": "n", **blocks}, held="h", empty="e") == expected


def test_versions_of_a_session_that_have_blocks_in_common_go_together() -> None:
    rows = [row("a", 9, version) for version in (1, 2, 3)]
    blocks = {"a1": "x", "a2": "xy", "a3": "xyz"}
    assert strips(stock_of(*rows), blocks) == [("a1", 0), ("a2", 0), ("a3", 3 * SIZE)]
    named = [replace(each, unnamed=False) for each in rows]
    assert strips(stock_of(*named), blocks) == []
    assert strips(stock_of(*named), blocks, strip_named=True) == [("a1", 0), ("a2", 0), ("a3", 3 * SIZE)]


def test_no_more_are_stripped_than_a_store_may_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_STRIPS > 2
    monkeypatch.setattr(strip_plan, "MAX_STRIPS", 2)
    assert len(strips(stock_of(*(row(name, 9) for name in "abcd")))) == 2


# --- deletes


@pytest.mark.parametrize(
    ("changes", "goes"),
    [
        ({}, True),
        ({"days": range(TODAY - 29, TODAY + 1)}, False),  # the store was in use on 30 days only
        ({"days": [TODAY - 40, *range(TODAY + 1, TODAY + 90)]}, False),  # a clock that was ahead
        ({"used": {bundle("cache", 1): NOW - 30 * DAY}}, False),
        ({"busy": {THREE[0].uri}}, False),
        ({"bases": {bundle("cache", 2)}}, False),
        ({"marks": Marks(STORE).pin(THREE[0].uri, bundle("cache", 1))}, False),
        ({"marks": Marks(STORE).strip({THREE[0].uri: [bundle("cache", 1), bundle("cache", 2)]})}, True),
    ],
    ids=lambda each: ",".join(each) if isinstance(each, dict) else None,
)
def test_a_session_that_nobody_named_is_deleted_once_the_store_was_in_use_long_enough_without_it(
    changes: dict[str, Any], goes: bool
) -> None:
    old = [replace(each, created_ns=each.created_ns - 31 * DAY) for each in THREE]
    stock = stock_of(*old, **{"days": range(TODAY - 90, TODAY + 1), **changes})
    told = [step.uri.name for step in plan_deletes(stock, RoomPolicy(), NOW)]
    assert told == (["cache", "chat"] if goes else [each for each in told if each == "chat"])
    assert list(plan_deletes(stock, RoomPolicy(delete_after_days=None), NOW)) == []


def test_what_the_remote_has_goes_first_and_freely() -> None:
    """Also of named sessions, and within the hour; but not what has a mark, is in use, or has turns behind it."""
    recent = row("recent", 0.1, unnamed=False)
    rows, there = (*THREE, recent), {bundle("notes", 3), bundle("recent"), bundle("cache", 2)}
    told = names(strips(stock_of(*rows, elsewhere=there)))
    assert told[:3] == ["notes3", "cache2", "recent1"], "the least recently used first"
    assert told[3:] == [each for each in names(strips(stock_of(*rows))) if each not in told[:3]]
    assert "recent1" not in names(strips(stock_of(*rows))), "else it stays for an hour"
    for kept in (
        {"busy": {recent.uri}},
        {"bases": {recent.bundle_id}},
        {"marks": Marks(STORE).tag(recent.uri, recent.bundle_id, "a")},
    ):
        assert "recent1" not in names(strips(stock_of(*rows, elsewhere=there, **kept)))
    step = next(
        plan_strips(
            stock_of(recent, elsewhere=there),
            RoomPolicy(),
            NOW,
            blocks_of=lambda each: [each.encode()],
            held=(),
            bytes_of=lambda _: SIZE,
        )
    )
    assert step.reason == "the remote has it, last used 6 minutes ago"
