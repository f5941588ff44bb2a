"""Export and import: one file is a version, bit for bit, or it is refused and nothing happened."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from blake3 import blake3
from torpor.memvid import errors
from torpor.memvid.disk.budget import Budget, utc_day
from torpor.memvid.disk.durable import TempFile
from torpor.memvid.exchange import intake
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.format.blocks import BlockEntry
from torpor.memvid.format.manifest import UNNAMED, Manifest
from torpor.memvid.format.pack import PackFile
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.format.records import Receipt
from torpor.memvid.limits import MAX_IMPORTED_VERSION, MAX_VERSION
from torpor.memvid.maintenance.repack_plan import CLEARING
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.core import StoreCore
from torpor.memvid.writing.reader import BundleReader
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.format_1_stores import CASES, SMALL, bundle_of
from torpor.tests.memvid.store_making import OTHER_URI, URI, contents, meanwhile, packs_of, require_awake, sleep, tree

THIRD_URI = SessionUri("default", "third")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """Another store, to import into."""
    with Store.open(tmp_path / "other", writable=True) as opened:
        yield opened


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "agent.mvb"


@pytest.fixture
def file(store: Store, target: Path) -> Path:
    """A session of 600 tokens that sleeps in the store, exported."""
    sleep(store, 600)
    return exported(store, target)


def exported(store: Store, target: Path, uri: SessionUri = URI, version: int | None = None) -> Path:
    store.export_session(uri, version, target)
    return target


def rows(store: Store) -> list[tuple[str, int, bytes]]:
    return [(str(row.uri), row.version, row.bundle_id) for row in store.index.all_rows()]


def pack_file(path: Path) -> PackFile:
    return PackFile(os.open(path, os.O_RDONLY), str(path), None)


def nothing_came(store: Store) -> bool:
    return rows(store) == [] and making.names(store.path) == set()


# --- export


def test_an_export_is_one_pack_with_all_blocks_and_the_manifest(store: Store, target: Path) -> None:
    first = sleep(store, 600)
    second = sleep(store, 900, before=first)
    report = store.export_session(URI, None, target)
    with pack_file(target) as file:
        assert blake3(file.encoded_manifest()).hexdigest() == second.bundle_id == report.bundle_id
        assert set(file.frames) == {entry.id for entry in second.entries}
        for block_id in file.frames:
            file.check_block(block_id)
    assert (report.session, report.version, report.token_count, report.blocks) == (
        str(URI),
        2,
        900,
        len(second.entries),
    )
    assert (report.path, report.file_bytes) == (str(target), target.stat().st_size)
    assert report.logical_bytes == second.logical_bytes
    assert target.stat().st_mode & 0o777 == 0o600
    assert os.listdir(target.parent) == [target.name]


def test_an_export_takes_each_block_from_a_pack_that_has_it_right(store: Store, other: Store, target: Path) -> None:
    """Two packs have a block, and the one that is asked first is damaged."""
    receipt = sleep(store, 600)
    (pack,) = packs_of(store, receipt)
    exported(store, target.with_name("good"))
    good = pack.read_bytes()
    making.spoil(store, receipt, 1)
    store.import_file(target.with_name("good"))
    pack.write_bytes(good)
    making.spoil(store, receipt, 1)
    assert len(packs_of(store, receipt)) == 2
    assert pack.read_bytes() == good
    store.export_session(URI, None, target)
    other.import_file(target)
    require_awake(other, 600)


def test_an_export_finds_a_block_that_was_moved_while_it_ran(store: Store, target: Path, other: Store) -> None:
    """Another process writes the packs anew, and removes the old ones."""
    second = sleep(store, 900, before=sleep(store, 600))
    with Store.open(store.path, writable=False) as reader:
        moved: list[Path] = []

        def move(_done: int, _total: int) -> None:
            if not moved:
                moved.extend(_move_blocks(store, second))

        report = reader.export_session(URI, 2, target, on_progress=move)
    assert moved
    assert report.bundle_id == second.bundle_id
    other.import_file(target)
    require_awake(other, 900)


def _move_blocks(store: Store, receipt: Receipt) -> list[Path]:
    """Copy a version's blocks into one new pack, and remove the packs in which they were."""
    old = packs_of(store, receipt)
    making.copy_blocks(store, sorted(entry.id for entry in receipt.entries), removing=old)
    return old


