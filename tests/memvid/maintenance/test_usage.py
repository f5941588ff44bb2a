"""Usage: two sums that come out even, and each session's part: what a forget of it would free."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid import Store
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.records import SessionUsage, UsageReport
from torpor.memvid.writing.core import StoreCore
from torpor.memvid.writing.rewriting import Contents, prepared
from torpor.tests.memvid.secret_making import SECRET, THIRD, adopt, fork, sleep_secret
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    Receipt,
    SessionUri,
    bundle_path,
    meanwhile,
    reopened,
    sleep,
)


def require_even(report: UsageReport, path: Path) -> None:
    """By place and by need the same bytes, and by place those that the system tells."""
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert report.file_bytes == on_disk
    assert report.file_bytes == (
        report.live_bytes
        + report.retired_bytes
        + report.unreadable_bytes
        + report.quarantine_bytes
        + report.incoming_bytes
        + report.index_bytes
        + report.temp_bytes
        + report.journal_bytes
        + report.other_bytes
    )
    exclusive = sum(session.exclusive_bytes for session in report.sessions)
    assert report.live_bytes + report.retired_bytes == exclusive + report.shared_bytes + report.unneeded_bytes
    assert min(report.unneeded_bytes, report.shared_bytes, *(one.exclusive_bytes for one in report.sessions), 0) == 0


def of(report: UsageReport, uri: SessionUri) -> SessionUsage:
    (found,) = [session for session in report.sessions if session.uri == uri]
    return found


def frame_bytes(store: Store, receipt: Receipt, *, first: int, last: int) -> int:
    """The frames of some of a version's blocks, as its own file has them."""
    file = store._core.open_bundle(receipt.bundle_id)
    try:
        return sum(file.frames[entry.id].frame_bytes for entry in receipt.entries[first:last])
    finally:
        file.close()


def test_an_empty_store_takes_next_to_nothing(store: Store, store_path: Path) -> None:
    report = store.usage()
    assert (report.sessions, report.live_bytes, report.problems) == ((), 0, ())
    assert report.free_bytes > 0
    require_even(report, store_path)


def test_a_session_alone_needs_all_that_is_there(store: Store, store_path: Path) -> None:
    first = sleep(store, 300)
    second = sleep(store, 700, before=first)
    report = store.usage()
    written = first.bytes_written + second.bytes_written
    assert report.sessions == (
        SessionUsage(URI, 2, 700, first.logical_bytes + second.logical_bytes, written, 0, written),
    )
    assert (report.unneeded_bytes, report.retired_bytes, report.written_today_bytes) == (0, 0, written)
    assert report.logical_bytes == first.logical_bytes + second.logical_bytes
    require_even(report, store_path)


def test_what_a_deleted_session_s_fork_needs_is_the_fork_s_alone(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 700)
    other = fork(store, 600, secret)
    needed = frame_bytes(store, secret, first=0, last=2)
    store.delete_session(SECRET)
    report = store.usage()
    assert [session.uri for session in report.sessions] == [OTHER_URI]
    assert report.sessions[0].exclusive_bytes == other.bytes_written + needed
    assert report.sessions[0].stored_bytes == other.bytes_written
    assert report.unneeded_bytes == secret.bytes_written - needed
    assert (report.retired_bytes, report.shared_bytes) == (secret.bytes_written, 0)
    require_even(report, store_path)


def test_forgetting_frees_what_was_called_exclusive(store: Store, store_path: Path) -> None:
    """But for the few bytes that a stripped file needs around the blocks that stay."""
    secret = sleep_secret(store, 700, before=sleep_secret(store, 300))
    fork(store, 600, secret)
    exclusive = of(store.usage(), SECRET).exclusive_bytes
    report = store.forget(SECRET)
    around = exclusive - (report.bytes_freed - report.bytes_written)
    assert 0 <= around < 1000
    after = store.usage()
    assert [session.uri for session in after.sessions] == [OTHER_URI]
    assert after.unneeded_bytes == around
    require_even(after, store_path)


