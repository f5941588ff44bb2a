"""A store of format 1 becomes one of format 2: nothing is lost, no key is copied, and it may be cut off anywhere."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import errors
from torpor.memvid.disk.lock import StoreLock
from torpor.memvid.disk.paths import closing_fd, open_root
from torpor.memvid.disk.sealed_json import SealedFormat
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.retention import Retention
from torpor.memvid.folder.store_file import load_store_uuid, uuid_of_format_1
from torpor.memvid.index.index import Index
from torpor.memvid.recovery import carrying_over
from torpor.memvid.recovery.restoring import restore_store_file
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import format_1_stores as format_1
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.cut_off import copies_at_each_step
from torpor.tests.memvid.faults.shim import Call, Shim
from torpor.tests.memvid.format_1_stores import CASES, EXPECTED, LOST_URI, NEW_URI, SMALL, bundle_of, case, digest_of
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, PLANES_URI, URI, flip

TORN = next(one["bundle_id"] for one in EXPECTED if one["session"] == str(format_1.TORN_URI))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The fixture: a store of the last Torpor of format 1."""
    return format_1.private_copy(format_1.DATA / "format-1-whole" / "store", tmp_path / "store")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A store of format 1 with two versions of one session, and another session."""
    return case("small", tmp_path / "store")


def carry(path: Path, killing: int = 0) -> bool:
    """As an opening does, under the lock; the so-many-th change, and none after it, is made. Whether it came to its
    end."""
    with closing_fd(open_root(str(path), "store.json")) as fd, StoreLock(fd, str(path)):
        try:
            with killed_at(killing) if killing else nullcontext():
                if uuid_of_format_1(fd, str(path)) is not None:
                    carrying_over.carry_over(fd, str(path))
                carrying_over.finish(fd, str(path), load_store_uuid(fd, str(path)))
        except Killed:
            return False
        return True


def tree(path: Path) -> dict[str, bytes]:
    """Every file but the index, the lock and temporary ones, which an opening removes, and every folder."""
    return {
        str(item.relative_to(path)): item.read_bytes() if item.is_file() else b""
        for item in sorted(path.rglob("*"))
        if item.name not in ("index.sqlite", "lock") and item.suffix != ".tmp"
    }


def missing(path: Path) -> list[Any]:
    """What the index tells of versions."""
    with closing_fd(open_root(str(path), "store.json")) as fd:
        folder = StoreFolder(str(path), os.dup(fd), load_store_uuid(fd, str(path)))
        try:
            index, _ = Index.load(folder)
            with index:
                return index.all_rows()
        finally:
            folder.close()


def missing_in(place: Path) -> str:
    """The version of the fixture of which there is nothing but a note."""
    notes = {file.name[:64] for file in (place / "absent").iterdir()}
    (found,) = notes - {file.name[:64] for file in place.rglob("*.mvb*")}
    return found


def rows(store: Store) -> list[tuple[str, int, str]]:
    return sorted((str(row.uri), row.version, row.bundle_id) for row in store.index.all_rows())


def rows_in(place: Path) -> list[tuple[str, int, str]]:
    """The versions of a store of format 1, as `rows` gives them once it is carried over."""
    return [(*claim, path.stem) for claim, path in format_1.claims(place).items()]


# --- the fixture


def test_each_version_is_read_bit_for_bit_as_the_last_torpor_of_format_1_read_it(place: Path) -> None:
    keys = {str(file.relative_to(place)): file.read_bytes() for file in (place / "bundles").rglob("*.mv*")}
    with Store.open(place, writable=True) as store:
        listed = {(str(row.uri), row.version): row for row in store.index.all_rows()}
        for version in EXPECTED:
            if version["state"] is None:
                continue
            row = listed[version["session"], version["version"]]
            assert row.bundle_id == version["bundle_id"]
            with store.open_session(row.uri, row.version) as reader:
                assert digest_of(reader) == version["state"]
        with store.open_session(format_1.ROTTEN_URI) as reader, pytest.raises(errors.CorruptBlock):
            digest_of(reader)
    moved = next(name for name in tree(place) if name.startswith("bundles/be/"))
    assert {name: data for name, data in tree(place).items() if name in keys} == keys, "no key is written anew"
    assert moved.endswith(".mvb")


def test_what_was_lost_or_damaged_is_told_and_its_numbers_stay_taken(place: Path) -> None:
    with Store.open(place, writable=True) as store:
        told = {finding.code for finding in store.opening.unreadable}
        assert told == {"corrupt_bundle", "bundle_mismatch", "bundle_missing"}
        assert any(TORN in finding.path for finding in store.opening.unreadable)
        assert [row.version for row in store.versions(LOST_URI)] == [1, 2]
        with pytest.raises(errors.BundleMissing):
            store.open_session(LOST_URI, 1)
        with store.open_session(LOST_URI, 2) as reader:
            assert reader.whole_up_to() == 0
        assert store.repack().bytes_freed == 0
    with Store.open(place, writable=True) as store:
        assert {finding.code for finding in store.opening.unreadable} == {"bundle_mismatch", "bundle_missing"}


def test_marks_and_turns_come_along(place: Path) -> None:
    with Store.open(place, writable=True) as store:
        assert set(store.marks(URI).tags) == {"before-refactor"}
        assert store.marks(URI).pins == {store.versions(URI)[1].bundle_id}
        assert set(store.marks(LOST_URI).tags) == {"lost"}
        assert store.opening.turns_replayed == 2
        with store.open_session(URI) as reader:
            assert (reader.manifest.version, reader.manifest.unread_tokens) == (4, 5)
        with store.open_session(NEW_URI) as reader:
            assert reader.manifest.unread_tokens == 7


def test_a_damaged_manifest_that_is_put_right_makes_its_version_whole(place: Path) -> None:
    with Store.open(place, writable=True):
        pass
    flip(place / "versions" / f"{TORN}.mvm", 64 + 100)  # behind its header, where the fixture's maker flipped it
    with Store.open(place, writable=True) as store:
        assert all(TORN not in finding.path for finding in store.opening.unreadable)
        making.require_awake(store, 300, uri=format_1.TORN_URI, seed=5, **SMALL)


def test_an_older_torpor_refuses_it_and_a_reader_waits_for_it(place: Path) -> None:
    before = tree(place)
    with pytest.raises(errors.UnsupportedFormat, match="torpor ensure"):
        Store.open(place, writable=False)
    assert tree(place) == before
    with Store.open(place, writable=True):
        pass
    with pytest.raises(errors.UnsupportedFormat):  # as it reads the file, before it looks at anything else
        SealedFormat("torpor.store", 1, 4096, 64).decode((place / "store.json").read_bytes(), "store.json")
    with Store.open(place, writable=False) as store:
        assert len(store.versions(URI)) == 4
    assert not [name for name in tree(place) if name.startswith(("absent", "quarantine", "rewrites", "group"))]


def test_a_released_fixture_with_codecs_comes_over(tmp_path: Path) -> None:
    place = format_1.private_copy(format_1.DATA / "format-1", tmp_path / "store")
    listed = {version["bundle_id"]: version["state"] for version in format_1.RELEASED}
    with Store.open(place, writable=True) as store:
        assert store.opening.unreadable == ()
        for row in store.index.all_rows():
            with store.open_session(row.uri, row.version) as reader:
                assert digest_of(reader) == listed.pop(row.bundle_id)
    assert not listed


# --- cut off


class Killed(BaseException):
    """The process ends here."""


def killed_at(number: int) -> Shim:
    """The so-many-th change is not made, and none after it."""
    changes = itertools.count(1)

    def run(call: Call) -> Any:
        if call.changes_state and next(changes) >= number:
            raise Killed
        return call.run()

    return Shim(run)


def test_a_kill_at_each_step_and_another_run_give_the_same_store(place: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(place, tmp_path / "whole"))
    copies = copies_at_each_step(whole, tmp_path / "cut", lambda: carry(whole))
    wanted, rows_wanted = tree(whole), missing(whole)
    assert len(rows_wanted) == 1
    assert len(copies) > 30
    for cut in copies:
        carry(cut)
        assert (tree(cut), missing(cut)) == (wanted, rows_wanted), cut


def cut_before(path: Path, step: str, of: Any = carrying_over) -> None:
    """An opening to write that is killed at the first call of a function."""

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, step, die)
        with pytest.raises(Killed):
            Store.open(path, writable=True)


@pytest.mark.parametrize("number", [1, 8, 20, 35, 50, 0])
def test_an_older_torpor_may_use_a_store_that_was_cut_off(place: Path, number: int) -> None:
    """It finds each version's file, note and mark as it was. What it then does to the files is done here by hand. 0: it
    was cut off at the last moment before store.json."""
    (deleted,) = (version["bundle_id"] for version in EXPECTED if version["session"] == str(OTHER_URI))
    (slept,) = (version["bundle_id"] for version in format_1.RELEASED if version["session"] == str(PLANES_URI))
    before, note = tree(place), place / "absent" / f"{missing_in(place)}.json"
    if number:
        assert not carry(place, number)
    else:
        cut_before(place, "write_store_file")
    now = tree(place)
    assert {name for name in before if name.endswith(".mvb")} <= now.keys()
    for name, data in before.items():
        if name.startswith(("bundles/", "absent/", "store.json", "marks.json")):
            assert now[name] == data, name
    (place / "bundles" / deleted[:2] / f"{deleted}.mvb").unlink()
    put_in(place, CASES / "planes.mvb", slept)
    note.unlink()
    making.put(place / "index.sqlite-sums", b"an older Torpor's")
    with Store.open(place, writable=True) as store:
        assert store.find_session(OTHER_URI) is None, "what is deleted does not come back"
        assert [row.version for row in store.versions(LOST_URI)] == [2]
        with store.open_session(PLANES_URI) as reader:
            assert reader.bundle_id == slept
            assert making.contents(reader) == [list(making.PLANES_BYTES)]
    assert not (place / "index.sqlite-sums").exists()


def test_behind_store_json_there_is_no_way_back_and_the_next_opening_ends_it(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "whole")
    carry(tmp_path / "whole")
    old = {name: (place / name).read_bytes() for name in ("store.json", "marks.json")}
    cut_before(place, "finish")
    assert (place / "marks.json").read_bytes() == old["marks.json"]
    with Store.open(place, writable=False) as store:
        assert [row.version for row in store.versions(LOST_URI)] == [1, 2], "a reader is told what is missing"
    for how in ("as it is", "put back", "made again"):
        cut = tmp_path / how
        shutil.copytree(place, cut)
        if how == "put back":
            (cut / "store.json").write_bytes(old["store.json"])
        elif how == "made again":
            (cut / "store.json").unlink()
            restore_store_file(cut)
        carry(cut)
        (tmp_path / "whole" / "damaged").mkdir(exist_ok=True)
        (cut / "damaged").mkdir(exist_ok=True)
        assert tree(cut) == tree(tmp_path / "whole")
        assert missing(cut) == missing(tmp_path / "whole")
    with Store.open(place, writable=True) as store:
        assert set(store.marks(URI).tags) == {"before-refactor"}
    assert not (place / "absent").exists()


def test_marks_of_version_2_prove_that_store_json_is_on_the_disk(small: Path) -> None:
    """An opening may meet a name that a run which was cut off has not flushed."""
    cut_before(small, "finish")
    made: list[str] = []

    def note(call: Call) -> Any:
        made.extend([call.name] * call.changes_state)
        return call.run()

    with closing_fd(open_root(str(small), "store.json")) as fd, Shim(note):
        carrying_over.finish(fd, str(small), load_store_uuid(fd, str(small)))
    assert made[0] == "fsync"
    assert "rename" in made


def test_a_store_that_never_had_marks_has_some_before_it_has_a_manifest(tmp_path: Path) -> None:
    """They tell repair that the carrying over is not done, and under which uuid."""
    place = case("rival", tmp_path / "store")
    wanted, uuid = rows_in(place), json.loads((place / "store.json").read_text())["uuid"]
    cut_before(place, "_drop_deleted_turns", carrying_over._Carrying)
    assert list((place / "versions").glob("*.mvm"))
    (place / "store.json").unlink()
    restore_store_file(place)
    made = json.loads((place / "store.json").read_text())
    assert (made["uuid"], made["version"]) == (uuid, 1)
    with Store.open(place, writable=True) as store:
        assert rows(store) == wanted
        assert not store.marks(OTHER_URI).tags


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EIO])
def test_a_failed_call_leaves_a_store_that_the_next_opening_carries_over(
    small: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    calls = itertools.count(1)
    real = os.writev
    monkeypatch.setattr(
        os, "writev", lambda *args: real(*args) if next(calls) < 3 else (_ for _ in ()).throw(OSError(failure, "no"))
    )
    with pytest.raises((errors.NoSpace, errors.StoreIoError)):
        Store.open(small, writable=True)
    monkeypatch.undo()
    with Store.open(small, writable=True) as store:
        assert len(rows(store)) == 3
        assert store.opening.unreadable == ()


# --- what lies in the way


def test_two_bundles_that_were_swapped_are_both_versions(small: Path) -> None:
    wanted = rows_in(small)
    one, two = bundle_of(small, URI), bundle_of(small, OTHER_URI)
    one.rename(small / "aside")
    two.rename(one)
    (small / "aside").rename(two)
    with Store.open(small, writable=True) as store:
        assert rows(store) == wanted
        assert store.opening.unreadable == ()
        require_other(store)


def test_a_bundle_with_another_one_in_its_place_is_a_damaged_version(small: Path) -> None:
    one, two = bundle_of(small, URI), bundle_of(small, OTHER_URI)
    shutil.copy(two, one)
    with Store.open(small, writable=True) as store:
        assert {finding.code for finding in store.opening.unreadable} == {"bundle_mismatch", "truncated"}
        assert store.repack().bytes_freed == 0
        require_other(store)


def put_in(place: Path, file: Path, bundle_id: str) -> None:
    """Copy a bundle's file to its place in a store of format 1."""
    folder = place / "bundles" / bundle_id[:2]
    folder.mkdir(mode=0o700, exist_ok=True)
    making.put(folder / f"{bundle_id}.mvb", file.read_bytes())


