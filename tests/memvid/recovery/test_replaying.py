"""The journal of a store, and what an opening makes of it (promise 1: nothing acknowledged is lost)."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid import errors
from torpor.memvid.disk import durable
from torpor.memvid.disk.budget import Budget
from torpor.memvid.folder import marks
from torpor.memvid.folder.journal import Journal
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.frames import FrameReader
from torpor.memvid.format.journal import VOID
from torpor.memvid.format.manifest import UNREAD
from torpor.memvid.limits import MAX_NODES, MAX_SESSION_MAP_BYTES
from torpor.memvid.recovery import replaying
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.frame_files import FrameFiles
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, ledger, manifest_path, meanwhile, sleep, token_ids, turn


def lose_base(path: Path, count: int, *, of_other: int = 0) -> Path:
    """Acknowledge a turn of so many tokens, and move the file of the version that it stands behind to the folder around
    the store. Its place in the store. of_other: the tokens of a turn of another session beside it, if there is one."""
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, count), *([turn(store, of_other, uri=OTHER_URI)] if of_other else [])])
        row = store.require_session(URI)
        base = manifest_path(store, row.bundle_id)
    base.rename(path.parent / base.name)
    return base


def journal_file(path: Path) -> Path:
    return path / "journal" / "turns.mvj"


def put_journal(path: Path, data: bytes) -> None:
    """The journal is that of an earlier moment again."""
    journal_file(path).parent.mkdir(exist_ok=True)
    making.put(journal_file(path), data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "store", writable=True) as store:
        sleep(store, 300)
    return tmp_path / "store"


def test_acknowledged_turns_are_the_next_version_of_their_session_at_the_next_opening(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5)])
        store.acknowledge([turn(store, 9)])
    with Store.open(path, writable=True) as store:
        assert store.opening.turns_replayed == 1
        assert ledger(store) == token_ids(0, 309)
        assert [row.version for row in store.versions(URI)] == [1, 2]
        assert store.verify(deep=True).findings == ()
    assert not journal_file(path).exists()


def test_an_opening_leaves_no_journal_behind_in_which_nothing_counts_though_its_end_was_cut_off(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5)])
        whole = journal_file(path).read_bytes()
        store.acknowledge([turn(store, 9)])
        end = len(whole.rstrip(b"\0"))
        torn = whole[:end] + journal_file(path).read_bytes()[end : end + 100]
    journal_file(path).write_bytes(torn.ljust(len(whole), b"\0"))
    with Store.open(path, writable=True) as store:
        assert [finding.code for finding in store.opening.journal] == ["corrupt_journal"]
        assert ledger(store) == token_ids(0, 305)
        assert not journal_file(path).exists()
        assert store.verify(deep=True).findings == ()


def test_a_session_that_never_slept_is_there_after_its_first_turn(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 20, uri=OTHER_URI, seed=4)])
        assert store.find_session(OTHER_URI) is None
    with Store.open(path, writable=True) as store:
        assert ledger(store, OTHER_URI) == token_ids(0, 20, 4)


def test_a_sleep_takes_its_turns_out_of_the_journal_of_a_store_that_stays_open(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5), turn(store, 4, uri=OTHER_URI)])
        sleep(store, 310)
        assert store.acknowledged() == [OTHER_URI]
        with Store.open(path, writable=False) as reader:
            assert reader.acknowledged() == [OTHER_URI]


def sleep_and_rot(store: Store) -> None:
    manifest_path(store, sleep(store, 310).bundle_id).write_bytes(b"rot")


def sleep_and_lose_tokens(store: Store) -> None:
    slept = sleep(store, 310)
    pack = making.packs_of(store, slept)[1]
    making.flip(pack, making.frame_in(pack, slept.entries[1].id).offset + 70)


def lose_tokens_and_go_on(store: Store) -> None:
    sleep_and_lose_tokens(store)
    sleep(store, 40)


def say_more_and_take_all_back(store: Store) -> None:
    store.acknowledge([turn(store, 9)])
    sleep(store, 40)


def say_more_and_open_again(store: Store) -> None:
    store.acknowledge([turn(store, 9)])
    making.reopened(store).close()


BEFORE_TURNS: dict[str, tuple[Callable[[Store], object], int, bytes]] = {  # what is replayed, and the ledger then
    "a sleep covers them": (lambda store: sleep(store, 310), 0, token_ids(0, 310)),
    "a sleep took them back": (lambda store: sleep(store, 40), 0, token_ids(0, 40)),
    "a version that names later turns covers those": (say_more_and_take_all_back, 1, token_ids(0, 305)),
    "later turns that are a version already cover them": (say_more_and_open_again, 0, token_ids(0, 309)),
    "a version that is damaged covers none": (sleep_and_rot, 1, token_ids(0, 305)),
    "a version whose tokens are lost covers none": (sleep_and_lose_tokens, 1, token_ids(0, 305)),
    "the session went on behind such a version": (lose_tokens_and_go_on, 0, token_ids(0, 40)),
}


@pytest.mark.parametrize(("meanwhile", "replayed", "tokens"), BEFORE_TURNS.values(), ids=BEFORE_TURNS)
def test_a_journal_of_before_a_version_that_knew_it_is_replayed_where_that_does_not_cover_it(
    path: Path, meanwhile: Callable[[Store], object], replayed: int, tokens: bytes
) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5)])
        before = journal_file(path).read_bytes()
        meanwhile(store)
    put_journal(path, before)
    with Store.open(path, writable=True) as store:
        assert (store.opening.turns_replayed, ledger(store)) == (replayed, tokens)


def test_turns_are_covered_by_a_version_that_has_the_number_of_one_that_was_deleted(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        base = turn(store, 5, seed=3)
        sleep(store, 310)
        row = store.require_session(URI)
        store.acknowledge([dataclasses.replace(base, newest=(row.version, row.bundle_id))])
        before = journal_file(path).read_bytes()
        store.delete_version(URI, 2)
        assert sleep(store, 40).version == 2
    put_journal(path, before)
    with Store.open(path, writable=True) as store:
        assert (store.opening.turns_replayed, ledger(store)) == (0, token_ids(0, 40))


@pytest.mark.parametrize("pruned", [False, True])
def test_turns_that_a_version_covers_do_not_come_back_once_it_is_gone(path: Path, pruned: bool) -> None:
    """The disk did not take the mark that makes them void."""
    left, write_at = path.parent / "left", durable.write_at

    def refuse_mark(fd: int, start: int, data: bytes, of: str) -> None:
        if data == VOID:
            raise errors.StoreIoError("Input/output error")
        write_at(fd, start, data, of)

    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5)])
        with mock.patch.object(durable, "write_at", refuse_mark):
            sleep(store, 310)
            with pytest.raises(errors.StoreIoError):
                store.delete_version(URI, 2)
        sleep(store, 40, seed=3)
        if pruned:
            store.tag(URI, 1, "kept")
            store.prune(Retention(keep_last=1))
        else:
            store.delete_version(URI, 2)
        shutil.copytree(path, left)
    with Store.open(left, writable=True) as store:
        assert [row.version for row in store.versions(URI)] == [1, 3]
        assert (store.opening.turns_replayed, ledger(store)) == (0, token_ids(0, 40, 3))


@pytest.mark.parametrize(
    ("tail", "slept", "seed", "replayed"),
    [
        (5, 310, 0, 0),
        (5, 305, 0, 0),
        (5, 302, 0, 1),
        (5, 40, 8, 1),
        (-30, 275, 0, 0),
        (-30, 300, 0, 0),
        (-30, 265, 0, 1),
    ],
)
def test_a_version_that_begins_with_the_turns_covers_them_though_it_does_not_name_them(
    path: Path, tail: int, slept: int, seed: int, replayed: int
) -> None:
    """The journal is of an earlier moment than the bundles. A negative tail: the session had been taken back to token
    256, and has read on up to so many tokens before its newest version's end."""
    with Store.open(path, writable=True) as store:
        record = turn(store, tail if tail > 0 else 5)
        if tail < 0:
            session = {UNREAD: {"tokens": token_ids(256, 44 + tail)}}
            record = dataclasses.replace(record, session=session, held=256)
        store.acknowledge([record])
    before = journal_file(path).read_bytes()
    journal_file(path).unlink()
    with Store.open(path, writable=True) as store:
        sleep(store, slept, seed=seed)
    put_journal(path, before)
    with Store.open(path, writable=True) as store:
        assert store.opening.turns_replayed == replayed
        assert ledger(store) == token_ids(0, 300 + tail if replayed else slept)
        assert len(store.versions(URI)) == 2 + replayed


