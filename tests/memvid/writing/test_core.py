"""What operations share: commits, version numbers, pins, readers that find blocks wherever they went."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid import errors
from torpor.memvid.disk import durable
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.format.blocks import BlockDraft
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.format.records import Receipt
from torpor.memvid.maintenance.repack_plan import CLEARING, RepackPolicy
from torpor.memvid.store import Store
from torpor.memvid.writing.core import StoreCore
from torpor.memvid.writing.removal import remove_unneeded
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, contents, expected, pack_of, packs_of, require_awake, sleep

Chain = tuple[Receipt, Receipt]


@pytest.fixture
def chain(store: Store) -> Chain:
    first = sleep(store, 600)
    return first, sleep(store, 900, before=first)


def move(store: Store, receipt: Receipt, *, removing: bool = True) -> Path:
    """Write all blocks of a version into one new pack, and remove the packs that had them."""
    old = packs_of(store, receipt) if removing else []
    return making.copy_blocks(store, (entry.id for entry in receipt.entries), removing=old)


# --- a manifest that was put back while the store is open


@pytest.fixture
def put_back(store: Store) -> Iterator[Store]:
    """An open store whose newest manifest was missing at the opening, and untold, and is back now."""
    first = sleep(store, 300)
    with making.away(making.manifest_path(store, sleep(store, 600, before=first).bundle_id)):
        opened = making.reopened(store, anew=True)
        assert [row.version for row in opened.versions(URI)] == [1]
    with opened:
        yield opened


def test_a_wake_finds_the_newest_version_that_was_put_back(put_back: Store) -> None:
    require_awake(put_back, 600)


def test_a_delete_takes_a_version_that_was_put_back(put_back: Store) -> None:
    assert put_back.delete_session(URI).versions_deleted == 2
    assert making.names(put_back.path) == set()


def test_deleting_one_version_knows_of_the_one_that_was_put_back(put_back: Store) -> None:
    put_back.tag(URI, 2, "good")
    assert put_back.delete_version(URI, 1).versions_deleted == 1
    assert set(put_back.marks(URI).tags) == {"good"}
    require_awake(put_back, 600)


@pytest.mark.parametrize("has_slept", [False, True])
def test_a_number_that_was_put_back_is_not_given_again(put_back: Store, has_slept: bool) -> None:
    if has_slept:  # what this store itself puts into the folder hides nothing that came before
        put_back._core.folder.write_manifest("00" * 32, b"")
    assert sleep(put_back, 300, seed=5).version == 3


def test_what_a_store_does_itself_lets_it_list_no_versions(store: Store) -> None:
    sleep(store, 300)
    with mock.patch.object(StoreFolder, "list_versions", making.refusing(AssertionError("a listing"))):
        first = sleep(store, 600)
        sleep(store, 900, before=first)
        require_awake(store, 900)
        store.import_file(store.export_session(URI, 3, Path(store.path).parent / "third").path)


# --- what gives way to a new file


def damaged(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(store.path, "damaged").glob("*")}


def mixed_up(store: Store, kind: str) -> tuple[Path, bytes]:
    """Let a file with the only copy of what another session needs lie under the name of the first's pack or manifest:
    its path and content."""
    first, second = sleep(store), sleep(store, uri=OTHER_URI, seed=2)
    store.export_session(URI, None, Path(store.path).parent / "first")
    paths = [
        pack_of(store, each) if kind == "pack" else making.manifest_path(store, each.bundle_id)
        for each in (first, second)
    ]
    os.replace(paths[1], paths[0])
    return paths[0], paths[0].read_bytes()


@pytest.mark.parametrize(("kind", "how"), [("pack", "import"), ("manifest", "import"), ("pack", "sleep")])
def test_a_file_under_the_name_of_a_new_one_gives_way_and_is_kept(store: Store, kind: str, how: str) -> None:
    path, content = mixed_up(store, kind)
    if how == "import":
        store.import_file(Path(store.path).parent / "first")
    else:
        sleep(store, uri=making.FORK_URI)
    assert damaged(store) == {path.name: content}
    require_awake(store, 300)
    assert store.repair().problems == ()
    require_awake(store, 300, uri=OTHER_URI, seed=2)


@pytest.mark.parametrize("kind", ["pack", "manifest"])
def test_what_gives_way_is_certain_before_the_new_file_has_its_name(store: Store, kind: str) -> None:
    path, content = mixed_up(store, kind)
    folder, real, seen = os.path.dirname(path), durable.TempFile.publish, []

    def publish(temp: durable.TempFile, name: str, **more: Any) -> None:
        if (os.path.dirname(temp.path), name) == (folder, path.name):
            seen.append((damaged(store).get(name), list(flushed)))
        real(temp, name, **more)

    with making.flushes() as flushed, mock.patch.object(durable.TempFile, "publish", publish):
        store.import_file(Path(store.path).parent / "first")
    ((kept, before),) = seen
    assert kept == content
    at = before.index(f"{store.path}/damaged")
    if kind == "pack":
        assert folder in before[at:]
    else:
        assert any(one.endswith(".tmp") for one in before[at - 1 : at]), "the copy itself, before its name"


def test_the_same_file_is_replaced_and_the_ordinary_case_flushes_no_more(store: Store) -> None:
    receipt = sleep(store)
    pack = pack_of(store, receipt)
    core, before = store._core, pack.stat().st_ino
    with core.folder.new_temp() as temp:
        writer = PackWriter(temp)
        with core.files.holding(f"packs/{pack.name}") as file:
            for entry in receipt.entries:
                writer.add_copy(file, entry.id)
        pack_id = writer.finish()
        with core.committing(), making.flushes() as flushed:
            core.publish_pack(temp, pack_id)
    assert pack.stat().st_ino != before
    assert (flushed, damaged(store)) == ([f"{store.path}/packs"], {})


# --- readers that find a block wherever it went


def test_a_reader_of_a_read_only_store_finds_a_block_that_another_process_moved(store: Store, chain: Chain) -> None:
    """Its pins are its own process's: the daemon beside it repacks as if nobody read."""
    with Store.open(store.path, writable=False) as beside, beside.open_session(URI) as reader:
        half = bytes(reader.read_slot(reader.entries[0], 0))
        move(store, chain[1])
        assert contents(reader) == expected(900)
        assert reader.tokens() == making.token_ids(0, 900)
        assert half == expected(900)[0][0]