def rival(path: Path) -> Path:
    """Another store, in which the other session's first version has other tokens, and is younger: its file."""
    return bundle_of(case("rival", path), OTHER_URI)


def require_other(store: Store) -> None:
    """The other session of the small store is whole."""
    making.require_awake(store, 300, uri=OTHER_URI, seed=2, **SMALL)


def require_rivals(place: Path, file: Path) -> None:
    """The other session has two versions with one number. Both stay whole, and the younger one is woken by name."""
    with Store.open(place, writable=True) as store:
        older, younger = store.versions(OTHER_URI)
        assert (older.version, younger.version, younger.bundle_id) == (1, 1, file.stem)
        assert store.opening.unreadable == ()
        store.repack()
        assert [finding.code for finding in store.verify(deep=True).findings] == ["ambiguous_version"]
        assert store.find_session(OTHER_URI) == younger
        with store.open_bundle(older.bundle_id) as reader:
            assert reader.tokens() == making.token_ids(0, 300, 2)
            assert making.contents(reader) == making.expected(300, seed=2, **SMALL)


def quarantined(small: Path, file: Path, ending: str = ".mvb") -> Path:
    target = small / "quarantine" / f"{file.stem}{ending}.1"
    target.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.move(file, target)
    return target


@pytest.mark.parametrize("is_in_quarantine", [False, True])
def test_two_bundles_for_one_version_are_two_versions_and_neither_loses_its_blocks(
    small: Path, tmp_path: Path, is_in_quarantine: bool
) -> None:
    file = rival(tmp_path / "later")
    if is_in_quarantine:
        quarantined(small, file)
    else:
        put_in(small, file, file.stem)
    require_rivals(small, file)


