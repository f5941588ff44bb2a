"""Delete: what others need stays, what nothing needs goes, whatever fails or is missing, and no room is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid import errors
from torpor.memvid.disk import durable
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.journal import Journal
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.records import Receipt
from torpor.memvid.index.index import Index
from torpor.memvid.store import Store
from torpor.memvid.writing import deletion
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.cut_off import stores_cut_off
from torpor.tests.memvid.store_making import OTHER_URI, URI, manifest_path, names, reopened, require_awake, sleep, turn


@pytest.fixture
def shared(store: Store) -> tuple[Receipt, Receipt]:
    """A session, and another one that goes on from it."""
    first = sleep(store, 600)
    return first, sleep(store, 900, uri=OTHER_URI, before=first)


def test_a_delete_leaves_what_others_need_and_the_last_one_leaves_nothing(
    store: Store, shared: tuple[Receipt, Receipt]
) -> None:
    report = store.delete_session(URI)
    assert (report.versions_deleted, report.problems) == (1, ())
    assert len(names(store.path)) == 3
    require_awake(store, 900, uri=OTHER_URI)
    with pytest.raises(errors.SessionNotFound):
        store.open_session(URI)
    held = sum((Path(store.path) / name).stat().st_size for name in names(store.path))
    assert store.delete_session(OTHER_URI).bytes_freed == held
    assert (names(store.path), dict(store.index.pack_sizes())) == (set(), {})


def test_all_versions_go_and_only_those_of_the_session(store: Store) -> None:
    making.sleep_each(store, *(256 * number for number in range(1, 30)), layers=1, heads=1, dim=1)
    sleep(store, 300, uri=OTHER_URI, seed=1)
    assert store.delete_session(URI).versions_deleted == 29
    assert len(names(store.path)) == 2
    require_awake(store, 300, uri=OTHER_URI, seed=1)
    with reopened(store) as again:
        assert (again.opening.unreadable, again.find_session(URI)) == ((), None)
        assert sleep(again, 10).version == 1


@pytest.mark.parametrize("version", [1, 2, 3])
def test_one_version_goes_with_what_only_it_needs(store: Store, version: int) -> None:
    made = making.sleep_each(store, 600, 900, 1200)
    before = names(store.path)
    report = store.delete_version(URI, version)
    assert (report.versions_deleted, report.problems) == (1, ())
    gone = before - names(store.path)
    assert {name for name in gone if name.startswith("versions")} == {
        str(manifest_path(store, made[version - 1].bundle_id).relative_to(store.path))
    }
    assert len([name for name in gone if name.startswith("packs")]) == (1 if version == 3 else 0)
    assert [row.version for row in store.versions(URI)] == [one for one in (1, 2, 3) if one != version]
    for left in store.versions(URI):
        require_awake(store, left.token_count, version=left.version)
    assert sleep(store, 5, seed=4).version == (3 if version == 3 else 4)


def test_the_last_version_goes_with_the_session(store: Store) -> None:
    sleep(store, 300)
    store.tag(URI, 1, "good")
    store.delete_version(URI, 1)
    assert (names(store.path), store.find_session(URI), len(store.marks(URI))) == (set(), None, 0)


def test_a_deleted_version_s_turns_are_the_next_version(store: Store) -> None:
    sleep(store, 300)
    store.acknowledge([turn(store, 5)])
    store.delete_version(URI, 1)
    assert [row.version for row in store.versions(URI)] == [2]
    assert (making.ledger(store), store.acknowledged()) == (making.token_ids(0, 305), [])


def test_a_deleted_session_s_turns_go_with_it(store: Store) -> None:
    sleep(store, 300)
    store.acknowledge([turn(store, 5), turn(store, 9, uri=OTHER_URI)])
    store.delete_session(URI)
    store.delete_session(OTHER_URI)
    with pytest.raises(errors.SessionNotFound):
        store.delete_session(OTHER_URI)
    with reopened(store) as again:
        assert (again.acknowledged(), list(again.iter_sessions())) == ([], [])


WAYS_OUT: dict[str, tuple[object, str, Callable[[Store], object]]] = {
    "session": (deletion, "_drop", lambda store: store.delete_session(URI)),
    "version": (Index, "forget_in_file", lambda store: store.delete_version(URI, 1)),
    "prune": (Index, "forget_in_file", lambda store: store.prune(Retention(keep_last=1), URI)),
}


@pytest.mark.parametrize(("owner", "name", "remove"), WAYS_OUT.values(), ids=WAYS_OUT)
def test_no_turn_is_acknowledged_behind_a_version_that_goes_meanwhile(
    store: Store, owner: object, name: str, remove: Callable[[Store], object]
) -> None:
    """Else it was lost with its base: between the look at the journal and the removal of the manifest."""
    sleep(store, 300)
    record = turn(store, 5)
    sleep(store, 400)
    asked: list[Future[None]] = []
    with ThreadPoolExecutor(1) as pool:

        def acknowledge() -> None:
            asked.append(pool.submit(store.acknowledge, [record]))
            with pytest.raises(TimeoutError):
                asked[0].result(0.05)

        with making.meanwhile(owner, name, acknowledge):
            remove(store)
        with pytest.raises(errors.BundleMissing, match="turns stand behind it"):
            asked[0].result(30)
    assert store.acknowledged() == []


# --- order, crashes and failures


def test_a_delete_that_is_cut_off_at_any_step_is_as_it_was_or_lacks_its_oldest_versions(
    store: Store, tmp_path: Path
) -> None:
    making.sleep_each(store, 300, 600, 900)
    sleep(store, 700, uri=OTHER_URI)
    with reopened(store) as store:  # its index has a file that tells of the versions
        for again in stores_cut_off(store, tmp_path / "cut", lambda: store.delete_session(URI)):
            assert again.opening.unreadable == (), "nothing of it is called missing"
            assert [row.version for row in again.versions(URI)] in ([1, 2, 3], [2, 3], [3], [])
            for row in again.versions(URI):
                require_awake(again, row.block_tokens, version=row.version)
            require_awake(again, 700, uri=OTHER_URI)
            if again.can_be_deleted(URI):
                again.delete_session(URI)
            again.delete_session(OTHER_URI)
            again.repack()
            assert names(again.path) == set()


def require_forgotten_once_a_manifest_goes(store: Store, copy: Path) -> None:
    """A delete that is cut off behind the removal of a manifest leaves an index that does not call it missing."""
    with making.meanwhile(StoreFolder, "remove", lambda: shutil.copytree(store.path, copy), after=True):
        store.delete_session(URI)
    (copy / "lock").unlink()
    with Store.open(copy, writable=True) as again:
        assert (again.opening.unreadable, again.find_session(URI)) == ((), None)


def test_a_version_that_came_back_with_an_import_s_row_is_forgotten_too(store: Store, tmp_path: Path) -> None:
    """Its row is written anew, and the index's file tells of it still."""
    sleep(store, 300)
    store = reopened(store)
    with store:
        row = store.require_session(URI)
        store.index.add(row)
        require_forgotten_once_a_manifest_goes(store, tmp_path / "copy")


