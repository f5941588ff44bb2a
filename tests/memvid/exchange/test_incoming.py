"""Handing a file over in STORE/incoming: whole, checked, durable and named by its id, or not there at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid.errors import BundleMissing, NoStore, UnsafePath
from torpor.memvid.exchange.incoming import hand_over, owner_of, take_back
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.format_1_stores import CASES, SMALL, bundle_of


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store that no reader has open."""
    with Store.open(tmp_path / "store", writable=True) as store:
        making.sleep(store, 300)
    return tmp_path / "store"


@pytest.fixture
def source(place: Path, tmp_path: Path) -> Path:
    with Store.open(place, writable=False) as store:
        store.export_session(making.URI, None, tmp_path / "any name")
    return tmp_path / "any name"


def waiting(place: Path) -> list[str]:
    return sorted(file.name for file in (place / "incoming").iterdir()) if (place / "incoming").exists() else []


def test_what_is_handed_over_lies_there_under_its_id(place: Path, source: Path) -> None:
    bundle_id = hand_over(str(place), str(source))
    assert waiting(place) == [f"{bundle_id}.mvb"]
    assert (place / "versions" / f"{bundle_id}.mvm").exists()
    copy = place / "incoming" / f"{bundle_id}.mvb"
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o600
    assert (place / "incoming").stat().st_mode & 0o777 == 0o700
    assert owner_of(str(place), bundle_id) == making.URI
    assert hand_over(str(place), str(source)) == bundle_id, "again is the same"
    take_back(str(place), bundle_id)
    take_back(str(place), bundle_id)
    assert waiting(place) == []


def test_a_bundle_of_format_1_is_handed_over_as_well(place: Path) -> None:
    bundle = bundle_of(CASES / "small", making.OTHER_URI)
    bundle_id = bundle.stem
    assert hand_over(str(place), str(bundle)) == bundle_id
    assert owner_of(str(place), bundle_id) == making.OTHER_URI
    with Store.open(place, writable=True) as store:
        assert store.adopt_incoming(bundle_id).bundle_id == bundle_id
        making.require_awake(store, 300, uri=making.OTHER_URI, seed=2, **SMALL)


def test_nothing_is_handed_over_where_there_is_no_store(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(NoStore):
            hand_over(str(target), str(source))
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_folder_that_is_a_link_is_refused_threat_20(place: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (place / "incoming").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath):
        hand_over(str(place), str(source))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_id_that_was_not_handed_over_is_missing(place: Path, source: Path) -> None:
    with pytest.raises(BundleMissing):
        owner_of(str(place), "00" * 32)
    (place / "incoming").mkdir(mode=0o700)
    with pytest.raises(BundleMissing):
        owner_of(str(place), "00" * 32)
    (place / "incoming" / f"{'00' * 32}.mvb").symlink_to(source)
    with pytest.raises(UnsafePath):
        owner_of(str(place), "00" * 32)
