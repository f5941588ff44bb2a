"""Prune: drops what no rule keeps, in the order of a delete; what stays wakes to the bit."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid import Receipt, SessionUri, Store, errors
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.journal import Journal
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.lossy import Lossy
from torpor.memvid.index.index import Index
from torpor.memvid.maintenance import pruning
from torpor.memvid.writing import deletion
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    bundle_path,
    contents,
    expected,
    flip,
    frame_of,
    meanwhile,
    reopened,
    require_awake,
    sleep,
)

LAST = Retention(keep_last=1)


def four_versions(store: Store) -> list[Receipt]:
    """Each refers to the full spans of the one before; the first span lies in the first one's file."""
    receipts = [sleep(store, 300)]
    for tokens in (400, 700, 800):
        receipts.append(sleep(store, tokens, before=receipts[-1]))
    return receipts


def versions(store: Store) -> list[int]:
    return [row.version for row in store.versions(URI)]


def suffixes(store: Store) -> list[str]:
    return sorted(file.suffix for file in Path(store.path).rglob("*.mv?"))


def test_what_no_rule_keeps_goes_and_what_stays_wakes_to_the_bit(store: Store) -> None:
    receipts = four_versions(store)
    report = store.prune(LAST)
    assert versions(store) == [4]
    require_awake(store, 800)
    assert store.verify(deep=True).ok
    # the second version alone had nothing that the fourth needs
    assert [(action.kind, action.version) for action in report.actions] == [("retire", 1), ("remove", 2), ("retire", 3)]
    assert report.bytes_freed == receipts[1].bytes_written
    assert suffixes(store) == [".mvb", ".mvr", ".mvr"]
    store.delete_session(URI)
    assert suffixes(store) == []


def test_a_session_pruned_and_opened_again_has_the_same_versions(store: Store) -> None:
    last = four_versions(store)[-1]
    store.prune(LAST)
    for anew in (False, True):
        with reopened(store, anew=anew) as again:
            assert (versions(again), again.opening.unreadable) == ([4], ())
            require_awake(again, 800)
    with reopened(store) as again:
        assert sleep(again, 900, before=last).version == 5
        require_awake(again, 900)


def test_a_retention_without_a_rule_drops_nothing(store: Store) -> None:
    four_versions(store)
    report = store.prune(Retention())
    assert (report.actions, report.bytes_freed) == ((), 0)
    assert versions(store) == [1, 2, 3, 4]


def test_tagged_and_pinned_versions_stay_and_the_report_says_why(store: Store) -> None:
    four_versions(store)
    store.tag(URI, 1, "first")
    store.pin(URI, 3)
    report = store.prune(LAST)
    assert versions(store) == [1, 3, 4]
    kept = {action.version: action.reason for action in report.actions if action.kind == "keep"}
    assert kept == {1: "it is tagged first", 3: "it is pinned"}
    with store.open_session(URI, 1) as reader:
        assert reader.manifest.token_count == 300


def test_a_version_that_is_tagged_while_a_prune_plans_stays(store: Store) -> None:
    four_versions(store)
    with meanwhile(pruning, "_steps", lambda: store.tag(URI, 2, "just-in-time")):
        store.prune(LAST)
    assert versions(store) == [2, 4]


def test_one_session_can_be_pruned_alone_and_all_of_them_at_once(store: Store) -> None:
    four_versions(store)
    sleep(store, 20, uri=OTHER_URI)
    sleep(store, 30, uri=OTHER_URI)
    store.prune(LAST, URI)
    assert versions(store) == [4]
    assert len(store.versions(OTHER_URI)) == 2
    store.prune(LAST)
    assert [row.token_count for row in store.versions(OTHER_URI)] == [30]
    with pytest.raises(errors.SessionNotFound):
        store.prune(LAST, type(URI)("default", "nobody"))