def test_a_slot_that_is_damaged_is_read_from_another_pack(store: Store) -> None:
    receipt = sleep(store)
    making.in_pieces(store, receipt)
    with store.open_session(URI) as reader:
        sizes = [len(slot) for slot in expected(300)[0]]
        read = [bytearray(size) for size in sizes]
        reader.read_slots_into(reader.entries[0], [(at, [memoryview(one)]) for at, one in enumerate(read)])
    assert list(map(bytes, read)) == expected(300)[0]


def test_readers_in_many_threads_look_again_at_once(store: Store, chain: Chain) -> None:
    with Store.open(store.path, writable=False) as beside, beside.open_session(URI) as reader:
        move(store, chain[1])
        with ThreadPoolExecutor(8) as pool:
            found = [pool.submit(contents, reader) for _ in range(16)]
            assert all(one.result(60) == expected(900) for one in found)


def test_a_version_that_came_after_a_reader_opened_is_not_listed_and_wakes_by_its_id(
    store: Store, chain: Chain
) -> None:
    with Store.open(store.path, writable=False) as beside:
        third = sleep(store, 1200, before=chain[1])
        assert [row.version for row in beside.versions(URI)] == [1, 2]
        with beside.open_bundle(third.bundle_id) as reader:
            assert contents(reader) == expected(1200)


def test_a_pack_put_back_under_an_open_reader_is_found(store: Store, chain: Chain, tmp_path: Path) -> None:
    pack = pack_of(store, chain[0])
    with store.open_session(URI) as reader:
        away = pack.rename(tmp_path / "away")
        with pytest.raises(errors.BlockMissing) as refused:
            contents(reader)
        assert refused.value.details["whole_up_to"] == 0
        assert pack.name not in {name.rpartition("/")[2] for name in store.index.pack_sizes()}
        away.rename(pack)
        assert contents(reader) == expected(900)


def test_a_reader_looks_again_once_for_a_block_and_then_says_up_to_where_the_version_is_whole(
    store: Store, chain: Chain
) -> None:
    pack_of(store, chain[1], 3).unlink()
    looking = mock.patch.object(StoreCore, "look_again", autospec=True, side_effect=StoreCore.look_again)
    with looking as looks, store.open_session(URI) as reader, pytest.raises(errors.BlockMissing) as refused:
        contents(reader)
    assert looks.call_count == 1
    assert refused.value.details["whole_up_to"] == 512
    assert "torpor wake torpor://default/agent@2 --at 512" in refused.value.message


