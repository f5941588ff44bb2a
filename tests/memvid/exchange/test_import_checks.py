"""A file from outside is believed only once every byte of it is checked, and is cheap to refuse before that."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from torpor.memvid.errors import CorruptBundle, LimitExceeded
from torpor.memvid.exchange import import_checks
from torpor.memvid.exchange.import_checks import ExportedFile, require_whole
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.format import codecs
from torpor.memvid.format import manifest as manifest_module
from torpor.memvid.format.blocks import BlockDraft, SlotDraft, SlotSpec
from torpor.memvid.format.frames import FrameReader
from torpor.memvid.format.manifest import Manifest
from torpor.memvid.format.pack_writer import PackWriter, prepare_block
from torpor.memvid.limits import KIB, MAX_EXPANSION, MAX_SMALL_BUNDLE_BYTES, MIB
from torpor.memvid.store import Store
from torpor.memvid.writing import reader as reader_module
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.format_1_stores import CASES, RELEASED
from torpor.tests.memvid.store_making import IDENTITY, URI, require_awake, sleep, token_ids, write

SLOTS = 3
ZEROS = memoryview(bytes(32 * MIB))


def zeros(size_bytes: int) -> BlockDraft:
    specs = [SlotSpec(f"{number}.k", "kv.k/1", "uint8", (size_bytes,)) for number in range(SLOTS)]
    return BlockDraft("span", 0, token_ids(0, 4), [SlotDraft(spec, [ZEROS[:size_bytes]]) for spec in specs])


def made(folder: Path, size_bytes: int, *, claimed: int | None = None) -> Path:
    """A bundle of slots of zeros, compressed as far as it goes; its manifest may claim other raw bytes."""
    return sealed(folder, [zeros(size_bytes)], claimed=claimed)


def sealed(folder: Path, drafts: Sequence[BlockDraft], *, claimed: int | None = None) -> Path:
    """A bundle of these blocks in which every digest is right, whether a store would write it or not."""
    parent, blocks = None, []
    for draft in drafts:
        blocks.append(prepare_block(draft, parent, IDENTITY.digest))
        parent = blocks[-1].id if draft.kind == "span" else parent
    entries = [block.entry() for block in blocks]
    manifest = Manifest(
        uri=URI,
        version=1,
        parent=None,
        identity=IDENTITY,
        block_tokens=entries[-1].end,
        created_ns=1,
        blocks=tuple(entry if claimed is None else dataclasses.replace(entry, raw_bytes=claimed) for entry in entries),
        session={},
        environment={},
    )
    with making.temp_file(folder) as temp, pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "MAX_EXPANSION", 1 << 40)
        patch.setattr(PackWriter, "_read_back", lambda *_: None)
        writer = PackWriter(temp)
        for block in blocks:
            writer.add(block, compressed=True)
        writer.finish(manifest.encode())
        temp.publish_new("made.mvb")
    return folder / "made.mvb"


def record(position: int, number: int = 0) -> BlockDraft:
    spec = SlotSpec(f"{number}", "state.logits/1", "uint8", (0,))
    return BlockDraft("state", position, b"", [SlotDraft(spec, [])])


def bare_spans(count: int) -> list[BlockDraft]:
    """The cheapest blocks that there are: full spans without slots, and a record behind each."""
    spans = [BlockDraft("span", 256 * at, token_ids(256 * at, 256), []) for at in range(count)]
    return [block for span in spans for block in (span, record(span.start + 256))]


@pytest.fixture
def nothing_unfolds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameReader, "check_block", lambda *_: pytest.fail("it was decompressed"))


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.rglob("*") if ".mv" in file.name or ".tmp" in file.name)


def test_threat_16_a_file_that_unfolds_to_far_more_than_its_length_is_refused_before_it_does(
    store: Store, tmp_path: Path, nothing_unfolds: None
) -> None:
    bomb = made(tmp_path, len(ZEROS))
    assert bomb.stat().st_size < 16 * KIB
    with pytest.raises(LimitExceeded, match="keep its reader busy") as refusal:
        store.import_file(bomb)
    assert refusal.value.details["limit"] == MAX_SMALL_BUNDLE_BYTES
    with pytest.raises(LimitExceeded):
        hand_over(store.path, str(bomb))
    assert names(Path(store.path)) == []


def test_threat_16_a_manifest_that_claims_less_than_its_blocks_hold_is_refused_before_they_unfold(
    store: Store, tmp_path: Path, nothing_unfolds: None
) -> None:
    liar = made(tmp_path, len(ZEROS), claimed=1000)
    with pytest.raises(CorruptBundle, match="not the one that the manifest describes"):
        store.import_file(liar)


def test_threat_16_a_file_of_many_records_is_refused_before_any_of_them_is_looked_at(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record costs its sender some 400 bytes: 130,000 kept a reader busy for two minutes, in 300 MiB."""
    records = [record(256, number) for number in range(1000)]
    many = sealed(tmp_path, [BlockDraft("span", 0, token_ids(0, 256), []), *records])
    monkeypatch.setattr(FrameReader, "read_head", lambda *_: pytest.fail("a block was read"))
    monkeypatch.setattr(manifest_module, "_decode_line", lambda *_: pytest.fail("a line was taken apart"))
    with pytest.raises(CorruptBundle, match="block list has a wrong length"):
        store.import_file(many)
    with pytest.raises(CorruptBundle, match="block list has a wrong length"):
        hand_over(store.path, str(many))
    assert names(Path(store.path)) == []