def test_an_index_file_that_could_not_be_read_is_forgotten_too(store: Store, tmp_path: Path) -> None:
    """It may be readable again, and would call what was deleted meanwhile missing."""
    sleep(store, 300)
    store.close()
    with mock.patch("torpor.memvid.index.index.read_small", making.refusing(errors.StoreIoError("EIO"))):
        again = Store.open(store.path, writable=True)
    with again:
        require_forgotten_once_a_manifest_goes(again, tmp_path / "copy")


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("call", ["unlink", "fsync"])
def test_a_delete_that_fails_at_any_step_leaves_whole_versions(store: Store, call: str, at: int) -> None:
    first = sleep(store, 300)
    sleep(store, 900, before=sleep(store, 600, before=first))
    sleep(store, 700, uri=OTHER_URI, before=first)
    store = reopened(store)
    failure = making.refusing(OSError(errno.EIO, "Input/output error"))
    kind = errors.DurabilityLost if call == "fsync" else errors.StoreIoError
    may_be_fewer = contextlib.suppress(AssertionError)
    with may_be_fewer, making.meanwhile(os, call, failure, at=at), contextlib.suppress(kind):
        store.delete_session(URI)
    with reopened(store) as again:
        assert again.opening.unreadable == ()
        assert [row.version for row in again.versions(URI)] in ([1, 2, 3], [2, 3], [3], [])
        for row in again.versions(URI):
            require_awake(again, row.block_tokens, version=row.version)
        require_awake(again, 700, uri=OTHER_URI)
        if again.can_be_deleted(URI):
            again.delete_session(URI)
        again.delete_session(OTHER_URI)


def test_a_delete_needs_no_room(store: Store, shared: tuple[Receipt, Receipt]) -> None:
    sleep(store, 1000)
    store.tag(URI, 1, "good")
    store.acknowledge([turn(store, 5)])
    store = reopened(store)
    full = OSError(errno.ENOSPC, "No space left on device")
    with store:
        with (
            mock.patch.object(os, "writev", side_effect=full),
            mock.patch.object(os, "mkdir", side_effect=full),
            mock.patch.object(durable, "_TEMP_FLAGS", os.O_RDWR | os.O_NOFOLLOW),
        ):
            for report in (store.delete_session(URI), store.delete_version(OTHER_URI, 1)):
                assert [problem.path for problem in report.problems] == [f"{store.path}/marks.json"], "its tag stays"
            with pytest.raises(errors.StoreIoError):
                sleep(store, 10)
        assert names(store.path) == set()
        sleep(store, 10)


