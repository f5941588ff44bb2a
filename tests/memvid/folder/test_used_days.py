"""What a day has used of a remote is known to the next daemon, and a count that is lost begins anew and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid.disk import durable
from torpor.memvid.disk.daily_budget import Used
from torpor.memvid.errors import NoSpace
from torpor.memvid.folder import used_days
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.used_days import UsedDays

DAY_NS = 24 * 3600 * 10**9


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The fixture: sets the day."""

    def at(number: int) -> None:
        monkeypatch.setattr(used_days, "now_ns", lambda: number * DAY_NS)

    at(20_000)
    return at


def test_each_day_has_its_own_count_which_goes_on_after_a_restart(
    folder: StoreFolder, day: Callable[[int], None]
) -> None:
    used = UsedDays(folder)
    used.add(Used(5, writes=1))
    used.add(Used(reads=2))
    used.save()
    again = UsedDays(folder)
    again.add(Used(removals=1))
    assert again.today() == Used(5, 1, 2, 1)
    assert again.why_anew is None
    day(20_001)
    assert again.today() == Used()
    again.add(Used(7, writes=1))
    day(20_000)
    assert again.today() == Used(5, 1, 2, 1), "a clock that was put right finds the count of its day"
    for number in range(30_000, 30_100):
        day(number)
        again.add(Used(reads=1))
    again.save()
    assert UsedDays(folder).today() == Used(reads=1)
    day(20_001)
    assert UsedDays(folder).today() == Used(), "not all days are kept"


def test_a_kill_loses_no_byte_and_few_requests(folder: StoreFolder, day: Callable[[int], None]) -> None:
    used = UsedDays(folder)
    used.add(Used(reads=3))
    used.add(Used(5, writes=1))
    assert UsedDays(folder).today() == Used(5, 1, 3)
    for _ in range(used_days._REQUESTS_UNSAVED):
        used.add(Used(reads=1))
    assert UsedDays(folder).today() == used.today()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data.replace(b"[20000,5,", b"[20000,4,"),
        lambda data: used_days._FORMAT.encode({"days": 5}),
        lambda data: used_days._FORMAT.encode({"days": [[20_000, -1, 0, 0, 0]]}),
        lambda data: used_days._FORMAT.encode({"days": [[20_000, 1.5, 0, 0, 0]]}),
        lambda data: used_days._FORMAT.encode({"days": [[20_000, 1, 0, 0, 0, 0]]}),
        lambda data: used_days._FORMAT.encode({}),
        None,
    ],
)
def test_a_count_that_is_damaged_or_lost_begins_anew_and_says_so(
    spoil: Callable[[bytes], bytes] | None, folder: StoreFolder, day: Callable[[int], None]
) -> None:
    file = Path(folder.path, "used.json")
    UsedDays(folder).add(Used(5, writes=1))
    if spoil is None:
        file.unlink()
    else:
        file.write_bytes(spoil(file.read_bytes()))
    again = UsedDays(folder)
    assert again.today() == Used()
    assert again.why_anew is not None
    assert str(file) in again.why_anew
    again.add(Used(1, writes=1))
    assert UsedDays(folder).today() == Used(1, 1)


def test_a_full_disk_refuses_nothing_and_the_next_use_writes_all(
    folder: StoreFolder, day: Callable[[int], None]
) -> None:
    used = UsedDays(folder)
    with mock.patch.object(durable, "write_file", side_effect=NoSpace("full")):
        used.add(Used(5, writes=1))
    used.add(Used(reads=1))
    assert UsedDays(folder).today() == Used(5, 1, 1)