@pytest.mark.parametrize(("ending", "versions"), [(".mvb", [1, 2]), (".mvr", [2]), (".mvd", [2])])
def test_blocks_in_quarantine_come_in_and_a_version_with_them_if_it_was_one(
    small: Path, ending: str, versions: list[int]
) -> None:
    wanted = [(*each,) for each in rows_in(small) if each[0] != str(URI) or each[1] in versions]
    quarantined(small, bundle_of(small, URI), ending)
    with Store.open(small, writable=True) as store:
        assert rows(store) == wanted
        making.require_awake(store, 600, **SMALL)


def test_a_damaged_live_file_gives_way_to_a_right_one_in_quarantine(small: Path) -> None:
    file = bundle_of(small, OTHER_URI)
    good = format_1.damage_manifest(file)
    making.put(small / "quarantine" / f"{file.name}.3", good)
    with Store.open(small, writable=True) as store:
        require_other(store)
        assert [finding.path for finding in store.opening.unreadable] == [str(file)]
    assert file.read_bytes() == good
    assert (small / "damaged" / file.name).is_file()
    with Store.open(small, writable=True) as store:
        assert store.opening.unreadable == ()


@pytest.mark.parametrize("live", ["sound", "damaged", "swapped"])
def test_a_second_copy_in_quarantine_is_kept_and_costs_no_version(small: Path, live: str) -> None:
    """A repair, at the latest, makes all of it whole."""
    wanted, one, two = rows_in(small), bundle_of(small, OTHER_URI), bundle_of(small, URI)
    for number in (1, 2):
        making.put(small / "quarantine" / f"{one.name}.{number}", one.read_bytes())
    format_1.damage_manifest(small / "quarantine" / f"{one.name}.2")
    if live == "damaged":
        format_1.damage_manifest(one)
    elif live == "swapped":
        making.put(one, two.read_bytes())
        two.unlink()
    with Store.open(small, writable=True) as store:
        if live != "swapped":
            assert rows(store) == wanted
        store.repair()
        assert rows(store) == wanted
        require_other(store)
        making.require_awake(store, 600, **SMALL)