def test_a_version_that_came_back_keeps_its_marks_when_others_are_deleted(store: Store, store_path: Path) -> None:
    """The delete of it could not read the marks, and what it could not take must not go with another's."""
    receipt, exported = sleep(store, 300), store_path.parent / "agent.mvb"
    sleep(store, 10, uri=OTHER_URI)
    store.export_session(URI, 1, exported)
    with making.away(store_path / "marks.json"):
        store.delete_session(URI)
    store.import_file(exported)
    store.tag(URI, 1, "release")
    store.pin(URI, 1)
    store.strip(URI, 1)
    store.delete_session(OTHER_URI)
    assert store.marks(URI).bundle_ids == store.marks(URI).stripped == {receipt.bundle_id}
    assert set(store.marks(URI).tags) == {"release"}
    assert store.verify(deep=True).findings == ()


# --- what is needed is told by manifests alone


def test_needs_are_taken_from_manifests_and_not_from_the_index(store: Store, shared: tuple[Receipt, Receipt]) -> None:
    _, second = shared
    store.index.drop([second.bundle_id])
    store.delete_session(URI)
    with reopened(store) as again:
        require_awake(again, 900, uri=OTHER_URI)


@pytest.mark.parametrize("whole", [True, False])
def test_what_manifests_need_is_read_before_others_have_to_wait(
    store: Store, shared: tuple[Receipt, Receipt], whole: bool
) -> None:
    with reopened(store) as again:
        core, committing = again._core, again._core.committing
        was_read: list[bool] = []

        @contextlib.contextmanager
        def noting() -> Iterator[None]:
            was_read.append(core.folder.list_versions() <= core.needs._of.keys())
            with committing():
                yield

        with mock.patch.object(core, "committing", noting):
            again.delete_session(URI) if whole else again.delete_version(URI, 1)
        assert was_read[0]


def test_a_missing_version_can_be_deleted_and_then_packs_go_again(
    store: Store, shared: tuple[Receipt, Receipt]
) -> None:
    _, second = shared
    manifest_path(store, second.bundle_id).unlink()
    assert store.delete_session(URI).problems
    report = store.delete_version(OTHER_URI, 1)
    assert (report.versions_deleted, report.problems) == (1, ())
    sleep(store, 900, uri=making.FORK_URI)
    store.delete_session(making.FORK_URI)
    with reopened(store) as again:
        assert (again.opening.unreadable, list(again.iter_sessions())) == ((), [])


def test_a_pack_that_cannot_be_read_is_not_removed(store: Store) -> None:
    receipt = sleep(store, 300)
    pack = making.pack_of(store, receipt)
    good = making.flip(pack, -1)
    store = reopened(store, anew=True)
    assert [finding.path for finding in store.opening.unreadable] == [str(pack)]
    assert store.delete_session(URI).problems == ()
    assert pack.exists()
    making.put(pack, good)
    with reopened(store) as again:
        assert sleep(again, 300).blocks_new == 0


def test_what_a_stripped_version_alone_names_of_a_pack_keeps_the_pack(store: Store) -> None:
    first = sleep(store, 600)
    making.mark_stripped(store, first)
    sleep(store, 600, uri=OTHER_URI)
    store.delete_session(OTHER_URI)
    require_awake(store, 600)


def test_damage_in_blocks_stops_no_delete(store: Store) -> None:
    making.spoil(store, sleep(store, 300), 0)
    assert store.delete_session(URI).problems == ()
    assert names(store.path) == set()


# --- readers


def test_a_reader_goes_on_when_its_session_is_deleted(store: Store) -> None:
    sleep(store, 900, before=sleep(store, 600))
    with store.open_session(URI) as reader:
        store.delete_session(URI)
        assert making.contents(reader) == making.expected(900)
        assert reader.tokens() == making.token_ids(0, 900)
    assert not store._core.pins.blocks()
    assert names(store.path) == set(), "the packs go when no reader holds them any more"


def test_what_a_reader_kept_stays_when_a_version_has_come_to_need_it(store: Store) -> None:
    sleep(store, 600)
    with store.open_session(URI):
        store.delete_session(URI)
        assert len(names(store.path)) == 1
        sleep(store, 600)
    assert len(names(store.path)) == 2, "a pack and a version"
    require_awake(store, 600)
    assert store.delete_session(URI).problems == ()
    assert names(store.path) == set()