# --- there and back


def delta_chain(store: Store) -> None:
    first = sleep(store, 300)
    sleep(store, 900, before=sleep(store, 600, before=first))


def fork_of_two(store: Store) -> None:
    second = sleep(store, 600, before=sleep(store, 300, uri=OTHER_URI), uri=OTHER_URI)
    sleep(store, 900, before=second)
    store.delete_session(OTHER_URI)


def compressed(store: Store) -> None:
    making.sleep_compressed(store)
    making.sleep_planes(store, OTHER_URI)


def moved(store: Store) -> None:
    second = sleep(store, 900, before=sleep(store, 600))
    store.delete_version(URI, 1)
    _move_blocks(store, second)


SESSIONS = {"a delta chain": delta_chain, "a fork": fork_of_two, "compressed": compressed, "moved": moved}


@pytest.mark.parametrize("make", SESSIONS.values(), ids=SESSIONS)
def test_every_byte_of_every_slot_is_there_after_export_and_import(
    store: Store, other: Store, target: Path, make: Callable[[Store], None]
) -> None:
    make(store)
    found = list(store.index.all_rows())
    assert found
    for row in found:
        path = target.with_name(f"{row.version}-{row.uri.name}")
        store.export_session(row.uri, row.version, path)
        other.delete_session(row.uri) if other.find_session(row.uri) else None
        receipt = other.import_file(path)
        assert (receipt.uri, receipt.version, receipt.bundle_id) == (row.uri, row.version, row.bundle_id)
        with store.open_session(row.uri, row.version) as one, other.open_session(row.uri, row.version) as two:
            assert one.manifest == two.manifest
            assert one.tokens() == two.tokens()
            assert contents(one) == contents(two)
        assert other.verify(deep=True).ok
    path = other.path
    other.close()
    with Store.open(path, writable=True) as reopened:
        assert (reopened.opening.rows_added, reopened.opening.unreadable) == (0, ())
        assert reopened.verify(deep=True).ok


def test_the_versions_of_a_chain_share_their_blocks_again(store: Store, other: Store, target: Path) -> None:
    second = sleep(store, 900, before=sleep(store, 600))
    one = other.import_file(exported(store, target, version=1))
    two = other.import_file(exported(store, target.with_name("two"), version=2), as_uri=OTHER_URI)
    assert (one.blocks_new, one.blocks_reused) == (4, 0)
    assert (two.blocks_new, two.blocks_reused) == (len(second.entries) - 2, 2)
    receipt = sleep(other, 1200, uri=OTHER_URI, before=two)  # what it returns is fit to go on from
    assert (receipt.version, receipt.blocks_reused) == (2, 3)
    require_awake(other, 1200, uri=OTHER_URI)


def test_the_same_bundle_again_is_what_is_there_and_nothing_is_written(
    store: Store, other: Store, target: Path
) -> None:
    exported(store, target) if sleep(store, 600) else None
    first = other.import_file(target)
    before = tree(other.path)
    again = other.import_file(target)
    assert tree(other.path) == before
    assert (again.bundle_id, again.version, again.bytes_written, again.blocks_new) == (first.bundle_id, 1, 0, 0)
    assert again.entries == first.entries
    assert store.import_file(target).bytes_written == 0, "where it came from it is too"


def test_the_same_bundle_again_writes_what_is_damaged_there(other: Store, file: Path) -> None:
    receipt = other.import_file(file)
    making.spoil(other, receipt, 1)
    again = other.import_file(file)
    assert (again.bundle_id, again.blocks_new, again.blocks_reused) == (receipt.bundle_id, 1, 3)
    require_awake(other, 600)
    assert other.import_file(file).bytes_written == 0
    making.spoil(other, receipt, 1)
    rescue = other.import_file(file, as_uri=OTHER_URI)
    assert (rescue.blocks_new, rescue.blocks_reused) == (1, 3), "only the damaged block is not referred to"
    require_awake(other, 600, uri=OTHER_URI)


