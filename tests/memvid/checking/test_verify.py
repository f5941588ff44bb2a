"""Verify: reports what it finds, raises nothing, changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from torpor.memvid import BlockEntry, IndexRow, Receipt, SessionUri, Store
from torpor.memvid.checking import verify
from torpor.memvid.errors import BundleMissing, IndexMismatch, NoSpace, SessionNotFound
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.format.bundle import BundleFile, FrameFile
from torpor.memvid.format.directory import digest_of
from torpor.memvid.format.layout import HEADER_BYTES, Trailer, encode_header
from torpor.memvid.index.index import Index
from torpor.memvid.index.rows import IndexedBundle
from torpor.memvid.writing.rewriting import Contents, prepared
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI, bundle_path, flip, frame_of, require_awake, sleep


def payload_of(store: Store, entry: BlockEntry) -> int:
    """Where a block's payload begins in its file."""
    frame = frame_of(store, entry)
    return frame.offset + frame.head_bytes


def test_a_sound_store_has_no_findings(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 700, before=first)
    sleep(store, 20, uri=OTHER_URI)
    shallow, deep = store.verify(deep=False), store.verify(deep=True)
    assert shallow.ok
    assert deep.ok
    assert (deep.bundles_checked, deep.blocks_checked) == (3, 4 + 2 + 2)
    assert shallow.bytes_checked < deep.bytes_checked


def test_whoever_verifies_is_told_of_each_block_and_may_give_up(store: Store) -> None:
    class Enough(Exception):
        pass

    def enough(size_bytes: int) -> None:
        told.append(size_bytes)
        if len(told) == 3:
            raise Enough

    sleep(store, 600)
    told: list[int] = []
    report = store.verify(deep=True, pace=told.append)
    assert (len(told), sum(told)) == (report.blocks_checked, report.bytes_checked)
    told.clear()
    with pytest.raises(Enough):
        store.verify(deep=True, pace=enough)
    assert len(told) == 3


def test_only_a_deep_verify_sees_a_damaged_payload(store: Store) -> None:
    receipt = sleep(store, 600)
    file = bundle_path(store, receipt.bundle_id)
    flip(file, payload_of(store, receipt.entries[1]))
    data = file.read_bytes()
    assert store.verify(deep=False).ok
    report = store.verify(deep=True)
    assert [(finding.code, finding.path) for finding in report.findings] == [("corrupt_block", str(file))]
    assert file.read_bytes() == data


def test_every_damaged_bundle_is_reported(store: Store) -> None:
    for number in range(3):
        file = bundle_path(store, sleep(store, 20 + number).bundle_id)
        file.write_bytes(file.read_bytes()[:-1])
    assert [finding.code for finding in store.verify(deep=True).findings] == ["truncated"] * 3


def test_one_session_is_verified_with_the_ancestors_it_needs(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 700, uri=OTHER_URI, before=first)
    file = bundle_path(store, first.bundle_id)
    flip(file, payload_of(store, first.entries[0]))
    assert store.verify(OTHER_URI, deep=False).ok
    assert {finding.code for finding in store.verify(OTHER_URI, deep=True).findings} == {"corrupt_block"}
    assert {finding.code for finding in store.verify(URI, deep=True).findings} == {"corrupt_block"}


def test_a_stranger_s_file_is_reported_and_left(store: Store) -> None:
    sleep(store, 20)
    stranger = Path(store.path) / "bundles" / "notes.txt"
    stranger.write_text("mine")
    report = store.verify(deep=False)
    assert [(finding.code, finding.path) for finding in report.findings] == [("unknown_file", str(stranger))]
    assert stranger.read_text() == "mine"


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("uri", [None, URI])
def test_damaged_marks_are_reported(store: Store, store_path: Path, writable: bool, uri: SessionUri | None) -> None:
    sleep(store, 20)
    store.pin(URI, 1)
    marks = store_path / "marks.json"
    marks.write_bytes(marks.read_bytes().replace(b"pins", b"pink"))
    with contextlib.nullcontext(store) if writable else Store.open(store_path, writable=False) as opened:
        report = opened.verify(uri, deep=False)
    assert [(finding.code, finding.path) for finding in report.findings] == [("corrupt_marks", str(marks))]
    assert "torpor repair" in report.findings[0].message


def test_progress_ends_at_the_whole(store: Store) -> None:
    sleep(store, 20)
    sleep(store, 300)
    steps: list[tuple[int, int]] = []
    store.verify(deep=True, on_progress=lambda done, total: steps.append((done, total)))
    assert len(steps) == 2
    assert steps[-1][0] == steps[-1][1]


