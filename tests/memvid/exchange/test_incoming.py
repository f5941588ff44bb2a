"""Handing a bundle over in STORE/incoming: whole, checked, durable and named by its id, or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torpor.memvid import Store
from torpor.memvid.errors import BlockMissing, BundleMissing, Corruption, NoStore, StoreIoError, UnsafePath
from torpor.memvid.exchange.incoming import hand_over, owner_of, take_back
from torpor.tests.memvid import store_making as making


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store that no reader has open, with a session that slept twice: its first bundle stands alone."""
    with Store.open(tmp_path / "store", writable=True) as store:
        first = making.sleep(store, 300)
        making.sleep(store, 600, before=first)
    return tmp_path / "store"


def bundles(place: Path) -> list[Path]:
    return sorted(place.glob("bundles/*/*.mvb"), key=lambda file: file.stat().st_mtime_ns)


def waiting(place: Path) -> list[str]:
    return sorted(file.name for file in (place / "incoming").iterdir()) if (place / "incoming").exists() else []


def test_what_is_handed_over_lies_there_under_its_id(place: Path, tmp_path: Path) -> None:
    source = tmp_path / "any name"
    source.write_bytes(bundles(place)[0].read_bytes())
    bundle_id = hand_over(str(place), str(source))
    assert waiting(place) == [f"{bundle_id.hex()}.mvb"] == [bundles(place)[0].name]
    copy = place / "incoming" / f"{bundle_id.hex()}.mvb"
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o600
    assert (place / "incoming").stat().st_mode & 0o777 == 0o700
    assert owner_of(str(place), bundle_id) == making.URI
    assert hand_over(str(place), str(source)) == bundle_id, "again is the same"
    take_back(str(place), bundle_id)
    take_back(str(place), bundle_id)
    assert waiting(place) == []


def test_a_bundle_that_needs_others_is_refused(place: Path) -> None:
    with pytest.raises(BlockMissing):
        hand_over(str(place), str(bundles(place)[1]))
    assert waiting(place) == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "empty"])
def test_a_damaged_file_is_refused_and_leaves_nothing_behind(place: Path, tmp_path: Path, damage: str) -> None:
    content = bytearray(bundles(place)[0].read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    made = {"cut": content[:-1], "flipped": content, "longer": content + b"x", "empty": b""}[damage]
    (tmp_path / "file").write_bytes(made)
    with pytest.raises(Corruption):
        hand_over(str(place), str(tmp_path / "file"))
    assert waiting(place) == []


def test_a_source_that_is_no_file_is_refused(place: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for source in (tmp_path / "fifo", tmp_path, tmp_path / "none"):
        with pytest.raises(StoreIoError):
            hand_over(str(place), str(source))
    assert waiting(place) == []


def test_nothing_is_handed_over_where_there_is_no_store(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(NoStore):
            hand_over(str(target), str(bundles(place)[0]))
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_folder_that_is_a_link_is_refused_threat_20(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (place / "incoming").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath):
        hand_over(str(place), str(bundles(place)[0]))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_id_that_was_not_handed_over_is_missing(place: Path) -> None:
    with pytest.raises(BundleMissing):
        owner_of(str(place), b"\0" * 32)
    (place / "incoming").mkdir(mode=0o700)
    with pytest.raises(BundleMissing):
        owner_of(str(place), b"\0" * 32)
    (place / "incoming" / f"{'00' * 32}.mvb").symlink_to(bundles(place)[0])
    with pytest.raises(UnsafePath):
        owner_of(str(place), b"\0" * 32)
