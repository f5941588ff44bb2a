"""The journal's file: what is acknowledged counts through every failure, and what is refused never does."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import errors
from torpor.memvid.disk import durable
from torpor.memvid.folder import journal as module
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.journal import TURNS_FILE, Journal
from torpor.memvid.format.journal import HEADER_BYTES, VOID, JournalRecord, size_of
from torpor.memvid.format.manifest import UNREAD
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.store_making import IDENTITY, flip, put, refusing, token_ids

ONE, TWO, THREE = (SessionUri("work", name) for name in ("first", "other", "third"))
SEEDS = {ONE: 1, TWO: 2, THREE: 3}
BASE = bytes(range(32)).hex()


@pytest.fixture
def journal(folder: StoreFolder) -> Iterator[Journal]:
    opened = Journal.load(folder, writable=True)
    yield opened
    opened.close()


def turn(uri: SessionUri, count: int, base: str | None = None) -> JournalRecord:
    session = {UNREAD: {"tokens": token_ids(0, count, SEEDS[uri])}}
    return JournalRecord(uri, session, None, base, 0, IDENTITY if base is None else None)


def file_of(folder: StoreFolder) -> Path:
    return Path(folder.path) / "journal" / TURNS_FILE


def replace(folder: StoreFolder, data: bytes) -> None:
    """Another file with this content has the journal's name."""
    new = Path(folder.path) / "new"
    put(new, data)
    new.rename(file_of(folder))


def reserve(journal: Journal, record: JournalRecord) -> None:
    journal.reserve(record.uri, len(record.encode()), lambda _: None)


def look(folder: StoreFolder) -> tuple[dict[SessionUri, JournalRecord | None], list[str]]:
    """What counts by the file alone, and what of it is told."""
    with contextlib.closing(Journal.load(folder, writable=False)) as again:
        return {uri: again.find(uri) for uri in again.uris()}, [finding.message for finding in again.findings]


def read_again(folder: StoreFolder) -> dict[SessionUri, JournalRecord | None]:
    return look(folder)[0]


def findings(folder: StoreFolder) -> list[str]:
    return look(folder)[1]