def test_a_session_deleted_while_it_is_opened_is_not_found(store: Store) -> None:
    """Between the reading of its manifest and the pinning of its blocks: not damage."""
    sleep(store, 700, before=sleep(store, 600))
    with (
        making.meanwhile(StoreCore, "read_manifest", lambda: store.delete_session(URI), after=True),
        pytest.raises(errors.SessionNotFound),
    ):
        store.open_session(URI)
    assert (names(store.path), store._core.pins.blocks()) == (set(), set())


def test_a_session_deleted_beside_a_read_only_store_is_not_found(store: Store, store_path: Path) -> None:
    sleep(store, 300, uri=OTHER_URI, seed=1)
    sleep(store, 700, before=sleep(store, 600))
    store = reopened(store)
    with store, Store.open(store_path, writable=False) as reader:
        with reader.open_session(URI) as opened:
            one = opened.read_slot(opened.entries[0], 0)
            store.delete_session(URI)
            assert bytes(one) == making.expected(700)[0][0]
            with pytest.raises(errors.BlockMissing):
                making.contents(opened)
        with pytest.raises(errors.SessionNotFound):
            reader.open_session(URI)
        require_awake(reader, 300, uri=OTHER_URI, seed=1)


@pytest.mark.parametrize("at", [1, 2])
def test_a_read_only_store_that_opens_in_a_delete_calls_nothing_missing(
    store: Store, store_path: Path, at: int
) -> None:
    """Its index told of the version, and its manifest is gone by then."""
    sleep(store, 700, uri=OTHER_URI, before=sleep(store, 600))
    store = reopened(store)
    with (
        store,
        making.meanwhile(StoreFolder, "list_versions", lambda: store.delete_session(URI), at=at),
        Store.open(store_path, writable=False) as reader,
    ):
        assert [row.uri for row in reader.iter_sessions()] == [OTHER_URI]
        assert reader.opening.unreadable == ()


def test_a_delete_that_fails_for_the_journal_keeps_all_versions(store: Store) -> None:
    sleep(store, 300)
    sleep(store, 400)
    store.acknowledge([turn(store, 5)])
    with (
        mock.patch.object(Journal, "settle", making.refusing(errors.StoreIoError("no"))),
        pytest.raises(errors.StoreIoError),
    ):
        store.delete_session(URI)
    assert [row.version for row in store.versions(URI)] == [1, 2]
    assert store.has_turns(URI)
    with reopened(store) as again:
        assert making.ledger(again) == making.token_ids(0, 405)


@pytest.mark.parametrize("how", ["delete_session", "forget"])
def test_a_delete_that_a_journal_beside_the_open_one_refuses_takes_nothing(store: Store, how: str) -> None:
    making.sleep_each(store, 300, 600)
    store.tag(URI, 1, "keep")
    store.acknowledge([turn(store, 3)])
    folder = Path(store.path, "journal")
    shutil.copyfile(folder / "turns.mvj", folder / "turns.mvj.2")
    os.link(folder / "turns.mvj.2", folder / "another")
    before = names(store.path)
    with pytest.raises(errors.UnsafePath):
        getattr(store, how)(URI)
    assert (names(store.path), len(store.versions(URI))) == (before, 2)
    assert list(store.marks_to_show(URI).tags) == ["keep"]
    (folder / "another").unlink()
    getattr(store, how)(URI)
    with reopened(store) as again:
        assert again.find_session(URI) is None


@pytest.mark.parametrize("how", ["delete_version", "delete_session", "prune"])
def test_what_turns_in_a_journal_beside_the_open_one_stand_behind_stays_for_the_next_opening(
    store: Store, how: str
) -> None:
    first = sleep(store, 300)
    uri = OTHER_URI if how == "delete_session" else URI
    store.acknowledge([dataclasses.replace(turn(store, 3, seed=5), uri=uri, newest=None)])
    folder = Path(store.path, "journal")
    data = (folder / "turns.mvj").read_bytes()
    store._core.journal.drop(uri)
    sleep(store, 600, before=first)
    (folder / "turns.mvj.2").write_bytes(data)
    (folder / "turns.mvj.2").chmod(0o600)
    if how == "prune":
        assert store.prune(Retention(keep_last=1)).actions == ()
    else:
        with pytest.raises(errors.StoreBusy, match="put back"):
            store.delete_version(URI, 1) if how == "delete_version" else store.delete_session(URI)
    assert [row.version for row in store.versions(URI)] == [1, 2]
    with reopened(store) as again:
        assert again.opening.journal == ()
        expected = making.token_ids(0, 300) + making.token_ids(300, 3, 5)
        assert making.ledger(again, uri) == expected
        again.delete_session(URI)
