"""An index and files of different moments (a backup put back, a copy of a store in use): no removal loses anything."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid import SessionUri, Store
from torpor.memvid.checking import scanning
from torpor.memvid.errors import IndexMismatch, NoSpace
from torpor.memvid.folder.retention import Retention
from torpor.memvid.index.index import Index
from torpor.memvid.index.unknown_references import UNREADABLE_CODE
from torpor.memvid.maintenance.compaction_plan import CompactionPolicy
from torpor.tests.memvid.store_making import (
    URI,
    bundle_path,
    contents,
    expected,
    meanwhile,
    raw_bytes,
    require_awake,
    sleep,
)

NEWEST = Retention(keep_last=1)
FEW_FILES = CompactionPolicy(max_holders=2)
SMALL = {"layers": 1, "heads": 1, "dim": 1}


def tokens_of(version: int) -> int:
    return 256 * version + 40


def nine_versions(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        before = None
        for version in range(1, 10):
            before = sleep(store, tokens_of(version), before=before, **SMALL)
        store.tag(URI, 3, "kept")


def put_back(path: Path, bundles: Path) -> None:
    shutil.rmtree(path / "bundles")
    shutil.copytree(bundles, path / "bundles")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Nine versions, the third tagged; the files are those of before a compaction, the index is that of after it."""
    path = tmp_path / "store"
    nine_versions(path)
    shutil.copytree(path / "bundles", tmp_path / "bundles")
    with Store.open(path, writable=True) as store:
        assert store.compact(policy=FEW_FILES).actions
    put_back(path, tmp_path / "bundles")
    return path


def require_version(store: Store, version: int) -> None:
    with store.open_session(URI, version) as reader:
        assert contents(reader) == expected(tokens_of(version), **SMALL)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("removal", ["prune", "forget", "delete", "gc", "compact"])
def test_no_removal_takes_what_a_version_needs_by_its_file_and_not_by_the_index(mixed: Path, removal: str) -> None:
    with Store.open(mixed, writable=True) as store:
        assert store.opening.rows_corrected
        other = SessionUri("default", "fork")
        with store.open_session(URI, 3) as third:
            sleep(store, tokens_of(3), uri=other, before=third, **SMALL)
        kept = [3, 9]
        if removal in ("forget", "delete"):
            (store.forget if removal == "forget" else store.delete_session)(URI)
            kept = []
        else:
            store.prune(NEWEST)
            {"prune": store.gc, "gc": store.gc, "compact": lambda: store.compact(policy=FEW_FILES)}[removal]()
        for version in kept:
            require_version(store, version)
        require_awake(store, tokens_of(3), uri=other, **SMALL)
        assert (store.verify(deep=True).findings, store.repair(dry_run=True).problems) == ((), ())


def test_a_store_that_opens_beside_another_moments_index_says_so_once(mixed: Path) -> None:
    for corrected in (9, 0):
        with Store.open(mixed, writable=True) as store:
            assert (store.opening.rows_corrected, store.opening.index_rebuilt) == (corrected, None)
            assert store.rebuild_index(dry_run=True).actions == ()


