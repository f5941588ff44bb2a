"""Writing a bundle's file anew: the same bundle afterwards, the old or the new file after a crash, or no change."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torpor.memvid import Receipt, Store
from torpor.memvid.errors import (
    BlockMissing,
    BundleMissing,
    CorruptBlock,
    DurabilityLost,
    ReadOnlyStore,
    StoreError,
    StoreIoError,
)
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.format.bundle import BundleFile
from torpor.memvid.index.index import Index
from torpor.memvid.writing.rewriting import Contents, Prepared, prepared
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, expected, refusing, reopened, require_awake, sleep


def with_all(receipt: Receipt) -> Contents:
    """The bundle's file with every block of its manifest in it."""
    frames = [(entry.id, entry.bundle_id) for entry in receipt.entries if entry.bundle_id is not None]
    return Contents(frames, {})


def without(receipt: Receipt, holder: Receipt, block_ids: Sequence[bytes]) -> Contents:
    """The bundle's file without some blocks, which another bundle holds."""
    frames = [(entry.id, receipt.bundle_id) for entry in receipt.entries if entry.id not in block_ids]
    return Contents(frames, dict.fromkeys(block_ids, holder.bundle_id))


def rewrite(store: Store, receipt: Receipt, contents: Contents) -> bool:
    with prepared(store._core, receipt.bundle_id, contents) as new:
        return new.commit()


def file_of(store: Store, receipt: Receipt) -> contextlib.closing[BundleFile]:
    return contextlib.closing(store._core.open_bundle(receipt.bundle_id))


def temps(store: Store) -> list[Path]:
    return list(Path(store.path).rglob("*.tmp"))


@pytest.fixture
def chain(store: Store) -> tuple[Receipt, Receipt]:
    """Two versions; the second looks for its first two blocks in the first one's file."""
    first = sleep(store, 600)
    return first, sleep(store, 900, before=first)