def test_a_session_that_was_taken_back_is_so_though_its_newest_version_begins_with_its_turns(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        session = {UNREAD: {"tokens": token_ids(256, 5)}}
        store.acknowledge([dataclasses.replace(turn(store, 5), session=session, held=256)])
    with Store.open(path, writable=True) as store:
        assert ledger(store) == token_ids(0, 261)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_delete_that_was_cut_off_leaves_the_newest_version_with_its_turns_or_without(
    path: Path, with_index: bool, after: bool
) -> None:
    """after: the journal was told. The newest manifest goes behind that."""
    left = path.parent / "left"
    with Store.open(path, writable=True) as store:
        sleep(store, 320)
        store.acknowledge([turn(store, 5)])
        with meanwhile(Journal, "drop", lambda: shutil.copytree(path, left), after=after):
            store.delete_session(URI)
    if not with_index:
        making.remove_index(left)
    with Store.open(left, writable=True) as store:
        assert (store.opening.journal, store.opening.unreadable) == ((), ())
        assert ledger(store) == token_ids(0, 320 if after else 325)
        assert store.find_session(URI, 1) is None
    assert not journal_file(left).exists()


def test_turns_whose_version_is_put_back_while_the_store_is_open_are_replayed_on_request(path: Path) -> None:
    base = lose_base(path, 5)
    with Store.open(path, writable=True) as store:
        with pytest.raises(errors.BundleMissing):
            store.replay_turns(URI)
        assert store.has_turns(URI)
        with pytest.raises(errors.JournalWaits):
            store.open_session(URI)
        (path.parent / base.name).rename(base)
        store.replay_turns(URI)
        assert ledger(store) == token_ids(0, 305)
        assert not store.has_turns(URI)


def test_no_turn_stands_behind_a_stripped_version(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.strip(URI)
        record = turn(store, 5)
        with pytest.raises(errors.BlockMissing):
            store.make_room_to_acknowledge(URI, 1000, record.base)
        with pytest.raises(errors.BlockMissing):
            store.acknowledge([record])
        assert not store.has_turns(URI)


@pytest.mark.parametrize("what", ["damaged", "lost"])
def test_without_marks_turns_stand_behind_a_version_whose_blocks_are_there_and_no_other(path: Path, what: str) -> None:
    with Store.open(path, writable=True) as store:
        sleep(store, 300, uri=OTHER_URI, seed=1)
        store.strip(URI)
        put_marks = (path / "marks.json").unlink if what == "lost" else partial(making.flip, path / "marks.json", 5)
        put_marks()
        with pytest.raises(errors.BlockMissing):
            store.make_room_to_acknowledge(URI, 1000, turn(store, 5).base)
        with pytest.raises(errors.BlockMissing):
            store.acknowledge([turn(store, 5)])
        store.acknowledge([turn(store, 5, uri=OTHER_URI)])
        assert store.acknowledged() == [OTHER_URI]


def test_marks_that_the_system_does_not_read_refuse_a_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(path, writable=True) as store:
        store.strip(URI)
        with monkeypatch.context() as patched:
            patched.setattr(marks, "stat_name", making.refusing(errors.StoreIoError("EMFILE")))
            with pytest.raises(errors.StoreIoError):
                store.acknowledge([turn(store, 5)])
        with pytest.raises(errors.BlockMissing):
            store.acknowledge([turn(store, 5)])


@pytest.mark.parametrize("number", [0, 2])
def test_turns_wait_for_no_keys_and_values(path: Path, number: int) -> None:
    """A span of the version that they stand behind, or its state record, was damaged and repaired to its header."""
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5)])
        with store.open_session(URI) as base:
            pack = Path(store.path, store.index.packs_of(base.entries[number].id)[0])
            making.spoil_frame(pack, making.frame_in(pack, base.entries[number].id))
        store.repair()
        assert store.verify(deep=True).damaged
    with Store.open(path, writable=True) as store:
        assert (store.opening.turns_replayed, store.opening.journal) == (1, ())
        assert ledger(store) == token_ids(0, 305)
        with store.open_session(URI) as reader:
            assert [entry.kind for entry in reader.entries] == ["span", "span", "state"][: 2 + (number == 0)]
            assert reader.whole_up_to() == (0 if number == 0 else 300)


