"""The diary keeps what was said within its bound, believes no damage, and keeps nothing of a forgotten session."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.errors import NoSpace, SessionNotFound, StoreIoError
from torpor.memvid.folder import diary as diaries
from torpor.memvid.folder.diary import CUT, DIARY_FILE, MAX_DIARY_ENTRY_BYTES, OLD_DIARY_FILE, Diary, Entry
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.store_making import OTHER_URI, URI, require_awake, sleep

SECRET = SessionUri("default", "zyx-secret")


@pytest.fixture
def diary(folder: StoreFolder) -> Diary:
    return Diary(folder)


def said(diary: Diary) -> list[tuple[object, SessionUri | None, object, SessionUri | None, object]]:
    return [
        (each.facts.get("n"), each.uri, each.words.get("w"), each.other, each.other_words.get("o"))
        for each in diary.read()
    ]


def bytes_of(folder: StoreFolder) -> bytes:
    paths = [Path(folder.path, name) for name in (OLD_DIARY_FILE, DIARY_FILE)]
    return b"".join(path.read_bytes() for path in paths if path.exists())


def test_what_was_said_is_read_before_and_after_it_is_written_by_who_comes_later_too(
    folder: StoreFolder, diary: Diary
) -> None:
    diary.say({"n": 1}, URI, {"w": "hello"}, OTHER_URI, {"o": "there"})
    wanted = [(1, URI, "hello", OTHER_URI, "there")]
    assert said(diary) == wanted
    assert not Path(folder.path, DIARY_FILE).exists()
    diary.write()
    assert said(diary) == said(Diary(folder)) == wanted
    (entry,) = diary.read()
    assert diary.read(since_ns=entry.at_ns + 1) == diary.read(uri=OTHER_URI) == []
    assert diary.read(since_ns=entry.at_ns, uri=URI) == [entry]


@pytest.mark.parametrize("kept", range(0, 120, 7))
def test_a_torn_end_is_cut_and_never_believed(folder: StoreFolder, diary: Diary, kept: int) -> None:
    diary.say({"n": 1}, URI, {})
    diary.write()
    whole = os.path.getsize(Path(folder.path, DIARY_FILE))
    diary.say({"n": 2}, URI, {"w": "w" * 100})
    diary.write()
    os.truncate(Path(folder.path, DIARY_FILE), whole + kept)
    later = Diary(folder)
    assert [each[0] for each in said(later)] == [1]
    later.say({"n": 3}, URI, {})
    later.write()
    assert [each[0] for each in said(later)] == [1, 3]
    assert b"www" not in bytes_of(folder)


def test_damage_costs_only_what_it_lies_in(folder: StoreFolder, diary: Diary) -> None:
    for number in range(10):
        diary.say({"n": number}, URI, {})
        diary.write()
    path = Path(folder.path, DIARY_FILE)
    whole = path.read_bytes()
    seen = set()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        numbers = [each[0] for each in said(Diary(folder))]
        seen.add(len(numbers))
        assert numbers == sorted(set(numbers))
        assert len(numbers) in (0, 9)
    assert seen == {0, 9}, "the header, or one entry"


@pytest.mark.one_in(1)
def test_damage_costs_those_who_read_a_part_no_more_than_those_who_read_all(folder: StoreFolder, diary: Diary) -> None:
    """A length or a time that is damaged hides none of the next entries, nor that a session is deleted."""
    for number in range(6):
        diary.say({"n": number}, (OTHER_URI, SECRET, URI)[number % 3], {"w": "w" * number})
    diary.end(SECRET)
    diary.say({"n": 6}, URI, {})
    diary.write()
    since_ns = diary.read()[3].at_ns
    path = Path(folder.path, DIARY_FILE)
    whole = path.read_bytes()
    for place, bit in itertools.product(range(len(whole)), range(8)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        entries = diary.read()
        assert diary.read(uri=URI) == [each for each in entries if each.uri == URI]
        assert diary.read(uri=SECRET) == [each for each in entries if each.uri == SECRET]
        assert diary.read(since_ns) == [each for each in entries if each.at_ns >= since_ns]


@pytest.mark.parametrize("garbage", [b"", b"{}", b"\xff" * 5000, diaries._MAGIC * 500, bytes(4096)])
def test_what_is_no_diary_is_as_none_and_is_written_anew(folder: StoreFolder, diary: Diary, garbage: bytes) -> None:
    for name in (DIARY_FILE, OLD_DIARY_FILE):
        Path(folder.path, name).write_bytes(garbage)
    assert diary.read() == []
    diary.say({"n": 1}, URI, {})
    diary.write()
    assert [each[0] for each in said(Diary(folder))] == [1]


def test_a_link_is_not_followed_and_breaks_nothing(store: Store, store_path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (store_path / DIARY_FILE).symlink_to(tmp_path / "mine")
    assert store.diary.read() == []
    assert str(store_path / DIARY_FILE) in str(store.diary.problem)
    sleep(store, 20, uri=URI)
    store.diary.say({"n": 1}, URI, {})
    report = store.forget(URI)
    assert [each.code for each in report.problems] == ["not_forgotten"]
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_oldest_go_first_and_both_files_stay_within_their_bound(
    folder: StoreFolder, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diaries, "_HALF_BYTES", 4096)
    for number in range(400):
        diary.say({"n": number}, URI, {"w": "x" * (number % 90)})
        if number % 3 == 0:
            diary.write()
        assert len(bytes_of(folder)) <= 2 * 4096
    numbers = [each[0] for each in said(diary)]
    assert numbers == list(range(400 - len(numbers), 400))
    assert 40 < len(numbers) < 120


def test_an_entry_takes_at_most_512_bytes_and_long_words_are_cut_short(folder: StoreFolder, diary: Diary) -> None:
    long = SessionUri("n" * 128, "m" * 128)
    diary.say({"n": 1}, URI, {"w": "y" * 600}, OTHER_URI, {"o": "z" * 50})
    diary.say({"n": 2}, long, {"w": "y" * 50}, SessionUri("o" * 128, "p" * 128), {"o": "z" * 600})
    diary.write()
    assert said(diary) == [
        (1, URI, "y" * 159 + CUT, OTHER_URI, "z" * 50),
        (2, long, "y" * 39 + CUT, None, None),
    ]
    assert len(bytes_of(folder)) <= 24 + 2 * MAX_DIARY_ENTRY_BYTES


def test_what_is_deleted_keeps_its_facts_and_neither_name_nor_words(diary: Diary) -> None:
    diary.say({"n": 1}, SECRET, {"w": "a"}, OTHER_URI, {"o": "b"})
    diary.say({"n": 2}, OTHER_URI, {"w": "c"}, SECRET, {"o": "d"})
    diary.write()
    diary.end(SECRET)
    diary.write()
    diary.say({"n": 3}, SECRET, {"w": "e"}, OTHER_URI, {"o": "f"})  # another one of that name
    assert said(diary) == [
        (1, None, None, None, None),
        (2, OTHER_URI, "c", None, None),
        (3, SECRET, "e", OTHER_URI, "f"),
    ]


def test_what_was_deleted_stays_so_in_the_midst_of_an_erasure(
    folder: StoreFolder, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary.say({"n": 1}, URI, {})
    diary.say({"n": 2}, OTHER_URI, {})
    diary.say({"n": 3}, SECRET, {})
    diary.write()
    Path(folder.path, DIARY_FILE).rename(Path(folder.path, OLD_DIARY_FILE))
    diary.end(URI)
    diary.say({"n": 4}, URI, {})
    diary.write()
    assert [each[:2] for each in said(diary)] == [(1, None), (2, OTHER_URI), (3, SECRET), (4, URI)]
    wanted = [(1, None), (2, OTHER_URI), (4, URI)]

    class Killed(Exception):
        pass

    write, left = diaries.durable.write_file, 1

    def once(*args: object, **named: object) -> None:
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        write(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(diaries.durable, "write_file", once)
    with pytest.raises(Killed):
        diary.erase(SECRET)
    assert [each[:2] for each in said(Diary(folder))] == wanted, "one file is new, and one is old"


def test_forget_leaves_no_byte_of_a_name_or_of_words_in_the_files(store: Store, store_path: Path) -> None:
    """Neither its own, nor what was said of others beside it, nor behind a delete, nor in what is damaged."""
    sleep(store, 20, uri=SECRET)
    sleep(store, 20, uri=URI)
    store.diary.say({"n": 1}, SECRET, {"w": "hush, it is said"})
    store.diary.say({"n": 2}, URI, {"w": "aloud"}, SECRET, {"o": "hush, it is said"})
    store.write_diary()
    (store_path / DIARY_FILE).rename(store_path / OLD_DIARY_FILE)
    store.diary.say({"n": 3}, SECRET, {"w": "hush, it is said"})
    store.diary.end(SECRET)
    store.write_diary()
    with open(store_path / DIARY_FILE, "ab") as file:
        file.write(b"\0\0hush, it is torn")
    store.diary.say({"n": 4}, SECRET, {"w": "hush, it is said"})
    plan = store.forget(SECRET, dry_run=True)
    assert str(store_path / DIARY_FILE) in [each.path for each in plan.actions]
    report = store.forget(SECRET)
    assert report.problems == ()
    assert str(store_path / DIARY_FILE) in [each.path for each in report.actions]
    store.write_diary()
    everything = b"".join(path.read_bytes() for path in store_path.rglob("*") if path.is_file())
    assert b"hush" not in everything
    assert b"zyx-secret" not in everything
    assert said(store.diary) == [
        (1, None, None, None, None),
        (2, URI, "aloud", None, None),
        (3, None, None, None, None),
    ]
    require_awake(store, 20, uri=URI)
    with pytest.raises(SessionNotFound):
        store.forget(SECRET)


def test_what_is_left_of_a_deleted_session_is_forgotten_later(store: Store, store_path: Path) -> None:
    sleep(store, 20, uri=SECRET)
    store.diary.say({"n": 1}, SECRET, {"w": "hush"})
    store.write_diary()
    store.delete_session(SECRET)
    assert said(store.diary) == [(1, None, None, None, None)]
    store.write_diary()
    assert b"hush" in (store_path / DIARY_FILE).read_bytes()
    assert store.forget(SECRET).problems == ()
    assert b"hush" not in (store_path / DIARY_FILE).read_bytes()
    assert said(store.diary) == [(1, None, None, None, None)]


def test_a_reader_reads_beside_a_writer_and_a_store_without_a_diary_gets_none(store: Store, store_path: Path) -> None:
    sleep(store, 20, uri=URI)
    store.delete_session(URI)
    store.write_diary()
    assert not (store_path / DIARY_FILE).exists()
    store.diary.say({"n": 1}, OTHER_URI, {})
    with Store.open(store_path, writable=False) as reader:
        assert reader.diary.read() == []
        store.write_diary()
        (entry,) = reader.diary.read()
        assert isinstance(entry, Entry)
        assert entry.uri == OTHER_URI


def test_a_close_writes_what_was_said(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        store.diary.say({"n": 1}, OTHER_URI, {})
    with Store.open(store_path, writable=False) as reader:
        assert [each.facts for each in reader.diary.read()] == [{"n": 1}]


def without_room(*_: object, **__: object) -> None:
    raise NoSpace("No.", path="", action="write", errno=28)


@pytest.mark.parametrize("fails", [False, True])
def test_a_delete_that_waits_outlives_the_erasure_of_another_session(
    folder: StoreFolder, diary: Diary, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    diary.say({"n": 1}, URI, {"w": "a"})
    if fails:
        diary.say({"n": 2}, SECRET, {"w": "hush"})
    diary.write()
    diary.end(URI)
    with monkeypatch.context() as patched:
        if fails:
            patched.setattr(diaries.durable, "write_file", without_room)
            with pytest.raises(NoSpace):
                diary.erase(SECRET)
        else:
            assert not diary.erase(SECRET)
    assert diary.read(uri=URI) == diary.read(uri=SECRET) == []
    diary.write()
    assert Diary(folder).read(uri=URI) == Diary(folder).read(uri=SECRET) == []
    diary.erase(SECRET)
    diary.write()
    assert b"zyx-secret" not in bytes_of(folder)
    assert [each[:2] for each in said(Diary(folder))] == [(1, None), (2, None)][: 1 + fails]


def test_a_delete_is_lost_by_no_failed_write_and_by_no_number_of_entries(
    folder: StoreFolder, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diaries, "MAX_UNWRITTEN", 16)
    diary = Diary(folder)
    diary.say({"n": 1}, URI, {"w": "a"})
    diary.write()
    diary.end(URI)
    with monkeypatch.context() as patched:
        patched.setattr(diaries.durable, "write_at", without_room)
        with pytest.raises(NoSpace):
            diary.write()
    assert diary.has_unwritten
    for number in range(40):
        diary.say({"n": number}, OTHER_URI, {})
    assert diary.read(uri=URI) == []
    diary.write()
    assert not diary.has_unwritten
    assert Diary(folder).read(uri=URI) == []
    assert [each.facts["n"] for each in Diary(folder).read(uri=OTHER_URI)] == list(range(24, 40))


def test_deletes_that_cannot_be_written_take_bounded_memory_and_none_is_undone(
    folder: StoreFolder, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where too many wait, none is told of any more that was known until then: not of those that are there, either."""
    monkeypatch.setattr(diaries, "MAX_ENDED", 4)
    sessions = [SessionUri("default", f"s-{number}") for number in range(7)]
    for number, uri in enumerate(sessions):
        diary.say({"n": number}, uri, {"w": f"words of {uri.name}"})
    diary.write()
    with monkeypatch.context() as full:
        full.setattr(diaries.durable, "write_at", without_room)
        for uri in sessions[:6]:
            diary.end(uri)
            with contextlib.suppress(NoSpace):
                diary.write()
            assert len(diary._ended) <= 4
    diary.say({"n": 7}, sessions[6], {"w": "said later"})
    for _ in range(2):
        told = [each[:3] for each in said(diary)]
        assert told == [*((number, None, None) for number in range(7)), (7, sessions[6], "said later")]
        diary.write()
        diary = Diary(folder)
    diary.erase(sessions[0])
    assert b"s-0" not in bytes_of(folder)
    assert b"words of" not in bytes_of(folder)


