"""A backup: what is in it, what a second one writes, what stands in its way, and that it is whole at any moment."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid.answers import MaintenanceReport
from torpor.memvid.errors import NoSpace, NotAStore, StoreLocked, TargetExists, UnsafePath
from torpor.memvid.exchange import backup
from torpor.memvid.folder.folder import manifest_name
from torpor.memvid.folder.marks import Marks
from torpor.memvid.folder.retention import Retention
from torpor.memvid.maintenance.repack_plan import CLEARING
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.format_1_stores import SMALL, case
from torpor.tests.memvid.store_making import HEIR_URI, OTHER_URI, URI, flip, id_of, manifest_path, require_awake, sleep

COUNTS = (300, 600, 900, 1200)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four versions of one session, the second tagged, the third pinned, and a fork whose session was begun by one that
    is deleted."""
    path = tmp_path / "store"
    with Store.open(path, writable=True) as store:
        making.sleep_each(store, *COUNTS)
        gone = sleep(store, 600, uri=SessionUri("default", "gone"), seed=3)
        sleep(store, 800, uri=OTHER_URI, seed=3, before=gone)
        store.delete_session(gone.uri)
        store.tag(URI, 2, "kept")
        store.pin(URI, 3)
    return path


def go_on(path: Path, *counts: int) -> None:
    """The session sleeps with so many tokens, an opening each time."""
    for count in counts:
        with Store.open(path, writable=True) as store, store.open_session(URI) as newest:
            sleep(store, count, before=newest)


def back_up(source: Path, target: Path) -> MaintenanceReport:
    with Store.open(source, writable=False) as store:
        return store.backup(target)


def require_whole(path: Path, counts: tuple[int, ...] = COUNTS, **sizes: int) -> None:
    with Store.open(path, writable=True) as store:
        assert (store.opening.unreadable, store.opening.index_rebuilt) == ((), None)
        assert store.verify(deep=True).findings == ()
        assert [row.block_tokens for row in store.versions(URI)] == list(counts)
        for row in store.versions(URI):
            with store.open_session(URI, row.version) as reader:
                assert making.contents(reader) == making.expected(row.block_tokens, **sizes)


def state_of(path: Path) -> dict[str, bytes]:
    return making.tree(path, "*.mv[mp]")


def test_a_backup_is_a_store_with_all_that_sleeps_and_its_marks(source: Path, tmp_path: Path) -> None:
    report = back_up(source, tmp_path / "new" / "copy")
    assert (len(report.actions), report.problems) == (5, ())
    require_whole(tmp_path / "new" / "copy")
    with Store.open(source, writable=False) as store, Store.open(tmp_path / "new" / "copy", writable=True) as copy:
        assert copy.uuid == store.uuid
        assert copy.marks(URI) == store.marks(URI)
        require_awake(copy, 800, uri=OTHER_URI, seed=3)
        assert [row.bundle_id for row in copy.versions(URI)] == [row.bundle_id for row in store.versions(URI)]
        copy.prune(Retention(keep_last=1))
        assert [row.version for row in copy.versions(URI)] == [2, 3, 4]
        assert copy.verify(deep=True).findings == ()