def test_a_damaged_version_in_quarantine_is_damaged_and_keeps_its_turns(place: Path) -> None:
    for version in EXPECTED:
        if version["session"] == str(URI):
            bundle = place / "bundles" / version["bundle_id"][:2] / f"{version['bundle_id']}.mvb"
            format_1.damage_manifest(bundle)
            quarantined(place, bundle)
    with Store.open(place, writable=True) as store:
        assert store.has_turns(URI)
        assert store.repack().bytes_freed == 0


def test_what_is_no_bundle_in_quarantine_is_a_damaged_version(small: Path) -> None:
    """Its name is all that there is of one."""
    making.put(small / "quarantine" / f"{64 * 'a'}.mvb.1", b"nothing")
    making.put(small / "quarantine" / "marks.json.1", b"{}")
    (small / "quarantine" / "mine").mkdir()
    with Store.open(small, writable=True) as store:
        assert {finding.code for finding in store.opening.unreadable} == {"truncated"}
        assert len(rows(store)) == 3
        assert store.repack().bytes_freed == 0
    assert (small / "bundles" / "aa" / f"{64 * 'a'}.mvb").read_bytes() == b"nothing"
    assert {file.name for file in (small / "damaged").iterdir()} == {"marks.json.1"}
    assert (small / "quarantine" / "mine").is_dir(), "what is somebody's own stays"


