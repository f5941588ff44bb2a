"""Export and import: one file is a version, bit for bit, or it is refused and nothing happened."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from blake3 import blake3
from torpor.memvid import BlockDraft, Receipt, SessionUri, SlotDraft, SlotSpec, Store, errors
from torpor.memvid.disk.budget import Budget, utc_day
from torpor.memvid.exchange import transfer
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.folder.temps import Temps
from torpor.memvid.format.bundle import BundleFile
from torpor.memvid.index.index import Index
from torpor.memvid.limits import MAX_IMPORTED_VERSION, MAX_VERSION
from torpor.memvid.writing.core import StoreCore
from torpor.memvid.writing.rewriting import Contents, prepared
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.resealing import reseal
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    contents,
    expected,
    meanwhile,
    put,
    require_awake,
    sleep,
    write,
)

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


def tree(path: Path) -> dict[str, bytes]:
    """Every file but the index, whose pages may move without its rows changing."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.name.startswith("index.sqlite")
    }


def exported(store: Store, target: Path, uri: SessionUri = URI, version: int | None = None) -> Path:
    store.export_session(uri, version, target)
    return target


def rows(store: Store) -> list[tuple[str, int, bytes]]:
    return [(str(row.uri), row.version, row.bundle_id) for row in store.index.all_rows()]


def bundle_file(path: Path) -> BundleFile:
    return BundleFile(os.open(path, os.O_RDONLY), str(path), None)


# --- export


def test_an_export_is_a_bundle_of_the_same_id_that_needs_no_other(store: Store, target: Path) -> None:
    first = sleep(store, 600)
    second = sleep(store, 900, before=first)
    report = store.export_session(URI, None, target)
    with contextlib.closing(bundle_file(target)) as file:
        assert file.bundle_id == second.bundle_id == report.bundle_id
        assert file.directory.holders == ()
        assert file.manifest is not None
        assert set(file.frames) == {entry.id for entry in second.entries} == {e.id for e in file.manifest.blocks}
        for block_id in file.frames:
            file.check_block(block_id)
    assert (report.uri, report.version, report.token_count, report.blocks) == (URI, 2, 900, len(second.entries))
    assert (report.path, report.file_bytes) == (str(target), target.stat().st_size)
    assert report.logical_bytes == second.logical_bytes
    assert target.stat().st_mode & 0o777 == 0o600
    assert os.listdir(target.parent) == [target.name]


def test_an_older_version_is_exported_by_its_number(store: Store, target: Path) -> None:
    first = sleep(store, 300)
    sleep(store, 600, before=first)
    assert store.export_session(URI, 1, target).bundle_id == first.bundle_id
    with pytest.raises(errors.SessionNotFound):
        store.export_session(URI, 3, target.with_name("three"))
    with pytest.raises(errors.SessionNotFound):
        store.export_session(OTHER_URI, None, target.with_name("other"))


def test_a_read_only_store_exports_beside_a_writer_and_writes_nothing(store: Store, target: Path) -> None:
    second = sleep(store, 600, before=sleep(store, 300))
    before = tree(Path(store.path))
    with Store.open(store.path, writable=False) as reader:
        assert reader.export_session(URI, None, target).bundle_id == second.bundle_id
    assert tree(Path(store.path)) == before


def test_an_export_finds_a_block_that_was_moved_while_it_ran(store: Store, target: Path, other: Store) -> None:
    """Another process compacts: the delta takes its blocks in, the file that held them loses them."""
    first = sleep(store, 600)
    second = sleep(store, 900, before=first)
    sleep(store, 700, uri=OTHER_URI, seed=4)
    with Store.open(store.path, writable=False) as reader:
        moved = []

        def move(_done: int, _total: int) -> None:
            if not moved:
                adopt_all(store, second)
                store.delete_session(URI)
                moved.append(not making.bundle_path(store, first.bundle_id).exists())

        report = reader.export_session(URI, 2, target, on_progress=move)
    assert moved == [True]
    assert report.bundle_id == second.bundle_id
    other.import_file(target)
    require_awake(other, 900)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link", "fifo"])