def test_a_second_backup_writes_what_is_new_and_nothing_else(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    back_up(source, copy)
    before = state_of(copy)
    assert (back_up(source, copy).actions, state_of(copy)) == ((), before)
    go_on(source, 1500)
    report = back_up(source, copy)
    assert [(action.kind, action.version) for action in report.actions] == [("copy", 5)]
    assert state_of(copy).items() >= before.items()
    require_whole(copy, (*COUNTS, 1500))


def test_a_backup_beside_a_store_that_sleeps_repacks_and_deletes_is_whole(source: Path, tmp_path: Path) -> None:
    done: list[int] = []
    with Store.open(source, writable=True) as daemon, Store.open(source, writable=False) as reader:

        def meanwhile(_written: int, _total: int) -> None:
            done.append(1)
            if len(done) == 1:
                sleep(daemon, 40, uri=SessionUri("default", "later"))
                daemon.delete_session(OTHER_URI)
                daemon.repack()

        report = reader.backup(tmp_path / "copy", on_progress=meanwhile)
        assert daemon.verify(deep=True).findings == ()
    assert (report.problems, any(done)) == ((), True)
    assert {str(action.session) for action in report.actions} == {str(URI)}
    require_whole(tmp_path / "copy")


def test_a_backup_has_what_slept_since_the_store_was_opened(source: Path, tmp_path: Path) -> None:
    with Store.open(source, writable=True) as daemon, Store.open(source, writable=False) as reader:
        with daemon.open_session(URI) as newest:
            sleep(daemon, 1500, before=newest)
        assert reader.backup(tmp_path / "copy").problems == ()
    require_whole(tmp_path / "copy", (*COUNTS, 1500))


@pytest.mark.parametrize("copied", [1, 2, 4])
def test_a_backup_that_is_cut_off_is_a_whole_store_and_goes_on(source: Path, tmp_path: Path, copied: int) -> None:
    class Cut(Exception):
        pass

    calls: list[int] = []

    def cut(_written: int, _total: int) -> None:
        calls.append(1)
        if len(calls) == copied:
            raise Cut

    with Store.open(source, writable=False) as store, pytest.raises(Cut):
        store.backup(tmp_path / "copy", on_progress=cut)
    require_whole(tmp_path / "copy", COUNTS[:copied])
    assert len(back_up(source, tmp_path / "copy").actions) == 5 - copied
    require_whole(tmp_path / "copy")


def begin_anew(store: Store, path: Path) -> None:
    """The session is removed by mistake, and something short is begun under its name."""
    store.delete_session(URI)
    store.delete_session(OTHER_URI)
    sleep(store, 40, seed=7)


def prune_and_begin_anew(store: Store, path: Path) -> None:
    """The backup has a later number alone, so that no number is taken."""
    store.delete_session(URI)
    with Store.open(path.with_name("copy"), writable=True) as copy:
        copy.untag(URI, "kept")
        copy.unpin(URI, id_of(copy, URI, 3))
        copy.prune(Retention(keep_last=1))
    sleep(store, 40, seed=7)


@pytest.mark.parametrize("change", [begin_anew, prune_and_begin_anew])
def test_a_backup_takes_nothing_away_for_a_session_that_was_begun_anew_and_copies_the_others(
    source: Path, tmp_path: Path, change: Callable[[Store, Path], None]
) -> None:
    copy = tmp_path / "copy"
    back_up(source, copy)
    with Store.open(source, writable=True) as store:
        change(store, source)
        sleep(store, 70, uri=HEIR_URI)
    with Store.open(copy, writable=False) as store:
        before, marks = store.versions(URI), store.marks(URI)
    for _ in range(2):
        report = back_up(source, copy)
        (problem,) = report.problems
        assert (problem.path, problem.code, report.bytes_freed) == (str(copy), "name_taken", 0)
        assert f"`torpor forget {URI} --store {copy}`" in problem.message
    with Store.open(copy, writable=True) as store:
        assert (store.versions(URI), store.marks(URI)) == (before, marks)
        require_awake(store, 1200)
        require_awake(store, 800, uri=OTHER_URI, seed=3)
        require_awake(store, 70, uri=HEIR_URI)
        assert store.verify(deep=True).findings == ()
        store.delete_session(URI)
    assert back_up(source, copy).problems == ()
    with Store.open(copy, writable=True) as store:
        assert [row.block_tokens for row in store.versions(URI)] == [40]
        assert store.verify(deep=True).findings == ()


def test_a_backup_keeps_what_a_store_that_was_rolled_back_has_no_more(source: Path, tmp_path: Path) -> None:
    copy, old = tmp_path / "copy", tmp_path / "old"
    shutil.copytree(source, old)
    go_on(source, 1500, 1800)
    go_on(old, 1510)
    back_up(source, copy)
    assert [problem.code for problem in back_up(old, copy).problems] == ["name_taken"]
    require_whole(copy, (*COUNTS, 1500, 1800))
    with Store.open(copy, writable=True) as store:
        store.delete_session(URI)
    assert back_up(old, copy).problems == ()
    require_whole(copy, (*COUNTS, 1510))


def test_what_was_deleted_stays_in_the_backup_with_its_marks(source: Path, tmp_path: Path) -> None:
    back_up(source, tmp_path / "copy")
    with Store.open(source, writable=True) as store:
        store.delete_session(URI)
        store.tag(OTHER_URI, 1, "first")
    for _ in range(2):
        assert back_up(source, tmp_path / "copy").problems == ()
    require_whole(tmp_path / "copy")
    with Store.open(tmp_path / "copy", writable=False) as store:
        assert (set(store.marks(URI).tags), len(store.marks(URI).pins)) == ({"kept"}, 1)
        assert set(store.marks(OTHER_URI).tags) == {"first"}


def test_a_version_that_is_missing_is_told(source: Path, tmp_path: Path) -> None:
    with Store.open(source, writable=True) as store:
        path = manifest_path(store, store.versions(URI)[-1].bundle_id)
    path.unlink()
    report = back_up(source, tmp_path / "copy")
    assert [(problem.path, problem.code) for problem in report.problems] == [(str(path), "bundle_missing")]
    require_whole(tmp_path / "copy", COUNTS[:-1])


@pytest.mark.parametrize(("how", "code"), [("damaged", "corrupt_block"), ("not read", "store_io")])
def test_a_block_that_is_damaged_or_not_read_is_told_and_the_rest_is_copied(
    source: Path, tmp_path: Path, how: str, code: str
) -> None:
    with Store.open(source, writable=True) as store:
        rotten = sleep(store, 40, uri=SessionUri("default", "rotten"), seed=8)
        path = making.pack_of(store, rotten)
        if how == "damaged":
            making.spoil(store, rotten, 0)
    with making.unread(path, "preadv", errno.EIO) if how == "not read" else contextlib.nullcontext():
        report = back_up(source, tmp_path / "copy")
    assert [(problem.path, problem.code) for problem in report.problems] == [(str(path), code)]
    require_whole(tmp_path / "copy")


def test_each_version_that_a_damaged_file_keeps_out_of_the_backup_is_told(source: Path, tmp_path: Path) -> None:
    with Store.open(source, writable=True) as store:
        first = sleep(store, 300, uri=SessionUri("default", "rotten"), seed=8)
        sleep(store, 600, uri=SessionUri("default", "rotting"), seed=8, before=first)
        flip(making.pack_of(store, first), -1)
    told = [problem.message for problem in back_up(source, tmp_path / "copy").problems]
    for name in ("rotten", "rotting"):
        assert f"Version 1 of torpor://default/{name} is not in the backup" in " ".join(told)
    assert [("`torpor verify`" in each, "`torpor repair`" in each) for each in told] == [(True, True)] * 2
    require_whole(tmp_path / "copy")


@pytest.mark.parametrize("is_told_by", ["damage", "a tag"])
def test_a_version_of_which_the_index_knows_nothing_is_told_until_the_backup_has_it(
    source: Path, tmp_path: Path, is_told_by: str
) -> None:
    copy = tmp_path / "copy"
    with Store.open(source, writable=True) as store:
        store.tag(URI, 4, "newest")
        path = manifest_path(store, id_of(store, URI, 4))
    making.remove_index(source)
    good = flip(path, 200) if is_told_by == "damage" else path.read_bytes()
    if is_told_by == "a tag":
        path.unlink()
    assert [problem.path for problem in back_up(source, copy).problems] == [str(path)]
    making.put(path, good)
    assert back_up(source, copy).problems == ()
    path.write_bytes(b"damaged") if is_told_by == "damage" else path.unlink()
    making.remove_index(source)
    assert back_up(source, copy).problems == ()
    require_whole(copy)


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_what_is_missing_or_damaged_since_stays_sound_in_the_backup(source: Path, tmp_path: Path, how: str) -> None:
    back_up(source, tmp_path / "copy")
    for file in source.rglob("*.mv[mp]"):
        file.write_bytes(bytes(100)) if how == "damaged" else file.unlink()
    back_up(source, tmp_path / "copy")
    require_whole(tmp_path / "copy")


@pytest.mark.parametrize("what", ["manifest", "packs"])
def test_what_is_damaged_or_missing_in_the_backup_is_copied_again(source: Path, tmp_path: Path, what: str) -> None:
    copy = tmp_path / "copy"
    back_up(source, copy)
    if what == "packs":
        for pack in (copy / "packs").iterdir():
            pack.unlink()
    else:
        for number, manifest in enumerate(sorted((copy / "versions").iterdir())):
            manifest.write_bytes(b"damaged") if number % 2 else manifest.unlink()
    report = back_up(source, copy)
    assert report.problems == ()
    assert report.bytes_written > 0
    require_whole(copy)


def test_a_stripped_version_goes_with_its_ledger_and_its_mark(source: Path, tmp_path: Path) -> None:
    with Store.open(source, writable=True) as store:
        store.strip(OTHER_URI)
        store.repack()
        with store.open_session(OTHER_URI) as reader:
            assert reader.whole_up_to() == 0
    assert back_up(source, tmp_path / "copy").problems == ()
    assert back_up(source, tmp_path / "copy").bytes_written == 0
    with Store.open(tmp_path / "copy", writable=True) as copy:
        assert copy.marks(OTHER_URI).stripped == {copy.versions(OTHER_URI)[0].bundle_id}
        with copy.open_session(OTHER_URI) as reader:
            assert reader.tokens() == making.token_ids(0, 800, 3)
    require_whole(tmp_path / "copy")


def test_a_stripped_version_goes_by_its_sound_headers_beside_a_damaged_copy(source: Path, tmp_path: Path) -> None:
    before = {pack: pack.read_bytes() for pack in (source / "packs").iterdir()}
    with Store.open(source, writable=True) as store:
        store.strip(OTHER_URI)
        store.repack()
    for pack, data in before.items():
        if not pack.exists():  # a copy that is put back, with damaged keys
            pack.write_bytes(data)
            pack.chmod(0o600)
            making.flip(pack, len(data) // 2)
    assert back_up(source, tmp_path / "copy").problems == ()
    with Store.open(tmp_path / "copy", writable=True) as copy, copy.open_session(OTHER_URI) as reader:
        assert reader.tokens() == making.token_ids(0, 800, 3)


def test_a_version_that_is_whole_again_is_stripped_in_no_backup(source: Path, tmp_path: Path) -> None:
    with Store.open(source, writable=True) as store:
        store.export_session(OTHER_URI, None, tmp_path / "exported")
        store.strip(OTHER_URI)
        store.backup(tmp_path / "copy")
        store.import_file(tmp_path / "exported")
        assert store.backup(tmp_path / "copy").problems == ()
    with Store.open(tmp_path / "copy", writable=True) as copy:
        assert copy.marks(OTHER_URI).stripped == frozenset()
        copy.repack(policy=CLEARING)
        require_awake(copy, 800, uri=OTHER_URI, seed=3)


@pytest.mark.parametrize("its_manifest_is_damaged", [False, True])
def test_a_version_stays_stripped_in_a_backup_until_it_is_whole_there(
    source: Path, tmp_path: Path, its_manifest_is_damaged: bool
) -> None:
    copy = tmp_path / "copy"
    with Store.open(source, writable=True) as store:
        store.export_session(OTHER_URI, None, tmp_path / "exported")
        store.strip(OTHER_URI)
        store.backup(copy)
        receipt = store.import_file(tmp_path / "exported")
        if its_manifest_is_damaged:
            flip(copy / manifest_name(receipt.bundle_id), -1)
        making.spoil(store, receipt, 0)
        assert [finding.code for finding in store.backup(copy).problems] == ["corrupt_block"]
        with Store.open(copy, writable=False) as backed:
            assert backed.marks(OTHER_URI).stripped == {receipt.bundle_id}
            assert its_manifest_is_damaged or backed.verify(deep=True).ok
        store.import_file(tmp_path / "exported")
        assert store.backup(copy).problems == ()
    with Store.open(copy, writable=False) as backed:
        assert backed.marks(OTHER_URI).stripped == frozenset()
        require_awake(backed, 800, uri=OTHER_URI, seed=3)


@pytest.mark.parametrize("how", ["taken away", "lost"])
def test_no_tag_and_no_pin_leaves_a_backup(source: Path, tmp_path: Path, how: str) -> None:
    back_up(source, tmp_path / "copy")
    with Store.open(source, writable=True) as store:
        marks = store.marks(URI)
        assert marks.tags
        assert marks.pins
        if how == "lost":
            (source / "marks.json").write_bytes(b"damaged")
            store.repair()
        else:
            Marks(store.uuid).save(store._core.folder)
        store.tag(URI, 1, "later")
    assert back_up(source, tmp_path / "copy").problems == ()
    with Store.open(tmp_path / "copy", writable=False) as copy:
        assert copy.marks(URI).tags == {**marks.tags, "later": copy.versions(URI)[0].bundle_id}
        assert copy.marks(URI).pins == marks.pins


def test_a_backup_of_format_1_is_carried_over_and_goes_on(tmp_path: Path) -> None:
    case("backup", tmp_path / "copy")
    with Store.open(case("small", tmp_path / "store"), writable=True):
        pass
    report = back_up(tmp_path / "store", tmp_path / "copy")
    written = [(action.session, action.version) for action in report.actions]
    assert (written, report.problems) == ([(str(URI), 2), (str(OTHER_URI), 1)], ())
    require_whole(tmp_path / "copy", (300, 600), **SMALL)


def test_a_backup_builds_no_version_on_blocks_of_its_own_that_have_rotted(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    back_up(source, copy)
    with Store.open(copy, writable=True) as store, store.open_session(URI, 1) as reader:
        making.spoil(store, reader, 0)
    go_on(source, 1500)
    assert back_up(source, copy).problems == ()
    with Store.open(copy, writable=True) as store:
        for row in store.versions(URI):
            require_awake(store, row.block_tokens, version=row.version)
        assert {finding.code for finding in store.verify(deep=True).findings} == {"corrupt_block"}
        assert store.repair().problems == ()
    require_whole(copy, (*COUNTS, 1500))


def test_a_backup_reads_each_block_that_it_has_once_however_many_versions_refer_to_it(
    source: Path, tmp_path: Path
) -> None:
    back_up(source, tmp_path / "copy")
    go_on(source, 1500, 1800, 2100)
    with mock.patch.object(StoreCore, "find_sound", autospec=True, side_effect=StoreCore.find_sound) as looked_for:
        back_up(source, tmp_path / "copy")
    found = [call.args[1] for call in looked_for.call_args_list]
    assert len(found) == len(set(found)) > 0


def test_a_folder_that_is_no_place_for_a_backup_is_refused_and_left_as_it_is(source: Path, tmp_path: Path) -> None:
    foreign, other = tmp_path / "foreign", tmp_path / "other"
    foreign.mkdir(mode=0o700)
    (foreign / "letter.txt").write_text("mine")
    Store.open(other, writable=True).close()
    link = tmp_path / "link"
    link.symlink_to(source / "packs")
    for target, refusal in (
        (source, UnsafePath),
        (source / "packs" / "copy", UnsafePath),
        (link / "copy", UnsafePath),
        (foreign, NotAStore),
        (other, TargetExists),
        (tmp_path, NotAStore),
    ):
        with pytest.raises(refusal):
            back_up(source, target)
    assert [one.name for one in foreign.iterdir()] == ["letter.txt"]
    assert not (source / "packs" / "copy").exists()
    back_up(source, tmp_path / "copy")
    with Store.open(tmp_path / "copy", writable=True), pytest.raises(StoreLocked):
        back_up(source, tmp_path / "copy")


def test_a_disk_that_is_too_small_is_told_the_whole_size_before_anything_is_copied(
    source: Path, tmp_path: Path
) -> None:
    with mock.patch.object(backup, "free_bytes_of", return_value=1000), pytest.raises(NoSpace) as refused:
        back_up(source, tmp_path / "copy")
    assert state_of(tmp_path / "copy") == {}
    back_up(source, tmp_path / "copy")
    taken = sum(len(data) for data in state_of(tmp_path / "copy").values())
    assert 0.9 * taken < refused.value.details["size_bytes"] < 1.1 * taken


def test_a_backup_that_is_put_in_the_place_of_its_store_is_that_store(source: Path, tmp_path: Path) -> None:
    back_up(source, tmp_path / "copy")
    shutil.rmtree(source)
    shutil.copytree(tmp_path / "copy", source)
    require_whole(source)
    assert back_up(source, tmp_path / "copy").actions == ()
