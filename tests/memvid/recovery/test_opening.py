"""What opening a store does about bundles that are missing or cannot be read: an acknowledged version is never
quietly replaced by an older one, and its number is not given again (promise 1; threats 24, 25)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid import Receipt, Store, errors
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.marks import Marks
from torpor.memvid.folder.retention import Retention
from torpor.memvid.index import index as index_module
from torpor.memvid.index.index import Index
from torpor.memvid.index.rows import LIVE
from torpor.memvid.index.schema import IndexContradicted, IndexUnusable
from torpor.memvid.limits import MAX_INDEX_BYTES
from torpor.memvid.maintenance.compaction_plan import CompactionPolicy
from torpor.memvid.writing import deletion
from torpor.tests.memvid.log_making import one_frame_log
from torpor.tests.memvid.store_making import (
    FORK_URI,
    OTHER_URI,
    URI,
    bundle_path,
    contents,
    expected,
    flip,
    frame_of,
    meanwhile,
    put,
    reopened,
    require_awake,
    sleep,
    spoil,
)


def two_versions(store: Store) -> tuple[Receipt, Receipt, Path]:
    first = sleep(store, 300)
    second = sleep(store, 600, before=first)
    store.close()
    return first, second, bundle_path(store, second.bundle_id)


def flushed_folders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed from now on."""
    flushed: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.path.realpath(f"/proc/self/fd/{fd}")), fsync(fd)))
    return flushed


# --- an index that was believed too early