def test_a_state_record_that_the_system_does_not_read_once_is_not_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5)])
    due: list[errors.StoreError] = []
    holding = FrameFiles.holding

    def refuse_once(files: FrameFiles, name: str) -> AbstractContextManager[FrameReader]:
        if due:
            raise due.pop()
        return holding(files, name)

    monkeypatch.setattr(FrameFiles, "holding", refuse_once)
    refusal = errors.StoreIoError("Not now.", path="x", action="read", errno=errno.EIO)
    with meanwhile(replaying, "_held", lambda: due.append(refusal)), Store.open(path, writable=True) as store:
        assert not due
        with store.open_session(URI) as reader:
            assert [entry.kind for entry in reader.entries] == ["span", "span", "state"]


def test_turns_are_told_from_those_of_a_version_where_later_blocks_of_their_base_are_gone(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        session = {UNREAD: {"tokens": token_ids(256, 5, 3)}}
        store.acknowledge([dataclasses.replace(turn(store, 5), session=session, held=256)])
        before = journal_file(path).read_bytes()
        with store.open_session(URI) as base:
            pack = Path(store.path, store.index.packs_of(base.entries[1].id)[0])
            at = making.frame_in(pack, base.entries[1].id).offset
    journal_file(path).unlink()
    with Store.open(path, writable=True) as store:
        sleep(store, 40, seed=8)
    making.flip(pack, at + 70)  # its header
    put_journal(path, before)
    with Store.open(path, writable=True) as store:
        assert (store.opening.turns_replayed, store.opening.journal) == (1, ())
        assert ledger(store) == token_ids(0, 256) + token_ids(256, 5, 3)


def test_a_version_that_is_made_while_turns_wait_does_not_take_their_place(path: Path) -> None:
    """As quantize, or a repair that heals, makes one of an earlier version."""
    base = lose_base(path, 9)
    with Store.open(path, writable=True) as store:
        sleep(store, 100, seed=3)
        assert store.has_turns(URI)
        with pytest.raises(errors.JournalWaits):
            store.open_session(URI)
    (path.parent / base.name).rename(base)
    with Store.open(path, writable=True) as store:
        assert [row.version for row in store.versions(URI)] == [1, 2, 3]
        assert ledger(store) == token_ids(0, 309)


def test_turns_that_find_no_room_for_their_version_wait_and_their_session_is_not_used(path: Path) -> None:
    """One that has nothing but turns, too: `there is no such session` would be wrong. It comes back with the room."""
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5), turn(store, 5, uri=OTHER_URI)])

    with (
        mock.patch("torpor.memvid.recovery.replaying.write_version", side_effect=errors.NoSpace("No room.")),
        Store.open(path, writable=True) as store,
    ):
        assert [finding.code for finding in store.opening.journal] == ["journal_waits"] * 2
        with pytest.raises(errors.JournalWaits, match="could not be made a version: No room"):
            store.require_session(OTHER_URI)
        with pytest.raises(errors.JournalWaits):
            store.open_session(URI)
        with pytest.raises(errors.JournalWaits):
            store.acknowledge([turn(store, 6)])
        store.open_session(URI, 1).close()
    with Store.open(path, writable=True) as store:
        assert ledger(store) == token_ids(0, 305)


