"""Gc: what nothing needs goes, and nothing that anybody might need (threat 51)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid import SessionUri, Store
from torpor.memvid.errors import ReadOnlyStore
from torpor.memvid.folder import quarantine
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.marks import Marks
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.records import MaintenanceReport
from torpor.memvid.index.rows import UNREADABLE, IndexedBundle
from torpor.memvid.maintenance.gc import INCOMING_HOURS
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    bundle_path,
    contents,
    drafts,
    expected,
    flip,
    meanwhile,
    put,
    reopened,
    require_awake,
    sleep,
    spoil,
    write,
)


def done(report: MaintenanceReport) -> list[tuple[str, str]]:
    return [(action.kind, os.path.basename(action.path)) for action in report.actions]


def names(path: Path) -> set[str]:
    return {file.name for file in path.rglob("*") if file.is_file() and not file.name.startswith(("index.", "lock"))}


@pytest.fixture
def forked(store: Store) -> Store:
    """A session that was deleted while a fork of it needed its blocks."""
    first = sleep(store, 600)
    sleep(store, 700, uri=OTHER_URI, before=first)
    store.delete_session(URI)
    return store


def let_go(store: Store) -> list[Path]:
    """Delete the fork with its files left behind, as a failure of the disk right after the delete leaves them."""
    with mock.patch.object(StoreFolder, "remove", return_value=0):
        store.delete_session(OTHER_URI)
    return sorted(Path(store.path).rglob("*.mvr"))


def test_retired_files_that_nothing_needs_go(forked: Store, store_path: Path) -> None:
    assert forked.gc().actions == ()
    require_awake(forked, 700, uri=OTHER_URI)
    left = let_go(forked)
    size_bytes = sum(file.stat().st_size for file in left)
    planned = forked.gc(dry_run=True)
    assert sorted(store_path.rglob("*.mvr")) == left
    report = forked.gc()
    assert report.actions == planned.actions
    assert sorted(done(report)) == sorted(("remove", file.name) for file in left)
    assert (report.bytes_freed, planned.bytes_freed, report.ok) == (size_bytes, size_bytes, True)
    assert not list(store_path.rglob("*.mv?"))
    assert forked.gc().actions == ()


def test_threat_51_what_somebody_has_open_stays_until_it_is_closed(forked: Store, store_path: Path) -> None:
    with forked.open_session(OTHER_URI):
        forked.delete_session(OTHER_URI)
        report = forked.gc()
        assert [action.kind for action in report.actions] == ["keep", "keep"]
        assert len(list(store_path.rglob("*.mvr"))) == 2
    forked.gc()
    assert not list(store_path.rglob("*.mvr"))


def test_while_a_bundle_cannot_be_read_nothing_goes_and_the_report_says_so(forked: Store, store_path: Path) -> None:
    lost = sleep(forked, 20, uri=SessionUri("default", "third"))
    path = bundle_path(forked, lost.bundle_id)
    let_go(forked)
    forked.close()
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    (store_path / "index.sqlite").unlink()
    (store_path / "bundles" / ("0" * 16 + ".tmp")).touch(0o600)
    with Store.open(store_path, writable=True) as again:
        (store_path / "bundles" / ("1" * 16 + ".tmp")).touch(0o600)
        before = names(store_path)
        for dry_run in (True, False):
            report = again.gc(dry_run=dry_run)
            assert (report.actions, report.bytes_freed, report.ok) == ((), 0, False)
            assert [(problem.code, problem.path) for problem in report.problems] == [("unreadable_bundle", str(path))]
        assert names(store_path) == before


def test_a_bundle_that_cannot_be_read_is_told_alike_by_all_that_it_stops(store: Store, store_path: Path) -> None:
    first = sleep(store, 300)
    sleep(store, 600, before=first)
    path = bundle_path(store, sleep(store, 20, uri=OTHER_URI).bundle_id)
    store.close()
    path.write_bytes(path.read_bytes()[:-1])
    (store_path / "index.sqlite").unlink()
    with Store.open(store_path, writable=True) as again:
        (told,) = again.gc().problems
        assert told.code == "unreadable_bundle"
        assert told.message.startswith(f"{path} cannot be read (version 1 of {OTHER_URI}): ")
        assert "so no file is removed or compacted" in told.message
        assert again.compact().problems == again.prune(Retention(keep_last=1), dry_run=True).problems == (told,)
        assert again.usage().problems == again.forget(URI, dry_run=True).problems == (told,)


def test_a_temporary_file_goes_unless_a_sleep_is_writing_it(store: Store, store_path: Path) -> None:
    leftover = store_path / "bundles" / ("a" * 16 + ".tmp")
    leftover.write_bytes(b"12345")
    mine = store_path / "bundles" / "notes.tmp"
    mine.write_text("not a name of ours")
    reports: list[MaintenanceReport] = []

    def blocks() -> Iterator[Any]:
        first, *rest = drafts(600)
        yield first
        reports.append(store.gc())
        yield from rest

    write(store, blocks(), 600, compressed=True)  # else all blocks are looked at before the first is written
    assert (done(reports[0]), reports[0].bytes_freed) == ([("remove", leftover.name)], 5)
    assert mine.exists()
    require_awake(store, 600)
    mine.unlink()
    assert store.verify(deep=True).ok


def test_what_lies_in_incoming_for_long_goes(store: Store, store_path: Path) -> None:
    folder = store_path / "incoming"
    folder.mkdir(mode=0o700)
    old, young, mine = folder / ("a" * 64 + ".mvb"), folder / ("b" * 64 + ".mvb"), folder / "notes"
    temp = folder / ("c" * 16 + ".tmp")
    for file in (old, young, mine, temp):
        put(file, b"123")
    long_ago = time.time() - INCOMING_HOURS * 3600 - 60
    for file in (old, mine, temp):
        os.utime(file, (long_ago, long_ago))
    assert sorted(done(store.gc(dry_run=True))) == sorted([("remove", old.name), ("remove", temp.name)])
    assert old.exists()
    assert sorted(done(store.gc())) == sorted([("remove", old.name), ("remove", temp.name)])
    assert (old.exists(), temp.exists(), young.exists(), mine.exists()) == (False, False, True, True)


def test_threat_20_a_link_in_place_of_incoming_is_not_followed(store: Store, store_path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / ("a" * 64 + ".mvb")
    victim.touch()
    os.utime(victim, (0, 0))
    (store_path / "incoming").symlink_to(outside)
    report = store.gc()
    assert (report.actions, [problem.code for problem in report.problems]) == ((), ["unsafe_path"])
    assert victim.exists()


def test_marks_of_versions_that_are_gone_go(store: Store) -> None:
    kept = sleep(store, 20)
    store.tag(URI, 1, "kept")
    folder = store._core.folder
    Marks.load(folder).tag(URI, bytes(32), 1, "gone").pin(OTHER_URI, bytes([1] * 32), 1).save(folder)
    assert [action.kind for action in store.gc(dry_run=True).actions] == ["unmark", "unmark"]
    assert len(store.marks(URI)) == 2
    report = store.gc()
    assert [(action.kind, action.session) for action in report.actions] == [("unmark", URI), ("unmark", OTHER_URI)]
    assert dict(store.marks(URI).tags) == {"kept": kept.bundle_id}
    assert not store.marks(OTHER_URI)
    assert store.gc().actions == ()


def test_damaged_marks_are_left_and_told(store: Store, store_path: Path) -> None:
    (store_path / "marks.json").write_text("{}")
    report = store.gc()
    assert (report.actions, [problem.code for problem in report.problems]) == ((), ["corrupt_marks"])
    assert (store_path / "marks.json").read_text() == "{}"


def test_what_a_gc_has_done_is_told_where_marks_cannot_be_written(store: Store, store_path: Path) -> None:
    receipt = sleep(store, 300)
    store.tag(receipt.uri, 1, "t")
    file = store_path / "store.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    store.delete_session(receipt.uri)
    leftover = store_path / "bundles" / f"{'0' * 16}.tmp"
    put(leftover, bytes(8))
    report = store.gc()
    assert (str(leftover), "remove") in [(action.path, action.kind) for action in report.actions]
    assert not [action for action in report.actions if action.kind == "unmark"]
    assert [(problem.path, problem.code) for problem in report.problems] == [(str(file), "corrupt_store_file")]
    file.write_bytes(whole)
    assert [action.kind for action in store.gc().actions if action.session] == ["unmark"]


def test_the_quarantine_is_never_emptied(store: Store, store_path: Path) -> None:
    inside = store_path / "quarantine" / ("a" * 64 + ".mvb.1")
    inside.write_bytes(b"old")
    os.utime(inside, (0, 0))
    assert store.gc().actions == ()
    assert inside.read_bytes() == b"old"


# --- the quarantine is emptied


def test_a_version_that_is_imported_while_the_quarantine_is_emptied_stays(store: Store, tmp_path: Path) -> None:
    first = sleep(store, 300)
    second = sleep(store, 900, before=first)
    store.export_session(URI, 2, tmp_path / "second.mvb")
    spoil(store, second, 2)
    store.repair()
    with meanwhile(quarantine, "list_ours", lambda: store.import_file(tmp_path / "second.mvb"), after=True):
        assert store.empty_quarantine().ok
    with store.open_session(URI, 2) as reader:
        assert (reader.bundle_id, contents(reader)) == (second.bundle_id, expected(900))
    assert sleep(store, 20).version == 4
    assert store.verify(deep=True).ok


def test_what_is_set_aside_while_the_quarantine_is_emptied_stays(store: Store, store_path: Path) -> None:
    receipt = sleep(store, 900)
    file = bundle_path(store, receipt.bundle_id)
    spoil(store, receipt, 2)
    put(store_path / "quarantine" / f"{file.name}.1", file.read_bytes())  # of a repair that could mend it
    with meanwhile(quarantine, "list_ours", store.repair, after=True):
        store.empty_quarantine()
    assert list(store.index.given_up()) == [receipt.bundle_id]
    assert (store_path / "quarantine" / f"{file.name}.2").exists()


def test_what_a_version_needs_whose_file_was_put_back_stays(store: Store, tmp_path: Path) -> None:
    sleep(store, 600, uri=OTHER_URI)
    heir = sleep(store, 900)
    store.delete_session(OTHER_URI)
    file = bundle_path(store, heir.bundle_id)
    file.rename(tmp_path / "away")
    store.repair()
    (tmp_path / "away").rename(file)
    for dry_run in (True, False):
        report = store.empty_quarantine(dry_run=dry_run)
        assert done(report) == [("keep", file.name)]
        assert "under bundles/ again" in report.actions[0].reason
    with reopened(store) as again:
        require_awake(again, 900)
        assert again.verify(deep=True).ok


def cut_trailer(file: Path) -> None:
    flip(file, -10)


def require_kept_until_a_repair(store: Store, token_count: int, uri: SessionUri) -> None:
    """Emptying the quarantine takes nothing away that the session's version needs, and all of it after a repair."""
    held = {file.name for file in Path(store.path, "quarantine").iterdir()}
    assert held
    for dry_run in (True, False):
        report = store.empty_quarantine(dry_run=dry_run)
        assert [(action.kind, action.session) for action in report.actions] == [("keep", uri)] * len(held)
        assert "torpor repair" in report.actions[0].reason
    assert {file.name for file in Path(store.path, "quarantine").iterdir()} == held
    store.repair()
    require_awake(store, token_count, uri=uri)
    store.empty_quarantine()
    assert not list(Path(store.path, "quarantine").iterdir())
    require_awake(store, token_count, uri=uri)
    assert store.verify(deep=True).ok