def test_what_a_file_holds_for_nobody_is_unneeded_and_for_others_is_theirs(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 300)
    other = sleep(store, 300, uri=OTHER_URI, seed=1)
    adopt(store, other, secret)
    frames = frame_bytes(store, secret, first=0, last=3)
    report = store.usage()
    assert report.unneeded_bytes == frames
    require_even(report, store_path)
    core = store._core
    with prepared(core, secret.bundle_id, Contents([], {one.id: other.bundle_id for one in secret.entries})) as fresh:
        assert fresh.commit()
    report = store.usage()
    assert report.unneeded_bytes == 0
    assert of(report, SECRET).exclusive_bytes == frames + bundle_path(store, secret.bundle_id).stat().st_size
    require_even(report, store_path)


def test_what_an_older_version_looks_for_in_a_newer_one_s_file_is_needed(store: Store, store_path: Path) -> None:
    """As a compaction leaves it: the newest file has adopted what it does not list itself."""
    first = sleep(store, 300)
    second = sleep(store, 700, before=first)
    core = store._core
    with contextlib.closing(core.open_bundle(second.bundle_id)) as file:
        frames = [(block, second.bundle_id) for block in file.frames]
    whole = Contents([*frames, *((one.id, first.bundle_id) for one in first.entries)], {})
    with prepared(core, second.bundle_id, whole) as fresh:
        assert fresh.commit()
    with prepared(core, first.bundle_id, Contents([], {one.id: second.bundle_id for one in first.entries})) as fresh:
        assert fresh.commit()
    report = store.usage()
    assert (report.unneeded_bytes, report.shared_bytes) == (0, 0)
    require_even(report, store_path)
    assert store.prune(Retention(keep_last=1)).bytes_freed > 0
    report = store.usage()
    assert report.unneeded_bytes > 0  # the older version's end
    require_even(report, store_path)


def test_versions_of_one_session_share_without_sharing_with_others(store: Store, store_path: Path) -> None:
    receipt = sleep(store, 300)
    for tokens in (600, 900, 1200):
        receipt = sleep(store, tokens, before=receipt)
    store.prune(Retention(keep_last=1))
    report = store.usage()
    assert report.shared_bytes == of(report, URI).shared_bytes == 0
    assert report.retired_bytes > 0
    require_even(report, store_path)


def test_what_three_sessions_need_counts_once_and_stands_with_each(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 700)
    forks = [fork(store, 600, secret), fork(store, 800, secret, uri=THIRD, seed=5)]
    shared = frame_bytes(store, secret, first=0, last=2)
    report = store.usage()
    assert report.shared_bytes == shared
    assert [session.shared_bytes for session in report.sessions] == [shared] * 3
    assert of(report, SECRET).exclusive_bytes == secret.bytes_written - shared
    assert [of(report, one.uri).exclusive_bytes for one in forks] == [one.bytes_written for one in forks]
    require_even(report, store_path)


def test_what_cannot_be_read_is_told_and_counts_as_nothing_else(store: Store, store_path: Path) -> None:
    sleep(store, 300)
    broken = bundle_path(store, sleep(store, 300, uri=OTHER_URI, seed=1).bundle_id)
    data = broken.read_bytes()
    broken.write_bytes(data[:-1])
    report = store.usage()
    assert report.unreadable_bytes == len(data) - 1
    assert [(finding.path, finding.code) for finding in report.problems] == [(str(broken), "unreadable_bundle")]
    assert [(session.uri, session.versions) for session in report.sessions] == [(URI, 1), (OTHER_URI, 1)]
    assert of(report, OTHER_URI).stored_bytes == 0
    require_even(report, store_path)
    with reopened(store, anew=True) as again:
        report = again.usage()
        assert report.unreadable_bytes == len(data) - 1
        assert len(report.problems) == 1
        require_even(report, store_path)


@pytest.mark.parametrize("writable", [True, False])
def test_a_version_whose_file_is_missing_is_counted_as_it_is_listed_and_told(
    store: Store, store_path: Path, writable: bool
) -> None:
    first = sleep(store, 300)
    second = sleep(store, 600, before=first)
    store.close()
    path = bundle_path(store, second.bundle_id)
    path.unlink()
    with Store.open(store_path, writable=writable) as again:
        listed = again.versions(URI)
        report = again.usage()
        require_even(report, store_path)
    session = of(report, URI)
    assert (session.versions, session.token_count) == (len(listed), listed[-1].token_count) == (2, 600)
    assert session.logical_bytes == sum(row.logical_bytes for row in listed)
    assert [(one.path, one.code) for one in report.problems] == [(str(path), "bundle_missing")]
    assert "version 2 of torpor://default/agent cannot be woken" in report.problems[0].message


