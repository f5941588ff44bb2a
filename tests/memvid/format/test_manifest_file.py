"""A manifest's file: its name is the digest of its content, so that no other content is believed under it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3
from torpor.memvid import errors
from torpor.memvid.disk.paths import closing_fd
from torpor.memvid.format.manifest import Manifest, bundle_id_of, encode_manifest_file, read_manifest
from torpor.memvid.limits import MAX_MANIFEST_BYTES
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, manifest_path, put, require_awake, sleep, taking_at_most


def read(file: Path, bundle_id: str) -> Manifest:
    with closing_fd(os.open(file, os.O_RDONLY)) as fd:
        return read_manifest(fd, str(file), bundle_id)


@pytest.fixture
def file(store: Store) -> Path:
    return manifest_path(store, sleep(store, 300).bundle_id)


def id_of(file: Path) -> str:
    return file.stem


def test_a_manifest_reads_back_and_has_its_digest_as_its_name(store: Store, file: Path) -> None:
    manifest = read(file, id_of(file))
    encoded = manifest.encode()
    assert bundle_id_of(encoded) == id_of(file) == blake3(encoded).hexdigest()
    assert file.read_bytes() == encode_manifest_file(encoded)
    row = store.require_session(URI)
    assert (manifest.uri, manifest.version, row.bundle_id) == (URI, 1, id_of(file))


def test_t5_a_flipped_bit_in_any_byte_is_found(file: Path) -> None:
    good = file.read_bytes()
    for byte in range(len(good)):
        bad = bytearray(good)
        bad[byte] ^= 1 << byte % 8
        file.write_bytes(bad)
        with pytest.raises(errors.Corruption):
            read(file, id_of(file))


def test_threat_1_a_manifest_cut_or_longer_is_refused(file: Path) -> None:
    good = file.read_bytes()
    for size in range(len(good)):
        file.write_bytes(good[:size])
        with pytest.raises(errors.Truncated):
            read(file, id_of(file))
    file.write_bytes(good + b"\0")
    with pytest.raises(errors.TrailingData):
        read(file, id_of(file))


def test_a_manifest_longer_than_any_of_ours_is_not_read(file: Path) -> None:
    os.truncate(file, 1 << 40)
    with taking_at_most(1 << 20), pytest.raises(errors.LimitExceeded, match=str(MAX_MANIFEST_BYTES)):
        read(file, id_of(file))


def test_threat_23_a_manifest_of_a_later_version_is_refused_and_not_touched(store: Store, file: Path) -> None:
    later = making.of_a_later_version(file.read_bytes())
    file.write_bytes(later)
    with pytest.raises(errors.UnsupportedFormat):
        store.open_session(URI)
    assert file.read_bytes() == later


def test_threat_7_gm2_files_of_two_sessions_swapped_are_refused(store: Store, file: Path) -> None:
    other = manifest_path(store, sleep(store, 400, uri=OTHER_URI, seed=2).bundle_id)
    one, two = file.read_bytes(), other.read_bytes()
    put(file, two)
    put(other, one)
    for uri in (URI, OTHER_URI):
        with pytest.raises(errors.BundleMismatch):
            store.open_session(uri)
    put(file, one)
    put(other, two)
    require_awake(store, 300)
    require_awake(store, 400, uri=OTHER_URI, seed=2)


def test_threat_7_gm3_a_row_pointed_at_another_version_is_refused(store: Store, file: Path) -> None:
    second = sleep(store, 400)
    other = sleep(store, 300, uri=OTHER_URI, seed=2)
    change = store.index._connection.execute
    change("UPDATE versions SET version = 5 WHERE bundle_id = ?", (bytes.fromhex(id_of(file)),))
    with pytest.raises(errors.VersionMismatch):
        store.open_session(URI)
    change("UPDATE versions SET name = 'agent', version = 7 WHERE bundle_id = ?", (bytes.fromhex(other.bundle_id),))
    with pytest.raises(errors.OwnerMismatch):
        store.open_session(URI)
    require_awake(store, 400, version=second.version)


def test_a_manifest_that_is_sealed_and_no_manifest_is_refused(store: Store, file: Path) -> None:
    for encoded in (b"", b"\xc0", b"\x80", b"\x81\xa1a\xa1b", os.urandom(40)):
        bundle_id = bundle_id_of(encoded)
        put(manifest_path(store, bundle_id), encode_manifest_file(encoded))
        with pytest.raises(errors.Corruption):
            store.open_bundle(bundle_id)
    with Store.open(store.path, writable=False) as again:
        assert len(again.opening.unreadable) == 5
        require_awake(again, 300)