@pytest.mark.parametrize("how", ["delete", "forget"])
def test_turns_of_another_session_outlive_the_bundle_that_they_stand_behind(path: Path, how: str) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([dataclasses.replace(turn(store, 5), uri=OTHER_URI, newest=None)])
        if how == "delete":
            store.delete_session(URI)
        else:
            assert store.forget(URI).problems == ()
        assert store.acknowledged() == []
        assert ledger(store, OTHER_URI) == token_ids(0, 305)
        assert store.find_session(URI) is None
        assert store.verify(deep=True).ok
        with making.reopened(store, anew=True) as again:
            assert ledger(again, OTHER_URI) == token_ids(0, 305)


@pytest.mark.parametrize(
    "remove", [Store.delete_session, Store.forget, Store.strip, lambda store, uri: store.delete_version(uri, 1)]
)
def test_what_turns_stand_behind_does_not_go_while_their_session_sleeps(
    path: Path, remove: Callable[[Store, SessionUri], object]
) -> None:
    """Their version would have the larger number, and hide what the sleep has beyond them."""
    with Store.open(path, writable=True) as store:
        store.acknowledge([dataclasses.replace(turn(store, 5), uri=OTHER_URI, newest=None)])

        def beside() -> dict[str, Any]:
            with ThreadPoolExecutor(1) as pool, pytest.raises(errors.StoreBusy):
                pool.submit(remove, store, URI).result(60)
            return {}

        assert making.write(store, making.drafts(320), 320, uri=OTHER_URI, session=beside).version == 1
        remove(store, URI)
        assert [row.block_tokens for row in store.versions(OTHER_URI)] == [320]


