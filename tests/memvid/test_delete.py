"""Delete: gone from every list, bundles that others need stay, open readers finish (threats 51, 52)."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid import Receipt, SessionUri, Store, errors
from torpor.memvid.disk import durable
from torpor.memvid.folder import quarantine
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.records import OpenReport
from torpor.memvid.index.index import Index
from torpor.memvid.writing import core as core_module
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid.store_making import (
    FORK_URI,
    OTHER_URI,
    URI,
    bundle_path,
    contents,
    expected,
    flip,
    meanwhile,
    put,
    reopened,
    require_awake,
    sleep,
    spoil,
)


def files(store: Store) -> list[str]:
    return sorted(file.suffix for file in Path(store.path).rglob("*.mv?"))


def test_a_deleted_session_is_gone_with_its_files(store: Store) -> None:
    first = sleep(store, 300)
    second = sleep(store, 600, before=first)
    sleep(store, 20, uri=OTHER_URI)
    report = store.delete_session(URI)
    assert (report.versions_deleted, report.bundles_deleted, report.bundles_kept) == (2, 2, 0)
    assert report.bytes_freed == first.bytes_written + second.bytes_written
    with pytest.raises(errors.SessionNotFound):
        store.open_session(URI)
    assert files(store) == [".mvb"]
    require_awake(store, 20, uri=OTHER_URI)
    assert sleep(store, 20).version == 1
    require_awake(store, 20)


def test_bundles_that_a_fork_needs_stay_until_the_fork_goes(store: Store, store_path: Path) -> None:
    first = sleep(store, 600)
    fork = sleep(store, 700, uri=OTHER_URI, before=first)
    report = store.delete_session(URI)
    assert (report.bundles_deleted, report.bundles_kept, report.bytes_freed) == (0, 1, 0)
    require_awake(store, 700, uri=OTHER_URI)
    assert store.verify(deep=True).ok
    store.close()
    for index in (True, False):
        if not index:
            (store_path / "index.sqlite").unlink()
        with Store.open(store_path, writable=True) as again:  # a new index must not bring it back
            assert again.find_session(URI) is None
            require_awake(again, 700, uri=OTHER_URI)
    with Store.open(store_path, writable=True) as again:
        report = again.delete_session(OTHER_URI)
        assert (report.versions_deleted, report.bundles_deleted) == (1, 2), "that of the deleted session goes with it"
        assert report.bytes_freed == first.bytes_written + fork.bytes_written
        assert files(again) == []


def test_threats_51_52_an_open_reader_keeps_its_files_until_it_closes(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 700, before=first)
    with store.open_session(URI) as reader:
        report = store.delete_session(URI)
        assert (report.bundles_deleted, report.bundles_kept) == (0, 2)
        assert contents(reader) == expected(700)
        assert files(store) == [".mvr", ".mvr"]
    assert files(store) == []


def test_leftovers_of_an_interrupted_delete_are_removed(store: Store, store_path: Path) -> None:
    sleep(store, 600)
    with store.open_session(URI):
        store.delete_session(URI)
        store.close()
    assert files(store) == [".mvr"]
    with Store.open(store_path, writable=False) as reader:
        assert list(reader.iter_sessions()) == []
        assert files(store) == [".mvr"]
    with Store.open(store_path, writable=True) as again:
        assert again.opening.leftovers_removed == 1
    assert files(store) == []


def test_blocks_of_a_deleted_session_cannot_be_reused(store: Store) -> None:
    first = sleep(store, 600)
    store.delete_session(URI)
    with pytest.raises((errors.BundleMissing, errors.BlockMissing)):
        sleep(store, 700, before=first)
    assert store.find_session(URI) is None


def test_a_file_that_is_open_and_needed_goes_with_its_last_user(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 700, uri=OTHER_URI, before=first)
    with store.open_session(URI):
        store.delete_session(URI)
    require_awake(store, 700, uri=OTHER_URI)
    store.delete_session(OTHER_URI)
    assert files(store) == []


def test_a_delete_removes_nothing_that_an_unreadable_bundle_may_need(store: Store, store_path: Path) -> None:
    first = sleep(store, 600)
    file = bundle_path(store, sleep(store, 700, uri=OTHER_URI, before=first).bundle_id)
    store.close()
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    with reopened(store, anew=True) as again:
        with again.open_session(URI):
            report = again.delete_session(URI)
        assert (report.bundles_kept, report.bytes_freed, report.unreadable) == (1, 0, (str(file),))
        assert [problem.path for problem in report.problems] == [str(file)]
        assert f"torpor rm {OTHER_URI}" in report.problems[0].message, "what frees space"
        assert files(again) == [".mvb", ".mvr"]  # also not when the reader closed
    file.write_bytes(good)
    with Store.open(store_path, writable=True) as again:
        require_awake(again, 700, uri=OTHER_URI)
        again.delete_session(OTHER_URI)
    assert files(store) == []


def test_what_waits_for_its_reader_stays_where_a_bundle_is_found_that_cannot_be_read(store: Store) -> None:
    """A backup of a fork is put back, damaged, while the base waits to be removed."""
    first = sleep(store, 600)
    file = bundle_path(store, sleep(store, 700, uri=OTHER_URI, before=first).bundle_id)
    good = file.read_bytes()
    with store.open_session(URI):
        store.delete_session(OTHER_URI)
        store.delete_session(URI)
        put(file, good[:-1])
        store.rebuild_index()
    assert files(store) == [".mvb", ".mvr"]
    file.write_bytes(good)
    with reopened(store) as again:
        require_awake(again, 700, uri=OTHER_URI)


def test_a_deleted_session_s_rival_bundles_do_not_come_back(store: Store, store_path: Path, tmp_path: Path) -> None:
    sleep(store, 300)
    store.close()
    shutil.copytree(store_path, tmp_path / "backup")
    with Store.open(tmp_path / "backup", writable=True) as again:
        file = bundle_path(again, sleep(again, 600, seed=2).bundle_id)
    with Store.open(store_path, writable=True) as again:
        sleep(again, 500, seed=1)
    target = store_path / "bundles" / file.parent.name
    target.mkdir(0o700, exist_ok=True)
    shutil.copy(file, target / file.name)
    with Store.open(store_path, writable=True) as again:
        assert [found.code for found in again.verify(deep=False).findings] == ["rival_version"]
        report = again.delete_session(URI)
        assert (report.versions_deleted, report.bundles_deleted) == (2, 3)
    assert files(store) == []
    with reopened(store, anew=True) as again:
        assert list(again.iter_sessions()) == []


def test_what_is_deleted_while_the_index_file_takes_no_change_is_no_loss_at_the_next_open(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file keeps the rows of both sessions: neither may look like one whose file is missing, nor come back."""
    sleep(store, 600, uri=OTHER_URI, before=sleep(store, 512))
    make_failing(store, sqlite3.SQLITE_FULL)
    monkeypatch.setattr(Index, "return_to_file", mock.Mock(side_effect=errors.NoSpace("No room for the index.")))
    store.delete_session(URI)
    forgotten = store.forget(OTHER_URI)
    assert [problem.path for problem in forgotten.problems] == [store.index.path]
    sleep(store, 40, seed=3)
    store.close()
    monkeypatch.undo()
    with Store.open(store_path, writable=True) as again:
        assert again.opening.unreadable == ()
        assert [row.uri for row in again.iter_sessions()] == [URI]
        require_awake(again, 40, seed=3)
        assert files(again) == [".mvb"]
        assert again.verify(deep=True).ok