def test_blocks_of_a_version_that_was_put_back_stay_in_quarantine_until_a_repair(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    sleep(store, 600, uri=OTHER_URI)
    heir = sleep(store, 900)
    store.delete_session(OTHER_URI)
    sleep(store, 300, uri=URI, seed=9)
    file = bundle_path(store, heir.bundle_id)
    shutil.copy(file, tmp_path / "backup")
    spoil(store, heir, 2)
    cut_trailer(file)
    store.repair()  # nothing says any more what the version needs
    shutil.copy(tmp_path / "backup", file)
    file.chmod(0o600)
    with reopened(store) as again:
        assert 1 in [row.version for row in again.versions(URI)]
        held = sorted(os.listdir(store_path / "quarantine"))
        report = again.empty_quarantine()
        kept = [os.path.basename(action.path) for action in report.actions if action.kind == "keep"]
        assert [name for name in held if ".mvr" in name] == [name for name in kept if ".mvr" in name] != []
        again.repair()
        again.empty_quarantine()
        with again.open_session(URI, 1) as reader:
            assert contents(reader) == expected(900)
        assert again.verify(deep=True).ok


@pytest.mark.parametrize("how", ["holder removed", "own block", "own file missing", "own manifest"])
def test_what_a_listed_version_needs_and_only_the_quarantine_holds_stays_until_a_repair(store: Store, how: str) -> None:
    if how == "holder removed":
        first = sleep(store, 600)
        sleep(store, 900, uri=OTHER_URI)
        store.delete_session(URI)
        holder = bundle_path(store, first.bundle_id).with_suffix(".mvr")
        cut_trailer(holder)
        store.repair()
        holder.unlink()
        require_kept_until_a_repair(store, 900, OTHER_URI)
        return
    receipt = sleep(store, 900)
    file = bundle_path(store, receipt.bundle_id)
    cut_trailer(file)
    store.repair()
    if how == "own block":
        spoil(store, receipt, 1)
    elif how == "own file missing":
        file.unlink()
    else:
        file.write_bytes(bytes(file.stat().st_size))
    require_kept_until_a_repair(store, 900, URI)


def test_blocks_that_are_sound_under_bundles_keep_nothing_in_quarantine(store: Store) -> None:
    receipt = sleep(store, 900)
    cut_trailer(bundle_path(store, receipt.bundle_id))
    store.repair()
    assert [kind for kind, _ in done(store.empty_quarantine())] == ["remove"]
    require_awake(store, 900)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_beside_a_bundle_that_cannot_be_read_nothing_is_given_up(store: Store, store_path: Path, when: str) -> None:
    spoil(store, sleep(store, 900), 2)
    other = sleep(store, 600, uri=OTHER_URI, seed=2)
    store.repair()
    held, aside = names(store_path), store.index.given_up()

    def be_unreadable() -> None:
        store.index.reconcile([IndexedBundle(other.bundle_id, UNREADABLE, None, (), ())], [other.bundle_id])

    if when == "before":
        be_unreadable()
    with meanwhile(quarantine, "list_ours", be_unreadable, after=True) if when == "meanwhile" else nullcontext():
        report = store.empty_quarantine()
    assert (report.actions, report.bytes_freed) == ((), 0)
    assert [problem.code for problem in report.problems] == ["unreadable_bundle"]
    assert (names(store_path), store.index.given_up()) == (held, aside)


def test_versions_that_are_given_up_are_told_though_they_have_no_file(store: Store) -> None:
    gone = sleep(store, 300)
    bundle_path(store, gone.bundle_id).unlink()
    store.repair()
    planned = store.empty_quarantine(dry_run=True)
    report = store.empty_quarantine()
    assert [(one.kind, one.session, one.version) for one in report.actions] == [("index", URI, 1)]
    assert planned.actions == report.actions
    assert not store.index.given_up()


def test_a_store_opened_for_reading_only_plans(forked: Store, store_path: Path) -> None:
    let_go(forked)
    with Store.open(store_path, writable=False) as reader:
        assert len(reader.gc(dry_run=True).actions) == 2
        with pytest.raises(ReadOnlyStore):
            reader.gc()