@pytest.mark.parametrize("erased", [False, True])
def test_a_clock_that_is_set_back_undoes_no_delete(
    folder: StoreFolder, diary: Diary, monkeypatch: pytest.MonkeyPatch, erased: bool
) -> None:
    monkeypatch.setattr(diaries.time, "time_ns", lambda: 2_000)
    diary.say({"n": 1}, URI, {})
    diary.say({"n": 2}, SECRET, {})
    diary.write()
    if erased:
        diary.erase(SECRET)
    monkeypatch.setattr(diaries.time, "time_ns", lambda: 1_000)
    later = Diary(folder)
    later.say({"n": 3}, OTHER_URI, {})
    later.end(URI)
    later.say({"n": 4}, URI, {})
    for _ in range(2):
        assert [each[:2] for each in said(later) if each[0] != 2] == [(1, None), (3, OTHER_URI), (4, URI)]
        later.write()
        later = Diary(folder)
    times = [each.at_ns for each in later.read()]
    assert times == sorted(set(times))
    assert times[0] == 2_000


@pytest.mark.parametrize("name", [OLD_DIARY_FILE, DIARY_FILE])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_stands_in_place_of_a_file_does_not_keep_the_other_one(
    store: Store, store_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    sleep(store, 20, uri=SECRET)
    store.diary.say({"n": 1}, SECRET, {"w": "hush"})
    store.write_diary()
    (sound,) = {store_path / OLD_DIARY_FILE, store_path / DIARY_FILE} - {store_path / name}
    (store_path / DIARY_FILE).rename(sound)
    make(store_path / name)
    (problem,) = store.forget(SECRET).problems
    assert problem.code == "not_forgotten"
    assert str(store_path / name) in problem.message
    assert b"hush" not in sound.read_bytes()
    assert b"zyx-secret" not in sound.read_bytes()


def test_where_the_older_file_cannot_be_written_the_deletes_in_the_newer_one_stay(
    folder: StoreFolder, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary.say({"n": 1}, URI, {"w": "a"})
    diary.write()
    Path(folder.path, DIARY_FILE).rename(Path(folder.path, OLD_DIARY_FILE))
    diary.end(URI)
    diary.say({"n": 2}, SECRET, {"w": "hush"})
    diary.write()
    write = diaries.durable.write_file

    def but_the_older(folder_fd: int, name: str, *args: Any, **named: Any) -> None:
        if name == OLD_DIARY_FILE:
            raise StoreIoError("No.", path=name, action="write", errno=5)
        write(folder_fd, name, *args, **named)

    monkeypatch.setattr(diaries.durable, "write_file", but_the_older)
    with pytest.raises(StoreIoError):
        diary.erase(SECRET)
    assert b"zyx-secret" not in bytes_of(folder)
    assert said(Diary(folder)) == [(1, None, None, None, None)]


def test_a_file_made_of_beginnings_is_not_looked_through(
    folder: StoreFolder, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary.say({"n": 1}, URI, {})
    diary.write()
    looks, end_at = 0, diaries._end_at

    def counted(data: bytes, place: int) -> int | None:
        nonlocal looks
        looks += 1
        return end_at(data, place)

    monkeypatch.setattr(diaries, "_end_at", counted)
    with open(Path(folder.path, DIARY_FILE), "ab") as file:
        file.write(diaries._MAGIC * 100_000)
    assert [each[0] for each in said(Diary(folder))] == [1]
    assert looks == 1 + diaries.MAX_DAMAGED_PLACES