def test_once_the_disk_has_room_again_an_index_in_memory_has_its_file_again(store: Store) -> None:
    """A daemon runs for weeks: what a full disk left undone must not wait for the next one."""
    sleep(store, 600, uri=OTHER_URI, before=sleep(store, 512))
    make_failing(store, sqlite3.SQLITE_FULL)
    store.delete_session(URI)
    assert store.index.file_is_behind
    store.delete_session(OTHER_URI)
    assert files(store) == [".mvr", ".mvr"], "their rows still stand in the file"
    after = sleep(store, 40, seed=3)
    assert store.gc().bytes_freed == 0, "they were emptied before"
    assert (files(store), store.index.file_is_behind) == ([".mvb"], False)
    assert sleep(store, 300, before=after, seed=3).version == 2
    with reopened(store) as again:
        assert again.opening == OpenReport(None, 0, 0, 0, ())
        assert [(row.uri, row.version) for row in again.iter_sessions()] == [(URI, 2)]


@pytest.mark.parametrize("by", ["close", "sleep", "prune", "compact", "import"])
def test_an_index_in_memory_has_its_file_again_before_the_next_work_and_at_the_end(
    store: Store, tmp_path: Path, by: str
) -> None:
    sleep(store, 40, uri=OTHER_URI, seed=3)
    sleep(store, 600)
    store.export_session(URI, 1, tmp_path / "exported")
    make_failing(store, sqlite3.SQLITE_FULL)
    store.delete_session(OTHER_URI)
    assert store.index.file_is_behind
    work: dict[str, Callable[[], object]] = {
        "close": store.close,
        "sleep": lambda: sleep(store, 300, seed=7),
        "prune": lambda: store.prune(Retention(keep_last=1)),
        "compact": store.compact,
        "import": lambda: store.import_file(tmp_path / "exported"),
    }
    work[by]()
    assert not store.index.file_is_behind
    with reopened(store) as again:
        assert again.opening == OpenReport(None, 0, 0, int(by in ("close", "sleep", "import")), ())