@pytest.mark.one_in(3)
def test_a_reader_remembers_heads_up_to_a_limit_and_reads_the_others_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.import_file(sealed(tmp_path, bare_spans(600)))
    held = {}
    for limit in (0, 64 * KIB, MIB):
        monkeypatch.setattr(reader_module, "MAX_REMEMBERED_HEAD_BYTES", limit)
        with store.open_session(URI) as reader:
            reader.read_header(reader.entries[0])  # opens the pack, whose directory is in memory
            tracemalloc.start()
            for _ in range(2):
                found = [reader.read_header(entry).start for entry in reader.entries]
            held[limit] = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert found == [entry.start for entry in reader.entries]
    assert held[0] < 200 * KIB
    assert held[64 * KIB] < held[0] + 6 * 64 * KIB
    assert held[MIB] > 1200 * KIB


def test_a_small_file_may_be_all_zeros(store: Store, tmp_path: Path) -> None:
    assert store.import_file(made(tmp_path, MAX_SMALL_BUNDLE_BYTES // SLOTS)).logical_bytes > 60 * MIB


def test_the_bound_is_the_files_own_length(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path, 512 * KIB)
    monkeypatch.setattr(import_checks, "MAX_SMALL_BUNDLE_BYTES", 0)
    for bound, refused in ((SLOTS * 512 * KIB // path.stat().st_size, True), (1 << 20, False)):
        monkeypatch.setattr(import_checks, "MAX_EXPANSION", bound)
        expected = pytest.raises(LimitExceeded) if refused else contextlib.nullcontext()
        with ExportedFile(os.open(path, os.O_RDONLY), str(path)) as file, expected:
            require_whole(file)


def test_what_a_store_compressed_itself_is_never_too_dense_to_be_imported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a session of nothing but zeros."""
    monkeypatch.setattr(import_checks, "MAX_SMALL_BUNDLE_BYTES", 0)
    for number, size_bytes in enumerate((1, KIB, 300 * KIB, 4 * MIB)):
        write(store, [zeros(size_bytes)], 4, uri=making.SessionUri("default", f"zeros-{number}"), compressed=True)
        target = tmp_path / f"{number}.mvb"
        report = store.export_session(making.SessionUri("default", f"zeros-{number}"), None, target)
        assert report.logical_bytes <= MAX_EXPANSION * report.file_bytes
        with Store.open(tmp_path / f"other-{number}", writable=True) as other:
            assert other.import_file(target).logical_bytes == SLOTS * size_bytes


def test_what_the_last_torpor_of_format_1_exported_is_imported(store: Store) -> None:
    """It has a slot that shrank further than a writer of today would let it. Its manifest stays as it is."""
    (bundle_id,) = (version["bundle_id"] for version in RELEASED if version["session"] == str(making.PLANES_URI))
    receipt = store.import_file(CASES / "planes.mvb")
    assert receipt.bundle_id == bundle_id
    with store.open_session(making.PLANES_URI) as reader:
        assert making.contents(reader) == [list(making.PLANES_BYTES)]
    sleep(store, 300)
    require_awake(store, 300)