def test_a_copied_store_is_read_once_more_and_has_nothing_to_put_right(tmp_path: Path) -> None:
    nine_versions(tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    for read in (9, 0):
        with counted_reads() as reads, Store.open(tmp_path / "copy", writable=True) as store:
            assert (reads.call_count, store.opening.rows_corrected) == (read, 0)


def counted_reads() -> Any:
    return mock.patch.object(scanning, "_read_bundle", side_effect=scanning._read_bundle)


def test_no_file_is_read_again_that_the_store_itself_has_written(tmp_path: Path) -> None:
    path, exported = tmp_path / "store", tmp_path / "out.mvb"
    nine_versions(path)
    with Store.open(path, writable=True) as store:
        store.export_session(URI, 2, exported)
        store.import_file(exported, as_uri=SessionUri("default", "copy"))
        store.compact(policy=FEW_FILES)
        store.prune(NEWEST)
        file = bundle_path(store, store.versions(URI)[-1].bundle_id)
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
        store.repair()
        assert len(store.versions(URI)) == 2
    with counted_reads() as reads, Store.open(path, writable=True) as store:
        assert (reads.call_count, store.opening.unreadable) == (0, ())


@pytest.mark.parametrize("change", ["longer", "rewritten", "same times"])
def test_a_file_of_which_a_byte_may_differ_is_read_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "store"
    with Store.open(path, writable=True) as store:
        receipt = sleep(store)
        file = bundle_path(store, receipt.bundle_id)
    data, times = file.read_bytes(), file.stat()
    file.write_bytes(data + b"more" if change == "longer" else data)
    if change == "same times":
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with counted_reads() as reads, Store.open(path, writable=True):
        assert [call.args[1] for call in reads.call_args_list] == [receipt.bundle_id]


def test_while_a_file_of_another_moment_cannot_be_read_nothing_is_removed(mixed: Path) -> None:
    with Store.open(mixed, writable=False) as store:
        file = bundle_path(store, store.versions(URI)[2].bundle_id)
    whole = file.read_bytes()
    file.write_bytes(whole[:-40] + raw_bytes(40))
    for _ in range(2):  # it is told at each opening
        with Store.open(mixed, writable=True) as store:
            assert [finding.path for finding in store.opening.unreadable] == [str(file)]
            assert 3 in [row.version for row in store.versions(URI)]  # a wake says so, and gives no older one
            before = {*mixed.glob("bundles/*/*")}
            assert {problem.code for problem in store.gc().problems} == {UNREADABLE_CODE}
            store.prune(NEWEST)
            assert {one.stem for one in mixed.glob("bundles/*/*")} == {one.stem for one in before}
    file.write_bytes(whole)
    with Store.open(mixed, writable=True) as store:
        assert (store.opening.unreadable, store.gc().problems) == ((), ())
        require_version(store, 3)
        assert store.verify(deep=True).findings == ()


def test_verify_says_that_index_and_files_are_of_different_moments(mixed: Path) -> None:
    with Store.open(mixed, writable=False) as store:  # which reads for itself what the index file says otherwise
        found = store.verify(deep=False).findings
        assert [finding.code for finding in found] == [IndexMismatch.code] * 9
        assert {finding.path for finding in found} == {str(file) for file in mixed.glob("bundles/*/*.mvb")}
        assert len(store.verify(URI, deep=True).findings) == 9
    Store.open(mixed, writable=True).close()
    with Store.open(mixed, writable=False) as store:
        assert store.verify(deep=True).findings == ()


def test_verify_says_so_of_files_that_are_put_back_under_a_running_daemon(tmp_path: Path) -> None:
    path = tmp_path / "store"
    nine_versions(path)
    shutil.copytree(path / "bundles", tmp_path / "bundles")
    with Store.open(path, writable=True) as store:
        store.compact(policy=FEW_FILES)
        assert store.verify(deep=True).findings == ()
        for file in tmp_path.glob("bundles/*/*"):
            shutil.copy(file, path / file.relative_to(tmp_path))
        assert {finding.code for finding in store.verify(deep=True).findings} == {IndexMismatch.code}


def test_verify_is_silent_of_a_file_that_is_written_anew_while_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "store"
    nine_versions(path)
    with Store.open(path, writable=True) as daemon, Store.open(path, writable=False) as store:
        compacted: list[int] = []

        def compact(_done: int, _total: int) -> None:
            if not compacted:
                compacted.append(len(daemon.compact(policy=FEW_FILES).actions))

        assert (store.verify(deep=False, on_progress=compact).findings, bool(compacted[0])) == ((), True)
        assert daemon.verify(deep=True).findings == ()


@pytest.mark.parametrize("deep", [False, True])
def test_a_session_slept_while_a_reader_opened_and_deleted_since_is_no_loss(tmp_path: Path, deep: bool) -> None:
    path, opened = tmp_path / "store", list[Store]()
    with Store.open(path, writable=True) as daemon:
        sleep(daemon, uri=SessionUri("default", "other"), seed=2)
        with meanwhile(Index, "add", lambda: opened.append(Store.open(path, writable=False))):
            sleep(daemon)  # the reader sees the file, and no row of it
        daemon.delete_session(URI)
        with opened[0] as reader:
            assert reader.index.not_in_file
            assert reader.verify(deep=deep).findings == ()


def test_a_file_that_no_row_told_of_and_that_goes_while_a_reader_looks_is_a_loss(tmp_path: Path) -> None:
    """Nobody writes: what is not in the index is not there because a daemon has deleted it."""
    path = tmp_path / "store"
    with Store.open(path, writable=True) as store:
        sleep(store, uri=SessionUri("default", "other"), seed=2)
    shutil.copytree(path, tmp_path / "earlier")
    with Store.open(path, writable=True) as store:
        file = bundle_path(store, sleep(store).bundle_id)
    for one in (tmp_path / "earlier").glob("index.sqlite*"):
        shutil.copy(one, path / one.name)
    with Store.open(path, writable=False) as reader:
        file.unlink()
        assert [finding.code for finding in reader.verify(deep=False).findings] == ["bundle_missing"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_import_into_a_store_whose_index_file_is_behind_keeps_what_it_refers_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """A deleted version comes back while the index lives in memory, and the process is killed: its row in the file is
    of before the delete. `is_lost`: no retired file told of it either."""
    path, killed, exported, other = tmp_path / "store", tmp_path / "killed", tmp_path / "a.mvb", SessionUri("x", "c")
    with Store.open(path, writable=True) as store:
        slept = sleep(store, 600)
        store.export_session(URI, None, exported)
        if is_lost:
            bundle_path(store, slept.bundle_id).unlink()
        drop, refusals = store.index.drop, iter([NoSpace("No room.")] * 2)

        def refuse(bundle_ids: Any) -> None:
            for error in refusals:
                raise error
            drop(bundle_ids)

        monkeypatch.setattr(store.index, "drop", refuse)
        monkeypatch.setattr(store._core, "mend_index_file", lambda: None)
        store.delete_session(URI)
        assert store.index.file_is_behind
        sleep(store, 700, uri=other)
        assert store.import_file(exported).blocks_reused
        shutil.copytree(path, killed)
    with Store.open(killed, writable=True) as store:
        assert store.opening.unreadable == ()
        store.delete_session(other)
        require_awake(store, 600)
        assert store.verify(deep=True).findings == ()