def test_what_is_there_already_is_never_overwritten(store: Store, target: Path, kind: str) -> None:
    sleep(store, 300)
    precious = target.with_name("precious")
    precious.write_text("mine")
    if kind == "file":
        target.write_text("mine too")
    elif kind == "folder":
        target.mkdir()
    elif kind == "fifo":
        os.mkfifo(target)
    else:
        target.symlink_to(precious if kind == "link" else target.with_name("nowhere"))
    before = sorted(os.listdir(target.parent))
    with pytest.raises(errors.TargetExists):
        store.export_session(URI, None, target)
    assert sorted(os.listdir(target.parent)) == before
    assert precious.read_text() == "mine"


def test_a_file_that_appears_while_the_export_runs_is_not_overwritten_on_a_disk_without_links(
    store: Store, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    monkeypatch.setattr(os, "link", without_links)
    with pytest.raises(errors.TargetExists):
        store.export_session(URI, None, target, on_progress=lambda *_: target.write_text("mine") and None)
    assert {name.name: name.read_text() for name in target.parent.iterdir()} == {target.name: "mine"}


def test_an_export_whose_temporary_name_would_not_go_at_once_leaves_its_file_alone(store: Store, target: Path) -> None:
    sleep(store, 300)
    with meanwhile(os, "unlink", mock.Mock(side_effect=OSError(errno.EIO, "once"))):
        store.export_session(URI, None, target)
    assert [file.name for file in target.parent.iterdir() if file.is_file()] == [target.name]


def without_links(*_args: object, **_kwargs: object) -> None:
    raise OSError(errno.EPERM, "no links here")


def test_a_disk_without_links_gets_its_export_too(store: Store, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = sleep(store, 300)
    monkeypatch.setattr(os, "link", without_links)
    store.export_session(URI, None, target)
    assert os.listdir(target.parent) == [target.name]
    with contextlib.closing(bundle_file(target)) as file:
        assert file.bundle_id == second.bundle_id


def test_nothing_is_exported_into_the_store(store: Store, tmp_path: Path) -> None:
    sleep(store, 300)
    place = Path(store.path)
    (tmp_path / "link").symlink_to(place / "bundles")
    before = tree(place)
    for inside in (place / "x", place / "bundles" / "x", place / "quarantine" / "x", tmp_path / "link" / "x"):
        with pytest.raises(errors.UnsafePath):
            store.export_session(URI, None, inside)
    assert tree(place) == before
    store.export_session(URI, None, tmp_path / "x")  # beside it is allowed


def test_a_damaged_block_is_not_exported_and_named(store: Store, target: Path) -> None:
    receipt = sleep(store, 300)
    making.spoil(store, receipt, 0)
    with pytest.raises(errors.CorruptBlock) as refusal:
        store.export_session(URI, None, target)
    assert refusal.value.path == str(making.bundle_path(store, receipt.bundle_id))
    assert os.listdir(target.parent) == []
    assert store.statistics().writable


@pytest.mark.parametrize(("failure", "kind"), [(errno.ENOSPC, errors.NoSpace), (errno.EIO, errors.StoreIoError)])
def test_a_failed_write_leaves_nothing_of_an_export(
    store: Store, target: Path, failure: int, kind: type[errors.StoreError]
) -> None:
    sleep(store, 300)
    with mock.patch.object(os, "writev", side_effect=OSError(failure, "injected")), pytest.raises(kind) as refusal:
        store.export_session(URI, None, target)
    assert "torpor rm" not in refusal.value.message  # the file lies outside the store
    if failure == errno.ENOSPC:
        assert refusal.value.message.startswith(f"No room for {target}: No space left on device. ")
        assert "Free some space there" in refusal.value.message
    assert os.listdir(target.parent) == []
    sleep(store, 600)


@pytest.mark.parametrize("at", [1, 2])
def test_an_export_that_cannot_be_flushed_is_taken_back_and_the_store_writes_on(
    store: Store, target: Path, at: int
) -> None:
    """Its disk may be another one than the store's."""
    sleep(store, 300)
    failure = mock.Mock(side_effect=OSError(errno.EIO, "injected"))
    with meanwhile(os, "fsync", failure, at=at), pytest.raises(errors.DurabilityLost):
        store.export_session(URI, None, target)
    assert os.listdir(target.parent) == []
    assert store.statistics().writable
    sleep(store, 600)


def test_an_export_that_does_not_read_back_is_not_published(
    store: Store, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    real = os.writev

    def writev(fd: int, buffers: list[memoryview]) -> int:
        data = b"".join(map(bytes, buffers))
        return real(fd, [data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 5000 else data])

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(errors.ReadBackFailed):
        store.export_session(URI, None, target)
    assert os.listdir(target.parent) == []


# --- there and back


def adopt_all(store: Store, receipt: Receipt) -> None:
    """Write a bundle's file anew with all its blocks in it, as a compaction may."""
    with contextlib.closing(store._core.open_bundle(receipt.bundle_id)) as file:
        frames = [(entry.id, entry.bundle_id) for entry in file.entries if entry.bundle_id is not None]
    with prepared(
        store._core, receipt.bundle_id, Contents(frames, {}, compressing={block for block, _ in frames})
    ) as new:
        assert new.commit()


def planes_sleep(store: Store, uri: SessionUri) -> Receipt:
    """Slots of two bytes an element that shrink, in 4,096 tokens' worth of bytes."""
    values = struct.pack("<8192e", *(1 + (number % 97) / 1024 for number in range(8192)))
    spec = SlotSpec("0.k", "kv.k/1", "float16", (2, 64, 64))
    draft = BlockDraft("span", 0, making.token_ids(0, 64), [SlotDraft(spec, [memoryview(values)])])
    return write(store, [draft], 64, uri=uri, compressed=True,
    )  # fmt: skip


def delta_chain(store: Store) -> None:
    first = sleep(store, 300)
    sleep(store, 900, before=sleep(store, 600, before=first))


def fork_of_two(store: Store) -> None:
    second = sleep(store, 600, before=sleep(store, 300, uri=OTHER_URI), uri=OTHER_URI)
    sleep(store, 900, before=second)
    store.delete_session(OTHER_URI)


def compressed(store: Store) -> None:
    making.sleep_compressed(store)
    planes_sleep(store, OTHER_URI)


def rewritten(store: Store) -> None:
    adopt_all(store, sleep(store, 900, before=sleep(store, 600)))


SESSIONS = {"a delta chain": delta_chain, "a fork": fork_of_two, "compressed": compressed, "rewritten": rewritten}


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
    assert two.entries[0].bundle_id == one.bundle_id
    receipt = sleep(other, 1200, uri=OTHER_URI, before=two)  # what it returns is fit to go on from
    assert (receipt.version, receipt.blocks_reused) == (2, 3)
    require_awake(other, 1200, uri=OTHER_URI)


def test_the_same_bundle_again_is_what_is_there_and_nothing_is_written(
    store: Store, other: Store, target: Path
) -> None:
    exported(store, target) if sleep(store, 600) else None
    first = other.import_file(target)
    before = tree(Path(other.path))
    again = other.import_file(target)
    assert tree(Path(other.path)) == before
    assert (again.bundle_id, again.version, again.bytes_written, again.blocks_new) == (first.bundle_id, 1, 0, 0)
    assert again.entries == first.entries
    assert store.import_file(target).bytes_written == 0, "where it came from it is too"


def test_the_same_bundle_again_is_not_acknowledged_where_it_is_damaged(
    store: Store, other: Store, target: Path
) -> None:
    sleep(store, 600)
    receipt = other.import_file(exported(store, target))
    making.spoil(other, receipt, 1)
    with pytest.raises(errors.CorruptBlock, match="repair"):
        other.import_file(target)
    rescue = other.import_file(target, as_uri=OTHER_URI)
    assert (rescue.blocks_new, rescue.blocks_reused) == (1, 3), "only the damaged block is not referred to"
    require_awake(other, 600, uri=OTHER_URI)
    assert other.repair().ok, "which finds the block there"
    require_awake(other, 600)
    assert other.import_file(target).bytes_written == 0


@pytest.mark.parametrize("what", ["missing", "no manifest"])
def test_a_version_whose_file_is_lost_comes_back_after_a_repair(
    store: Store, other: Store, target: Path, what: str
) -> None:
    sleep(store, 600)
    receipt = other.import_file(exported(store, target))
    path = making.bundle_path(other, receipt.bundle_id)
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(b"damaged")
    with pytest.raises(errors.Corruption, match="repair"):
        other.import_file(target)
    other.repair()
    assert other.import_file(target).bundle_id == receipt.bundle_id
    require_awake(other, 600)
    assert other.verify(deep=True).ok


def test_another_name_gives_a_new_manifest_with_the_imported_one_as_parent(
    store: Store, other: Store, target: Path
) -> None:
    slept = sleep(store, 600)
    exported(store, target)
    receipt = other.import_file(target, as_uri=OTHER_URI)
    assert (receipt.uri, receipt.version, receipt.parent) == (OTHER_URI, 1, slept.bundle_id)
    with other.open_session(OTHER_URI) as reader, store.open_session(URI) as original:
        assert contents(reader) == expected(600)
        assert reader.manifest.session == original.manifest.session
        assert reader.manifest.identity == original.manifest.identity
    assert other.find_session(URI) is None
    sleep(other, 900, uri=OTHER_URI, before=receipt)
    require_awake(other, 900, uri=OTHER_URI)


@pytest.mark.parametrize("stripped", [False, True])
def test_a_session_comes_back_beside_the_retired_file_that_others_need(
    store: Store, target: Path, stripped: bool
) -> None:
    """The retired file also holds a block that is none of the session's; whoever needs it must still find it."""
    receipt = sleep(store, 600)
    exported(store, target)
    fork = sleep(store, 900, uri=OTHER_URI, before=receipt)
    foreign = sleep(store, 520, uri=THIRD_URI, seed=8)
    frames = [(entry.id, receipt.bundle_id) for entry in receipt.entries]
    frames.append((foreign.entries[0].id, foreign.bundle_id))
    store.delete_session(URI)
    if stripped:
        frames = frames[:2] + frames[-1:]
    with prepared(store._core, receipt.bundle_id, Contents(frames, {}, with_manifest=not stripped)) as new:
        assert new.commit()
    rest = [(entry.id, foreign.bundle_id) for entry in foreign.entries[1:]]
    holders = {foreign.entries[0].id: receipt.bundle_id}
    with prepared(store._core, foreign.bundle_id, Contents(rest, holders)) as new:
        assert new.commit()
    assert store.verify(deep=True).ok
    back = store.import_file(target)
    assert (back.bundle_id, back.version) == (receipt.bundle_id, 1)
    assert not making.bundle_path(store, receipt.bundle_id).with_suffix(".mvr").exists()
    for session, tokens, seed in ((URI, 600, 0), (OTHER_URI, 900, 0), (THIRD_URI, 520, 8)):
        require_awake(store, tokens, uri=session, seed=seed)
    assert store.verify(deep=True).ok
    store.delete_session(URI)
    require_awake(store, 900, uri=OTHER_URI)
    require_awake(store, 520, uri=THIRD_URI, seed=8)
    assert fork.bundle_id


def test_a_damaged_retired_file_stands_in_the_way_and_stays(store: Store, target: Path) -> None:
    receipt = sleep(store, 600)
    exported(store, target)
    sleep(store, 900, uri=OTHER_URI, before=receipt)
    store.delete_session(URI)
    retired = making.bundle_path(store, receipt.bundle_id).with_suffix(".mvr")
    os.truncate(retired, 200)
    refused(store, target, errors.Truncated)


def test_an_import_heals_the_blocks_of_a_retired_file(store: Store, target: Path) -> None:
    """What is in the imported file is taken from there; the retired one may be damaged in just that."""
    receipt = sleep(store, 600)
    exported(store, target)
    sleep(store, 900, uri=OTHER_URI, before=receipt)
    frame = making.frame_of(store, receipt.entries[0])
    store.delete_session(URI)
    making.spoil_frame(making.bundle_path(store, receipt.bundle_id).with_suffix(".mvr"), frame)
    assert not store.verify(deep=True).ok
    assert store.import_file(target).bundle_id == receipt.bundle_id
    require_awake(store, 900, uri=OTHER_URI)
    assert store.verify(deep=True).ok


def test_two_imports_of_one_file_at_once_are_one(store: Store, other: Store, target: Path) -> None:
    sleep(store, 600)
    exported(store, target)
    receipts: list[Receipt] = []
    threads = [threading.Thread(target=lambda: receipts.append(other.import_file(target))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({receipt.bundle_id for receipt in receipts}) == 1
    assert sorted(receipt.bytes_written > 0 for receipt in receipts) == [False, False, False, True]
    assert [version for _, version, _ in rows(other)] == [1]


def test_a_version_that_is_being_written_is_taken(store: Store, other: Store, target: Path) -> None:
    sleep(store, 600)
    exported(store, target)
    with other._core.next_version(URI) as version:
        assert version == 1
        assert other.import_file(target).version == 2


def test_an_import_under_another_name_is_not_done_twice(store: Store, other: Store, target: Path) -> None:
    """Who was cut off before the receipt asks again, perhaps after the session has gone on."""
    sleep(store, 600)
    first = other.import_file(exported(store, target), as_uri=OTHER_URI)
    sleep(other, 900, uri=first.uri, before=first)
    before, known = tree(Path(other.path)), rows(other)
    again = other.import_file(target, as_uri=OTHER_URI)
    assert (again.uri, again.version, again.bundle_id) == (first.uri, first.version, first.bundle_id)
    assert (again.bytes_written, again.entries) == (0, first.entries)
    assert (tree(Path(other.path)), rows(other)) == (before, known)


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
        write(store, making.drafts(20, seed=77), 20, parent=ours.bundle_id, session={"model": "demo"})
    else:
        store.delete_session(URI)
        sleep(store, 40)
    file = exported(store, target.with_name("theirs"))
    before = tree(Path(other.path) / "bundles"), rows(other)
    work = partial(other.import_file, file, as_uri=as_uri)
    if how == "incoming":
        work = partial(other.adopt_incoming, hand_over(other.path, str(file)), as_uri=as_uri)
    with pytest.raises(errors.NameTaken, match=f"a name that is free .`--as NAME`., .*`torpor rm {uri}`") as refused:
        work()
    assert refused.value.details == {"session": str(uri), "imported": str(URI)}
    assert (tree(Path(other.path) / "bundles"), rows(other)) == before
    assert other.import_file(file, as_uri=THIRD_URI).version == 1
    other.delete_session(uri)
    other.import_file(file, as_uri=as_uri)
    assert len(other.versions(uri)) == 1, "as the message says"


def test_a_name_of_which_all_is_set_aside_is_taken(store: Store, other: Store, target: Path, tmp_path: Path) -> None:
    """Else it is another session's once its file is back."""
    first = sleep(other, 600, uri=OTHER_URI, seed=7)
    own = tmp_path / "own.mvb"
    other.export_session(OTHER_URI, 1, own)
    making.bundle_path(other, first.bundle_id).rename(tmp_path / "away")
    other.repair()
    assert other.find_session(OTHER_URI) is None
    sleep(store, 600)
    with pytest.raises(errors.NameTaken):
        other.import_file(exported(store, target), as_uri=OTHER_URI)
    assert other.import_file(own).bundle_id == first.bundle_id, "the very version comes back"
    require_awake(other, 600, uri=OTHER_URI, seed=7)


@pytest.mark.parametrize("version", [1, 2])
def test_a_name_that_is_the_files_own_imports_as_no_name_does(
    store: Store, other: Store, target: Path, version: int
) -> None:
    """Else an earlier version becomes the newest, and a prune removes the tokens behind it."""
    sleep(store, 159, before=sleep(store, 5))
    exported(store, target, version=version)
    before = tree(Path(store.path)), rows(store)
    again = store.import_file(target, as_uri=URI)
    assert (again.version, again.bytes_written) == (version, 0)
    assert (tree(Path(store.path)), rows(store)) == before
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


def test_an_import_whose_earlier_version_is_damaged_is_none(store: Store, other: Store, target: Path) -> None:
    """Under a third name it is done again, and a repair has what it needs."""
    sleep(store, 600)
    first = other.import_file(exported(store, target), as_uri=OTHER_URI)
    making.spoil(other, first, 1)
    with pytest.raises(errors.NameTaken):
        other.import_file(target, as_uri=OTHER_URI)
    other.import_file(target, as_uri=THIRD_URI)
    other.repair()
    require_awake(other, 600, uri=OTHER_URI)


def test_a_version_forked_from_the_imported_bundle_is_not_taken_for_its_import(
    store: Store, other: Store, target: Path
) -> None:
    slept = sleep(store, 600)
    exported(store, target)
    write(store, (), 600, uri=OTHER_URI, parent=slept.bundle_id, reused=slept.entries, session={"model": "another"})
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
    before = tree(Path(other.path))
    monkeypatch.setattr(Temps, "new", lambda _folder: pytest.fail("a file was begun"))
    with pytest.raises(errors.LimitExceeded, match="import --as"):
        sleep(other, 600)
    assert tree(Path(other.path)) == before
    monkeypatch.undo()
    other.export_session(URI, None, target.with_name("old"))
    assert other.import_file(target.with_name("old"), as_uri=OTHER_URI).version == 1, "as the message says"
    assert sleep(other, 600, uri=OTHER_URI).version == 2


# --- what changes while an import runs


def test_a_live_file_that_the_index_does_not_know_ends_an_import_and_says_what_helps(
    store: Store, other: Store, target: Path
) -> None:
    """Somebody copied the file into the store beside its daemon."""
    receipt = sleep(store, 600)
    exported(store, target)
    stranger = making.bundle_path(other, receipt.bundle_id)
    stranger.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(target, stranger)
    stranger.chmod(0o600)
    error = refused(other, target, errors.IndexMismatch)
    assert "rebuild-index" in error.message
    assert error.details["path"] == str(stranger)
    other.rebuild_index()
    assert other.import_file(target).bytes_written == 0, "as the message says"
    require_awake(other, 600)


@pytest.mark.parametrize("damaged", [True, False])
def test_a_file_of_a_version_set_aside_that_is_back_ends_an_import_and_says_what_helps(
    store: Store, target: Path, damaged: bool
) -> None:
    receipt = sleep(store, 600)
    exported(store, target)
    file = making.bundle_path(store, receipt.bundle_id)
    data = bytearray(file.read_bytes())
    file.unlink()
    store.repair()
    data[-10] ^= damaged
    put(file, data)
    assert "`torpor repair`" in refused(store, target, errors.CorruptBundle).message
    store.repair()
    assert store.import_file(target).version == 1, "as the message says"
    require_awake(store, 600)


@pytest.mark.parametrize("as_uri", [None, OTHER_URI], ids=["as it is", "another name"])
def test_an_import_whose_blocks_go_elsewhere_each_time_copies_them_at_last(
    store: Store, other: Store, target: Path, as_uri: SessionUri | None
) -> None:
    sleep(store, 600)
    exported(store, target)
    sleep(other, 900, uri=THIRD_URI)  # holds the same first blocks
    with mock.patch.object(transfer, "moved_blocks", side_effect=lambda _core, places: list(places)) as asked:
        receipt = other.import_file(target, as_uri=as_uri)
    assert [len(call.args[1]) for call in asked.call_args_list] == [2] * (transfer._TRIES - 1) + [0]
    assert receipt.blocks_reused == 0
    require_awake(other, 600, uri=receipt.uri)
    assert [file.name for file in (Path(other.path) / "bundles").glob("*.tmp")] == []


def index_takes_no_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index file takes no row away any more, as on a full disk; one that goes on in memory does."""
    drop = Index.drop

    def full_on_disk(self: Index, bundle_ids: list[bytes]) -> None:
        if self._connection.execute("PRAGMA database_list").fetchone()[2]:
            raise errors.NoSpace("No room for the index.")
        drop(self, bundle_ids)

    monkeypatch.setattr(Index, "drop", full_on_disk)


@pytest.mark.parametrize("others_have_it", [False, True])
def test_a_version_whose_file_a_delete_could_only_empty_is_imported_again(
    store: Store, target: Path, monkeypatch: pytest.MonkeyPatch, others_have_it: bool
) -> None:
    """Its row still stands in the index file, with the places of its blocks before; the new file may lead elsewhere."""
    receipt = sleep(store, 600)
    exported(store, target)
    index_takes_no_drop(monkeypatch)
    store.delete_session(URI)
    emptied = making.bundle_path(store, receipt.bundle_id).with_suffix(".mvr")
    assert emptied.stat().st_size == 0
    if others_have_it:
        sleep(store, 600, uri=OTHER_URI)
    assert store.import_file(target).bundle_id == receipt.bundle_id
    assert not emptied.exists()
    store.close()
    monkeypatch.undo()
    with Store.open(store.path, writable=True) as again:
        require_awake(again, 600)
        if others_have_it:
            again.delete_session(OTHER_URI)
        require_awake(again, 600)
        assert again.verify(deep=True).ok


def test_an_import_whose_place_is_written_anew_each_time_gives_up(
    store: Store, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = sleep(store, 600)
    exported(store, target)
    sleep(store, 900, uri=OTHER_URI, before=receipt)
    store.delete_session(URI)
    tries = []
    monkeypatch.setattr("torpor.memvid.exchange.transfer._is_same", lambda *_: bool(tries.append(1)))
    error = refused(store, target, errors.StoreBusy)
    assert (error.code, len(tries)) == ("store_busy", transfer._TRIES)
    require_awake(store, 900, uri=OTHER_URI)


# --- what is refused


def refused(
    store: Store, path: Path, kind: type[errors.StoreError] | tuple[type[errors.StoreError], ...]
) -> errors.StoreError:
    """An import that is refused, after which the store is as it was."""
    before, known = tree(Path(store.path)), rows(store)
    with pytest.raises(kind) as refusal:
        store.import_file(path)
    assert tree(Path(store.path)) == before
    assert rows(store) == known
    assert store.statistics().writable
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
    assert rows(other) == []
    assert not list((Path(other.path) / "bundles").rglob("*.*"))
    other.import_file(target)


def test_t5_an_export_cut_anywhere_is_truncated(store: Store, other: Store, target: Path) -> None:
    data = small_export(store, target, compressed=False).read_bytes()
    for size in range(len(data) - 1, -1, -1):
        os.truncate(target, size)
        with pytest.raises(errors.Truncated):
            other.import_file(target)
    assert rows(other) == []
    assert not list((Path(other.path) / "bundles").rglob("*.*"))


def test_foreign_files_are_refused(store: Store, other: Store, target: Path) -> None:
    data = exported(store, target).read_bytes() if sleep(store, 300) else b""
    for content, kind in (
        (b"", errors.Truncated),
        (b"\x89PNG\r\n\x1a\n" + bytes(5000), errors.CorruptBundle),
        (data + b"\0", errors.TrailingData),
        (data + data, errors.TrailingData),
        (bytes(len(data)), errors.CorruptBundle),
        (os.urandom(4096), errors.CorruptBundle),
    ):
        target.write_bytes(content)
        refused(other, target, kind)


def test_threat_23_a_file_of_a_later_version_is_refused_as_such(store: Store, other: Store, target: Path) -> None:
    sleep(store, 300)
    data = bytearray(exported(store, target).read_bytes())
    data[8] = 2
    target.write_bytes(data)
    refused(other, target, errors.CorruptBundle)  # as long as its digest does not say that the 2 was written
    data[32:64] = blake3(bytes(data[:32])).digest()
    target.write_bytes(data)
    assert refused(other, target, errors.UnsupportedFormat).found == 2


def test_a_bundle_that_needs_another_is_refused_as_not_whole(store: Store, other: Store) -> None:
    second = sleep(store, 900, before=sleep(store, 600))
    error = refused(other, making.bundle_path(store, second.bundle_id), errors.BlockMissing)
    assert "torpor export" in error.message


def test_a_file_that_only_holds_blocks_for_others_is_refused(store: Store, other: Store) -> None:
    receipt = sleep(store, 600)
    sleep(store, 900, uri=OTHER_URI, before=receipt)
    store.delete_session(URI)
    frames = [(entry.id, receipt.bundle_id) for entry in receipt.entries[:2]]
    with prepared(store._core, receipt.bundle_id, Contents(frames, {}, with_manifest=False)) as new:
        assert new.commit()
    refused(other, making.bundle_path(store, receipt.bundle_id).with_suffix(".mvr"), errors.CorruptBundle)


def test_a_manifest_over_blocks_of_another_chain_is_refused(store: Store, other: Store, target: Path) -> None:
    """Every digest right: only the blocks' own headers tell that they are not what the manifest says."""
    receipt = sleep(store, 512)
    one, two, state = (entry.held_by(None) for entry in receipt.entries)

    def trade(parts: object) -> None:
        import dataclasses

        traded = (dataclasses.replace(one, id=two.id), dataclasses.replace(two, id=one.id), state)
        parts.change_manifest(blocks=traded)  # type: ignore[attr-defined]

    refused(other, making.bundle_path(store, reseal(store, receipt.bundle_id, trade)), errors.CorruptBundle)


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


def test_a_read_only_store_imports_nothing(store: Store, target: Path) -> None:
    sleep(store, 300)
    exported(store, target)
    with Store.open(store.path, writable=False) as reader:
        with pytest.raises(errors.ReadOnlyStore):
            reader.import_file(target)
        with pytest.raises(errors.ReadOnlyStore):
            reader.adopt_incoming(bytes(32))


def test_t1_a_deleted_bundle_that_comes_back_beside_an_index_that_is_behind_keeps_what_it_needs_now(
    store: Store, store_path: Path, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index's file still has the row of before, by which the bundle needs no other. After a kill its blocks are
    known to lie where they do now, for that row was made from another file."""

    first = sleep(store, 600)
    exported(store, target)
    sleep(store, 900, uri=OTHER_URI, seed=0, before=first)  # so its file stays, with two of its blocks
    making.adopt(store, sleep(store, 600, uri=THIRD_URI))
    store.index.go_on_in_memory()
    monkeypatch.setattr(Index, "return_to_file", mock.Mock(side_effect=errors.NoSpace("No room.")))
    store.delete_session(URI)
    making.strip(store, first.bundle_id)
    back = store.import_file(target)
    assert back.bundle_id == first.bundle_id
    assert {entry.bundle_id for entry in back.entries} > {first.bundle_id}  # the rest lies with the third
    killed = tmp_path / "killed"
    shutil.copytree(store_path, killed, copy_function=shutil.copy2)
    monkeypatch.undo()
    with Store.open(killed, writable=True) as again:
        require_awake(again, 600)
        again.delete_session(THIRD_URI)
        again.gc()
        require_awake(again, 600)
        assert again.verify(deep=True).ok


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
        assert small.index.written_on(today) == 0
        assert not list((tmp_path / "small").rglob("*.tmp"))
    with Store.open(tmp_path / "small", writable=True, budget=Budget(max_bytes_per_day=size)) as small:
        small.import_file(target, as_uri=as_uri)
    with Store.open(tmp_path / "has-it", writable=True) as full:
        sleep(full, 600, uri=OTHER_URI)
        held = full.index.written_on(today)
    with Store.open(tmp_path / "has-it", writable=True, budget=Budget(max_bytes_per_day=held + 4096)) as full:
        assert full.import_file(target, as_uri=as_uri).blocks_reused == len(first.entries)


def test_a_file_that_changes_while_it_is_imported_is_never_taken_half_and_half(
    store: Store, other: Store, target: Path
) -> None:
    """Checked first and copied after: what changed in between does not read back."""
    receipt = sleep(store, 600)
    exported(store, target)
    with contextlib.closing(bundle_file(target)) as file:
        frame = file.frames[receipt.entries[0].id]

    def spoil(done: int, total: int) -> None:
        if done == total:
            making.spoil_frame(target, frame)

    with pytest.raises(errors.Corruption):
        other.import_file(target, on_progress=spoil)
    assert rows(other) == []
    assert not list((Path(other.path) / "bundles").rglob("*.*"))


def test_a_full_disk_leaves_the_store_as_it_was(store: Store, other: Store, target: Path) -> None:
    sleep(store, 600)
    exported(store, target)
    with mock.patch.object(os, "writev", side_effect=OSError(errno.ENOSPC, "injected")):
        refused(other, target, errors.NoSpace)
    other.import_file(target)
    require_awake(other, 600)


# --- what was handed to a running daemon


def test_what_was_handed_over_is_adopted_and_removed(store: Store, other: Store, target: Path) -> None:
    sleep(store, 600)
    bundle_id = hand_over(other.path, str(exported(store, target)))
    receipt = other.adopt_incoming(bundle_id)
    assert receipt.bundle_id == bundle_id
    require_awake(other, 600)
    assert list((Path(other.path) / "incoming").iterdir()) == []
    with pytest.raises(errors.BundleMissing):
        other.adopt_incoming(bundle_id)
    hand_over(other.path, str(target))
    assert other.adopt_incoming(bundle_id).bytes_written == 0
    assert list((Path(other.path) / "incoming").iterdir()) == []
    hand_over(other.path, str(target))
    assert other.adopt_incoming(bundle_id, as_uri=OTHER_URI).uri == OTHER_URI


@pytest.mark.parametrize("kind", ["link", "folder link", "hard link", "fifo"])
def test_threat_20_21_what_is_not_ours_alone_in_incoming_is_refused(
    store: Store, other: Store, target: Path, kind: str
) -> None:
    sleep(store, 300)
    exported(store, target)
    with contextlib.closing(bundle_file(target)) as file:
        name = f"{file.bundle_id.hex()}.mvb"
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
        other.adopt_incoming(bytes.fromhex(name[:64]))
    assert rows(other) == []


def test_what_cannot_be_adopted_stays_in_incoming(store: Store, other: Store, target: Path) -> None:
    sleep(store, 600)
    bundle_id = hand_over(other.path, str(exported(store, target)))
    waiting = Path(other.path) / "incoming" / f"{bundle_id.hex()}.mvb"
    with contextlib.closing(bundle_file(waiting)) as file:
        making.spoil_frame(waiting, next(iter(file.frames.values())))
    with pytest.raises(errors.CorruptBlock):
        other.adopt_incoming(bundle_id)
    assert waiting.exists()
    assert rows(other) == []