@pytest.mark.parametrize("with_index", [True, False])
def test_turns_whose_version_is_gone_wait_until_it_is_put_back(path: Path, with_index: bool) -> None:
    """Without the index nothing but the journal tells of the session."""
    base = lose_base(path, 5, of_other=4)
    for is_repaired in (False, True):
        if not with_index:
            making.remove_index(path)
        with Store.open(path, writable=True) as store:
            assert [finding.code for finding in store.opening.journal] == ["journal_waits"]
            assert "journal_waits" in {finding.code for finding in store.verify(deep=False).findings}
            assert ("is missing. Put it back" in store.opening.journal[0].message) == with_index
            assert ledger(store, OTHER_URI) == token_ids(0, 4)
            with pytest.raises(errors.JournalWaits, match="fork an earlier version" if with_index else None):
                store.open_session(URI)
            if not is_repaired:
                store.repair()
    (path.parent / base.name).rename(base)
    with Store.open(path, writable=True) as store:
        store.repair()
    with Store.open(path, writable=True) as store:
        assert store.opening.journal == ()
        assert ledger(store) == token_ids(0, 305)
        assert store.verify(deep=True).findings == ()


def test_a_session_whose_turns_wait_can_be_deleted(path: Path) -> None:
    lose_base(path, 5)
    with Store.open(path, writable=True) as store:
        store.delete_session(URI)
    with Store.open(path, writable=True) as store:
        assert store.opening.journal == ()
        assert not store.can_be_deleted(URI)


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("too_many", "fits"),
    [
        (bytes(MAX_SESSION_MAP_BYTES - 80), bytes(MAX_SESSION_MAP_BYTES - 500)),
        ([0] * (MAX_NODES - 200), [0] * (MAX_NODES - 400)),
    ],
    ids=["bytes", "values"],
)
def test_a_session_map_that_no_version_could_have_is_not_acknowledged(path: Path, too_many: Any, fits: Any) -> None:
    with Store.open(path, writable=True) as store:
        record = turn(store, 5)
        with pytest.raises(errors.LimitExceeded):
            store.acknowledge([dataclasses.replace(record, session={**record.session, "more": too_many})])
        store.acknowledge([dataclasses.replace(record, session={**record.session, "more": fits})])
    with Store.open(path, writable=True) as store:
        assert store.opening.journal == ()
        assert ledger(store) == token_ids(0, 305)


