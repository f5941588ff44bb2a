"""What no bundle tells stands in notes: the index may be removed at any moment, and nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fnmatch
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.memvid import Store
from torpor.memvid.disk import durable
from torpor.memvid.errors import BundleMissing, NoSpace, StoreError, StoreIoError, UnsafePath
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.lossy import Lossy
from torpor.memvid.format.records import IndexRow
from torpor.memvid.format.salvaged import Salvaged
from torpor.memvid.index import absent
from torpor.memvid.index.absent import AbsentNotes, decode_note, encode_note
from torpor.memvid.index.rows import ASIDE, LIVE, IndexedBundle
from torpor.memvid.limits import MAX_VERSION
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    bundle_path,
    contents,
    expected,
    refusing,
    reopened,
    sleep,
    spoil,
)

_BUNDLE = bytes(range(32))
_ROW = IndexRow(
    URI, 7, _BUNDLE, bytes(32), b"\7" * 32, 600, 4096, 8192, 5, 'a "model", [1]', ("one", "två"), Salvaged(4, 9), 3,
    Lossy(8, 256),
)  # fmt: skip
_NOTED = IndexedBundle(_BUNDLE, ASIDE, _ROW, (b"\1" * 32, b"\2" * 32), (b"\xff" * 8, b"\0" * 8))

no_room = refusing(NoSpace("No room."))


def lose_index(path: Path) -> None:
    for file in path.glob("index.sqlite*"):
        file.unlink()


def notes_in(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "absent").glob("*")}


def given_up(store: Store, path: Path) -> Path:
    """A second version that needs the first one's file, which repair has given up because its own is nowhere; and where
    that file is."""
    second = sleep(store, 600, before=sleep(store, 300))
    sleep(store, 300, uri=OTHER_URI, seed=5)
    away = bundle_path(store, second.bundle_id).rename(path.parent / "away")
    store.repair()
    store.close()
    return away


def put_back(path: Path, away: Path, bundle_id: bytes) -> None:
    away.rename(path / "bundles" / bundle_id.hex()[:2] / f"{bundle_id.hex()}.mvb")


@pytest.mark.parametrize(
    "noted",
    [
        _NOTED,
        dataclasses.replace(_NOTED, status=LIVE, refs=(), blocks=()),
        dataclasses.replace(
            _NOTED, row=dataclasses.replace(_ROW, parent=None, labels=(), salvaged=None, unread_tokens=0, lossy=None)
        ),
    ],
)
def test_a_note_says_what_the_row_says_and_is_read_only_as_it_was_written(noted: IndexedBundle) -> None:
    data = encode_note(noted)
    assert decode_note(data, _BUNDLE) == noted
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((ValueError, TypeError, StoreError)):
            decode_note(changed, _BUNDLE)
    with pytest.raises(ValueError, match="not in the form"):
        decode_note(data, bytes(32))


def test_a_version_that_was_given_up_is_known_without_the_index_with_its_number_and_its_needs(
    store: Store, store_path: Path
) -> None:
    away = given_up(store, store_path)
    lose_index(store_path)
    with Store.open(store_path, writable=True) as again:
        assert again.opening.unreadable == ()
        assert [row.version for row in again.index.given_up().values()] == [2]
        assert "ersion 2 of" in again.verify(deep=False).findings[0].message
        (bundle_id,) = again.index.given_up()
        assert again.index.refs_of(bundle_id)
        third = sleep(again, 40)
        assert third.version == 3
        again.prune(Retention(keep_last=1), URI)
        again.gc()
    put_back(store_path, away, bundle_id)
    with Store.open(store_path, writable=True) as again:
        again.repair()
        with again.open_session(URI, 2) as opened:
            assert contents(opened) == expected(600)
        assert again.verify(deep=True).ok
    Store.open(store_path, writable=True).close()
    assert notes_in(store_path) == {}


@pytest.mark.parametrize("writable", [True, False])
def test_a_version_that_an_opening_found_missing_is_refused_without_the_index_and_not_replaced(
    store: Store, store_path: Path, writable: bool
) -> None:
    second = sleep(store, 600, before=sleep(store, 300))
    away = bundle_path(store, second.bundle_id).rename(store_path.parent / "away")
    reopened(store).close()
    lose_index(store_path)
    with Store.open(store_path, writable=writable) as again:
        assert [one.code for one in again.opening.unreadable] == ["bundle_missing"]
        assert [row.version for row in again.versions(URI)] == [1, 2]
        with pytest.raises(BundleMissing):
            again.open_session(URI)
        if writable:
            again.prune(Retention(keep_last=1), URI)
            again.gc()
    lose_index(store_path)
    put_back(store_path, away, second.bundle_id)
    with Store.open(store_path, writable=True) as again, again.open_session(URI, 2) as opened:
        assert contents(opened) == expected(600)
    assert notes_in(store_path) == {}


def test_a_store_of_before_there_were_notes_has_them_after_one_opening_wherever_that_is_cut_off(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        lost = sleep(store, 40, seed=seed)
        bundle_path(store, lost.bundle_id).unlink()
        store.repair()
    store.close()
    whole = notes_in(store_path)
    assert len(whole) == 3
    shutil.rmtree(store_path / "absent")
    keep = AbsentNotes.keep

    def one(self: AbsentNotes, bundles: object) -> None:
        keep(self, list(bundles)[:1])  # type: ignore[call-overload]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AbsentNotes, "keep", one)
        for count in (1, 2, 3):
            with pytest.raises(KeyboardInterrupt):
                Store.open(store_path, writable=True)
            assert len(notes_in(store_path)) == count
    Store.open(store_path, writable=True).close()
    assert notes_in(store_path) == whole
    lose_index(store_path)
    with Store.open(store_path, writable=True) as again:
        assert sorted(row.version for row in again.index.given_up().values()) == [1, 2, 3]
        assert sleep(again, 20).version == 4


@pytest.mark.parametrize("how", ["delete", "forget", "empty"])
def test_a_version_that_leaves_for_good_takes_its_note_with_it_though_the_disk_is_full(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    given_up(store, store_path)
    with Store.open(store_path, writable=True) as again:
        with monkeypatch.context() as patch:
            patch.setattr("torpor.memvid.disk.durable.write_file", no_room)
            if how == "delete":
                again.delete_session(URI)
            elif how == "forget":
                again.forget(URI)
            else:
                again.empty_quarantine()
        assert notes_in(store_path) == {}
    lose_index(store_path)
    with Store.open(store_path, writable=True) as again:
        assert again.index.given_up() == {}
        assert sleep(again, 20).version == (2 if how == "empty" else 1)


def test_the_folders_are_flushed_once_for_all_notes_of_an_opening(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [sleep(store, 20, seed=seed).bundle_id for seed in range(5)]
    for bundle_id in lost:
        bundle_path(store, bundle_id).unlink()
    store.close()
    flushed, flush = list[str](), durable.sync_folder
    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_folder", lambda fd, path: (flushed.append(path), flush(fd, path)))
        Store.open(store_path, writable=True).close()
    assert notes_in(store_path).keys() == {f"{bundle_id.hex()}.json" for bundle_id in lost}
    assert flushed.count(str(store_path / "absent")) == 1
    assert flushed.index(str(store_path / "absent")) < flushed.index(str(store_path / "bundles"))


def test_a_repair_without_room_for_a_note_gives_nothing_up_and_an_opening_notes_it_the_next_time(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = sleep(store, 300)
    bundle_path(store, lost.bundle_id).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("torpor.memvid.disk.durable.write_file", no_room)
        with pytest.raises(NoSpace):
            store.repair()
        assert store.index.given_up() == {}
        assert [row.version for row in store.versions(URI)] == [1]
        reopened(store).close()
    assert notes_in(store_path) == {}
    Store.open(store_path, writable=True).close()
    assert list(notes_in(store_path)) == [f"{lost.bundle_id.hex()}.json"]


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"\xff\xff"])
def test_a_damaged_note_is_written_anew_from_the_index_and_told_without_it(
    store: Store, store_path: Path, damage: bytes
) -> None:
    given_up(store, store_path)
    ((name, whole),) = notes_in(store_path).items()
    file = store_path / "absent" / name
    file.write_bytes(damage)
    Store.open(store_path, writable=True).close()
    assert file.read_bytes() == whole
    file.write_bytes(damage)
    lose_index(store_path)
    for writable in (False, True, True):
        with Store.open(store_path, writable=writable) as again:
            assert [one.path for one in again.opening.unreadable] == [str(file)]
            assert [one.path for one in again.verify(deep=False).findings] == [str(file)]
            if writable:
                assert [one.path for one in again.repair().problems] == [str(file)]
    assert file.read_bytes() == damage
    file.write_bytes(whole)
    with Store.open(store_path, writable=True) as again:
        assert again.opening.unreadable == ()
        assert [row.version for row in again.index.given_up().values()] == [2]


@pytest.mark.parametrize("how", ["open", "rebuild"])
def test_a_note_that_is_put_back_tells_more_of_a_version_than_its_marks(
    store: Store, store_path: Path, how: str
) -> None:
    second = sleep(store, 600, before=sleep(store, 300))
    store.tag(URI, None, "kept")
    bundle_path(store, second.bundle_id).unlink()
    store.repair()
    needs = store.index.refs_of(second.bundle_id)
    assert needs
    store.close()
    (file,) = (store_path / "absent").glob("*")
    whole = file.read_bytes()
    file.write_bytes(b"damaged")
    lose_index(store_path)
    with Store.open(store_path, writable=True) as again:
        assert list(again.index.missed()) == [second.bundle_id]
        if how == "rebuild":
            file.write_bytes(whole)
            again.rebuild_index()
            assert again.index.refs_of(second.bundle_id) == needs
    file.write_bytes(whole)
    with Store.open(store_path, writable=True) as again:
        assert again.index.missed() == {}
        assert list(again.index.given_up()) == [second.bundle_id]
        assert again.index.refs_of(second.bundle_id) == needs
        assert again.opening.unreadable == ()
    assert notes_in(store_path) == {file.name: whole}


def test_a_note_that_the_system_refuses_to_read_is_not_taken_for_damaged_and_stays(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    older = {file.name: file.read_bytes() for file in store_path.glob("index.sqlite*")}
    with Store.open(store_path, writable=True) as again:
        given_up(again, store_path)
    whole = notes_in(store_path)
    for name, data in older.items():
        (store_path / name).write_bytes(data)
    with refused(monkeypatch, times=2), Store.open(store_path, writable=True) as again:
        assert [one.code for one in again.opening.unreadable] == ["store_io"]
    assert notes_in(store_path) == whole
    lose_index(store_path)
    with refused(monkeypatch, times=2), pytest.raises(StoreIoError, match="It tells of a version"):
        Store.open(store_path, writable=True)
    with refused(monkeypatch, times=1), Store.open(store_path, writable=True) as again:
        assert [row.version for row in again.index.given_up().values()] == [2]
    assert notes_in(store_path) == whole


@contextlib.contextmanager
def refused(monkeypatch: pytest.MonkeyPatch, times: int) -> Iterator[None]:
    """The system has no descriptor for the first notes that are asked for."""
    left, read = [times], absent.read_small

    def refuse(folder_fd: int, name: str, max_bytes: int, path: str) -> bytes:
        left[0] -= 1
        if left[0] >= 0:
            raise StoreIoError(f"Cannot open {path}.", path=path, errno=errno.EMFILE)
        return read(folder_fd, name, max_bytes, path)

    with monkeypatch.context() as patch:
        patch.setattr(absent, "read_small", refuse)
        yield


def test_a_note_with_a_second_name_is_told_as_that(store: Store, store_path: Path) -> None:
    given_up(store, store_path)
    (note,) = (store_path / "absent").glob("*")
    os.link(note, store_path.parent / "second")
    lose_index(store_path)
    with Store.open(store_path, writable=True) as again:
        (finding,) = again.opening.unreadable
    assert "2 hard links" in finding.message
    assert "damaged" not in finding.message
    assert note.exists()


def test_a_note_of_a_version_that_none_can_have_is_refused() -> None:
    for version in (0, -1, MAX_VERSION + 1):
        noted = dataclasses.replace(_NOTED, row=dataclasses.replace(_ROW, version=version))
        with pytest.raises(ValueError, match="that none can have"):
            decode_note(encode_note(noted), _BUNDLE)


@pytest.mark.parametrize("column", ["version", "model", "labels", "name", "created_ns", "lossy_bits"])
def test_a_note_whose_row_cannot_be_one_is_told_as_damaged(store: Store, store_path: Path, column: str) -> None:
    given_up(store, store_path)
    (file,) = (store_path / "absent").glob("*")
    fields = absent._FORMAT.decode(file.read_bytes(), "")
    for wrong in ({"big": 10**40}, [10**40], 1.5, True, 10**40, "\ud800", []):
        fields["row"][column] = wrong
        file.write_bytes(absent._FORMAT.encode(fields))
        lose_index(store_path)
        with Store.open(store_path, writable=True) as again:
            assert [one.path for one in again.opening.unreadable] == [str(file)], wrong
            assert "is damaged" in again.opening.unreadable[0].message
        assert file.exists()


def test_a_folder_in_the_place_of_a_note_stops_no_delete(store: Store, store_path: Path) -> None:
    given_up(store, store_path)
    (note,) = (store_path / "absent").glob("*")
    note.unlink()
    note.mkdir()
    with Store.open(store_path, writable=True) as again:
        again.delete_session(URI)
        assert sleep(again, 20).version == 1


@contextlib.contextmanager
def stuck(monkeypatch: pytest.MonkeyPatch, which: str = "*.json", number: int = errno.EACCES) -> Iterator[None]:
    """The system refuses to remove notes of this name, be they there or not."""
    unlink = os.unlink

    def refuse(name: str, **where: int) -> None:
        if fnmatch.fnmatch(str(name), which):
            raise OSError(number, os.strerror(number))
        unlink(name, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        yield


def aside(store: Store, *, stands: bool) -> Path:
    """A session with a version that repair has set aside, and one that stands or none; the note of the first."""
    receipt = sleep(store, 300)
    spoil(store, receipt, 0)
    if stands:
        sleep(store, 40, seed=3)
    store.repair()
    return Path(store.path, "absent", f"{receipt.bundle_id.hex()}.json")


def require_gone(path: Path) -> None:
    """Of the session there is nothing to wake, to bring back or to give up; its numbers begin again."""
    with Store.open(path, writable=True) as store:
        assert (store.opening.unreadable, store.index.given_up(), store.versions(URI)) == ((), {}, [])
        assert sleep(store, 20).version == 1


def test_a_refusal_at_a_name_without_a_note_does_not_keep_the_others(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only system refuses before it looks for the name."""
    note = aside(store, stands=True)
    (standing,) = (row.bundle_id.hex() for row in store.versions(URI))
    with stuck(monkeypatch, f"{standing}.json", errno.EROFS):
        assert store.delete_session(URI).problems == ()
    assert not note.exists()
    assert store.index.has_file
    store.close()
    lose_index(store_path)
    require_gone(store_path)