class Faults:
    """Lets calls of `durable` fail. fails: the number of a call of this kind and the error, from which on it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, tuple[int, Exception]] = {}
        self.torn = 0
        for name in ("write_at", "sync_file", "sync_folder", "remove", "move"):
            self._watch(monkeypatch, name, getattr(durable, name))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, real: Callable[..., Any]) -> None:
        def call(*arguments: Any) -> Any:
            if name == "write_at" and not arguments[2]:
                return None  # nothing to write is no call of the system
            self.calls.append(name)
            number, error = self.fails.get(name, (0, None))
            if error is not None and self.calls.count(name) > number:
                if name == "write_at" and self.torn:
                    fd, offset, data, path = arguments
                    real(fd, offset, data[: self.torn], path)
                raise error
            return real(*arguments)

        monkeypatch.setattr(durable, name, call)

    def fail(self, name: str, error: Exception, after: int = 0) -> None:
        self.calls.clear()
        self.fails = {name: (after, error)}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


# --- what counts


def test_the_last_record_of_a_session_counts(folder: StoreFolder, journal: Journal) -> None:
    """Also of two that wait together."""
    journal.append([turn(ONE, 3), turn(TWO, 4, BASE)])
    journal.append([turn(ONE, 5)])
    assert read_again(folder) == {ONE: turn(ONE, 5), TWO: turn(TWO, 4, BASE)}
    assert journal.bases() == {TWO: BASE}
    assert journal.find(THREE) is None
    journal.append([turn(ONE, 6), turn(ONE, 3)])
    assert read_again(folder)[ONE] == turn(ONE, 3)
    assert findings(folder) == []


def test_records_that_wait_together_are_flushed_once(journal: Journal, faults: Faults) -> None:
    journal.append([turn(ONE, 1)])
    faults.calls.clear()
    journal.append([turn(uri, 4) for uri in (ONE, TWO, THREE)])
    assert faults.calls == ["write_at", "sync_file"]


def test_nothing_is_asked_of_a_session_while_records_are_flushed(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append([turn(ONE, 1)])
    flushing, may_end, real = threading.Event(), threading.Event(), durable.sync_file

    def slow(fd: int, path: str) -> None:
        flushing.set()
        may_end.wait()
        real(fd, path)

    monkeypatch.setattr(durable, "sync_file", slow)
    writer = threading.Thread(target=journal.append, args=([turn(TWO, 1)],))
    asker = threading.Thread(target=journal.has, args=(ONE,))
    writer.start()
    flushing.wait()
    asker.start()
    asker.join(20)
    was_answered = not asker.is_alive()
    may_end.set()
    writer.join()
    asker.join()
    assert was_answered


# --- covered, deleted, forgotten


def test_what_a_version_covers_is_void_in_the_file_and_so_is_what_came_before(
    folder: StoreFolder, journal: Journal
) -> None:
    journal.append([turn(ONE, 3), turn(TWO, 4)])
    journal.append([turn(ONE, 5)])
    journal.cover(ONE)
    assert read_again(folder) == {TWO: turn(TWO, 4)}
    data = bytearray(file_of(folder).read_bytes())
    last = HEADER_BYTES + sum(size_of(len(one.encode())) for one in (turn(ONE, 3), turn(TWO, 4)))
    data[last + 60] ^= 1
    file_of(folder).write_bytes(data)
    assert read_again(folder) == {TWO: turn(TWO, 4)}  # an earlier turn does not come back in its place


@pytest.mark.parametrize("read_again", [False, True])
def test_each_record_of_a_session_is_void_once_it_is_covered(folder: StoreFolder, read_again: bool) -> None:
    journal = Journal.load(folder, writable=True)
    journal.append([turn(ONE, 3), turn(ONE, 4), turn(TWO, 2)])
    journal.append([turn(ONE, 5)])
    if read_again:
        journal.close()
        journal = Journal.load(folder, writable=True)
    journal.cover(ONE)
    journal.close()
    assert file_of(folder).read_bytes().count(VOID) == 3


def test_earlier_records_that_a_crash_left_are_void_after_the_next_opening(folder: StoreFolder) -> None:
    journal = Journal.load(folder, writable=True)
    journal.append([turn(ONE, 3), turn(TWO, 4)])
    journal.append([turn(ONE, 5)])
    journal.cover(ONE)
    journal.close()
    data = bytearray(file_of(folder).read_bytes())
    data[HEADER_BYTES : HEADER_BYTES + 4] = b"TURN"
    file_of(folder).write_bytes(data)
    journal = Journal.load(folder, writable=True)
    journal.settle()
    journal.close()
    assert file_of(folder).read_bytes()[HEADER_BYTES : HEADER_BYTES + 4] == VOID


@pytest.mark.parametrize("error", [errors.NoSpace("full"), errors.StoreIoError("broken")])
def test_what_the_file_does_not_take_it_takes_with_the_next_flush(
    folder: StoreFolder, journal: Journal, faults: Faults, error: Exception
) -> None:
    journal.append([turn(ONE, 3)])
    faults.fail("write_at", error)
    journal.cover(ONE)
    assert not journal.has(ONE)
    assert read_again(folder) == {ONE: turn(ONE, 3)}
    faults.fails.clear()
    journal.append([turn(TWO, 4)])
    assert read_again(folder) == {TWO: turn(TWO, 4)}


def test_a_deleted_session_is_void_durably(folder: StoreFolder, journal: Journal, faults: Faults) -> None:
    journal.append([turn(ONE, 3), turn(TWO, 4)])
    faults.calls.clear()
    journal.drop(ONE)
    assert faults.calls[-1] == "sync_file"
    assert read_again(folder) == {TWO: turn(TWO, 4)}
    journal.drop(TWO)
    assert faults.calls[-2:] == ["remove", "sync_folder"]
    assert not file_of(folder).exists()
    journal.drop(TWO)


@pytest.mark.parametrize(("others", "call"), [([TWO], "write_at"), ([], "remove")])
def test_a_delete_that_fails_has_changed_nothing(
    folder: StoreFolder, journal: Journal, faults: Faults, others: list[SessionUri], call: str
) -> None:
    journal.append([turn(uri, 3) for uri in (ONE, *others)])
    journal.waiting[ONE] = "No room."
    faults.fail(call, errors.StoreIoError("broken"))
    with pytest.raises(errors.StoreIoError):
        journal.drop(ONE)
    assert journal.find(ONE) == turn(ONE, 3)
    assert set(read_again(folder)) == {ONE, *others}
    with pytest.raises(errors.JournalWaits):
        journal.require_settled(ONE)


def test_a_file_in_which_nothing_counts_goes_unless_room_is_reserved(folder: StoreFolder, journal: Journal) -> None:
    journal.append([turn(ONE, 3)])
    reserve(journal, turn(TWO, 4))
    journal.drop(ONE)
    assert file_of(folder).exists()
    journal.cover(TWO)
    journal.close(tidying=True)
    assert not file_of(folder).exists()


def test_a_forgotten_session_leaves_no_byte(folder: StoreFolder, journal: Journal) -> None:
    journal.append([turn(ONE, 300), turn(TWO, 40)])
    journal.append([turn(ONE, 500)])
    journal.cover(ONE)
    reserve(journal, turn(THREE, 4))
    journal.erase(ONE)
    data = file_of(folder).read_bytes()
    assert b"first" not in data
    assert token_ids(100, 4, 1) not in data
    assert read_again(folder) == {TWO: turn(TWO, 40)}
    journal.erase(TWO)
    assert b"other" not in file_of(folder).read_bytes()  # it stays, with the room for the third
    journal.append([turn(THREE, 4)])
    journal.erase(THREE)
    assert not file_of(folder).exists()
    journal.erase(THREE)


# --- room


def full_disk(monkeypatch: pytest.MonkeyPatch, folder: StoreFolder) -> None:
    """No file gets longer, and no new one gets a byte."""
    write_at = durable.write_at

    def write(fd: int, offset: int, data: bytes, path: str) -> None:
        if offset + len(data) > os.fstat(fd).st_size:
            write_at(fd, offset, data[: len(data) // 2], path)
            raise errors.NoSpace("The disk is full.")
        write_at(fd, offset, data, path)

    monkeypatch.setattr(durable, "write_at", write)
    monkeypatch.setattr(durable.TempFile, "append", refusing(errors.NoSpace("The disk is full.")))


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_full_disk_refuses_the_room_and_not_the_record(
    folder: StoreFolder, journal: Journal, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    large = turn(TWO, 30_000)
    if is_begun:
        journal.append([turn(ONE, 3)])
        reserve(journal, turn(ONE, 9_000))
    else:
        reserve(journal, turn(ONE, 9_000))
    before = file_of(folder).stat().st_size
    full_disk(monkeypatch, folder)
    with pytest.raises(errors.NoSpace):
        reserve(journal, large)
    assert file_of(folder).stat().st_size == before
    journal.append([turn(ONE, 9_000)])
    assert read_again(folder) == {ONE: turn(ONE, 9_000)}
    assert findings(folder) == []
    with pytest.raises(errors.NoSpace):
        journal.append([large])
    assert read_again(folder) == {ONE: turn(ONE, 9_000)}


def test_room_is_asked_for_before_it_is_taken_and_only_then(journal: Journal, folder: StoreFolder) -> None:
    asked: list[int] = []
    payload = len(turn(ONE, 3).encode())
    journal.reserve(ONE, payload, asked.append)
    assert asked == [file_of(folder).stat().st_size]
    journal.reserve(ONE, payload, asked.append)
    assert len(asked) == 1
    before = file_of(folder).stat().st_size
    journal.reserve(ONE, 4 * before, asked.append)
    assert before + asked[1] == file_of(folder).stat().st_size
    refuse = refusing(errors.BudgetExceeded("The disk must keep some free."))
    size = file_of(folder).stat().st_size
    with pytest.raises(errors.BudgetExceeded):
        journal.reserve(TWO, 9 * size, refuse)
    journal.reserve(TWO, payload, refuse)
    assert file_of(folder).stat().st_size == size


def test_a_record_above_its_limit_is_refused_before_anything_is_taken(journal: Journal, folder: StoreFolder) -> None:
    with pytest.raises(errors.LimitExceeded, match="Put it to sleep"):
        journal.reserve(ONE, module.MAX_JOURNAL_RECORD_BYTES + 1, lambda _: None)
    assert not file_of(folder).exists()


def test_a_journal_above_its_limit_is_refused(
    journal: Journal, folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_JOURNAL_BYTES", 1 << 18)
    for _ in range(4):  # what is void does not count
        journal.append([turn(ONE, 7_000), turn(TWO, 7_000)])
    with pytest.raises(errors.LimitExceeded, match="Put sessions to sleep"):
        journal.append([turn(THREE, 60_000)])
    assert file_of(folder).stat().st_size <= 1 << 18
    assert set(read_again(folder)) == {ONE, TWO}


def test_a_delete_that_fails_leaves_what_was_reserved(
    folder: StoreFolder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append([turn(ONE, 3), turn(TWO, 3)])
    reserve(journal, turn(ONE, 20_000))
    with monkeypatch.context() as patch:
        Faults(patch).fail("write_at", errors.StoreIoError("broken"))
        with pytest.raises(errors.StoreIoError):
            journal.drop(ONE)
    full_disk(monkeypatch, folder)
    with pytest.raises(errors.NoSpace):
        journal.append([turn(TWO, 15_000)])
    journal.append([turn(ONE, 20_000)])
    assert read_again(folder) == {ONE: turn(ONE, 20_000), TWO: turn(TWO, 3)}


def test_a_record_gives_back_the_room_that_it_did_not_need(
    journal: Journal, folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(journal, turn(ONE, 15_000))
    journal.append([turn(ONE, 4)])
    full_disk(monkeypatch, folder)
    journal.append([turn(TWO, 14_000)])


def test_a_session_whose_turns_wait_takes_no_more(journal: Journal) -> None:
    journal.append([turn(ONE, 3)])
    journal.waiting[ONE] = "No room."
    with pytest.raises(errors.JournalWaits):
        reserve(journal, turn(ONE, 4))
    with pytest.raises(errors.JournalWaits):
        journal.append([turn(TWO, 4), turn(ONE, 4)])
    assert not journal.has(TWO)
    journal.cover(ONE)
    assert journal.has(ONE)
    assert journal.digest_of(ONE) is None
    journal.drop(ONE)
    journal.append([turn(ONE, 4)])


@pytest.mark.parametrize("meanwhile", ["another session's turn", "a forget"])
def test_what_is_reserved_for_a_session_is_not_used_up_by_others(
    folder: StoreFolder, journal: Journal, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    journal.append([turn(ONE, 3), turn(TWO, 3)])
    reserve(journal, turn(THREE, 15_000))
    if meanwhile == "a forget":
        journal.erase(ONE)
    else:
        journal.append([turn(TWO, 10_000)])
    full_disk(monkeypatch, folder)
    journal.append([turn(THREE, 15_000)])
    assert read_again(folder)[THREE] == turn(THREE, 15_000)


@pytest.mark.parametrize("spare", [0, 8, 16])
def test_zeros_stand_behind_the_last_record_however_little_room_there_is(
    folder: StoreFolder, journal: Journal, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    monkeypatch.setattr(module, "_STEP_BYTES", 8)
    record = turn(ONE, 4)
    journal.reserve(ONE, len(record.encode()) - spare, lambda _: None)
    journal.append([record])
    assert file_of(folder).read_bytes().endswith(bytes(8))
    journal.append([turn(TWO, 4)])
    assert findings(folder) == []


# --- a write that fails


@pytest.mark.parametrize("torn", [0, 3, 100])
def test_a_record_that_is_refused_does_not_count(
    folder: StoreFolder, journal: Journal, faults: Faults, torn: int
) -> None:
    journal.append([turn(ONE, 3)])
    faults.torn = torn
    faults.fail("write_at", errors.NoSpace("full"))
    with pytest.raises(errors.NoSpace):
        journal.append([turn(ONE, 50), turn(TWO, 4)])
    faults.fails.clear()
    assert read_again(folder) == {ONE: turn(ONE, 3)}
    assert not journal.has(TWO)
    journal.append([turn(TWO, 5)])
    assert read_again(folder) == {ONE: turn(ONE, 3), TWO: turn(TWO, 5)}
    assert findings(folder) == []


def test_a_whole_record_that_is_refused_is_taken_back_durably(
    folder: StoreFolder, journal: Journal, faults: Faults
) -> None:
    """The record is written, and the mark of another one is not: the turn is refused."""
    journal.append([turn(ONE, 3), turn(TWO, 3)])
    faults.fail("write_at", errors.NoSpace("full"))
    journal.cover(ONE)

    def fail_for_marks(
        fd: int, offset: int, data: bytes, path: str, real: Callable[..., None] = durable.write_at
    ) -> None:
        if data == VOID:
            raise errors.NoSpace("full")
        real(fd, offset, data, path)

    faults.fails.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "write_at", fail_for_marks)
        faults.calls.clear()
        with pytest.raises(errors.NoSpace):
            journal.append([turn(TWO, 9)])
    assert faults.calls == ["write_at", "write_at", "sync_file"]  # the record, zeros, their flush
    assert read_again(folder)[TWO] == turn(TWO, 3)
    journal.append([turn(TWO, 10)])
    assert read_again(folder) == {TWO: turn(TWO, 10)}


@pytest.mark.parametrize("call", ["write_at", "sync_file"])
def test_a_record_that_is_refused_and_cannot_be_taken_back_ends_writing(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    journal.append([turn(ONE, 3), turn(TWO, 3)])
    journal._void.append(journal._live.pop(ONE))
    real = durable.write_at

    def write(fd: int, offset: int, data: bytes, path: str) -> None:
        if data == VOID or (call == "write_at" and not any(data)):
            raise errors.NoSpace("full")
        real(fd, offset, data, path)

    monkeypatch.setattr(durable, "write_at", write)
    if call == "sync_file":
        monkeypatch.setattr(durable, "sync_file", refusing(errors.DurabilityLost("flush")))
    with pytest.raises(errors.DurabilityLost, match="could not be taken back"):
        journal.append([turn(TWO, 9)])


def test_after_a_torn_record_that_cannot_be_taken_back_a_new_file_is_written(
    folder: StoreFolder, journal: Journal, faults: Faults
) -> None:
    journal.append([turn(ONE, 3)])
    faults.torn = 60
    faults.fail("write_at", errors.StoreIoError("broken"))  # the zeros too
    with pytest.raises(errors.StoreIoError):
        journal.append([turn(TWO, 50)])
    faults.fails.clear()
    faults.calls.clear()
    journal.append([turn(TWO, 5)])
    assert "write_at" in faults.calls
    assert "sync_folder" in faults.calls
    assert read_again(folder) == {ONE: turn(ONE, 3), TWO: turn(TWO, 5)}
    assert findings(folder) == []


def test_a_flush_that_fails_ends_writing(journal: Journal, faults: Faults) -> None:
    journal.append([turn(ONE, 3)])
    for end in (lambda: journal.append([turn(ONE, 4)]), lambda: journal.cover(ONE), lambda: journal.drop(ONE)):
        faults.fail("sync_file", errors.DurabilityLost("flush"))
        faults.fails["sync_folder"] = faults.fails["sync_file"]
        with pytest.raises(errors.DurabilityLost):
            end()


# --- a new file


def test_a_file_that_is_mostly_void_is_written_anew(folder: StoreFolder, journal: Journal) -> None:
    for count in range(200):
        journal.append([turn(ONE, 3_000 + count), turn(TWO, 3)])
    assert file_of(folder).stat().st_size <= module._SMALL_BYTES
    assert read_again(folder) == {ONE: turn(ONE, 3_199), TWO: turn(TWO, 3)}
    assert findings(folder) == []


def test_marks_that_waited_are_not_written_into_a_new_file(
    folder: StoreFolder, journal: Journal, faults: Faults
) -> None:
    journal.append([turn(ONE, 3)])
    journal.append([turn(TWO, 3)])
    faults.fail("write_at", errors.NoSpace("full"))
    journal.cover(ONE)
    faults.fails.clear()
    fd = journal._fd
    journal.erase(THREE)
    journal.append([turn(THREE, 4)])
    assert read_again(folder) == {TWO: turn(TWO, 3), THREE: turn(THREE, 4)}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("fails", ["temporary file", "descriptor", "rename", "flush of the folder"])
def test_while_the_new_file_has_no_name_the_old_one_counts(
    folder: StoreFolder, journal: Journal, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    journal.append([turn(ONE, 3), turn(TWO, 3)])
    owner, name, error = {
        "temporary file": (durable.TempFile, "append", errors.NoSpace("full")),
        "descriptor": (os, "dup", OSError(errno.EMFILE, "too many")),
        "rename": (os, "rename", OSError(errno.EMFILE, "too many")),
        "flush of the folder": (durable, "sync_folder", errors.DurabilityLost("flush")),
    }[fails]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refusing(error))
        with pytest.raises((errors.StoreIoError, errors.NoSpace, errors.DurabilityLost)):
            journal.erase(ONE)
    assert TWO in read_again(folder)
    assert not list(Path(folder.path).rglob("*.tmp"))
    if fails != "flush of the folder":  # after which nothing more is written
        journal.append([turn(TWO, 9)])
        assert read_again(folder)[TWO] == turn(TWO, 9)


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("what", ["removed", "moved", "an earlier one in its place"])
def test_a_file_that_has_left_its_place_is_written_anew_before_the_next_record(
    folder: StoreFolder, journal: Journal, tmp_path: Path, what: str, is_folder: bool
) -> None:
    """is_folder: its folder has left its place, and it with that."""
    place = file_of(folder).parent if is_folder else file_of(folder)
    journal.append([turn(ONE, 2), turn(TWO, 4)])
    (shutil.copytree if is_folder else shutil.copy2)(place, tmp_path / "earlier")
    journal.append([turn(ONE, 3)])
    moved = place.rename(tmp_path / "moved")
    if what == "removed":
        shutil.rmtree(moved) if is_folder else moved.unlink()
    elif what != "moved":
        (tmp_path / "earlier").rename(place)
    for count in (1, 5):
        journal.append([turn(THREE, count)])
        assert read_again(folder) == {ONE: turn(ONE, 3), TWO: turn(TWO, 4), THREE: turn(THREE, count)}


@pytest.mark.parametrize("ends", ["append", "reserve", "close", "none"])
def test_a_journal_that_is_put_back_while_another_is_open_is_kept_and_taken_up_behind_it(
    folder: StoreFolder, tmp_path: Path, ends: str
) -> None:
    with contextlib.closing(Journal.load(folder, writable=True)) as earlier:
        earlier.append([turn(ONE, 3), turn(TWO, 4)])
    file_of(folder).rename(tmp_path / "away")
    journal = Journal.load(folder, writable=True)
    if ends != "none":
        journal.append([turn(ONE, 7)])
    (tmp_path / "away").rename(file_of(folder))
    assert journal.strange() == [TURNS_FILE]
    if ends == "append":
        journal.append([turn(ONE, 8)])
    elif ends == "reserve":
        journal.append([turn(ONE, 8)])
        reserve(journal, turn(THREE, 9))
    journal.close(tidying=True)
    found = {ONE: turn(ONE, 3), TWO: turn(TWO, 4)}
    if ends != "none":
        assert read_again(folder) == {ONE: turn(ONE, 7 if ends == "close" else 8)}
        journal = Journal.load(folder, writable=True)
        assert not journal.take_up()  # while something counts
        journal.cover(ONE)
        journal.settle()
        assert journal.take_up()
        journal.close()
    assert read_again(folder) == found


def test_a_new_file_is_none_of_the_others_before_it_is_the_open_one(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    asking = threading.Thread(target=lambda: told.append(journal.strange()))
    real = durable.TempFile.publish

    def publish(self: durable.TempFile, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        asking.start()
        asking.join(0.2)  # it waits

    monkeypatch.setattr(durable.TempFile, "publish", publish)
    journal.append([turn(ONE, 3)])
    asking.join()
    assert told == [[]]


@pytest.mark.parametrize("how", ["drop", "cover", "settle"])
def test_what_counts_no_more_does_so_in_a_copy_that_took_the_place_of_the_file(
    folder: StoreFolder, journal: Journal, how: str
) -> None:
    journal.append([turn(ONE, 3), turn(TWO, 4)])
    replace(folder, file_of(folder).read_bytes())
    assert journal.strange() == [TURNS_FILE]
    if how == "settle":
        journal.settle()
    else:
        getattr(journal, how)(ONE)
    assert journal.strange() == []
    assert read_again(folder) == {TWO: turn(TWO, 4)} | ({ONE: turn(ONE, 3)} if how == "settle" else {})
    journal.append([turn(THREE, 1)])
    assert THREE in read_again(folder)


def test_of_a_copy_that_has_new_turns_too_those_stay_void_that_are(folder: StoreFolder) -> None:
    with contextlib.closing(Journal.load(folder, writable=True)) as journal:
        journal.append([turn(ONE, 3), turn(TWO, 4)])
        earlier = file_of(folder).read_bytes()
        journal.append([turn(THREE, 5)])
        later = file_of(folder).read_bytes()
    replace(folder, earlier)
    with contextlib.closing(Journal.load(folder, writable=True)) as journal:
        journal.cover(ONE)
        replace(folder, later)
        journal.append([turn(TWO, 6)])
        assert journal.strange() == [f"{TURNS_FILE}.2"]
        with Journal.load(folder, writable=False, name=f"{TURNS_FILE}.2") as kept:
            assert THREE in kept.uris()
            assert ONE not in kept.uris()


@pytest.mark.parametrize("how", ["drop", "erase"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_deleted_session_goes_from_every_journal(
    folder: StoreFolder, journal: Journal, how: str, is_kept: bool
) -> None:
    with contextlib.closing(Journal.load(folder, writable=True)) as earlier:
        earlier.append([turn(ONE, 3), turn(TWO, 4)])
    if is_kept:
        journal.append([turn(THREE, 5)])
    assert journal.strange() == [f"{TURNS_FILE}.2" if is_kept else TURNS_FILE]
    getattr(journal, how)(ONE)
    with Journal.load(folder, writable=False, name=journal.strange()[0]) as other:
        assert other.uris() == [TWO]
    getattr(journal, how)(TWO)
    assert journal.strange() == []


def test_a_file_that_was_moved_away_brings_back_nothing_that_was_deleted_meanwhile(
    folder: StoreFolder, journal: Journal, tmp_path: Path
) -> None:
    for others in ([turn(TWO, 4)], []):
        journal.append([turn(ONE, 3), *others])
        moved = file_of(folder).rename(tmp_path / "moved")
        journal.drop(ONE)
        moved.rename(file_of(folder))
        assert ONE not in read_again(folder)
        journal.drop(TWO)


def test_a_delete_that_cannot_write_the_file_anew_has_changed_nothing(
    folder: StoreFolder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append([turn(ONE, 3), turn(TWO, 4)])
    file_of(folder).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(durable.TempFile, "append", refusing(errors.NoSpace("full")))
        with pytest.raises(errors.NoSpace):
            journal.drop(ONE)
        journal.cover(TWO)  # a version is there: it does not fail
    journal.append([turn(THREE, 5)])
    assert read_again(folder) == {ONE: turn(ONE, 3), THREE: turn(THREE, 5)}


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_record_that_rots_in_an_open_store_costs_no_other_and_is_told_at_the_next_opening(
    folder: StoreFolder, journal: Journal, zeroed: bool
) -> None:
    journal.append([turn(TWO, 4), turn(ONE, 3)])
    start = HEADER_BYTES + size_of(len(turn(TWO, 4).encode()))
    end = start + size_of(len(turn(ONE, 3).encode()))
    data = bytearray(file_of(folder).read_bytes())
    data[start:end] = bytes(end - start) if zeroed else data[start : end - 9] + b"\xff" * 9
    with file_of(folder).open("r+b") as file:
        file.write(data)
    with pytest.raises(errors.CorruptJournal):
        journal.find(ONE)
    journal.erase(THREE)  # which writes it anew
    assert journal.has(ONE)
    with pytest.raises(errors.CorruptJournal):
        journal.find(ONE)
    assert read_again(folder) == {TWO: turn(TWO, 4)}
    assert len(findings(folder)) == 1
    journal.append([turn(ONE, 5)])
    assert read_again(folder) == {TWO: turn(TWO, 4), ONE: turn(ONE, 5)}


def test_a_file_that_is_written_anew_keeps_the_newest_sound_record_before_one_that_rots(
    folder: StoreFolder, journal: Journal
) -> None:
    at = HEADER_BYTES
    for number, record in enumerate([turn(ONE, 2), turn(ONE, 3), turn(ONE, 4), turn(ONE, 5), turn(TWO, 4)]):
        journal.append([record])
        if number in (2, 3):
            flip(file_of(folder), at + 40)
        at += size_of(len(record.encode()))
    assert read_again(folder) == {ONE: turn(ONE, 3), TWO: turn(TWO, 4)}
    for _ in range(2):
        journal.erase(THREE)  # which writes it anew
        assert read_again(folder) == {ONE: turn(ONE, 3), TWO: turn(TWO, 4)}
        assert len(findings(folder)) == 1
    journal.cover(ONE)
    assert read_again(folder) == {TWO: turn(TWO, 4)}


# --- damage


HISTORY = (turn(ONE, 3), turn(TWO, 4, BASE), turn(ONE, 5), turn(THREE, 2), turn(TWO, 6, BASE))


def history(folder: StoreFolder) -> tuple[bytes, list[int]]:
    """A journal with this history, without most of its room, and where its records begin and end."""
    journal = Journal.load(folder, writable=True)
    for record in HISTORY:
        journal.append([record])
    journal.close()
    ends = [HEADER_BYTES]
    for record in HISTORY:
        ends.append(ends[-1] + size_of(len(record.encode())))
    return file_of(folder).read_bytes()[: ends[-1] + 24], ends


def last_of(numbers: list[int]) -> dict[SessionUri, JournalRecord]:
    return {HISTORY[number].uri: HISTORY[number] for number in numbers}


@pytest.mark.one_in(1)
def test_a_flipped_bit_in_any_byte_of_a_journal_costs_one_record_at_most_and_is_told(folder: StoreFolder) -> None:
    """QX, T5: what is found are turns that were acknowledged, and nothing is damaged unnoticed. That each bit of a byte
    is found, the test of the format says."""
    data, ends = history(folder)
    whole = list(range(len(HISTORY)))
    for byte in range(len(data)):
        file_of(folder).write_bytes(data)
        flip(file_of(folder), byte, 1 << byte % 8)
        found, told = look(folder)
        hit = [number for number in whole if ends[number] <= byte < ends[number + 1]]
        assert found in (last_of(whole), last_of([one for one in whole if one not in hit])), byte
        assert told, byte


def test_after_damage_the_next_record_is_written_into_a_new_file(folder: StoreFolder, faults: Faults) -> None:
    _, ends = history(folder)
    flip(file_of(folder), ends[1] + 9)
    journal = Journal.load(folder, writable=True)
    assert len(journal.findings) == 1
    journal.append([turn(THREE, 8)])
    faults.calls.clear()
    journal.append([turn(THREE, 9)])
    assert faults.calls == ["write_at", "sync_file"]  # into the same one
    journal.close()
    assert findings(folder) == []
    assert read_again(folder) == last_of(list(range(len(HISTORY)))) | {THREE: turn(THREE, 9)}


def test_of_much_damage_a_bounded_number_of_places_is_told(folder: StoreFolder) -> None:
    journal = Journal.load(folder, writable=True)
    journal.append([turn(ONE, 3) for _ in range(400)])
    journal.close()
    data = bytearray(file_of(folder).read_bytes())
    for number in range(0, 400, 2):
        data[HEADER_BYTES + number * size_of(len(turn(ONE, 3).encode())) + 50] ^= 1
    file_of(folder).write_bytes(data)
    assert len(findings(folder)) == 101
    assert "more damage" in findings(folder)[-1]


# --- files that are not this store's


def foreign(tmp_path: Path) -> bytes:
    with Store.open(tmp_path / "elsewhere", writable=True) as store:
        store.acknowledge([turn(ONE, 3)])
        data = file_of(store._core.folder).read_bytes()
    shutil.rmtree(tmp_path / "elsewhere")
    return data


def test_a_foreign_file_is_put_aside_and_never_in_the_place_of_an_earlier_one(
    folder: StoreFolder, tmp_path: Path
) -> None:
    file_of(folder).parent.mkdir(mode=0o700)
    kept = []
    for number in range(3):
        kept.append(foreign(tmp_path) + bytes([number]))
        file_of(folder).write_bytes(kept[-1])
        file_of(folder).chmod(0o600)
        assert "another store" in findings(folder)[0]
        assert file_of(folder).read_bytes() == kept[-1]  # a reader leaves it
        journal = Journal.load(folder, writable=True)
        assert len(journal.findings) == 1
        journal.append([turn(TWO, 4)])
        journal.close(tidying=True)
        assert read_again(folder) == {TWO: turn(TWO, 4)}
        file_of(folder).unlink()
    assert {path.read_bytes() for path in Path(folder.path, "damaged").iterdir()} == set(kept)


def test_a_file_above_its_limit_is_put_aside(folder: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    history(folder)
    monkeypatch.setattr(module, "MAX_JOURNAL_BYTES", 1000)
    journal = Journal.load(folder, writable=True)
    assert "the limit is 1000" in journal.findings[0].message
    assert journal.uris() == []
    journal.close()
    assert Path(folder.path, "damaged", TURNS_FILE).exists()


def test_a_link_in_its_place_is_refused(folder: StoreFolder, tmp_path: Path) -> None:
    file_of(folder).parent.mkdir(mode=0o700)
    file_of(folder).symlink_to(tmp_path / "elsewhere")
    for writable in (False, True):
        with pytest.raises(errors.UnsafePath):
            Journal.load(folder, writable=writable)