@pytest.mark.parametrize("way", ["put back", "repaired"])
def test_damaged_marks_stay_damaged_until_they_are_put_back_or_repaired(small: Path, way: str) -> None:
    """They never count as empty: a prune might drop versions that were pinned."""
    good = (small / "marks.json").read_bytes()
    flip(small / "marks.json", 40)
    bad = (small / "marks.json").read_bytes()
    for _ in range(2):
        with Store.open(small, writable=True) as store:
            with pytest.raises(errors.CorruptMarks):
                store.marks(URI)
            with pytest.raises(errors.CorruptMarks):
                store.prune(Retention(keep_last=1))
            assert "corrupt_marks" in {finding.code for finding in store.verify(deep=False).findings}
    assert (small / "marks.json").read_bytes() == bad
    if way == "put back":
        (small / "marks.json").write_bytes(good)
    with Store.open(small, writable=True) as store:
        if way == "repaired":
            store.repair()
            assert [file.read_bytes() for file in (small / "damaged").iterdir()] == [bad]
        assert bool(store.marks(URI).tags) == (way == "put back")
        assert store.verify(deep=False).findings == ()


def test_marks_that_are_lost_stay_lost_and_none_are_none(small: Path, tmp_path: Path) -> None:
    (small / "marks.json").unlink()
    with Store.open(small, writable=True) as store, pytest.raises(errors.MarksLost):
        store.marks(URI)
    with Store.open(case("rival", tmp_path / "unmarked"), writable=True) as store:
        assert not store.marks(URI).tags


def test_the_sessions_of_a_group_that_was_not_finished_stay(small: Path) -> None:
    making.put(small / "group.json", (CASES / "group.json").read_bytes())
    with Store.open(small, writable=True) as store:
        assert store.find_session(OTHER_URI) is not None
    assert not (small / "group.json").exists()