@pytest.mark.parametrize("stands", [True, False])
def test_a_note_that_cannot_be_removed_is_told_by_a_delete_and_brings_nothing_back(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, stands: bool
) -> None:
    note = aside(store, stands=stands)
    with stuck(monkeypatch):
        (problem,) = store.delete_session(URI).problems
        assert (problem.path, problem.code) == (str(note), "store_io")
        assert "torpor forget" in problem.message
        assert (store.versions(URI), store.index.given_up()) == ([], {})
        store.close()
        for _ in range(2):  # the opening after the one that finished the delete must not forget it either
            with Store.open(store_path, writable=True) as again:
                assert (again.versions(URI), again.index.given_up()) == ([], {})
    assert note.exists()
    require_gone(store_path)
    assert notes_in(store_path) == {}


def test_a_note_that_could_not_be_removed_goes_once_it_can_while_the_store_is_open(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = aside(store, stands=True)
    with stuck(monkeypatch):
        store.delete_session(URI)
        assert store.index.file_is_behind
    assert note.exists()
    sleep(store, 20, uri=OTHER_URI)
    assert (note.exists(), store.index.has_file) == (False, True)
    store.close()
    lose_index(store_path)
    require_gone(store_path)


def test_a_rebuild_leaves_out_what_was_deleted_though_its_note_cannot_be_removed(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up(store, store_path)
    with stuck(monkeypatch):
        with Store.open(store_path, writable=True) as again:
            assert again.delete_session(URI).problems
            assert again.rebuild_index(dry_run=True).actions == ()
            assert [one.path for one in again.rebuild_index().problems] == [again.index.path]
            assert again.index.given_up() == {}
        with Store.open(store_path, writable=True) as again:
            assert again.index.given_up() == {}
    require_gone(store_path)
    assert notes_in(store_path) == {}


def test_what_a_delete_has_marked_in_quarantine_stays_so_until_its_note_is_gone(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an index nothing else tells the two apart: a version that was deleted, and one that was set aside."""
    aside(store, stands=False)
    with stuck(monkeypatch):
        store.delete_session(URI)
        store.close()
        for _ in range(2):
            lose_index(store_path)
            with Store.open(store_path, writable=True) as again:
                assert again.index.given_up() == {}
            assert [file.suffixes[0] for file in (store_path / "quarantine").iterdir()] == [".mvd"]
    lose_index(store_path)
    require_gone(store_path)
    assert [file.suffixes[0] for file in (store_path / "quarantine").iterdir()] == [".mvr"]


@pytest.mark.parametrize("how", ["delete", "empty"])
def test_beside_notes_that_are_open_to_others_it_is_told_what_may_stay_and_what_went_does_not_come_back(
    store: Store, store_path: Path, how: str
) -> None:
    note = aside(store, stands=True)
    note.parent.chmod(0o770)
    (problem,) = (store.delete_session(URI) if how == "delete" else store.empty_quarantine()).problems
    assert (problem.path, problem.code) == (str(note.parent), "unsafe_path")
    if how == "empty":
        note.parent.chmod(0o700)
        assert store.forget(URI).ok
    reopened(store).close()
    note.parent.chmod(0o700)
    require_gone(store_path)
    assert notes_in(store_path) == {}


def test_a_forget_removes_the_note_that_a_delete_could_not(store: Store, store_path: Path) -> None:
    given_up(store, store_path)
    folder = store_path / "absent"
    folder.chmod(0o770)
    with Store.open(store_path, writable=True) as again:
        assert not again.forget(URI).ok
        folder.chmod(0o700)
        assert notes_in(store_path)
        assert again.forget(URI, dry_run=True).ok
        assert again.forget(OTHER_URI).ok
        assert notes_in(store_path)
        assert again.forget(URI).ok
        assert notes_in(store_path) == {}


def test_a_forget_tells_a_damaged_note_of_which_it_cannot_say_whose_it_is(store: Store, store_path: Path) -> None:
    given_up(store, store_path)
    (name,) = notes_in(store_path)
    with Store.open(store_path, writable=True) as again:
        assert again.forget(OTHER_URI).ok
        again.delete_session(URI)
        sleep(again, 300)
        (store_path / "absent" / name).write_bytes(b"damaged")
        (store_path / "absent" / name).chmod(0o600)
        report = again.forget(URI)
        assert [(one.path, one.code) for one in report.problems] == [
            (str(store_path / "absent" / name), "cannot_be_told")
        ]


def test_notes_that_are_open_to_others_are_told_and_stop_no_opening_and_no_delete(
    store: Store, store_path: Path
) -> None:
    given_up(store, store_path)
    (store_path / "absent").chmod(0o770)
    with Store.open(store_path, writable=True) as again:
        assert [(one.path, one.code) for one in again.opening.unreadable] == [
            (str(store_path / "absent"), "unsafe_path")
        ]
        assert [row.version for row in again.index.given_up().values()] == [2]
        bundle_path(again, sleep(again, 40).bundle_id).unlink()
        with pytest.raises(UnsafePath):
            again.repair()
        again.delete_session(OTHER_URI)
        assert again.find_session(OTHER_URI) is None
        again.delete_session(URI)
        assert again.index.given_up() == {}


def test_an_emptying_beside_an_index_that_takes_no_change_says_that_it_may_not_last(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up(store, store_path)
    with Store.open(store_path, writable=True) as again:
        again.index.go_on_in_memory()
        with monkeypatch.context() as patch:
            patch.setattr(type(again.index), "return_to_file", no_room)
            assert [one.code for one in again.empty_quarantine().problems] == ["index_failed"]
        assert again.empty_quarantine().ok


def test_an_index_made_from_nothing_counts_for_each_day_what_its_files_took(store: Store, store_path: Path) -> None:
    for number in range(3):
        sleep(store, 300, seed=number)
    written = store.index.written()
    store.close()
    lose_index(store_path)
    with Store.open(store_path, writable=True) as again:
        assert again.index.written() == written


def test_an_index_put_back_from_before_a_repair_learns_what_was_given_up(store: Store, store_path: Path) -> None:
    second = sleep(store, 600, before=sleep(store, 300))
    store.close()
    older = {file.name: file.read_bytes() for file in store_path.glob("index.sqlite*")}
    bundle_path(store, second.bundle_id).unlink()
    with Store.open(store_path, writable=True) as again:
        again.repair()
        needs = again.index.refs_of(second.bundle_id)
        third = sleep(again, 40)
        bundle_path(again, third.bundle_id).unlink()
        again.repair()
    for name, data in older.items():
        (store_path / name).write_bytes(data)
    with Store.open(store_path, writable=True) as again:
        assert third.bundle_id in again.index.given_up()
        assert again.index.refs_of(second.bundle_id) == needs
        assert sleep(again, 20).version == 4