@pytest.mark.parametrize("what", ["missing", "damaged", "missing with the index", "damaged without the index"])
def test_a_version_whose_manifest_is_lost_comes_back_by_the_import(other: Store, file: Path, what: str) -> None:
    receipt = other.import_file(file)
    path = making.manifest_path(other, receipt.bundle_id)
    if what.startswith("missing"):
        path.unlink()
    else:
        making.put(path, b"damaged")
    with contextlib.closing(making.reopened(other, anew="index" in what)) as again:
        back = again.import_file(file)
        assert (back.bundle_id, back.version, back.blocks_new) == (receipt.bundle_id, 1, 0)
        require_awake(again, 600)
        assert again.import_file(file).bytes_written == 0
    with Store.open(other.path, writable=True) as again:
        assert again.opening.unreadable == ()


def test_a_failure_while_a_version_is_made_whole_leaves_the_version(other: Store, file: Path) -> None:
    receipt = other.import_file(file)
    making.spoil(other, receipt, 1)
    before = tree(other.path)
    with mock.patch.object(TempFile, "publish", side_effect=errors.NoSpace("injected")), pytest.raises(errors.NoSpace):
        other.import_file(file)
    assert tree(other.path) == before
    other.import_file(file)
    require_awake(other, 600)


def test_another_name_gives_a_new_manifest_with_the_imported_one_as_parent(
    store: Store, other: Store, target: Path
) -> None:
    slept = sleep(store, 600)
    exported(store, target)
    receipt = other.import_file(target, as_uri=OTHER_URI)
    assert (receipt.uri, receipt.version, receipt.parent) == (OTHER_URI, 1, slept.bundle_id)
    with other.open_session(OTHER_URI) as reader, store.open_session(URI) as original:
        assert contents(reader) == making.expected(600)
        assert reader.manifest.session == original.manifest.session
        assert reader.manifest.identity == original.manifest.identity
    assert other.find_session(URI) is None
    sleep(other, 900, uri=OTHER_URI, before=receipt)
    require_awake(other, 900, uri=OTHER_URI)