def test_a_dry_run_says_what_the_prune_then_does(store: Store, store_path: Path) -> None:
    four_versions(store)
    with Store.open(store_path, writable=False) as reader:
        planned = reader.prune(LAST, dry_run=True)
        with pytest.raises(errors.ReadOnlyStore):
            reader.prune(LAST)
    assert versions(store) == [1, 2, 3, 4]
    assert suffixes(store) == [".mvb"] * 4
    done = store.prune(LAST)
    assert (planned.dry_run, done.dry_run) == (True, False)
    assert [(one.kind, one.version, one.size_bytes) for one in planned.actions] == [
        (one.kind, one.version, one.size_bytes) for one in done.actions
    ]
    assert planned.bytes_freed == done.bytes_freed > 0


def test_an_open_reader_of_a_pruned_version_finishes_and_then_its_file_goes(store: Store) -> None:
    four_versions(store)
    with store.open_session(URI, 2) as reader:
        report = store.prune(LAST)
        assert report.bytes_freed == 0
        assert len(reader.tokens()) == 4 * 400
    assert suffixes(store) == [".mvb", ".mvr", ".mvr"]


def test_an_awake_session_whose_parent_was_pruned_can_sleep_whole(store: Store) -> None:
    """What it would have referred to may be gone: a typed refusal, upon which all of it is written."""
    second = four_versions(store)[1]
    store.prune(LAST)
    with pytest.raises(errors.Corruption):
        sleep(store, 500, before=second)
    assert sleep(store, 500).version == 5
    require_awake(store, 500)


def test_with_damaged_marks_nothing_is_dropped(store: Store, store_path: Path) -> None:
    four_versions(store)
    store.tag(URI, 1, "first")
    marks = store_path / "marks.json"
    marks.write_bytes(marks.read_bytes()[:-3])
    with pytest.raises(errors.CorruptMarks):
        store.prune(LAST)
    assert versions(store) == [1, 2, 3, 4]
    assert suffixes(store) == [".mvb"] * 4
    store.delete_session(URI)  # which is no rule but a wish
    assert store.find_session(URI) is None


def test_a_prune_on_a_full_disk_makes_itself_room(store: Store) -> None:
    """The index takes no change until bytes were freed; what is freed is only what nothing needs."""
    receipts = four_versions(store)
    with meanwhile(Index, "drop", mock.Mock(side_effect=errors.NoSpace("No room for the index."))):
        report = store.prune(LAST)
    assert report.bytes_freed == receipts[1].bytes_written
    assert versions(store) == [4]
    require_awake(store, 800)
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_prune_that_nothing_on_disk_tells_of_says_so(store: Store, store_path: Path, is_missing: bool) -> None:
    """A retired file says that its version is gone. Where there was no file, only the index's own file could."""
    first = sleep(store, 300)
    sleep(store, 40, seed=3)
    if is_missing:
        bundle_path(store, first.bundle_id).unlink()

    with mock.patch.object(Index, "return_to_file", side_effect=errors.NoSpace("No room for the index.")):
        store.index.go_on_in_memory()
        assert [one.code for one in store.prune(LAST).problems] == ["index_failed"] * is_missing
        store.close()
    with Store.open(store_path, writable=True) as again:
        assert versions(again) == [*([1] if is_missing else []), 2]
        assert again.prune(LAST).ok
        assert versions(again) == [2]