def test_a_compaction_beside_an_index_file_that_is_behind_reports_no_removal_of_what_it_can_only_empty(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    gone = sleep(store, 600, uri=OTHER_URI, seed=3)
    with store.open_bundle(gone.bundle_id):
        store.delete_session(OTHER_URI)
        store.index.go_on_in_memory()

    monkeypatch.setattr(Index, "return_to_file", mock.Mock(side_effect=errors.NoSpace("No room for the index.")))
    file = bundle_path(store, gone.bundle_id).with_suffix(".mvr")
    file.write_bytes(b"as of a delete that had no time to empty it")
    for kinds in (["strip"], []):
        report = store.compact()
        assert [action.kind for action in report.actions] == kinds
        assert sum(action.size_bytes for action in report.actions) == report.bytes_freed
        assert (file.stat().st_size, report.problems) == (0, ())
    monkeypatch.undo()
    store._core._next_mending = 0.0  # a while later
    assert [action.kind for action in store.compact().actions] == ["remove"]
    assert not file.exists()


def test_a_store_whose_index_cannot_have_its_file_is_closed_all_the_same(store: Store, store_path: Path) -> None:
    sleep(store, 600)
    for error in (errors.NoSpace("No room."), errors.DurabilityLost("Not flushed.")):
        again = Store.open(store_path, writable=True) if error.code != "no_space" else store
        again.index.go_on_in_memory()
        with mock.patch.object(Index, "return_to_file", side_effect=error):
            again.close()
    with Store.open(store_path, writable=True) as again:
        require_awake(again, 600)


@pytest.mark.parametrize("state", ["missing", "given up"])
@pytest.mark.parametrize("newest_is_there", [False, True])
def test_a_delete_that_nothing_on_disk_tells_of_says_so(
    store: Store, store_path: Path, state: str, newest_is_there: bool
) -> None:
    first = sleep(store, 300)
    bundle_path(store, first.bundle_id).unlink()
    if newest_is_there:
        sleep(store, 40, seed=5)
    if state == "given up":
        store.repair()
    sleep(store, 20, uri=OTHER_URI)
    make_failing(store, sqlite3.SQLITE_FULL)
    report = store.delete_session(URI)
    assert [problem.code for problem in report.problems] == ([] if newest_is_there else ["index_failed"])
    with mock.patch.object(Index, "return_to_file", side_effect=errors.NoSpace("No room.")):
        store.close()
    with Store.open(store_path, writable=True) as again:
        assert bool(again.index.bundles_of(URI)) == (not newest_is_there)


def test_a_file_of_another_version_stays_where_the_system_does_not_let_anybody_look(store: Store) -> None:
    """Two files were swapped: what a delete retires are another session's only bytes."""
    swapped(store)
    opening = StoreFolder.open_as

    def refuse(folder: StoreFolder, bundle_id: bytes, suffix: str) -> tuple[int, str]:
        if suffix == ".mvr":
            raise errors.StoreIoError("Too many open files.")
        return opening(folder, bundle_id, suffix)

    with mock.patch.object(StoreFolder, "open_as", refuse):
        store.delete_session(URI)
    store.gc()
    for _ in range(2):
        store.repair()
    require_awake(store, 400, uri=OTHER_URI, seed=2)


@pytest.mark.parametrize("put", ["nothing", "link"])
def test_a_store_whose_bundles_are_away_is_closed_all_the_same_and_lets_its_lock_go(
    store: Store, store_path: Path, put: str
) -> None:
    sleep(store, 300)
    store.index.go_on_in_memory()
    (store_path / "bundles").rename(store_path.parent / "away")
    if put == "link":
        (store_path / "bundles").symlink_to(store_path.parent / "away")
    store.gc()
    store.close()
    if put == "link":
        (store_path / "bundles").unlink()
    (store_path.parent / "away").rename(store_path / "bundles")
    with Store.open(store_path, writable=True) as again:
        require_awake(again, 300)


def test_an_index_that_cannot_have_its_file_is_tried_again_after_a_while_and_not_before_each_piece_of_work(
    store: Store,
) -> None:
    store.index.go_on_in_memory()
    with (
        mock.patch.object(Index, "return_to_file", side_effect=errors.NoSpace("No room.")) as tried,
        mock.patch.object(core_module.time, "monotonic", return_value=1000.0) as now,
    ):
        for number in range(3):
            sleep(store, 20, seed=number)
        assert tried.call_count == 1
        now.return_value += 61.0
        sleep(store, 20, seed=5)
        assert tried.call_count == 2
    store.close()
    assert not store.index.file_is_behind


def make_failing(store: Store, code: int, *, also: str = "COMMIT") -> None:
    failing: Any = Failing(store.index._connection, code, also=also)
    store.index._connection = failing


class Failing:
    """An index's connection whose next commits fail with a code of SQLite's."""

    def __init__(self, connection: sqlite3.Connection, code: int, *, also: str = "COMMIT") -> None:
        self._connection = connection
        self._code = code
        self._failing = ("COMMIT", also)

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement in self._failing:
            raise self._failure()
        return self._connection.execute(statement, *values)

    def backup(self, target: sqlite3.Connection, **options: Any) -> None:
        if "backup" in self._failing:
            raise self._failure()
        self._connection.backup(target, **options)

    def _failure(self) -> sqlite3.OperationalError:
        failure = sqlite3.OperationalError("disk I/O error")
        failure.sqlite_errorcode = self._code
        return failure

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


def remove(store: Store, how: str) -> None:
    """Versions of URI leave: all, or the first."""
    if how == "delete":
        assert store.delete_session(URI).versions_deleted == 2
    elif how == "forget":
        assert store.forget(URI).ok
    else:
        assert store.prune(Retention(keep_last=1)).bytes_freed == 0, "others need what it holds"


@pytest.mark.parametrize("how", ["delete", "prune", "forget"])
@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY])
def test_rows_that_the_index_file_does_not_let_go_are_gone_as_they_are_for_the_next_opening(
    store: Store, how: str, code: int
) -> None:
    """The files are retired by then: a row that stayed would list and wake what is no version any more."""
    first = sleep(store, 512)
    sleep(store, 600, before=first)
    sleep(store, 700, uri=OTHER_URI, before=first)
    expected = [(OTHER_URI, 1), *([(URI, 2)] if how == "prune" else [])]
    make_failing(store, code)
    remove(store, how)
    assert sorted((row.uri, row.version) for row in store.index.all_rows()) == sorted(expected)
    if how != "prune":
        with pytest.raises(errors.SessionNotFound):
            store.open_session(URI)
    require_awake(store, 700, uri=OTHER_URI)
    later = sleep(store, 40, uri=SessionUri("default", "later"))
    store.gc()
    require_awake(store, 700, uri=OTHER_URI)
    with reopened(store) as again:
        assert again.opening.unreadable == ()
        rows = sorted((row.uri, row.version) for row in again.index.all_rows())
        assert rows == sorted([*expected, (later.uri, 1)])
        require_awake(again, 700, uri=OTHER_URI)
        assert again.verify(deep=True).ok


