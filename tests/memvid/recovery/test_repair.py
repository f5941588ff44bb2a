"""Repair: what is sound in damaged packs is copied, damaged files move away, sources give back, nothing is given up."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid import errors
from torpor.memvid.answers import MaintenanceReport
from torpor.memvid.disk import durable
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.marks import Marks
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.format.records import Receipt
from torpor.memvid.recovery import mending, repair
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing import deletion
from torpor.memvid.writing.core import StoreCore
from torpor.memvid.writing.removal import remove_unneeded
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.cut_off import stores_cut_off
from torpor.tests.memvid.format_1_stores import CASES, SMALL, bundle_of
from torpor.tests.memvid.store_making import OTHER_URI, URI, flip, manifest_path, names, pack_of, require_awake, sleep


def kinds(report: MaintenanceReport) -> list[str]:
    return [action.kind for action in report.actions]


def problems(report: MaintenanceReport) -> list[str]:
    return [finding.code for finding in report.problems]


def damaged(store: Store) -> list[str]:
    folder = Path(store.path, "damaged")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@contextlib.contextmanager
def moved_away(path: Path) -> Iterator[None]:
    good = path.read_bytes()
    path.unlink()
    yield
    making.put(path, good)


@pytest.fixture
def backup(store: Store, tmp_path: Path) -> Path:
    """The folder that a test fills with a copy of the store (`shutil.copytree`)."""
    return tmp_path / "backup"


def test_a_sound_store_is_left_as_it_is(store: Store) -> None:
    sleep(store, 700)
    before = names(store.path)
    for dry_run in (True, False):
        report = store.repair(dry_run=dry_run)
        assert (report.operation, report.actions, report.problems) == ("repair", (), ())
    assert (names(store.path), damaged(store)) == (before, [])


# --- packs


@pytest.mark.parametrize("at", [0, 40, -1, -110, -150])
def test_a_pack_with_a_damaged_frame_of_reference_is_mended_whole(store: Store, at: int) -> None:
    pack = pack_of(store, sleep(store, 700))
    flip(pack, at)
    report = store.repair()
    assert (problems(report), kinds(report)[:1]) == ([], ["copy"])
    require_awake(store, 700)
    assert store.verify(deep=True).ok
    with making.reopened(store, anew=True) as again:
        require_awake(again, 700)
        assert again.repair().actions == ()


def test_sound_frames_of_a_damaged_pack_are_copied_and_the_version_is_told_as_whole_up_to_the_damage(
    store: Store,
) -> None:
    receipt = sleep(store, 700)
    pack = pack_of(store, receipt)
    making.spoil(store, receipt, 1)
    report = store.repair()
    assert (kinds(report), problems(report)) == (["copy", "move"], ["block_missing"])
    assert f"torpor wake {URI}@1 --at 256" in report.problems[0].message
    assert (damaged(store), pack.exists()) == ([pack.name], False)
    assert [finding.code for finding in store.verify(deep=True).findings] == ["block_missing"]
    with store.open_session(URI) as reader:
        assert len(reader.tokens()) == 2800, "the header of the damaged block is kept: it has the tokens"
        with pytest.raises(errors.BlockMissing) as caught:
            reader.read_slot(receipt.entries[1], 0)
        assert caught.value.details["whole_up_to"] == 256
    again = store.repair()
    assert (again.actions, problems(again)) == ((), ["block_missing"])
    sleep(store, 700, uri=OTHER_URI)  # the block comes back: all is whole
    require_awake(store, 700)
    assert store.repair().problems == ()


def test_frames_that_are_sound_elsewhere_are_not_copied(store: Store) -> None:
    receipt = sleep(store, 700)
    pack = pack_of(store, receipt)
    making.copy_pack(store, pack)
    flip(pack, -1)
    report = store.repair()
    assert (kinds(report), problems(report), report.bytes_written) == (["move"], [], 0)
    require_awake(store, 700)


def test_a_frame_whose_other_copy_is_damaged_is_copied(store: Store) -> None:
    receipt = sleep(store, 700)
    pack = pack_of(store, receipt)
    first, second = sorted([pack, making.copy_pack(store, pack)])
    flip(first, -1)
    making.spoil_frame(second, making.frame_in(second, receipt.entries[1].id))
    assert store.repair().problems == ()
    require_awake(store, 700)
    assert store.verify(deep=True).ok


def test_what_was_read_in_a_file_says_nothing_of_another_one_that_takes_its_place(store: Store) -> None:
    receipt = sleep(store, 600)
    pack = pack_of(store, receipt)
    other = making.copy_pack(store, pack)
    flip(pack, -1)
    with making.meanwhile(mending.Mending, "_written", lambda: making.swap_spoilt(store, other, receipt.entries[0].id)):
        assert kinds(store.repair()) == ["copy", "move"]
    require_awake(store, 600)


def test_frames_that_nothing_needs_are_not_copied(store: Store) -> None:
    sleep(store, 700)
    pack = pack_of(store, sleep(store, 300, uri=OTHER_URI, seed=9))
    with mock.patch.object(deletion, "remove_unneeded", remove_nothing):
        store.delete_session(OTHER_URI)
    assert pack.exists()
    flip(pack, -1)
    assert (kinds(store.repair()), damaged(store)) == (["move"], [pack.name])
    assert store.verify(deep=True).ok


def remove_nothing(core: StoreCore, names: object, *, dry_run: bool = False) -> object:
    return remove_unneeded(core, [])


def test_while_needs_are_unknown_every_sound_frame_is_kept(store: Store) -> None:
    receipt = sleep(store, 700)
    manifest, pack = manifest_path(store, receipt.bundle_id), pack_of(store, receipt)
    flip(pack, -1)
    good = flip(manifest, 80)
    report = store.repair()
    assert problems(report) == ["bundle_mismatch"]
    making.put(manifest, good)
    require_awake(store, 700)
    assert store.verify(deep=True).ok


def test_two_damaged_packs_give_one_whole_version(store: Store) -> None:
    receipt = sleep(store, 700)
    first = pack_of(store, receipt)
    good = first.read_bytes()
    making.spoil(store, receipt, 0)
    sleep(store, 700, uri=OTHER_URI)
    making.put(first, good)
    second = next(pack for pack in making.packs_of(store, receipt) if pack != first)
    frame = making.frame_in(first, receipt.entries[1].id)
    flip(second, -1)
    flip(first, -1)
    assert problems(store.repair()) == []
    require_awake(store, 700)
    assert frame.id in {entry.id for entry in receipt.entries}
    assert len(damaged(store)) <= 2


def test_a_dry_run_changes_nothing_and_plans_the_same(store: Store, store_path: Path) -> None:
    receipt = sleep(store, 700)
    making.spoil(store, receipt, 1)
    flip(pack_of(store, sleep(store, 300, uri=OTHER_URI, seed=4)), -1)
    before = making.tree(store_path)
    with Store.open(store_path, writable=False) as reader:
        plan = reader.repair(dry_run=True)
    assert making.tree(store_path) == before
    done = store.repair()
    assert (kinds(plan), problems(plan)) == (kinds(done), problems(done))


def test_a_pack_that_the_system_refuses_to_read_stays(store: Store) -> None:
    pack = pack_of(store, sleep(store))
    store._core.files.close()
    with making.unread(pack, "preadv", errno.EACCES):
        report = store.repair()
    assert (report.actions, problems(report)) == ((), ["store_io", "block_missing"])
    assert pack.exists()


def test_a_pack_of_a_later_version_stays(store: Store) -> None:
    receipt = sleep(store)
    pack = pack_of(store, receipt)
    with mock.patch("torpor.memvid.format.sealing.FORMAT_VERSION", 3):
        report = store.repair()
    assert (report.actions, set(problems(report))) == ((), {"unsupported_format"})
    assert pack.exists()
    require_awake(store, 300)


def test_a_block_whose_other_copy_goes_meanwhile_is_copied_after_all(store: Store) -> None:
    first = pack_of(store, sleep(store, 700))
    second = making.copy_pack(store, first)
    flip(first, -1)
    with making.meanwhile(mending.Mending, "_is_covered", second.unlink):
        report = store.repair()
    assert kinds(report) == ["copy"]
    require_awake(store, 700)


# --- names that were mixed up, blocks in pieces


MIXED = [(SessionUri("mixed", f"s{number}"), number) for number in range(3)]


def mixed_up(store: Store, kind: str, count: int = 3) -> None:
    receipts = [sleep(store, 300, uri=uri, seed=seed) for uri, seed in MIXED]
    if kind == "packs":
        making.rotate([pack_of(store, receipt) for receipt in receipts[:count]])
    else:
        making.rotate([manifest_path(store, receipt.bundle_id) for receipt in receipts[:count]])


def require_mixed(store: Store) -> None:
    for uri, seed in MIXED:
        require_awake(store, 300, uri=uri, seed=seed)
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", ["packs", "manifests"])
def test_files_under_each_others_names_are_healed(store: Store, kind: str, count: int) -> None:
    mixed_up(store, kind, count)
    with making.reopened(store, anew=True) as again:
        assert problems(again.repair()) == []
        require_mixed(again)
        assert again.repair().actions == ()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", ["packs", "manifests"])
def test_their_repair_may_be_cut_off_anywhere(store: Store, tmp_path: Path, kind: str) -> None:
    mixed_up(store, kind)
    for again in stores_cut_off(store, tmp_path / "cut", store.repair):
        assert problems(again.repair()) == []
        require_mixed(again)


def test_a_manifest_from_a_source_takes_no_other_ones_place(store: Store, backup: Path) -> None:
    first, second = sleep(store), sleep(store, uri=OTHER_URI, seed=2)
    shutil.copytree(store.path, backup)
    names_of_backup = [backup / "versions" / manifest_path(store, each.bundle_id).name for each in (first, second)]
    names_of_backup[1].unlink()
    making.rotate([manifest_path(store, each.bundle_id) for each in (first, second)])
    assert problems(store.repair(sources=[backup])) == []
    require_awake(store, 300)
    require_awake(store, 300, uri=OTHER_URI, seed=2)


def test_a_manifest_is_found_by_its_digest_whatever_its_name(store: Store, backup: Path) -> None:
    path = manifest_path(store, sleep(store).bundle_id)
    backup.mkdir()
    shutil.move(path, backup / f"{'ab' * 32}.mvm")
    assert problems(store.repair(sources=[backup])) == []
    require_awake(store, 300)


def test_a_block_in_pieces_is_put_together_before_its_packs_move(store: Store) -> None:
    receipt = sleep(store, 700)
    making.in_pieces(store, receipt)
    require_awake(store, 700)
    with mock.patch.object(durable.TempFile, "append", making.refusing(errors.NoSpace("full"))):
        with pytest.raises(errors.NoSpace):
            store.repair()
        require_awake(store, 700)
    plan, report = store.repair(dry_run=True), store.repair()
    assert "put together from 2 files" in plan.actions[0].reason == report.actions[0].reason
    assert problems(plan) == problems(report) == []
    require_awake(store, 700)
    assert store.verify(deep=True).ok
    assert store.repair().actions == ()


def test_pieces_in_packs_without_a_directory_and_in_sources_are_put_together(store: Store, backup: Path) -> None:
    receipt = sleep(store, 700)
    other = making.in_pieces(store, receipt)
    flip(other, -1)
    shutil.copytree(store.path, backup)
    assert problems(store.repair()) == []
    require_awake(store, 700)
    with Store.open(backup, writable=True) as lacking:
        pieces = backup.parent / "pieces"
        pieces.mkdir()
        shutil.move(backup / "packs" / other.name, pieces)
        assert problems(lacking.repair()) == ["block_missing"]
        assert problems(lacking.repair(sources=[pieces])) == []
        require_awake(lacking, 700)


# --- manifests and sources


def test_a_damaged_manifest_stays_until_a_source_has_it_and_no_pack_goes_meanwhile(store: Store, backup: Path) -> None:
    receipt = sleep(store, 700)
    shutil.copytree(store.path, backup)
    path = manifest_path(store, receipt.bundle_id)
    flip(path, 100)
    report = store.repair()
    assert (report.actions, problems(report)) == ((), ["bundle_mismatch"])
    with making.reopened(store, anew=True) as again:
        sleep(again, uri=OTHER_URI, seed=3)
        again.delete_session(OTHER_URI)
        assert problems(again.repair()) == ["bundle_mismatch"]
        report = again.repair(sources=[backup])
        assert (kinds(report), problems(report)) == (["copy"], [])
        require_awake(again, 700)


def test_a_missing_manifest_comes_back_from_a_source(store: Store, backup: Path) -> None:
    receipt = sleep(store, 700)
    other = sleep(store, 300, uri=OTHER_URI, seed=3)
    shutil.copytree(store.path, backup)
    store.delete_session(OTHER_URI)
    manifest_path(store, receipt.bundle_id).unlink()
    assert problems(store.repair()) == ["bundle_missing"]
    plan = store.repair(dry_run=True, sources=[backup])
    report = store.repair(sources=[backup / "versions"])
    assert (kinds(plan), problems(plan)) == (kinds(report), problems(report)) == (["copy"], [])
    require_awake(store, 700)
    assert store.find_session(OTHER_URI) is None, "what was deleted does not come back"
    assert not manifest_path(store, other.bundle_id).exists()


def test_a_version_that_was_deleted_and_has_its_tag_still_does_not_come_back(store: Store, backup: Path) -> None:
    sleep(store)
    store.tag(URI, 1, "good")
    shutil.copytree(store.path, backup)
    with mock.patch.object(Marks, "save", making.refusing(errors.NoSpace("The disk is full."))):
        store.delete_session(URI)
    assert kinds(store.repair(sources=[backup])) == []
    assert store.find_session(URI) is None


@pytest.mark.parametrize(
    ("owner", "name"),
    [(repair, "_write_pack"), (StoreFolder, "new_temp"), (PackWriter, "finish")],
    ids=["planned", "begun", "written"],
)
@pytest.mark.parametrize("how", ["missing", "in pieces", "damaged", "a stripped fork is missing, too"])
def test_a_session_that_is_forgotten_meanwhile_does_not_come_back(
    store: Store, backup: Path, owner: object, name: str, how: str
) -> None:
    receipt = sleep(store, 300)
    sleep(store, 300, uri=OTHER_URI, seed=1)
    if "fork" in how:
        sleep(store, 300, uri=making.FORK_URI)
        store.strip(making.FORK_URI)
    shutil.copytree(store.path, backup)
    if how == "in pieces":
        making.in_pieces(store, receipt)
    elif how == "damaged":
        flip(pack_of(store, receipt), -1)
    else:
        pack_of(store, receipt).unlink()
    if how == "damaged" and name == "_write_pack":
        owner, name = mending.Mending, "_written"
    with making.meanwhile(owner, name, lambda: store.forget(URI)):
        store.repair(sources=[backup])
    keys = making.expected(300)[0][0]
    assert [file for file in Path(store.path, "packs").iterdir() if keys in file.read_bytes()] == []
    if "fork" in how:
        assert making.ledger(store, making.FORK_URI) == making.token_ids(0, 300)
    require_awake(store, 300, uri=OTHER_URI, seed=1)


@pytest.mark.parametrize("whole_directory", [True, False])
def test_missing_blocks_come_back_from_a_backup_also_a_damaged_one(
    store: Store, backup: Path, whole_directory: bool
) -> None:
    receipt = sleep(store, 700)
    shutil.copytree(store.path, backup)
    pack = pack_of(store, receipt)
    pack.unlink()
    copy = backup / "packs" / pack.name
    frame = making.frame_in(copy, receipt.entries[1].id)
    good = flip(copy, frame.offset + frame.head_bytes)
    if not whole_directory:
        flip(copy, -1)
    report = store.repair(sources=[backup])
    assert (kinds(report), problems(report)) == (["copy", "copy"], ["block_missing"])
    assert store.repair(sources=[backup]).actions == (), "it has the header of the damaged block already"
    with store.open_session(URI) as reader:
        assert len(reader.tokens()) == 2800
    making.put(copy, good)
    report = store.repair(sources=[backup])
    assert (kinds(report), problems(report)) == (["copy"], [])
    require_awake(store, 700)
    assert store.repair(sources=[backup]).actions == ()


def test_the_folder_of_damaged_files_is_a_source_without_being_named(store: Store) -> None:
    receipt = sleep(store, 700)
    pack = pack_of(store, receipt)
    Path(store.path, "damaged").mkdir(mode=0o700)
    shutil.move(pack, Path(store.path, "damaged", f"{pack.name}.2"))
    manifest = manifest_path(store, receipt.bundle_id)
    shutil.move(manifest, Path(store.path, "damaged", manifest.name))
    assert problems(store.repair()) == []
    require_awake(store, 700)


def test_a_bundle_of_format_1_is_a_source(store: Store, tmp_path: Path) -> None:
    receipt = sleep(store, 600, **SMALL)
    source = tmp_path / "old"
    source.mkdir()
    shutil.copy(bundle_of(CASES / "chain", URI), source)
    pack_of(store, receipt).unlink()
    with moved_away(manifest_path(store, sleep(store, uri=OTHER_URI, seed=3).bundle_id)):
        plan = store.repair(dry_run=True, sources=[source])
        assert [action.session for action in plan.actions] == [None], "its manifest is not wanted"
    assert problems(store.repair(sources=[source])) == []
    require_awake(store, 600, **SMALL)


@pytest.mark.parametrize("ending", [".mvb", ".mvp"])
def test_an_exported_file_is_a_source_for_its_manifest_too_whatever_its_ending(
    store: Store, tmp_path: Path, ending: str
) -> None:
    receipt = sleep(store, 700)
    source = tmp_path / "exports"
    source.mkdir()
    store.export_session(URI, None, source / f"notes{ending}")
    manifest_path(store, receipt.bundle_id).unlink()
    pack_of(store, receipt).unlink()
    report = store.repair(sources=[source])
    assert (kinds(report), problems(report)) == (["copy", "copy"], [])
    require_awake(store, 700)


def test_sources_are_believed_in_nothing(store: Store, tmp_path: Path) -> None:
    receipt = sleep(store, 700)
    manifest, pack = manifest_path(store, receipt.bundle_id), pack_of(store, receipt)
    evil = tmp_path / "evil"
    evil.mkdir()
    other = sleep(store, 300, uri=OTHER_URI, seed=3)
    shutil.copy(manifest_path(store, other.bundle_id), evil / manifest.name)
    shutil.copy(pack_of(store, other), evil / pack.name)
    making.put(evil / "junk.mvp", b"junk" * 1000)
    making.put(evil / "empty.mvm", b"")
    manifest.unlink()
    pack.unlink()
    report = store.repair(sources=[evil])
    assert (report.actions, problems(report)) == ((), ["bundle_missing"])


def test_a_folder_that_is_not_there_is_refused_before_anything_is_done(store: Store, tmp_path: Path) -> None:
    making.spoil(store, sleep(store), 0)
    before = names(store.path)
    with pytest.raises(errors.StoreIoError):
        store.repair(sources=[tmp_path / "nowhere"])
    assert names(store.path) == before


# --- small files


def test_damaged_marks_move_away_and_lost_ones_are_made_anew(store: Store) -> None:
    sleep(store)
    store.tag(URI, 1, "first")
    marks = Path(store.path, "marks.json")
    flip(marks, 30)
    assert kinds(store.repair(dry_run=True)) == ["rewrite"]
    with pytest.raises(errors.CorruptMarks):
        store.marks(URI)
    report = store.repair()
    assert kinds(report) == ["rewrite"]
    assert (damaged(store), len(store.marks(URI))) == (["marks.json"], 0)
    (told,) = report.problems
    assert (told.path, told.code) == (str(marks), "corrupt_marks")
    assert f"the damaged one is {store.path}/damaged/marks.json. A marks.json of a backup" in told.message
    marks.unlink()
    report = store.repair()
    assert (kinds(report), Marks.load(store._core.folder).sessions) == (["rewrite"], {})
    assert [told.code for told in report.problems] == ["marks_lost"]
    assert store.repair().problems == ()


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_lost_marks_come_from_a_backup_as_far_as_the_store_has_their_versions(
    store: Store, tmp_path: Path, how: str
) -> None:
    """A tag of what was deleted since would bring it back. A strip of what is whole again would let it go."""
    first = sleep(store)
    for uri, seed in ((OTHER_URI, 2), (making.FORK_URI, 3), (making.HEIR_URI, 4)):
        sleep(store, uri=uri, seed=seed)
    store.tag(URI, 1, "first")
    store.pin(OTHER_URI, 1)
    exported = store.export_session(making.FORK_URI, 1, tmp_path / "fork.mvb").path
    store.strip(making.FORK_URI, 1)
    store.strip(making.HEIR_URI, 1)
    store.backup(tmp_path / "backup")
    store.delete_session(OTHER_URI)
    store.import_file(exported)
    manifest_path(store, first.bundle_id).unlink()
    marks = Path(store.path, "marks.json")
    marks.unlink() if how == "missing" else marks.write_bytes(b"{}")
    with Store.open(tmp_path / "second", writable=True) as second:
        sleep(second)
    sources = [tmp_path / "second", tmp_path / "backup"]
    assert kinds(store.repair(sources=sources, dry_run=True)) == ["rewrite", "copy"]
    report = store.repair(sources=sources)
    assert (kinds(report), report.problems) == (["rewrite", "copy"], ())
    assert {uri: of.bundle_ids for uri, of in Marks.load(store._core.folder).sessions.items()} == {
        URI: {first.bundle_id},
        making.HEIR_URI: {making.id_of(store, making.HEIR_URI)},
    }
    assert store.marks(making.HEIR_URI).stripped
    assert store.verify(deep=True).findings == ()
    require_awake(store, 300)


@pytest.mark.parametrize("missing", [True, False])
def test_a_store_file_lost_while_the_store_is_open_is_made_again(store: Store, missing: bool) -> None:
    sleep(store)
    path = Path(store.path, "store.json")
    good = path.read_bytes()
    if missing:
        path.unlink()
    else:
        flip(path, 10)
    assert kinds(store.repair(dry_run=True)) == kinds(store.repair()) == ["rewrite"]
    assert path.read_bytes() == good
    assert damaged(store) == ([] if missing else ["store.json"])


# --- cut off


LOST_MARKS = {"corrupt_marks", "marks_lost"}
"""What a repair of `hurt` tells, unless it was done before."""


def hurt(store: Store) -> Receipt:
    receipt = sleep(store, 700)
    flip(pack_of(store, receipt), -1)
    other = pack_of(store, sleep(store, 300, uri=OTHER_URI, seed=2))
    making.copy_pack(store, other)
    flip(other, -1)
    flip(Path(store.path, "marks.json"), 30)
    return receipt


def test_a_repair_that_is_cut_off_loses_nothing_and_another_run_finishes(store: Store, tmp_path: Path) -> None:
    hurt(store)
    for again in stores_cut_off(store, tmp_path / "cut", store.repair):
        assert LOST_MARKS.issuperset(problems(again.repair()))
        require_awake(again, 700)
        require_awake(again, 300, uri=OTHER_URI, seed=2)
        assert again.verify(deep=True).ok


@pytest.mark.parametrize("error", [errors.NoSpace("full"), errors.StoreIoError("bad", path="/disk")])
def test_a_disk_that_refuses_stops_it_with_the_damaged_file_in_its_place(store: Store, error: Exception) -> None:
    hurt(store)
    with mock.patch.object(durable.TempFile, "append", making.refusing(error)), pytest.raises(type(error)):
        store.repair()
    assert LOST_MARKS.issuperset(problems(store.repair()))
    require_awake(store, 700)


def test_a_failed_flush_stops_all_writing(store: Store) -> None:
    hurt(store)
    with (
        mock.patch.object(durable.TempFile, "sync", making.refusing(errors.DurabilityLost("lost"))),
        pytest.raises(errors.DurabilityLost),
    ):
        store.repair()
    assert not store._core.writable


def test_nothing_is_taken_through_a_link_in_the_place_of_damaged(store: Store, tmp_path: Path) -> None:
    pack = pack_of(store, sleep(store, 300))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(pack, elsewhere)
    link = Path(store.path, "damaged")
    link.symlink_to(elsewhere)
    report = store.repair()
    assert (kinds(report), problems(report)) == ([], ["unsafe_path", "block_missing"])
    link.unlink()
    elsewhere.rename(link)
    assert kinds(store.repair()) == ["copy"]
    require_awake(store, 300)