def test_after_a_failed_flush_while_turns_are_replayed_the_store_is_shut(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5)])

    with (
        mock.patch("torpor.memvid.recovery.replaying.write_version", side_effect=errors.DurabilityLost("flush")),
        pytest.raises(errors.DurabilityLost),
    ):
        Store.open(path, writable=True)
    with Store.open(path, writable=True) as store:  # nothing keeps its lock
        assert ledger(store) == token_ids(0, 305)


def test_the_room_to_be_kept_free_refuses_the_room_of_a_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.memvid.writing.core.free_bytes_of", lambda *_: 1 << 20)
    with Store.open(path, writable=True, budget=Budget(min_free_bytes=1 << 19)) as store:
        store.make_room_to_acknowledge(URI, 1000)
        with pytest.raises(errors.BudgetExceeded):
            store.make_room_to_acknowledge(OTHER_URI, 1 << 20)
        store.acknowledge([turn(store, 5)])
    with Store.open(path, writable=True, budget=Budget(max_store_bytes=1, max_bytes_per_day=1)) as store:
        store.make_room_to_acknowledge(URI, 1000)
        store.acknowledge([turn(store, 5)])


def test_a_session_that_has_turns_alone_is_told_to_a_reader(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5, uri=OTHER_URI)])
        before = journal_file(path).read_bytes()
        with Store.open(path, writable=False) as reader:
            assert reader.acknowledged() == [OTHER_URI]
            with pytest.raises(errors.SessionNotFound, match="in the journal alone"):
                reader.open_session(OTHER_URI)
        assert journal_file(path).read_bytes() == before


@pytest.mark.parametrize("of", [URI, OTHER_URI])
def test_a_journal_that_is_put_back_while_the_store_is_open_is_told_and_loses_no_turn(
    path: Path, of: SessionUri
) -> None:
    """of: whose turns are acknowledged while it is missing, and after it is back."""
    with Store.open(path, writable=True) as store:
        sleep(store, 300, uri=OTHER_URI, seed=1)
        store.acknowledge([turn(store, 7)])
    away = journal_file(path).rename(path.parent / "away")
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 3, uri=of, seed=int(of != URI))])
        away.rename(journal_file(path))
        assert [(one.code, one.path) for one in store.verify(deep=False).findings] == [
            ("journal_waits", str(journal_file(path)))
        ]
        store.acknowledge([turn(store, 4, uri=of, seed=int(of != URI))])
        (finding,) = store.verify(deep=False).findings
        assert finding.path == f"{journal_file(path)}.2"
    with Store.open(path, writable=True) as store:
        assert store.opening.turns_replayed == 2
        assert store.opening.journal == store.verify(deep=False).findings == ()
        assert ledger(store) == token_ids(0, 307)
        versions = [ledger(store, of, row.version) for row in store.versions(of)]
        assert any(len(each) == 4 * 304 for each in versions)
    assert not list(path.glob("journal/*"))


def test_a_journal_that_is_kept_waits_for_the_turns_of_the_other_one(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 7)])
    away = journal_file(path).rename(path.parent / "away")
    base = lose_base(path, 3)
    away.rename(journal_file(path).with_suffix(".mvj.2"))
    with Store.open(path, writable=True) as store:
        assert [one.path for one in store.opening.journal] == [str(journal_file(path)), f"{journal_file(path)}.2"]
        assert {one.code for one in store.opening.journal} == {"journal_waits"}
    (path.parent / base.name).rename(base)
    with Store.open(path, writable=True) as store:
        assert store.opening.turns_replayed == 2
        assert ledger(store) == token_ids(0, 307)


def test_a_journal_that_the_disk_does_not_give_shuts_the_store_to_writers_alone(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.acknowledge([turn(store, 5)])
    with making.unread(journal_file(path), "pread", errno.EIO):
        with pytest.raises(errors.StoreIoError, match="Put the disk right"):
            Store.open(path, writable=True)
        with Store.open(path, writable=False) as reader:
            assert ledger(reader) == token_ids(0, 300)
            assert [finding.code for finding in reader.verify(deep=False).findings] == [errors.StoreIoError.code]
    with Store.open(path, writable=True) as store:
        assert ledger(store) == token_ids(0, 305)