def test_where_the_rows_cannot_be_dropped_at_all_nothing_more_is_written(store: Store) -> None:
    first = sleep(store, 512)
    sleep(store, 700, uri=OTHER_URI, before=first)
    make_failing(store, sqlite3.SQLITE_IOERR, also="backup")
    with pytest.raises(errors.DurabilityLost, match="gone when the store is opened again"):
        store.delete_session(URI)
    with pytest.raises(errors.DurabilityLost):
        sleep(store, 40, seed=3)
    require_awake(store, 700, uri=OTHER_URI)
    with reopened(store) as again:
        assert (again.find_session(URI), again.opening.unreadable) == (None, ())
        require_awake(again, 700, uri=OTHER_URI)


def test_a_session_deleted_while_it_is_opened_is_not_found(store: Store) -> None:
    """Between the opening of its bundle and the pinning of its ancestors: not damage."""
    sleep(store, 700, before=sleep(store, 600))
    with (
        meanwhile(StoreCore, "open_bundle", lambda: store.delete_session(URI), after=True),
        pytest.raises(errors.SessionNotFound),
    ):
        store.open_session(URI)
    assert files(store) == []


@pytest.mark.parametrize("at", [1, 2])
def test_an_ancestor_deleted_beside_a_read_only_store_is_not_taken_for_damage(
    store: Store, store_path: Path, at: int
) -> None:
    """The session goes after its own bundle was checked, before the one it refers to is looked at."""
    sleep(store, 700, before=sleep(store, 600))
    with (
        Store.open(store_path, writable=False) as reader,
        meanwhile(StoreFolder, "open_bundle", lambda: store.delete_session(URI), at=at, after=True),
    ):
        assert reader.verify(deep=True).findings == ()