def test_threat_26_a_row_that_is_none_met_beside_a_rival_makes_the_index_anew(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    first = sleep(store, 300)
    store.close()
    shutil.copytree(store_path, tmp_path / "backup")
    with Store.open(tmp_path / "backup", writable=True) as other:
        rival = bundle_path(other, sleep(other, 600, seed=2, before=first).bundle_id)
    with Store.open(store_path, writable=True) as again:
        sleep(again, 600, before=first)
        again.index._connection.execute("UPDATE bundles SET token_count = 'many' WHERE version = 2")
    (store_path / "bundles" / rival.parent.name).mkdir(0o700, exist_ok=True)
    shutil.copy2(rival, store_path / "bundles" / rival.parent.name)
    for writable in (False, True):
        with Store.open(store_path, writable=writable) as again:
            assert "a number is none" in (again.opening.index_rebuilt or "")
            assert [row.token_count for row in again.versions(URI)] == [300, 600]


# --- unreadable


def one_of_five(store: Store, *, tagged: bool = True) -> tuple[Receipt, Path]:
    """Of five versions the first, which is pinned, and the last stay: nothing but the last tells its number."""
    receipt = sleep(store, 300)
    store.pin(URI, 1)
    for version in range(2, 6):
        receipt = sleep(store, 300 + 100 * version, before=receipt)
    if tagged:
        store.tag(URI, 5, "release")
    store.prune(Retention(keep_last=1))
    store.close()
    return receipt, bundle_path(store, receipt.bundle_id)


def harm(file: Path, place: str) -> bytes:
    """Damage one part of a bundle's file; what it held, to put it back."""
    good = file.read_bytes()
    bad = bytearray(good)
    if place == "added":
        bad += b"more than it says"
    else:
        bad[{"header": 20, "directory": -200, "trailer": -8, "manifest": good.rindex(b"torpor.manifest/1")}[place]] ^= 1
    file.write_bytes(bad)
    return good


def test_whose_version_an_unreadable_bundle_is_outlives_the_mark_that_told(store: Store) -> None:
    fifth, file = one_of_five(store)
    harm(file, "manifest")
    with reopened(store, anew=True) as again:
        again.untag(URI, "release")
        again.rebuild_index()
        assert again.index.stored(fifth.bundle_id).row.version == 5  # type: ignore[union-attr]
        assert again.index.last_number(URI) == 5


def test_a_damaged_file_put_back_of_a_version_that_is_set_aside_is_told_once(store: Store, store_path: Path) -> None:
    _, second, file = two_versions(store)
    good = file.read_bytes()
    file.unlink()
    with Store.open(store_path, writable=True) as again:
        again.repair()
        assert list(again.index.given_up()) == [second.bundle_id]
        again.index._mark([second.bundle_id])
        put(file, good)
        harm(file, "trailer")
        again.rebuild_index()
    for _ in range(2):
        with Store.open(store_path, writable=True) as again:
            assert [found.path for found in again.opening.unreadable] == [str(file)]


@pytest.mark.parametrize("anew", [True, False])
def test_a_delete_cut_off_beside_a_missed_version_is_a_delete(store: Store, store_path: Path, anew: bool) -> None:
    first = sleep(store, 900)
    sleep(store, 300, seed=4)
    sleep(store, 310, uri=OTHER_URI, seed=6)
    store.tag(URI, 1, "release")
    store.close()
    bundle_path(store, first.bundle_id).unlink()
    (store_path / "index.sqlite").unlink()
    with Store.open(store_path, writable=True) as again:
        assert list(again.index.missed()) == [first.bundle_id]
        with mock.patch.object(Index, "drop", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            again.delete_session(URI)
        if anew:
            again.rebuild_index()
    with Store.open(store_path, writable=True) as again:
        assert (again.opening.unreadable, again.index.missed()) == ((), {})
        assert again.delete_session(OTHER_URI).bytes_freed > 0
        report = again.gc()
        assert (report.problems, report.actions) == ((), ())
        assert list(store_path.glob("bundles/??/*")) == []


def test_where_nothing_tells_whose_version_a_bundle_is_a_number_is_left_out_for_it(store: Store) -> None:
    fifth, file = one_of_five(store, tagged=False)
    harm(file, "manifest")
    with reopened(store, anew=True) as again:
        assert again.index.stored(fifth.bundle_id).row is None  # type: ignore[union-attr]
        assert sleep(again, 310, seed=7).version == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to tell which file is read")
@pytest.mark.parametrize("call", ["preadv", "open", "fstat"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_failure_of_the_system_is_tried_again_and_never_taken_for_damage(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    _, _, file = two_versions(store)
    (store_path / "index.sqlite").unlink()
    failures = 1

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def function(target: object, *args: object, **kwargs: object) -> object:
            nonlocal failures
            name = str(target) if call == "open" else os.readlink(f"/proc/self/fd/{target}")
            if failures and file.name in name:
                failures -= 1
                raise OSError(code, "a failure of the system")
            return real(target, *args, **kwargs)

        return function

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(getattr(os, call)))
        with Store.open(store_path, writable=True) as again:
            assert failures == 0
            require_awake(again, 600)
        (store_path / "index.sqlite").unlink()
        failures = 1000
        with pytest.raises(errors.StoreIoError, match="an older version") as refusal:
            Store.open(store_path, writable=True)
        assert refusal.value.errno == code
    with Store.open(store_path, writable=True) as again:
        assert again.opening.unreadable == ()
        require_awake(again, 600)


def test_a_failure_of_the_system_while_the_index_is_mended_does_not_make_it_anew(
    store: Store, store_path: Path
) -> None:
    sleep(store, 300)
    store.close()
    old = (store_path / "index.sqlite").read_bytes()
    with Store.open(store_path, writable=True) as again:
        file = bundle_path(again, sleep(again, 600).bundle_id)
    (store_path / "index.sqlite").write_bytes(old)
    opening = os.open

    def failing(path: str, *args: object, **kwargs: object) -> int:
        if file.name in str(path):
            raise OSError(errno.EMFILE, "too many")
        return opening(path, *args, **kwargs)

    with mock.patch.object(os, "open", failing), pytest.raises(errors.StoreIoError):
        Store.open(store_path, writable=True)
    assert (store_path / "index.sqlite").read_bytes() == old
    with Store.open(store_path, writable=True) as again:
        require_awake(again, 600)


def test_an_unsafe_bundle_is_reported_and_read_once_it_is_safe(store: Store, store_path: Path, tmp_path: Path) -> None:
    _, _, file = two_versions(store)
    (store_path / "index.sqlite").unlink()
    os.link(file, tmp_path / "second name")
    with Store.open(store_path, writable=True) as again:
        assert [found.code for found in again.opening.unreadable] == [errors.UnsafePath.code]
    (tmp_path / "second name").unlink()
    with Store.open(store_path, writable=True) as again:
        require_awake(again, 600)


# --- missed: only marks tell of it


def test_a_missed_version_is_imported_under_its_own_number_and_another_is_not(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    first = sleep(store, 300)
    exported = tmp_path / "first"
    store.export_session(URI, 1, exported)
    with Store.open(tmp_path / "other", writable=True) as other:
        other.import_file(exported)
        sleep(other, 700, before=first)
        other.export_session(URI, 2, tmp_path / "theirs")
    second = sleep(store, 600, before=first)
    store.tag(URI, 2, "good")
    store.export_session(URI, 2, tmp_path / "ours")
    store.close()
    bundle_path(store, second.bundle_id).unlink()
    with reopened(store, anew=True) as again:
        with pytest.raises(errors.NameTaken):
            again.import_file(tmp_path / "theirs")
        receipt = again.import_file(tmp_path / "ours")
        assert (receipt.version, receipt.bundle_id) == (2, second.bundle_id)
        require_awake(again, 600)
        assert again.verify(deep=True).ok
    with Store.open(store_path, writable=True) as again:
        assert again.opening.unreadable == ()
        assert [row.version for row in again.versions(URI)] == [1, 2]


@pytest.mark.parametrize("asked_by", ["opening", "reader", "rebuild", "repair"])
def test_marks_that_could_not_be_read_when_the_index_was_made_are_asked_once_they_are_back(
    store: Store, store_path: Path, asked_by: str
) -> None:
    needed = bundle_path(store, sleep(store, 600, uri=OTHER_URI).bundle_id).with_suffix(".mvr")
    first = sleep(store, 900)
    sleep(store, 310, uri=FORK_URI, seed=3)
    store.tag(URI, 1, "keep")
    with store.open_bundle(store.versions(OTHER_URI)[0].bundle_id):
        store.delete_session(OTHER_URI)
    store.close()
    file, marks = bundle_path(store, first.bundle_id), store_path / "marks.json"
    good, told = file.read_bytes(), marks.read_bytes()
    file.unlink()
    kept = needed.read_bytes()
    marks.write_bytes(b"{")
    with reopened(store, anew=True) as again:
        assert again.index.marks_unseen()
        again.rebuild_index()
        assert again.index.marks_unseen(), "they cannot be read yet"
        marks.write_bytes(told)
        assert [found.code for found in again.gc().problems] == ["marks_lost"]
        assert again.marks(URI).tags == {"keep": first.bundle_id}
        if asked_by == "rebuild":
            again.rebuild_index()
        elif asked_by == "repair":
            again.repair()
        if asked_by in ("rebuild", "repair"):
            assert not again.index.marks_unseen()
            assert list(again.index.missed()) == [first.bundle_id]
    if asked_by == "reader":
        with Store.open(store_path, writable=False) as reader:
            assert list(reader.index.missed()) == [first.bundle_id]
    for _ in range(2):
        with Store.open(store_path, writable=True) as again:
            assert not again.index.marks_unseen()
            assert [found.path for found in again.opening.unreadable] == [str(file)]
            assert again.gc().actions == ()
            assert sleep(again, 310, seed=7).version > 1
    file.write_bytes(good)
    needed.write_bytes(kept)  # the opening without marks could not know of it
    for path in (file, needed):
        path.chmod(0o600)
    with Store.open(store_path, writable=True) as again, again.open_session(URI, 1) as opened:
        assert contents(opened) == expected(900)


def test_a_version_in_quarantine_that_only_a_mark_tells_of_is_set_aside_once_the_marks_are_back(
    store: Store, store_path: Path
) -> None:
    fifth, file = one_of_five(store)
    harm(file, "manifest")
    file.rename(store_path / "quarantine" / f"{file.name}.1")
    marks = store_path / "marks.json"
    told = marks.read_bytes()
    marks.write_bytes(b"{")
    (store_path / "index.sqlite").unlink()
    Store.open(store_path, writable=True).close()
    marks.write_bytes(told)
    with Store.open(store_path, writable=True) as again:
        assert list(again.index.given_up()) == [fifth.bundle_id]
        assert again.index.missed() == {}
        assert again.index.last_number(URI) == 5


def test_a_version_in_quarantine_that_only_its_marks_tell_of_is_said_to_be_lost_with_its_number(
    store: Store, store_path: Path
) -> None:
    _, file = one_of_five(store)
    harm(file, "manifest")
    with Store.open(store_path, writable=True) as again:
        assert [found.code for found in again.repair().problems] == ["version_lost"]
    shutil.rmtree(store_path / "absent")
    with reopened(store, anew=True) as again:
        (finding,) = again.verify(deep=True).findings
        assert finding.code == "version_lost"
        assert f"Version 5 of {URI} is lost" in finding.message
        assert " 0 tokens" not in finding.message


def test_a_missed_version_whose_marks_the_user_takes_away_is_told_no_more(store: Store) -> None:
    fifth, file = one_of_five(store)
    file.unlink()
    with reopened(store, anew=True) as again:
        assert list(again.index.missed()) == [fifth.bundle_id]
        folder = again._core.folder
        Marks.load(folder).without(URI).save(folder)
    with reopened(store) as again:
        assert (again.opening.unreadable, again.index.missed()) == ((), {})


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("finished_by", ["opening", "gc", "prune"])
def test_the_marks_of_a_version_that_left_go_before_its_file(
    store: Store, store_path: Path, full: bool, finished_by: str
) -> None:
    """A delete was cut off after its first step: the oldest version is retired, the others stay. Then the index is lost
    too: the marks of that version must not be taken for those of a loss."""
    versions = [sleep(store, 300, seed=seed) for seed in range(3)]
    store.tag(URI, 1, "good")
    store.pin(URI, 1)
    store.tag(URI, 2, "other")
    retired = bundle_path(store, versions[0].bundle_id).with_suffix(".mvr")
    if finished_by == "opening":
        store._core.folder.retire(versions[0].bundle_id)
    else:
        with mock.patch.object(deletion, "remove_unneeded", return_value={}):
            deletion.retire(store._core.folder, store.index, store._core.pins, [versions[0].bundle_id])
    refusal = errors.NoSpace("No space left.", path="marks.json")
    with mock.patch.object(Marks, "save", side_effect=refusal) if full else contextlib.nullcontext():
        if finished_by == "gc":
            with pytest.raises(errors.NoSpace) if full else contextlib.nullcontext():
                store.gc()
        elif finished_by == "prune":
            store.prune(Retention(keep_last=3))
        store.close()
        if finished_by == "opening":
            Store.open(store_path, writable=True).close()
    assert retired.exists() == full, "its name says that it was deleted, as long as there are marks"
    assert not full or retired.stat().st_size == 0
    with reopened(store, anew=True) as again:
        assert again.opening.unreadable == ()
        assert [row.version for row in again.versions(URI)] == [2, 3]
        assert again.marks(URI).tags == {"other": versions[1].bundle_id}
        assert not again.marks(URI).pins
        assert not retired.exists()


def test_a_version_that_was_deleted_is_not_missed_where_its_marks_are_left(store: Store, store_path: Path) -> None:
    """The index had it once; or its retired file is there."""
    base = sleep(store, 512)
    sleep(store, 600, uri=OTHER_URI, before=base)
    store.tag(URI, 1, "good")
    with mock.patch.object(deletion, "unmark"):
        store.delete_session(URI)
    store.rebuild_index()
    store.close()
    for remove_index in (False, True):
        if remove_index:
            (store_path / "index.sqlite").unlink()
        with Store.open(store_path, writable=True) as again:
            assert again.opening.unreadable == ()
    with Store.open(store_path, writable=True) as again:
        assert [action.kind for action in again.gc().actions] == ["unmark"]


def test_a_delete_takes_the_marks_away_before_the_retired_files_that_tell_of_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    store.tag(URI, 1, "good")
    monkeypatch.setattr(StoreFolder, "remove", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.delete_session(URI)
    assert not store.marks(URI)


# --- an index that is behind: it went on in memory, or was put back from a backup


@contextlib.contextmanager
def index_left_behind(store_path: Path) -> Iterator[None]:
    """After the block the index's files are again those of before it."""
    files = {path: path.read_bytes() for path in store_path.glob("index.sqlite*")}
    yield
    for path in store_path.glob("index.sqlite*"):
        path.unlink()
    for path, data in files.items():
        put(path, data)


def refuse_to_open(*_: object) -> Index:
    raise IndexUnusable("the system refuses")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("newest", ["live", "directory", "manifest", "aside", "marked"])
@pytest.mark.parametrize("oldest", ["aside", "absent"])
def test_a_session_whose_newest_version_an_index_behind_does_not_know_is_not_taken_for_deleted(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, oldest: str, newest: str, anew: bool
) -> None:
    first, second = sleep(store, 300), sleep(store, 900, seed=2)
    store.tag(URI, 1, "kept")
    file = bundle_path(store, first.bundle_id)
    if oldest == "aside":
        spoil(store, first, 0)
        store.repair()
    else:
        file.unlink()
    store.close()
    with index_left_behind(store_path), Store.open(store_path, writable=True) as later:
        third = sleep(later, 1200, seed=2, before=second)
        later.prune(Retention(keep_last=1))
        if newest == "marked":
            later.tag(URI, 3, "release")
        newest_file = bundle_path(later, third.bundle_id)
    if newest == "aside":
        (store_path / "quarantine").mkdir(mode=0o700, exist_ok=True)
        newest_file.rename(store_path / "quarantine" / f"{newest_file.name}.1")
    elif newest == "marked":
        newest_file.unlink()
    elif newest != "live":
        harm(newest_file, newest)
    if anew:
        monkeypatch.setattr(Index, "open", refuse_to_open)
    with Store.open(store_path, writable=True) as again:
        assert again.index.knows(first.bundle_id)
        again.gc()
        assert again.marks(URI).tags["kept"] == first.bundle_id
        if oldest == "aside":
            assert [path.suffixes for path in (store_path / "quarantine").glob(f"{file.name}.*")] == [[".mvb", ".1"]]


@pytest.mark.parametrize("anew", [False, True])
def test_a_delete_cut_off_of_which_an_index_behind_knows_is_a_delete(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    first = sleep(store, 300)
    sleep(store, 900, seed=2)
    bundle_path(store, first.bundle_id).unlink()
    sleep(store, 40, uri=OTHER_URI)
    store.close()

    with index_left_behind(store_path), Store.open(store_path, writable=True) as later:
        sleep(later, 600, uri=OTHER_URI, seed=3)
        with mock.patch.object(Index, "drop", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            later.delete_session(URI)
    if anew:
        monkeypatch.setattr(Index, "open", refuse_to_open)
    with Store.open(store_path, writable=True) as again:
        assert (again.opening.unreadable, again.index.knows(first.bundle_id)) == ((), False)


def test_a_version_that_is_marked_while_a_reader_opens_is_not_missed(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    load = Marks.load

    def marked_meanwhile(folder: StoreFolder) -> Marks:
        monkeypatch.setattr(Marks, "load", load)
        sleep(store, 310, seed=3)
        store.tag(URI, 2, "late")
        return load(folder)

    monkeypatch.setattr(Marks, "load", marked_meanwhile)
    with Store.open(store_path, writable=False) as reader:
        assert Marks.load is not marked_meanwhile
        assert (reader.opening.unreadable, reader.index.missed()) == ((), {})


@pytest.mark.parametrize("state", ["aside", "absent", "missed"])
@pytest.mark.parametrize("killed_at", ["drop", "unmark", None])
def test_the_marks_of_a_version_without_a_file_go_before_its_row(
    store: Store, state: str, killed_at: str | None
) -> None:
    """Else nothing says that it was deleted, and the next opening takes its marks for those of a loss."""
    first = sleep(store, 300)
    sleep(store, 310, uri=OTHER_URI, seed=3)
    store.tag(URI, 1, "release")
    if state == "aside":
        spoil(store, first, 0)
        store.repair()
    else:
        bundle_path(store, first.bundle_id).unlink()
    with reopened(store, anew=state == "missed") as again:
        if killed_at is None:
            again.delete_session(URI)
        else:
            owner = Index if killed_at == "drop" else deletion
            with mock.patch.object(owner, killed_at, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                again.delete_session(URI)
        assert not again.marks(URI)
    for _ in range(2):
        with reopened(store) as again:
            assert again.index.missed() == {}
            if killed_at != "drop" or state != "absent":
                assert (again.opening.unreadable, again.index.bundles_of(URI)) == ((), [])


def test_a_delete_says_that_marks_stay_of_versions_that_have_no_file(store: Store, store_path: Path) -> None:
    first = sleep(store, 300)
    store.tag(URI, 1, "release")
    spoil(store, first, 0)
    store.repair()
    with mock.patch.object(Marks, "save", side_effect=errors.NoSpace("No space left.", path="marks.json")):
        (problem,) = store.delete_session(URI).problems
    assert (problem.code, problem.path) == ("no_space", str(store_path / "marks.json"))
    assert "torpor gc" in problem.message
    assert [action.kind for action in store.gc().actions] == ["unmark"]
    with reopened(store) as again:
        assert (again.opening.unreadable, again.index.missed()) == ((), {})


def test_a_version_that_came_back_and_was_marked_beside_what_a_delete_has_let_go_is_not_deleted(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    first = sleep(store, 600, uri=OTHER_URI)
    store.export_session(OTHER_URI, 1, tmp_path / "exported")
    spoil(store, first, 0)
    store.repair()
    store.close()
    with index_left_behind(store_path), Store.open(store_path, writable=True) as later:
        later.index.file_is_behind = True  # so what is set aside keeps the ending of a delete
        later.delete_session(OTHER_URI)
        later.import_file(tmp_path / "exported")
        later.tag(OTHER_URI, 1, "release")
        bundle_path(later, first.bundle_id).unlink()
    assert [path.suffixes for path in (store_path / "quarantine").iterdir()] == [[".mvd", ".1"]]
    with Store.open(store_path, writable=True) as again:
        assert again.index.knows(first.bundle_id)
        again.gc()
        assert again.marks(OTHER_URI).tags == {"release": first.bundle_id}


@contextlib.contextmanager
def index_of_before_a_rewrite(store_path: Path) -> Iterator[None]:
    """As `index_left_behind`, and meanwhile a rewrite was begun."""
    with index_left_behind(store_path):
        with Store.open(store_path, writable=True) as later:
            later.index.begin_rewrite(bytes(32), ())
        yield


@pytest.mark.parametrize("state", ["absent", "aside", "quarantine", "missed", "damaged"])
def test_what_an_index_that_contradicts_the_bundles_alone_knew_is_taken_over_by_the_next(
    store: Store, store_path: Path, tmp_path: Path, state: str
) -> None:
    first = sleep(store, 600)
    second = sleep(store, 900, before=first)
    sleep(store, 600, uri=OTHER_URI, seed=5)
    file = bundle_path(store, second.bundle_id)
    if state == "missed":
        store.tag(URI, 2, "release")
    if state == "quarantine":
        spoil(store, second, -1)
    else:
        away = file.rename(tmp_path / "away")
    if state in ("aside", "quarantine"):
        store.repair()
    reopened(store, anew=state == "missed").close()
    if state == "damaged":
        shutil.copy(tmp_path / "away", file)
        harm(file, "directory")
    with index_left_behind(store_path), Store.open(store_path, writable=True) as later:
        sleep(later, 40, uri=FORK_URI)
    contradicted = mock.Mock(side_effect=IndexContradicted("it contradicts the bundles"))
    with meanwhile(Index, "reconcile", contradicted), Store.open(store_path, writable=True) as again:
        assert "contradicts" in (again.opening.index_rebuilt or "")
        assert again.index.knows(second.bundle_id)
        said = [found.path for found in (*again.opening.unreadable, *again.verify(deep=False).findings)]
        assert str(file) in said
        again.delete_session(OTHER_URI)
        again.gc()
        assert (second.bundle_id in again.index.needs_unknown()) == (state in ("missed", "damaged"))
        assert sleep(again, 300, seed=7).version == (4 if state == "quarantine" else 3)
    if state != "quarantine":
        away.rename(file)
        with Store.open(store_path, writable=True) as again, again.open_session(URI, 2) as opened:
            assert [row.version for row in again.versions(URI)] == [1, 2, 3]
            assert contents(opened) == expected(900)


def test_a_version_that_only_a_stale_index_tells_of_needs_whatever_its_blocks_may_have_been_moved_to(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    """Its file, folded into another one since, is gone, and so the newest version must not take that one with it."""
    versions = [sleep(store, 600, seed=5)]
    for count in (900, 1200):
        versions.append(sleep(store, count, seed=5, before=versions[-1]))
    store.close()
    with index_left_behind(store_path), Store.open(store_path, writable=True) as later:
        assert later.compact(URI, policy=CompactionPolicy(max_holders=1, min_dead_ratio=0)).actions
        away = bundle_path(later, versions[1].bundle_id)
        needed = later.index.refs_of(versions[1].bundle_id)
    away.rename(tmp_path / "away")
    with Store.open(store_path, writable=True) as again:
        assert set(needed) <= set(again.index.refs_of(versions[1].bundle_id))
        assert [row.version for row in again.versions(URI)] == [1, 2, 3]
    (tmp_path / "away").rename(away)
    with Store.open(store_path, writable=True) as again, again.open_session(URI, 2) as opened:
        assert contents(opened) == expected(900, seed=5)
        assert again.index.refs_of(versions[1].bundle_id) == needed


@pytest.mark.parametrize("of", ["standing", "aside"])
def test_a_delete_of_which_a_stale_index_does_not_know_is_one(store: Store, store_path: Path, of: str) -> None:
    first = sleep(store, 300)
    sleep(store, 600, uri=OTHER_URI, seed=5)
    if of == "aside":
        spoil(store, first, 0)
        store.repair()
    store.close()
    with index_of_before_a_rewrite(store_path), Store.open(store_path, writable=True) as later:
        later.index.file_is_behind = True  # so the names that tell of the delete stay
        later.delete_session(URI)
    with Store.open(store_path, writable=True) as again:
        assert "older" in (again.opening.index_rebuilt or "")
        assert (again.index.bundles_of(URI), again.opening.unreadable) == ([], ())


# --- missing


def set_aside_with_a_rest(store: Store) -> tuple[Receipt, Path]:
    """A lost, tagged version that others need some frames of, before a repair; and its file."""
    lost = sleep(store, 900, before=sleep(store, 300))
    sleep(store, 600, uri=OTHER_URI)
    store.tag(URI, 2, "release")
    file = bundle_path(store, lost.bundle_id)
    frame = frame_of(store, lost.entries[2])
    flip(file, frame.offset + frame.head_bytes)
    return lost, file


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
def test_an_index_of_before_a_repair_takes_what_that_has_set_aside_for_no_deleted_version(
    store: Store, store_path: Path, tmp_path: Path, writable: bool, in_order: bool
) -> None:
    lost, file = set_aside_with_a_rest(store)
    store.close()
    names = ("index.sqlite", "index.sqlite-sums")
    for name in names:
        shutil.copy(store_path / name, tmp_path / name)
    with Store.open(store_path, writable=True) as again:
        again.repair()
        needs = again.index.refs_of(lost.bundle_id)
    assert [path.suffix for path in file.parent.glob(f"{file.stem}.*")] == [".mvr"]
    for name in names:
        shutil.copy(tmp_path / name, store_path / name)
    if not in_order:
        (store_path / "quarantine").chmod(0o770)
    with Store.open(store_path, writable=writable) as again:
        assert set(again.index.given_up()) == {lost.bundle_id}
        assert again.index.refs_of(lost.bundle_id) == needs
        assert (again.opening.unreadable, again.index.last_number(URI)) == ((), 3)
        assert lost.bundle_id not in {row.bundle_id for row in again.index.all_rows()}
        if writable:
            again.gc()
            assert again.marks(URI).tags == {"release": lost.bundle_id}


def test_an_index_made_anew_takes_over_what_was_set_aside_beside_a_rest_of_it(store: Store) -> None:
    lost, _ = set_aside_with_a_rest(store)
    store.repair()
    index = store.index
    with index._transaction():
        index._set(lost.bundle_id, "status", LIVE)  # as in one of before the repair
    needs = index.refs_of(lost.bundle_id)
    store.rebuild_index()
    assert set(store.index.given_up()) == {lost.bundle_id}
    assert store.index.refs_of(lost.bundle_id) == needs


@pytest.mark.parametrize("anew", [True, False])
def test_a_delete_cut_off_of_a_version_that_left_a_copy_in_quarantine_is_a_delete(store: Store, anew: bool) -> None:
    first = sleep(store, 600)
    sleep(store, 900, uri=OTHER_URI)  # keeps the retired file
    flip(bundle_path(store, first.bundle_id), -200)
    assert [action.kind for action in store.repair().actions] == ["quarantine", "rewrite"]
    with mock.patch.object(Index, "drop", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        store.delete_session(URI)
    if anew:
        store.rebuild_index()
    with reopened(store) as again:
        assert (again.versions(URI), again.index.given_up()) == ([], {})
        assert again.repair().actions == ()
        require_awake(again, 900, uri=OTHER_URI)


@pytest.mark.parametrize("writable", [True, False])
def test_threat_25_a_version_whose_file_is_missing_is_refused_and_not_replaced(
    store: Store, store_path: Path, tmp_path: Path, writable: bool
) -> None:
    _, second, file = two_versions(store)
    file.rename(tmp_path / "moved")
    for _ in range(2):
        with Store.open(store_path, writable=writable) as again:
            assert (again.opening.index_rebuilt, again.opening.rows_dropped) == (None, 0)
            assert [(found.code, found.path) for found in again.opening.unreadable] == [("bundle_missing", str(file))]
            assert str(URI) in again.opening.unreadable[0].message
            with pytest.raises(errors.BundleMissing):
                again.open_session(URI)
            assert [row.version for row in again.versions(URI)] == [1, 2]
            assert [row.version for row in again.iter_sessions()] == [2]
            assert again.resolve("agent") == URI
            with again.open_session(URI, version=1) as reader:
                assert reader.manifest.token_count == 300
            assert [found.code for found in again.verify(deep=True).findings] == ["bundle_missing"]
            assert [found.code for found in again.verify(URI, deep=False).findings] == ["bundle_missing"]
    (tmp_path / "moved").rename(file)
    with Store.open(store_path, writable=writable) as again:
        assert again.opening.unreadable == ()
        assert again.find_session(URI, 2).bundle_id == second.bundle_id  # type: ignore[union-attr]
        require_awake(again, 600)


@pytest.mark.parametrize("call", ["configure", "require_ours"])
def test_what_only_the_index_knows_outlives_a_system_that_refuses_to_open_it(
    store: Store, store_path: Path, call: str
) -> None:
    second = sleep(store, 600, before=sleep(store, 300))
    written = store.index.written()
    store.close()
    bundle_path(store, second.bundle_id).unlink()
    refused = mock.Mock(side_effect=sqlite3.OperationalError("disk I/O error"))
    with meanwhile(index_module, call, refused), Store.open(store_path, writable=True) as again:
        assert "disk I/O error" in (again.opening.index_rebuilt or "")
        assert [one.code for one in again.opening.unreadable] == ["bundle_missing"]
        assert again.index.written() == written
        assert [row.version for row in again.versions(URI)] == [1, 2]
        with pytest.raises(errors.BundleMissing):
            again.open_session(URI)
        assert sleep(again, 20).version == 3
    with Store.open(store_path, writable=True) as again:
        assert again.opening.index_rebuilt is None
        assert [row.version for row in again.versions(URI)] == [1, 2, 3]


def test_a_retired_file_is_not_taken_for_a_missing_version(store: Store, store_path: Path) -> None:
    """A delete that was cut off behind its last rename has happened, also where the file of a version was missing."""
    first, _, file = two_versions(store)
    bundle_path(store, first.bundle_id).unlink()
    file.rename(file.with_suffix(".mvr"))
    with Store.open(store_path, writable=True) as again:
        assert again.find_session(URI) is None
        assert again.opening.unreadable == ()
        assert again.opening.leftovers_removed == 1
    assert not list(store_path.rglob("*.mv?"))


@pytest.mark.parametrize("by", ["delete", "opening"])
def test_a_dropped_row_is_in_the_index_file_before_the_bundle_file_goes(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Else a power cut, or a read-only store beside us, would take a deleted session for a loss. by opening: that
    finishes a delete that was cut off."""
    file = bundle_path(store, sleep(store, 300).bundle_id)
    sleep(store, 20, uri=OTHER_URI)
    seen: list[object] = []
    real = os.unlink

    def unlink(name: str, **kwargs: object) -> None:
        if name.endswith(".mvr"):
            shutil.copy(store_path / "index.sqlite", store_path / "copy")  # without the -wal beside it
            with contextlib.closing(sqlite3.connect(store_path / "copy")) as connection:
                seen.extend(connection.execute("SELECT name FROM bundles").fetchall())
        real(name, **kwargs)

    if by == "opening":
        store.close()
        file.rename(file.with_suffix(".mvr"))
    monkeypatch.setattr(os, "unlink", unlink)
    if by == "delete":
        store.delete_session(URI)
    else:
        Store.open(store_path, writable=True).close()
    assert seen == [("other",)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to tell which folder is flushed")
def test_an_index_that_is_replaced_is_durably_gone(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut may bring back its rows, and with them what was deleted since."""
    sleep(store, 300)
    store.close()
    (store_path / "index.sqlite").write_bytes(b"not a database" * 1000)
    steps = flushed_folders(monkeypatch)
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new, **options: (steps.append(new), rename(old, new, **options)))
    Store.open(store_path, writable=True).close()
    assert str(store_path) in steps[steps.index("index.sqlite") :]


# --- a hostile or oversized index


HOSTILE = {
    "a view that is computed for ever": "ALTER TABLE bundles RENAME TO b2; "
    "CREATE VIEW bundles AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT zeroblob(32) "
    "AS bundle_id, 'live' AS status, namespace, name, x AS version, parent, identity_digest, token_count, "
    "bundle_bytes, logical_bytes, created_ns, model, labels, salvaged_tokens, salvaged_of, unread_tokens FROM c, b2",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON bundles BEGIN DELETE FROM bundles; END",
    "deep labels": f"UPDATE bundles SET labels = '{'[' * 100_000}'",
}


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("writable", [True, False])
def test_threat_26_a_hostile_index_is_made_anew(store: Store, store_path: Path, hostile: str, writable: bool) -> None:
    sleep(store, 300)
    store.close()
    with contextlib.closing(sqlite3.connect(store_path / "index.sqlite", isolation_level=None)) as connection:
        connection.executescript(HOSTILE[hostile])
    with Store.open(store_path, writable=writable) as again:
        assert again.opening.index_rebuilt
        require_awake(again, 300)


def test_an_index_too_large_for_memory_is_not_copied(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    monkeypatch.setattr("torpor.memvid.index.index_file.MAX_INDEX_BYTES", 4096)
    with Store.open(store_path, writable=False) as reader:
        assert "4096 bytes" in str(reader.opening.index_rebuilt)
        require_awake(reader, 300)


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
def test_an_index_file_longer_than_any_of_ours_is_not_read(
    store: Store, store_path: Path, name: str, writable: bool
) -> None:
    sleep(store, 300)
    store.close()
    (store_path / name).touch(0o600)
    os.truncate(store_path / name, MAX_INDEX_BYTES + 1)
    with Store.open(store_path, writable=writable) as again:
        assert f"{name} has more than" in (again.opening.index_rebuilt or "")
        require_awake(again, 300)


def test_an_index_that_has_more_pages_by_its_log_than_any_of_ours_is_not_checked_page_by_page(
    store: Store, store_path: Path
) -> None:
    sleep(store, 300)
    store.close()
    page = bytearray((store_path / "index.sqlite").read_bytes()[:4096])
    page[28:32] = (1 << 24).to_bytes(4, "big")  # SQLite believes this where the log says as many
    (store_path / "index.sqlite-wal").touch(0o600)
    (store_path / "index.sqlite-wal").write_bytes(one_frame_log(bytes(page), 1 << 24))
    with Store.open(store_path, writable=True) as again:
        assert "it says that it has more than" in (again.opening.index_rebuilt or "")
        require_awake(again, 300)


# --- parts of the folder


@pytest.mark.parametrize("writable", [True, False])
def test_a_store_without_its_bundles_folder_is_refused(store: Store, store_path: Path, writable: bool) -> None:
    two_versions(store)
    (store_path / "bundles").rename(store_path / "elsewhere")
    with pytest.raises(errors.NotAStore, match="bundles is missing"):
        Store.open(store_path, writable=writable)
    (store_path / "elsewhere").rename(store_path / "bundles")
    with Store.open(store_path, writable=True) as again:
        require_awake(again, 600)


@pytest.mark.parametrize("call", ["listdir", "stat"])
def test_a_folder_that_cannot_be_looked_at_is_a_typed_error(store: Store, store_path: Path, call: str) -> None:
    sleep(store, 300)
    failure = OSError(errno.EIO, "a failure of the system")
    with mock.patch.object(os, call, side_effect=failure):
        if call == "listdir":
            assert [found.code for found in store.verify(deep=False).findings] == [errors.StoreIoError.code]
        with pytest.raises(errors.StoreIoError):
            Store.open(store_path, writable=False)
        with contextlib.nullcontext() if call == "listdir" else pytest.raises(errors.StoreIoError):
            store.delete_session(URI)  # lists nothing
    store.close()
    with mock.patch.object(os, call, side_effect=failure), pytest.raises(errors.StoreIoError):
        Store.open(store_path, writable=True)


def test_only_what_an_unfinished_sleep_names_is_a_leftover(store: Store, store_path: Path) -> None:
    store.close()
    mine = [
        store_path / "notes.tmp",
        store_path / "0123456789abcdef.tmp",
        store_path / "bundles" / "notes.tmp",
        store_path / "bundles" / "0123456789ABCDEF.tmp",
    ]
    for file in mine:
        file.write_text("mine")
    (store_path / "bundles" / "fedcba9876543210.tmp").mkdir()
    leftover = store_path / "bundles" / "0123456789abcdef.tmp"
    leftover.write_text("half a bundle")
    with Store.open(store_path, writable=False):
        assert leftover.exists()
    with Store.open(store_path, writable=True) as again:
        assert again.opening.leftovers_removed == 1
        assert {found.path for found in again.verify(deep=False).findings} == {str(file) for file in mine[2:]}
    assert all(file.exists() for file in mine)
    assert not leftover.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to tell which folder is flushed")
def test_new_folders_above_a_store_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = flushed_folders(monkeypatch)
    Store.open(tmp_path / "a" / "b" / "store", writable=True).close()
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(flushed)


def test_a_clock_before_1970_does_not_stop_a_sleep(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: -5)
    sleep(store, 300)
    require_awake(store, 300)
    assert store.versions(URI)[0].created_ns == 0


# --- an undo that fails


def test_a_version_that_can_neither_be_entered_nor_taken_back_ends_writing(store: Store) -> None:
    """Else the next sleep would get the same version number, and the clock would decide between the two."""
    first = sleep(store, 300)
    refusal = errors.StoreIoError("Input/output error.")
    with (
        mock.patch.object(Index, "add", side_effect=refusal),
        mock.patch.object(StoreFolder, "remove", side_effect=refusal),
        pytest.raises(errors.DurabilityLost, match="taken back"),
    ):
        sleep(store, 600, before=first)
    with pytest.raises(errors.DurabilityLost):
        sleep(store, 400, before=first)
    assert not store.statistics().writable
    require_awake(store, 300)


def test_the_figures_of_a_store_keep_up_with_it_and_list_nothing(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require_counted() -> None:
        counted = store.statistics()
        on_disk = sorted(store_path.glob("bundles/*/*.mv?"))
        rows = store.index.all_rows()
        assert counted.bundle_files == len(on_disk)
        assert (counted.sessions, counted.versions) == (len({row.uri for row in rows}), len(rows))
        assert counted.file_bytes == sum(row.bundle_bytes for row in rows)

    first = sleep(store, 300)
    sleep(store, 600, before=first)
    sleep(store, 20, uri=OTHER_URI)
    store.statistics()
    with monkeypatch.context() as patch:
        patch.delattr(StoreFolder, "list_bundles")
        require_counted()
        sleep(store, 30, uri=OTHER_URI)
        require_counted()
        store.delete_session(OTHER_URI)
        require_counted()
        assert [row.version for row in store.iter_sessions()] == [2]
        with pytest.raises(errors.SessionNotFound, match="Did you mean"):
            store.resolve(f"{URI.name}x")
        store.delete_session(URI)
        require_counted()


@pytest.mark.parametrize("step", ["new_file", "put_in_place", None])
def test_what_only_the_index_knows_is_known_after_an_opening_that_could_not_write(
    store: Store, store_path: Path, step: str | None
) -> None:
    """Threat 28. A full disk lets a sound index be opened no more than a new one be made."""
    first = sleep(store, 300)
    bundle_path(store, sleep(store, 600, before=first).bundle_id).unlink()
    store.repair()
    store.close()
    full = sqlite3.OperationalError("disk I/O error")
    full.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(index_module, "configure", side_effect=full))
        if step is not None:
            stack.enter_context(mock.patch.object(index_module, step, side_effect=errors.NoSpace("No room.")))
        again = stack.enter_context(Store.open(store_path, writable=True))
        assert "takes no change now" in str(again.opening.index_rebuilt)
        assert [row.version for row in again.index.given_up().values()] == [2]
    with Store.open(store_path, writable=True) as again:
        assert again.opening.index_rebuilt is None
        assert [row.version for row in again.index.given_up().values()] == [2]
        assert sleep(again, 40).version == 3


def test_what_sqlite_left_beside_an_index_that_was_not_finished_is_removed(store: Store, store_path: Path) -> None:
    sleep(store, 300)
    store.close()
    for name in ("0123456789abcdef.tmp", "0123456789abcdef.tmp-journal"):
        (store_path / "bundles" / name).write_bytes(b"half an index")
        (store_path / "bundles" / name).chmod(0o600)
    with Store.open(store_path, writable=True) as again:
        assert again.opening.leftovers_removed == 2
        assert again.verify(deep=True).findings == ()
    assert not list(store_path.glob("bundles/*.tmp*"))
