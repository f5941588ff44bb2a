"""A manifest that is missing or damaged is told in one sentence with one advice, whoever meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid.errors import BundleMissing, Corruption
from torpor.memvid.index.index import INDEX_FILE
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import URI, flip, manifest_path, sleep

ADVICE = "Put it back, or let `torpor repair --from FOLDER` take it from a backup; without one,"


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_all_tell_of_a_version_alike(store: Store, tmp_path: Path, damage: str) -> None:
    for count in (300, 600):
        last = sleep(store, count)
    path = manifest_path(store, last.bundle_id)
    if damage == "missing":
        path.unlink()
    else:
        flip(path, 200)
    with pytest.raises(Corruption) as raised:
        store.open_session(URI)
    told = str(raised.value)
    assert isinstance(raised.value, BundleMissing) == (damage == "missing")
    assert f"version 2 of {URI}" in told
    assert told.endswith(f"{ADVICE} delete the version (`torpor rm {URI}@2`). Until then no pack is removed.")
    for uri in (None, URI):
        assert [(one.version, one.whole_up_to) for one in store.verify(uri, deep=False).damaged] == [(2, 0)]
    found = [
        *store.verify(deep=False).findings,
        *store.repack().problems,
        *store.repair(dry_run=True).problems,
        *store.usage().problems,
        *store.delete_version(URI, 1).problems,
    ]
    assert [finding.message for finding in found] == [told] * 5
    if damage == "damaged":  # else the version counts as deleted there
        assert [finding.message for finding in store.backup(tmp_path / "backup").problems] == [told]


def test_all_tell_of_a_manifest_of_an_unknown_version_alike(store: Store, store_path: Path) -> None:
    for count in (300, 600):
        last = sleep(store, count)
    flip(manifest_path(store, last.bundle_id), 200)
    store.close()
    (store_path / INDEX_FILE).unlink()
    with Store.open(store_path, writable=True) as again:
        (told,) = {finding.message for finding in again.opening.unreadable}
        unknown = "Nothing else tells which version it is; it may be the newest of a session."
        way = "move it away to do without that version. Until then no pack is removed."
        assert told.endswith(f"{unknown} {ADVICE} {way}")
        found = [*again.verify(deep=False).findings, *again.repack().problems, *again.usage().problems]
        assert [finding.message for finding in found] == [told] * 3


@pytest.mark.parametrize("writable", [True, False])
def test_what_nothing_tells_of_may_be_the_newest_of_a_session(store: Store, store_path: Path, writable: bool) -> None:
    for count in (300, 600):
        last = sleep(store, count)
    path = manifest_path(store, last.bundle_id)
    good = flip(path, 200)
    assert store.unreadable() == [], "the index tells whose it is"
    store.close()
    (store_path / INDEX_FILE).unlink()
    with Store.open(store_path, writable=writable) as again:
        (told,) = again.unreadable()
        assert (told.path, told.code) == (str(path), "bundle_mismatch")
        assert "it may be the newest of a session" in told.message
        path.unlink()
        assert again.unreadable() == []
        path.write_bytes(good)
        if not writable:
            again.verify(deep=False)
        assert again.unreadable() == []
        assert [row.version for row in again.versions(URI)] == [1, 2], "what was put back is its session's"