def test_a_session_deleted_while_a_read_only_store_opens_is_not_listed(store: Store, store_path: Path) -> None:
    """Its file was listed, its row is gone by then, and a fork still needs the retired file."""
    sleep(store, 700, uri=OTHER_URI, before=sleep(store, 600))
    with (
        meanwhile(StoreFolder, "list_with_twins", lambda: store.delete_session(URI), after=True),
        Store.open(store_path, writable=False) as reader,
    ):
        assert files(store) == [".mvb", ".mvr"]
        assert [row.uri for row in reader.iter_sessions()] == [OTHER_URI]
        assert reader.opening.unreadable == ()


# --- what repair has set aside


@pytest.fixture
def set_aside(store: Store, tmp_path: Path) -> tuple[Receipt, Path]:
    """A session of versions 1 and 3, whose version 2 lies in quarantine; and a file with the blocks that it lacks."""
    second = sleep(store, 900, before=sleep(store, 300))
    export = tmp_path / "second.mvb"
    store.export_session(URI, 2, export)
    spoil(store, second, 2)
    store.repair()
    assert [row.version for row in store.versions(URI)] == [1, 3]
    return second, export


def make_new_index(store: Store) -> Store:
    store.close()
    for name in ("index.sqlite", "index.sqlite-sums"):
        (Path(store.path) / name).unlink()
    return Store.open(store.path, writable=True)


def come_back(store: Store, export: Path) -> list[int]:
    """The versions of the session once the blocks that were missing are there again, and a repair has looked."""
    store.import_file(export, as_uri=OTHER_URI)
    store.repair()
    return [row.version for row in store.versions(URI)]


