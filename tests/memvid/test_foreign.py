"""A file from outside is believed only once every byte of it is checked, and is cheap to refuse before that."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import store_making as making
from store_making import IDENTITY, URI, require_awake, sleep, token_ids
from torpor.memvid import BlockDraft, SlotDraft, SlotSpec, Store, codecs, foreign, zstd
from torpor.memvid.bundle import BundleFile
from torpor.memvid.durable import TempFile
from torpor.memvid.errors import CorruptBundle, LimitExceeded
from torpor.memvid.foreign import require_whole
from torpor.memvid.incoming import hand_over
from torpor.memvid.limits import KIB, MAX_EXPANSION, MAX_SMALL_BUNDLE_BYTES, MIB
from torpor.memvid.manifest import Manifest, bundle_id_of
from torpor.memvid.writer import BundleWriter, prepare_block

SLOTS = 3
ZEROS = memoryview(bytes(32 * MIB))


def zeros(size_bytes: int) -> BlockDraft:
    specs = [SlotSpec(f"{number}.k", "kv.k/1", "uint8", (size_bytes,)) for number in range(SLOTS)]
    return BlockDraft("span", 0, token_ids(0, 4), [SlotDraft(spec, [ZEROS[:size_bytes]]) for spec in specs])


def made(folder: Path, size_bytes: int, *, claimed: int | None = None) -> Path:
    """A bundle of slots of zeros, compressed as far as it goes; its manifest may claim other raw bytes."""
    block = prepare_block(zeros(size_bytes), None, IDENTITY.digest)
    entry = block.entry(None)
    manifest = Manifest(
        uri=URI,
        version=1,
        parent=None,
        identity=IDENTITY,
        token_count=4,
        created_ns=1,
        blocks=(entry if claimed is None else dataclasses.replace(entry, raw_bytes=claimed),),
        session={},
        environment={},
    )
    fd = os.open(folder, os.O_RDONLY)
    with contextlib.closing(TempFile(fd, str(folder))) as temp, pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "MAX_EXPANSION", 1 << 40)
        writer = BundleWriter(temp)
        writer.add(block, zstd(1))
        writer.finish(manifest.encode(), manifest.blocks, bundle_id_of(manifest.encode()), {})
        temp.publish_new("made.mvb")
    os.close(fd)
    return folder / "made.mvb"


@pytest.fixture
def nothing_unfolds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BundleWriter, "_read_back", lambda *_: None)
    monkeypatch.setattr(BundleFile, "check_block", lambda *_: pytest.fail("it was decompressed"))


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


def test_a_small_file_may_be_all_zeros(store: Store, tmp_path: Path) -> None:
    assert store.import_file(made(tmp_path, MAX_SMALL_BUNDLE_BYTES // SLOTS)).logical_bytes > 60 * MIB


def test_the_bound_is_the_files_own_length(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path, 512 * KIB)
    monkeypatch.setattr(foreign, "MAX_SMALL_BUNDLE_BYTES", 0)
    for bound, refused in ((SLOTS * 512 * KIB // path.stat().st_size, True), (1 << 20, False)):
        monkeypatch.setattr(foreign, "MAX_EXPANSION", bound)
        expected = pytest.raises(LimitExceeded) if refused else contextlib.nullcontext()
        with contextlib.closing(BundleFile(os.open(path, os.O_RDONLY), str(path), None)) as file, expected:
            require_whole(file)


def test_what_a_store_compressed_itself_is_never_too_dense_to_be_imported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a session of nothing but zeros."""
    monkeypatch.setattr(foreign, "MAX_SMALL_BUNDLE_BYTES", 0)
    for number, size_bytes in enumerate((1, KIB, 300 * KIB, 4 * MIB)):
        store.write_bundle(
            uri=making.SessionUri("default", f"zeros-{number}"),
            identity=IDENTITY,
            parent=None,
            reused=(),
            blocks=[zeros(size_bytes)],
            session={},
            token_count=4,
            codec=zstd(1),
        )
        target = tmp_path / f"{number}.mvb"
        report = store.export_session(making.SessionUri("default", f"zeros-{number}"), None, target)
        assert report.logical_bytes <= MAX_EXPANSION * report.file_bytes
        with Store.open(tmp_path / f"other-{number}", writable=True) as other:
            assert other.import_file(target).logical_bytes == SLOTS * size_bytes


def test_the_fixture_of_format_1_can_be_exported_and_imported(store: Store, tmp_path: Path) -> None:
    """It has a slot that shrank further than a writer of today would let it."""
    shutil.copytree(Path(making.__file__).parent / "data" / "format-1", tmp_path / "old")
    for folder in [tmp_path / "old", *(path for path in (tmp_path / "old").rglob("*") if path.is_dir())]:
        folder.chmod(0o700)
    with Store.open(tmp_path / "old", writable=True) as old:
        old.export_session(making.PLANES_URI, None, tmp_path / "planes.mvb")
    store.import_file(tmp_path / "planes.mvb")
    with store.open_session(making.PLANES_URI) as reader:
        assert making.contents(reader) == [list(making.PLANES_BYTES)]
    sleep(store, 300)
    require_awake(store, 300)