def test_two_imports_of_one_file_at_once_are_one(other: Store, file: Path) -> None:
    receipts: list[Receipt] = []
    threads = [threading.Thread(target=lambda: receipts.append(other.import_file(file))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({receipt.bundle_id for receipt in receipts}) == 1
    assert sorted(receipt.bytes_written > 0 for receipt in receipts) == [False, False, False, True]
    assert [version for _, version, _ in rows(other)] == [1]


def test_an_import_under_another_name_is_not_done_twice(other: Store, file: Path) -> None:
    """Who was cut off before the receipt asks again, perhaps after the session has gone on."""
    first = other.import_file(file, as_uri=OTHER_URI)
    sleep(other, 900, uri=first.uri, before=first)
    before, known = tree(other.path), rows(other)
    again = other.import_file(file, as_uri=OTHER_URI)
    assert (again.uri, again.version, again.bundle_id) == (first.uri, first.version, first.bundle_id)
    assert (again.bytes_written, again.entries) == (0, first.entries)
    assert (tree(other.path), rows(other)) == (before, known)


@pytest.mark.parametrize("as_uri", [None, OTHER_URI])
def test_a_session_that_nobody_named_is_named_by_an_import_under_a_name(
    store: Store, other: Store, target: Path, as_uri: SessionUri | None
) -> None:
    making.write(store, making.drafts(300), 300, session={"model": "demo", UNNAMED: True})
    first = other.import_file(exported(store, target), as_uri=as_uri)
    again = other.import_file(target, as_uri=as_uri)
    assert again.bundle_id == first.bundle_id
    assert [row.unnamed for row in other.index.all_rows()] == [as_uri is None]


@pytest.mark.parametrize("how", ["file", "incoming"])
@pytest.mark.parametrize("as_uri", [None, OTHER_URI])
@pytest.mark.parametrize("theirs", ["a stranger", "an earlier one", "one that goes on", "one that only says so"])
def test_an_import_adds_to_no_session(
    store: Store, other: Store, target: Path, theirs: str, as_uri: SessionUri | None, how: str
) -> None:
    """Else `wake NAME` gives something else because of a file, and `prune --keep-last 1` removes what was there."""
    first = sleep(store, 300)
    exported(store, target)
    uri = as_uri or URI
    ours = other.import_file(target, as_uri=as_uri)
    if theirs == "a stranger":
        store.delete_session(URI)
        sleep(store, 600, seed=2)
    elif theirs == "one that goes on":
        sleep(store, 600, before=first)
    elif theirs == "one that only says so":
        making.write(store, making.drafts(20, seed=77), 20, parent=ours.bundle_id, session={"model": "demo"})
    else:
        store.delete_session(URI)
        sleep(store, 40)
    file = exported(store, target.with_name("theirs"))
    before = making.names(other.path), rows(other)
    work = partial(other.import_file, file, as_uri=as_uri)
    if how == "incoming":
        work = partial(other.adopt_incoming, hand_over(other.path, str(file)), as_uri=as_uri)
    with pytest.raises(errors.NameTaken, match=f"a name that is free .`--as NAME`., .*`torpor rm {uri}`") as refused:
        work()
    assert refused.value.details == {"session": str(uri), "imported": str(URI)}
    assert (making.names(other.path), rows(other)) == before
    assert other.import_file(file, as_uri=THIRD_URI).version == 1
    other.delete_session(uri)
    other.import_file(file, as_uri=as_uri)
    assert len(other.versions(uri)) == 1, "as the message says"


def test_a_name_of_which_all_is_missing_is_taken(other: Store, file: Path, tmp_path: Path) -> None:
    """Else it is another session's once its file is back."""
    first = sleep(other, 600, uri=OTHER_URI, seed=7)
    own = tmp_path / "own.mvb"
    other.export_session(OTHER_URI, 1, own)
    making.manifest_path(other, first.bundle_id).unlink()
    with contextlib.closing(making.reopened(other)) as again:
        with pytest.raises(errors.NameTaken):
            again.import_file(file, as_uri=OTHER_URI)
        assert again.import_file(own).bundle_id == first.bundle_id, "the very version comes back"
        require_awake(again, 600, uri=OTHER_URI, seed=7)


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_name_whose_manifest_can_be_read_again_is_taken(other: Store, file: Path, how: str) -> None:
    """It was damaged or missing when the store was opened, and is there since."""
    first = sleep(other, 600, uri=OTHER_URI, seed=7)
    path = making.manifest_path(other, first.bundle_id)
    good = making.flip(path, 80)
    if how == "missing":
        path.unlink()
    with contextlib.closing(making.reopened(other, anew=True)) as again:
        assert again.index.find(OTHER_URI) is None
        making.put(path, good)
        with pytest.raises(errors.NameTaken):
            again.import_file(file, as_uri=OTHER_URI)


@pytest.mark.parametrize("version", [1, 2])
def test_a_name_that_is_the_files_own_imports_as_no_name_does(
    store: Store, other: Store, target: Path, version: int
) -> None:
    """Else an earlier version becomes the newest, and a prune removes the tokens behind it."""
    sleep(store, 159, before=sleep(store, 5))
    exported(store, target, version=version)
    before = tree(store.path), rows(store)
    again = store.import_file(target, as_uri=URI)
    assert (again.version, again.bytes_written) == (version, 0)
    assert (tree(store.path), rows(store)) == before
    elsewhere = other.import_file(target, as_uri=URI)
    assert (elsewhere.version, elsewhere.bundle_id) == (version, again.bundle_id)


def test_a_taken_name_is_told_with_what_removes_that_very_session(store: Store, other: Store, target: Path) -> None:
    work = SessionUri("work", OTHER_URI.name)
    sleep(other, 300, uri=work)
    sleep(other, 300, uri=OTHER_URI, seed=1)
    sleep(store, 600, seed=2)
    exported(store, target)
    with pytest.raises(errors.NameTaken) as refused:
        other.import_file(target, as_uri=work)
    (advised,) = re.findall("`torpor rm ([^`]+)`", refused.value.message)
    assert other.resolve(advised) == work


def test_a_version_forked_from_the_imported_bundle_is_not_taken_for_its_import(
    store: Store, other: Store, target: Path
) -> None:
    slept = sleep(store, 600)
    exported(store, target)
    making.write(
        store, (), 600, uri=OTHER_URI, parent=slept.bundle_id, reused=slept.entries, session={"model": "another"}
    )
    with pytest.raises(errors.NameTaken):
        store.import_file(target, as_uri=OTHER_URI)


def slept_as(store: Store, version: int, **what: int) -> Receipt:
    """A sleep that gets a version number of our choice, as only bytes from elsewhere can have it."""
    with mock.patch.object(StoreCore, "next_version", return_value=contextlib.nullcontext(version)):
        return sleep(store, 300, **what)


def test_the_largest_number_that_an_import_keeps_is_kept(store: Store, other: Store, target: Path) -> None:
    slept = slept_as(store, MAX_IMPORTED_VERSION)
    receipt = other.import_file(exported(store, target))
    assert (receipt.version, receipt.bundle_id) == (MAX_IMPORTED_VERSION, slept.bundle_id)
    assert sleep(other, 600, before=receipt).version == MAX_IMPORTED_VERSION + 1


@pytest.mark.parametrize("version", [MAX_IMPORTED_VERSION + 1, MAX_VERSION])
def test_a_number_that_no_store_counts_to_is_not_taken_over_and_stops_no_sleep(
    store: Store, other: Store, target: Path, version: int
) -> None:
    slept = slept_as(store, version)
    receipt = other.import_file(exported(store, target))
    assert (receipt.version, receipt.parent) == (1, slept.bundle_id)
    require_awake(other, 300)
    assert other.import_file(target).bundle_id == receipt.bundle_id, "asked again it is not taken twice"
    assert sleep(other, 600, before=receipt).version == 2
    require_awake(other, 600)


def test_a_session_whose_numbers_are_used_up_is_told_so_before_anything_is_written(
    other: Store, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_as(other, MAX_VERSION, seed=5)
    before = tree(other.path)
    monkeypatch.setattr(StoreFolder, "new_temp", lambda *_: pytest.fail("a file was begun"))
    with pytest.raises(errors.LimitExceeded, match="largest version number"):
        sleep(other, 600)
    assert tree(other.path) == before
    monkeypatch.undo()
    other.export_session(URI, None, target.with_name("old"))
    assert other.import_file(target.with_name("old"), as_uri=OTHER_URI).version == 1
    assert sleep(other, 600, uri=OTHER_URI).version == 2


# --- what changes while an import runs


def test_blocks_that_leave_the_store_while_an_import_refers_to_them_are_copied(other: Store, file: Path) -> None:
    """The pins come too late for a removal that has looked at them before."""
    gone = sleep(other, 600, uri=OTHER_URI)
    core = other._core

    def remove() -> None:
        core.remove_packs({name for entry in gone.entries for name in core.index.packs_of(entry.id)})

    with meanwhile(core, "missing_of", remove):
        receipt = other.import_file(file)
    assert receipt.blocks_new == len(receipt.entries)
    require_awake(other, 600)


def test_an_import_pins_the_blocks_that_it_refers_to(store: Store, other: Store, target: Path) -> None:
    receipt = sleep(store, 600)
    exported(store, target)
    sleep(other, 600, uri=OTHER_URI)
    pinned: set[bytes] = set()
    with meanwhile(other._core, "missing_of", lambda: pinned.update(other._core.pins.blocks())):
        assert other.import_file(target).blocks_new == 0
    assert pinned == {entry.id for entry in receipt.entries}
    assert not other._core.pins.blocks()


# --- what is refused


def refused(
    store: Store, path: Path, kind: type[errors.StoreError] | tuple[type[errors.StoreError], ...]
) -> errors.StoreError:
    """An import that is refused, after which the store is as it was."""
    before, known = tree(store.path), rows(store)
    with pytest.raises(kind) as refusal:
        store.import_file(path)
    assert tree(store.path) == before
    assert rows(store) == known
    assert store._core.writable
    return refusal.value


def small_export(store: Store, target: Path, *, compressed: bool) -> Path:
    if compressed:
        making.sleep_compressed(store)
    else:
        sleep(store, 5, layers=1, heads=1, dim=3)
    return exported(store, target)


@pytest.mark.parametrize("compressed", [False, True])
def test_t5_an_export_with_any_byte_flipped_is_refused(
    store: Store, other: Store, target: Path, compressed: bool
) -> None:
    data = small_export(store, target, compressed=compressed).read_bytes()
    accepted = []
    with target.open("r+b", buffering=0) as file:
        for at, value in enumerate(data):
            os.pwrite(file.fileno(), bytes([value ^ 1 << at % 8]), at)
            try:
                other.import_file(target)
                accepted.append(at)
            except errors.StoreError:
                pass
            os.pwrite(file.fileno(), bytes([value]), at)
    assert len(data) > 900
    assert not accepted
    assert nothing_came(other)
    other.import_file(target)


def test_t5_an_export_cut_anywhere_is_truncated(store: Store, other: Store, target: Path) -> None:
    data = small_export(store, target, compressed=False).read_bytes()
    for size in range(len(data) - 1, -1, -1):
        os.truncate(target, size)
        with pytest.raises(errors.Truncated):
            other.import_file(target)
    assert nothing_came(other)


def traded(store: Store, file: Path) -> None:
    """Every digest right: only the blocks' own headers tell that they are not what the manifest says."""
    with store.open_session(URI) as reader:
        one, two, *others = reader.entries
        blocks = (dataclasses.replace(one, id=two.id), dataclasses.replace(two, id=one.id), *others)
        sealed(reader, dataclasses.replace(reader.manifest, blocks=blocks), reader.entries, file)


def lacking(store: Store, file: Path, *, keys_alone: bool) -> None:
    with store.open_session(URI) as reader:
        first, *others = reader.entries
        entries, stripped = (reader.entries, first.id) if keys_alone else (others, b"")
        sealed(reader, reader.manifest, entries, file, stripped=stripped)


def sealed(
    reader: BundleReader, manifest: Manifest, entries: Sequence[BlockEntry], target: Path, stripped: bytes = b""
) -> None:
    """A file of these blocks and this manifest, in which every digest is right."""
    with making.temp_file(target.parent) as temp:
        writer = PackWriter(temp)
        for entry in entries:
            with reader.holding(entry) as file:
                (writer.add_stripped if entry.id == stripped else writer.add_copy)(file, entry.id)
        writer.finish(manifest.encode())
        temp.publish(target.name, replacing=True)


def later(file: Path, *, is_told: bool) -> None:
    """Of a later version; or a digest does not say that the 3 was written."""
    data = file.read_bytes()
    changed = making.of_a_later_version(data)
    file.write_bytes(changed if is_told else changed[:32] + data[32:])


NO_VERSION: dict[str, tuple[Callable[[Store, Path], object], type[errors.StoreError]]] = {
    "empty": (lambda _, file: file.write_bytes(b""), errors.Truncated),
    "cut": (lambda _, file: file.write_bytes(file.read_bytes()[:-1]), errors.Truncated),
    "longer": (lambda _, file: file.write_bytes(file.read_bytes() + b"\0"), errors.TrailingData),
    "twice": (lambda _, file: file.write_bytes(2 * file.read_bytes()), errors.TrailingData),
    "flipped": (lambda _, file: making.flip(file, file.stat().st_size // 2), errors.Corruption),
    "zeros": (lambda _, file: file.write_bytes(bytes(file.stat().st_size)), errors.CorruptBundle),
    "noise": (lambda _, file: file.write_bytes(os.urandom(4096)), errors.CorruptBundle),
    "a picture": (lambda _, file: file.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(5000)), errors.CorruptBundle),
    "a pack": (lambda store, file: shutil.copy(next(Path(store.path, "packs").iterdir()), file), errors.CorruptBundle),
    "a manifest": (lambda store, file: shutil.copy(*Path(store.path, "versions").iterdir(), file), errors.Corruption),
    "a later version": (lambda _, file: later(file, is_told=True), errors.UnsupportedFormat),
    "damage that looks like one": (lambda _, file: later(file, is_told=False), errors.CorruptBundle),
    "blocks of another chain": (traded, errors.CorruptBundle),
    "a block is not there": (partial(lacking, keys_alone=False), errors.BlockMissing),
    "its keys are not there": (partial(lacking, keys_alone=True), errors.BlockMissing),
}


@pytest.mark.parametrize("way", ["import", "hand over"])
@pytest.mark.parametrize(("make", "kind"), NO_VERSION.values(), ids=NO_VERSION)
def test_threat_23_a_file_that_is_no_whole_version_is_refused_and_leaves_nothing(
    store: Store,
    other: Store,
    file: Path,
    make: Callable[[Store, Path], object],
    kind: type[errors.StoreError],
    way: str,
) -> None:
    make(store, file)
    if way == "import":
        refused(other, file, kind)
        return
    with pytest.raises(kind):
        hand_over(other.path, str(file))
    assert not list(Path(other.path).glob("incoming/*"))


def test_a_bundle_of_format_1_that_needs_another_says_what_to_do(other: Store) -> None:
    error = refused(other, bundle_of(CASES / "small", URI, 2), errors.BlockMissing)
    assert "torpor export" in error.message


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "device", "nul", "looping link"])
def test_what_is_no_file_is_a_typed_error(other: Store, target: Path, kind: str) -> None:
    path: Path | str = target
    if kind == "folder":
        target.mkdir()
    elif kind == "fifo":
        os.mkfifo(target)
    elif kind == "device":
        path = "/dev/zero"
    elif kind == "nul":
        path = "a\0b"
    elif kind == "looping link":
        target.symlink_to(target)
    with pytest.raises(errors.StoreIoError):
        other.import_file(path)


def test_a_file_behind_a_link_and_with_two_names_is_the_user_s_choice(store: Store, other: Store, target: Path) -> None:
    sleep(store, 300)
    exported(store, target)
    os.link(target, target.with_name("second"))
    target.with_name("link").symlink_to(target)
    other.import_file(target.with_name("link"))
    require_awake(other, 300)


@pytest.mark.parametrize("as_uri", [None, THIRD_URI])
def test_an_import_that_has_no_room_is_refused_with_its_size_and_uses_up_nothing_of_the_day(
    store: Store, tmp_path: Path, target: Path, as_uri: SessionUri | None
) -> None:
    """To the byte: with one more it fits. What the store has already needs no room."""
    first = sleep(store, 600)
    exported(store, target)
    today = utc_day(time.time_ns())
    with Store.open(tmp_path / "measured", writable=True) as measured:
        size = measured.import_file(target, as_uri=as_uri).bytes_written
    with Store.open(tmp_path / "small", writable=True, budget=Budget(max_bytes_per_day=size - 1)) as small:
        for _ in range(3):
            with pytest.raises(errors.BudgetExceeded) as refusal:
                small.import_file(target, as_uri=as_uri)
            assert refusal.value.details["needed"] == size
        assert small.index.written().get(today, 0) == 0
        assert not list((tmp_path / "small").rglob("*.tmp"))
    with Store.open(tmp_path / "small", writable=True, budget=Budget(max_bytes_per_day=size)) as small:
        small.import_file(target, as_uri=as_uri)
    with Store.open(tmp_path / "has-it", writable=True) as full:
        sleep(full, 600, uri=OTHER_URI)
        held = full.index.written().get(today, 0)
    with Store.open(tmp_path / "has-it", writable=True, budget=Budget(max_bytes_per_day=held + 4096)) as full:
        assert full.import_file(target, as_uri=as_uri).blocks_reused == len(first.entries)


def test_a_file_that_changes_while_it_is_imported_is_never_taken_half_and_half(
    store: Store, other: Store, target: Path
) -> None:
    """Checked first and copied after: what changed in between does not read back."""
    receipt = sleep(store, 600)
    exported(store, target)
    with pack_file(target) as file:
        frame = file.frames[receipt.entries[0].id]

    def spoil(done: int, total: int) -> None:
        if done == total:
            making.spoil_frame(target, frame)

    with pytest.raises(errors.Corruption):
        other.import_file(target, on_progress=spoil)
    assert nothing_came(other)


def test_a_full_disk_leaves_the_store_as_it_was(other: Store, file: Path) -> None:
    with mock.patch.object(os, "writev", side_effect=OSError(errno.ENOSPC, "injected")):
        refused(other, file, errors.NoSpace)
    other.import_file(file)
    require_awake(other, 600)


# --- format 1


def test_what_the_last_torpor_of_format_1_exported_is_the_same_version_here(
    store: Store, tmp_path: Path, target: Path
) -> None:
    file, second = CASES / "small.mvb", bundle_of(CASES / "small", URI, 2).stem
    receipt = store.import_file(file)
    assert (receipt.bundle_id, receipt.version) == (second, 2)
    require_awake(store, 600, **SMALL)
    assert store.import_file(file).bytes_written == 0
    again = store.import_file(file, as_uri=OTHER_URI)
    assert (again.version, again.parent, again.blocks_new) == (1, second, 0)
    store.export_session(URI, None, target)
    with Store.open(tmp_path / "third", writable=True) as third:
        assert third.import_file(target).bundle_id == second


# --- what was handed to a running daemon


def test_what_was_handed_over_is_adopted_and_removed(other: Store, file: Path) -> None:
    bundle_id = hand_over(other.path, str(file))
    receipt = other.adopt_incoming(bundle_id)
    assert receipt.bundle_id == bundle_id
    require_awake(other, 600)
    assert list((Path(other.path) / "incoming").iterdir()) == []
    with pytest.raises(errors.BundleMissing):
        other.adopt_incoming(bundle_id)
    hand_over(other.path, str(file))
    assert other.adopt_incoming(bundle_id).bytes_written == 0
    assert list((Path(other.path) / "incoming").iterdir()) == []
    hand_over(other.path, str(file))
    assert other.adopt_incoming(bundle_id, as_uri=OTHER_URI).uri == OTHER_URI


@pytest.mark.parametrize("kind", ["link", "folder link", "hard link", "fifo"])
def test_threat_20_21_what_is_not_ours_alone_in_incoming_is_refused(
    store: Store, other: Store, target: Path, kind: str
) -> None:
    sleep(store, 300)
    exported(store, target)
    name = f"{rows(store)[0][2]}.mvb"
    incoming = Path(other.path) / "incoming"
    if kind == "folder link":
        target.rename(target.with_name(name))
        target.parent.chmod(0o700)
        incoming.symlink_to(target.parent)
    else:
        incoming.mkdir(mode=0o700)
        if kind == "link":
            (incoming / name).symlink_to(target)
        elif kind == "hard link":
            os.link(target, incoming / name)
        else:
            os.mkfifo(incoming / name)
    with pytest.raises(errors.UnsafePath):
        other.adopt_incoming(name[:64])
    assert rows(other) == []


def test_what_cannot_be_adopted_stays_in_incoming(other: Store, file: Path) -> None:
    bundle_id = hand_over(other.path, str(file))
    waiting = Path(other.path) / "incoming" / f"{bundle_id}.mvb"
    with pack_file(waiting) as pack:
        making.spoil_frame(waiting, next(iter(pack.frames.values())))
    with pytest.raises(errors.CorruptBlock):
        other.adopt_incoming(bundle_id)
    assert waiting.exists()
    assert rows(other) == []


def test_an_import_makes_a_stripped_version_whole_and_it_stays_so(store: Store, target: Path) -> None:
    """Its keys and values have come back, so the strip goes: else the next repack lets go of them again."""
    first = sleep(store, 600)
    exported(store, target)
    store.strip(URI)
    with store.open_session(URI) as reader:
        assert reader.whole_up_to() == 0
    with pytest.raises(errors.BlockMissing, match="is stripped: it has no keys and values to export"):
        store.export_session(URI, None, target.with_name("again"))
    assert os.listdir(target.parent) == [target.name]
    assert store.import_file(target).bundle_id == first.bundle_id
    store.repack(policy=CLEARING)
    require_awake(store, 600)
    assert store.import_file(target).blocks_new == 0


def test_an_import_under_a_name_whose_first_version_is_being_written_is_refused(store: Store, target: Path) -> None:
    sleep(store, uri=OTHER_URI, seed=1)
    store.export_session(OTHER_URI, None, target)

    def session() -> dict[str, object]:
        with pytest.raises(errors.NameTaken):
            store.import_file(target, as_uri=URI)
        return {"model": "demo"}

    assert making.write(store, making.drafts(300), 300, session=session).version == 1
    require_awake(store, 300)


def test_a_map_with_a_number_that_is_not_itself_is_imported_once(store: Store, target: Path) -> None:
    making.write(store, making.drafts(300), 300, session={"model": "demo", "n": float("nan")})
    store.export_session(URI, None, target)
    first = store.import_file(target, as_uri=OTHER_URI)
    again = store.import_file(target, as_uri=OTHER_URI)
    assert (again.bundle_id, again.bytes_written) == (first.bundle_id, 0)


def test_an_import_of_a_version_that_is_deleted_meanwhile_is_there_once_it_is_acknowledged(
    store: Store, target: Path
) -> None:
    sleep(store)
    store.export_session(URI, None, target)
    with meanwhile(intake.Intake, "_packed", lambda: store.delete_session(URI)):
        receipt = store.import_file(target)
    assert store._core.folder.has_manifest(receipt.bundle_id)
    assert store.verify(deep=True).findings == ()
    require_awake(store, 300)