def test_a_delete_that_fails_before_its_first_rename_leaves_what_is_set_aside_as_it_was(
    store: Store, set_aside: tuple[Receipt, Path]
) -> None:
    with (
        mock.patch.object(StoreFolder, "retire", side_effect=errors.StoreIoError("refused")),
        pytest.raises(errors.StoreIoError),
    ):
        store.delete_session(URI)
    assert list(store.index.given_up()) == [set_aside[0].bundle_id]
    assert 2 in come_back(store, set_aside[1])


@pytest.mark.parametrize("how", ["delete", "prune"])
def test_a_quarantine_that_cannot_be_looked_into_is_told_by_what_deletes_beside_it(
    store: Store, store_path: Path, set_aside: tuple[Receipt, Path], how: str
) -> None:
    folder = store_path / "quarantine"
    folder.chmod(0o770)
    report = store.delete_session(URI) if how == "delete" else store.prune(Retention(keep_last=1), URI)
    assert [(problem.path, problem.code) for problem in report.problems] == [(str(folder), "unsafe_path")]
    assert "torpor gc --quarantine" in report.problems[0].message
    assert [row.version for row in store.versions(URI)] == ([] if how == "delete" else [3])
    folder.chmod(0o700)
    if how == "delete":
        store.forget(URI)
        with make_new_index(store) as anew:
            assert come_back(anew, set_aside[1]) == []


@pytest.mark.parametrize("stands", [True, False])
def test_what_cannot_be_marked_as_deleted_in_quarantine_is_told(
    store: Store, store_path: Path, set_aside: tuple[Receipt, Path], monkeypatch: pytest.MonkeyPatch, stands: bool
) -> None:
    if stands:
        assert 2 in come_back(store, set_aside[1])  # and leaves the damaged file there
    rename = durable.rename

    def refuse(folder_fd: int, old: str, new: str, folder_path: str) -> None:
        if folder_path.endswith("quarantine"):
            raise errors.StoreIoError("refused")
        rename(folder_fd, old, new, folder_path)

    with monkeypatch.context() as patched:
        patched.setattr(durable, "rename", refuse)
        report = store.delete_session(URI)
    left = {str(file) for file in (store_path / "quarantine").glob(f"{set_aside[0].bundle_id.hex()}.mvb.*")}
    assert left
    assert left <= {problem.path for problem in report.problems}
    assert {problem.code for problem in report.problems} == {"store_io"}


@pytest.mark.parametrize("stands", [True, False])
def test_a_file_in_quarantine_with_a_second_name_is_told_by_a_delete_and_what_is_no_file_is_not(
    store: Store, store_path: Path, set_aside: tuple[Receipt, Path], tmp_path: Path, stands: bool
) -> None:
    if stands:
        assert 2 in come_back(store, set_aside[1])  # and leaves the damaged file there
    (left,) = (store_path / "quarantine").glob(f"{set_aside[0].bundle_id.hex()}.mvb.*")
    os.link(left, tmp_path / "second name")
    left.with_suffix(".77").mkdir()
    (problem,) = store.delete_session(URI).problems
    assert (problem.path, problem.code) == (str(left), "unsafe_path")
    assert "could not be marked so" in problem.message
    assert left.exists()