@pytest.mark.parametrize("how", ["spoilt", "cut", "link", "hard link", "fifo", "another pack", "folder"])
def test_a_block_is_read_from_another_pack_where_one_is_damaged_or_refused(
    store: Store, chain: Chain, tmp_path: Path, how: str
) -> None:
    other = pack_of(store, chain[0])
    new = move(store, chain[1], removing=False)
    if how == "spoilt":
        making.spoil(store, chain[1], *range(len(chain[1].entries)))
    elif how == "another pack":
        shutil.copy2(other, new)
    else:
        making.HARMS[how](new, tmp_path / "aside")
    store._core.files.close()
    require_awake(store, 900)


def test_damage_stops_no_look_for_a_pack_that_was_put_back(store: Store, chain: Chain, tmp_path: Path) -> None:
    other = move(store, chain[1], removing=False)
    other.rename(tmp_path / "other")
    store._core.look_again()
    making.spoil(store, chain[1], 0)
    with store.open_session(URI) as reader:
        with pytest.raises(errors.CorruptBlock):
            contents(reader)
        (tmp_path / "other").rename(other)
        assert contents(reader) == expected(900)


def test_damage_is_told_where_the_look_for_other_packs_is_refused(
    store: Store, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.spoil(store, chain[1], 0)
    monkeypatch.setattr(StoreCore, "look_again", making.refusing(errors.StoreIoError("No.", path=store.path)))
    with store.open_session(URI) as reader, pytest.raises(errors.CorruptBlock):
        contents(reader)


def test_damage_that_is_everywhere_is_told_of_the_newest_pack(store: Store, chain: Chain) -> None:
    making.spoil(store, chain[1], 0)
    with store.open_session(URI) as reader, pytest.raises(errors.CorruptBlock) as refused:
        contents(reader)
    assert refused.value.details["path"] == str(pack_of(store, chain[1]))


def test_a_pack_that_is_refused_by_the_system_is_told(store: Store, tmp_path: Path) -> None:
    receipt = sleep(store, 300)
    os.link(pack_of(store, receipt), tmp_path / "second name")
    with store.open_session(URI) as reader, pytest.raises(errors.UnsafePath, match="2 hard links"):
        contents(reader)


# --- versions, pins and commits


def test_version_numbers_that_are_being_written_are_not_given_again(store: Store) -> None:
    core = store._core
    with core.next_version(URI) as one, core.next_version(URI) as two:
        assert (one, two) == (1, 2)
        with core.next_version(URI, 2) as three:
            assert three == 3
        with core.next_version(URI, 7) as seven, core.next_version(URI) as eight:
            assert (seven, eight) == (7, 8)
    with core.next_version(URI) as again:
        assert again == 1
    sleep(store, 300)
    with core.next_version(URI, 1) as second:
        assert second == 2
    assert core._reserved == []


def test_a_reader_pins_the_blocks_of_its_version_and_one_that_cannot_be_opened_pins_nothing(
    store: Store, chain: Chain
) -> None:
    with store.open_session(URI) as reader:
        assert set(store._core.pins.blocks()) == {entry.id for entry in reader.entries}
        reader.close()
        reader.close()
        assert not store._core.pins.blocks()
    making.put(making.manifest_path(store, chain[1].bundle_id), b"damaged")
    for bundle_id in (chain[1].bundle_id, "00" * 32):
        with pytest.raises(errors.Corruption):
            store._core.open_reader(bundle_id)
    assert not store._core.pins.blocks()


def test_a_pack_with_a_pinned_block_stays_until_the_pin_goes(store: Store, chain: Chain) -> None:
    core = store._core
    with core.pinning() as pin:
        core.pins.extend(pin, [chain[0].entries[0].id])
        store.delete_session(URI)
        left = core.index.pack_sizes().keys()
        assert len(left) == 1
        with core.committing():
            assert remove_unneeded(core, left).packs == {}
    assert making.names(store.path) == set()


def test_letting_go_of_a_pin_never_waits_for_a_writer(store: Store, chain: Chain) -> None:
    reader = store.open_session(URI)
    with ThreadPoolExecutor(1) as pool, store._core.committing():
        pool.submit(reader.close).result(60)  # a deadlock would be an error here


def test_a_store_whose_flush_failed_changes_nothing_in_closing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep(store, 300)
    first = sleep(store, 600, uri=OTHER_URI, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_sync", making.refusing(errors.DurabilityLost("The flush failed.")))
        with pytest.raises(errors.DurabilityLost):
            sleep(store, 700, uri=OTHER_URI, seed=1, before=first)

    def seen() -> dict[str, tuple[int, int]]:
        files = (file for file in Path(store.path).rglob("*") if file.is_file())
        return {str(file): (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}

    before = seen()
    store.close()
    assert seen() == before
    with Store.open(store.path, writable=True) as again:
        require_awake(again, 300)
        require_awake(again, 600, uri=OTHER_URI, seed=1)


@pytest.mark.parametrize("at", [1, 3])
def test_a_sleep_that_is_under_way_when_the_store_closes_is_not_acknowledged(store: Store, at: int) -> None:
    def blocks() -> Iterator[BlockDraft]:
        yield from making.drafts(300)[:at]
        store.close()
        yield from making.drafts(300)[at:]

    with pytest.raises(errors.StoreClosed):
        making.write(store, blocks(), 300)
    with Store.open(store.path, writable=True) as again:
        assert again.opening.leftovers_removed == 0
        assert again.find_session(URI) is None
        assert making.names(store.path) == set()


# --- what came into the folder without this object


def test_a_look_enters_what_came_and_lets_go_what_went(store: Store, chain: Chain, tmp_path: Path) -> None:
    core = store._core
    with Store.open(tmp_path / "other", writable=True) as other:
        third = sleep(other, 300, uri=OTHER_URI, seed=7)
        files = [making.manifest_path(other, third.bundle_id), *packs_of(other, third)]
        for file in files:
            shutil.copy2(file, Path(store.path) / file.relative_to(other.path))
    gone = pack_of(store, chain[1], 3)
    gone.rename(tmp_path / "gone")
    core.look_again()
    require_awake(store, 300, uri=OTHER_URI, seed=7)
    assert str(gone.relative_to(store.path)) not in store.index.pack_sizes()
    (tmp_path / "gone").rename(gone)
    core.look_again()
    require_awake(store, 900)


def test_a_manifest_that_is_there_after_its_pins_is_needed_by_whoever_deletes_later(store: Store, chain: Chain) -> None:
    with (
        making.meanwhile(StoreCore, "read_manifest", lambda: store.delete_version(URI, 2), after=True),
        pytest.raises(errors.BundleMissing),
    ):
        store.open_bundle(chain[1].bundle_id)
    require_awake(store, 600)


def test_a_writer_that_has_lost_the_lock_leaves_the_journal_to_the_next_one(store: Store, store_path: Path) -> None:
    """It had emptied its own, and would have removed the file: by then it has the turns of another writer."""
    first = sleep(store, 600)
    store.acknowledge([making.turn(store, 5)])
    sleep(store, 605, before=first)
    (store_path / "lock").unlink()
    with Store.open(store_path, writable=True) as other:
        other.acknowledge([making.turn(other, 7)])
        journal = store_path / "journal" / "turns.mvj"
        written = journal.read_bytes()
        store.close()
        assert journal.read_bytes() == written


def test_a_sleep_refers_to_no_pack_that_is_gone_though_somebody_reads_it(store: Store) -> None:
    first = sleep(store, 600)
    (pack,) = packs_of(store, first)
    with store._core.files.holding(f"packs/{pack.name}"):
        pack.unlink()
        with pytest.raises(errors.BlockMissing):
            sleep(store, 900, before=first)


@pytest.mark.parametrize("top", ["versions", "packs"])
def test_nothing_is_committed_into_a_folder_that_was_moved_away(
    store: Store, store_path: Path, tmp_path: Path, top: str
) -> None:
    first = sleep(store)
    (store_path / top).rename(tmp_path / "away")
    for put_there in (lambda: None, lambda: shutil.copytree(tmp_path / "away", store_path / top)):
        put_there()
        with pytest.raises(errors.StoreIoError, match=f"{top} is another folder than when the store was opened"):
            sleep(store, 700, before=first)
    shutil.rmtree(store_path / top)
    (tmp_path / "away").rename(store_path / top)
    sleep(store, 700, before=first)
    with making.reopened(store) as store:
        require_awake(store, 700)


def test_a_reader_follows_blocks_through_several_repacks(store: Store, store_path: Path) -> None:
    first = sleep(store)
    sleep(store, 600, before=first)
    with Store.open(store_path, writable=False) as beside, beside.open_session(URI) as reader:
        store.repack(policy=RepackPolicy(max_packs=1, max_unneeded=0.0))
        with making.meanwhile(reader, "_look_again", lambda: again(store), after=True):
            assert contents(reader) == expected(600)


def again(store: Store) -> None:
    """Let all blocks lie in another pack once more."""
    store.delete_version(URI, 1)
    assert store.repack(policy=CLEARING).actions