def test_turns_of_a_session_whose_delete_was_cut_off_go_with_it(place: Path) -> None:
    """The fixture has turns of two sessions; the delete had retired the three versions of one of them."""
    for version in EXPECTED:
        if version["session"] == str(URI):
            file = place / "bundles" / version["bundle_id"][:2] / f"{version['bundle_id']}.mvb"
            file.rename(file.with_suffix(".mvr"))
    with Store.open(place, writable=True) as store:
        assert store.find_session(URI) is None
        assert not store.has_turns(URI)
        assert (store.opening.turns_replayed, store.opening.journal) == (1, ())
        with store.open_session(NEW_URI) as reader:
            assert reader.manifest.unread_tokens == 7


def test_a_file_that_a_delete_has_emptied_goes(small: Path) -> None:
    file = bundle_of(small, OTHER_URI)
    file.unlink()
    making.put(file.with_suffix(".mvr"), b"")
    with Store.open(small, writable=True) as store:
        assert store.opening.unreadable == ()
    assert not file.with_suffix(".mvr").exists()


def test_a_damaged_header_costs_frames_and_not_the_version(small: Path) -> None:
    file = bundle_of(small, OTHER_URI)
    flip(file, 10)
    with Store.open(small, writable=True) as store:
        assert [finding.code for finding in store.opening.unreadable] == ["corrupt_bundle"]
        with store.open_session(OTHER_URI) as reader:
            assert reader.whole_up_to() == 0


def test_a_bundle_that_cannot_be_opened_now_ends_the_opening_and_nothing_is_given_up(small: Path) -> None:
    wanted, file = rows_in(small), bundle_of(small, OTHER_URI)
    os.link(file, small.parent / "second name")
    with pytest.raises(errors.UnsafePath):
        Store.open(small, writable=True)
    (small.parent / "second name").unlink()
    with Store.open(small, writable=True) as store:
        assert rows(store) == wanted


@pytest.mark.parametrize(("failure", "ends"), [(errno.EACCES, True), (errno.EIO, False)])
def test_a_bundle_that_the_system_does_not_read_is_damaged_only_if_its_disk_says_so(
    small: Path, failure: int, ends: bool
) -> None:
    wanted = rows_in(small)
    with making.unread(bundle_of(small, OTHER_URI), "pread", failure):
        if ends:
            with pytest.raises(errors.StoreIoError):
                Store.open(small, writable=True)
        else:
            with Store.open(small, writable=True) as store:
                assert rows(store) != wanted
                assert store.opening.unreadable
    if ends:
        with Store.open(small, writable=True) as store:
            assert rows(store) == wanted


def test_notes_stay_until_the_index_tells_what_they_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Index, "save", lambda *_, **__: None)
    with pytest.raises(errors.StoreIoError):
        carry(place)
    monkeypatch.undo()
    assert (place / "absent" / f"{missing_in(place)}.json").exists()
    carry(place)
    assert [row.version for row in missing(place)] == [1]


def test_a_damaged_note_is_told_and_kept_and_no_pack_goes_that_its_version_may_need(place: Path) -> None:
    note = place / "absent" / f"{missing_in(place)}.json"
    flip(note, 40)
    bad = note.read_bytes()
    for number in range(2):
        with Store.open(place, writable=True) as store:
            told = {finding.path for finding in store.opening.unreadable}
            assert str(place / "versions" / f"{note.stem}.mvm") in told
            assert (str(note) in told) == (number == 0)
            assert [row.version for row in store.versions(LOST_URI)] == [2]
            if number:
                store.delete_session(OTHER_URI)
            assert store.repack().bytes_freed == 0
    assert not (place / "absent").exists()
    assert (place / "damaged" / note.name).read_bytes() == bad


def test_a_note_that_is_not_read_now_ends_the_opening_and_is_not_given_up(place: Path) -> None:
    note = place / "absent" / f"{missing_in(place)}.json"
    with making.unread(note, "read", errno.EIO), pytest.raises(errors.StoreIoError):
        Store.open(place, writable=True)
    with Store.open(place, writable=True) as store:
        assert [row.version for row in store.versions(LOST_URI)] == [1, 2]


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_a_store_without_its_store_file_is_made_one_of_format_1_again(small: Path, what: str) -> None:
    good = (small / "store.json").read_bytes()
    if what == "damaged":
        flip(small / "store.json", 40)
    else:
        (small / "store.json").unlink()
    with pytest.raises((errors.CorruptStoreFile, errors.NotAStore), match="torpor repair"):
        Store.open(small, writable=True)
    restore_store_file(small)
    assert (small / "store.json").read_bytes() == good
    with Store.open(small, writable=True) as store:
        assert len(rows(store)) == 3