def test_an_adopting_file_is_the_same_bundle_and_needs_no_other(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    _, second = chain
    before = store.find_session(URI)
    assert rewrite(store, second, with_all(second))
    assert store.index.refs_of(second.bundle_id) == ()
    assert store.index.unsettled() == set()
    with file_of(store, second) as file:
        assert file.directory.holders == ()
    after = store.find_session(URI)
    assert (after.bundle_id, after.version) == (before.bundle_id, 2)
    assert after.bundle_bytes == making.bundle_path(store, second.bundle_id).stat().st_size > before.bundle_bytes
    require_awake(store, 900)
    assert store.verify(deep=True).ok


def test_frames_are_compressed_anew_and_give_the_same_bytes(store: Store) -> None:
    receipt = making.sleep_compressed(store)
    contents = Contents(with_all(receipt).frames, {}, compressing={entry.id for entry in receipt.entries})
    assert rewrite(store, receipt, contents)
    with store.open_session(URI) as reader:
        assert making.contents(reader) == [[making.COMPRESSIBLE]]


def test_a_block_that_would_be_nowhere_is_refused(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, _ = chain
    frames = [(entry.id, first.bundle_id) for entry in first.entries[1:]]
    with pytest.raises(BlockMissing), prepared(store._core, first.bundle_id, Contents(frames, {})):
        raise AssertionError("not reached")
    assert temps(store) == []
    assert store.statistics().writable


def test_a_damaged_source_is_named_and_nothing_is_left(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, second = chain
    frame = making.frame_of(store, first.entries[1])
    path = making.bundle_path(store, first.bundle_id)
    with path.open("r+b") as file:
        file.seek(frame.offset + frame.head_bytes)
        file.write(b"!!")
    before = making.bundle_path(store, second.bundle_id).read_bytes()
    for compressing in ((), {block for block, _ in with_all(second).frames}):
        contents = Contents(with_all(second).frames, {}, compressing=compressing)
        with pytest.raises(CorruptBlock) as refusal, prepared(store._core, second.bundle_id, contents):
            raise AssertionError("not reached")
        assert refusal.value.path == str(path)
    assert temps(store) == []
    assert making.bundle_path(store, second.bundle_id).read_bytes() == before


def test_a_new_file_that_is_not_committed_is_removed(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    _, second = chain
    before = making.bundle_path(store, second.bundle_id).read_bytes()
    with prepared(store._core, second.bundle_id, with_all(second)) as new:
        assert len(temps(store)) == 1
        assert new.bytes_after > new.bytes_before
    assert temps(store) == []
    assert making.bundle_path(store, second.bundle_id).read_bytes() == before
    assert store.index.unsettled() == set()


def test_a_read_only_store_rewrites_nothing(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    _, second = chain
    with Store.open(store.path, writable=False) as reader, pytest.raises(ReadOnlyStore):
        rewrite(reader, second, with_all(second))


# --- what a commit refuses


def refused(store: Store, receipt: Receipt, new: Prepared) -> None:
    """A commit that says no, after which file and index are what they were."""
    path = making.bundle_path(store, receipt.bundle_id)
    before = path.read_bytes() if path.exists() else None
    refs, inode = store.index.refs_of(receipt.bundle_id), path.stat().st_ino if before is not None else None
    assert new.commit() is False
    assert (path.read_bytes() if path.exists() else None) == before
    assert (path.stat().st_ino if path.exists() else None) == inode
    assert store.index.refs_of(receipt.bundle_id) == refs
    assert store.index.unsettled() == set()


def test_a_bundle_whose_file_is_gone_is_not_rewritten(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    _, second = chain
    with prepared(store._core, second.bundle_id, with_all(second)) as new:
        making.bundle_path(store, second.bundle_id).unlink()
        refused(store, second, new)


def test_a_session_deleted_meanwhile_does_not_come_back(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    _, second = chain
    with prepared(store._core, second.bundle_id, with_all(second)) as new:
        store.delete_session(URI)
        new.commit()
    assert store.find_session(URI) is None
    assert not list(Path(store.path).rglob("*.mvb"))
    with reopened(store) as again:
        assert list(again.iter_sessions()) == []
        assert not list(Path(store.path).rglob("*.mv?")), "what was retired and is needed by nobody went with the open"


def test_a_bundle_written_anew_meanwhile_is_not_rewritten(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    _, second = chain
    with prepared(store._core, second.bundle_id, with_all(second)) as new:
        assert rewrite(
            store, second, Contents(with_all(second).frames, {}, compressing={entry.id for entry in second.entries})
        )
        refused(store, second, new)
    require_awake(store, 900)


def test_a_file_that_got_the_inode_of_the_one_that_was_read_is_another_file(store: Store) -> None:
    """A filesystem gives the number of an inode that is gone to the next file. Here a file is written in place."""
    receipt = sleep(store, 300)
    with contextlib.closing(store._core.open_bundle(receipt.bundle_id)) as file:
        read = file.stamp()
    path = making.bundle_path(store, receipt.bundle_id)
    assert store._core.folder.is_current(receipt.bundle_id, read)
    inode, written_ns = path.stat().st_ino, path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes() + b"more")
    os.utime(path, ns=(written_ns, written_ns))
    assert path.stat().st_ino == inode
    assert not store._core.folder.is_current(receipt.bundle_id, read)
    path.write_bytes(path.read_bytes()[:-4])
    os.utime(path, ns=(written_ns, written_ns + 1))
    assert not store._core.folder.is_current(receipt.bundle_id, read)


def test_a_file_that_was_written_in_place_and_dated_back_is_another_file(store: Store) -> None:
    """Its change time tells it, which nobody can set back; the clock of a filesystem moves in steps."""
    receipt = sleep(store, 300)
    path = making.bundle_path(store, receipt.bundle_id)
    with contextlib.closing(store._core.open_bundle(receipt.bundle_id)) as file:
        read, before = file.stamp(), path.stat()
    data = bytearray(path.read_bytes())
    deadline = time.monotonic() + 10
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        assert time.monotonic() < deadline
        data[-1] ^= 1
        with path.open("r+b") as changed:
            changed.write(data)
        os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert not store._core.folder.is_current(receipt.bundle_id, read)


def test_a_file_that_somebody_reads_loses_no_frame(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, second = chain
    assert rewrite(store, second, with_all(second))
    fewer = without(first, second, [entry.id for entry in first.entries[:2]])
    with store.open_session(URI, version=1) as reader, prepared(store._core, first.bundle_id, fewer) as new:
        refused(store, first, new)
        assert making.contents(reader) == expected(600)
    assert rewrite(store, first, fewer), "after its last reader it does"
    with store.open_session(URI, version=1) as reader:
        assert making.contents(reader) == expected(600)
    assert store.verify(deep=True).ok


def test_a_file_that_somebody_reads_may_be_rewritten_with_all_its_frames(
    store: Store, chain: tuple[Receipt, Receipt]
) -> None:
    _, second = chain
    with store.open_session(URI) as reader:
        assert rewrite(store, second, with_all(second))
        assert making.contents(reader) == expected(900)


def test_an_unfinished_sleep_keeps_what_it_may_refer_to(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, second = chain
    assert rewrite(store, second, with_all(second))
    fewer = without(first, second, [entry.id for entry in first.entries[:2]])
    with store._core.pinning() as pin, prepared(store._core, first.bundle_id, fewer) as new:
        pin(first.bundle_id)
        refused(store, first, new)


@pytest.mark.parametrize("how", ["gone", "without the block"])
def test_a_holder_that_has_not_got_the_block_any_more_is_not_relied_on(
    store: Store, chain: tuple[Receipt, Receipt], how: str
) -> None:
    first, second = chain
    assert rewrite(store, second, with_all(second))
    other = sleep(store, 300, uri=OTHER_URI, seed=4)
    fewer = without(first, second, [first.entries[0].id])
    path = making.bundle_path(store, second.bundle_id)
    with prepared(store._core, first.bundle_id, fewer) as new:
        whole = path.read_bytes()
        path.unlink()
        if how == "without the block":
            shutil.copy(making.bundle_path(store, other.bundle_id), path)
        refused(store, first, new)
    path.write_bytes(whole)
    require_awake(store, 900)


def test_a_holder_that_cannot_be_looked_at_is_not_said_to_have_lost_the_block(
    store: Store, chain: tuple[Receipt, Receipt], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = chain
    contents = without(second, first, [entry.id for entry in second.entries[:2]])
    with prepared(store._core, second.bundle_id, contents) as new:
        monkeypatch.setattr(store._core, "open_frames", refusing(StoreIoError("too many open files")))
        with pytest.raises(StoreIoError, match="too many"):
            new.commit()
        assert not new.is_in_place
    monkeypatch.undo()
    require_awake(store, 900)
    assert temps(store) == []


def test_a_version_never_loses_its_manifest(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, _ = chain
    contents = Contents([(entry.id, first.bundle_id) for entry in first.entries], {}, with_manifest=False)
    with prepared(store._core, first.bundle_id, contents) as new:
        refused(store, first, new)


def test_a_retired_file_keeps_only_what_others_need(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 900, uri=OTHER_URI, before=first)
    store.delete_session(URI)
    making.strip(store, first.bundle_id)
    path = making.bundle_path(store, first.bundle_id).with_suffix(".mvr")
    data = path.read_bytes()
    assert str(URI).encode() not in data
    assert b"torpor.manifest" not in data
    require_awake(store, 900, uri=OTHER_URI)
    with pytest.raises(BundleMissing):
        store.open_bundle(first.bundle_id)
    assert store.verify(deep=True).ok
    with reopened(store) as again:
        assert again.opening.unreadable == ()
        require_awake(again, 900, uri=OTHER_URI)
        again.delete_session(OTHER_URI)
    assert not path.exists()


# --- cut off


def cut_off(store: Store, chain: tuple[Receipt, Receipt], monkeypatch: pytest.MonkeyPatch, before: str) -> Path:
    """A rewrite whose process dies at one step; the store as the next one finds it."""

    class Died(BaseException):
        pass

    die = refusing(Died)
    _, second = chain
    owner: type = Index if before in ("begin_rewrite", "finish_rewrite") else StoreFolder
    with monkeypatch.context() as patch:
        patch.setattr(owner, before, die)
        with pytest.raises(Died):
            rewrite(store, second, with_all(second))
    place = Path(store.path)
    copy = place.with_name("copy")
    shutil.copytree(place, copy)
    return copy


@pytest.mark.parametrize("before", ["begin_rewrite", "replace", "finish_rewrite"])
def test_t1_a_rewrite_that_is_cut_off_leaves_one_of_the_two_files_and_an_index_that_covers_it(
    store: Store, chain: tuple[Receipt, Receipt], monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    first, second = chain
    copy = cut_off(store, chain, monkeypatch, before)
    assert (second.bundle_id in store.index.unsettled()) == (before != "begin_rewrite")
    assert store.index.users_of(first.bundle_id) == [second.bundle_id], "whichever file it is, it is covered"
    with Store.open(copy, writable=True) as again:
        assert again.index.unsettled() == set()
        replaced = before == "finish_rewrite"
        assert again.index.users_of(first.bundle_id) == ([] if replaced else [second.bundle_id])
        found = again.find_session(URI)
        assert found.bundle_bytes == making.bundle_path(again, second.bundle_id).stat().st_size
        require_awake(again, 900)
        assert again.verify(deep=True).ok
        assert rewrite(again, second, with_all(second)), "and it can be done again"
        require_awake(again, 900)


@pytest.mark.parametrize("at", [1, 2])
def test_threat_31_a_folder_that_cannot_be_flushed_leaves_the_file_and_poisons_the_store(
    store: Store, chain: tuple[Receipt, Receipt], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    _, second = chain
    real: Callable[..., None] = os.fsync
    calls: list[int] = []
    path = making.bundle_path(store, second.bundle_id)
    with prepared(store._core, second.bundle_id, with_all(second)) as new:
        renamed: list[bool] = []
        rename = os.rename

        def note_rename(*args: object, **kwargs: object) -> None:
            rename(*args, **kwargs)  # type: ignore[arg-type]
            renamed.append(str(args[1]).endswith(".mvb"))

        def fsync(fd: int) -> None:
            if any(renamed):
                calls.append(fd)
                if len(calls) == at:
                    raise OSError(errno.EIO, "injected")
            real(fd)

        monkeypatch.setattr(os, "rename", note_rename)
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(DurabilityLost):
            new.commit()
    monkeypatch.undo()
    assert path.exists(), "the old one is gone: without the new one nothing would be left"
    assert not store.statistics().writable
    require_awake(store, 900)
    with pytest.raises(DurabilityLost):
        sleep(store, 300)
    with reopened(store) as again:
        require_awake(again, 900)
        assert again.verify(deep=True).ok


def test_a_rewrite_that_finds_no_room_changes_nothing(
    store: Store, chain: tuple[Receipt, Receipt], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = chain
    monkeypatch.setattr(os, "writev", refusing(OSError(errno.ENOSPC, "injected")))
    with pytest.raises(StoreError) as refusal:
        rewrite(store, second, with_all(second))
    monkeypatch.undo()
    assert refusal.value.code == "no_space"
    assert temps(store) == []
    assert store.statistics().writable
    require_awake(store, 900)