def test_a_session_that_slept_since_the_index_was_read_is_counted(store: Store, store_path: Path) -> None:
    sleep(store, 300)
    with Store.open(store_path, writable=False) as reader:
        sleep(store, 100, uri=OTHER_URI, seed=1)
        report = reader.usage()
    assert (of(report, OTHER_URI).versions, of(report, OTHER_URI).token_count) == (1, 100)


def test_a_retired_file_that_cannot_be_read_is_told_too(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 700)
    fork(store, 600, secret)
    store.delete_session(SECRET)
    (file,) = store_path.rglob("*.mvr")
    os.truncate(file, 100)
    report = store.usage()
    assert (report.unreadable_bytes, report.retired_bytes) == (100, 0)
    assert [finding.path for finding in report.problems] == [str(file)]
    require_even(report, store_path)


def test_everything_else_in_the_folder_has_its_place(store: Store, store_path: Path) -> None:
    sleep(store, 20)
    (store_path / "incoming").mkdir(0o700)
    (store_path / "incoming" / ("ab" * 32 + ".mvb")).write_bytes(b"i" * 11)
    (store_path / "quarantine" / "x.1").write_bytes(b"q" * 13)
    (store_path / "bundles" / "0123456789abcdef.tmp").write_bytes(b"t" * 17)
    (store_path / "bundles" / "stray").write_bytes(b"s" * 19)
    before = sum(file.stat().st_size for file in store_path.iterdir() if file.is_file() and "index" not in file.name)
    report = store.usage()
    assert (report.incoming_bytes, report.quarantine_bytes, report.temp_bytes) == (11, 13, 17)
    assert report.other_bytes == before + 19
    assert report.index_bytes > 0
    require_even(report, store_path)


def test_a_store_that_only_reads_counts_beside_a_writer(store: Store, store_path: Path) -> None:
    fork(store, 600, sleep_secret(store, 700))
    with Store.open(store_path, writable=False) as reader:
        read, report = reader.usage(), store.usage()
    assert (read.live_bytes, read.shared_bytes, read.sessions, read.problems) == (
        *(report.live_bytes, report.shared_bytes, report.sessions, ()),
    )


def test_files_that_go_while_they_are_counted_are_left_out(store: Store, store_path: Path) -> None:
    """A daemon beside a read-only store deletes a session between the listing and the reading."""
    sleep_secret(store, 300)
    sleep(store, 300, uri=OTHER_URI, seed=1)
    with (
        Store.open(store_path, writable=False) as reader,
        meanwhile(StoreFolder, "list_bundles", lambda: store.delete_session(SECRET), after=True),
    ):
        report = reader.usage()
    assert [session.uri for session in report.sessions] == [OTHER_URI]
    assert (report.problems, report.unneeded_bytes) == ((), 0)


def test_the_work_grows_with_the_versions_and_not_with_their_pairs(store: Store) -> None:
    """Each file is opened once, and those that others look into once more."""
    receipt = sleep(store, 300)
    for number in range(20):
        receipt = sleep(store, 600 + 256 * number, before=receipt)
    with mock.patch.object(StoreCore, "open_bundle", autospec=True, side_effect=StoreCore.open_bundle) as opened:
        store.usage()
    assert opened.call_count == 21


def test_a_backup_put_back_beside_is_no_version_and_its_bytes_count(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    store.close()
    shutil.copytree(store_path, tmp_path / "backup")
    with Store.open(tmp_path / "backup", writable=True) as again:
        file = bundle_path(again, sleep(again, 60, seed=2).bundle_id)
    with Store.open(store_path, writable=True) as again:
        sleep(again, 50, seed=1)
    target = store_path / "bundles" / file.parent.name
    target.mkdir(0o700, exist_ok=True)
    shutil.copy(file, target / file.name)
    with Store.open(store_path, writable=True) as again:
        report = again.usage()
        assert of(report, URI).versions == len(again.versions(URI)) == 1
        assert of(report, URI).stored_bytes == sum(one.stat().st_size for one in store_path.rglob("*.mvb"))
        require_even(report, store_path)