# --- what a carried-over store can do


def test_a_carried_over_store_forgets_sleeps_and_repacks_until_the_old_folder_is_empty(small: Path) -> None:
    secret = making.token_ids(0, 256, 2)
    with Store.open(small, writable=True) as store:
        assert any(secret in file.read_bytes() for file in small.rglob("*.mvb"))
        assert store.forget(OTHER_URI).problems == ()
        assert not any(secret in file.read_bytes() for file in small.rglob("*") if file.is_file())
        making.require_awake(store, 300, version=1, **SMALL)
        assert store.verify(deep=True).findings == ()
        store.delete_session(URI)
        store.repack()
    assert not [name for name in tree(small) if name.endswith((".mvb", ".mvr", ".mvp", ".mvm"))]
    assert not (small / "bundles").exists()


def test_the_fixture_verifies_with_what_is_damaged_in_it_and_forgets(place: Path) -> None:
    with Store.open(place, writable=True) as store:
        found = {finding.code for finding in store.verify(deep=True).findings}
        assert {"bundle_mismatch", "corrupt_block"} <= found
        store.delete_session(LOST_URI)
        before = {version["session"]: version for version in EXPECTED if version["state"] is not None}
        store.forget(FORK_URI)
        for name, version in before.items():
            if name != str(FORK_URI):
                with store.open_session(SessionUri.parse(name), version["version"]) as reader:
                    assert digest_of(reader) == version["state"]


@pytest.mark.parametrize(
    ("older", "repacks"), [("store.json", False), ("store.json", True), ("marks.json", False), ("marks.json", True)]
)
def test_an_older_small_file_that_is_put_back_takes_no_version(place: Path, older: str, repacks: bool) -> None:
    """What `bundles/` has tells only once which versions there are. The marks: beside a store.json that is missing."""
    old = (place / older).read_bytes()
    with Store.open(place, writable=True) as store:
        if repacks:
            store.repack()
        making.sleep(store, 600, uri=NEW_URI)
        store.delete_session(FORK_URI)
    wanted = set(os.listdir(place / "versions"))
    (place / older).write_bytes(old)
    if older == "marks.json":
        (place / "store.json").unlink()
        restore_store_file(place)
    (place / "index.sqlite").unlink()
    with Store.open(place, writable=True) as store:
        assert set(os.listdir(place / "versions")) == wanted
        making.require_awake(store, 600, uri=NEW_URI)


def test_an_older_store_json_brings_nothing_back_that_was_deleted(small: Path) -> None:
    """Also where no pack tells that the store is of format 2."""
    old = (small / "store.json").read_bytes()
    with Store.open(small, writable=True) as store:
        store.delete_version(URI, 1)
        wanted = rows(store)
    assert not list((small / "packs").iterdir())
    (small / "store.json").write_bytes(old)
    with Store.open(small, writable=True) as store:
        assert rows(store) == wanted


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_a_bundle_that_is_put_back_makes_its_version_whole_without_a_command(small: Path, what: str) -> None:
    bundle = bundle_of(small, OTHER_URI)
    good = bundle.read_bytes()
    if what == "damaged":
        format_1.damage_manifest(bundle)
    with Store.open(small, writable=True):
        pass
    if what == "missing":
        (small / "versions" / f"{bundle.stem}.mvm").unlink()
        bundle.unlink()
    with Store.open(small, writable=True) as store:
        assert [finding.path for finding in store.opening.unreadable] == [
            str(small / "versions" / f"{bundle.stem}.mvm")
        ]
    making.put(bundle, good)
    with Store.open(small, writable=True) as store:
        assert store.opening.unreadable == ()
        require_other(store)


def test_a_bundle_of_a_deleted_version_that_is_put_back_is_a_pack_alone(small: Path) -> None:
    bundle = bundle_of(small, OTHER_URI)
    good = bundle.read_bytes()
    with Store.open(small, writable=True) as store:
        store.delete_session(OTHER_URI)
    making.put(bundle, good)
    with Store.open(small, writable=True) as store:
        assert store.opening.unreadable == ()
        assert store.find_session(OTHER_URI) is None