def test_a_lost_version_that_is_tagged_is_still_reported_when_a_prune_is_cut_off(store: Store) -> None:
    """A retired newer version means a delete only if it is the newest: a prune retires versions between others."""
    first = sleep(store, 20)
    for tokens in (30, 40, 50):
        sleep(store, tokens)
    store.tag(URI, 1, "precious")
    bundle_path(store, first.bundle_id).unlink()
    with mock.patch.object(Index, "drop", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        store.prune(LAST)
    with reopened(store) as again:
        assert versions(again) == [1, 4]
        assert [finding.code for finding in again.opening.unreadable] == ["bundle_missing"]


def test_many_sessions_are_pruned_in_steps_that_never_split_one(store: Store) -> None:
    uris = [SessionUri("default", f"agent{number}") for number in range(5)]
    for uri in uris:
        for tokens in (5, 6, 7):
            sleep(store, tokens, uri=uri)
    with (
        mock.patch.object(pruning, "_STEP_VERSIONS", 3),
        mock.patch.object(Index, "drop", autospec=True, side_effect=Index.drop) as dropped,
    ):
        report = store.prune(LAST)
    assert [len(call.args[1]) for call in dropped.call_args_list] == [4, 4, 2]
    assert all([row.token_count for row in store.versions(uri)] == [7] for uri in uris)
    assert len(report.actions) == 10
    assert report.bytes_freed == sum(action.size_bytes for action in report.actions)


def test_a_version_that_lost_its_number_to_a_pruned_one_does_not_take_its_place(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    """A backup put back left two bundles of version 1; when the one that counts is pruned, both go."""
    store.close()
    shutil.copytree(store_path, tmp_path / "backup")
    with Store.open(tmp_path / "backup", writable=True) as again:
        file = bundle_path(again, sleep(again, 60, seed=2).bundle_id)
    with Store.open(store_path, writable=True) as again:
        sleep(again, 50, seed=1)
        sleep(again, 70)
    target = store_path / "bundles" / file.parent.name
    target.mkdir(0o700, exist_ok=True)
    shutil.copy(file, target / file.name)
    with Store.open(store_path, writable=True) as again:
        again.prune(LAST)
        assert versions(again) == [2]
    with reopened(store, anew=True) as again:
        assert versions(again) == [2]
    assert len(list(store_path.rglob("*.mv?"))) == 1


def test_a_store_that_reads_beside_sees_every_version_or_none(store: Store, store_path: Path) -> None:
    """What it listed before wakes whole or is not found, and nothing is called damage."""
    four_versions(store)
    found = {}
    with Store.open(store_path, writable=False) as reader:
        rows = reader.versions(URI)
        store.prune(LAST)
        for row in rows:
            with contextlib.suppress(errors.SessionNotFound), reader.open_session(URI, row.version) as opened:
                found[row.version] = len(opened.tokens()) // 4
        assert reader.verify(deep=True).findings == ()
    assert found == {1: 300, 3: 700, 4: 800}, "1 and 3 still hold blocks"


def test_a_retention_that_means_nothing_is_refused() -> None:
    with pytest.raises(errors.InvalidPolicy):
        Retention(keep_last=0)


# --- what cannot be woken


def spoil(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "header":
        data[20] ^= 1
    else:
        data = data[:-7]
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "header", "cut off"])
@pytest.mark.parametrize("rule", [LAST, Retention(keep_days=1)], ids=["last", "days"])
def test_a_newest_version_that_cannot_be_woken_costs_no_other_one(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, rule: Retention
) -> None:
    day_ns = 24 * 60 * 60 * 10**9
    now_ns = time.time_ns()
    for number, tokens in enumerate((100, 200, 300)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda at=now_ns - (3 - number) * 10 * day_ns: at)
            newest = sleep(store, tokens, seed=number)
    path = bundle_path(store, newest.bundle_id)
    spoil(path, how)
    planned = store.prune(rule, dry_run=True)
    with Store.open(store_path, writable=False) as reader:
        opened_since = reader.prune(rule, dry_run=True)
    report = store.prune(rule)
    assert versions(store) == [2, 3]
    assert [(one.kind, one.version) for one in report.actions if one.session == URI] == [("remove", 1)]
    assert [one.path for one in report.problems] == [str(path)]
    assert "cannot be woken" in report.problems[0].message
    assert [one.version for one in planned.actions] == [one.version for one in report.actions]
    assert planned.problems == report.problems
    assert opened_since.problems[0] == report.problems[0]
    says_no_file_goes = ["no file is removed" in problem.message for problem in opened_since.problems]
    assert says_no_file_goes == ([False] if how == "missing" else [False, True])  # a damaged file may need others
    with store.open_session(URI, 2) as second:
        assert contents(second) == expected(200, seed=1)


@pytest.mark.parametrize("only", [URI, None], ids=["one session", "all"])
def test_a_version_that_cannot_be_woken_is_told_also_where_nothing_goes(store: Store, only: SessionUri | None) -> None:
    sleep(store, 100)
    store.pin(URI, 1)
    lost = sleep(store, 200, seed=1)
    path = bundle_path(store, lost.bundle_id)
    path.unlink()
    for dry_run in (True, False):
        report = store.prune(LAST, only, dry_run=dry_run)
        assert versions(store) == [1, 2]
        assert [(one.code, one.path) for one in report.problems] == [("bundle_missing", str(path))]


def test_a_newest_version_whose_blocks_lie_in_a_file_that_is_lost_costs_no_other_one(store: Store) -> None:
    alone = sleep(store, 100, seed=7)
    first = sleep(store, 600, uri=OTHER_URI)
    sleep(store, 700, before=first)
    bundle_path(store, first.bundle_id).unlink()
    report = store.prune(LAST, URI)
    assert versions(store) == [1, 2]
    assert [one.code for one in report.problems] == ["bundle_missing"]
    with store.open_session(URI, alone.version) as reader:
        assert contents(reader) == expected(100, seed=7)


def test_of_a_session_whose_versions_are_all_lost_a_prune_drops_nothing(store: Store) -> None:
    lost = [sleep(store, 100 + number, seed=number) for number in range(4)]
    for receipt in lost:
        bundle_path(store, receipt.bundle_id).unlink()
    report = store.prune(LAST)
    assert versions(store) == [1, 2, 3, 4]
    assert report.actions == ()
    assert [one.code for one in report.problems] == ["bundle_missing"] * 4


def test_a_lost_version_that_no_rule_keeps_is_dropped_and_no_problem(store: Store) -> None:
    lost = sleep(store, 100)
    sleep(store, 200, seed=1)
    bundle_path(store, lost.bundle_id).unlink()
    report = store.prune(LAST)
    assert (versions(store), report.problems) == ([2], ())


def test_what_a_prune_drops_is_not_looked_at(store: Store) -> None:
    """It reads what stays, of every session, and nothing else."""
    other = sleep(store, 100, uri=OTHER_URI)
    sleep(store, 100)
    newest = sleep(store, 200, seed=1)
    with mock.patch.object(StoreCore, "open_reader", autospec=True, side_effect=StoreCore.open_reader) as looked:
        store.prune(LAST)
    assert sorted(call.args[1] for call in looked.call_args_list) == sorted([newest.bundle_id, other.bundle_id])


def test_a_version_deleted_while_a_prune_looks_at_it_is_no_problem(store: Store) -> None:
    sleep(store, 100)
    sleep(store, 200, seed=1)
    with meanwhile(pruning, "_problem", lambda: store.delete_session(URI)):
        assert store.prune(LAST).problems == ()
    assert store.find_session(URI) is None


def test_what_cannot_be_woken_does_not_count_in_the_second_look_either(store: Store) -> None:
    """The version that was to stay leaves while the prune is about to drop the ones before it."""
    receipts = [sleep(store, 100 + number, seed=number) for number in range(3)]
    bundle_path(store, receipts[-1].bundle_id).unlink()

    def leave() -> None:
        core = store._core
        with core.committing():
            deletion.retire(core.folder, core.index, core.pins, [receipts[1].bundle_id])

    with meanwhile(pruning, "_steps", leave):
        store.prune(LAST)
    assert versions(store) == [1, 3]


def test_a_failure_of_the_system_is_no_reason_to_keep_or_drop_anything(store: Store) -> None:
    sleep(store, 512, before=sleep(store, 256))
    for dry_run in (True, False):
        with (
            mock.patch.object(StoreCore, "open_reader", side_effect=errors.StoreIoError("It could not be read.")),
            pytest.raises(errors.StoreIoError),
        ):
            store.prune(LAST, URI, dry_run=dry_run)
    assert versions(store) == [1, 2]


# --- what a repair had saved


def saved_and_replaced(store: Store, tmp_path: Path) -> Receipt:
    """A version that is whole again, and in quarantine the second one, which a repair had saved from it."""
    first = sleep(store, 900)
    file, copy = bundle_path(store, first.bundle_id), tmp_path / "copy"
    shutil.copy(file, copy)
    frame = frame_of(store, [entry for entry in first.entries if entry.kind == "span"][2])
    flip(file, frame.offset + frame.head_bytes + 5)
    store.repair()
    assert versions(store) == [2]
    shutil.copy(copy, file)
    file.chmod(0o600)
    for _ in range(2):  # the first takes the file in
        store.repair()
    assert (versions(store), [row.version for row in store.index.given_up().values()]) == ([1], [2])
    return first


@pytest.mark.parametrize("anew", [True, False])
def test_what_a_repair_had_saved_does_not_come_back_once_what_it_gave_way_to_is_pruned(
    store_path: Path, tmp_path: Path, anew: bool
) -> None:
    with Store.open(store_path, writable=True) as store:
        saved_and_replaced(store, tmp_path)
        sleep(store, 500, seed=3)
        planned = store.prune(LAST, dry_run=True)
        done = store.prune(LAST)
        assert [one.kind for one in planned.actions] == [one.kind for one in done.actions]
        assert (planned.bytes_freed, done.problems) == (done.bytes_freed, ())
    if anew:
        for file in store_path.glob("index.sqlite*"):
            file.unlink()
    with Store.open(store_path, writable=True) as store:
        assert store.verify(deep=True).ok
        assert store.repair().actions == ()
        assert versions(store) == [3]
        assert suffixes(store).count(".mvb") == 1


def test_what_a_repair_had_saved_stays_where_what_it_gave_way_to_is_damaged_again(store: Store, tmp_path: Path) -> None:
    first = saved_and_replaced(store, tmp_path)
    sleep(store, 500, seed=3)
    file = bundle_path(store, first.bundle_id)
    flip(file, -10)
    store.prune(LAST)
    assert versions(store) == [3]
    assert [row.version for row in store.index.given_up().values()] == [2]


@pytest.mark.parametrize("how", ["cut off", "refused"])
def test_what_a_repair_had_saved_is_no_loss_where_a_prune_ends_before_what_it_gave_way_to(
    store: Store, tmp_path: Path, how: str
) -> None:
    saved_and_replaced(store, tmp_path)
    sleep(store, 500, seed=3)
    with (
        mock.patch.object(
            StoreFolder, "retire", side_effect=KeyboardInterrupt if how == "cut off" else errors.StoreIoError("refused")
        ),
        pytest.raises(KeyboardInterrupt if how == "cut off" else errors.StoreIoError),
    ):
        store.prune(LAST)
    with reopened(store) as again:
        assert len(again.index.given_up()) == (how == "refused")
        assert again.verify(deep=True).ok
        assert again.repair().actions == ()
        assert versions(again) == [1, 3]


# --- versions that end in a ledger alone


def stand_in_and_more(store: Store, tokens: int, **more: Any) -> list[Receipt]:
    """A version, one whose ledger goes on behind its blocks, and one with so many tokens."""
    first = sleep(store, 300)
    second = sleep(store, 516, before=first, unread=20)
    return [first, second, sleep(store, tokens, before=second, **more)]


def test_a_stand_in_goes_once_a_later_version_begins_with_all_of_its_tokens(store: Store) -> None:
    receipts = stand_in_and_more(store, 536)
    report = store.drop_stand_ins(URI)
    assert versions(store) == [1, 3]
    assert [(action.kind, action.version) for action in report.actions] == [("retire", 2)]
    require_awake(store, 536)
    assert store.verify(deep=True).ok
    assert store.find_session(URI, 3) is not None
    assert suffixes(store) == [".mvb", ".mvb", ".mvr"], "its second block is needed"
    assert receipts[1].version == 2
    assert store.drop_stand_ins(URI).actions == ()


def test_the_file_of_a_stand_in_goes_with_it_where_nothing_needs_its_blocks(store: Store) -> None:
    first = sleep(store, 300)
    second = sleep(store, 300, before=first, unread=20)
    sleep(store, 320, before=first)
    assert store.drop_stand_ins(URI).bytes_freed == second.bytes_written
    assert suffixes(store) == [".mvb", ".mvb"]


STAND_INS = {  # the versions behind a stand-in, of tokens that go on behind it or are others; those that stay
    "a shorter one": ([(535, {})], [1, 2, 3]),
    "other tokens": ([(536, {"seed": 3})], [1, 2, 3]),
    "a shorter stand-in": ([(516, {"unread": 19})], [1, 2, 3]),
    "a branch": ([(300, {"seed": 0})], [1, 2, 3]),
    "a longer stand-in": ([(516, {"unread": 21})], [1, 3]),
    "the next one, though the newest went another way": ([(536, {}), (300, {"seed": 5})], [1, 3, 4]),
}


@pytest.mark.parametrize(("more", "left"), STAND_INS.values(), ids=STAND_INS)
def test_a_stand_in_goes_where_a_later_version_has_its_tokens_alone(
    store: Store, more: list[tuple[int, dict[str, Any]]], left: list[int]
) -> None:
    second = sleep(store, 516, before=sleep(store, 300), unread=20)
    for tokens, how in more:
        sleep(store, tokens, before=None if "seed" in how else second, **how)
    store.drop_stand_ins(URI)
    assert versions(store) == left


def test_many_stand_ins_that_nothing_covers_take_a_few_openings_each(store: Store) -> None:
    for seed in range(8):
        sleep(store, 20, seed=seed, unread=2)
    with mock.patch.object(StoreCore, "open_reader", autospec=True, side_effect=StoreCore.open_reader) as opened:
        assert store.drop_stand_ins(URI).actions == ()
    assert 8 <= opened.call_count <= 4 * 8


def test_whole_versions_stay(store: Store) -> None:
    four_versions(store)
    assert store.drop_stand_ins(URI).actions == ()
    assert versions(store) == [1, 2, 3, 4]


def test_a_stand_in_with_a_mark_stays(store: Store) -> None:
    stand_in_and_more(store, 536)
    store.tag(URI, 2, "mine")
    assert store.drop_stand_ins(URI).actions == ()
    store.untag(URI, "mine")
    store.drop_stand_ins(URI)
    assert versions(store) == [1, 3]


def test_a_stand_in_that_turns_stand_behind_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    receipts = stand_in_and_more(store, 536)
    monkeypatch.setattr(Journal, "bases", lambda _journal: {URI: receipts[1].bundle_id})
    assert store.drop_stand_ins(URI).actions == ()


def test_a_stand_in_stays_where_the_later_version_cannot_be_read(store: Store) -> None:
    receipts = stand_in_and_more(store, 536)
    path = bundle_path(store, receipts[2].bundle_id)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert store.drop_stand_ins(URI).actions == ()
    path.write_bytes(whole)
    store.drop_stand_ins(URI)
    assert versions(store) == [1, 3]


def test_a_fork_of_a_stand_in_keeps_all_that_it_has(store: Store) -> None:
    receipts = stand_in_and_more(store, 536)
    sleep(store, 600, uri=OTHER_URI, before=receipts[1])
    store.drop_stand_ins(URI)
    require_awake(store, 600, uri=OTHER_URI)
    assert store.verify(deep=True).ok


def test_a_lossy_version_takes_the_place_of_no_exact_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_and_more(store, 536)
    rows = store.index.versions(URI)
    lossy = [*rows[:-1], replace(rows[-1], lossy=Lossy(8, 256))]
    monkeypatch.setattr(Index, "versions", lambda _index, _uri: lossy)
    monkeypatch.setattr(pruning, "require_same_as_row", lambda *_: None)
    assert store.drop_stand_ins(URI).actions == ()