def test_verify_walks_each_block_list_a_fixed_number_of_times(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each reused block, nor for each bundle that holds some."""
    receipt = sleep(store, 256)
    for blocks in range(2, 12):
        receipt = sleep(store, 256 * blocks, before=receipt)
    calls = 0
    real = verify.span_parents

    def counted(entries: Sequence[BlockEntry]) -> dict[bytes, bytes | None]:
        nonlocal calls
        calls += 1
        return real(entries)

    monkeypatch.setattr(verify, "span_parents", counted)
    assert store.verify(deep=False).ok
    assert calls == 11


# --- what the index does not list


@pytest.mark.parametrize("status", ["shadowed", "unreadable", None])
@pytest.mark.parametrize("deep", [True, False])
def test_threat_24_a_sound_version_that_the_index_does_not_list_is_reported(
    store: Store, status: str | None, deep: bool
) -> None:
    first = sleep(store, 300)
    lost = sleep(store, 600, before=first)
    assert store.verify(deep=deep).ok
    kept = store.index.stored(lost.bundle_id)
    store.index.drop([lost.bundle_id])
    if status is not None:
        row = None if status == "unreadable" else kept.row
        store.index.add(dataclasses.replace(kept, status=status, row=row))
    found = [finding for finding in store.verify(deep=deep).findings if finding.code == "index_mismatch"]
    assert [finding.path for finding in found] == [str(bundle_path(store, lost.bundle_id))]
    assert "version 2 of torpor://" in found[0].message


def test_a_version_published_beside_a_reader_is_no_finding_of_its_verify(store: Store, store_path: Path) -> None:
    sleep(store, 300)
    with Store.open(store_path, writable=False) as reader:
        sleep(store, 600)
        assert reader.verify(deep=True).ok
        assert len(reader.versions(URI)) == 1


# --- what a store opened for reading says of what is not there


def codes(store: Store) -> list[str]:
    return [finding.code for finding in store.verify(deep=True).findings]


def test_a_reader_reports_a_lost_file_of_a_version_that_only_the_log_of_the_index_names(
    store: Store, store_path: Path
) -> None:
    first = sleep(store, 512)
    fork = sleep(store, 1024, uri=FORK_URI, before=first)
    bundle_path(store, first.bundle_id).unlink()
    with Store.open(store_path, writable=False) as reader:
        assert [row.uri for row in reader.iter_sessions()] == [URI, FORK_URI]
        assert [finding.code for finding in reader.opening.unreadable] == ["bundle_missing"]
        assert codes(reader) == ["bundle_missing", "bundle_missing"]
        bundle_path(store, fork.bundle_id).unlink()
        assert codes(reader) == codes(store) == ["bundle_missing", "bundle_missing"]
        for uri in (URI, FORK_URI):
            with pytest.raises(BundleMissing):
                reader.open_session(uri)


@pytest.mark.parametrize("settled", [True, False])
def test_a_session_deleted_beside_a_reader_is_no_damage(store: Store, store_path: Path, settled: bool) -> None:
    sleep(store, 512)
    if settled:
        store.index._settle()
    with Store.open(store_path, writable=False) as reader:
        store.delete_session(URI)
        assert codes(reader) == []
        with pytest.raises(SessionNotFound):
            reader.open_session(URI)


def test_a_version_that_is_being_deleted_beside_a_reader_is_no_damage(store: Store, store_path: Path) -> None:
    """The files are renamed before the rows go; on a full disk they are emptied before that, too."""
    first = sleep(store, 512)
    with Store.open(store_path, writable=False) as reader:
        store._core.folder.retire(first.bundle_id)
        assert codes(reader) == []
        store._core.folder.empty_retired(first.bundle_id)
        assert codes(reader) == []
        assert store.verify(deep=True).ok


def delete_on_a_full_disk(store: Store, monkeypatch: pytest.MonkeyPatch, uri: SessionUri) -> None:
    real = Index._settle

    def settle(index: Index) -> None:
        if index._sums is not None:  # it is in a file
            raise NoSpace("No room for the index.")
        real(index)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_settle", settle)
        store.delete_session(uri)


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("beside", [True, False])
def test_a_file_that_a_delete_empties_while_verify_reads_it_is_no_damage(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool, deep: bool
) -> None:
    sleep(store, 600)
    sleep(store, 256, uri=OTHER_URI, seed=9)
    real, emptied = verify.require_same_as_row, []

    def require_same_as_row(row: IndexRow, uri: SessionUri, *rest: Any) -> None:
        real(row, uri, *rest)
        if uri == URI and not emptied:
            delete_on_a_full_disk(store, monkeypatch, URI)
            emptied.append(store._core.folder.is_emptied(row.bundle_id))

    monkeypatch.setattr(verify, "require_same_as_row", require_same_as_row)
    with Store.open(store_path, writable=False) as reader:
        report = (reader if beside else store).verify(deep=deep)
    assert emptied == [True]
    assert report.findings == ()


def test_a_holder_that_a_delete_empties_while_verify_looks_into_it_is_no_damage(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its last user: a fork of a session that was deleted before."""
    first = sleep(store, 600)
    sleep(store, 800, uri=FORK_URI, before=first)
    store.delete_session(URI)
    real, done = verify._verify_refs, []

    def verify_refs(folder: StoreFolder, *rest: Any, **options: Any) -> None:
        if not done:
            done.append(True)
            delete_on_a_full_disk(store, monkeypatch, FORK_URI)
            assert folder.is_emptied(first.bundle_id)
        real(folder, *rest, **options)

    monkeypatch.setattr(verify, "_verify_refs", verify_refs)
    monkeypatch.setattr(verify, "_leave_unproven", lambda its, found: True)
    monkeypatch.setattr(verify, "_find_broken", lambda folder, holder, its, *_, **__: set(its.blocks))
    with Store.open(store_path, writable=False) as reader:
        assert codes(reader) == []
    assert done


def test_damage_in_what_a_deleted_session_left_for_a_fork_is_damage(store: Store) -> None:
    first = sleep(store, 600)
    offset = payload_of(store, first.entries[0])
    sleep(store, 800, uri=FORK_URI, before=first)
    store.delete_session(URI)
    file = bundle_path(store, first.bundle_id).with_suffix(".mvr")
    flip(file, offset)
    assert codes(store) == ["corrupt_block"]


@pytest.mark.parametrize("deep", [True, False])
def test_a_file_that_somebody_else_empties_while_verify_reads_it_is_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    first = sleep(store, 600)
    real = verify.require_same_as_row

    def require_same_as_row(*arguments: Any) -> None:
        real(*arguments)
        os.truncate(bundle_path(store, first.bundle_id), 0)

    monkeypatch.setattr(verify, "require_same_as_row", require_same_as_row)
    assert {finding.code for finding in store.verify(deep=deep).findings} == {"truncated"}


def test_a_lost_file_that_the_index_file_never_had_a_row_for_is_damage(store: Store, store_path: Path) -> None:
    """A backup put back without its index, on a disk that takes no other: nobody could have deleted it there."""
    first = sleep(store, 512)
    store.index.drop([first.bundle_id])
    with Store.open(store_path, writable=False) as reader:
        assert codes(reader) == []
        bundle_path(store, first.bundle_id).unlink()
        assert codes(reader) == ["bundle_missing"]
        with pytest.raises(BundleMissing):
            reader.open_session(URI)


@pytest.mark.one_in(4)
def test_a_version_that_is_being_published_is_no_finding(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep stands between its file's name and its row: verify looks when it is done."""
    sleep(store, 300)
    named, looked = threading.Event(), threading.Event()
    real_add, real_listing = Index.add, StoreFolder.list_bundles
    reports: list[bool] = []

    def add(index: Index, bundle: IndexedBundle) -> None:
        named.set()
        looked.wait(1)  # verify waits for the sleep, so this goes by
        real_add(index, bundle)

    def listing(folder: StoreFolder) -> dict[bytes, str]:
        found = real_listing(folder)
        if len(found) == 2:
            looked.set()
        return found

    monkeypatch.setattr(Index, "add", add)
    monkeypatch.setattr(StoreFolder, "list_bundles", listing)
    sleeper = threading.Thread(target=lambda: sleep(store, 600))
    sleeper.start()
    assert named.wait(10)
    reports.append(store.verify(deep=False).ok)
    sleeper.join()
    assert reports == [True]


# --- what moves while verify looks for it


def opening(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object], after: Callable[[int], object]) -> None:
    """Do something just before and just after the so-many-th time that verify opens a file to look for blocks in it."""
    original, calls = verify._Opened, itertools.count(1)

    def opened(*args: Any) -> verify._Opened:
        number = next(calls)
        act(number)
        file = original(*args)
        after(number)
        return file

    monkeypatch.setattr(verify, "_Opened", opened)


class Moving:
    """The first block of three sessions, which a compaction moves between the files of two of them, `here` and
    `there`; the third one, `user`, needs it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.here = sleep(store, 300)
        self.user = sleep(store, 600, uri=OTHER_URI, before=self.here)
        self.there = sleep(store, 700, uri=FORK_URI, before=self.here, seed=5)
        self.block = self.here.entries[0].id
        self._lead(self.there, None)
        self._lead(self.here, self.there)
        self._lead(self.user, self.there)
        self.move()

    def move(self) -> None:
        """To the other file: copied, then looked for there, then taken away where it was."""
        self.here, self.there = self.there, self.here
        self._lead(self.here, None)
        self._lead(self.user, self.here)
        self._lead(self.there, self.here)

    def _lead(self, receipt: Receipt, place: Receipt | None) -> None:
        """Write a version's file anew, without the block if it is to be looked for in another place."""
        with contextlib.closing(self.store._core.open_bundle(receipt.bundle_id)) as file:
            places = {entry.id: entry.bundle_id for entry in file.entries if entry.bundle_id is not None}
        source = places.pop(self.block)
        frames = [(block, holder) for block, holder in places.items() if holder == receipt.bundle_id]
        holders = {block: holder for block, holder in places.items() if holder != receipt.bundle_id}
        if place is None:
            frames.insert(0, (self.block, source))
        else:
            holders[self.block] = place.bundle_id
        with prepared(self.store._core, receipt.bundle_id, Contents(frames, holders)) as fresh:
            assert fresh.commit()


@pytest.mark.parametrize("deep", [True, False])
def test_a_block_that_keeps_moving_while_verify_looks_for_it_is_no_finding(
    store: Store, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    moving = Moving(store)
    looks: list[int] = []

    def move(number: int) -> None:
        looks.append(number)
        if number < 9:
            moving.move()

    opening(monkeypatch, move, lambda _: None)
    assert store.verify(deep=deep).findings == ()
    assert max(looks) >= 9


def test_a_block_that_comes_back_to_where_it_was_is_no_finding(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What verify has open lacks what the file of that name has again."""
    moving = Moving(store)

    def move(number: int) -> None:
        if number == 1:
            moving.move()

    opening(monkeypatch, move, move)
    assert store.verify(deep=False).findings == ()


def test_a_block_that_its_holder_lacks_is_found_though_the_user_s_file_was_written_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sleep(store, 300)
    user = sleep(store, 600, before=first)
    block, rest = (entry.id for entry in first.entries if entry.kind == "span")
    state = first.entries[-1].id
    kept = Contents([(one, first.bundle_id) for one in (rest, state)], {block: user.bundle_id})  # a lie: it is nowhere
    with prepared(store._core, first.bundle_id, kept) as fresh, store._core.committing():
        fresh._replace_live()
    opening(monkeypatch, lambda number: os.utime(bundle_path(store, user.bundle_id), (number, number)), lambda _: None)
    assert {finding.code for finding in store.verify(deep=False).findings} == {"block_missing"}


# --- how much verify reads, and what it compares


def heads_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many heads of blocks a shallow verify of a sound store reads."""
    calls = itertools.count()
    original = FrameFile.read_head

    def counted(file: FrameFile, block_id: bytes) -> Any:
        next(calls)
        return original(file, block_id)

    with monkeypatch.context() as patch:
        patch.setattr(FrameFile, "read_head", counted)
        assert store.verify(deep=False).ok
    return next(calls)


def test_a_block_s_head_is_read_once_for_all_the_versions_of_its_session(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = sleep(store, 256)
    for blocks in range(2, 20):
        receipt = sleep(store, 256 * blocks, before=receipt)
    assert heads_read(store, monkeypatch) == store.verify(deep=False).blocks_checked == 2 * 19


def test_a_block_s_head_is_read_twice_however_many_other_sessions_need_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = sleep(store, 256 * 4)
    for number in range(12):
        sleep(store, 256 * 5, uri=SessionUri("default", f"fork-{number}"), before=base, seed=number)
    own = store.verify(deep=False).blocks_checked
    assert heads_read(store, monkeypatch) == own + 4


def test_many_lost_files_cost_one_fresh_look(store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [bundle_path(store, sleep(store, 20 + number).bundle_id) for number in range(9)]
    with Store.open(store_path, writable=False) as reader:
        for path in lost:
            path.unlink()
        calls = itertools.count()
        original = Index.copy_to_memory

        def counted(*args: Any) -> Index:
            next(calls)
            return original(*args)

        monkeypatch.setattr(Index, "copy_to_memory", counted)
        assert codes(reader) == ["bundle_missing"] * 9
        assert next(calls) == 2  # the other look: whether the index is of the files that are there


@pytest.mark.parametrize("other_uri", [URI, OTHER_URI])
@pytest.mark.parametrize("other", ["none", "before", "after"])
@pytest.mark.parametrize("change", [{"raw_bytes": 0}, {"id": bytes(32)}])
def test_a_version_that_describes_a_block_in_another_file_wrongly_is_reported_and_no_other(
    store: Store, other_uri: SessionUri, other: str, change: dict[str, object]
) -> None:
    """Also where another version describes the same block rightly."""
    base = sleep(store, 300)
    if other == "before":
        sleep(store, 700, uri=other_uri, before=base, seed=3)
    liar = sleep(store, 600, uri=other_uri, before=base)
    if other == "after":
        sleep(store, 700, uri=other_uri, before=base, seed=3)
    path = bundle_path(store, liar.bundle_id)
    with contextlib.closing(BundleFile(os.open(path, os.O_RDONLY), str(path), liar.bundle_id)) as file:
        blocks = (dataclasses.replace(file.manifest.blocks[0], **change), *file.manifest.blocks[1:])
        manifest = dataclasses.replace(file.manifest, blocks=blocks).encode()
        directory = file.directory.encode()
        frames = path.read_bytes()[HEADER_BYTES : file.trailer.manifest_offset]
    trailer = Trailer(
        HEADER_BYTES + len(frames), len(manifest), len(directory), blake3(manifest).digest(), digest_of(directory)
    )
    lie = bundle_path(store, trailer.bundle_id)
    lie.parent.mkdir(0o700, exist_ok=True)
    lie.write_bytes(encode_header(trailer.file_bytes) + frames + manifest + directory + trailer.encode())
    lie.chmod(0o600)
    path.unlink()
    store.index.drop([liar.bundle_id])
    store.rebuild_index()
    found = store.verify(deep=True).findings
    assert {finding.path for finding in found if finding.code in ("corrupt_bundle", "block_missing")} == {str(lie)}


# --- versions that repair has set aside


def test_what_verify_advises_lists_a_version_that_is_back_and_forgets_no_other(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    """An index that is removed has nothing to make it anew from of a version whose file is nowhere."""
    away, back = sleep(store, 300), sleep(store, 300, uri=OTHER_URI, seed=1)
    for receipt in (away, back):
        bundle_path(store, receipt.bundle_id).rename(tmp_path / receipt.bundle_id.hex())
    store.repair()
    (tmp_path / back.bundle_id.hex()).rename(bundle_path(store, back.bundle_id))
    (found,) = [finding for finding in store.verify(deep=True).findings if finding.code == "index_mismatch"]
    assert "`torpor rebuild-index`" in found.message
    assert "index.sqlite" not in found.message
    store.rebuild_index()
    require_awake(store, 300, uri=OTHER_URI, seed=1)
    assert list(store.index.given_up()) == [away.bundle_id]
    assert codes(store) == ["version_lost"]


def test_what_a_refusal_advises_lets_the_version_be_woken(store: Store) -> None:
    receipt = sleep(store, 300)
    kept = store.index.stored(receipt.bundle_id)
    assert kept.row is not None
    store.index.drop([receipt.bundle_id])
    store.index.add(dataclasses.replace(kept, row=dataclasses.replace(kept.row, token_count=299)))
    with pytest.raises(IndexMismatch, match="torpor rebuild-index") as refused:
        require_awake(store, 300)
    assert "index.sqlite" not in refused.value.message
    store.rebuild_index()
    require_awake(store, 300)


@pytest.mark.parametrize("uri", [None, URI])
def test_a_quarantine_that_cannot_be_looked_into_is_reported(
    store: Store, store_path: Path, uri: SessionUri | None
) -> None:
    receipt = sleep(store, 300)
    sleep(store, 600, seed=1)
    sleep(store, 300, uri=OTHER_URI, seed=2)
    bundle_path(store, receipt.bundle_id).unlink()
    store.repair()
    assert codes(store) == ["version_lost"]
    quarantine = store_path / "quarantine"
    quarantine.mkdir(mode=0o700, exist_ok=True)
    quarantine.chmod(0o770)
    report = store.verify(uri, deep=True)
    assert [(finding.path, finding.code) for finding in report.findings] == [(str(quarantine), "unsafe_path")]
    assert "set 1 version aside" in report.findings[0].message
    assert store.verify(OTHER_URI, deep=True).ok