def test_a_session_of_which_only_what_is_set_aside_is_left_is_not_deleted_while_a_file_of_it_has_a_second_name(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    versions = set_aside_alone(store)
    (file,) = (store_path / "quarantine").glob(f"{versions[0].bundle_id.hex()}.mvb.*")
    os.link(file, tmp_path / "second name")
    with pytest.raises(errors.UnsafePath):
        store.delete_session(URI)
    assert set(endings(store_path)) == {".mvb"}
    assert set(store.index.given_up()) == {one.bundle_id for one in versions}
    (tmp_path / "second name").unlink()
    assert store.delete_session(URI).problems == ()
    with make_new_index(store) as anew:
        assert anew.index.given_up() == {}


def test_an_index_made_anew_refuses_a_quarantine_that_it_cannot_look_into(
    store: Store, store_path: Path, set_aside: tuple[Receipt, Path]
) -> None:
    """It holds numbers that were given, and what must stay: an index without them would lose both."""
    (store_path / "quarantine").chmod(0o770)
    with reopened(store) as again:  # an index that is there knows by itself
        assert list(again.index.given_up()) == [set_aside[0].bundle_id]
    with pytest.raises(errors.UnsafePath):
        make_new_index(store)
    (store_path / "quarantine").chmod(0o700)
    with Store.open(store_path, writable=True) as again:
        assert list(again.index.given_up()) == [set_aside[0].bundle_id]


@pytest.mark.parametrize("status", ["aside", "missed"])
def test_a_session_of_which_nothing_is_listed_can_be_deleted(store: Store, status: str) -> None:
    receipt = sleep(store, 300)
    store.tag(URI, 1, "good")
    bundle_path(store, receipt.bundle_id).unlink()
    if status == "aside":
        store.repair()
    else:
        store = make_new_index(store)
    assert (list(store.iter_sessions()), store.index.bundles_of(URI)) == ([], [receipt.bundle_id])
    assert store.delete_session(URI).versions_deleted == 1
    assert (store.index.bundles_of(URI), bool(store.marks(URI))) == ([], False)
    with pytest.raises(errors.SessionNotFound):
        store.delete_session(URI)
    with reopened(store) as again:
        assert again.opening.unreadable == ()
        assert sleep(again, 20).version == 1


@pytest.mark.parametrize("how", ["folder", "file"])
def test_what_is_set_aside_and_cannot_be_let_go_is_not_said_to_be_deleted(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It alone says that the session is there."""
    receipt = sleep(store, 300)
    spoil(store, receipt, 0)
    store.repair()
    assert (store.versions(URI), list(store.index.given_up())) == ([], [receipt.bundle_id])

    def refuse(*_: object) -> None:
        raise errors.StoreIoError("refused")

    with monkeypatch.context() as patched:
        if how == "folder":
            (store_path / "quarantine").chmod(0o770)
        else:
            patched.setattr(durable, "rename", refuse)
        with pytest.raises(errors.UnsafePath if how == "folder" else errors.StoreIoError):
            store.delete_session(URI)
    (store_path / "quarantine").chmod(0o700)
    assert list(store.index.given_up()) == [receipt.bundle_id]
    assert store.delete_session(URI).problems == ()


def test_a_delete_on_a_full_disk_makes_no_folder(store: Store, set_aside: tuple[Receipt, Path]) -> None:
    with mock.patch.object(durable, "make_folder", side_effect=errors.NoSpace("No room for a folder.")):
        assert store.delete_session(URI).problems == ()
    with make_new_index(store) as anew:
        assert come_back(anew, set_aside[1]) == []


# --- what else lies in quarantine


def endings(store_path: Path) -> list[str]:
    return sorted(file.suffixes[0] for file in (store_path / "quarantine").iterdir())


def set_aside_alone(store: Store) -> tuple[Receipt, Receipt]:
    """A session of two versions that are both set aside, the second with two files in quarantine."""
    first = sleep(store, 300)
    second = sleep(store, 600, seed=1)
    for receipt in (first, second):
        spoil(store, receipt, 0)
    store.repair()
    file = Path(store.path, "quarantine", f"{second.bundle_id.hex()}.mvb.1")
    shutil.copy(file, file.with_suffix(".2"))
    file.with_suffix(".2").chmod(0o600)
    assert (store.versions(URI), len(store.index.given_up())) == ([], 2)
    return first, second


@pytest.mark.parametrize("marked", [True, False])
def test_a_version_is_not_deleted_because_of_what_an_earlier_one_of_the_same_bundle_left(
    store: Store, store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    receipt, export = sleep(store, 900), tmp_path / "export.mvb"
    store.export_session(URI, 1, export)
    file = bundle_path(store, receipt.bundle_id)
    if marked:  # a delete of what was set aside, whose last step failed
        spoil(store, receipt, 0)
        store.repair()
        give_ending = quarantine.give_ending
        with monkeypatch.context() as patched:
            patched.setattr(
                quarantine,
                "give_ending",
                lambda folder, names, suffix: {} if suffix == ".mvr" else give_ending(folder, names, suffix),
            )
            store.delete_session(URI)
        assert endings(store_path) == [".mvd"]
    else:
        flip(file, -10)
        store.repair()
        store.delete_session(URI)
        assert endings(store_path) == [".mvr"]
    store.import_file(export)
    store.tag(URI, 1, "release")
    backup = file.read_bytes()
    file.unlink()
    store.repair()
    with reopened(store) as again:
        assert set(again.index.given_up()) == {receipt.bundle_id}
        again.gc()
        assert again.marks(URI).tags == {"release": receipt.bundle_id}
        assert sleep(again, 20).version == 2
    file.write_bytes(backup)
    with Store.open(store_path, writable=True) as again:
        assert [row.version for row in again.versions(URI)] == [1, 2]


def swapped(store: Store) -> tuple[Receipt, Receipt]:
    """Two sessions of one version each, whose files have each other's name."""
    mine, other = sleep(store, 300), sleep(store, 400, uri=OTHER_URI, seed=2)
    exchange(store, mine, other)
    return mine, other


def exchange(store: Store, *receipts: Receipt) -> None:
    """Give two files each other's name."""
    files = [bundle_path(store, receipt.bundle_id) for receipt in receipts]
    contents = [file.read_bytes() for file in files]
    for file, data in zip(files, reversed(contents), strict=True):
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["delete", "forget"])
@pytest.mark.parametrize("repaired", [True, False])
def test_a_session_whose_file_was_swapped_with_a_deleted_one_comes_back_and_the_deleted_one_does_not(
    store: Store, how: str, repaired: bool
) -> None:
    swapped(store)
    if repaired:
        store.repair()
    if how == "delete":
        problems = store.delete_session(URI).problems
        assert [problem.code for problem in problems] == ([] if repaired else ["bundle_mismatch"])
    else:
        assert store.forget(URI).ok is repaired
    store.repair()
    require_awake(store, 400, uri=OTHER_URI, seed=2)
    with make_new_index(store) as anew:
        anew.repair()
        assert [row.uri for row in anew.iter_sessions()] == [OTHER_URI]
        require_awake(anew, 400, uri=OTHER_URI, seed=2)


@pytest.mark.parametrize("needed", [True, False])
def test_a_delete_says_where_it_left_another_version_under_the_name_of_a_deleted_one(
    store: Store, store_path: Path, needed: bool
) -> None:
    mine, other = sleep(store, 300), sleep(store, 400, uri=OTHER_URI, seed=2)
    if needed:
        sleep(store, 600, uri=FORK_URI, before=mine)
    exchange(store, mine, other)
    (problem,) = store.delete_session(URI).problems
    assert problem.code == "bundle_mismatch"
    assert Path(problem.path).exists() is needed
    assert ("it is kept, in quarantine. " in problem.message) is not needed
    assert ("it is kept, under that name. " in problem.message) is needed
    assert bool(list((store_path / "quarantine").iterdir())) is not needed
    for _ in range(2 if needed else 1):
        assert ("run twice" in problem.message) is needed
        store.repair()
    require_awake(store, 400, uri=OTHER_URI, seed=2)


def test_a_full_disk_does_not_empty_the_file_of_another_session(store: Store) -> None:
    swapped(store)
    make_failing(store, sqlite3.SQLITE_FULL)
    store.delete_session(URI)
    path = store.path
    store.close()
    with Store.open(path, writable=True) as again:
        (problem,) = again.repair().problems
        assert (problem.code, "repaired again" in problem.message) == ("version_lost", True)
        assert again.repair().problems == ()
        require_awake(again, 400, uri=OTHER_URI, seed=2)
